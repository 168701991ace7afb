"""Which hash lies in which slot: the organisation half of a cache policy.

A tier in memory uses `DictDirectory`; the NVMe tier has its own over its on-disk index. Both are
used by one thread (or under one lock) at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from ..base import BlockHash, BlockStatus


class BlockDirectory(ABC):
    """Hash to status, and slot to hash."""

    get: Callable[[BlockHash], BlockStatus | None]
    """The live status of a block, or None. An attribute so that the hot path can bind it."""

    @abstractmethod
    def put(self, block_hash: BlockHash, status: BlockStatus) -> None:
        """Add a block that is not present."""

    @abstractmethod
    def pop(self, block_hash: BlockHash) -> BlockStatus | None:
        """Remove a block; None if it was not there."""

    def put_many(self, block_hashes: Sequence[BlockHash], statuses: Sequence[BlockStatus]) -> None:
        """`put` for many."""
        for block_hash, status in zip(block_hashes, statuses, strict=True):
            self.put(block_hash, status)

    @abstractmethod
    def at_slot(self, slot: int) -> tuple[BlockHash, BlockStatus] | None:
        """The block in a slot, or None if the slot holds none."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every block."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of blocks."""


class DictDirectory(BlockDirectory):
    """A dict and a list by slot: for tiers that live in memory."""

    def __init__(self, capacity: int) -> None:
        self._status_of: dict[BlockHash, BlockStatus] = {}
        self._hash_at: list[BlockHash | None] = [None] * capacity
        self.get = self._status_of.get

    def put(self, block_hash: BlockHash, status: BlockStatus) -> None:
        assert block_hash not in self._status_of, "a block may be inserted only once"
        self._status_of[block_hash] = status
        self._hash_at[status.block_id] = block_hash

    def put_many(self, block_hashes: Sequence[BlockHash], statuses: Sequence[BlockStatus]) -> None:
        status_of, hash_at = self._status_of, self._hash_at
        before = len(status_of)
        for block_hash, status in zip(block_hashes, statuses, strict=True):
            status_of[block_hash] = status
            hash_at[status.block_id] = block_hash
        assert len(status_of) == before + len(statuses), "a block may be inserted only once"

    def pop(self, block_hash: BlockHash) -> BlockStatus | None:
        status = self._status_of.pop(block_hash, None)
        if status is not None:
            self._hash_at[status.block_id] = None
        return status

    def at_slot(self, slot: int) -> tuple[BlockHash, BlockStatus] | None:
        block_hash = self._hash_at[slot]
        if block_hash is None:
            return None
        return block_hash, self._status_of[block_hash]

    def clear(self) -> None:
        self._status_of.clear()
        self._hash_at = [None] * len(self._hash_at)

    def __len__(self) -> int:
        return len(self._status_of)
