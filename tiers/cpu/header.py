"""The first 4096 bytes of the CPU arena: its geometry and the processes that map it.

All integers are little-endian.

| bytes       | field                                                                           |
|-------------|---------------------------------------------------------------------------------|
| 0..8        | magic `KVCARENA`                                                                |
| 8..12       | version, uint32                                                                 |
| 12..16      | crc32 of bytes 16..128                                                          |
| 16..40      | slots, slot_bytes, rank_bytes: uint64 each                                      |
| 40..48      | world_size, flags (bit 1: kept, 2: in huge pages): uint32 each                  |
| 48..128     | zero                                                                            |
| 128..132    | state, uint32: 0 being made, 1 ready                                            |
| 512..2560   | one record of 32 bytes per rank: pid uint32, state uint32 (0 free, 1 mapped,    |
|             | 2 layout published), 8 zero bytes, 16-byte digest of the KV tensor layout       |
| 2560..2592  | the scheduler's record, the same fields                                         |

The header is shared memory. Bytes 0..128 are written once, before the state becomes ready. A record
has one writer: the process that holds the kernel lock of its rank (see `arena_file`). It writes the
state of the record last. A reader on another core may see the state before the other bytes. The
checksum protects the fixed part. A record is read again until two reads agree (`read_record`). This
module opens no files and looks up no processes.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

from ...errors import ConfigError, FormatError
from . import slot_table

MAGIC = b"KVCARENA"
VERSION = 1
HEADER_BYTES = 4096
SLOT_ALIGN_BYTES = 4096
MAX_RANKS = 64
DIGEST_BYTES = 16

_PREFIX = struct.Struct("<8sII")
_FIXED = struct.Struct("<QQQII")
_FIXED_START = 16
_FIXED_END = 128
_STATE = struct.Struct("<I")
_STATE_OFFSET = 128
_RECORD = struct.Struct("<II8x16s")
_RECORDS_OFFSET = 512
_RECORD_READS_MAX = 16
_FLAG_KEPT = 2
_FLAG_HUGE = 4

SCHEDULER_RECORD = MAX_RANKS
"""Index of the scheduler's record, behind the records of the ranks."""

assert _FIXED_START + _FIXED.size <= _FIXED_END <= _STATE_OFFSET
assert _RECORDS_OFFSET + (MAX_RANKS + 1) * _RECORD.size <= HEADER_BYTES


class RecordState(IntEnum):
    """Progress of one rank in joining the arena."""

    FREE = 0
    MAPPED = 1
    PUBLISHED = 2


@dataclass(frozen=True, slots=True)
class ArenaGeometry:
    """Shape of the arena; every process of an engine must compute the same one."""

    slots: int
    """Number of slots, one block each."""
    rank_bytes: int
    """Bytes of one block that belong to one worker."""
    world_size: int
    """Number of worker processes that map the arena."""
    kept: bool = False
    """True if the arena outlives its processes: a slot table then lies behind the slots."""

    def __post_init__(self) -> None:
        if self.slots < 1 or self.rank_bytes < 1:
            raise ConfigError(
                f"capacity: {self.slots} slots of {self.rank_bytes} bytes per rank cannot be made;"
                f" give the cpu tier room for at least one block"
            )
        if not 1 <= self.world_size <= MAX_RANKS:
            raise ConfigError(
                f"world_size: {self.world_size} workers cannot share one arena; "
                f"allowed are 1 to {MAX_RANKS} on one host"
            )

    @property
    def slot_bytes(self) -> int:
        """Bytes from one slot to the next: all ranks' parts, padded to a multiple of 4096."""
        return round_up(self.rank_bytes * self.world_size, SLOT_ALIGN_BYTES)

    @property
    def data_bytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.slot_bytes

    @property
    def table_bytes(self) -> int:
        """Bytes of the slot table; 0 unless the arena is kept."""
        return slot_table.table_bytes(self.slots) if self.kept else 0

    @property
    def file_bytes(self) -> int:
        """Bytes of header, slots and slot table together."""
        return HEADER_BYTES + self.data_bytes + self.table_bytes

    @classmethod
    def fit(
        cls, capacity_bytes: int, rank_bytes: int, world_size: int, kept: bool = False
    ) -> ArenaGeometry:
        """Return the geometry with the most slots that fit in `capacity_bytes`, header included.

        Raises `ConfigError` if not even one block fits.
        """
        slot_bytes = cls(1, rank_bytes, world_size).slot_bytes
        record_bytes = slot_table.RECORD_BYTES if kept else 0
        fixed_bytes, per_slot_bytes = HEADER_BYTES + record_bytes, slot_bytes + record_bytes
        slots = (capacity_bytes - fixed_bytes) // per_slot_bytes
        if slots < 1:
            raise ConfigError(
                f"capacity: {capacity_bytes} bytes hold no block; one block of this model takes "
                f"{slot_bytes} bytes, so give the cpu tier at least {per_slot_bytes + fixed_bytes}"
            )
        return cls(slots, rank_bytes, world_size, kept)


