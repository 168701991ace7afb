"""The slot table: the block in each slot of an arena that outlives its processes.

    | fingerprint 32, epoch uint64 little-endian, 24 unused | slot 0: 64 | slot 1: 64 | ...
    slot: key length uint8 (0: nothing complete), 7 zero bytes, key padded to 48,
          XXH3-64 of key and slot number, uint64 little-endian

The table lies behind the slots in the same file. Guarantee: a record exists only while the bytes of
its slot are complete. The scheduler is the only writer. It writes a record after the bytes have
arrived, and removes it before it allocates the slot again. If the writer dies during a write, the
torn record does not match its checksum. The table is memory, so it does not survive a restart of
the machine.

The epoch counts the resets of the tiers below that the writer knew of, those by other engines
included. Blocks of a dead engine are discarded if the tiers were reset since. Blocks that an engine
stored after its own reset are discarded as well: its weights may have been updated in place, and
the next process loads weights from disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from ..base import BlockHash, BlockStatus
from ..policies.parts.directory import DictDirectory

RECORD_BYTES = 64
KEY_OFFSET = 8
MAX_KEY_BYTES = 48
CHECK_OFFSET = KEY_OFFSET + MAX_KEY_BYTES
FINGERPRINT_BYTES = 32
_BATCH_RECORDS = 1 << 16
NO_EPOCH = (1 << 64) - 1
"""Epoch of blocks that were stored after this process's own reset. No later process has this epoch,
so it discards them."""

_Bytes = npt.NDArray[np.uint8]
_digest = xxhash.xxh3_64_intdigest


def table_bytes(slots: int) -> int:
    """Return the size of the table of an arena with `slots` slots, in bytes."""
    return (slots + 1) * RECORD_BYTES


class SlotTable:
    """The slot table over shared memory. Scheduler thread, under the manager's lock."""

    def __init__(self, memory: _Bytes) -> None:
        """`memory` is a uint8 array of length `table_bytes(slots)`."""
        rows = memory.reshape(-1, RECORD_BYTES)
        self._fingerprint = rows[0, :FINGERPRINT_BYTES]
        self._epoch = rows[0, FINGERPRINT_BYTES : FINGERPRINT_BYTES + 8].view("<u8")
        self._rows = rows[1:]

    def begin(self, fingerprint: bytes, epoch: int = 0) -> bool:
        """Use the table for this namespace and epoch.

        Return True if the table belongs to both already. Otherwise clear it and return False.
        """
        assert len(fingerprint) == FINGERPRINT_BYTES
        if self.fingerprint == fingerprint and self._epoch[0] == epoch != NO_EPOCH:
            return True
        self.clear()
        self._fingerprint[:] = np.frombuffer(fingerprint, np.uint8)
        self._epoch[0] = epoch
        return False

    @property
    def fingerprint(self) -> bytes:
        """Fingerprint of the namespace that last used the table; zeros if none has."""
        return self._fingerprint.tobytes()

    def complete(self) -> tuple[list[BlockHash], list[int]]:
        """Return the blocks whose bytes are complete, and their slots in ascending order.

        If two slots have one key, the first one counts.
        """
        lengths = self._rows[:, 0]
        slots = np.flatnonzero((lengths > 0) & (lengths <= MAX_KEY_BYTES))
        keys: dict[BlockHash, int] = {}
        for start in range(0, len(slots), _BATCH_RECORDS):
            self._read(slots[start : start + _BATCH_RECORDS], keys)
        return list(keys), list(keys.values())

    def _read(self, slots: npt.NDArray[np.intp], keys: dict[BlockHash, int]) -> None:
        """Add the valid records of these slots to `keys`.

        A start reads millions of records, so arrays do most of the work.
        """
        rows = self._rows[slots]
        is_padding = np.arange(MAX_KEY_BYTES) >= rows[:, :1]
        is_spoilt = (rows[:, KEY_OFFSET:CHECK_OFFSET] * is_padding).any(axis=1)
        is_spoilt |= rows[:, 1:KEY_OFFSET].any(axis=1)
        rows, slots = rows[~is_spoilt], slots[~is_spoilt]
        raw = rows.tobytes()
        lengths = rows[:, 0].tolist()
        starts = range(KEY_OFFSET, len(raw), RECORD_BYTES)
        found = [raw[start : start + n] for start, n in zip(starts, lengths, strict=True)]
        stated = np.ascontiguousarray(rows[:, CHECK_OFFSET:]).view("<u8")[:, 0]
        is_right = _checks(found, slots) == stated
        for key, slot, is_so in zip(found, slots.tolist(), is_right.tolist(), strict=True):
            if is_so:
                keys.setdefault(BlockHash(key), slot)

    def mark(self, keys: Sequence[BlockHash], slots: Sequence[int], epoch: int = 0) -> None:
        """Record that the bytes of these slots are complete. Keys that are too long are left out.

        All records of the table are of this epoch. Records of another one are removed, such as
        those of a time when the epoch was unknown.
        """
        if self._epoch[0] != epoch:
            self.clear()
            self._epoch[0] = epoch
        if any(len(key) > MAX_KEY_BYTES for key in keys):
            short = [(k, s) for k, s in zip(keys, slots, strict=True) if len(k) <= MAX_KEY_BYTES]
            keys, slots = [k for k, _ in short], [s for _, s in short]
        where = np.asarray(slots, dtype=np.intp)
        padded = b"".join([key.ljust(MAX_KEY_BYTES, b"\0") for key in keys])
        records = np.zeros((len(keys), RECORD_BYTES), dtype=np.uint8)
        records[:, 0] = list(map(len, keys))
        padded_keys = np.frombuffer(padded, dtype=np.uint8)
        records[:, KEY_OFFSET:CHECK_OFFSET] = padded_keys.reshape(-1, MAX_KEY_BYTES)
        records[:, CHECK_OFFSET:] = _checks(keys, where).view(np.uint8).reshape(-1, 8)
        self._rows[where] = records

    def unmark(self, slots: Sequence[int]) -> None:
        """Remove the records of these slots."""
        self._rows[slots, 0] = 0

    def clear(self) -> None:
        """Remove all records."""
        self._rows[:, 0] = 0


