"""Objects in a Valkey or Redis server, or in a cluster of them.

A block is two values: the payload under `{name}`, and the header under `{name}:h` together with the
last `TAIL_BYTES` of the payload. Many payloads are exact powers of two. The server adds a few bytes
of its own to a value, which would push it into the allocator's next size class, 1.25 times as
large. The braces put both values into one slot of a cluster, and one command writes both. Half a
pair counts as absent, and the next write replaces it.

The server evicts by its own rules (`maxmemory-policy`), and a time to live is optional.
"""

from __future__ import annotations

import math
import ssl
import threading
import time
from binascii import crc_hqx
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from ....config.remote import SCHEMES, RemoteTierOptions, is_loopback
from ....errors import ConfigError
from ..base import (
    HEADER_BYTES,
    Arrived,
    Cause,
    CounterAnswer,
    EngineKind,
    Listing,
    PrivateBuffer,
    RemoteEngine,
    RemoteEntry,
    RemoteObject,
    RemoteOutcome,
    Secret,
    counter_answer,
    ignore,
)
from . import valkey_questions
from .resp import MAX_PORT, Address, Argument, Login, RespBrokenError, RespConnection, RespError

DEFAULT_PORT = 6379
MAX_PORT_DIGITS = 5
REDIRECTS_MAX = 4
"""Limit on how often one key is sent to another node of a cluster."""
IDLE_CONNECTIONS_MAX = 16
"""Limit on the idle connections of one node."""
IDLE_LIMIT_S = 60.0
"""Longest time without use of a connection. Gateways between hosts drop idle ones without a word,
some after four minutes."""
TURN_S = 10.0
"""Shortest time between two turns to another node because one does not serve a slot. While a
cluster is down, all of them do not."""
SILENT_SHARE = 4
"""A node is silent after this part of a call's time without a byte."""
LIST_ROUNDS_MAX = 1 << 26
"""Limit on the batches of one node's list."""
TAIL_BYTES = 128
"""Bytes of the payload that lie behind the header."""
_PAIR = 2
_EXISTS = b"*3\r\n$6\r\nEXISTS\r\n$%d\r\n%s\r\n$%d\r\n%s:h\r\n"
_TOUCH = b"*3\r\n$5\r\nTOUCH\r\n$%d\r\n%s\r\n$%d\r\n%s:h\r\n"
"""Commands about both values of a pair; they return how many are there. `TOUCH` is a use."""
_NX_REPLIES = (b"+OK", b"$-1")
"""Replies to SET: written, or there before."""
_WRITTEN = {b":1": RemoteOutcome.OK, b":0": RemoteOutcome.EXISTS, b"+OK": RemoteOutcome.OK}
"""Replies to MSETNX and MSET."""
_OUTCOMES = {
    "OOM": RemoteOutcome.NO_SPACE,
    "MISCONF": RemoteOutcome.NO_SPACE,
    "NOAUTH": RemoteOutcome.DENIED,
    "WRONGPASS": RemoteOutcome.DENIED,
    "NOPERM": RemoteOutcome.DENIED,
    "READONLY": RemoteOutcome.DENIED,
    "ASK": RemoteOutcome.BUSY,
    "BUSY": RemoteOutcome.BUSY,
    "CLUSTERDOWN": RemoteOutcome.BUSY,
    "LOADING": RemoteOutcome.BUSY,
    "MASTERDOWN": RemoteOutcome.BUSY,
    "NOREPLICAS": RemoteOutcome.BUSY,
    "TRYAGAIN": RemoteOutcome.BUSY,
    "WRONGTYPE": RemoteOutcome.CORRUPT,
}

Answer = RemoteOutcome | Address
"""Outcome of a key, or the node that has it; without a host it is on the host that was asked."""
Work = Callable[[RespConnection, Sequence[int], list[Answer]], None]
"""Exchange about the keys with these numbers; it sets the answer of each as it comes."""


class _Limit(NamedTuple):
    """Time of one call, at all nodes together."""

    ends_s: float
    """Monotonic time of its end."""
    silent_s: float
    """A node without a byte for so long has timed out at the end. Another one is busy."""


