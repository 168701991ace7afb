"""A command as a further process of a namespace: it joins, stores blocks, and leaves.

All rules for an engine's writes apply: the reserve, payload before index, segment ownership.
Running engines need no notice, because they find the blocks in the index. After the visitor has
left, its segments are orphans; an engine adopts them with their blocks. A visitor creates no
segment beyond the number that the engines plan with, since they would not look at it.

Each wait is limited by `HAND_OVER_WAIT_S`, the gate (`owners`), or the lock of the capacity.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ....errors import InUseError, os_errors
from ....manager.level import Level, Pairs, Tier
from ....tiers.base import BlockHash, BlockOutcome
from ....tiers.nvme.disk.byte_locks import RealByteLocks
from ....tiers.nvme.disk.filesystem import RealFileSystem
from ....tiers.nvme.namespace import OWNERS, NamespaceKey, namespaces_under
from ....tiers.nvme.offline.reader import Description, SegmentReader
from ....tiers.nvme.offline.state_reader import StateReader
from ....tiers.nvme.opening import open_nvme_tier
from ....tiers.nvme.segments.format import PAGE_BYTES, SegmentLayout
from ....tiers.nvme.segments.store import Durability
from ....tiers.nvme.tier import NvmeTier, NvmeTierConfig
from ....tiers.nvme.writer.capacity import capacity_for
from ....tiers.nvme.writer.owners import open_states
from ....tiers.policies import OrderedPolicy, create, heap_arrays

MIN_FREE_SHARE = 20
"""Divisor of the disk's size that gives the space to keep free, like an engine's default
`min_free`."""
HAND_OVER_WAIT_S = 10.0
"""Longest wait for an engine to hand a segment over; engines check for requests once a second."""
HAND_OVER_PAUSE_S = 0.1
DEFAULT_POLICY = "lru"


@dataclass(frozen=True, slots=True)
class WantedNamespace:
    """Identity of a namespace, and the amount of data to store in it."""

    key: NamespaceKey
    layout: SegmentLayout
    blocks: int


class Visitor:
    """An open tier with the eviction policy of its last engine; one thread."""

    def __init__(
        self,
        roots: Sequence[Path],
        description: Description | None,
        wanted: WantedNamespace,
        *,
        may_evict: bool = False,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """Join the namespace; `description` is None for one that must be created.

        With `may_evict`, the coldest blocks are evicted for new ones, and running engines are asked
        for segments. Raises a `KVCascadeError`.
        """
        plan = _plan(roots, description, wanted)
        executor = ThreadPoolExecutor(1, thread_name_prefix="kvcascade-visit")
        try:
            self._tier: NvmeTier = open_nvme_tier(plan.config, executor)
        finally:
            executor.shutdown()  # nothing runs in the background from here on
        self.name = self._tier.namespace.folders[0].name
        self.is_live = not self._tier.report.is_alone
        """True if another process has the namespace open."""
        if self.is_live and StateReader(self._tier.namespace.folders[0]).was_reset():
            self._tier.close()
            raise InUseError(
                f"the engines of {self.name} were reset: their weights may differ from those of "
                "its fingerprint and of the blocks; stop the engines first"
            )
        self._may_evict = may_evict
        self._pause = pause
        self._wanted: set[BlockHash] = set()
        """Blocks that were looked up or stored here; none of them is evicted for another."""
        try:
            self._level = self._make_level(plan.has_state, description)
        except BaseException:
            self._tier.close(clean=False)
            raise

    def close(self) -> None:
        """Leave the namespace."""
        self._tier.close()

    def holds(self, key: BlockHash) -> bool:
        """Return True if the index has the block, whichever process stored it."""
        self._wanted.add(key)
        return self._tier.index.entry(key) is not None

    def store(self, blocks: Mapping[BlockHash, memoryview]) -> list[BlockOutcome | None]:
        """Store blocks that are not in the cache; return an outcome for each, None if there was no
        room.

        Raises `InUseError` if the cache was reset since the visitor joined.
        """
        room = self._room(len(blocks))
        keys = list(blocks)[:room]
        outcomes: list[BlockOutcome | None] = [None] * len(blocks)
        if keys:
            statuses = self._level.take(keys)
            spec = self._tier.backend.get_load_store_spec(keys, statuses)
            slots, payloads = spec.slots.tolist(), [blocks[key] for key in keys]
            done = self._tier.store.write(keys, slots, payloads, spec.epoch, spec.removals)
            for key, status, outcome in zip(keys, statuses, done, strict=True):
                if outcome is BlockOutcome.OK:
                    status.ref_cnt = 0
                    self._wanted.add(key)
                else:
                    self._level.drop(key, status)
            outcomes[:room] = done
        self.keep_up()
        return outcomes

    def keep_up(self) -> None:
        """Apply the changes of other processes. Raises `InUseError` after a reset."""
        if self._level.maintain():
            self._level.empty(Counter())
            raise InUseError(
                f"{self.name} was reset meanwhile: its weights may have changed, and all older "
                "blocks are gone; import again only if the blocks belong to the new weights"
            )

    def why_no_room(self) -> str:
        """Return a sentence that says why blocks found no room, with a remedy."""
        if self._may_evict:
            if self.is_live:
                return (
                    "the running engine gave no more segments; stop it and import again, "
                    "or give it a larger capacity"
                )
            return "the tier is smaller than that; start its engine with a larger capacity"
        remedy = "evict the coldest blocks with --make-room"
        if self._tier.growth.failures:
            what = "the disk, or the capacity of its path, has no room for another segment"
            return f"{what}; free space with `kvcascade gc`, or {remedy}"
        if self.is_live:
            what = "all segments within its capacity belong to the running engine"
            return f"{what}; {remedy}, or give the engine a larger capacity"
        return f"the tier is full; free space with `kvcascade gc`, or {remedy}"

    # -- inside --------------------------------------------------------------------------------

    def _make_level(self, has_state: bool, description: Description | None) -> Level:
        """Return the tier with its policy.

        State arrays lie in files only if an engine's do, because they record its capacity.
        """
        tier = self._tier
        name = None
        if description is not None and not self.is_live:
            name = StateReader(description.home).policy_of(tier.namespace.owners.state)
        policy = create(
            name or DEFAULT_POLICY,
            tier.backend.capacity,
            tier.directory,
            tier.arrays if has_state else heap_arrays,
            with_usage=True,
        )
        assert isinstance(policy, OrderedPolicy)
        if tier.recovered or not has_state:
            policy.reconcile(tier.live_slots())
        return Level(Tier("nvme", tier.backend, policy), is_last=True, on_evicted=_nobody_is_told)

    def _room(self, n: int) -> int:
        """Return the number of free slots for up to `n` blocks: orphans, new segments, then
        evictions."""
        backend, growth, level = self._tier.backend, self._tier.growth, self._level
        while backend.get_num_free_blocks() < n and growth.make(1):
            self.keep_up()
        free = min(n, backend.get_num_free_blocks())
        if free == n or not self._may_evict:
            return free
        room = level.make_room(n, self._wanted, may_drop_dirty=True)
        while room < n and self.is_live and self._ask_for_a_segment():
            room = level.make_room(n, self._wanted, may_drop_dirty=True)
        return room

    def _ask_for_a_segment(self) -> bool:
        """Ask a running engine for a segment; return False if none arrives in time."""
        owners = self._tier.namespace.owners
        owners.announce_below_share(True)
        try:
            self.keep_up()  # ends the read transaction: engines need the pages that it holds
            for _ in range(round(HAND_OVER_WAIT_S / HAND_OVER_PAUSE_S)):
                if self._tier.growth.make(1):
                    self.keep_up()
                    return True
                self._pause(HAND_OVER_PAUSE_S)
        finally:
            owners.announce_below_share(False)
        return False


def _nobody_is_told(evicted: Pairs) -> None:
    """Ignore evictions; a visitor keeps no accounts of them."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Parameters for opening the tier."""

    config: NvmeTierConfig
    has_state: bool
    """True if engines keep state arrays with their capacity; the visitor then keeps them too."""


