"""The presence table of a namespace: which slot holds a block, in memory that processes share.

The writer of the path alone changes it. Every process of the path reads it without a lock. The
table is advisory: a wrong cell is a miss or a second look, never wrong bytes. A reader verifies
what it has read against `checksum_of`.

All numbers are little endian. The parts follow each other in this order:

| part | size | contents |
| --- | --- | --- |
| header | 4096 bytes | see `presence_file` |
| cells | u64 × (`cells` + `TAIL_CELLS`) | tag << 32, plus slot + 1; 0 means empty |
| checksums | u64 × slots | `payload_checksum` of the block in the slot |
| homes | u32 × slots | low half of the hash of the key in the slot |

`cells` is the first power of two from `CELLS_PER_SLOT` × slots on. The hash of a key is xxh3_64 of
the whole key with `KEY_SEED`. Its high half is the tag, its low half the *home*. The position of a
home is the remainder of its division by `cells`. A block lies in the first cell from its position
on that was empty, less than `MAX_PROBES` cells away. The tail takes those beyond the last position.

A removal moves the following cells back, so the table needs no tombstones. A reader that looks at
the same time may miss a block that is moved. The writer sets checksum and home before the cell, and
clears the cell before the slot is granted again. Each number is aligned and written at once.

If the writer dies in the middle of a removal, a moved cell may exist twice. `WritablePresence.
replay` repairs that: it writes anew every run of cells that the last commit touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_digest, xxh3_64_intdigest

HEADER_BYTES = 4096
MAX_PROBES = 512
"""Largest number of cells that a search reads. The longest search over 16 million random keys read
about 100."""
TAIL_CELLS = MAX_PROBES
CELLS_PER_SLOT = 2
KEY_SEED = 1
"""Seed of the hash of a key. Checksums of payloads are seeded with the hash of seed 0. So the block
of another key with the same hash here is not served."""
FEW_KEYS = 512
"""Number of keys up to which single searches are faster than a search with numpy."""
SCAN_CELLS = 1 << 16
"""Number of cells that `used_slots` reads together; they fit into a processor's cache."""
EPOCH_WORD = 16
"""Position of the epoch in the header, in numbers of 64 bits."""
APPLIED_WORD = 17
"""Position of the number of the last commit that was applied completely."""

_LOW = 0xFFFF_FFFF
_HIGH = 0xFFFF_FFFF_0000_0000

Words = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Journal:
    """Changes of one commit of the block table, as the presence table applies them.

    Blocks that were removed come first. Applying a journal twice has the effect of once.
    """

    number: int
    """Number of the commit; it grows by one with each commit that changes a block."""
    epoch: int
    removed: tuple[tuple[int, int], ...] = ()
    """(Hash of the key, slot) of every block that was removed."""
    stored: tuple[tuple[int, int, int], ...] = ()
    """(Hash of the key, slot, checksum) of every block that was added."""
    is_reset: bool = False
    """True if the commit began this epoch and removed every block."""


def presence_bytes(slots: int) -> int:
    """Return the size of the presence table of this number of slots, in bytes."""
    return HEADER_BYTES + 8 * (_cells_for(slots) + TAIL_CELLS) + 12 * slots


def _cells_for(slots: int) -> int:
    """Return the number of positions: a power of two, so that a position is one operation."""
    return 1 << (CELLS_PER_SLOT * slots - 1).bit_length()


def hash_of(key: bytes) -> int:
    """Return the 64-bit hash by which a key is found."""
    return xxh3_64_intdigest(key, KEY_SEED)


def hashes_of(keys: Sequence[bytes], seed: int = KEY_SEED) -> Words:
    """Return the xxh3_64 of every key as uint64; with the default seed it is `hash_of`."""
    digests = b"".join([xxh3_64_digest(key, seed) for key in keys])
    return np.frombuffer(digests, dtype=">u8").astype(np.uint64)