class KeptDirectory(DictDirectory):
    """A directory in memory that updates the slot table with every change."""

    def __init__(
        self, capacity: int, table: SlotTable, epoch_of: Callable[[], int] = lambda: 0
    ) -> None:
        """`epoch_of` returns the epoch, which changes only while the directory is empty."""
        super().__init__(capacity)
        self._table = table
        self._epoch_of = epoch_of
        self._was_reset = False

    def mark_ready(self, block_hashes: Sequence[BlockHash], slots: Sequence[int]) -> None:
        super().mark_ready(block_hashes, slots)
        epoch = NO_EPOCH if self._was_reset else self._epoch_of()
        self._table.mark(block_hashes, slots, epoch)

    def pop(self, block_hash: BlockHash) -> BlockStatus | None:
        status = super().pop(block_hash)
        if status is not None:
            self._table.unmark([status.block_id])
        return status

    def pop_many(self, block_hashes: Sequence[BlockHash], slots: Sequence[int]) -> None:
        super().pop_many(block_hashes, slots)
        self._table.unmark(slots)

    def clear(self) -> None:
        super().clear()
        self._table.clear()
        self._was_reset = True


def _checks(keys: Sequence[bytes], slots: npt.NDArray[np.intp]) -> npt.NDArray[np.uint64]:
    """Return the checksums of the records of these keys in these slots."""
    numbers = slots.astype("<u8").tobytes()
    digests = [_digest(key + numbers[8 * i : 8 * i + 8]) for i, key in enumerate(keys)]
    return np.array(digests, dtype="<u8")
