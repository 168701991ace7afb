"""The mover over a real arena whose name is gone: blocks go down, come up, and nothing stays."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from support.mover_rig import LIMIT_S
from support.nvme_rig import BLOCK, Rig, config_for, content, key

from kvcascade.assembly.nvme_parts import link_by_process, link_by_threads, open_mover
from kvcascade.config.schema import NvmeTierOptions
from kvcascade.config.sizes import Share
from kvcascade.manager.flow import Link
from kvcascade.tiers.base import SlotSpec
from kvcascade.tiers.cpu.arena import Arena, ArenaRole
from kvcascade.tiers.cpu.header import ArenaGeometry
from kvcascade.tiers.cpu.locks import try_flock

SLOTS = 16
HASHES = [key(i) for i in range(8)]


@pytest.fixture
def arena() -> Iterator[Arena]:
    geometry = ArenaGeometry.fit((SLOTS + 1) * BLOCK, BLOCK, 1)
    role = ArenaRole.scheduler(expect_workers=False)
    with TemporaryDirectory(dir="/dev/shm") as folder:
        with Arena.open(geometry, "movers", role, arena_dir=folder) as arena:
            Path(arena.path).unlink()  # as when all have mapped it
            yield arena
        assert not list(Path(folder).iterdir())


def there_and_back(rig: Rig, arena: Arena, link: Link) -> None:
    for slot, block_hash in enumerate(HASHES):
        arena.slot_view(slot)[:] = content(block_hash)
    statuses = rig.begin_store(HASHES)
    spec = rig.backend.get_load_store_spec(HASHES, statuses)
    assert link.down.transfer_async(1, (SlotSpec(np.arange(8, dtype=np.int32)), spec))
    link.down.wait({1}, LIMIT_S)
    assert [result.success for result in link.down.get_finished()] == [True]
    for status in statuses:
        status.ref_cnt = 0
    spec = rig.backend.get_load_store_spec(HASHES, statuses)
    assert link.up.transfer_async(2, (spec, SlotSpec(np.arange(8, 16, dtype=np.int32))))
    link.up.wait({2}, LIMIT_S)
    assert [result.success for result in link.up.get_finished()] == [True]
    for slot, block_hash in enumerate(HASHES, 8):
        assert arena.slot_view(slot) == content(block_hash)
    assert link.down.shutdown() and link.up.shutdown()


@pytest.mark.parametrize("is_huge", [False, True], ids=["small pages", "huge pages"])
@pytest.mark.parametrize("has_prefault", [False, True])
def test_by_a_process(arena: Arena, tmp_path: Path, has_prefault: bool, is_huge: bool) -> None:
    arena.is_huge = is_huge
    rig = Rig(config_for([tmp_path], slots=32))
    options = NvmeTierOptions("tiers[1]", (tmp_path,), Share(Fraction(1, 2)))
    mover = open_mover(arena, rig.tier, options, has_prefault)
    there_and_back(rig, arena, link_by_process(rig.tier, mover))
    assert mover.close() and mover.pid is None
    rig.close()


def test_by_threads(arena: Arena, tmp_path: Path) -> None:
    rig = Rig(config_for([tmp_path], slots=32))
    with ThreadPoolExecutor(2) as executor:
        there_and_back(rig, arena, link_by_threads(arena, rig.tier, executor, executor))
    rig.close()


def test_a_duplicate_holds_no_lock(arena: Arena) -> None:
    """A mover that lives a moment longer than its engine shall not keep the arena's locks."""
    descriptor = arena.duplicate()
    try:
        assert not try_flock(descriptor, exclusive=True), "the arena's own is another one"
        arena.close()
        assert try_flock(descriptor, exclusive=True)
    finally:
        os.close(descriptor)
