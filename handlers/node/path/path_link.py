"""A stream of messages that is registered in a selector, and a `Waker` for the selector."""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from ....tiers.nvme.path.frames import (
    MAX_FRAME_BYTES,
    RECEIVES_PER_CALL,
    MessageStream,
    frame,
    hang_up,
)

MAX_UNSENT_BYTES = 64 << 20
"""Longest queue of a peer that does not read; beyond it the connection counts as broken."""

Decode = Callable[[bytes], Any]


class Waker:
    """Ends the `select` of another thread.

    The descriptor is closed with the object and not earlier. A thread that calls `wake` late would
    otherwise write into another file that got the same number.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        selector.register(self._fd, selectors.EVENT_READ, self._drain)

    def wake(self) -> None:
        """Wake the thread of the selector. Any thread, even after the selector was closed."""
        with suppress(BlockingIOError):  # enough wakes are waiting
            os.eventfd_write(self._fd, 1)

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def __del__(self) -> None:
        with suppress(AttributeError):  # no descriptor was left for it
            os.close(self._fd)


class FrameSocket(MessageStream):
    """One connection, registered in a selector. One thread."""

    def __init__(
        self,
        connection: socket.socket,
        decode: Decode,
        selector: selectors.BaseSelector,
        on_ready: Callable[[], None],
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        """`decode` turns the body of a frame into a message. `on_ready` is the selector's data.

        A longer frame than `max_frame_bytes` breaks the connection.
        """
        connection.setblocking(False)
        super().__init__(connection, decode, max_frame_bytes)
        self._selector = selector
        self._events = selectors.EVENT_READ
        self._on_ready = on_ready
        selector.register(connection, self._events, on_ready)

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message; `flush` sends it."""
        if not self.has_ended:
            self.unsent += frame(message)
            if len(self.unsent) > MAX_UNSENT_BYTES:
                self.has_ended = True
                self.unsent.clear()

    def flush(self) -> None:
        """Send what the socket takes now; the selector reports when it takes more."""
        super().flush()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.unsent else 0)
        if events != self._events and not self.has_ended:
            self._events = events
            self._selector.modify(self._socket, events, self._on_ready)

    def unwatch(self) -> None:
        """Leave the selector; idempotent. The connection stays open until `close`."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(self._socket)

    def end_sending(self) -> None:
        """Give the connection up, but keep it open: see `has_hung_up`.

        The other end reads what the socket holds, and then the end of the stream. What it still
        sends wakes the loop, which drops it.
        """
        self.has_ended = True
        self._selector.modify(self._socket, selectors.EVENT_READ, lambda: None)
        with suppress(OSError):  # the other end is gone
            self._socket.shutdown(socket.SHUT_WR)

    def has_hung_up(self) -> bool:
        """Drop what came since the link ended. Return True if the other end has closed it."""
        with suppress(OSError):  # it is open, or that cannot be found out now
            for _ in range(RECEIVES_PER_CALL):
                try:
                    if not self._reader.receive(self._socket):
                        return True
                except ConnectionError:
                    return True
        return False

    def close(self) -> None:
        """Close the connection; idempotent."""
        self.has_ended = True
        self.unwatch()
        hang_up(self._socket)
        self._socket.close()
