"""The tables of the index's environment: their names, the keys of `meta`, and what lies under them.

All numbers are little endian. A value that has not the size of one counts as 0, or as not there.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from ..segments.format import INDEX_ENTRY_BYTES

BLOCKS = b"blocks"
"""Block hash to entry."""
META = b"meta"
"""The keys that follow."""
MAX_TABLES = 4
"""That LMDB makes room for."""

FORMAT = b"format"
IDENTITY = b"identity"
EPOCH = b"epoch"
SESSION = b"session"
TOTALS = b"totals"
DAY = b"day"
TAKEN = b"taken"
BOOT = b"boot"

IS_LIVE = b"\1"
"""Under `live_key`."""

ENTRY_TYPE = np.dtype(
    [("slot", "<u4"), ("length", "<u4"), ("checksum", "<u8"), ("generation", "<u8"), ("x", "<u8")]
)
"""Entries as rows of a table; `x` is their check."""
assert ENTRY_TYPE.itemsize == INDEX_ENTRY_BYTES
NO_ENTRY = b"\xff" * INDEX_ENTRY_BYTES
"""In place of what has not the size of an entry: its slot is beyond all capacities."""

MAX_EPOCH = (1 << 32) - 1
"""Slot records have room for this."""
MAX_SESSION = (1 << 24) - 2
"""The last one whose generations are 64-bit numbers."""

_U64 = struct.Struct("<Q")
_U64_MAX = (1 << 64) - 1
_IDENTITY = struct.Struct("<32sII")
_TOTALS = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class IndexIdentity:
    """What must be equal for an index to be opened."""

    fingerprint: bytes
    """SHA-256 of the namespace's fields."""
    block_bytes: int
    slots_per_segment: int

    def pack(self) -> bytes:
        """As it lies in the index."""
        return _IDENTITY.pack(self.fingerprint, self.block_bytes, self.slots_per_segment)


def slots_per_segment_in(identity: bytes) -> int:
    """What an identity says; 0 if it is none."""
    return int(_IDENTITY.unpack(identity)[2]) if len(identity) == _IDENTITY.size else 0


def state_key(state: int) -> bytes:
    """The slots that the last process with a state number saved."""
    return b"state%d" % state


def uses_key(state: int) -> bytes:
    """How often a state number was used."""
    return b"uses%d" % state


def live_key(state: int) -> bytes:
    """There while a process with a state number has it open, or died with it."""
    return b"live%d" % state


def pack_number(value: int) -> bytes:
    """As it lies in the index. Tallies, which only damage makes so large, wrap."""
    return _U64.pack(value & _U64_MAX)


def number_in(value: bytes | None) -> int:
    """The number in a value."""
    return int(_U64.unpack(value)[0]) if value is not None and len(value) == _U64.size else 0


def pack_totals(written: int, read: int) -> bytes:
    """Bytes over the life of the namespace, as they lie in the index."""
    return _TOTALS.pack(written & _U64_MAX, read & _U64_MAX)


def totals_in(value: bytes | None) -> tuple[int, int]:
    """Bytes (written, read) in a value."""
    if value is None or len(value) != _TOTALS.size:
        return 0, 0
    written, read = _TOTALS.unpack(value)
    return written, read
