"""Messages between the scheduler's process and its mover, over a stream socket.

Both ends run the same version of the program, so an unreadable frame means that the other end is
broken. It ends the connection. Slots are sent as the bytes of an int32 array.
"""

from __future__ import annotations

import msgspec

from ...tiers.base import BlockHash
from ...tiers.nvme.attach import Attachment
from ...tiers.nvme.index.index_port import Removal

_RemovalFields = tuple[bytes, int, int]


class Setup(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """First message to a mover: the tier and the arena to attach to."""

    tier: Attachment
    arena_offset: int
    """Offset of slot 0 in the arena's file."""
    slot_bytes: int
    arena_slots: int
    io_threads: int
    """Threads that may use the device at a time, per direction."""
    has_prefault: bool = False
    """True if the mover is to map every page of the arena in the background."""
    is_arena_huge: bool = False
    """True if the arena lies in huge pages. Direct I/O then needs no bounce buffers."""


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
    """Rewrite the records of these slots."""

    ticket: int
    slots: tuple[int, ...]


Order = StoreJob | LoadJob | RemoveJob | RepairJob


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The mover has attached to tier and arena."""


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Result of a job, and the mover's bookkeeping since the last answer."""

    ticket: int
    outcomes: bytes = b""
    """Code of each block's outcome; empty if all are OK."""
    time_s: float = 0.0
    owed: tuple[_RemovalFields, ...] = ()
    """Removals that the mover could not commit."""
    counts: dict[str, int] = {}
    """Increase of each counter of the store since the last answer."""
    reported_bytes: int = 0
    """Bytes of reads that the mover has added to the totals in the index."""
    strays: tuple[int, ...] = ()
    """Slots without an index entry that were found while records were repaired."""


Reply = Ready | Answer

to_mover: msgspec.msgpack.Decoder[Setup | Order] = msgspec.msgpack.Decoder(Setup | Order)
"""Decoder of messages to a mover."""
from_mover: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
"""Decoder of messages from a mover."""


def pack_removals(removals: list[Removal]) -> tuple[_RemovalFields, ...]:
    """Encode removals for a message."""
    return tuple((removal.key, removal.slot, removal.generation) for removal in removals)


def unpack_removals(packed: tuple[_RemovalFields, ...]) -> tuple[Removal, ...]:
    """Decode removals from a message."""
    return tuple(Removal(BlockHash(key), slot, number) for key, slot, number in packed)
