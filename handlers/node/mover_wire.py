"""What the scheduler's process and its mover tell each other, over a stream socket.

A frame is four bytes of length (little endian) and a MessagePack document. Both ends are the same
version of the same program; what cannot be read means that the other end is broken, and ends the
connection. Slots travel as the bytes of an int32 array.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec
import numpy as np

from ...tiers.base import BlockHash, BlockOutcome, SlotArray
from ...tiers.nvme.attach import Attachment
from ...tiers.nvme.index.index_port import Removal

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")
_OUTCOMES = tuple(BlockOutcome)
_CODES = {outcome: code for code, outcome in enumerate(_OUTCOMES)}
_RemovalFields = tuple[bytes, int, int]


class WireError(Exception):
    """The other end sent what it cannot have meant."""


class Setup(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """First message to a mover."""

    tier: Attachment
    arena_offset: int
    """Where slot 0 begins in the arena's file."""
    slot_bytes: int
    arena_slots: int
    io_threads: int
    """Per direction."""
    has_prefault: bool = False
    """Touch every page of the arena beside the first jobs."""
    is_arena_huge: bool = False
    """Its memory lies in huge pages, so the disk may be given it directly."""


class StoreJob(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Write blocks from the arena."""

    ticket: int
    hashes: tuple[bytes, ...]
    slots: bytes
    arena_slots: bytes
    epoch: int
    removals: tuple[_RemovalFields, ...] = ()


class LoadJob(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Read blocks into the arena and verify them."""

    ticket: int
    hashes: tuple[bytes, ...]
    slots: bytes
    arena_slots: bytes
    values: tuple[bytes | None, ...] | None


class RemoveJob(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Commit removals and the epoch."""

    ticket: int
    removals: tuple[_RemovalFields, ...]
    epoch: int


class RepairJob(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Write the records of these slots anew."""

    ticket: int
    slots: tuple[int, ...]


Order = StoreJob | LoadJob | RemoveJob | RepairJob


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The mover has attached to tier and arena."""


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What became of a job."""

    ticket: int
    outcomes: bytes = b""
    """One code per block; empty if all are OK."""
    time_s: float = 0.0
    owed: tuple[_RemovalFields, ...] = ()
    """Removals that could not be committed."""
    counts: dict[str, int] = {}
    """Growth of the store's counters since the last answer."""
    reported_bytes: int = 0
    """Of the bytes read: those that the mover has written into the index's totals."""
    strays: tuple[int, ...] = ()
    """Slots that no entry names, found while records were repaired."""


Reply = Ready | Answer

_encoder = msgspec.msgpack.Encoder()
to_mover: msgspec.msgpack.Decoder[Setup | Order] = msgspec.msgpack.Decoder(Setup | Order)
"""Reads what a mover is sent."""
from_mover: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
"""Reads what a mover answers."""


def frame(message: msgspec.Struct) -> bytes:
    """A message as it is sent."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a stream into the bodies of frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Every body that is complete with this data. Raises `WireError`."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise WireError(f"a frame of {length} bytes")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield body


def pack_slots(slots: SlotArray) -> bytes:
    """Slots as they travel."""
    return slots.astype(np.int32, copy=False).tobytes()


def unpack_slots(data: bytes) -> SlotArray:
    """The opposite of `pack_slots`."""
    return np.frombuffer(data, dtype=np.int32)


def pack_removals(removals: list[Removal]) -> tuple[_RemovalFields, ...]:
    """Removals as they travel."""
    return tuple((removal.key, removal.slot, removal.generation) for removal in removals)


def unpack_removals(packed: tuple[_RemovalFields, ...]) -> tuple[Removal, ...]:
    """The opposite of `pack_removals`."""
    return tuple(Removal(BlockHash(key), slot, number) for key, slot, number in packed)


def pack_outcomes(outcomes: tuple[BlockOutcome, ...]) -> bytes:
    """Outcomes as they travel."""
    return bytes(_CODES[outcome] for outcome in outcomes)


def unpack_outcomes(codes: bytes, n: int) -> list[BlockOutcome]:
    """The outcomes of `n` blocks. Raises `WireError`."""
    if not codes:
        return [BlockOutcome.OK] * n
    if len(codes) != n or max(codes) >= len(_OUTCOMES):
        raise WireError(f"{len(codes)} outcomes for {n} blocks")
    return [_OUTCOMES[code] for code in codes]
