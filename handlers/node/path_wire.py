"""Messages between the scheduler's process and its node, over a stream socket.

The node is the process that moves the blocks of one engine and talks to the writer of the path.
Both ends run the same version of the program. Jobs name blocks by key and by arena slot; arena
slots are sent as the bytes of an int32 array. What the writer says about blocks is passed on as it
came (`Removed`, `Stored`, `KeysListed`, `Epoch`, `TierFigures`), and so are `ListKeys`, `Chain` and
`Touch`, of which the node splits or cuts long ones.
"""

from __future__ import annotations

import math
from enum import Enum

import msgspec

from ...tiers.base import BlockOutcome
from ...tiers.nvme.path.frames import WireError
from ...tiers.nvme.path.path_messages import (
    Chain,
    Epoch,
    Hello,
    KeysListed,
    ListKeys,
    Removed,
    Stored,
    TierFigures,
    Touch,
    Why,
)

LIFE_INTERVAL_S = 10.0
"""Time between two signs of life while only a reset waits, see `NodeReady`."""

_OUTCOMES = tuple(BlockOutcome)
_CODES = {outcome: code for code, outcome in enumerate(_OUTCOMES)}


class NodeState(Enum):
    """Relation of a node to the writer of its path."""

    JOINING = "joining"
    """The node looks for the writer; nothing below can be used yet."""
    LEADING = "leading"
    """The node's own process is the writer."""
    FOLLOWING = "following"
    """Another process is the writer."""
    SILENT = "silent"
    """The writer does not answer; writes rest, reads go on."""
    ORPHANED = "orphaned"
    """The writer's socket was closed; writes rest, reads go on."""
    OFF = "off"
    """The tier cannot be used; everything below is absent."""


CAN_READ = frozenset({NodeState.LEADING, NodeState.FOLLOWING, NodeState.SILENT, NodeState.ORPHANED})
CAN_WRITE = frozenset({NodeState.LEADING, NodeState.FOLLOWING})


class NodeSetup(msgspec.Struct, frozen=True, array_like=True, tag=64):
    """First message to a node: what it tells the writer, and the arena to attach to."""

    hello: Hello
    """First message to the writer. It has the epoch of the engine's blocks, if one is known."""
    arena_offset: int
    """Offset of slot 0 in the arena's file."""
    arena_slots: int
    io_threads: int
    """Threads that may use the device at a time, per direction."""
    is_direct: bool = True
    """False if all I/O goes through the page cache."""
    has_prefault: bool = False
    """True if the node is to map every page of the arena in the background."""
    is_arena_huge: bool = False
    """True if the arena lies in huge pages. Direct I/O then needs no bounce buffers."""
    patience_s: float = math.inf
    """Time without a writer after which the scheduler's process wants to know the reason."""
    wants_changes: bool = True
    """False if changes of the tier and its figures are not passed on, because the scheduler's
    process may receive no message for hours."""
    trusts_boot: bool = True
    """False if an index that a writer of this boot left without a clean close is checked anew."""


class PutJob(msgspec.Struct, frozen=True, array_like=True, tag=65):
    """Write blocks from the arena, in prefix order."""

    ticket: int
    keys: list[bytes]
    arena_slots: bytes
    epoch: int | None
    """Epoch that the blocks belong to; None if it is that of the last `ResetJob`, which has not
    been answered yet."""


class GetJob(msgspec.Struct, frozen=True, array_like=True, tag=66):
    """Read blocks into the arena and verify them."""

    ticket: int
    keys: list[bytes]
    arena_slots: bytes


class ResetJob(msgspec.Struct, frozen=True, array_like=True, tag=67):
    """Make every older block of the namespace unreachable. Until the answer, every get misses."""

    ticket: int
    mark: int = 0
    is_passed_on: bool = False
    """See `Reset` for both."""


class NodeReady(msgspec.Struct, frozen=True, array_like=True, tag=80):
    """The node has attached to the arena. It may still be joining the path.

    While only a reset waits, the message is repeated as a sign of life.
    """


class JobDone(msgspec.Struct, frozen=True, array_like=True, tag=81):
    """Answer to a job."""

    ticket: int
    outcomes: bytes = b""
    """Code of each block's outcome (`pack_outcomes`); empty if all are OK."""
    time_s: float = 0.0
    """Seconds from the first transfer of the job to its end."""
    why: Why = Why.GRANTED
    """Reason why blocks of a put got no slot."""


class NodeNote(msgspec.Struct, frozen=True, array_like=True, tag=82):
    """The node's state changed."""

    state: NodeState
    text: str = ""
    """Sentence for the log; empty if there is nothing to say."""
    is_misconfigured: bool = False
    """True if only another configuration helps. An engine that is starting then refuses it."""


class NodeJoined(msgspec.Struct, frozen=True, array_like=True, tag=83):
    """The writer serves the node. Sent again after every new connection to a writer."""

    state: NodeState
    folder: str
    """First directory of the namespace; its presence table is to be mapped."""
    slots: int
    """Final number of slots of the namespace."""
    epoch: int


NodeOrder = PutJob | GetJob | ResetJob | Touch | ListKeys | Chain
FromNodeProcess = (
    NodeReady
    | JobDone
    | NodeNote
    | NodeJoined
    | Removed
    | Stored
    | KeysListed
    | Epoch
    | TierFigures
)

to_node: msgspec.msgpack.Decoder[NodeSetup | NodeOrder] = msgspec.msgpack.Decoder(
    NodeSetup | NodeOrder
)
"""Decoder of messages to a node."""
from_node_process: msgspec.msgpack.Decoder[FromNodeProcess] = msgspec.msgpack.Decoder(
    FromNodeProcess
)
"""Decoder of messages from a node."""


def pack_outcomes(outcomes: tuple[BlockOutcome, ...]) -> bytes:
    """Encode outcomes for a message."""
    return bytes(_CODES[outcome] for outcome in outcomes)


def unpack_outcomes(codes: bytes, n: int) -> list[BlockOutcome]:
    """Decode the outcomes of `n` blocks. Raises `WireError`."""
    if not codes:
        return [BlockOutcome.OK] * n
    if len(codes) != n or max(codes) >= len(_OUTCOMES):
        raise WireError(f"{len(codes)} outcomes for {n} blocks")
    return [_OUTCOMES[code] for code in codes]