class Nodes:
    """Idle connections of each node, and which node has which slot. Any thread."""

    def __init__(self, seed: Address, login: Login) -> None:
        self._login = login
        self._seed = seed
        self._lock = threading.Lock()
        self._idle: dict[Address, list[RespConnection]] = {}
        self._known = [seed]
        """Nodes that can be asked where a key is; the first one is asked."""
        self._slots: dict[int, Address] = {}
        """Empty without a cluster."""
        self._left_s: dict[Address, float] = {}
        """Time at which a node failed. No connection that was opened before is used again."""
        self._turned_s = -math.inf
        """Time of the last turn by `note_unserved`."""
        self._is_closed = False

    @property
    def first(self) -> Address:
        """The node that is asked where a key is."""
        return self._known[0]

    def places(self, names: Sequence[str]) -> dict[Address, list[int]]:
        """Return the node to ask for each name, as the numbers of the names of each node."""
        with self._lock:
            slots, first = self._slots, self._known[0]
        if not slots:
            return {first: [*range(len(names))]}
        found: dict[Address, list[int]] = {}
        for number, name in enumerate(names):
            found.setdefault(slots.get(hash_slot(name), first), []).append(number)
        return found

    def borrow(self, address: Address, ends_s: float) -> RespConnection:
        """Return an idle connection or a new one. Raises `OSError` or `RespError`."""
        while True:
            with self._lock:
                if self._is_closed:
                    raise RespBrokenError("the engine is closed")
                idle = self._idle.get(address)
                found = idle.pop() if idle else None
            if found is None:
                if self._login.only_loopback and not is_loopback(address.host):
                    raise RespBrokenError("the address is that of another host, and without TLS")
                try:
                    return RespConnection(address, self._login, ends_s)
                except ssl.SSLError:  # an untrusted certificate is also a `ValueError`
                    raise
                except ValueError:  # a name that no host can have, as a cluster may say it
                    raise RespBrokenError("the address is none") from None
            found.begin(ends_s)
            is_old = time.monotonic() - found.idle_since_s > IDLE_LIMIT_S
            if not (is_old or found.is_stale):
                return found
            found.close()

    def give_back(self, address: Address, connection: RespConnection) -> None:
        """Keep a connection that has no answer outstanding."""
        connection.idle_since_s = time.monotonic()
        with self._lock:
            idle = self._idle.setdefault(address, [])
            is_left = connection.opened_s < self._left_s.get(address, 0.0)
            if not (self._is_closed or is_left) and len(idle) < IDLE_CONNECTIONS_MAX:
                idle.append(connection)
                return
        connection.close()

    def leave(self, address: Address) -> None:
        """Use no connection again that is open now: the name may lead to another server."""
        with self._lock:
            self._left_s[address] = time.monotonic()
            idle = self._idle.pop(address, [])
        for connection in idle:
            connection.close()

    def note_failure(self, address: Address) -> None:
        """Forget what a node that failed has, and ask another one first."""
        self.leave(address)
        with self._lock:
            self._slots = {s: a for s, a in self._slots.items() if a != address}
            self._put_last(address)

    def note_unserved(self, address: Address, slots: Set[int]) -> None:
        """Forget that a node has these slots, and ask another one first.

        A node that left its cluster and goes on knows nothing of the others.
        """
        now_s = time.monotonic()
        with self._lock:
            if address in {self._slots.get(slot) for slot in slots}:
                self._slots = {s: a for s, a in self._slots.items() if s not in slots}
            if now_s - self._turned_s >= TURN_S and self._put_last(address):
                self._turned_s = now_s

    def _put_last(self, address: Address) -> bool:
        """Ask another node than this one first. Return False if it was not the first."""
        if self._known[0] != address:
            return False
        self._known.append(self._known.pop(0))
        return True

    def note_move(
        self, connection: RespConnection, asked: Address, slot: int, address: Address
    ) -> None:
        """Read the map of the cluster after the node `asked` said that a slot is elsewhere."""
        slots: dict[int, Address] = {}
        with suppress(RespError):  # the one slot is known all the same
            slots = valkey_questions.slots_of(connection, asked)
        with self._lock:
            self._slots = self._slots | slots | {slot: address.seen_from(asked)}
            nodes = sorted({*self._slots.values()}, key=lambda a: (a.host, a.port))
            self._known = [*dict.fromkeys([self._known[0], self._seed, *nodes])]
            gone = self._idle.keys() - {*self._known}
            self._left_s = {a: s for a, s in self._left_s.items() if a in self._known}
            idle = [left for node in gone for left in self._idle.pop(node)]
        for left in idle:
            left.close()

    def close(self) -> None:
        """Close all idle connections; those that are in use are closed when they come back."""
        with self._lock:
            self._is_closed = True
            idle = [connection for some in self._idle.values() for connection in some]
            self._idle.clear()
        for connection in idle:
            connection.close()


