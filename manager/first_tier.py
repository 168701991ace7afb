"""The first tier of the cascade: its backend, its eviction policy, and the state of its slots.

Used under the manager's lock only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..tiers.base import (
    Backend,
    BlockHash,
    BlockStatus,
    Pairs,
    RefCounts,
    SlotArray,
    SlotMask,
    slot_of,
)
from ..tiers.policies.ordered import CachePolicy
from .admission import USES_MAX, PastUses

Slots = npt.NDArray[np.signedinteger[Any]]
"""Slot numbers of any width."""

RUN_BLOCKS = 64
"""Length of a run in blocks. A shutdown writes a run together, because a later request reads it
together."""

SPENT = 255
"""Origin of a promoted block that a request has loaded. Copies are on the device and below."""


@dataclass(frozen=True, slots=True)
class Tier:
    """The parts of the first tier, as an assembly creates them."""

    name: str
    backend: Backend
    policy: CachePolicy


@dataclass(slots=True)
class Transfer:
    """A job that reads or writes slots of the first tier. They are pinned until the job ends."""

    hashes: list[BlockHash]
    """Hashes of the blocks in the job."""
    statuses: list[BlockStatus]
    """Slots of these blocks, in the same order."""
    created_s: float
    """Time at which the job started, on the manager's clock."""
    is_orphan: bool = False
    """True once the first tier was reset. The last orphan transfer that uses a slot frees it."""


class Dirt:
    """Dirty and settled slots of the first tier.

    Each slot in use is in one of three states:

    - *dirty*: tier 1 lacks the block, and it should be written there;
    - *settled*: tier 1 holds the block or does not need it, so it may be evicted;
    - neither: the bytes of the block are in flight.

    The masks are numpy views of byte arrays: single slots are set as bytes, batches and searches
    are vectorised.
    """

    def __init__(self, capacity: int, is_single: bool) -> None:
        """`is_single`: no tier is below, so that no block is dirty and each may be evicted."""
        self._is_single = is_single
        self.dirty = bytearray(capacity)
        """1 for each slot whose block should be written to tier 1."""
        self.settled = bytearray(capacity)
        """1 for each slot whose block may be evicted."""
        self.evictable_max = 0
        """Upper limit of the number of settled slots that are not pinned. Each slot that is settled
        or unpinned adds one. A search that finds too few victims sets the exact number."""
        self.dirty_mask: SlotMask = np.frombuffer(self.dirty, dtype=np.bool_)
        self.settled_mask: SlotMask = np.frombuffer(self.settled, dtype=np.bool_)
        if is_single:
            self.settled_mask[:] = True

    @property
    def dirty_blocks(self) -> int:
        """Number of dirty blocks."""
        return 0 if self._is_single else int(np.count_nonzero(self.dirty_mask))

    def set_dirty(self, slots: Sequence[int] | Slots) -> None:
        """Mark these slots dirty: tier 1 lacks their blocks. No effect without a tier below."""
        if not self._is_single and len(slots):
            batch = np.asarray(slots, dtype=np.intp)
            self.dirty_mask[batch] = True
            self.settled_mask[batch] = False

    def set_settled(self, slots: Sequence[int]) -> None:
        """Mark these slots settled: their blocks may be evicted."""
        dirty, settled = self.dirty, self.settled
        for slot in slots:
            dirty[slot] = 0
            settled[slot] = 1
        self.evictable_max += len(slots)

    def set_arriving(self, slots: Sequence[int] | Slots) -> None:
        """Mark these slots in flight: neither dirty nor settled. No effect without a tier below."""
        if not self._is_single and len(slots):
            batch = np.asarray(slots, dtype=np.intp)
            self.dirty_mask[batch] = False
            self.settled_mask[batch] = False

    def note_evicted(self, slots: Slots) -> None:
        """Count evicted blocks as evictable no more."""
        self.evictable_max -= int(np.count_nonzero(self.settled_mask[slots]))
        if not self._is_single:
            self.settled_mask[slots] = False

    def count_evictable(self, ref_counts: RefCounts | None) -> None:
        """Set `evictable_max` to the exact number, in 0.1 ms for 131k slots. Without reference
        counts, all settled slots count."""
        mask = self.settled_mask
        idle = mask if ref_counts is None else mask & (ref_counts == 0)
        self.evictable_max = int(np.count_nonzero(idle))

    def clear(self) -> None:
        """Forget the state of every slot, because none is in use."""
        if not self._is_single:
            self.dirty_mask[:] = False
            self.settled_mask[:] = False
            self.evictable_max = 0