@dataclass(frozen=True, slots=True)
class ArenaHeader:
    """Contents of the fixed part of the header."""

    geometry: ArenaGeometry
    is_huge: bool = False
    """True if most of the memory lies in huge pages."""


@dataclass(frozen=True, slots=True)
class RankRecord:
    """Record of one process in the header, written by that process."""

    pid: int
    state: RecordState
    digest: bytes


def round_up(value: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `value`."""
    return -(-value // step) * step


def write_new(page: memoryview, header: ArenaHeader) -> None:
    """Describe an arena whose memory is reserved, with no process mapped; it becomes ready last."""
    end = _RECORDS_OFFSET + (MAX_RANKS + 1) * _RECORD.size
    _STATE.pack_into(page, _STATE_OFFSET, 0)
    page[_RECORDS_OFFSET:end] = bytes(end - _RECORDS_OFFSET)
    geometry = header.geometry
    fixed = _FIXED.pack(
        geometry.slots,
        geometry.slot_bytes,
        geometry.rank_bytes,
        geometry.world_size,
        _FLAG_KEPT * geometry.kept | _FLAG_HUGE * header.is_huge,
    ).ljust(_FIXED_END - _FIXED_START, b"\0")
    page[_FIXED_START:_FIXED_END] = fixed
    page[:_FIXED_START] = _PREFIX.pack(MAGIC, VERSION, zlib.crc32(fixed))
    _STATE.pack_into(page, _STATE_OFFSET, 1)


def is_ready(page: bytes) -> bool:
    """Return True if the maker has finished. `page` may be shorter than a header."""
    return len(page) >= HEADER_BYTES and _STATE.unpack_from(page, _STATE_OFFSET)[0] == 1


def looks_like_arena(page: bytes) -> bool:
    """Return True for an arena, or for a stub whose maker died before it wrote the header."""
    return page[:8] == MAGIC or not page.strip(b"\0")


def read_fixed(page: bytes, name: str) -> ArenaHeader:
    """Parse the fixed part. Raises `FormatError`, with `name` as the file in its message."""
    if len(page) < HEADER_BYTES or page[:8] != MAGIC:
        raise FormatError(f"{name} is no kvcascade arena; remove the file or set arena_dir")
    _, version, crc = _PREFIX.unpack_from(page, 0)
    if version != VERSION:
        raise FormatError(
            f"{name} has arena format {version}, this kvcascade knows {VERSION}; "
            f"run the same version in all processes of the engine"
        )
    if zlib.crc32(page[_FIXED_START:_FIXED_END]) != crc:
        raise FormatError(f"{name} has a damaged header; remove the file and start the engine")
    slots, slot_bytes, rank_bytes, world, flags = _FIXED.unpack_from(page, _FIXED_START)
    try:
        geometry = ArenaGeometry(slots, rank_bytes, world, bool(flags & _FLAG_KEPT))
    except ConfigError as error:
        raise FormatError(f"{name} has an impossible header; remove the file: {error}") from error
    if geometry.slot_bytes != slot_bytes:
        raise FormatError(f"{name} has slots of {slot_bytes} bytes; remove the file")
    return ArenaHeader(geometry, bool(flags & _FLAG_HUGE))


def record_offset(number: int) -> int:
    """Return the offset in bytes of a rank's record, or of `SCHEDULER_RECORD`."""
    assert 0 <= number <= SCHEDULER_RECORD
    return _RECORDS_OFFSET + number * _RECORD.size


def write_record(page: memoryview, number: int, record: RankRecord) -> None:
    """Write a record, its state last. Only the process that holds the rank may call this."""
    offset = record_offset(number)
    packed = _RECORD.pack(record.pid, record.state, record.digest)
    page[offset + 8 : offset + _RECORD.size] = packed[8:]
    page[offset : offset + 4] = packed[:4]
    page[offset + 4 : offset + 8] = packed[4:8]


def read_record(page: memoryview, number: int) -> RankRecord:
    """Read a record that its owner may be writing. Raises `FormatError` for an invalid state."""
    offset = record_offset(number)
    raw = bytes(page[offset : offset + _RECORD.size])
    for _ in range(_RECORD_READS_MAX):
        again = bytes(page[offset : offset + _RECORD.size])
        if again == raw:
            break
        raw = again
    pid, state, digest = _RECORD.unpack(raw)
    if state not in RecordState.__members__.values():
        raise FormatError(f"record {number} of the arena header is damaged; restart the engine")
    return RankRecord(pid, RecordState(state), digest)
