"""One tier in its place in the cascade: a backend, a policy, and which of its blocks are dirty.

A level is used under the manager's lock only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from ..tiers.base import Backend, BlockHash, BlockStatus, CachePolicy, SlotArray, SlotMask
from ..tiers.endurance import DayTotals
from .admission import USES_MAX, Admission, AdmitAll, PastUses, WriteBudget

Pairs = list[tuple[BlockHash, BlockStatus]]
Slots = npt.NDArray[np.signedinteger[Any]]
"""Slot numbers of any width."""

RUN_BLOCKS = 64
"""Blocks of one prompt that a shutdown writes together: they are read together, too."""

_block_id = attrgetter("block_id")


@dataclass(frozen=True, slots=True)
class Tier:
    """The parts of one tier, as an assembly hands them over."""

    name: str
    backend: Backend
    policy: CachePolicy
    admission: Admission = field(default_factory=AdmitAll)
    """Asked about blocks that come from the tier above."""
    write_budget: WriteBudget | None = None
    day_totals: Callable[[], DayTotals] | None = None
    """What the last day saw, for a tier that keeps count."""


@dataclass(slots=True)
class Transfer:
    """A job that reads or writes slots of one level. They are pinned until the job ends."""

    ticket: int
    hashes: list[BlockHash]
    """Blocks that are transferred."""
    statuses: list[BlockStatus]
    """Their slots in the level."""
    created_s: float
    """On the manager's clock."""
    is_orphan: bool = False
    """True once the level was reset: the last transfer that uses a slot frees it."""


class Dirt:
    """Which slots may leave.

    Each slot in use is in one of three states: *dirty* (its block is not in the next tier and shall
    go there), *settled* (held there, or not worth it: it may be dropped), or neither (its bytes are
    on the way). The masks are numpy views of byte arrays: single slots are set as bytes, batches
    and searches are vectorised.
    """

    def __init__(self, capacity: int, is_last: bool) -> None:
        self._is_last = is_last
        self._dirty = bytearray(capacity)
        self._settled = bytearray(capacity)
        self.dirty_mask: SlotMask = np.frombuffer(self._dirty, dtype=np.bool_)
        self.settled_mask: SlotMask = np.frombuffer(self._settled, dtype=np.bool_)
        if is_last:  # nothing below: every block may be dropped
            self.settled_mask[:] = True

    @property
    def dirty_blocks(self) -> int:
        """Number of dirty blocks; none in the last tier."""
        return 0 if self._is_last else int(np.count_nonzero(self.dirty_mask))

    def is_dirty(self, slot: int) -> bool:
        """True if the block in this slot shall be written to the next tier."""
        return bool(self._dirty[slot])

    def set_dirty(self, slots: Sequence[int] | Slots) -> None:
        """These blocks are not in the next tier. No effect in the last tier."""
        if not self._is_last and len(slots):
            batch = np.asarray(slots, dtype=np.intp)
            self.dirty_mask[batch] = True
            self.settled_mask[batch] = False

    def set_settled(self, slots: Sequence[int]) -> None:
        """These blocks are held in the next tier, or will not be: they may leave."""
        dirty, settled = self._dirty, self._settled
        for slot in slots:
            dirty[slot] = 0
            settled[slot] = 1

    def set_arriving(self, slots: Sequence[int] | Slots) -> None:
        """The bytes of these slots are on their way. No effect in the last tier."""
        if not self._is_last and len(slots):
            batch = np.asarray(slots, dtype=np.intp)
            self.dirty_mask[batch] = False
            self.settled_mask[batch] = False

    def clear(self) -> None:
        """No slot is in use any more."""
        if not self._is_last:
            self.dirty_mask[:] = False
            self.settled_mask[:] = False