class UseCounts:
    """Use count and prompt depth of the block in each slot."""

    def __init__(self, capacity: int, past: PastUses | None) -> None:
        """`past` holds use counts of blocks that tier 1 refused. It is None if tier 1 admits every
        block."""
        self.past = past
        self._uses = bytearray(capacity)
        self._uses_of = np.frombuffer(self._uses, dtype=np.uint8)
        self._depths = np.zeros(capacity, dtype=np.uint32)
        """Per slot, the number of blocks before this block in its prompt, at the time of the
        store."""

    def of(self, slot: int) -> int:
        """Return the use count of the block in this slot; it saturates at 255."""
        return self._uses[slot]

    def begin(self, block_hashes: Sequence[BlockHash], slots: Slots, depth: int) -> None:
        """Start the counts of stored blocks; `depth` blocks of their prompt come before them."""
        self._uses_of[slots] = 1
        self._depths[slots] = np.arange(depth, depth + len(slots), dtype=np.uint32)
        if self.past is not None:
            for block_hash, slot in zip(block_hashes, slots.tolist(), strict=True):
                if past := self.past.of(block_hash):
                    self._uses[slot] = min(USES_MAX, past + 1)

    def begin_found(self, slots: Slots) -> None:
        """Start the counts of blocks that another process stored."""
        self._uses_of[slots] = 1

    def note_reuse(self, statuses: Sequence[BlockStatus]) -> None:
        """Count one more use of each block. Admission may now accept a block that it refused
        before."""
        slots = np.fromiter(map(slot_of, statuses), np.intp, len(statuses))
        self._uses_of[slots] += self._uses_of[slots] < USES_MAX

    def note_refused(self, block_hash: BlockHash, slot: int) -> None:
        """Keep the use count of a refused block, so that counting continues when the block comes
        back."""
        if self.past is not None:
            self.past.note(block_hash, self._uses[slot])

    def by_use(self, blocks: Pairs) -> list[BlockHash]:
        """Return the blocks in descending order of use; among equals, heads of prompts come first.

        Blocks of one prompt stay together in runs of `RUN_BLOCKS`. Ties keep the given order.
        """
        slots = np.fromiter((status.block_id for _, status in blocks), np.intp, len(blocks))
        depths = self._depths[slots] // RUN_BLOCKS
        order = np.lexsort((depths, -self._uses_of[slots].astype(np.int16)))
        return [blocks[at][0] for at in order.tolist()]


