"""A manager over memory and a tier behind a node, whose disk fails on command.

Node and writer are those of an engine. They do what is waiting whenever the manager polls.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcascade.manager.base import LookupState
from kvcascade.manager.cascading import CascadingOffloadingManager
from kvcascade.manager.core import ManagerOptions
from kvcascade.manager.counters import LinkCounters
from kvcascade.manager.first_tier import Tier
from kvcascade.manager.request import Request
from kvcascade.tiers.base import BlockHash
from kvcascade.tiers.nvme.disk.filesystem import FileSystem
from kvcascade.tiers.nvme.path.path_messages import PathOptions
from kvcascade.tiers.nvme.path.writer.namespace.slot_space import SlotSpace
from kvcascade.tiers.nvme.path.writer.path_plan import capacity_of
from kvcascade.tiers.policies import create

from .clock import ManualClock
from .keys import keys
from .memory_file_system import MemoryFileSystem
from .node_rig import BLOCK, NodesRig

DEADLINE_S = 3.0
TICK_S = 0.001
FLUSH_S = 0.1
STEPS_MAX = 100
LONG_S = 60.0
"""Longer than every rest of the manager, the node and the writer."""
PER_SEGMENT = 8


def content(block_hash: BlockHash) -> bytes:
    """The one right content of a block."""
    return (block_hash * (BLOCK // len(block_hash) + 1))[:BLOCK]


class TickingClock(ManualClock):
    """Goes on a little whenever somebody looks, so that no wait for a dead disk is for ever."""

    def __call__(self) -> float:
        self.now_s += TICK_S
        return self.now_s


class FaultRig:
    """Blocks go in, down, out of memory and up again; every byte that is served is compared."""

    def __init__(
        self,
        roots: Sequence[Path] = (Path("/tier"),),
        fs: FileSystem | None = None,
        *,
        top_slots: int = 16,
        nvme_slots: int = 64,
        **options: Any,
    ) -> None:
        """`options` are those of the path."""
        self.clock = TickingClock()
        self.memory_fs = fs if isinstance(fs, MemoryFileSystem) else MemoryFileSystem()
        segments = nvme_slots // PER_SEGMENT
        capacity = capacity_of(segments, PER_SEGMENT, BLOCK, len(roots))
        self.options = PathOptions(capacity, segment_bytes=PER_SEGMENT * BLOCK, **options)
        self.nodes = NodesRig(
            self.options, is_real=True, fs=fs or self.memory_fs, clock=self.clock, roots=roots
        )
        self.node = self.nodes.add(arena_slots=top_slots, slots=nvme_slots, stall_s=DEADLINE_S)
        self.node.engine.is_eager = True
        self.top = self.node.arena
        self.top_policy = create("lru", top_slots)
        self.manager = CascadingOffloadingManager(
            Tier("cpu", self.top, self.top_policy),
            self.node.tier,
            ManagerOptions(promotion_deadline_s=DEADLINE_S, shutdown_flush_s=FLUSH_S),
            self.clock,
            self.clock.advance,
        )
        self.manager.maintain()

    @property
    def counters(self) -> LinkCounters:
        """What happened between memory and disk."""
        return self.manager.counters.links[0]

    @property
    def space(self) -> SlotSpace:
        """Slots of the only namespace."""
        (namespace,) = self.nodes.core.namespaces.values()
        return namespace.space

    @property
    def slots(self) -> int:
        """Number of slots in the segments that there are."""
        return len(self.space.segments) * PER_SEGMENT

    def slot_of(self, block_hash: BlockHash) -> int:
        """Slot of a block below; -1 if it is not there."""
        return self.node.tier.feed.find(block_hash)

    def store(self, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """As one finished worker job; returns what was taken."""
        output = self.manager.prepare_store(hashes)
        if output is None:
            return []
        spec = output.store_spec
        pairs = zip(output.block_hashes_to_store, spec.slots.tolist(), strict=True)
        for block_hash, slot in pairs:
            self.top.view(slot)[:] = content(block_hash)
        self.manager.complete_store(output.block_hashes_to_store)
        self.manager.end_step()
        return output.block_hashes_to_store

    def write_down(self) -> bool:
        """Write what is dirty, for some ticks of the clock; True if nothing dirty is left."""
        return self.manager.flush_dirty(self.clock() + FLUSH_S)

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
        states = [self.manager.lookups.lookup_block(block_hash, request) for block_hash in hashes]
        self.manager.end_step()
        return states

    def read(self, hashes: Sequence[BlockHash]) -> int:
        """Serve a request; how many of the blocks came. Hardly any time goes by."""
        request = Request()
        for _ in range(STEPS_MAX):
            states = [
                self.manager.lookups.lookup_block(block_hash, request) for block_hash in hashes
            ]
            if not {LookupState.PENDING, LookupState.RETRY} & set(states):
                break
            self.manager.end_step()
        else:
            raise AssertionError("a lookup never ended")
        hits = [h for h, state in zip(hashes, states, strict=True) if state is LookupState.HIT]
        spec = self.manager.prepare_load(hits, request)
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
        self.manager.maintain()
        new = keys(first, first + 8)
        assert self.store(new) == new
        assert self.write_down()
        self.forget_top()
        assert self.read(new) == 8
        self.check_sums()

    def check_sums(self) -> None:
        """Every slot is used or free, and the index names what is used."""
        (namespace,) = self.nodes.core.namespaces.values()
        space = namespace.space
        assert space.granted == 0
        assert space.used == int(space.is_used.sum()) == namespace.table.count()

    def close(self) -> None:
        """Shut down."""
        self.manager.shutdown()
        self.nodes.core.close(is_clean=True)
