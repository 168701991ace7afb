"""`OrderedPolicy`: a directory (where is it) and an order (who leaves) make one `CachePolicy`."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import takewhile
from typing import Any

import numpy.typing as npt

from ..base import BlockHash, BlockStatus, CachePolicy, SlotMask
from .directory import BlockDirectory
from .order import EvictionOrder

Pairs = list[tuple[BlockHash, BlockStatus]]


def tag_of(block_hash: BlockHash) -> int:
    """A 64-bit digest for ghosts. Block hashes are cryptographic, so a part of one will do.

    Folds the first and last eight bytes, since the last four of vLLM's keys are a group number.
    """
    return int.from_bytes(block_hash[:8], "little") ^ int.from_bytes(block_hash[-8:], "little")


class OrderedPolicy(CachePolicy):
    """Any eviction order over any directory."""

    def __init__(self, directory: BlockDirectory, order: EvictionOrder) -> None:
        self._directory = directory
        self._order = order
        self.wants_chains = order.wants_chains
        self._expects = order.wants_tags and type(order).expect is not EvictionOrder.expect
        """Whether the order does anything with `expect`: tags of many blocks take time."""
        self.ready_at = directory.ready_at
        # The hot path of every lookup: no call of our own between the manager and the directory.
        setattr(self, "get", directory.get)  # noqa: B010 - a method may not be assigned to

    def get(self, block_hash: BlockHash) -> BlockStatus | None:
        return self._directory.get(block_hash)

    def get_many(self, block_hashes: Sequence[BlockHash]) -> list[BlockStatus | None]:
        return self._directory.get_many(block_hashes)

    def owns(self, block_hash: BlockHash) -> bool:
        status, owned = self.get(block_hash), self._directory.owned
        return status is not None and (owned is None or bool(owned[status.block_id]))

    def mark_ready(self, block_hashes: Sequence[BlockHash], slots: Sequence[int]) -> None:
        self._directory.mark_ready(block_hashes, slots)

    def expect(self, block_hashes: Iterable[BlockHash]) -> None:
        if self._expects:
            self._order.expect(list(map(tag_of, block_hashes)))

    def insert(self, block_hash: BlockHash, status: BlockStatus) -> None:
        self._directory.put(block_hash, status)
        self._order.insert([status.block_id], self._tags([block_hash]))

    def insert_many(
        self, block_hashes: Sequence[BlockHash], statuses: Sequence[BlockStatus]
    ) -> None:
        slots = [status.block_id for status in statuses]
        self._directory.put_many(block_hashes, statuses, slots)
        slots.reverse()
        self._order.insert(slots, self._tags(block_hashes[::-1]))

    def _tags(self, block_hashes: Sequence[BlockHash]) -> list[int]:
        return list(map(tag_of, block_hashes)) if self._order.wants_tags else []

    def remove(self, block_hash: BlockHash) -> BlockStatus | None:
        status = self._directory.pop(block_hash)
        if status is not None:
            owned = self._directory.owned
            if owned is None or owned[status.block_id]:
                self._order.remove([status.block_id])
        return status

    def touch(self, block_hashes: Iterable[BlockHash]) -> None:
        self._order.touch(self._slots(block_hashes))

    def settle(self, block_hashes: Iterable[BlockHash]) -> None:
        self._order.settle(self._slots(block_hashes))

    def note_chain(self, block_hashes: Sequence[BlockHash]) -> None:
        if self.wants_chains and block_hashes:
            here = takewhile(lambda status: status is not None, self.get_many(block_hashes))
            slots = [status.block_id for status in here if status is not None]
            owned = self._directory.owned
            if owned is not None:  # another process's block is as good as missing to the order
                slots = list(takewhile(owned.__getitem__, slots))
            self._order.chain(slots, len(block_hashes))

    def _slots(self, block_hashes: Iterable[BlockHash]) -> list[int]:
        """Slots of the blocks that are here, the first block's last."""
        slots = self._directory.slots_of(list(block_hashes))
        slots.reverse()
        owned = self._directory.owned
        return slots if owned is None else [slot for slot in slots if owned[slot]]

    def adopt(self, block_hashes: Sequence[BlockHash], slots: Sequence[int]) -> None:
        self._order.insert_cold(slots, self._tags(block_hashes))

    def disown(self, slots: Sequence[int]) -> None:
        self._order.remove([slot for slot in slots if slot in self._order])

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
        if not self._directory.is_readable():
            return []
        at_slot = self._directory.at_slot
        found: dict[int, tuple[BlockHash, BlockStatus]] = {}

        def may_leave(slot: int) -> bool:
            pair = at_slot(slot)
            if pair is None or pair[1].ref_cnt != 0 or pair[0] in protected:
                return False
            found[slot] = pair
            return True

        # An order may ask about more slots than it returns (ARC looks ahead in both lists).
        return [found[slot] for slot in self._order.victims(n, may_leave, mask, window)]

    def clear(self) -> None:
        self._directory.clear()
        self._order.clear()

    def reconcile(self, present: npt.NDArray[Any]) -> None:
        """After a crash: the directory holds exactly the slots in `present` (ascending)."""
        self._order.reconcile(present)

    def __len__(self) -> int:
        return len(self._directory)
