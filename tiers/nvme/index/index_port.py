"""The interface of an index of blocks as the block store uses it: entries by key, and commits.

`BlockIndex` implements it over LMDB. Nothing here needs LMDB, so the store and its handlers also
work with an index in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from ...base import BlockHash
from ..segments.format import IndexEntry

SlotTest = Callable[[int], bool]
"""Returns True if a slot lies in a segment of the calling process."""


class CommitOutcome(Enum):
    """Result of a commit."""

    DONE = "done"
    STALE_EPOCH = "stale_epoch"  # the namespace was reset after the caller started
    NO_SPACE = "no_space"
    NO_PAGES = "no_pages"  # the map is full: freed pages stay pinned while older states are read
    IO_ERROR = "io_error"


@dataclass(frozen=True, slots=True)
class Removal:
    """An entry to remove, if its slot and generation still match."""

    key: BlockHash
    slot: int
    generation: int


class IndexPort(Protocol):
    """An index as `BlockStore` uses it, from any thread."""

    epoch: int
    """Latest epoch known to be committed."""
    has_panicked: bool
    """True if this process cannot change the index any more."""

    def entry(self, key: bytes) -> IndexEntry | None:
        """Return the entry of a block as committed now."""
        ...

    def keys(self) -> Iterator[tuple[bytes, IndexEntry]]:
        """Yield every block and its entry."""
        ...

    def commit(
        self,
        epoch: int,
        removals: Sequence[Removal],
        puts: Sequence[tuple[BlockHash, IndexEntry]] = (),
        is_own: SlotTest | None = None,
        held: set[BlockHash] | None = None,
        read_bytes: int = 0,
    ) -> CommitOutcome:
        """Remove and add entries, removals first; all or nothing. See `BlockIndex.commit`."""
        ...

    def take_away(
        self, epoch: int, entries: Sequence[tuple[bytes, bytes]]
    ) -> tuple[CommitOutcome, int]:
        """Remove entries that still match exactly; return the outcome and how many were removed."""
        ...