class PresenceTable:
    """Searches in a presence table. Any process and thread; no method waits, locks or raises."""

    def __init__(self, memory: memoryview, slots: int) -> None:
        """Use the first `presence_bytes(slots)` bytes of `memory`, mapped or private."""
        cells = _cells_for(slots)
        at_checksums = HEADER_BYTES + 8 * (cells + TAIL_CELLS)
        at_homes = at_checksums + 8 * slots
        self.slots = slots
        """Number of slots; each is from 0 to this number - 1."""
        self.memory = memory
        self._mask = cells - 1
        self._header = memory[:HEADER_BYTES].cast("B").cast("Q")
        self._cells = memory[HEADER_BYTES:at_checksums].cast("B").cast("Q")
        self._checksums = memory[at_checksums:at_homes].cast("B").cast("Q")
        self._homes = memory[at_homes : at_homes + 4 * slots].cast("B").cast("I")

    @property
    def epoch(self) -> int:
        """Epoch of the namespace; a reader compares it before and after it read a block."""
        return self._header[EPOCH_WORD]

    @property
    def applied(self) -> int:
        """Number of the last commit of the block table that was applied completely."""
        return self._header[APPLIED_WORD]

    def find(self, key: bytes) -> int:
        """Return the slot of a block; -1 if it is absent.

        32 bits of the hash are compared. A damaged cell may name a slot that does not exist.
        """
        hashed = xxh3_64_intdigest(key, KEY_SEED)
        first = hashed & self._mask
        cells = self._cells
        cell = cells[first]
        if not cell:
            return -1
        if cell ^ hashed <= _LOW:  # the tags are equal
            return (cell & _LOW) - 1
        for at in range(first + 1, first + MAX_PROBES):
            cell = cells[at]
            if not cell:
                return -1
            if cell ^ hashed <= _LOW:
                return (cell & _LOW) - 1
        return -1

    def find_many(self, keys: Sequence[bytes]) -> Slots:
        """Return `find` of every key as int32."""
        if len(keys) <= FEW_KEYS:
            # A damaged cell may say more than fits into int32.
            found = np.fromiter(map(self.find, keys), dtype=np.int64, count=len(keys))
            return found.astype(np.int32)
        return self.find_hashes(hashes_of(keys))

    def find_hashes(self, hashes: Words) -> Slots:
        """Return the slot of the block with each hash, or -1, as int32."""
        table = np.frombuffer(self._cells, dtype=np.uint64)
        at = hashes & np.uint64(self._mask)
        found = np.full(len(hashes), -1, dtype=np.int32)
        rest = np.arange(len(hashes))
        for _ in range(MAX_PROBES):
            cells = table[at]
            is_full = cells > 0
            is_hit = (cells ^ hashes[rest] <= _LOW) & is_full
            found[rest[is_hit]] = (cells[is_hit] & np.uint64(_LOW)).astype(np.int64) - 1
            is_open = ~is_hit & is_full
            if not is_open.any():
                break
            rest, at = rest[is_open], at[is_open] + np.uint64(1)
        return found

    def is_same(self, key: bytes, slot: int) -> bool:
        """Return True if the table says now that this slot holds the block; 64 bits are
        compared."""
        if not 0 <= slot < self.slots or self._homes[slot] != hash_of(key) & _LOW:
            return False
        return self.find(key) == slot

    def checksum_of(self, slot: int) -> int:
        """Return the checksum of the block in a slot; 0 for a slot that does not exist."""
        return self._checksums[slot] if 0 <= slot < self.slots else 0

    def used_slots(self) -> Mask:
        """Return True for every slot that a cell names: shape `(slots,)`."""
        cells = np.frombuffer(self._cells, dtype=np.uint64)
        beyond = self.slots + 1  # stands for all slots that do not exist
        is_used = np.zeros(beyond + 1, dtype=np.bool_)
        for start in range(0, len(cells), SCAN_CELLS):
            named = (cells[start : start + SCAN_CELLS] & np.uint64(_LOW)).view(np.int64)
            is_used[np.minimum(named, beyond, out=named)] = True
        return is_used[1:beyond]


