"""A share that is unmounted while an engine serves, imitated by moving its folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from contract.remote_contract import LIMIT_S, an_object, buffers, names
from support.keys import key, keys
from support.remote_rig import RemoteRig

from kvcascade.config.options import At
from kvcascade.config.remote import parse_remote
from kvcascade.tiers.remote.base import Cause, RemoteEngine, RemoteOutcome
from kvcascade.tools.commands.check.config_check import problem_of

pytest.importorskip("obstore", reason='no object stores: install obstore (extra "s3")')

from kvcascade.tiers.remote.engines.object_store import open_object_store  # noqa: E402 - as above

OK, IO_ERROR = RemoteOutcome.OK, RemoteOutcome.IO_ERROR
COUNTER = "space/generation"
CALLS: dict[str, Callable[[RemoteEngine], RemoteOutcome]] = {
    "exist_many": lambda engine: engine.exist_many(names(2), LIMIT_S)[1],
    "get_into": lambda engine: engine.get_into(names(2), buffers(2), LIMIT_S)[1],
    "put": lambda engine: engine.put(names(2, 5), [an_object(5)] * 2, LIMIT_S)[1],
    "renew": lambda engine: engine.renew(names(2), [an_object(1)] * 2, LIMIT_S)[1],
    "remove": lambda engine: engine.remove(names(2), LIMIT_S)[1],
    "counter": lambda engine: engine.counter("other/generation", 1, LIMIT_S).outcome,
    "advance": lambda engine: engine.advance(COUNTER, 1, LIMIT_S).outcome,
    "list_objects": lambda engine: next(iter(engine.list_objects("space/", LIMIT_S))).outcome,
}


class Share:
    """A folder that can be unmounted and mounted again."""

    def __init__(self, place: Path) -> None:
        self.at = place / "share"
        self.folder = self.at / "kv"
        self._away = place / "away"

    def unmount(self, *, leaves_folder: bool) -> None:
        """With or without a folder of the local disk under the place of the engine's."""
        self.at.rename(self._away)
        if leaves_folder:
            self.folder.mkdir(parents=True)

    def mount(self, *, has_other_numbers: bool = False) -> None:
        """A copy has other inodes, as the same share has another device."""
        shutil.rmtree(self.at, ignore_errors=True)
        if has_other_numbers:
            shutil.copytree(self._away, self.at)
        else:
            self._away.rename(self.at)

    def local_files(self) -> list[Path]:
        """Return the paths on the local disk while the share is away, without the folder itself."""
        return [path for path in self.at.rglob("*") if path != self.folder]


@pytest.fixture
def share(tmp_path: Path) -> Share:
    return Share(tmp_path)


@pytest.fixture
def engine(share: Share) -> Iterator[RemoteEngine]:
    made = open_object_store(share.folder.as_uri(), 10.0, 10.0)
    yield made
    made.close()


def fill(engine: RemoteEngine) -> None:
    """As an engine begins: with its counter."""
    assert engine.counter(COUNTER, 1000, LIMIT_S).value == 1000
    assert engine.put(names(2), [an_object(1), an_object(2)], LIMIT_S) == [OK] * 2


