"""`OrderedPolicy`: a `CachePolicy` made of a directory of slots and an eviction order."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import takewhile

import numpy as np

from ..base import BlockHash, BlockStatus, CachePolicy, Pairs, SlotMask, slot_of
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


class OrderedPolicy(CachePolicy):
    """Cache policy with any eviction order over any directory."""

    def __init__(self, directory: DictDirectory, order: EvictionOrder) -> None:
        self._directory = directory
        self._order = order
        self.wants_chains = order.wants_chains
        self.expects = order.expects
        self.ready_at = directory.ready_at
        # The directory answers alone, so the manager calls its methods directly.
        for name in ("get", "get_many", "mark_ready"):
            setattr(self, name, getattr(directory, name))

    def get(self, block_hash: BlockHash) -> BlockStatus | None:
        return self._directory.get(block_hash)

    def expect(self, block_hashes: Iterable[BlockHash]) -> None:
        if self.expects:
            self._order.expect(list(map(tag_of, block_hashes)))

    def insert(self, block_hash: BlockHash, status: BlockStatus) -> None:
        self._directory.put(block_hash, status)
        self._order.insert([status.block_id], self._tags([block_hash]))

    def insert_many(
        self, block_hashes: Sequence[BlockHash], statuses: Sequence[BlockStatus]
    ) -> None:
        slots = list(map(slot_of, statuses))
        self._directory.put_many(block_hashes, statuses, slots)
        slots.reverse()
        self._order.insert(slots, self._tags(block_hashes[::-1]))

    def _tags(self, block_hashes: Sequence[BlockHash]) -> list[int]:
        return list(map(tag_of, block_hashes)) if self._order.wants_tags else []

    def remove(self, block_hash: BlockHash) -> BlockStatus | None:
        status = self._directory.pop(block_hash)
        if status is not None:
            self._order.remove([status.block_id])
        return status

    def touch(self, block_hashes: Iterable[BlockHash]) -> None:
        self._order.touch(self._directory.slots_from_the_end(block_hashes))

    def settle(self, block_hashes: Iterable[BlockHash]) -> None:
        self._order.settle(self._directory.slots_from_the_end(block_hashes))

    def note_chain(self, block_hashes: Sequence[BlockHash]) -> None:
        if self.wants_chains and block_hashes:
            here = takewhile(lambda status: status is not None, self.get_many(block_hashes))
            slots = [status.block_id for status in here if status is not None]
            self._order.chain(slots, len(block_hashes))

    def evict(
        self, n: int, protected: Container[BlockHash], mask: SlotMask | None = None
    ) -> Pairs | None:
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
        self._directory.clear()
        self._order.clear()

    def __len__(self) -> int:
        return len(self._directory)
