"""A cascade whose mover stands still: reads become misses in time, slots stay out of use."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clock import ManualClock
from support.mover_rig import ARENA_SLOTS, LIMIT_S, MoverRig
from support.nvme_rig import BLOCK, content, key

from kvcascade.manager.base import LookupState
from kvcascade.manager.cascading import CascadingOffloadingManager, ManagerOptions, build_cascade
from kvcascade.manager.flow import Link
from kvcascade.manager.level import Tier
from kvcascade.manager.request import Request
from kvcascade.tiers.base import BlockHash
from kvcascade.tiers.cpu.cpu_backend import CpuBackend
from kvcascade.tiers.policies import create

DEADLINE_S = 10.0
HASHES = [key(i) for i in range(16)]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[MoverRig]:
    rig = MoverRig(tmp_path, has_process=True)
    rig.store(1, HASHES)
    yield rig
    rig.close()


def ask(manager: CascadingOffloadingManager, request: Request) -> set[LookupState]:
    """One step in which a request asks for all blocks."""
    answers = {manager.lookup_block(block_hash, request) for block_hash in HASHES}
    manager.end_step()
    return answers


def slots_of(manager: CascadingOffloadingManager, hashes: list[BlockHash]) -> list[int]:
    """Where blocks lie in the arena, as a worker is told."""
    spec = manager.prepare_load(hashes)
    manager.complete_load(hashes)
    return spec.slots.tolist()  # type: ignore[attr-defined, no-any-return]


def test_a_mover_that_stands_still_costs_misses_and_nothing_else(rig: MoverRig) -> None:
    clock = ManualClock()
    top = CpuBackend(BLOCK, ARENA_SLOTS)
    manager = build_cascade(
        [
            Tier("cpu", top, create("lru", ARENA_SLOTS)),
            Tier("nvme", rig.rig.backend, rig.rig.policy),
        ],
        [Link(rig.down, rig.up)],
        ManagerOptions(promotion_deadline_s=DEADLINE_S, load_or_recompute=False),
        clock,
    )
    pid = rig.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    first = Request()
    assert ask(manager, first) == {LookupState.PENDING}
    free = top.get_num_free_blocks()
    clock.advance(DEADLINE_S)
    assert ask(manager, first) == {LookupState.MISS}
    manager.finish_request(first)
    for _ in range(3):
        manager.end_step()
    assert top.get_num_free_blocks() == free == ARENA_SLOTS - len(HASHES), "it may still write them"
    os.kill(pid, signal.SIGCONT)
    assert rig.process.wait(lambda: rig.rig.tier.store.counters.blocks_read > 0, LIMIT_S)
    manager.end_step()
    assert ask(manager, Request()) == {LookupState.HIT}, "what came late is there"
    for slot, block_hash in zip(slots_of(manager, HASHES), HASHES, strict=True):
        assert rig.view(slot) == content(block_hash)