class ValkeyEngine(RemoteEngine):
    """One server or cluster; each call uses one connection of its own for each node."""

    asks_in_one_trip = True
    names_per_call = 4
    bytes_per_call = 2 << 20

    def __init__(self, address: Address, login: Login, ttl_s: float | None = None) -> None:
        """`ttl_s`: seconds without use after which the server removes a block; None: never.

        Nothing is asked of the server yet.
        """
        self.timeout_s = login.stall_s
        self._nodes = Nodes(address, login)
        self._has_tls = login.tls is not None
        self._lifetime_ms = None if ttl_s is None else b"%d" % max(1, int(ttl_s * 1000))

    def exist_many(self, names: Sequence[str], limit_s: float) -> list[RemoteOutcome]:
        def ask(connection: RespConnection, some: Sequence[int], answers: list[Answer]) -> None:
            for i, count in zip(some, _count(connection, [names[i] for i in some]), strict=True):
                answers[i] = _presence(count)

        return self._routed(names, ask, limit_s)

    def get_into(
        self,
        names: Sequence[str],
        buffers: Sequence[PrivateBuffer],
        limit_s: float,
        arrived: Arrived = ignore,
    ) -> list[RemoteOutcome]:
        def read(connection: RespConnection, some: Sequence[int], answers: list[Answer]) -> None:
            pairs = [_pair(names[i]) for i in some]
            connection.send(*([b"MGET", header, payload] for payload, header in pairs))
            for i in some:
                answers[i] = _read_pair(connection, buffers, i)
                if answers[i] is RemoteOutcome.OK:
                    arrived(i)

        return self._routed(names, read, limit_s)

    def put(
        self, names: Sequence[str], objects: Sequence[RemoteObject], limit_s: float
    ) -> list[RemoteOutcome]:
        def write(connection: RespConnection, some: Sequence[int], answers: list[Answer]) -> None:
            counts = self._touch(connection, [names[i] for i in some])
            new: list[int] = []
            torn: list[int] = []
            for i, count in zip(some, counts, strict=True):
                if isinstance(count, RespError):
                    answers[i] = _answer(count)
                elif count == _PAIR:
                    answers[i] = RemoteOutcome.EXISTS
                else:
                    (torn if count else new).append(i)
            self._write_pairs(connection, b"MSETNX", names, objects, new, answers)
            self._write_pairs(connection, b"MSET", names, objects, torn, answers)

        return self._routed(names, write, limit_s)

    def _touch(self, connection: RespConnection, names: Sequence[str]) -> list[int | RespError]:
        """Return how many values of each pair are there. They are used, and live on."""
        if self._lifetime_ms is None:
            return _count(connection, names, _TOUCH)
        connection.send(*self._renewals(names))
        found = connection.integers(_PAIR * len(names))
        return [_both(*found[at : at + _PAIR]) for at in range(0, len(found), _PAIR)]

    def _renewals(self, names: Sequence[str]) -> list[list[Argument]]:
        """Return the commands that give pairs another time to live; none if they live for ever."""
        life_ms = self._lifetime_ms
        if life_ms is None:
            return []
        return [[b"PEXPIRE", value, life_ms] for name in names for value in _pair(name)]

    def _write_pairs(
        self,
        connection: RespConnection,
        command: bytes,
        names: Sequence[str],
        objects: Sequence[RemoteObject],
        some: Sequence[int],
        answers: list[Answer],
    ) -> None:
        """Write pairs by `MSETNX`, or by `MSET`, which replaces what is there.

        The payload is the last word of its command: Valkey 9.1 takes a fourth longer for one with
        a word behind it.
        """
        commands: list[Sequence[Argument]] = []
        for i in some:
            payload, header = _pair(names[i])
            made = objects[i]
            body, tail = _split(made.payload)
            commands.append([command, header, made.header + bytes(tail), payload, body])
            commands += self._renewals([names[i]])
        if commands:
            connection.send(*commands)
        for i in some:
            answers[i] = self._written(connection)

    def _written(self, connection: RespConnection) -> Answer:
        """Read the replies about one pair."""
        try:
            answer: Answer = _WRITTEN[connection.expect(*_WRITTEN)]
        except RespError as error:
            answer = _answer(error)
        renewed = connection.integers(0 if self._lifetime_ms is None else _PAIR)
        return next((_answer(each) for each in renewed if isinstance(each, RespError)), answer)

    def remove(self, names: Sequence[str], limit_s: float) -> list[RemoteOutcome]:
        def delete(connection: RespConnection, some: Sequence[int], answers: list[Answer]) -> None:
            connection.send(*([b"UNLINK", *_pair(names[i])] for i in some))
            for i, count in zip(some, connection.integers(len(some)), strict=True):
                answers[i] = RemoteOutcome.OK if isinstance(count, int) else _answer(count)

        return self._routed(names, delete, limit_s)

    def counter(self, name: str, first: int | None, limit_s: float) -> CounterAnswer:
        def ask(connection: RespConnection) -> CounterAnswer:
            key = name.encode()
            connection.send([b"GET", key])
            stored = connection.value()
            if stored is None and first is not None:  # a replica refuses every SET
                connection.send([b"SET", key, b"%d" % first, b"NX"])
                connection.expect(*_NX_REPLIES)
                connection.send([b"GET", key])
                stored = connection.value()
            return CounterAnswer(RemoteOutcome.ABSENT) if stored is None else counter_answer(stored)

        return self._about_counter(name, ask, limit_s)

    def advance(self, name: str, at_least: int, limit_s: float) -> CounterAnswer:
        def raise_it(connection: RespConnection) -> CounterAnswer:
            key = name.encode()
            # The value that another process sets meanwhile is below: both only raise it.
            connection.send([b"SET", key, b"%d" % (at_least - 1), b"NX"])
            connection.expect(*_NX_REPLIES)
            connection.send([b"INCR", key])
            value = connection.number()
            if value < at_least:
                connection.send([b"INCRBY", key, b"%d" % (at_least - value)])
                value = connection.number()
            if value < at_least:
                return CounterAnswer(RemoteOutcome.CORRUPT)
            return CounterAnswer(RemoteOutcome.OK, value)

        return self._about_counter(name, raise_it, limit_s)

    def _about_counter(
        self, name: str, ask: Callable[[RespConnection], CounterAnswer], limit_s: float
    ) -> CounterAnswer:
        found = CounterAnswer(RemoteOutcome.IO_ERROR)

        def work(connection: RespConnection, _: Sequence[int], answers: list[Answer]) -> None:
            nonlocal found
            found = ask(connection)
            answers[0] = found.outcome

        (outcome,) = self._routed([name], work, limit_s)
        return found if outcome is RemoteOutcome.OK else CounterAnswer(outcome)

    def list_objects(self, prefix: str, limit_s: float) -> Iterator[Listing]:
        first = self._nodes.first
        nodes: list[Address] = []
        outcome = self._alone(
            first, lambda c: nodes.extend(valkey_questions.nodes_of(c, first)), limit_s
        )
        if outcome is not RemoteOutcome.OK:
            yield Listing(outcome)
            return
        for node in nodes:
            for listing in self._list_node(node, prefix, limit_s):
                yield listing
                if listing.outcome is not RemoteOutcome.OK:
                    return

    def _list_node(self, node: Address, prefix: str, limit_s: float) -> Iterator[Listing]:
        cursor = valkey_questions.START
        entries: Sequence[RemoteEntry] = ()

        def scan(connection: RespConnection) -> None:
            nonlocal cursor, entries
            cursor, entries = valkey_questions.scan(connection, cursor, prefix)

        for _ in range(LIST_ROUNDS_MAX):
            outcome = self._alone(node, scan, limit_s)
            is_ok = outcome is RemoteOutcome.OK
            yield Listing(outcome, entries if is_ok else ())
            if not is_ok or cursor == valkey_questions.START:
                return

    def measure(self, entries: Sequence[RemoteEntry], limit_s: float) -> list[int | RemoteOutcome]:
        names = [entry.name for entry in entries]
        sizes: list[int] = [0] * len(names)

        def ask(connection: RespConnection, some: Sequence[int], answers: list[Answer]) -> None:
            connection.send(*([b"STRLEN", value] for i in some for value in _pair(names[i])))
            found = iter(connection.integers(_PAIR * len(some)))
            for i, one, other in zip(some, found, found, strict=True):
                size = _both(one, other)
                if isinstance(size, RespError):
                    answers[i] = _answer(size)
                else:
                    sizes[i] = size
                    answers[i] = RemoteOutcome.OK if size else RemoteOutcome.ABSENT

        outcomes = self._routed(names, ask, limit_s)
        is_ok = RemoteOutcome.OK
        return [s if o is is_ok else o for s, o in zip(sizes, outcomes, strict=True)]

    def explain(self, limit_s: float) -> Cause | None:
        first = self._nodes.first
        key, _ = _pair("kvcascade-check/explain")
        try:
            connection = self._nodes.borrow(first, time.monotonic() + limit_s)
        except RespError as error:
            return valkey_questions.cause_of(error)
        except OSError as error:
            return self._cause_of_end(error)
        try:
            return valkey_questions.explain(connection, key, has_ttl=self._lifetime_ms is not None)
        except OSError as error:
            return self._cause_of_end(error)
        finally:
            connection.close()

    def _cause_of_end(self, error: OSError) -> Cause | None:
        """Return what the end of a connection says. A refused connection has not even begun."""
        if isinstance(error, ssl.SSLCertVerificationError):
            return Cause.CERTIFICATE
        is_break = isinstance(error, ssl.SSLError | ConnectionError)
        is_refusal = isinstance(error, ConnectionRefusedError)
        return Cause.TLS if self._has_tls and is_break and not is_refusal else None

    def _alone(
        self, address: Address, act: Callable[[RespConnection], object], limit_s: float
    ) -> RemoteOutcome:
        """Do something at one node that is not about one key."""

        def work(connection: RespConnection, _: Sequence[int], answers: list[Answer]) -> None:
            act(connection)
            answers[0] = RemoteOutcome.OK

        answers: list[Answer] = [RemoteOutcome.IO_ERROR]
        self._at(address, [""], [0], work, answers, self._limit(limit_s))
        answer = answers[0]
        return RemoteOutcome.IO_ERROR if isinstance(answer, Address) else answer

    def close(self) -> None:
        self._nodes.close()

    def _routed(self, names: Sequence[str], work: Work, limit_s: float) -> list[RemoteOutcome]:
        """Do the work at the node of each name, following the cluster's redirections."""
        limit = self._limit(limit_s)
        answers: list[Answer] = [RemoteOutcome.IO_ERROR] * len(names)
        places = self._nodes.places(names)
        for _ in range(1 + REDIRECTS_MAX):
            moved: dict[Address, list[int]] = {}
            for address, some in places.items():
                self._at(address, names, some, work, answers, limit)
                for number in some:
                    answer = answers[number]
                    if isinstance(answer, Address):
                        moved.setdefault(answer.seen_from(address), []).append(number)
            places = moved
            if not places:
                break
        return [RemoteOutcome.BUSY if isinstance(a, Address) else a for a in answers]

    def _limit(self, limit_s: float) -> _Limit:
        return _Limit(time.monotonic() + limit_s, min(limit_s, self.timeout_s) / SILENT_SHARE)

    def _at(
        self,
        address: Address,
        names: Sequence[str],
        some: Sequence[int],
        work: Work,
        answers: list[Answer],
        limit: _Limit,
    ) -> None:
        """Do the work at one node; after a fault, keys without an answer get its outcome."""
        waiting = RemoteOutcome.RESTING  # stands for no answer yet
        for i in some:
            answers[i] = waiting
        connection, begun_s, has_failed = None, time.monotonic(), True
        fault: RemoteOutcome
        try:
            connection = self._nodes.borrow(address, limit.ends_s)
            work(connection, some, answers)
            moved = [i for i in some if isinstance(answers[i], Address)]
            if moved:
                place = answers[moved[0]]
                assert isinstance(place, Address)
                self._nodes.note_move(connection, address, hash_slot(names[moved[0]]), place)
            if "READONLY" in connection.errors:  # its name may lead to another server now
                self._nodes.leave(address)
            if "CLUSTERDOWN" in connection.errors:
                busy = [i for i in some if answers[i] is RemoteOutcome.BUSY]
                self._nodes.note_unserved(address, {hash_slot(names[i]) for i in busy})
            self._nodes.give_back(address, connection)
            return
        except RespError as error:
            answer = _answer(error)
            if isinstance(answer, Address) and connection is not None:
                for i in some:
                    answers[i] = answer
                with suppress(OSError):  # the redirection is followed all the same
                    self._nodes.note_move(connection, address, hash_slot(names[some[0]]), answer)
                connection.close()
                return
            fault = RemoteOutcome.IO_ERROR if isinstance(answer, Address) else answer
        except TimeoutError:
            now_s = time.monotonic()
            if connection is None:  # no connection, although there was time for one
                has_failed = now_s < limit.ends_s or now_s - begun_s >= limit.silent_s
            else:
                has_failed = now_s - connection.moved_s >= limit.silent_s
            fault = RemoteOutcome.TIMED_OUT if has_failed else RemoteOutcome.BUSY
        except OSError:
            fault = RemoteOutcome.IO_ERROR
        if connection is not None:
            connection.close()
        if has_failed:
            self._nodes.note_failure(address)
        for i in some:
            if answers[i] is waiting:
                answers[i] = fault


