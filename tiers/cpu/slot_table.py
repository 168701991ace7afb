"""What lies in each slot of an arena that outlives its processes.

    | fingerprint 32, epoch uint64 little-endian, 24 unused | slot 0: 64 | slot 1: 64 | ...
    slot: key length uint8 (0: nothing complete), 7 zero bytes, key padded to 48,
          XXH3-64 of key and slot number, uint64 little-endian

The table lies behind the slots in the same file. Guarantees: a record is there only while the bytes
of its slot are complete. The scheduler, its only writer, writes it after the bytes have arrived and
removes it before the slot is given to anybody; a record that was torn by the writer's death does
not match its checksum. What the machine itself loses, it loses altogether: it is memory.

The epoch counts the resets of the tiers below, other engines' among them, that the writer knew of:
what a dead engine left is worth nothing if there was another one since. Nor is what an engine
stored after its own reset: its weights may have been updated in place, and the next process loads
those of the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from ..base import BlockHash, BlockStatus
from ..policies.directory import DictDirectory

RECORD_BYTES = 64
KEY_OFFSET = 8
MAX_KEY_BYTES = 48
CHECK_OFFSET = KEY_OFFSET + MAX_KEY_BYTES
FINGERPRINT_BYTES = 32
_BATCH_RECORDS = 1 << 16
_NO_EPOCH = (1 << 64) - 1
"""Of what was stored after a reset: the next process has none of that number."""

_Bytes = npt.NDArray[np.uint8]
_digest = xxhash.xxh3_64_intdigest


def table_bytes(slots: int) -> int:
    """Size of the table of an arena of so many slots."""
    return (slots + 1) * RECORD_BYTES


class SlotTable:
    """The table over shared memory. Scheduler thread (under the manager's lock)."""

    def __init__(self, memory: _Bytes) -> None:
        """`memory`: uint8, `table_bytes(slots)` long."""
        rows = memory.reshape(-1, RECORD_BYTES)
        self._fingerprint = rows[0, :FINGERPRINT_BYTES]
        self._epoch = rows[0, FINGERPRINT_BYTES : FINGERPRINT_BYTES + 8].view("<u8")
        self._rows = rows[1:]

    def begin(self, fingerprint: bytes, epoch: int = 0) -> bool:
        """Use the table for this namespace, as of this epoch; False if it was for another one, and
        is empty now."""
        assert len(fingerprint) == FINGERPRINT_BYTES
        if self.fingerprint == fingerprint and self._epoch[0] == epoch:
            return True
        self.clear()
        self._fingerprint[:] = np.frombuffer(fingerprint, np.uint8)
        self._epoch[0] = epoch
        return False

    @property
    def fingerprint(self) -> bytes:
        """Of the namespace that the table was last used for; zeros if for none."""
        return self._fingerprint.tobytes()

    def complete(self) -> tuple[list[BlockHash], list[int]]:
        """Blocks whose bytes are complete, and their slots in ascending order.

        Of two slots with one key the first counts.
        """
        lengths = self._rows[:, 0]
        slots = np.flatnonzero((lengths > 0) & (lengths <= MAX_KEY_BYTES))
        keys: dict[BlockHash, int] = {}
        for start in range(0, len(slots), _BATCH_RECORDS):
            self._read(slots[start : start + _BATCH_RECORDS], keys)
        return list(keys), list(keys.values())

    def _read(self, slots: npt.NDArray[np.intp], keys: dict[BlockHash, int]) -> None:
        """Add what is complete in these slots. A start reads millions: arrays do what they can."""
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
        """The bytes of these slots are complete. Keys that are too long are left out.

        All that is in the table is of this epoch: it is empty when another one begins.
        """
        if self._epoch[0] != epoch:
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
        """These slots hold nothing from now on."""
        self._rows[slots, 0] = 0

    def clear(self) -> None:
        """No slot holds anything."""
        self._rows[:, 0] = 0


class KeptDirectory(DictDirectory):
    """A directory in memory that keeps the table true."""

    def __init__(
        self, capacity: int, table: SlotTable, epoch_of: Callable[[], int] = lambda: 0
    ) -> None:
        """`epoch_of` gives the epoch, which changes only while this is empty."""
        super().__init__(capacity)
        self._table = table
        self._epoch_of = epoch_of
        self._was_reset = False

    def mark_ready(self, block_hashes: Sequence[BlockHash], slots: Sequence[int]) -> None:
        super().mark_ready(block_hashes, slots)
        epoch = _NO_EPOCH if self._was_reset else self._epoch_of()
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
    """The last field of the records of these keys in these slots."""
    numbers = slots.astype("<u8").tobytes()
    digests = [_digest(key + numbers[8 * i : 8 * i + 8]) for i, key in enumerate(keys)]
    return np.array(digests, dtype="<u8")