class UseCounts:
    """How often the block in each slot was used, and how deep in its prompt it lies."""

    def __init__(self, capacity: int, past: PastUses | None) -> None:
        """`past`: uses of blocks that the next tier refused; None if it does not go by uses."""
        self._past = past
        self._uses = bytearray(capacity)
        self._uses_of = np.frombuffer(self._uses, dtype=np.uint8)
        self._depths = np.zeros(capacity, dtype=np.uint32)
        """Per slot: how many blocks of its request came before the block when it was stored."""

    def of(self, slot: int) -> int:
        """How often the block in this slot was used; saturates at 255."""
        return self._uses[slot]

    def begin(self, block_hashes: Sequence[BlockHash], slots: Slots, depth: int) -> None:
        """Blocks were stored; `depth` blocks of their prompt come before them."""
        self._uses_of[slots] = 1
        self._depths[slots] = np.arange(depth, depth + len(slots), dtype=np.uint32)
        if self._past is not None:
            for block_hash, slot in zip(block_hashes, slots.tolist(), strict=True):
                if past := self._past.of(block_hash):
                    self._uses[slot] = min(USES_MAX, past + 1)

    def begin_found(self, slots: Slots) -> None:
        """Blocks that another process stored."""
        self._uses_of[slots] = 1

    def note_reuse(self, statuses: Sequence[BlockStatus]) -> None:
        """These blocks were used again; what admission refused before may be offered now."""
        slots = np.fromiter(map(_block_id, statuses), np.intp, len(statuses))
        self._uses_of[slots] += self._uses_of[slots] < USES_MAX

    def note_refused(self, block_hash: BlockHash, slot: int) -> None:
        """The next tier does not take the block: its uses count on when it comes back."""
        if self._past is not None:
            self._past.note(block_hash, self._uses[slot])

    def by_use(self, blocks: Pairs) -> list[BlockHash]:
        """Blocks that were used most come first, then those nearest to the head of their prompt.

        Blocks of one prompt stay together in runs of `RUN_BLOCKS`, in the order given otherwise.
        """
        slots = np.fromiter((status.block_id for _, status in blocks), np.intp, len(blocks))
        depths = self._depths[slots] // RUN_BLOCKS
        order = np.lexsort((depths, -self._uses_of[slots].astype(np.int16)))
        return [blocks[at][0] for at in order.tolist()]


