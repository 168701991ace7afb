"""The contract of a remote engine: named objects on a server.

An object is a header of `HEADER_BYTES` and a payload. Engines do not look into either; `objects`
makes and verifies them. A fault of the network, the server or the object is an outcome, never an
exception. Bytes that an engine reads arrive in private memory (`PrivateBuffer`), never in a slot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ...config.remote import RemoteTierOptions

HEADER_BYTES = 192
"""Bytes of every header."""
MAX_COUNTER = (1 << 63) - 1
"""Greatest value of a counter; headers and messages hold no greater one."""
COUNTER_DIGITS = 20


class RemoteOutcome(StrEnum):
    """Outcome of one key of a call."""

    OK = "ok"
    """The object is there; it arrived complete; it was stored; it is not there any more."""
    ABSENT = "absent"
    """There is no such object."""
    EXISTS = "exists"
    """Not written: there was an object of this name before, and it is unchanged."""
    CORRUPT = "corrupt"
    """The object is there and wrong: another length, half of it, or it failed verification."""
    NO_SPACE = "no_space"
    """The server is full."""
    DENIED = "denied"
    """The server refused the credentials or the right, or the bucket does not exist."""
    BUSY = "busy"
    """The server asks to come back later, or the time was over while bytes came."""
    TIMED_OUT = "timed_out"
    """No answer in time, or no time left to ask."""
    IO_ERROR = "io_error"
    """The connection or the server failed."""
    RESTING = "resting"
    """Not asked: the breaker of this direction is open. Only `RemoteStore` says so."""
    DROPPED = "dropped"
    """Not asked: given up before its turn. Only `RemoteStore` says so."""


class Cause(StrEnum):
    """Reason why a server is of no use, or soon will be."""

    NO_BUCKET = "no_bucket"
    """There is no such bucket or container."""
    NO_CREDENTIALS = "no_credentials"
    """No credentials were found on this machine."""
    CREDENTIALS = "credentials"
    """The server does not accept the credentials."""
    CLOCK = "clock"
    """The clock of this machine differs too much from that of the server."""
    RIGHT = "right"
    """The user is known, and may not read."""
    FOLDER = "folder"
    """The folder cannot be created or read by this user."""
    OTHER_FOLDER = "other_folder"
    """The folder that this process opened is missing, or another one is in its place."""
    REGION = "region"
    """The bucket is in another region."""
    DATABASE = "database"
    """There is no database of this number."""
    CERTIFICATE = "certificate"
    """The certificate of the server is not trusted."""
    TLS = "tls"
    """The server breaks off connections with TLS, perhaps for lack of a certificate of ours."""
    KEEPS_ALL = "keeps_all"
    """The server removes no old blocks by itself, and refuses new ones once it is full."""


FAILURES = frozenset(
    {
        RemoteOutcome.NO_SPACE,
        RemoteOutcome.DENIED,
        RemoteOutcome.BUSY,
        RemoteOutcome.TIMED_OUT,
        RemoteOutcome.IO_ERROR,
    }
)
"""Outcomes that say something about the server, not about an object."""


def worst_of(outcomes: Iterable[RemoteOutcome]) -> RemoteOutcome:
    """Return the first failure, or `OK`. `BUSY` is the least of the failures."""
    failures = (outcome for outcome in outcomes if outcome in FAILURES)
    return min(failures, key=lambda each: each is RemoteOutcome.BUSY, default=RemoteOutcome.OK)


def outcome_of_call(outcomes: Sequence[RemoteOutcome]) -> RemoteOutcome:
    """Return the first failure, `OK` if a payload was moved, or else the first outcome.

    A server that was `BUSY` only after it had moved a payload did not fail.
    """
    worst = worst_of(outcomes)
    if RemoteOutcome.OK in outcomes:
        return RemoteOutcome.OK if worst is RemoteOutcome.BUSY else worst
    return worst if worst in FAILURES else outcomes[0]


class PrivateBuffer:
    """Private memory for one object on its way here.

    An engine writes into `header` and `payload`, or hands over memory of its own with `adopt`. The
    buffer of a call that did not end with `OK` is thrown away, because an engine could still write
    to it.
    """

    __slots__ = ("_own", "header", "payload", "payload_bytes")

    def __init__(self, payload_bytes: int) -> None:
        """Make a buffer for payloads of `payload_bytes`; its memory is allocated on first use."""
        self.payload_bytes = payload_bytes
        self._own: memoryview | None = None
        self.header = memoryview(b"")
        self.payload = memoryview(b"")

    def allocate(self) -> tuple[memoryview, memoryview]:
        """Return writable memory for the header and the payload."""
        if self._own is None:
            self._own = np.empty(HEADER_BYTES + self.payload_bytes, np.uint8).data
        self.header, self.payload = self._own[:HEADER_BYTES], self._own[HEADER_BYTES:]
        return self.header, self.payload

    def adopt(self, data: memoryview) -> bool:
        """Take over an object in memory that nothing will write to any more.

        Return False, and take nothing, if its length is not that of the object.
        """
        if data.nbytes != HEADER_BYTES + self.payload_bytes:
            return False
        self.header, self.payload = data[:HEADER_BYTES], data[HEADER_BYTES:]
        return True

    def let_go(self) -> None:
        """Let go of the object; memory of the buffer's own stays for the next one."""
        self.header = self.payload = memoryview(b"")


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """An object to be stored."""

    header: bytes
    """`HEADER_BYTES` bytes."""
    payload: memoryview
    """Contiguous bytes; they must not change before the call has returned."""


