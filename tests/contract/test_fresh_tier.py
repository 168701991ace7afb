"""A fresh tier below is filled as fast as blocks come: it loses none while it may grow.

Driven through the manager and the tier's contract only. `MAKERS` names the tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.clock import ManualClock
from support.executors import InlineExecutor, SteppingExecutor
from support.keys import keys as keys_between
from support.memory_backend import MemoryBackend
from support.nvme_rig import BLOCK, Rig, config_for, content

from kvcascade.handlers.node.nvme_handlers import NvmeLoadHandler, NvmeStoreHandler
from kvcascade.manager.cascading import ManagerOptions, WriteMode, build_cascade
from kvcascade.manager.flow import Link
from kvcascade.manager.level import Tier
from kvcascade.tiers.base import SlotSpec
from kvcascade.tiers.nvme.writer.growth import PATIENCE_S
from kvcascade.tiers.policies import create

SLOTS = 256
STEPS_MAX = 10_000
BURST = keys_between(SLOTS)


class Engine:
    """A manager over memory and a fresh tier that has one segment; its copies run at once."""

    def __init__(self, path: Path, mode: WriteMode, growth: Executor) -> None:
        config = replace(config_for([path], slots=SLOTS), ready_bytes=1)
        self.clock, self.growth = ManualClock(), growth
        self.below = Rig(config, executor=growth, clock=self.clock)
        self.top = MemoryBackend(BLOCK, SLOTS, medium="CPU")
        store, copies = self.below.tier.store, InlineExecutor()
        down = NvmeStoreHandler(store, self.top.view, copies)
        up = NvmeLoadHandler(store, self.top.view, copies)
        self.manager = build_cascade(
            [
                Tier("cpu", self.top, create("lru", SLOTS)),
                Tier("nvme", self.below.backend, self.below.policy),
            ],
            [Link(down, up)],
            ManagerOptions(write_mode=mode, dirty_age_s=0.0, shutdown_flush_s=5.0),
            self.clock,
            self.pause,
        )

    def store(self) -> None:
        """All blocks in one step."""
        output = self.manager.prepare_store(BURST)
        assert output is not None and output.block_hashes_to_store == BURST
        assert isinstance(output.store_spec, SlotSpec)
        for block_hash, slot in zip(BURST, output.store_spec.slots.tolist(), strict=True):
            self.top.view(slot)[:] = content(block_hash)
        self.manager.complete_store(set(BURST))

    def pause(self, seconds: float) -> None:
        """What a flush does while it waits."""
        self.clock.advance(seconds)
        self.growth.submit(int).result()  # growth is not behind

    @property
    def is_written(self) -> bool:
        """True if all blocks have landed below."""
        return self.manager.counters.links[0].demoted_blocks == SLOTS

    @property
    def evicted(self) -> int:
        """Blocks that left the tier below."""
        return self.manager.counters.evicted_blocks[1]

    def below_has(self) -> int:
        """Blocks that lie in the tier below with the right bytes."""
        return sum(self.below.check(block_hash) for block_hash in BURST)


Open = Callable[[WriteMode, Executor], Engine]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens an engine and closes its tier."""
    engines: list[Engine] = []

    def make(mode: WriteMode, growth: Executor) -> Engine:
        engines.append(Engine(tmp_path, mode, growth))
        return engines[-1]

    yield make
    for engine in engines:
        engine.below.close()


@contextmanager
def growing(executor: SteppingExecutor, engine: Engine) -> Iterator[None]:
    """Growth lags so many steps behind that the manager sees no room again and again."""
    for step in range(STEPS_MAX):
        engine.manager.end_step()
        if step % 5 == 4:
            executor.run_all()
        if engine.is_written:
            break
    yield
    executor.run_all()


@pytest.mark.parametrize("mode", [WriteMode.THROUGH, WriteMode.BACK])
def test_a_burst_waits_for_room_that_comes(opened: Open, mode: WriteMode) -> None:
    executor = SteppingExecutor()
    engine = opened(mode, executor)
    executor.run_all()
    engine.store()
    with growing(executor, engine):
        assert engine.evicted == 0
        assert engine.below_has() == SLOTS


def test_a_burst_is_found_with_real_threads(opened: Open) -> None:
    with ThreadPoolExecutor(1) as executor:
        engine = opened(WriteMode.THROUGH, executor)
        engine.store()
        for _ in range(STEPS_MAX):
            engine.manager.end_step()
            engine.pause(0.0)
            if engine.is_written:
                break
        assert engine.evicted == 0
        assert engine.below_has() == SLOTS


def test_a_flush_waits_for_room_that_comes(opened: Open) -> None:
    with ThreadPoolExecutor(1) as executor:
        engine = opened(WriteMode.DEMOTE, executor)
        engine.store()
        assert engine.manager.flush_dirty(engine.clock() + 60.0)
        assert engine.below_has() == SLOTS


def test_a_tier_whose_growth_hangs_evicts(opened: Open) -> None:
    executor = SteppingExecutor()
    engine = opened(WriteMode.THROUGH, executor)
    executor.run_all()
    engine.store()
    for _ in range(20):
        engine.manager.end_step()
    assert engine.evicted == 0 and 0 < len(engine.below.policy) < SLOTS
    engine.clock.advance(PATIENCE_S)
    for _ in range(100):
        engine.manager.end_step()
    assert engine.evicted > 0, "writes go on"
    executor.run_all()
