"""What the block store asks of an index of blocks: entries by key, and commits.

`BlockIndex` is the index in LMDB. Nothing here needs LMDB, so that the store and its handlers also
work over an index that is kept in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from ...base import BlockHash
from ..segments.format import IndexEntry

SlotTest = Callable[[int], bool]


class CommitOutcome(Enum):
    """What became of a commit."""

    DONE = "done"
    STALE_EPOCH = "stale_epoch"  # the namespace was reset after the caller started
    NO_SPACE = "no_space"
    NO_PAGES = "no_pages"  # the map is full: freed pages wait until nobody reads what was before
    IO_ERROR = "io_error"


@dataclass(frozen=True, slots=True)
class Removal:
    """An entry that shall go, if it is still the one that was meant."""

    key: BlockHash
    slot: int
    generation: int


class IndexPort(Protocol):
    """An index as `BlockStore` uses it, from any thread."""

    epoch: int
    """The latest epoch that is known to be committed."""
    has_panicked: bool
    """True if this process cannot change the index any more."""

    def entry(self, key: bytes) -> IndexEntry | None:
        """The entry of a block as committed now."""
        ...

    def keys(self) -> Iterator[tuple[bytes, IndexEntry]]:
        """Every block and its entry."""
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
        """Remove entries that are still exactly these; returns how many of them there were."""
        ...
