"""Frames of a stream socket: four bytes of length (little endian) and a MessagePack document."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import msgspec

MAX_FRAME_BYTES = 64 << 20
"""Longest body that a reader accepts unless it was given another limit."""
RECEIVE_BYTES = 256 << 10
"""Size of the buffer that a reader receives into."""
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


class WireError(Exception):
    """The other end sent an invalid message."""


DECODE_ERRORS = (WireError, msgspec.MsgspecError, UnicodeDecodeError)
"""Errors of a message that cannot be understood. msgspec decodes text with Python's own error."""


def frame(message: msgspec.Struct) -> bytes:
    """Encode a message as a frame."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


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
