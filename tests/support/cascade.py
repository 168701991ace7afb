"""A cascading manager on memory backends, with its worker played by the test."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

from kvcascade.manager.admission import AdmissionFunction
from kvcascade.manager.below.chain import BelowChain, ChainedTier
from kvcascade.manager.below.node_feed import NodeFeed
from kvcascade.manager.below.node_tier import NodeTier
from kvcascade.manager.below.port import Below, NoTierBelow, TierFacts
from kvcascade.manager.cascading import CascadingOffloadingManager
from kvcascade.manager.core import ManagerOptions
from kvcascade.manager.first_tier import Tier
from kvcascade.tiers.base import BlockHash
from kvcascade.tiers.nvme.path.presence_table import PresenceTable
from kvcascade.tiers.policies import create
from kvcascade.tiers.policies.ordered import CachePolicy

from .day_log import DayLog, NotedBudget
from .executors import InlineExecutor
from .inside import demoters
from .keys import key
from .memory_backend import MemoryBackend
from .memory_handler import MemoryHandler
from .memory_node import MemoryNode

BLOCK_SIZE = 64


def block_bytes(block_hash: BlockHash) -> bytes:
    """The one right content of a block."""
    return (block_hash * 2)[:BLOCK_SIZE]


class Cascade:
    """Tiers of the given capacities (in slots), top first; `now_s` is the clock."""

    def __init__(
        self,
        capacities: Sequence[int],
        options: ManagerOptions | None = None,
        policy: str = "lru",
        is_immediate: bool = False,
        admission: AdmissionFunction | None = None,
        bytes_per_day: int | None = None,
        paths: int = 1,
    ) -> None:
        self.now_s = 1000.0
        self._paths = paths
        self.writes = DayLog(lambda: self.now_s)
        self.backends = [
            MemoryBackend(BLOCK_SIZE, n, medium=f"M{i}") for i, n in enumerate(capacities)
        ]
        self.policies = [create(policy, n) for n in capacities]
        self.nodes: list[MemoryNode] = []
        budget = NotedBudget(bytes_per_day, self.writes) if bytes_per_day else None
        self.manager = self._build(options or ManagerOptions(), is_immediate, admission, budget)
        for node in self.nodes:
            node.may_deliver = self.manager.lock._is_owned  # type: ignore[attr-defined]
        self.seen: dict[str, set[BlockHash]] = {b.medium: set() for b in self.backends}
        """What the events so far say lies where."""

    def _build(
        self,
        options: ManagerOptions,
        is_immediate: bool,
        admission: AdmissionFunction | None,
        budget: NotedBudget | None,
    ) -> CascadingOffloadingManager:
        """A manager over tiers behind nodes, one behind each."""
        top, clock = Tier("M0", self.backends[0], self.policies[0]), lambda: self.now_s
        ports = [
            self._node_tier(backend, policy, is_immediate, budget, options)
            for backend, policy in zip(self.backends[1:], self.policies[1:], strict=True)
        ]
        below: Below = ports[0] if ports else NoTierBelow()
        if len(ports) > 1:
            tiers = [ChainedTier(port, admission) for port in ports]
            below = BelowChain(tiers, self.backends[0].capacity, clock)
        self.down = [node.down for node in self.nodes]
        self.up = [node.up for node in self.nodes]
        return CascadingOffloadingManager(top, below, options, clock, self.pass_time, admission)

    def _node_tier(
        self,
        backend: MemoryBackend,
        policy: CachePolicy,
        is_immediate: bool,
        budget: NotedBudget | None,
        options: ManagerOptions,
    ) -> NodeTier:
        facts = TierFacts(backend.medium, backend.medium, BLOCK_SIZE, backend.capacity)
        feed = NodeFeed(
            facts,
            lambda folder, slots: cast(PresenceTable, node.presence),
            InlineExecutor(),
            lambda: self.now_s,
            with_events=options.with_events,
        )
        node = MemoryNode(
            self.backends[0],
            backend,
            policy,
            feed.take,
            is_immediate=is_immediate,
            budget=budget,
        )
        self.nodes.append(node)
        tier = NodeTier(
            node,
            feed,
            facts,
            lambda: self.now_s,
            stall_s=options.promotion_deadline_s,
            wants_chains=policy.wants_chains,
            paths=self._paths,
        )
        node.start()
        tier.maintain()
        return tier

    def pass_time(self, seconds: float) -> None:
        """Let time go by: what a manager that waits sees."""
        self.now_s += seconds

    @property
    def handlers(self) -> list[MemoryHandler]:
        return self.down + self.up

    def handler(self, which: int) -> MemoryHandler:
        """Any handler by a number of any size; a handler of no link if there is one tier."""
        if not self.handlers:
            return MemoryHandler(self.backends[0], self.backends[0])
        return self.handlers[which % len(self.handlers)]

    def write_top(self, slot: int, data: bytes) -> None:
        """What a worker does when it stores."""
        self.backends[0].view(slot)[:] = data

    def read_top(self, slot: int) -> bytes:
        """What a worker sees when it loads."""
        return bytes(self.backends[0].view(slot))

    def store(self, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Store blocks as one finished worker job; returns those that were taken."""
        output = self.manager.prepare_store(hashes)
        if output is None:
            return []
        slots = output.store_spec.slots.tolist()
        for block_hash, slot in zip(output.block_hashes_to_store, slots, strict=True):
            self.write_top(slot, block_bytes(block_hash))
        self.manager.complete_store(set(output.block_hashes_to_store))
        return output.block_hashes_to_store

    def below_only(self, hashes: Sequence[BlockHash]) -> None:
        """Bring blocks to the second tier, to none below it, and out of the first."""
        self.store(hashes)
        demoters(self.manager)[0].demote_coldest(len(hashes))
        self.run_transfers()
        evicted = self.policies[0].evict(len(hashes), ())
        assert evicted is not None
        for _, status in evicted:
            self.backends[0].free(status)
        assert all(self.holds(1, block_hash) for block_hash in hashes)

    def run_transfers(self) -> None:
        """Let every queued transfer run, and the manager take the results in."""
        for handler in self.handlers:
            handler.wait(set(handler.queued))
        self.manager.end_step()

    def holds(self, index: int, block_hash: BlockHash) -> bool:
        """True if a tier holds the block, ready."""
        status = self.policies[index].get(block_hash)
        return status is not None and status.ref_cnt >= 0

    def apply_events(self, but_for: Collection[str] = ()) -> None:
        """Take the events in and check that each one is news; those of the tiers `but_for`, which
        are empty now, count for nothing."""
        for medium in but_for:
            self.seen[medium].clear()
        for event in self.manager.take_events():
            if event.medium in but_for:
                continue
            held = self.seen[event.medium]
            if event.removed:
                assert held.issuperset(event.block_hashes), "removed what was not there"
                held.difference_update(event.block_hashes)
            else:
                assert held.isdisjoint(event.block_hashes), "stored twice"
                held.update(event.block_hashes)

    def forget_events(self) -> None:
        """A reset removes everything without naming it."""
        self.apply_events()
        for held in self.seen.values():
            held.clear()

    def check_slots(self) -> None:
        """No slot is lost or used twice."""
        for backend, policy in zip(self.backends, self.policies, strict=True):
            used = backend.capacity - backend.get_num_free_blocks()
            assert used >= len(policy)

    def check_settled(self) -> None:
        """With nothing under way: every slot is free or holds a block that the events name."""
        for backend, policy in zip(self.backends, self.policies, strict=True):
            used = backend.capacity - backend.get_num_free_blocks()
            held = policy.coldest(backend.capacity)
            assert len(policy) == len(held), "a block is still pinned"
            assert used - len(policy) == self.quarantined(backend)
            assert {block_hash for block_hash, _ in held} == self.seen[backend.medium]

    def quarantined(self, backend: MemoryBackend) -> int:
        """Slots that wait for the workers to flush."""
        if backend is not self.backends[0]:
            return 0
        before = backend.get_num_free_blocks()
        self.manager.on_reset_flushed()
        return backend.get_num_free_blocks() - before


__all__ = ["BLOCK_SIZE", "Cascade", "block_bytes", "key"]