def hash_slot(name: str) -> int:
    """Return the cluster's slot of a name."""
    return crc_hqx(name.encode(), 0) % valkey_questions.CLUSTER_SLOTS


def _pair(name: str) -> tuple[bytes, bytes]:
    """Return the keys of a payload and its header; the braces make their slot that of the name."""
    tag = b"{%s}" % name.encode()
    return tag, tag + b":h"


def _split(payload: memoryview) -> tuple[memoryview, memoryview]:
    """Return the part of a payload that is a value of its own, and the rest."""
    at = max(0, len(payload) - TAIL_BYTES)
    return payload[:at], payload[at:]


def _count(
    connection: RespConnection, names: Sequence[str], command: bytes = _EXISTS
) -> list[int | RespError]:
    """Return how many values of each pair are there."""
    tags = [b"{%s}" % name.encode() for name in names]
    connection.send_raw([b"".join(command % (len(t), t, len(t) + 2, t) for t in tags)])
    return connection.integers(len(names))


def _both(one: int | RespError, other: int | RespError) -> int | RespError:
    if isinstance(one, RespError):
        return one
    return other if isinstance(other, RespError) else one + other


def _presence(count: int | RespError) -> Answer:
    if isinstance(count, RespError):
        return _answer(count)
    return RemoteOutcome.OK if count == _PAIR else RemoteOutcome.ABSENT


