"""One of several paths fails: the others take the writes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fault_rig import PER_SEGMENT, FaultRig
from support.keys import keys
from support.memory_file_system import MemoryFileSystem

from kvcascade.tiers.breaker import REST_S
from kvcascade.tiers.nvme.disk.filesystem import File
from kvcascade.tiers.nvme.path.writer.path_capacity import PATH_REST_S, RETRY_AFTER_S

SEGMENTS = 16
BATCH = 32
"""Enough blocks to be spread over the paths."""
ROOTS = (Path("/one"), Path("/two"))
EVERYTHING = 1 << 40
FOR_EVER = 1 << 30


class OneFullPath(MemoryFileSystem):
    """The second path has no room for another segment."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full = True

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> File:
        if create and self.is_full and path.suffix == ".safetensors" and ROOTS[1] in path.parents:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return super().open(path, create=create, direct=direct)


@pytest.fixture
def rig() -> Iterator[FaultRig]:
    rig = FaultRig(ROOTS, top_slots=2 * BATCH, nvme_slots=PER_SEGMENT * SEGMENTS)
    yield rig
    rig.memory_fs.heal()
    rig.close()


def spoil(rig: FaultRig, part: int) -> None:
    """The device of this path can neither read nor write the segments that there are."""
    (namespace,) = rig.nodes.core.namespaces.values()
    for number in namespace.space.segments:
        if number % 2 == part:
            path = namespace.home.segments.path_of(number)
            rig.memory_fs.spoil(path, 0, EVERYTHING)


def paths_of(rig: FaultRig, first: int, end: int) -> set[int]:
    """Numbers of the paths in which blocks lie."""
    slots = map(rig.slot_of, keys(first, end))
    return {slot // PER_SEGMENT % 2 for slot in slots if slot >= 0}


def fill(rig: FaultRig, first: int, end: int) -> None:
    for i in range(first, end, BATCH):
        rig.on_disk(keys(i, i + BATCH))
        rig.clock.advance(RETRY_AFTER_S)


def test_the_other_path_takes_the_writes(rig: FaultRig) -> None:
    fill(rig, 0, PER_SEGMENT * SEGMENTS)
    assert paths_of(rig, 0, 1000) == {0, 1}
    spoil(rig, 1)
    assert rig.store(keys(1000, 1000 + BATCH))
    rig.write_down()
    lost = rig.counters.demote_failed_blocks
    assert 0 < lost <= BATCH
    rig.clock.advance(REST_S / 2)
    for i in range(1100, 1100 + 4 * BATCH, BATCH):
        rig.on_disk(keys(i, i + BATCH))
        assert paths_of(rig, i, i + BATCH) == {0}
        assert rig.read(keys(i, i + BATCH)) == BATCH
        rig.forget_top()
    assert rig.counters.demote_failed_blocks == lost
    rig.clock.advance(PATH_REST_S)
    assert rig.store(keys(2000, 2000 + BATCH))
    rig.write_down()
    assert rig.counters.demote_failed_blocks > lost, "it is tried again after its rest"
    rig.recovers(3000)
    rig.on_disk(keys(3100, 3100 + BATCH))
    assert 1 in paths_of(rig, 3100, 3100 + BATCH)


def test_a_path_that_cannot_grow_leaves_the_others_alone() -> None:
    fs = OneFullPath()
    rig = FaultRig(ROOTS, fs, nvme_slots=PER_SEGMENT * SEGMENTS)
    fill(rig, 0, PER_SEGMENT * SEGMENTS // 2)
    assert paths_of(rig, 0, 1000) == {0}
    assert rig.counters.demote_openings == 0
    fs.is_full = False
    rig.clock.advance(RETRY_AFTER_S)
    fill(rig, 1000, 1000 + PER_SEGMENT * SEGMENTS)
    assert 1 in paths_of(rig, 1000, 2000), "and it grows later"
    rig.close()


def test_the_tier_rests_if_all_paths_fail(rig: FaultRig) -> None:
    fill(rig, 0, 2 * BATCH)
    rig.memory_fs.fail("pwritev", errno.EIO, times=FOR_EVER)
    assert rig.store(keys(1000, 1000 + BATCH))
    assert not rig.write_down()
    assert rig.counters.demote_openings > 0
    written = rig.memory_fs.calls["pwritev"]
    for _ in range(50):
        rig.manager.end_step()
    assert rig.memory_fs.calls["pwritev"] == written
    rig.memory_fs.heal()
    rig.clock.advance(PATH_REST_S + REST_S)
    assert rig.write_down()
