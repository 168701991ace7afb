"""Messages between a node and the writer of a path, over a Unix stream socket.

A frame is four bytes of length (little endian) and a MessagePack document. A node is the process
that moves the blocks of one engine. The writer is the node that holds the lock of the path. Only
metadata is sent: bytes of blocks never pass through the socket.

Sequences of slots are the bytes of an int32 array, checksums those of a uint64 array, both little
endian. The two ends may be of different versions: `Hello` and `Welcome` carry `PROTOCOL`, and every
other message is only sent between equal protocols.

A request and its reply carry the same number, unique in one connection. The writer answers every
request exactly once, in any order, as long as the connection lives.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import Enum, IntEnum

import msgspec
import numpy as np

from ...base import SlotArray
from ..segments.chains import HEAD_BYTES

PROTOCOL = 3
"""Version of these messages. A node and a writer of different versions refuse each other."""
MAX_KEYS_PER_MESSAGE = 4096
"""Longest list of keys in one message, unless it is a chain. Senders split longer lists."""
MAX_FRAME_BYTES = 8 << 20
MAX_CHAIN_HEADS = 1 << 16
"""Most blocks of a prompt whose order is noted; longer prompts are cut."""
MAX_RESET_EVENTS = 1 << 18
"""Most blocks of a reset that are sent as `Removed` to the nodes whose engine did not ask for it.
Listing them takes the writer about 0.2 s."""
ALREADY_SLOT = -1
"""Slot in `Granted` for a key that the tier holds already."""
NO_SLOT = -2
"""Slot in `Granted` for a key for which there is no room."""


class Why(Enum):
    """Reason why some keys of a `Grant` got no slot."""

    GRANTED = "granted"
    """Every key got a slot, or the tier holds it."""
    FULL = "full"
    """There is no room, and none is being made."""
    LATER = "later"
    """There is no room now, but segments or evictions are under way."""
    BUDGET = "budget"
    """The write budget of the day is spent."""
    RESTING = "resting"
    """The device failed, or the index refused an eviction; the writer tries again after a while."""


class Committed(IntEnum):
    """Outcome of one block of a `Commit`."""

    OK = 0
    """Index and presence table have the block; it is as durable as configured."""
    ALREADY = 1
    """The tier held the block already; the slot was released."""
    STALE = 2
    """The namespace was reset since the grant, or the grant is unknown."""
    IO_ERROR = 3
    """The index could not be written."""
    NO_SPACE = 4
    """The index has no room."""


class RefusedWhy(Enum):
    """Reason why a writer does not serve a node."""

    PROTOCOL = "protocol"
    PATHS = "paths"
    """The node lists other paths than the writer."""
    NAMESPACE = "namespace"
    """The namespace cannot be opened until the user changes something, which the text names."""
    FAILED = "failed"
    """Opening the namespace failed, for example because of the device; the node tries again."""
    CLOSING = "closing"
    """The writer is closing; the node tries again."""
    OPENING = "opening"
    """The namespace is still being opened after a long time; the node tries again."""


class PathOptions(msgspec.Struct, frozen=True):
    """Options of a path: recorded with it, and the writer's."""

    capacity_bytes: int
    """Capacity over all paths and all namespaces."""
    min_free_bytes: int = 0
    """Disk space that is never used, per path."""
    policy: str = "lru"
    write_budget_bytes: int | None = None
    """Bytes that may be written in a day; None means no limit."""
    segment_bytes: int | None = None
    """Approximate size of a new namespace's segments."""
    durability: str = "process"
    """`process` or `power`; of two nodes' options the stronger holds."""


class NamespaceSpec(msgspec.Struct, frozen=True):
    """The namespace that a node wants to use."""

    label: str
    fields: bytes
    """JSON of everything that the bytes of a block depend on."""
    about: bytes
    """JSON of descriptive facts; no part of the fingerprint."""
    block_bytes: int
    min_share_bytes: int = 0
    """Space that other namespaces may not take from this one."""


