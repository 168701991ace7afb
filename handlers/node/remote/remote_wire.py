"""Messages between the scheduler's process and the node of a remote tier, over a stream socket.

`PutJob`, `JobDone` and `NodeReady` are those of `path_wire`. An `AskJob` is
answered by a `JobDone`: OK for a block that is there, GONE for one that is absent. Any other
outcome says that it could not be found out. The epoch of a `PutJob` is the mark of the last reset
before its blocks were stored. So no block crosses a reset by another host.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ....tiers.remote.remote_counters import VerbTotals
from ..path_wire import GetJob, JobDone, NodeReady, PutJob


class RemoteSetup(msgspec.Struct, frozen=True, array_like=True, tag=96):
    """First message to the node. It holds no secret: the options name where secrets are."""

    key: str
    """Place of the options in the configuration, for messages."""
    options: bytes
    """Options of the tier as JSON, as `parse_remote` reads them."""
    fingerprint: str
    """Everything that the bytes of a block depend on, as one word."""
    slot_bytes: int
    payload_bytes: int
    """Bytes of a slot, from its begin on, that an object holds."""
    copies: int
    """Number of times that a read writes them, side by side: once for each rank whose part they
    are."""
    arena_offset: int
    """Offset of slot 0 in the arena's file."""
    arena_slots: int
    was_reset: bool = False
    """True if the engine was reset since its start."""
    memory: bytes = b""
    """Last memory of an earlier node, see `RemoteEngine.memory`."""


class AskJob(msgspec.Struct, frozen=True, array_like=True, tag=97):
    """Find out which blocks are there; one list has the blocks of one request, in the order of its
    lookups. The blocks of each of its KV groups are a prefix chain."""

    ticket: int
    requests: Sequence[Sequence[bytes]]


class FetchJob(GetJob, frozen=True, array_like=True, tag=101):
    """A `GetJob` with a limit."""

    limit_s: float
    """Rest of the deadline, of which the lookup took a part. A block that is late is not read."""


class RemoteResetJob(msgspec.Struct, frozen=True, array_like=True, tag=100):
    """Reset the namespace for all hosts."""

    ticket: int
    mark: int
    is_new: bool
    """False: another tier had the reset. It is done if the namespace had it or a later one."""
    known: int
    """Greatest mark that the engine had heard of when its reset began."""


class ResetDone(msgspec.Struct, frozen=True, array_like=True, tag=99):
    """Answer to a `RemoteResetJob`: the server was told."""

    ticket: int
    mark: int
    """Mark of what the engine stored since the reset began: smaller than the last reset's if
    another host may have reset the namespace meanwhile."""


class RemoteNote(msgspec.Struct, frozen=True, array_like=True, tag=98):
    """What the node did, and the last reset of the namespace."""

    mark: int | None
    """Mark of the last reset by any host, 0 if there was none; None until the server was asked."""
    verbs: dict[str, VerbTotals] = {}
    """Totals by verb (`Verb`)."""
    unsent: dict[str, int] = {}
    """Blocks that were offered and not written, by reason."""
    latency_s: float | None = None
    """Moving average of requests that move no payload; None before the first one was answered."""
    samples_s: dict[str, list[float]] = {}
    """Seconds of each call since the last note, by verb."""
    memory: bytes = b""
    """Facts for the next node, see `RemoteEngine.memory`."""


RemoteOrder = AskJob | FetchJob | PutJob | RemoteResetJob
FromRemoteNode = NodeReady | JobDone | ResetDone | RemoteNote

to_remote_node: msgspec.msgpack.Decoder[RemoteSetup | RemoteOrder] = msgspec.msgpack.Decoder(
    RemoteSetup | RemoteOrder
)
"""Decoder of messages to the node."""
from_remote_node: msgspec.msgpack.Decoder[FromRemoteNode] = msgspec.msgpack.Decoder(FromRemoteNode)
"""Decoder of messages from the node."""