class WritablePresence(PresenceTable):
    """A presence table with its changes: the process that writes the path, one thread."""

    def begin(self, epoch: int, applied: int) -> None:
        """Set both numbers of the header; no cell changes."""
        self._header[EPOCH_WORD] = epoch
        self._header[APPLIED_WORD] = applied

    def insert(self, key: bytes, slot: int, checksum: int) -> bool:
        """Add a block that the table does not hold, in a slot that no cell names."""
        return self._insert(hash_of(key), slot, checksum)

    def remove(self, key: bytes, slot: int) -> bool:
        """Remove a block. Return False if no cell says that this slot holds it."""
        return self._remove(hash_of(key), slot)

    def clear(self, epoch: int) -> None:
        """Remove every block, and begin an epoch. Readers see the epoch first."""
        self._header[EPOCH_WORD] = epoch
        cells = np.frombuffer(self._cells, dtype=np.uint64)
        cells[:] = 0

    def apply(self, journal: Journal) -> None:
        """Apply a commit that follows the last one applied, and record its number."""
        if journal.is_reset:
            self.clear(journal.epoch)
        for hashed, slot in journal.removed:
            self._remove(hashed, slot)
        for hashed, slot, checksum in journal.stored:
            self._insert(hashed, slot, checksum)
        self._header[APPLIED_WORD] = journal.number

    def replay(self, journal: Journal) -> None:
        """Apply a commit of which any part may have been applied, and record its number."""
        if journal.is_reset:
            self.clear(journal.epoch)
        changed = {slot for _, slot in journal.removed} | {slot for _, slot, _ in journal.stored}
        for hashed in [each[0] for each in (*journal.removed, *journal.stored)]:
            self._rewrite(hashed & self._mask, changed)
        for hashed, slot, checksum in journal.stored:
            self._insert(hashed, slot, checksum)
        self._header[APPLIED_WORD] = journal.number

    def load(self, hashes: Words, slots: Slots, checksums: Words) -> None:
        """Replace all blocks by these; of two in one slot, the last one stays."""
        cells = np.frombuffer(self._cells, dtype=np.uint64)
        homes = np.frombuffer(self._homes, dtype=np.uint32)
        cells[:] = 0
        homes[slots] = hashes.astype(np.uint32)
        np.frombuffer(self._checksums, dtype=np.uint64)[slots] = checksums
        tags = np.zeros(self.slots, dtype=np.uint32)
        tags[slots] = (hashes >> np.uint64(32)).astype(np.uint32)
        is_used = np.zeros(self.slots, dtype=np.bool_)
        is_used[slots] = True
        used = np.flatnonzero(is_used).astype(np.uint64)
        del is_used
        positions = homes[used].astype(np.uint64) & np.uint64(self._mask)
        order = np.sort(positions << np.uint64(32) | used)
        del used, positions
        wanted = (order >> np.uint64(32)).astype(np.int64)
        order &= np.uint64(_LOW)
        ordinals = np.arange(len(order))
        at = np.maximum.accumulate(wanted - ordinals) + ordinals
        fits = (at - wanted < MAX_PROBES) & (at < len(cells))
        order, at = order[fits], at[fits]
        cells[at] = tags[order].astype(np.uint64) << np.uint64(32) | order + np.uint64(1)

    # -- inside --------------------------------------------------------------------------------

    def _insert(self, hashed: int, slot: int, checksum: int) -> bool:
        """Set the first empty cell. Return False if none is within reach."""
        cells = self._cells
        home = hashed & _LOW
        first = hashed & self._mask
        for at in range(first, first + MAX_PROBES):
            if not cells[at]:
                self._checksums[slot] = checksum
                self._homes[slot] = home
                cells[at] = (hashed >> 32) << 32 | slot + 1
                return True
        return False

    def _remove(self, hashed: int, slot: int) -> bool:
        """Remove the cell of a block, and move back the cells behind it."""
        cells = self._cells
        wanted = (hashed >> 32) << 32 | slot + 1
        first = hashed & self._mask
        for at in range(first, first + MAX_PROBES):
            cell = cells[at]
            if cell == wanted:
                self._close_gap(at)
                return True
            if not cell:
                break
        return False

    def _close_gap(self, gap: int) -> None:
        """Move back the cells behind `gap` that may lie there, and empty the last gap."""
        cells = self._cells
        for at in range(gap + 1, len(cells)):
            cell = cells[at]
            if not cell:
                break
            if self._position_of(cell, at) <= gap:
                cells[gap] = cell
                gap = at
        cells[gap] = 0

    def _position_of(self, cell: int, at: int) -> int:
        """Return the first position of the block of a cell; `at` if the cell is damaged."""
        slot = (cell & _LOW) - 1
        return self._homes[slot] & self._mask if 0 <= slot < self.slots else at

    def _rewrite(self, at: int, without: set[int]) -> None:
        """Write anew the run of cells around a position, without these slots and doubles."""
        cells = self._cells
        first = end = at
        while first > 0 and cells[first - 1]:
            first -= 1
        while end < len(cells) and cells[end]:
            end += 1
        kept: dict[int, int] = {}
        for cell in cells[first:end].tolist():
            slot = (cell & _LOW) - 1
            if 0 <= slot < self.slots and slot not in without:
                kept[slot] = cell
        for at in range(first, end):
            cells[at] = 0
        for slot, cell in kept.items():
            self._insert(cell & _HIGH | self._homes[slot], slot, self._checksums[slot])