# -- from a node to the writer -----------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """First message of a node."""

    protocol: int
    name: str
    """Name of the node in logs, such as host and process number."""
    paths: tuple[str, ...]
    """All paths of the tier in order; the writer's list must be equal."""
    namespace: NamespaceSpec
    options: PathOptions
    wants_events: bool = False
    """True if `Stored` is to be sent, too; `Removed` is sent to every node."""
    epoch: int | None = None
    """Epoch of the blocks that the node's engine has seen last; None if it is starting."""
    is_reader: bool = False
    """True for a node that stores nothing. It is no engine: it begins no epoch if it finds no other
    node."""
    has_metrics: bool = True
    """True for a node that exports metrics. One such node reports those of the whole tier."""


class Grant(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Ask for slots for these keys, in prefix order."""

    request: int
    keys: list[bytes]


class Commit(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Blocks whose bytes are in granted slots, as durable as configured."""

    request: int
    epoch: int
    """Epoch of the `Granted` that gave the slots."""
    keys: list[bytes]
    slots: bytes
    checksums: bytes


class Release(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Granted slots that will not be committed; nothing writes to them any more."""

    slots: bytes
    has_failed: bool = False
    """True if the device refused a write to them; the writer avoids their path for a while."""


class Bad(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Blocks whose bytes do not match; the writer removes those whose entry still says the same."""

    keys: list[bytes]
    slots: bytes
    checksums: bytes


class Touch(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A use of blocks, in prefix order; unknown ones are ignored."""

    keys: list[bytes]
    is_chain: bool = False
    """True if these are all blocks of a request that ended; at most `MAX_CHAIN_HEADS`."""
    is_settle: bool = False
    """True if one request stored these in parts: their order is corrected, and nothing used."""


class Read(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Number of bytes that the node has read since the last report, for the totals."""

    read_bytes: int


class Reset(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Make every older block of the namespace unreachable; `Epoch` answers it."""

    request: int
    mark: int = 0
    """Number that names the reset for the paths of all engines. A writer that remembers it has
    carried it out, and only answers. 0: the writer draws one."""
    is_passed_on: bool = False
    """True: another tier of the engine had the reset. Its own engine did not ask for it, so the
    node is sent the removed blocks like the other nodes."""


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """A question of a tool; `Told` answers it. It may be sent without a `Hello`."""

    request: int
    what: str
    """Name of a question in `writer_questions`."""
    body: bytes = b""
    """JSON of the question's arguments."""


class Retire(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """A newer version asks the writer to close cleanly; sent instead of `Hello`."""

    protocol: int


class ListKeys(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Ask for blocks of the namespace, in the order of keys; `KeysListed` answers it.

    It names blocks that were stored before a node came, for events.
    """

    after: bytes
    """Key before the first; b"" is before all keys."""
    limit: int


class Chain(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """Order of the blocks of a request that ended, for commands that ask by prompt."""

    heads: bytes
    """First `HEAD_BYTES` of each key in prefix order, at most `MAX_CHAIN_HEADS` of them; shorter
    keys are filled with zeros."""
    fresh: int
    """Number of the first blocks that earlier requests stored."""
    tokens: int
    """Tokens per block."""


# -- from the writer to a node -----------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=32):
    """The writer serves the node."""

    protocol: int
    epoch: int
    folder: str
    """Directory name of the namespace below each path."""
    segment_slots: int
    slots: int
    """Final number of slots of the namespace."""
    options: PathOptions
    """Options in force."""
    notes: list[str] = []
    """Sentences for the node's log, such as options that were not adopted."""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=33):
    """The writer does not serve the node."""

    why: RefusedWhy
    text: str
    """One sentence that says what to do."""


class Granted(msgspec.Struct, frozen=True, array_like=True, tag=34):
    """Answer to `Grant`: one slot per key, or `ALREADY_SLOT` or `NO_SLOT`."""

    request: int
    epoch: int
    slots: bytes
    why: Why = Why.GRANTED


class CommitDone(msgspec.Struct, frozen=True, array_like=True, tag=35):
    """Answer to `Commit`: the code of a `Committed` for each block."""

    request: int
    outcomes: bytes


class Epoch(msgspec.Struct, frozen=True, array_like=True, tag=36):
    """The namespace has a new epoch. Sent to every node of the namespace."""

    epoch: int
    request: int = 0
    """Number of the `Reset` that this answers; 0 for the other nodes."""
    marks: list[int] = []
    """Marks of the resets that began this epoch; for the other nodes only."""


class Stored(msgspec.Struct, frozen=True, array_like=True, tag=37):
    """Blocks that were stored; sent to nodes that publish events."""

    keys: list[bytes]


class Removed(msgspec.Struct, frozen=True, array_like=True, tag=38):
    """Blocks that were evicted or found damaged. Nodes that publish events are also sent those of
    another node's reset, at most `MAX_RESET_EVENTS`."""

    keys: list[bytes]


class TierFigures(msgspec.Struct, frozen=True, array_like=True, tag=40):
    """Figures of the namespace, after `Welcome` and then about once a second if they changed."""

    blocks: int
    capacity_blocks: int
    evicted_blocks: int
    budget_left_bytes: int | None
    day: tuple[int, int, int] | None = None
    """Three numbers: 1 if the totals cover a whole day, else 0; bytes written, and bytes read, in
    the last 24 hours. None if unknown."""
    is_reporter: bool = False
    """True for one node of the namespace: its engine reports the metrics of the whole tier."""
    is_path_reporter: bool = False
    """True for one node of the path: its engine also reports what all namespaces share."""


class Told(msgspec.Struct, frozen=True, array_like=True, tag=41):
    """Answer to `Ask`: JSON."""

    request: int
    body: bytes


class SegmentsRemoved(msgspec.Struct, frozen=True, array_like=True, tag=42):
    """Segments whose files are deleted. Nodes close what they have open of them at once: a later
    segment of the same number is another file."""

    numbers: list[int]


class KeysListed(msgspec.Struct, frozen=True, array_like=True, tag=43):
    """Answer to `ListKeys`. It has what was committed before, and every later change follows it as
    `Stored` or `Removed`."""

    after: bytes
    """Key of the question."""
    keys: list[bytes]
    """Ascending keys; empty if no block follows."""


class StillOpening(msgspec.Struct, frozen=True, array_like=True, tag=44):
    """The namespace is being opened, which may take minutes after a loss of power. Sent about once
    a second to every node whose `Hello` or `Ask` waits for it."""


FromNode = (
    Hello | Grant | Commit | Release | Bad | Touch | Read | Reset | Ask | Retire | ListKeys | Chain
)
FromWriter = (
    Welcome
    | Refused
    | Granted
    | CommitDone
    | Epoch
    | Stored
    | Removed
    | TierFigures
    | Told
    | SegmentsRemoved
    | KeysListed
    | StillOpening
)

from_node: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)
from_writer: msgspec.msgpack.Decoder[FromWriter] = msgspec.msgpack.Decoder(FromWriter)


def pack_slots(slots: Sequence[int]) -> bytes:
    """Encode slots of the tier or of the arena for a message."""
    return array("i", slots).tobytes()


def unpack_slots(data: bytes) -> SlotArray:
    """Decode the slots of a message. A length that is no multiple of four gives none."""
    return np.frombuffer(b"" if len(data) % 4 else data, dtype=np.int32)


def pack_checksums(checksums: Sequence[int]) -> bytes:
    """Encode checksums for a message."""
    return np.array(checksums, dtype="<u8").tobytes()


def unpack_checksums(data: bytes) -> list[int]:
    """Decode the checksums of a message. A length that is no multiple of eight gives none."""
    return [] if len(data) % 8 else np.frombuffer(data, dtype="<u8").tolist()


def sendable(text: str) -> str:
    """Return text that a message can carry: a lone surrogate becomes a "?"."""
    return text.encode("utf-8", "replace").decode()


def chain_of(keys: Sequence[bytes], fresh: int, tokens: int) -> Chain:
    """Return the message for the keys of a prompt; see `Chain` for the rest."""
    heads = b"".join(key[:HEAD_BYTES].ljust(HEAD_BYTES, b"\0") for key in keys[:MAX_CHAIN_HEADS])
    return Chain(heads, min(fresh, len(heads) // HEAD_BYTES), tokens)
