"""Messages to and from one process of a node. Used under the lock of its `NodeKeeper`."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ...logs import get_logger
from ...tiers.nvme.path.frames import DECODE_ERRORS, RECEIVE_BYTES, FrameReader, frame

RECEIVES_PER_POLL = 16

_log = get_logger(__name__)


class NodeStream:
    """The stream of one connection. It never blocks."""

    def __init__(
        self,
        connection: socket.socket,
        decode: Callable[[bytes], Any],
        now_s: float,
        batch_bytes: int,
    ) -> None:
        """Messages of up to `batch_bytes` together are kept until `send`."""
        self._batch_bytes = batch_bytes
        self._socket = connection
        self._decode = decode
        self._reader = FrameReader()
        self.unsent = bytearray()
        self.heard_s = now_s
        """Time of the last message, or since when a message is expected."""
        self.has_ended = False
        """True once nothing more can be sent or received."""
        self.is_ready = False
        """True once the process takes jobs."""

    def add(self, message: msgspec.Struct) -> None:
        """Keep a message for `send`, or send it with all that are kept."""
        self.unsent += frame(message)
        if len(self.unsent) >= self._batch_bytes:
            self.send()

    def send(self) -> None:
        """Send what the socket takes now."""
        unsent = self.unsent
        while unsent and not self.has_ended:
            try:
                sent = self._socket.send(unsent)
            except BlockingIOError:
                return
            except OSError:
                self.has_ended = True
                return
            del unsent[:sent]

    def receive(self, now_s: float, *, to_the_end: bool) -> Iterator[Any]:
        """Yield the messages that came. One that cannot be understood ends the stream.

        `to_the_end` looks again after the last message, for the end of the stream.
        """
        for _ in range(RECEIVES_PER_POLL):
            try:
                data = self._reader.receive(self._socket)
            except BlockingIOError:
                return
            except OSError:
                data = memoryview(b"")
            if not data:
                self.has_ended = True
                return
            self.heard_s = now_s
            try:
                for body in self._reader.feed(data):
                    yield self._decode(body)
            except DECODE_ERRORS as error:
                _log.error("the process that moves blocks cannot be understood: %s", error)
                self.has_ended = True
                return
            if len(data) < RECEIVE_BYTES and not to_the_end:
                return  # that was all, or the next call finds the end of the stream

    def close(self) -> None:
        """Close the socket; the node ends by itself."""
        self._socket.close()
        self.has_ended = True
