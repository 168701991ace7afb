"""The tables of the index: their names, the keys of `meta`, and the encoding of the values.

All numbers are little endian. A value of the wrong size counts as 0 or as missing.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from ..segments.format import INDEX_ENTRY_BYTES

BLOCKS = b"blocks"
"""Table of blocks: hash to entry."""
META = b"meta"
"""Table of metadata, with the keys below."""
MAX_TABLES = 4
"""Number of tables that LMDB reserves room for."""

FORMAT = b"format"
IDENTITY = b"identity"
EPOCH = b"epoch"
SESSION = b"session"
TOTALS = b"totals"
DAY = b"day"
TAKEN = b"taken"
BOOT = b"boot"

IS_LIVE = b"\1"
"""Value stored under `live_key`."""

ENTRY_TYPE = np.dtype(
    [("slot", "<u4"), ("length", "<u4"), ("checksum", "<u8"), ("generation", "<u8"), ("x", "<u8")]
)
"""Entries as rows of a numpy table; `x` is the check of an entry."""
assert ENTRY_TYPE.itemsize == INDEX_ENTRY_BYTES
NO_ENTRY = b"\xff" * INDEX_ENTRY_BYTES
"""Substitute for a value that has not the size of an entry; its slot is beyond every capacity."""

MAX_EPOCH = (1 << 32) - 1
"""Largest epoch that a slot record can hold."""
MAX_SESSION = (1 << 24) - 2
"""Largest session number whose generations fit into 64 bits."""

_U64 = struct.Struct("<Q")
_U64_MAX = (1 << 64) - 1
_IDENTITY = struct.Struct("<32sII")
_TOTALS = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class IndexIdentity:
    """Values that must match for an index to be opened."""

    fingerprint: bytes
    """SHA-256 of the namespace's fields."""
    block_bytes: int
    slots_per_segment: int

    def pack(self) -> bytes:
        """Return the bytes as stored in the index."""
        return _IDENTITY.pack(self.fingerprint, self.block_bytes, self.slots_per_segment)


def slots_per_segment_in(identity: bytes) -> int:
    """Return the slots per segment that an identity names; 0 if it is invalid."""
    return int(_IDENTITY.unpack(identity)[2]) if len(identity) == _IDENTITY.size else 0


def state_key(state: int) -> bytes:
    """Return the key of the slots that the last process with a state number saved."""
    return b"state%d" % state


def uses_key(state: int) -> bytes:
    """Return the key of the number of times a state number was used."""
    return b"uses%d" % state


def live_key(state: int) -> bytes:
    """Return the key that exists while a process has the index open, or died with it open."""
    return b"live%d" % state


def pack_number(value: int) -> bytes:
    """Return a number as stored in the index. Values too large for 64 bits, caused by damage only,
    wrap."""
    return _U64.pack(value & _U64_MAX)


def number_in(value: bytes | None) -> int:
    """Return the number in a value; 0 if it is missing or of the wrong size."""
    return int(_U64.unpack(value)[0]) if value is not None and len(value) == _U64.size else 0


def pack_totals(written: int, read: int) -> bytes:
    """Return the totals over the life of the namespace, as stored in the index."""
    return _TOTALS.pack(written & _U64_MAX, read & _U64_MAX)


def totals_in(value: bytes | None) -> tuple[int, int]:
    """Return the bytes (written, read) in a value."""
    if value is None or len(value) != _TOTALS.size:
        return 0, 0
    written, read = _TOTALS.unpack(value)
    return written, read