def _plan(roots: Sequence[Path], description: Description | None, wanted: WantedNamespace) -> _Plan:
    """Plan like the engines of the namespace, or with room for all blocks if none has planned
    yet."""
    fs, layout, live, planned, others = RealFileSystem(), wanted.layout, [], None, 0
    if description is not None:
        live = live_states(description)
        planned = _planned_slots(description, live)
    if not live:  # beside an engine, its capacity is the limit for all
        others = max(
            sum(found.used_bytes for found in namespaces_under(fs, root)) for root in roots
        )
    per_path = max(1, -(-_segments(description, wanted, planned, bool(live)) // len(roots)))
    own = capacity_for(per_path * len(roots), layout.slots, layout.block_bytes, len(roots))
    config = NvmeTierConfig(
        paths=tuple(roots),
        capacity_bytes=own + PAGE_BYTES * len(roots),
        block_bytes=layout.block_bytes,
        key=wanted.key,
        durability=Durability.POWER,  # running engines may promise it
        min_free_bytes=fs.total_bytes(roots[0]) // MIN_FREE_SHARE,
        slots_per_segment=layout.slots,
        others_bytes=others * len(roots),
        may_remove_namespaces=False,
        is_guest=True,
        ready_bytes=0,
    )
    return _Plan(config, planned is not None)


def _segments(
    description: Description | None, wanted: WantedNamespace, planned: int | None, is_live: bool
) -> int:
    """Return the maximum number of segments."""
    needed = -(-wanted.blocks // wanted.layout.slots) + 1
    if description is None:
        return needed
    existing = _existing(description)
    if planned is not None:
        return max(existing, planned // wanted.layout.slots)
    return existing if is_live else existing + needed


def live_states(description: Description) -> list[int]:
    """Return the state numbers of the processes that have a namespace open. Raises
    `TierIOError`."""
    path = description.home / OWNERS
    with os_errors(f"opening {path}"):
        try:
            locks = RealByteLocks(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
        except FileNotFoundError:
            return []
        try:
            return open_states(locks)
        finally:
            locks.close()


def _existing(description: Description) -> int:
    """Return the number of segments, up to the last existing one."""
    reader = SegmentReader(description)
    try:
        return max(reader.found, default=-1) + 1
    finally:
        reader.close()


def _planned_slots(description: Description, live: Sequence[int]) -> int | None:
    """Return the smallest plan of the running engines, or the plan of the last engine if none
    runs."""
    state = StateReader(description.home)
    if not live:
        return state.capacity_of(0)
    found = [slots for k in live if (slots := state.capacity_of(k)) is not None]
    return min(found, default=None)
