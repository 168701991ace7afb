"""The thread of a remote tier's node: the socket to the scheduler, and the ends of calls."""

from __future__ import annotations

import selectors
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgspec

from ...config.remote import WriteWhen
from ...tiers.remote.base import RemoteEngine
from ...tiers.remote.objects import ObjectFormat
from ...tiers.remote.remote_store import RemoteStore, StoreOptions
from .path_link import FrameSocket, Waker
from .path_wire import NodeReady
from .remote_node import RemoteNode, SlotParts
from .remote_wire import to_remote_node

TICK_S = 0.05
STOP_LIMIT_S = 1.0
"""Longest time that a node at its end waits for calls of the server."""


class RemoteLoop:
    """Runs one node until the scheduler's socket is closed."""

    def __init__(
        self,
        scheduler: socket.socket,
        engine: RemoteEngine,
        objects: ObjectFormat,
        options: StoreOptions,
        arena: memoryview,
        parts: SlotParts,
    ) -> None:
        """`arena` holds the slots, one block each. The scheduler decides what is written."""
        options = replace(options, when=WriteWhen.THROUGH)
        self._selector = selectors.DefaultSelector()
        self._waker = Waker(self._selector, lambda: None)
        self._scheduler = FrameSocket(
            scheduler, to_remote_node.decode, self._selector, self._ordered
        )
        self._threads = ThreadPoolExecutor(options.threads, "kvcascade-remote")
        self._store = RemoteStore(
            engine, objects, self._threads, options, on_ended=self._waker.wake
        )
        self._node = RemoteNode(self._store, arena, parts, self._tell, time.monotonic)

    def run(self) -> None:
        """Serve until the scheduler closes its socket."""
        self._tell(NodeReady())
        self._store.begin()
        try:
            while not self._scheduler.is_broken:
                self._node.work()
                self._scheduler.flush()
                for key, _ in self._selector.select(TICK_S):
                    key.data()
        finally:
            self._store.close(STOP_LIMIT_S)
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._scheduler.close()
            self._selector.close()

    def _tell(self, message: msgspec.Struct) -> None:
        self._scheduler.send(message)

    def _ordered(self) -> None:
        for message in self._scheduler.receive():
            self._node.order(message)
