"""A start beside others: commands say nothing about weights, and nothing shared is made anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.nvme_rig import Rig, config_for, key

from kvcascade.errors import CorruptionError
from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.namespace import OWNERS
from kvcascade.tiers.nvme.writer.owners import Owners

KEYS = [key(i) for i in range(8)]
Beside = Callable[[Path, bool], None]


@pytest.fixture
def beside() -> Iterator[Beside]:
    """Lets somebody more have a namespace open, an engine or a guest, until the test ends."""
    there: list[Owners] = []

    def come(folder: Path, is_guest: bool) -> None:
        owners = Owners(RealFileSystem().byte_locks(folder / OWNERS), str(folder))
        owners.enter(is_guest=is_guest, leaves_state=False)
        owners.leave_gate()
        there.append(owners)

    yield come
    for owners in there:
        owners.close()


def closed(path: Path, *, was_reset: bool) -> Path:
    """A tier of eight blocks, the last thing of an engine that was reset before, or was not."""
    rig = Rig(config_for([path], slots=16))
    if was_reset:
        rig.reset()
    rig.store(KEYS, version=int(was_reset))
    rig.close()
    return rig.tier.namespace.folders[0]


@pytest.mark.parametrize("was_reset", [False, True])
def test_a_guest_vouches_for_no_weights(tmp_path: Path, beside: Beside, was_reset: bool) -> None:
    beside(closed(tmp_path, was_reset=was_reset), True)
    rig = Rig(config_for([tmp_path], slots=16))
    assert not rig.tier.report.is_alone
    assert [rig.check(h) for h in KEYS] == [not was_reset] * 8
    rig.store(KEYS)
    for _ in range(2):
        rig.close()
        rig = Rig(config_for([tmp_path], slots=16))
        assert all(rig.check(h) for h in KEYS), "nobody was reset since"
    rig.close()


def test_engines_that_were_reset_keep_what_is_theirs(tmp_path: Path, beside: Beside) -> None:
    folder = closed(tmp_path, was_reset=True)
    for is_guest in (False, True):
        beside(folder, is_guest)
    rig = Rig(config_for([tmp_path], slots=16))
    assert rig.tier.index.count() == 8
    rig.close()


def test_a_lost_epoch_is_not_made_anew_beside_others(tmp_path: Path, beside: Beside) -> None:
    """They map the old file: two would count apart, and a reset of one would not be the other's."""
    folder = closed(tmp_path, was_reset=False)
    beside(folder, False)
    (folder / "state" / "epoch.arr").unlink()
    for _ in range(2):
        with pytest.raises(CorruptionError, match="epoch.arr was lost while other processes"):
            Rig(config_for([tmp_path], slots=16))
        assert not (folder / "state" / "epoch.arr").exists()