class Level:
    """A tier in its place in the cascade."""

    def __init__(
        self,
        tier: Tier,
        is_last: bool,
        on_evicted: Callable[[Pairs], None],
        past: PastUses | None = None,
    ) -> None:
        """`on_evicted` is told which blocks left to make room; for `past` see `UseCounts`."""
        self.name = tier.name
        self.backend = tier.backend
        self.policy = tier.policy
        self.is_last = is_last
        self.capacity = tier.backend.capacity
        self.block_size = tier.backend.block_size
        self.medium = tier.backend.medium
        self.taken_blocks = 0
        """Slots that were taken, ever."""
        self.dirt = Dirt(self.capacity, is_last)
        self.uses = UseCounts(self.capacity, past)
        self.on_evicted = on_evicted
        self._lost: list[BlockHash] = []
        """Hashes lost to another process's reset, not yet reported as removal events; in descending
        slot order."""
        self._was_short = False
        """The last search for blocks that may leave found too few. It will be tried again soon:
        counting them first costs a fraction of searching in vain."""
        if not is_last:
            tier.backend.tell_found(self._note_found)

    @property
    def is_lasting(self) -> bool:
        """True if the medium keeps the blocks after the process has ended."""
        return self.backend.is_lasting

    def make_all_room(self, n: int, protected: Container[BlockHash], may_drop_dirty: bool) -> bool:
        """Evict so that `n` slots are free; False, and nothing is evicted, if that cannot be."""
        missing = n - self.backend.get_num_free_blocks()
        if missing <= 0:
            return True
        mask = self._may_leave(may_drop_dirty)
        if mask is not None and self._was_short and np.count_nonzero(mask) < missing:
            return False
        evicted = self.policy.evict(missing, protected, mask)
        self._was_short = evicted is None
        if evicted is None:
            return False
        self._leave(evicted)
        return self.backend.get_num_free_blocks() >= n

    def make_room(self, n: int, protected: Container[BlockHash], may_drop_dirty: bool) -> int:
        """Evict so that up to `n` slots are free; returns how many are (at most `n`)."""
        if not self.make_all_room(n, protected, may_drop_dirty):
            free = self.backend.get_num_free_blocks()
            mask = self._may_leave(may_drop_dirty)
            possible = len(self.policy.coldest(n - free, protected, mask))
            self.make_all_room(free + possible, protected, may_drop_dirty)
        return min(n, self.backend.get_num_free_blocks())

    def make_room_of(self, n: int, protected: Container[BlockHash], first: SlotMask) -> None:
        """Evict blocks in the slots of `first` that may be dropped, so that up to `n` are free."""
        missing = n - self.backend.get_num_free_blocks()
        mask = first & self.dirt.settled_mask
        found = len(self.policy.coldest(missing, protected, mask)) if missing > 0 else 0
        evicted = self.policy.evict(found, protected, mask) if found else None
        if evicted is not None:
            self._leave(evicted)

    def _leave(self, evicted: Pairs) -> None:
        self.on_evicted(evicted)
        self.backend.free_many([status for _, status in evicted])

    def _may_leave(self, may_drop_dirty: bool) -> SlotMask | None:
        return None if may_drop_dirty or self.is_last else self.dirt.settled_mask

    def take(self, block_hashes: Sequence[BlockHash], depth: int = 0) -> list[BlockStatus]:
        """Allocate and insert; the blocks are not ready. There must be room.

        `depth`: how many blocks of the same prompt come before them.
        """
        statuses = self.backend.allocate_blocks(block_hashes)
        self.taken_blocks += len(statuses)
        slots = np.fromiter(map(_block_id, statuses), np.intp, len(statuses))
        self.uses.begin(block_hashes, slots, depth)
        self.dirt.set_arriving(slots)
        self.policy.insert_many(block_hashes, statuses)
        return statuses

    def adopt(self, block_hashes: Sequence[BlockHash], statuses: Sequence[BlockStatus]) -> None:
        """Insert complete blocks that an earlier engine left; nothing is known of lower tiers."""
        slots = [status.block_id for status in statuses]
        self.policy.insert_many(block_hashes, statuses)
        self.policy.mark_ready(block_hashes, slots)
        self._note_found(np.array(slots, dtype=np.int32))

    def _note_found(self, slots: SlotArray) -> None:
        """Blocks that another process put there. Whether they are below is seen when they are among
        the coldest: to look for all of them at once would take seconds."""
        self.uses.begin_found(slots)
        self.dirt.set_dirty(slots)

    def drop(self, block_hash: BlockHash, status: BlockStatus) -> None:
        """Remove a block and free its slot, whatever its state, if it is still this one."""
        present = self.policy.get(block_hash)
        if present is not None and present.block_id == status.block_id:
            self.policy.remove(block_hash)
            self.backend.free(status)

    def holds(self, block_hash: BlockHash) -> bool:
        """True if the block is here, ready or on its way."""
        return self.policy.get(block_hash) is not None

    def owns(self, block_hash: BlockHash) -> bool:
        """True if the block is here, and is this process's own: events are about those."""
        return self.policy.owns(block_hash)

    def note_lost_below(self, block_hashes: Sequence[BlockHash]) -> None:
        """Blocks left a tier below: those that are here and ready are dirty again."""
        found = (self.policy.get(block_hash) for block_hash in block_hashes)
        self.dirt.set_dirty([s.block_id for s in found if s is not None and s.ref_cnt >= 0])

    def note_loss(self) -> None:
        """All blocks are about to be forgotten, and nobody knows: keep their names for events.

        Those of a tier with a place of its own for names are found by its backend.
        """
        if self.policy.ready_at is not None and len(self._lost) <= self.capacity:
            self._lost += self.policy.ready_at

    def take_moved(self, limit: int) -> tuple[list[BlockHash], list[BlockHash]]:
        """Blocks that came and that left without the manager's doing, a batch of each."""
        came: list[BlockHash] = []
        left = [block_hash for block_hash in self._lost[-limit:] if block_hash]
        del self._lost[-limit:]
        moved = self.backend.take_moved()
        if moved is not None:
            (left if moved.removed else came).extend(moved.block_hashes)
        return [h for h in came if self.owns(h)], [h for h in left if not self.owns(h)]

    def maintain(self) -> bool:
        """Upkeep of the tier; True if another process reset it: `empty` comes next."""
        return self.backend.maintain(self.policy)

    def empty(self, users: Counter[int]) -> None:
        """The tier was reset: forget everything.

        `users`: by slot, how many transfers use it. The last one frees it (`release`).
        """
        self.policy.clear()
        self.dirt.clear()
        for status in self.backend.reset():
            status.ref_cnt = users[status.block_id]
            if status.ref_cnt == 0:
                self.backend.free(status)

    def release(self, transfer: Transfer) -> None:
        """A transfer from before a reset ended."""
        for status in transfer.statuses:
            status.ref_cnt -= 1
            if status.ref_cnt == 0:
                self.backend.free(status)
