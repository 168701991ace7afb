"""The directory half of a cache policy: the map between block hashes and slots.

`DictDirectory` is in memory; `KeptDirectory` also notes the blocks in a kept arena. One thread at a
time uses a directory, or several under one lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from ...base import BlockHash, BlockStatus

NO_BLOCK = BlockHash(b"")
"""Hash that stands for an empty slot."""
PIECE_BLOCKS = 32
"""Number of blocks of a prefix that one comparison looks up. At this size the cost of the call is
small. Larger pieces would more often span two parts of a prefix that were stored separately."""


class DictDirectory:
    """Maps a block hash to its status, and a slot to its hash: a dict, and lists by slot."""

    def __init__(self, capacity: int) -> None:
        self._status_of: dict[BlockHash, BlockStatus] = {}
        self._hash_at: list[BlockHash | None] = [None] * capacity
        self._status_at: list[BlockStatus | None] = [None] * capacity
        self.ready_at = [NO_BLOCK] * (capacity + 1)
        """Hash of the ready block in each slot, by slot number; `NO_BLOCK` for other slots and in
        one extra entry at the end. The hot path follows runs of adjacent slots in it."""
        self.get: Callable[[BlockHash], BlockStatus | None] = self._status_of.get
        """Returns the live status of a block, or None. It is an attribute so the hot path can bind
        it."""

    def get_many(self, block_hashes: Sequence[BlockHash]) -> list[BlockStatus | None]:
        """Do `get` for many blocks."""
        found: list[BlockStatus | None] = []
        for piece, run in self._runs(block_hashes):
            found += self._status_at[run] if run else map(self.get, piece)
        return found

    def slots_from_the_end(self, block_hashes: Iterable[BlockHash]) -> list[int]:
        """Return the slots of the blocks that are present, in reverse order."""
        found: list[int] = []
        for piece, run in self._runs(list(block_hashes)):
            if run:
                found += range(run.start, run.stop)
            else:
                found += [status.block_id for status in map(self.get, piece) if status is not None]
        found.reverse()
        return found

    def _runs(
        self, block_hashes: Sequence[BlockHash]
    ) -> Iterator[tuple[Sequence[BlockHash], slice | None]]:
        """Yield the hashes in pieces, each with its slots if they are adjacent, else with None.

        The slots of a prefix are mostly adjacent. One comparison of lists then checks a whole
        piece. Its cost does not grow with the tier, where each lookup of a single block is a miss
        of the processor's cache.
        """
        for at in range(0, len(block_hashes), PIECE_BLOCKS):
            piece = block_hashes[at : at + PIECE_BLOCKS]
            first = self.get(piece[0])
            run = None if first is None else slice(first.block_id, first.block_id + len(piece))
            yield piece, run if run and self._hash_at[run] == piece else None

    def put_many(
        self,
        block_hashes: Sequence[BlockHash],
        statuses: Sequence[BlockStatus],
        slots: Sequence[int],
    ) -> None:
        """Add blocks that are absent. `slots` are the slots of the statuses."""
        status_of, hash_at, status_at = self._status_of, self._hash_at, self._status_at
        before = len(status_of)
        for block_hash, status, slot in zip(block_hashes, statuses, slots, strict=True):
            status_of[block_hash] = status
            hash_at[slot] = block_hash
            status_at[slot] = status
        assert len(status_of) == before + len(statuses), "a block may be inserted only once"

    def pop(self, block_hash: BlockHash) -> BlockStatus | None:
        """Remove a block. Return its status, or None if it was absent."""
        status = self._status_of.pop(block_hash, None)
        if status is not None:
            slot = status.block_id
            self._hash_at[slot] = None
            self.ready_at[slot] = NO_BLOCK
        return status

    def pop_many(self, block_hashes: Sequence[BlockHash], slots: Sequence[int]) -> None:
        """Do `pop` for many blocks that are present, in these slots."""
        status_of, hash_at, ready_at = self._status_of, self._hash_at, self.ready_at
        for block_hash, slot in zip(block_hashes, slots, strict=True):
            del status_of[block_hash]
            hash_at[slot] = None
            ready_at[slot] = NO_BLOCK

    def mark_ready(self, block_hashes: Sequence[BlockHash], slots: Sequence[int]) -> None:
        """Note that the bytes of these present blocks are complete until the blocks are popped."""
        for block_hash, slot in zip(block_hashes, slots, strict=True):
            self.ready_at[slot] = block_hash

    def at_slot(self, slot: int) -> tuple[BlockHash, BlockStatus] | None:
        """Return the block in a slot, or None if the slot holds none."""
        block_hash, status = self._hash_at[slot], self._status_at[slot]
        return None if block_hash is None or status is None else (block_hash, status)

    def clear(self) -> None:
        """Remove every block."""
        self._status_of.clear()
        self._hash_at = [None] * len(self._hash_at)
        self.ready_at[:] = [NO_BLOCK] * len(self.ready_at)

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._status_of)
