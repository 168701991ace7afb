"""One connection to a Valkey or Redis server: RESP 2, without copies of large values.

Large values are sent from the memory that holds them (`sendmsg`) and received into memory that the
caller gives (`recv_into`). Client libraries copy them twice or more, which halves the rate.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

RECEIVE_BYTES = 4096
"""Bytes received at a time where a short line is expected; what lies behind the line is copied."""
SEPARATE_BYTES = 16 << 10
"""Values of this size and more are sent from where they lie."""
PIECES_PER_SEND = 512
MAX_LINE_BYTES = 64 << 10
MAX_DEPTH = 8
MAX_REPLY_BYTES = 16 << 20
"""Limit on what `reply` returns, its bytes and `ITEM_BYTES` for each item."""
ITEM_BYTES = 64
MAX_INTEGER = (1 << 63) - 1
MAX_PORT = (1 << 16) - 1
MAX_DRAINED_BYTES = 1 << 30
"""Longest value that is received only to be thrown away."""

Argument = bytes | memoryview


class RespError(Exception):
    """The server answered with an error; the connection goes on."""

    def __init__(self, line: bytes) -> None:
        """`line`: the error without its "-"."""
        words = line.decode("ascii", "replace").split()
        self.code = words[0] if words else ""
        """First word, such as "OOM" or "MOVED"."""
        self.words = words[1:]
        super().__init__(self.code)


class RespBrokenError(ConnectionError):
    """The peer does not speak the protocol, or went away."""


@dataclass(frozen=True, slots=True)
class Address:
    """Place of a server."""

    host: str
    """Empty in an answer of a cluster that leaves it out."""
    port: int

    def seen_from(self, asked: Address) -> Address:
        """Return the address that the node `asked` meant: its own host stands for an empty one."""
        return self if self.host else Address(asked.host, self.port)


@dataclass(frozen=True, slots=True)
class Login:
    """Parameters of a connection."""

    connect_timeout_s: float
    stall_s: float
    """Longest time in seconds without a byte."""
    tls: ssl.SSLContext | None = None
    username: str | None = None
    password: Callable[[], str] | None = field(default=None, repr=False)
    """Called for each connection, because passwords are rotated. May raise `OSError`. Bytes that
    are no UTF-8 are surrogates."""
    database: int = 0
    only_loopback: bool = False
    """Whether nodes on other hosts are refused, because the connection has no TLS."""


class RespConnection:
    """A connection, used by one thread at a time. No wait lasts longer than `ends_s`."""

    def __init__(self, address: Address, login: Login, ends_s: float) -> None:
        """Connect and log in. Raises `OSError` or `RespError`."""
        self.errors: set[str] = set()
        """Codes of the errors that came since `begin`, see `RespError`."""
        self.begin(ends_s)
        self.opened_s = self.moved_s
        self.idle_since_s = 0.0
        """Monotonic time of its last use, once it is idle."""
        self._stall_s = login.stall_s
        self._buffer = bytearray(RECEIVE_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._reply_bytes = 0
        """Size of the reply that is being received."""
        until_s = time.monotonic() + min(login.connect_timeout_s, self._left_s())
        self._socket = _connected(address, until_s)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.settimeout(_left_s(until_s))
            if login.tls is not None:
                self._socket = login.tls.wrap_socket(self._socket, server_hostname=address.host)
            self._greet(login)
        except BaseException:
            self.close()
            raise

    def _greet(self, login: Login) -> None:
        if login.password is not None:
            user = [login.username.encode()] if login.username else []
            self.send([b"AUTH", *user, login.password().encode(errors="surrogateescape")])
            self.expect(b"+OK")
        if login.database:
            self.send([b"SELECT", str(login.database).encode()])
            self.expect(b"+OK")

    def begin(self, ends_s: float) -> None:
        """Begin a use of the connection, by one thread."""
        self.ends_s = ends_s
        """Monotonic time at which every wait ends with `TimeoutError`."""
        self.moved_s = time.monotonic()
        """Monotonic time at which the use began, or a byte last went or came."""
        self.errors.clear()

    def close(self) -> None:
        """Close the socket; idempotent."""
        self._socket.close()

    @property
    def is_stale(self) -> bool:
        """True if an idle connection has something to read: an end, or an answer to nobody."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0)) or self._start != self._end

    def send(self, *commands: Sequence[Argument]) -> None:
        """Send commands, all in one go."""
        pieces: list[Argument] = []
        small: list[Argument] = []
        for command in commands:
            small.append(b"*%d\r\n" % len(command))
            for argument in command:
                length = len(argument)
                small.append(b"$%d\r\n" % length)
                if length >= SEPARATE_BYTES:
                    pieces += (b"".join(small), argument)
                    small = [b"\r\n"]
                else:
                    small += (argument, b"\r\n")
        pieces.append(b"".join(small))
        self.send_raw(pieces)

    def send_raw(self, pieces: Sequence[Argument]) -> None:
        """Send bytes that are commands already."""
        if isinstance(self._socket, ssl.SSLSocket):
            for piece in pieces:
                self._socket.settimeout(self._left_s())  # of one `sendall`
                self._socket.sendall(piece)
                self.moved_s = time.monotonic()
            return
        self._socket.settimeout(self._left_s())
        left = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
        while left:
            sent = self._socket.sendmsg(left[:PIECES_PER_SEND])
            self.moved_s = time.monotonic()
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if left and sent:
                left[0] = left[0][sent:]
            if left:
                self._left_s()

    def line(self) -> bytes:
        """Return one line: type and value of a reply. Raises `RespError` for an error."""
        line = self._line()
        if line[:1] == b"-":
            raise self._error(line)
        return line

    def expect(self, *replies: bytes) -> bytes:
        """Return one line, which is one of `replies`. Raises `RespError` for an error."""
        line = self.line()
        if line not in replies:
            raise RespBrokenError("the server sent another reply than the command has")
        return line

    def number(self) -> int:
        """Return an integer reply."""
        return _number(self.line(), b":")

    def reply(self) -> Any:
        """Return a reply of any type: bytes, int, None or a list. Raises `RespError`."""
        self._reply_bytes = 0
        return self._item(self.line(), 0)

    def _item(self, line: bytes, depth: int) -> Any:
        kind = line[:1]
        self._reply_bytes += ITEM_BYTES + len(line)
        if depth > MAX_DEPTH or self._reply_bytes > MAX_REPLY_BYTES:
            raise RespBrokenError("a reply is longer than expected")
        if kind == b"$":
            value = self._value(line)
            self._reply_bytes += len(value or b"")
            return value
        if kind == b"*":
            return [self._item(self._line(), depth + 1) for _ in range(_number(line, kind))]
        if kind == b"-":
            raise RespBrokenError("the server sent an error inside of a reply")
        return _number(line, kind) if kind == b":" else line[1:]

    def integers(self, count: int) -> list[int | RespError]:
        """Return so many integer replies; an error stands where the server sent one."""
        found: list[int | RespError] = []
        while len(found) < count:
            for line in self._lines(count - len(found)):
                found.append(self._error(line) if line[:1] == b"-" else _number(line, b":"))
        return found

    def _error(self, line: bytes) -> RespError:
        error = RespError(line[1:])
        self.errors.add(error.code)
        return error

    def _lines(self, most: int) -> list[bytes]:
        """Return some lines, at least one: those that are here already, if there are any."""
        end = self._buffer.rfind(b"\r\n", self._start, self._end)
        if end < 0:
            return [self._line()]
        lines = self._view[self._start : end].tobytes().split(b"\r\n", most)[:most]
        self._start += sum(map(len, lines)) + 2 * len(lines)
        return lines

    def length_of_array(self) -> int:
        """Return the length of an array reply; -1 for a null one."""
        return _number(self.line(), b"*")

    def value(self) -> bytes | None:
        """Return a short value, or None for a null one."""
        return self._value(self.line())

    def _value(self, line: bytes) -> bytes | None:
        length = _number(line, b"$")
        if length < 0:
            return None
        if length > MAX_LINE_BYTES:
            raise RespBrokenError("a value is longer than expected")
        data = bytearray(length)
        self._receive(memoryview(data))
        self._end_value()
        return bytes(data)

    def value_into(self, target: memoryview) -> int:
        """Receive a value into `target` if it has exactly that length; throw it away otherwise.

        Return its length; -1 for a null value.
        """
        length = _number(self.line(), b"$")
        if length < 0:
            return -1
        if length == len(target):
            self._receive(target)
        else:
            self._drain(length)
        self._end_value()
        return length

    def _drain(self, length: int) -> None:
        if length > MAX_DRAINED_BYTES:
            raise RespBrokenError("a value is longer than expected")
        scratch = memoryview(bytearray(min(length, SEPARATE_BYTES)))
        while length:
            part = scratch[: min(length, len(scratch))]
            self._receive(part)
            length -= len(part)

    def _end_value(self) -> None:
        if self._line():
            raise RespBrokenError("a value has another length than the server said")

    def _receive(self, target: memoryview) -> None:
        """Fill `target`: with what is here already, and then straight from the socket."""
        ready = min(len(target), self._end - self._start)
        target[:ready] = self._view[self._start : self._start + ready]
        self._start += ready
        while ready < len(target):
            self._socket.settimeout(self._left_s())
            got = self._socket.recv_into(target[ready:])
            if not got:
                raise RespBrokenError("the server closed the connection")
            self.moved_s = time.monotonic()
            ready += got

    def _line(self) -> bytes:
        kept = b""
        while True:
            at = self._buffer.find(b"\r\n", self._start, self._end)
            if at >= 0:
                line = kept + self._view[self._start : at].tobytes()
                self._start = at + 2
                return line
            if self._end - self._start == len(self._buffer):
                # A line longer than the buffer: all but its last byte, which may be half an end.
                kept += self._view[: self._end - 1].tobytes()
                self._start = self._end - 1
                if len(kept) > MAX_LINE_BYTES:
                    raise RespBrokenError("a line is longer than expected")
            self._refill()

    def _refill(self) -> None:
        """Receive some bytes behind those that are here."""
        rest = self._view[self._start : self._end].tobytes()
        self._view[: len(rest)] = rest
        self._start, self._end = 0, len(rest)
        self._socket.settimeout(self._left_s())
        got = self._socket.recv_into(self._view[self._end :])
        if not got:
            raise RespBrokenError("the server closed the connection")
        self.moved_s = time.monotonic()
        self._end += got

    def _left_s(self) -> float:
        return min(_left_s(self.ends_s), self._stall_s)


def _connected(address: Address, until_s: float) -> socket.socket:
    """Return a socket that is connected to one of the host's addresses. Raises `OSError`.

    Each address gets an equal share of the time that is left, so that dead ones cost no more
    than the limit and leave time for the others.
    """
    places = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    for number, (*_, place) in enumerate(places, 1):
        share_s = _left_s(until_s) / (len(places) + 1 - number)
        try:
            return socket.create_connection((str(place[0]), address.port), share_s)
        except OSError:
            if number == len(places):
                raise
    raise RespBrokenError("the host has no address")


def _left_s(until_s: float) -> float:
    """Return the time until then. Raises `TimeoutError` if it has passed."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _number(line: bytes, kind: bytes) -> int:
    if line[:1] != kind:
        raise RespBrokenError("the server sent a reply of another type")
    try:
        number = int(line[1:])
    except ValueError:
        raise RespBrokenError("the server sent a number that is none") from None
    if abs(number) > MAX_INTEGER:
        raise RespBrokenError("the server sent a number that is too large")
    return number
