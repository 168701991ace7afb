"""Who vouches for a large index, and what a loss of power during the last sync leaves."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.nvme_peer import Peer
from support.nvme_rig import Rig, config_for, key

from kvcascade.errors import CorruptionError, TierIOError
from kvcascade.tiers.nvme.index import index_pages
from kvcascade.tiers.nvme.index.clean_close import NAME, read_mark, write_mark
from kvcascade.tiers.nvme.index.index_file import DATA_NAME
from kvcascade.tiers.nvme.offline.maintenance import Drop, take_entries
from kvcascade.tiers.nvme.offline.reader import IndexReader, locate, read_description
from kvcascade.tiers.nvme.tier import NvmeTierConfig

SLOTS, PER_SEGMENT = 256, 32
PAGE = 4096
HEADS = 2
EVERY = 5
"""One in so many images is tried."""


@pytest.fixture(autouse=True)
def every_file_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_pages, "ALWAYS_CHECKED_BYTES", 0)


@pytest.fixture
def config(tmp_path: Path) -> NvmeTierConfig:
    return config_for([tmp_path], slots=SLOTS, per_segment=PER_SEGMENT)


def filled(config: NvmeTierConfig) -> Path:
    """Store as much as there is room for, and close; the directory of the index."""
    rig = Rig(config)
    rig.store_bit_by_bit([key(i) for i in range(SLOTS)])
    rig.close()
    return rig.tier.namespace.index_folder


def is_vouched_for(index: Path) -> bool:
    """True if the mark is that of the newest transaction."""
    return index_pages.check_pages(index)


def damage_a_leaf(index: Path) -> None:
    """Zero the page that holds the entry of a block, as if it had not been written."""
    data = bytearray((index / DATA_NAME).read_bytes())
    while (at := data.find(key(SLOTS // 2))) >= 0:  # older copies of it are on free pages
        data[at // PAGE * PAGE : (at // PAGE + 1) * PAGE] = bytes(PAGE)
    (index / DATA_NAME).write_bytes(data)


def test_what_is_vouched_for_is_not_looked_at(config: NvmeTierConfig) -> None:
    index = filled(config)
    assert is_vouched_for(index)
    damage_a_leaf(index)
    assert is_vouched_for(index), "or the time to open would grow with the tier"


@pytest.mark.parametrize(
    "mark", [None, b"", b"KVCCLEAN", b"x" * 24, b"x" * 1000, "older", "folder"]
)
def test_without_a_mark_every_page_is(config: NvmeTierConfig, mark: bytes | str | None) -> None:
    index = filled(config)
    if mark == "older":
        newest = read_mark(index)
        assert newest is not None
        write_mark(index, newest - 1)
    else:
        (index / NAME).unlink()
    if isinstance(mark, bytes):
        (index / NAME).write_bytes(mark)
    elif mark == "folder":
        (index / NAME).mkdir()
    assert not is_vouched_for(index)
    damage_a_leaf(index)
    with pytest.raises(CorruptionError, match="the index in .* is damaged"):
        Rig(config)


def images(before: bytes, after: bytes) -> Iterator[bytes]:
    """What the disk may hold in the middle of a sync: pages that changed are there, or not yet."""
    before = before.ljust(len(after), b"\0")
    pages = range(0, len(after), PAGE)
    changed = [at for at in pages if before[at : at + PAGE] != after[at : at + PAGE]]
    assert len(changed) > 2 * HEADS
    for step in (1, -1):
        image = bytearray(before)
        for number, at in enumerate(changed[::step][:-1]):
            image[at : at + PAGE] = after[at : at + PAGE]
            if number % EVERY == 0:
                yield bytes(image)
    for at in changed[::EVERY]:
        yield after[:at] + before[at : at + PAGE] + after[at + PAGE :]


def test_power_is_lost_during_the_last_sync(config: NvmeTierConfig) -> None:
    index = filled(config)
    data = index / DATA_NAME
    rig = Rig(config)
    before, mark = data.read_bytes(), (index / NAME).read_bytes()  # the start has synced this
    for start in range(1000, 1000 + 4 * SLOTS, 8):
        rig.store([key(i) for i in range(start, start + 8)])
    rig.close()
    whole = shutil.copytree(config.paths[0], config.paths[0].with_name("whole"))
    counts = {"served": 0, "refused": 0}
    for image in images(before, data.read_bytes()):
        shutil.rmtree(config.paths[0])
        shutil.copytree(whole, config.paths[0])
        data.write_bytes(image)
        (index / NAME).write_bytes(mark)  # it is written after the sync only
        try:
            rig = Rig(config)
        except CorruptionError:
            counts["refused"] += 1
            continue
        assert not rig.tier.report.was_clean
        rig.store([key(i) for i in range(9000, 9000 + SLOTS)])
        assert all(rig.check(key(i)) for i in range(9000, 9000 + SLOTS))
        rig.check_sums()
        rig.close()
        counts["served"] += 1
    assert all(counts.values()), "the simulation must bite"


def test_the_mark_comes_after_the_sync(
    config: NvmeTierConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []

    class Noting:
        def __init__(self, env: object) -> None:
            self._env = env

        def __getattr__(self, name: str) -> object:
            steps.append(name)
            return getattr(self._env, name)

    def mark(path: Path, transaction: int) -> None:
        steps.append("mark")
        assert transaction == rig.tier.index._env.info()["last_txnid"]

    rig = Rig(config)
    monkeypatch.setattr("kvcascade.tiers.nvme.index.block_index.write_mark", mark)
    rig.tier.index._env = Noting(rig.tier.index._env)  # type: ignore[assignment]
    rig.close()
    last = [step for step in steps if step in ("begin", "sync", "mark")][-3:]
    assert last == ["begin", "sync", "mark"]


def test_the_last_to_close_vouches(config: NvmeTierConfig) -> None:
    index = filled(config)
    before = read_mark(index)
    with Peer(config) as first, Peer(config):
        assert not is_vouched_for(index)
        first.ask("close")
        assert read_mark(index) == before
    assert is_vouched_for(index)


def test_nobody_vouches_for_what_a_killed_process_left(config: NvmeTierConfig) -> None:
    index = filled(config)
    with Peer(config), Peer(config) as killed:
        killed.kill()
    assert not is_vouched_for(index)
    Rig(config).close()
    assert is_vouched_for(index)


def test_a_mark_that_cannot_be_written_costs_a_look(config: NvmeTierConfig) -> None:
    index = filled(config)
    rig = Rig(config)
    (index / f"{NAME}.tmp").mkdir()
    with pytest.raises(TierIOError):
        write_mark(index, 1)
    rig.close()
    assert not is_vouched_for(index)
    (index / f"{NAME}.tmp").rmdir()
    rig = Rig(config)
    assert sum(rig.check(key(i)) for i in range(SLOTS)) == SLOTS
    rig.close()
    assert is_vouched_for(index)


def test_what_a_command_took_away_is_looked_at(config: NvmeTierConfig) -> None:
    index = filled(config)
    with IndexReader(index) as reader:
        raw = reader.raw(key(1))
    assert raw is not None
    (location,) = locate(config.paths)
    assert take_entries(read_description(location), [Drop(key(1), raw)]) == 1
    assert not is_vouched_for(index)
    rig = Rig(config)
    assert sum(rig.check(key(i)) for i in range(SLOTS)) == SLOTS - 1
    rig.check_sums()
    rig.close()
