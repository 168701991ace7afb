"""A manager over memory and a real NVMe tier whose disk fails on command."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path

from kvcascade.handlers.node.nvme_handlers import NvmeLoadHandler, NvmeStoreHandler
from kvcascade.handlers.node.nvme_jobs import QueueOptions
from kvcascade.manager.base import LookupState
from kvcascade.manager.cascading import ManagerOptions, build_cascade
from kvcascade.manager.counters import LinkCounters
from kvcascade.manager.flow import Link
from kvcascade.manager.level import Tier
from kvcascade.manager.request import Request
from kvcascade.tiers.base import BlockHash, SlotSpec
from kvcascade.tiers.nvme.disk.filesystem import FileSystem
from kvcascade.tiers.nvme.segments.store import Durability
from kvcascade.tiers.policies import create

from .clock import ManualClock
from .executors import InlineExecutor
from .keys import keys
from .memory_backend import MemoryBackend
from .memory_file_system import MemoryFileSystem
from .nvme_rig import BLOCK, Rig, config_for, content

DEADLINE_S = 3.0
TICK_S = 0.001
FLUSH_S = 0.1
HANDLER_WAIT_S = 0.05
STEPS_MAX = 100
LONG_S = 60.0
"""Longer than every rest of the manager and the tier."""


class TickingClock(ManualClock):
    """Goes on a little whenever somebody looks, so that no wait for a dead disk is for ever."""

    def __call__(self) -> float:
        self.now_s += TICK_S
        return self.now_s


class FaultRig:
    """Blocks go in, down, out of memory and up again; every byte that is served is compared."""

    def __init__(
        self,
        path: Path,
        executor: Executor | None = None,
        fs: FileSystem | None = None,
        durability: Durability = Durability.PROCESS,
        top_slots: int = 16,
        nvme_slots: int = 64,
        more_paths: Sequence[Path] = (),
    ) -> None:
        self.clock = TickingClock()
        self.memory_fs = MemoryFileSystem()
        self.fs = self.memory_fs if fs is None else fs
        self.executor = InlineExecutor() if executor is None else executor
        config = replace(config_for([path, *more_paths], slots=nvme_slots), durability=durability)
        self.rig = Rig(config, self.executor, self.fs, clock=self.clock)
        self.top = MemoryBackend(BLOCK, top_slots, medium="CPU")
        self.top_policy = create("lru", top_slots)
        store, view = self.rig.tier.store, self.top.view
        queue = QueueOptions(clock=self.clock, wait_limit_s=HANDLER_WAIT_S)
        self.down = NvmeStoreHandler(store, view, self.executor, queue)
        link = Link(self.down, NvmeLoadHandler(store, view, self.executor, queue))
        tiers = [
            Tier("cpu", self.top, self.top_policy),
            Tier("nvme", self.rig.backend, self.rig.policy),
        ]
        options = ManagerOptions(promotion_deadline_s=DEADLINE_S, shutdown_flush_s=FLUSH_S)
        self.manager = build_cascade(tiers, [link], options, self.clock, self.clock.advance)

    @property
    def counters(self) -> LinkCounters:
        """What happened between memory and disk."""
        return self.manager.counters.links[0]

    def store(self, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """As one finished worker job; returns what was taken."""
        output = self.manager.prepare_store(hashes)
        if output is None:
            return []
        spec = output.store_spec
        assert isinstance(spec, SlotSpec)
        pairs = zip(output.block_hashes_to_store, spec.slots.tolist(), strict=True)
        for block_hash, slot in pairs:
            self.top.view(slot)[:] = content(block_hash)
        self.manager.complete_store(output.block_hashes_to_store)
        self.manager.end_step()
        return output.block_hashes_to_store

    def write_down(self) -> bool:
        """Write what is dirty, for some ticks of the clock; True if nothing dirty is left."""
        return self.manager.flush_dirty(self.clock() + 50 * TICK_S)

    def forget_top(self) -> None:
        """Every block that may leave memory leaves it."""
        for _ in range(self.top.capacity):
            evicted = self.top_policy.evict(1, ())
            if evicted is None:
                return
            self.top.free(evicted[0][1])

    def on_disk(self, hashes: Sequence[BlockHash]) -> None:
        """Bring blocks to the disk, and out of memory."""
        for start in range(0, len(hashes), 8):
            part = list(hashes[start : start + 8])
            assert self.store(part) == part
            assert self.write_down()
            self.forget_top()

    def ask(self, hashes: Sequence[BlockHash], request: Request) -> list[LookupState]:
        """One look at each block, and a step."""
        states = [self.manager.lookup_block(block_hash, request) for block_hash in hashes]
        self.manager.end_step()
        return states

    def read(self, hashes: Sequence[BlockHash]) -> int:
        """Serve a request; how many of the blocks came. No time goes by."""
        request = Request()
        for _ in range(STEPS_MAX):
            states = [self.manager.lookup_block(block_hash, request) for block_hash in hashes]
            if not {LookupState.PENDING, LookupState.RETRY} & set(states):
                break
            self.manager.end_step()
        else:
            raise AssertionError("a lookup never ended")
        hits = [h for h, state in zip(hashes, states, strict=True) if state is LookupState.HIT]
        spec = self.manager.prepare_load(hits, request)
        assert isinstance(spec, SlotSpec)
        for block_hash, slot in zip(hits, spec.slots.tolist(), strict=True):
            assert self.top.view(slot) == content(block_hash), "wrong bytes were served"
        self.manager.complete_load(hits)
        self.manager.finish_request(request)
        self.manager.end_step()
        return len(hits)

    def recovers(self, first: int) -> None:
        """The fault is over: new blocks, from `first`, go down, come up, and none is lost."""
        self.memory_fs.heal()
        self.clock.advance(LONG_S)
        new = keys(first, first + 8)
        assert self.store(new) == new
        assert self.write_down()
        self.forget_top()
        assert self.read(new) == 8
        self.rig.check_sums()

    def close(self) -> None:
        """Shut down."""
        self.manager.shutdown()
        self.rig.close()
