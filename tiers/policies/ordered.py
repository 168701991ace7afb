"""`CachePolicy`: the blocks of a tier and their order of eviction."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import takewhile

import numpy as np

from ..base import BlockHash, BlockStatus, Pairs, RefCounts, SlotMask, slot_of
from .order import EvictionOrder
from .parts.directory import DictDirectory

MANY_PINNED = 1024
"""Number of pinned blocks that a search meets one by one. It then leaves out all that are pinned:
one step over the reference counts costs less than the call for each of many blocks."""


class _ManyPinned(Exception):
    """End of a search that met many pinned blocks."""


def tag_of(block_hash: BlockHash) -> int:
    """Return a 64-bit digest for ghosts; block hashes are cryptographic, so a part is enough.

    Folds the first and last eight bytes, since the last four of vLLM's keys are a group number.
    """
    return int.from_bytes(block_hash[:8], "little") ^ int.from_bytes(block_hash[-8:], "little")


class CachePolicy:
    """The blocks of a tier in a directory, and any order of eviction over its slots.

    Both are one class, because a policy may keep ghosts of evicted blocks.
    """

    def __init__(self, directory: DictDirectory, order: EvictionOrder) -> None:
        self._directory = directory
        self._order = order
        self.wants_chains = order.wants_chains
        """Whether the policy uses `note_chain`; it need not be called otherwise."""
        self.expects = order.expects
        """Whether the policy uses `expect`; it need not be called otherwise."""
        self.ref_counts: RefCounts | None = None
        """View of the backend's slots, if it has one; set by the owner of both."""
        self.ready_at = directory.ready_at
        """Hash of the ready block in each slot (`mark_ready`); empty for any other slot.

        The last item is an empty hash."""
        # The directory answers alone, so the manager calls its methods directly.
        self.get = directory.get
        """Returns the block's status, or None. Does not change recency."""
        self.get_many = directory.get_many
        """Returns the status of each block, or None; fastest in prefix order."""
        self.mark_ready = directory.mark_ready
        """Marks blocks as complete; they stay complete until they are removed."""

    def expect(self, block_hashes: Iterable[BlockHash]) -> None:
        """Announce missing blocks that will be inserted; the policy can learn before `evict`.

        It may be called more than once or not at all, and the blocks may never be inserted.
        """
        if self.expects:
            self._order.expect(list(map(tag_of, block_hashes)))

    def insert(self, block_hash: BlockHash, status: BlockStatus) -> None:
        """Add a block that is absent; it becomes the most recent one."""
        self.insert_many([block_hash], [status])

    def insert_many(
        self, block_hashes: Sequence[BlockHash], statuses: Sequence[BlockStatus]
    ) -> None:
        """Insert blocks in prefix order; the first is the most recent afterwards."""
        slots = list(map(slot_of, statuses))
        self._directory.put_many(block_hashes, statuses, slots)
        slots.reverse()
        self._order.insert(slots, self._tags(block_hashes[::-1]))

    def _tags(self, block_hashes: Sequence[BlockHash]) -> list[int]:
        return list(map(tag_of, block_hashes)) if self._order.wants_tags else []

    def remove(self, block_hash: BlockHash) -> BlockStatus | None:
        """Remove a block in any state and return its status, or None if it was absent."""
        status = self._directory.pop(block_hash)
        if status is not None:
            self._order.remove([status.block_id])
        return status

    def touch(self, block_hashes: Iterable[BlockHash]) -> None:
        """Note a use of blocks, given in prefix order; unknown ones are ignored.

        The first block becomes the most recent one, so the tail of a prefix leaves before its head.
        """
        self._order.touch(self._directory.slots_from_the_end(block_hashes))

    def settle(self, block_hashes: Iterable[BlockHash]) -> None:
        """Put blocks that one request inserted in parts into the order of its prompt.

        This is not a use. Among blocks that were not used since, the last one leaves first.
        """
        self._order.settle(self._directory.slots_from_the_end(block_hashes))

    def note_chain(self, block_hashes: Sequence[BlockHash]) -> None:
        """Note the blocks of an ended request in prefix order, instead of `settle` and `touch`.

        It counts as a use of the blocks that are present. The absent ones tell the length of the
        request. The first blocks may be absent if the engine had them itself.
        """
        if self.wants_chains and block_hashes:
            here = takewhile(lambda status: status is not None, self.get_many(block_hashes))
            slots = [status.block_id for status in here if status is not None]
            self._order.chain(slots, len(block_hashes))

    def evict(
        self, n: int, protected: Container[BlockHash], mask: SlotMask | None = None
    ) -> Pairs | None:
        """Remove exactly `n` idle, unprotected blocks and return them, coldest first.

        Return None, and change nothing, if there are not that many. Blocks with `ref_cnt != 0` are
        never evicted, nor are blocks whose slot is False in `mask`. The slots stay allocated; the
        caller frees them.
        """
        chosen = self.coldest(n, protected, mask)
        if len(chosen) < n:
            return None
        hashes = [block_hash for block_hash, _ in chosen]
        slots = [status.block_id for _, status in chosen]
        self._order.evicted(slots, self._tags(hashes))
        self._directory.pop_many(hashes, slots)
        return chosen

    def coldest(
        self,
        n: int,
        protected: Container[BlockHash] = (),
        mask: SlotMask | None = None,
        window: int | None = None,
    ) -> Pairs:
        """Return up to `n` blocks that `evict` would remove, in that order; change nothing.

        `window` bounds the search to about that many of the blocks that would leave next.
        """
        at_slot, ref_counts = self._directory.at_slot, self.ref_counts
        found: dict[int, tuple[BlockHash, BlockStatus]] = {}
        pinned = 0

        def may_leave(slot: int) -> bool:
            nonlocal pinned
            pair = at_slot(slot)
            if pair is None or pair[1].ref_cnt != 0:
                pinned += 1
                if pinned == MANY_PINNED and ref_counts is not None:
                    raise _ManyPinned
                return False
            if pair[0] in protected:
                return False
            found[slot] = pair
            return True

        # An order may ask about more slots than it returns (ARC looks ahead in both lists).
        try:
            slots = self._order.victims(n, may_leave, mask, window)
        except _ManyPinned:
            assert ref_counts is not None, "else no search ends so"
            is_idle = np.asarray(ref_counts == 0)
            mask = is_idle if mask is None else np.asarray(is_idle & mask)
            slots = self._order.victims(n, may_leave, mask, window)
        return [found[slot] for slot in slots]

    def clear(self) -> None:
        """Remove every block and every ghost. Slots stay allocated."""
        self._directory.clear()
        self._order.clear()

    def __len__(self) -> int:
        """Return the number of blocks present."""
        return len(self._directory)
