"""Which hash lies in which slot: the organisation half of a cache policy.

A tier in memory uses `DictDirectory`; the NVMe tier has its own over its on-disk index. Both are
used by one thread (or under one lock) at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

from ..base import BlockHash, BlockStatus

NO_BLOCK = BlockHash(b"")
"""Stands where no block is."""
PIECE_BLOCKS = 32
"""Blocks of a prefix that are looked for in one go: enough to forget the cost of the call, and few
enough that a prefix which was stored in several parts is still found in adjacent slots mostly."""


class BlockDirectory(ABC):
    """Hash to status, and slot to hash."""

    ready_at: list[BlockHash] | None = None
    """By slot, the blocks that were marked ready and are still here, else `NO_BLOCK`; one more of
    those at the end. For the hot path, which follows runs of adjacent slots. None: not offered."""

    get: Callable[[BlockHash], BlockStatus | None]
    """The live status of a block, or None. An attribute so that the hot path can bind it."""
    owned: bytearray | None = None
    """A byte per slot, 0 where the block is somebody else's: found here, but never to leave from
    here. None: all are one's own."""

    def get_many(self, block_hashes: Sequence[BlockHash]) -> list[BlockStatus | None]:
        """`get` for many."""
        return list(map(self.get, block_hashes))

    def slots_of(self, block_hashes: Sequence[BlockHash]) -> list[int]:
        """Slots of those blocks that are here."""
        return [status.block_id for status in map(self.get, block_hashes) if status is not None]

    @abstractmethod
    def put(self, block_hash: BlockHash, status: BlockStatus) -> None:
        """Add a block that is not present."""

    @abstractmethod
    def pop(self, block_hash: BlockHash) -> BlockStatus | None:
        """Remove a block; None if it was not there."""

    def put_many(
        self,
        block_hashes: Sequence[BlockHash],
        statuses: Sequence[BlockStatus],
        slots: Sequence[int],
    ) -> None:
        """`put` for many; `slots` are those of the statuses."""
        for block_hash, status in zip(block_hashes, statuses, strict=True):
            self.put(block_hash, status)

    def pop_many(self, block_hashes: Sequence[BlockHash], slots: Sequence[int]) -> None:
        """`pop` for many that are here, in these slots."""
        for block_hash in block_hashes:
            self.pop(block_hash)

    def mark_ready(self, block_hashes: Sequence[BlockHash], slots: Sequence[int]) -> None:
        """The bytes of these blocks, which are here, are complete until they are popped."""
        if self.ready_at is not None:
            for block_hash, slot in zip(block_hashes, slots, strict=True):
                self.ready_at[slot] = block_hash

    @abstractmethod
    def at_slot(self, slot: int) -> tuple[BlockHash, BlockStatus] | None:
        """The block in a slot, or None if the slot holds none."""

    def is_readable(self) -> bool:
        """False if nobody can tell now what lies in the slots: to search them would be in vain."""
        return True

    @abstractmethod
    def clear(self) -> None:
        """Forget every block."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of blocks."""


class DictDirectory(BlockDirectory):
    """A dict, and lists by slot: for tiers that live in memory."""

    def __init__(self, capacity: int) -> None:
        self._status_of: dict[BlockHash, BlockStatus] = {}
        self._hash_at: list[BlockHash | None] = [None] * capacity
        self._status_at: list[BlockStatus | None] = [None] * capacity
        self._ready_at = self.ready_at = [NO_BLOCK] * (capacity + 1)
        self.get = self._status_of.get

    def get_many(self, block_hashes: Sequence[BlockHash]) -> list[BlockStatus | None]:
        found: list[BlockStatus | None] = []
        for piece, run in self._runs(block_hashes):
            found += self._status_at[run] if run else map(self.get, piece)
        return found

    def slots_of(self, block_hashes: Sequence[BlockHash]) -> list[int]:
        found: list[int] = []
        for piece, run in self._runs(block_hashes):
            found += range(run.start, run.stop) if run else super().slots_of(piece)
        return found

    def _runs(
        self, block_hashes: Sequence[BlockHash]
    ) -> Iterator[tuple[Sequence[BlockHash], slice | None]]:
        """Pieces, and the slots of those that lie in adjacent ones.

        A prefix does mostly. Comparing its hashes with those that lie there is one call a piece,
        and costs no more in a tier of a million blocks, where each look is a miss of the cache.
        """
        for at in range(0, len(block_hashes), PIECE_BLOCKS):
            piece = block_hashes[at : at + PIECE_BLOCKS]
            first = self.get(piece[0])
            run = None if first is None else slice(first.block_id, first.block_id + len(piece))
            yield piece, run if run and self._hash_at[run] == piece else None

    def put(self, block_hash: BlockHash, status: BlockStatus) -> None:
        assert block_hash not in self._status_of, "a block may be inserted only once"
        slot = status.block_id
        self._status_of[block_hash] = status
        self._hash_at[slot] = block_hash
        self._status_at[slot] = status

    def put_many(
        self,
        block_hashes: Sequence[BlockHash],
        statuses: Sequence[BlockStatus],
        slots: Sequence[int],
    ) -> None:
        status_of, hash_at, status_at = self._status_of, self._hash_at, self._status_at
        before = len(status_of)
        for block_hash, status, slot in zip(block_hashes, statuses, slots, strict=True):
            status_of[block_hash] = status
            hash_at[slot] = block_hash
            status_at[slot] = status
        assert len(status_of) == before + len(statuses), "a block may be inserted only once"

    def pop(self, block_hash: BlockHash) -> BlockStatus | None:
        status = self._status_of.pop(block_hash, None)
        if status is not None:
            slot = status.block_id
            self._hash_at[slot] = None
            self._ready_at[slot] = NO_BLOCK
        return status

    def pop_many(self, block_hashes: Sequence[BlockHash], slots: Sequence[int]) -> None:
        status_of, hash_at, ready_at = self._status_of, self._hash_at, self._ready_at
        for block_hash, slot in zip(block_hashes, slots, strict=True):
            del status_of[block_hash]
            hash_at[slot] = None
            ready_at[slot] = NO_BLOCK

    def at_slot(self, slot: int) -> tuple[BlockHash, BlockStatus] | None:
        block_hash, status = self._hash_at[slot], self._status_at[slot]
        return None if block_hash is None or status is None else (block_hash, status)

    def clear(self) -> None:
        self._status_of.clear()
        self._hash_at = [None] * len(self._hash_at)
        self._ready_at[:] = [NO_BLOCK] * len(self._ready_at)

    def __len__(self) -> int:
        return len(self._status_of)
