"""Frames of a stream socket: four bytes of length (little endian) and a MessagePack document.

`MessageStream` sends and receives them without ever blocking the thread that uses it.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, ClassVar
from weakref import WeakSet

import msgspec

MAX_FRAME_BYTES = 64 << 20
"""Longest body that a reader accepts unless it was given another limit."""
RECEIVE_BYTES = 256 << 10
"""Size of the buffer that a reader receives into."""
RECEIVES_PER_CALL = 16
"""Most buffers that one call of `MessageStream.receive` fills."""
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


class WireError(Exception):
    """The other end sent an invalid message."""


DECODE_ERRORS = (WireError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of a message that cannot be understood. msgspec decodes text with Python's own error, and
a list in a thousand lists not at all."""


def frame(message: msgspec.Struct) -> bytes:
    """Encode a message as a frame."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def hang_up(connection: socket.socket) -> None:
    """Shut a socket down: the other end reads what was sent, and then the end of the stream.

    Closing alone does not end the stream while a forked process has a copy of the socket.
    """
    with suppress(OSError):  # the other end is gone, or this one is closed
        connection.shutdown(socket.SHUT_RDWR)


class FrameReader:
    """Splits a byte stream into the bodies of frames."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._limit = max_frame_bytes
        self._buffer = bytearray()
        self._received = memoryview(bytearray(RECEIVE_BYTES))
        """Memory that every call of `receive` uses again: new memory costs page faults."""

    def receive(self, connection: socket.socket) -> memoryview:
        """Return what a socket has now, for `feed`; empty if the other end closed it.

        The memory is valid until the next call. Raises `OSError`, such as `BlockingIOError`.
        """
        return self._received[: connection.recv_into(self._received)]

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        """Yield every body that this data completes. Raises `WireError`."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self._limit:
                raise WireError(f"a frame of {length} bytes")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(memoryview(self._buffer)[_LENGTH.size : end])
            del self._buffer[:end]
            yield body


class MessageStream:
    """Messages over one connection. One thread, or several under one lock.

    A forked process has no copy of the connection. Else the other end would not see the end of the
    parent while that process lives.
    """

    _open: ClassVar[WeakSet[MessageStream]] = WeakSet()

    def __init__(
        self,
        connection: socket.socket,
        decode: Callable[[bytes], Any],
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        """`decode` turns the body of a frame into a message. A longer frame than `max_frame_bytes`
        ends the stream."""
        self.unsent = bytearray()
        """Frames that `flush` sends."""
        self.has_ended = False
        """True once the other end closed the connection or sent nonsense."""
        self.was_interrupted = False
        """True if an interrupt of this process ended it."""
        self.error: Exception | None = None
        """Error of a message that could not be understood."""
        self.received_bytes = 0
        self._socket = connection
        self._decode = decode
        self._reader = FrameReader(max_frame_bytes)
        self._open.add(self)

    @classmethod
    def leave_to_parent(cls) -> None:
        """Close all sockets in a forked process, without ending the connections."""
        for stream in list(cls._open):
            stream.has_ended = True
            stream._socket.close()

    def flush(self) -> None:
        """Send what the socket takes now."""
        unsent = self.unsent
        while unsent and not self.has_ended:
            try:
                del unsent[: self._socket.send(unsent)]
            except BlockingIOError:
                return
            except OSError:
                self.has_ended = True
                return
            except BaseException:  # an interrupt: what was sent would be sent again
                self.has_ended = self.was_interrupted = True
                raise

    def receive(self, *, to_the_end: bool = False) -> Iterator[Any]:
        """Yield the messages that came; then see `has_ended`.

        `to_the_end` looks again after the last message, for the end of the stream.
        """
        for _ in range(RECEIVES_PER_CALL):
            try:
                data = self._reader.receive(self._socket)
            except BlockingIOError:
                return
            except OSError:
                data = memoryview(b"")
            if not data:
                self.has_ended = True
                return
            self.received_bytes += len(data)
            try:
                for body in self._reader.feed(data):
                    yield self._decode(body)
            except DECODE_ERRORS as error:
                self.error, self.has_ended = error, True
                return
            if len(data) < RECEIVE_BYTES and not to_the_end:
                return  # that was all, or the next call finds the end of the stream


os.register_at_fork(after_in_child=MessageStream.leave_to_parent)