class FirstTier:
    """Slots, their eviction order, and their state."""

    def __init__(
        self,
        tier: Tier,
        is_single: bool,
        on_evicted: Callable[[Pairs], None],
        past: PastUses | None = None,
    ) -> None:
        """`on_evicted` receives the blocks that were evicted to make room. For `past` see
        `UseCounts`."""
        self.name = tier.name
        self.backend = tier.backend
        self.policy = tier.policy
        self.policy.ref_counts = tier.backend.ref_counts
        self._is_single = is_single
        self.capacity = tier.backend.capacity
        self.block_size = tier.backend.block_size
        self.medium = tier.backend.medium
        self.taken_blocks = 0
        """Number of slots allocated since the start."""
        self.dirt = Dirt(self.capacity, is_single)
        self.uses = UseCounts(self.capacity, past)
        self.origin = bytearray(self.capacity)
        """For each slot, the tier from which its block was read. `SPENT` once a request has loaded
        the block; 0 if a worker stored it, or after its second load."""
        self._origin_of = np.frombuffer(self.origin, dtype=np.uint8)
        self.on_evicted = on_evicted
        self._lost: list[BlockHash] = []
        """Hashes lost to another process's reset, not yet reported as removal events. The last ones
        are reported first."""

    def make_all_room(self, n: int, protected: Container[BlockHash], may_drop_dirty: bool) -> bool:
        """Evict until `n` slots are free. Return False and evict nothing if that is impossible."""
        missing = n - self.backend.get_num_free_blocks()
        if missing <= 0:
            return True
        mask = self._evictable(may_drop_dirty)
        if self._most_victims(missing, mask) < missing:
            return False
        evicted = self.policy.evict(missing, protected, mask)
        if evicted is None:
            if mask is not None:
                self.dirt.count_evictable(self.backend.ref_counts)
            return False
        self._free_evicted(evicted)
        return True

    def make_room(self, n: int, protected: Container[BlockHash], may_drop_dirty: bool) -> int:
        """Evict until `n` slots are free, or as many as possible. Return the free slots, at most
        `n`."""
        if self.make_all_room(n, protected, may_drop_dirty):
            return n
        free = self.backend.get_num_free_blocks()
        mask = self._evictable(may_drop_dirty)
        if most := self._most_victims(n - free, mask):
            possible = len(self.policy.coldest(most, protected, mask))
            self.make_all_room(free + possible, protected, may_drop_dirty)
        return min(n, self.backend.get_num_free_blocks())

    def make_room_of_spent(self, n: int, protected: Container[BlockHash]) -> None:
        """Evict settled blocks that requests have loaded, until `n` slots are free or no such block
        is left."""
        missing = n - self.backend.get_num_free_blocks()
        if missing <= 0:
            return
        mask = (self._origin_of == SPENT) & self.dirt.settled_mask
        if not mask.any():  # some policies would look at every block for that
            return
        found = len(self.policy.coldest(missing, protected, mask))
        evicted = self.policy.evict(found, protected, mask) if found else None
        if evicted is not None:
            self._free_evicted(evicted)

    def has_victim(self, may_drop_dirty: bool) -> bool:
        """Return True if at least one block can be evicted."""
        mask = self._evictable(may_drop_dirty)
        return self._most_victims(1, mask) > 0 and bool(self.policy.coldest(1, (), mask))

    def _most_victims(self, n: int, mask: SlotMask | None) -> int:
        """Return an upper limit of the blocks that a search for `n` victims finds."""
        return n if mask is None else min(n, self.dirt.evictable_max)

    def _free_evicted(self, evicted: Pairs) -> None:
        self.on_evicted(evicted)
        statuses = [status for _, status in evicted]
        self.dirt.note_evicted(np.fromiter(map(slot_of, statuses), np.intp, len(statuses)))
        self.backend.free_many(statuses)

    def _evictable(self, may_drop_dirty: bool) -> SlotMask | None:
        return None if may_drop_dirty or self._is_single else self.dirt.settled_mask

    def take(
        self, block_hashes: Sequence[BlockHash], depth: int = 0
    ) -> tuple[list[BlockStatus], SlotArray]:
        """Allocate slots and insert the blocks, which are not ready yet. The slots must be free.

        `depth`: number of blocks of the same prompt before the first of these. Return the places of
        the blocks, and their slots.
        """
        statuses = self.backend.allocate_blocks(block_hashes)
        self.taken_blocks += len(statuses)
        slots = np.fromiter(map(slot_of, statuses), np.int32, len(statuses))
        self.uses.begin(block_hashes, slots, depth)
        self.dirt.set_arriving(slots)
        self.policy.insert_many(block_hashes, statuses)
        return statuses, slots

    def adopt(self, block_hashes: Sequence[BlockHash], statuses: Sequence[BlockStatus]) -> None:
        """Insert complete blocks from an earlier engine.

        They count as dirty. The demoter asks the tier below once they are among the coldest,
        because asking for all of them here would take seconds.
        """
        slots = np.fromiter(map(slot_of, statuses), np.intp, len(statuses))
        self.policy.insert_many(block_hashes, statuses)
        self.policy.mark_ready(block_hashes, slots.tolist())
        self.uses.begin_found(slots)
        self.dirt.set_dirty(slots)

    def drop(self, block_hash: BlockHash, status: BlockStatus) -> None:
        """Remove a block and free its slot, in any state. No effect if the hash has another slot
        now."""
        present = self.policy.get(block_hash)
        if present is not None and present.block_id == status.block_id:
            self.policy.remove(block_hash)
            self.backend.free(status)

    def is_dirty(self, block_hash: BlockHash) -> bool:
        """Return True if the block is here and should be written to tier 1."""
        status = self.policy.get(block_hash)
        return status is not None and bool(self.dirt.dirty[status.block_id])

    def note_lost_below(self, block_hashes: Sequence[BlockHash]) -> None:
        """Mark blocks dirty again that left a tier below and are ready here."""
        found = (self.policy.get(block_hash) for block_hash in block_hashes)
        self.dirt.set_dirty([s.block_id for s in found if s is not None and s.ref_cnt >= 0])

    def note_loss(self) -> None:
        """Keep the hashes of all blocks for removal events, before a reset that the engine does not
        know."""
        if len(self._lost) <= self.capacity:
            self._lost += self.policy.ready_at

    def take_loss(self, limit: int) -> list[BlockHash]:
        """Return the next batch of noted blocks. Leave out those that were stored again."""
        left = self._lost[-limit:]
        del self._lost[-limit:]
        get = self.policy.get
        return [block_hash for block_hash in left if block_hash and get(block_hash) is None]

    def empty(self, users: Counter[int]) -> None:
        """Forget every block after a reset.

        `users`: number of transfers that use each slot. The last of them frees the slot
        (`release`).
        """
        self.policy.clear()
        self.dirt.clear()
        for status in self.backend.reset():
            status.ref_cnt = users[status.block_id]
            if status.ref_cnt == 0:
                self.backend.free(status)

    def release(self, statuses: Iterable[BlockStatus]) -> None:
        """Drop one pin of each slot. Free those without further pins whose block has left."""
        for status in statuses:
            status.ref_cnt -= 1
            if status.ref_cnt == 0:
                if self.policy.ready_at[status.block_id]:
                    self.dirt.evictable_max += 1
                else:
                    self.backend.free(status)