@pytest.mark.parametrize("leaves_folder", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_an_unmounted_share_is_a_failure_and_nothing_is_written_to_the_local_disk(
    share: Share, engine: RemoteEngine, call: str, leaves_folder: bool
) -> None:
    fill(engine)
    share.unmount(leaves_folder=leaves_folder)
    assert CALLS[call](engine) is IO_ERROR
    assert share.at.exists() is leaves_folder and not share.local_files()
    share.mount()
    assert CALLS[call](engine) in (OK, RemoteOutcome.EXISTS), "without a restart"


@pytest.mark.parametrize("leaves_folder", [True, False])
def test_the_log_says_that_a_share_is_unmounted(
    share: Share, engine: RemoteEngine, leaves_folder: bool
) -> None:
    fill(engine)
    options = parse_remote(At("tiers[1]"), {"url": share.folder.as_uri()})
    assert problem_of(engine, options) is None
    share.unmount(leaves_folder=leaves_folder)
    assert engine.explain(LIMIT_S) is Cause.OTHER_FOLDER
    said = problem_of(engine, options)
    assert said is not None and "lost the folder that this engine opened; mount the share" in said
    assert share.at.exists() is leaves_folder and not share.local_files()
    share.mount()
    assert problem_of(engine, options) is None


def test_the_breaker_opens_and_blocks_are_there_after_the_mount(
    share: Share, engine: RemoteEngine
) -> None:
    rig = RemoteRig(engine)
    assert rig.write(keys(2)) == [OK] * 2
    share.unmount(leaves_folder=True)
    found = [*rig.write([key(7)]), *rig.write([key(8)]), *rig.read(keys(2))]
    assert {*found} <= {IO_ERROR, RemoteOutcome.RESTING} and IO_ERROR in found
    assert not share.local_files()
    share.mount()
    rig.clock.advance(60.0)
    assert rig.read(keys(2)) == rig.write([key(7)]) + [OK] == [OK] * 2


@pytest.mark.parametrize("is_raised", [True, False])
@pytest.mark.parametrize("leaves_folder", [True, False])
def test_a_share_that_is_mounted_again_with_other_numbers_is_used(
    share: Share, engine: RemoteEngine, is_raised: bool, leaves_folder: bool
) -> None:
    if is_raised:
        other = open_object_store(share.folder.as_uri(), 10.0, 10.0)
        assert other.advance(COUNTER, 1000, LIMIT_S).value == 1000
        other.close()
    fill(engine)
    share.unmount(leaves_folder=leaves_folder)
    assert engine.exist_many(names(2), LIMIT_S) == [IO_ERROR] * 2
    share.mount(has_other_numbers=True)
    assert engine.exist_many(names(2), LIMIT_S) == [OK] * 2
    shutil.rmtree(share.folder / COUNTER)
    assert engine.put(names(1, 5), [an_object(5)], LIMIT_S) == [OK], "its numbers are known now"


@pytest.mark.parametrize("kind", ["other value", "longer", "pipe", "folder"])
def test_a_folder_with_another_counter_is_not_the_one_that_was_opened(
    share: Share, engine: RemoteEngine, kind: str
) -> None:
    """Another engine may have started there meanwhile, and begun the counter of the namespace."""
    fill(engine)
    share.unmount(leaves_folder=True)
    begin = share.folder / COUNTER / "begin"
    begin.parent.mkdir(parents=True)
    if kind == "pipe":
        os.mkfifo(begin)
    elif kind == "folder":
        begin.mkdir()
    else:
        begin.write_bytes(b"1001" if kind == "other value" else b"1000".ljust(30))
    local = share.local_files()
    assert engine.put(names(1, 5), [an_object(5)], LIMIT_S) == [IO_ERROR]
    assert engine.advance(COUNTER, 1, LIMIT_S).outcome is IO_ERROR
    assert engine.explain(LIMIT_S) is Cause.OTHER_FOLDER
    assert share.local_files() == local


def test_what_was_opened_and_never_read_is_known_too(share: Share, engine: RemoteEngine) -> None:
    assert engine.exist_many(names(1), LIMIT_S) == [RemoteOutcome.ABSENT]
    share.unmount(leaves_folder=True)
    assert engine.put(names(1), [an_object(1)], LIMIT_S) == [IO_ERROR]
    assert not share.local_files()
    share.mount()
    assert engine.put(names(1), [an_object(1)], LIMIT_S) == [OK]


@pytest.fixture
def next_engine(share: Share, engine: RemoteEngine) -> Iterator[RemoteEngine]:
    """The engine of the next process; it knows what the one before saw."""
    fill(engine)
    made = open_object_store(share.folder.as_uri(), 10.0, 10.0)
    made.resume(engine.memory())
    yield made
    made.close()


@pytest.mark.parametrize("place", ["missing", "empty", "of another engine"])
@pytest.mark.parametrize("call", CALLS)
def test_the_next_process_writes_to_no_other_folder(
    share: Share, next_engine: RemoteEngine, call: str, place: str
) -> None:
    share.unmount(leaves_folder=place != "missing")
    if place == "of another engine":
        other = open_object_store(share.folder.as_uri(), 10.0, 10.0)
        assert other.counter(COUNTER, 1001, LIMIT_S).value == 1001
        other.close()
    local = share.local_files()
    assert CALLS[call](next_engine) is IO_ERROR
    assert next_engine.explain(LIMIT_S) is Cause.OTHER_FOLDER
    assert share.at.exists() is (place != "missing") and share.local_files() == local
    share.mount(has_other_numbers=True)
    assert CALLS[call](next_engine) in (OK, RemoteOutcome.EXISTS)
    assert next_engine.explain(LIMIT_S) is None


def test_the_next_process_begins_a_counter_that_the_folder_lost(
    share: Share, next_engine: RemoteEngine
) -> None:
    shutil.rmtree(share.folder / COUNTER)
    assert next_engine.explain(LIMIT_S) is None
    assert next_engine.counter(COUNTER, 2000, LIMIT_S).value == 2000


def test_an_engine_that_opened_nothing_has_no_memory(engine: RemoteEngine) -> None:
    assert not engine.memory()
    fill(engine)
    assert engine.memory()
