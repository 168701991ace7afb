"""Messages to and from one process of a node. Used under the lock of its `NodeKeeper`."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import msgspec

from ...tiers.nvme.path.frames import MessageStream, frame


class NodeStream(MessageStream):
    """The stream of one connection."""

    def __init__(
        self,
        connection: socket.socket,
        decode: Callable[[bytes], Any],
        now_s: float,
        batch_bytes: int,
    ) -> None:
        """Messages of up to `batch_bytes` together are kept until `flush`."""
        super().__init__(connection, decode)
        self._batch_bytes = batch_bytes
        self.heard_s = now_s
        """Time of the last message, or since when a message is expected."""
        self.is_ready = False
        """True once the process takes jobs."""

    def add(self, message: msgspec.Struct) -> None:
        """Keep a message for `flush`, or send it with all that are kept."""
        self.unsent += frame(message)
        if len(self.unsent) >= self._batch_bytes:
            self.flush()

    def close(self) -> None:
        """Close the socket; the node ends by itself."""
        self._socket.close()
        self.has_ended = True
