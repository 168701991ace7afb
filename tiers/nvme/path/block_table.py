"""The block table of a namespace: which blocks the tier holds, as its writer uses it.

`LmdbBlockTable` keeps it on the disk. Nothing here needs LMDB.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ... import endurance
from .path_messages import Committed
from .presence_table import Journal, Slots, Words

BYTES_PER_SLOT = 256
"""Bytes per slot when both tables are full; 178 were measured after a million random keys."""
CHURN_BYTES_PER_SLOT = 1024
"""Bytes per slot of small tables for pages that a commit replaces: it may touch all of them."""
MAX_CHURN_PAGES = 16 << 10
"""Pages that a commit replaces: enough for one of `MAX_COMMIT_BLOCKS`."""
PAGE_BYTES = min(mmap.PAGESIZE, 32 << 10)
"""Bytes of a page of a new table: LMDB takes the system's pages, up to 32 KiB."""
MAX_COMMIT_BLOCKS = 4096
"""Limit on the blocks that a commit adds, and on those that it evicts; more follow in the next one.
With 8,192 of each, 4 of 150 commits found no room in the map of a table of 500,000 slots; with
4,096 none did."""
FIXED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """Place and checksum of one block."""

    slot: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes for one commit. Removals come first, then slots that are cleared, then puts."""

    epoch: int
    """Epoch that the changes belong to; the table refuses them in another."""
    puts: Sequence[tuple[bytes, int, int]] = ()
    """(Key, slot, checksum) of blocks to add. If a key exists, its entry stays."""
    removals: Sequence[bytes] = ()
    """Keys to remove; absent ones are ignored."""
    cleared: Sequence[int] = ()
    """Slots whose blocks are removed, whatever their keys."""
    written_bytes: int = 0
    """Bytes written since the last commit, for the totals."""
    read_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Applied:
    """Result of a commit.

    The outcome is OK, or nothing changed: STALE if the table has another epoch, NO_SPACE if the map
    or the disk is full, or IO_ERROR if the device failed.
    """

    outcome: Committed
    already: frozenset[int] = frozenset()
    """Positions in `Changes.puts` whose keys the table held already."""
    removed: tuple[tuple[bytes, int], ...] = ()
    """(Key, slot) of every block that was removed. This includes a block that was found in a slot
    that a put names."""
    journal: Journal | None = None
    """Changes to apply to the presence table; None if no block changed."""


@dataclass(frozen=True, slots=True)
class ScanBatch:
    """Some blocks of the table, each with the same position in all arrays."""

    hashes: Words
    """`hash_of` the keys."""
    slots: Slots
    checksums: Words


class BlockTable(Protocol):
    """The blocks of a namespace, as its writer uses them; one thread."""

    @property
    def epoch(self) -> int:
        """Epoch of the namespace; it grows with every reset."""
        ...

    @property
    def commit_number(self) -> int:
        """Number of the last commit that changed blocks."""
        ...

    @property
    def totals(self) -> tuple[int, int]:
        """Bytes (written, read) over the life of the namespace."""
        ...

    @property
    def is_unusable(self) -> bool:
        """True if the table can take no changes until it is opened again: it failed for good, or
        was closed."""
        ...

    def count(self) -> int:
        """Return the number of blocks, damaged entries included."""
        ...

    def get_many(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """Return the entry of each block; None if it is absent, damaged or unreadable."""
        ...

    def keys_after(self, key: bytes, limit: int) -> list[tuple[bytes, Entry]]:
        """Return up to `limit` blocks that follow `key` in the order of keys; b"" is before the
        first. The list is empty only if no whole block follows. Raises `CorruptionError`."""
        ...

    def apply(self, changes: Changes) -> Applied:
        """Change blocks in one commit, all or nothing. Raises nothing."""
        ...

    def reset(self, epoch: int) -> Applied:
        """Remove every block and begin a later epoch, durably. An earlier one is `STALE`.

        If it fails, the epoch stays, and the same reset may be tried again. If only the sync fails,
        the blocks are gone, but a loss of power may bring them back.
        """
        ...

    def last_changes(self) -> Journal | None:
        """Return the changes of commit `commit_number`; None if they are missing or damaged."""
        ...

    def scan(self) -> Iterator[ScanBatch]:
        """Yield all blocks whose entries are whole. Raises `CorruptionError`."""
        ...

    def day_totals(self) -> endurance.DayTotals:
        """Return the bytes written and read in the last day."""
        ...

    def day_record(self) -> bytes:
        """Return the record of the last day (`endurance`); it may be empty."""
        ...

    def sync(self) -> None:
        """Make all commits durable. Raises a `KVCascadeError`."""
        ...

    def close(self) -> None:
        """Sync and close the table, with a mark that spares the next opening the check of every
        page. Raises a `KVCascadeError`; the table is closed in any case."""
        ...

    def abandon(self) -> None:
        """Close the table as `kill -9` would; all commits stay."""
        ...


def block_table_bytes(slots: int, page_bytes: int = PAGE_BYTES) -> int:
    """Return the address space for a table of this number of slots: the disk space it takes."""
    churn = min(CHURN_BYTES_PER_SLOT * slots, MAX_CHURN_PAGES * page_bytes)
    whole = FIXED_BYTES + BYTES_PER_SLOT * slots + churn
    return -(-whole // (1 << 20)) << 20