@dataclass(frozen=True, slots=True)
class CounterAnswer:
    """Answer of a call about a counter."""

    outcome: RemoteOutcome
    value: int = 0
    """Value of the counter; 0 unless the outcome is `OK`."""
    requests: int = 1
    """Number of requests that the call took."""


@dataclass(frozen=True, slots=True)
class RemoteEntry:
    """An object as the server lists it."""

    name: str
    size_bytes: int
    """Bytes of the header and the payload, or the memory that both take at the server."""
    touched_s: float | None
    """Unix time of the last write, or of the last use where the server knows it; None: unknown."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A batch of a list."""

    outcome: RemoteOutcome
    """`OK`, or the failure that ended the list."""
    entries: Sequence[RemoteEntry] = ()


def counter_answer(stored: bytes) -> CounterAnswer:
    """Return what a stored counter says: `CORRUPT` unless it is a number up to `MAX_COUNTER`."""
    if stored.isdigit() and len(stored) <= COUNTER_DIGITS and int(stored) <= MAX_COUNTER:
        return CounterAnswer(RemoteOutcome.OK, int(stored))
    return CounterAnswer(RemoteOutcome.CORRUPT)


Secret = Callable[[str], bytes]
"""Returns a secret that the options name, such as "password". Raises `ConfigError`."""


@dataclass(frozen=True, slots=True)
class EngineKind:
    """Facts about an engine that is not open. The module of each engine has one, named `KIND`."""

    open: Callable[[RemoteTierOptions, Secret], RemoteEngine]
    """Returns the engine and asks no server. Raises `ConfigError`, without any credential."""
    package: str | None = None
    """Optional package that it needs."""
    extra: str = ""
    """Extra of ours with that package."""
    is_light: bool = False
    """Whether the scheduler's process may open it, since that starts no threads."""
    reads_at_a_time: int = 64
    """Limit on concurrent reads. As many as this pay for 30 ms between us and the server."""
    writes_at_a_time: int = 32
    """Limit on concurrent writes."""
    renew_after_s: float = 0.0
    """Time after which a block in use is written again; see `RemoteEngine.renew`."""


Arrived = Callable[[int], None]
"""Takes an object that is complete in its buffer, by its number in the call."""


def ignore(number: int) -> None:
    """Do nothing with an object that arrived; it is used when the call has returned."""