def _read_pair(connection: RespConnection, buffers: Sequence[PrivateBuffer], number: int) -> Answer:
    try:
        count = connection.length_of_array()
    except RespError as error:
        return _answer(error)
    if count != _PAIR:
        raise RespBrokenError("the server sent another number of values than was asked for")
    header, payload = buffers[number].allocate()
    body, tail = _split(payload)
    front = connection.value()
    body_bytes = connection.value_into(body)
    if front is None or body_bytes < 0:
        return RemoteOutcome.ABSENT
    if len(front) != HEADER_BYTES + len(tail) or body_bytes != len(body):
        return RemoteOutcome.CORRUPT
    header[:], tail[:] = front[:HEADER_BYTES], front[HEADER_BYTES:]
    return RemoteOutcome.OK


def _answer(error: RespError) -> Answer:
    """Return what an error of the server means."""
    if error.code == "MOVED" and len(error.words) > 1:
        host, colon, port = error.words[1].rpartition(":")
        if colon and port.isdigit() and len(port) <= MAX_PORT_DIGITS and 0 < int(port) <= MAX_PORT:
            return Address(host, int(port))
    return _OUTCOMES.get(error.code, RemoteOutcome.IO_ERROR)


def _open(options: RemoteTierOptions, secret: Secret) -> ValkeyEngine:
    parts = urlsplit(options.url)
    has_password = options.wants("password")
    if has_password:
        secret("password")  # a variable or file that is not there is bad configuration

    def password() -> str:
        try:
            raw = secret("password")
        except ConfigError:
            raise RespBrokenError("the password cannot be read any more") from None
        return raw.decode(errors="surrogateescape").rstrip("\r\n")

    tls = _tls(options) if SCHEMES[parts.scheme].protected == parts.scheme else None
    login = Login(
        options.connect_timeout_s,
        options.timeout_s,
        tls,
        options.username,
        password if has_password else None,
        int(parts.path.strip("/") or 0),
        only_loopback=tls is None and not options.insecure,
    )
    address = Address(unquote(parts.hostname or ""), parts.port or DEFAULT_PORT)
    return ValkeyEngine(address, login, options.ttl_s)


def _tls(options: RemoteTierOptions) -> ssl.SSLContext:
    """Return the rules of connections. Raises `ConfigError`."""
    name = "ca_file"
    try:
        tls = ssl.create_default_context(cafile=options.ca_file and str(options.ca_file))
        if options.client_cert_file is not None:
            name = "client_cert_file"
            # Without a password, OpenSSL asks for that of an encrypted key on the terminal.
            tls.load_cert_chain(options.client_cert_file, options.client_key_file, password="")
    except OSError as error:
        why = (
            "no certificate, or not its key" if isinstance(error, ssl.SSLError) else error.strerror
        )
        raise ConfigError(f"{options.key}.{name}: cannot be read ({why}).") from None
    return tls


KIND = EngineKind(_open, is_light=True, reads_at_a_time=2, writes_at_a_time=2)