class RemoteEngine(ABC):
    """One bucket or server. Any thread may call any method, many at a time.

    Names are ASCII without spaces and braces. Each call has a limit: it begins nothing after
    `limit_s` seconds, and returns at most the engine's own `timeout_s` later. No method raises for
    a fault of network, server or object.
    """

    asks_in_one_trip: bool
    """Whether `exist_many` costs about one round trip for any number of names. If not, each name is
    a request."""
    names_per_call: int
    """Number of names per `get_into` or `put` that suits the engine."""
    bytes_per_call: int = 0
    """Payload bytes of one `get_into` or `put` that suit the engine. Small blocks go together in
    larger numbers than `names_per_call`, so that the way to the server costs less of the time."""
    timeout_s: float
    """Longest time in seconds that one request takes."""

    @abstractmethod
    def exist_many(self, names: Sequence[str], limit_s: float) -> list[RemoteOutcome]:
        """Return `OK` or `ABSENT` for each name, or the failure that prevented an answer."""

    @abstractmethod
    def get_into(
        self,
        names: Sequence[str],
        buffers: Sequence[PrivateBuffer],
        limit_s: float,
        arrived: Arrived = ignore,
    ) -> list[RemoteOutcome]:
        """Read objects into private buffers.

        `OK` means that an object of the right length is in the buffer; it is not verified yet. The
        engine takes `buffers[i]` when object `i` begins to arrive, once, and calls `arrived(i)` as
        soon as it is complete. From then on it leaves the buffer alone.
        """

    @abstractmethod
    def put(
        self, names: Sequence[str], objects: Sequence[RemoteObject], limit_s: float
    ) -> list[RemoteOutcome]:
        """Store objects whose names are free; `EXISTS` for those that are not.

        The engine takes `objects[i]` once, when it is about to send it: this makes the object, and
        costs a checksum.
        """

    def renew(
        self, names: Sequence[str], objects: Sequence[RemoteObject], limit_s: float
    ) -> list[RemoteOutcome]:
        """Keep objects that were there once from expiring: they are in use.

        `EXISTS` for those that are still there, else as `put`. An engine whose objects expire by
        age may replace an old one by the same block. One whose `put` counts as a use needs no more.
        """
        return self.put(names, objects, limit_s)

    @abstractmethod
    def remove(self, names: Sequence[str], limit_s: float) -> list[RemoteOutcome]:
        """Remove objects; `OK` also for one that was not there."""

    @abstractmethod
    def counter(self, name: str, first: int | None, limit_s: float) -> CounterAnswer:
        """Return the value of a counter.

        If there is none, begin it at `first`, unless another process does so at the same moment;
        all then get one value. With None the answer is `ABSENT`.
        """

    @abstractmethod
    def advance(self, name: str, at_least: int, limit_s: float) -> CounterAnswer:
        """Raise a counter to a value that it never had, and that is `at_least` or more."""

    def memory(self) -> bytes:
        """Return what the engine of the next process has to know, see `resume`."""
        return b""

    def resume(self, memory: bytes) -> None:  # noqa: B027 - most engines need no memory
        """Go on where the engine of an ended process stopped. Call it before all others."""

    @abstractmethod
    def close(self) -> None:
        """Release connections and threads; idempotent. Calls under way may fail."""

    # -- for tools -----------------------------------------------------------------------------

    @abstractmethod
    def list_objects(self, prefix: str, limit_s: float) -> Iterator[Listing]:
        """Yield all objects whose names begin with `prefix`, in batches and in any order.

        The prefix ends with a slash or is empty. If it is empty, objects outside the folders of
        namespaces (32 hexadecimal digits) may be left out. A batch takes `limit_s` seconds at most,
        and to the server it is no use of any object. A batch whose outcome is not `OK` is the last
        one. An object that is written or removed meanwhile may be missing; one may be named twice.
        """

    @abstractmethod
    def explain(self, limit_s: float) -> Cause | None:
        """Return what is wrong with the server as seen by this user; None: nothing that is known.

        It asks the server, reads only, and takes `limit_s` plus `timeout_s` seconds at most.
        """

    def measure(self, entries: Sequence[RemoteEntry], limit_s: float) -> list[int | RemoteOutcome]:
        """Return the bytes of each object, header and payload, or why they are not known.

        An engine whose lists have other sizes asks the server, to which this may be a use.
        """
        return [entry.size_bytes for entry in entries]

    def sweep(
        self,
        namespace: str,
        older_than_s: float,
        is_old: Callable[[str], bool],
        *,
        is_dry_run: bool,
    ) -> list[int]:
        """Remove incomplete files of namespaces that begin with these digits. Return their bytes.

        An engine without files has none. A file stays if it was written in the last `older_than_s`
        seconds, since its writer may live. Empty folders of old generations are removed, too.
        `is_old` takes the first two parts of an object's name; what it raises comes through.
        """
        return []
