"""The thread of a node: sockets to the scheduler and to the writer, and the ends of transfers.

`NodeLoop` is the `NodeMeans` of a `PathNode`. `WriterSearch` finds the writer, or becomes it.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from ....errors import KVCascadeError
from ....tiers.cpu.huge_pages import has_huge_pages
from ....tiers.nvme.disk.filesystem import FileSystem
from ....tiers.nvme.path.frames import WireError
from ....tiers.nvme.path.path_messages import FromNode, Removed, Stored, TierFigures, from_writer
from ..path_wire import NodeNote, NodeReady, NodeSetup, to_node
from .path_io import IOThreads
from .path_link import FrameSocket, Waker
from .path_node import PathNode
from .writer_search import Joined, WriterSearch

TICK_S = 0.05


class NodeLoop:
    """Runs one node until the scheduler's socket is closed."""

    def __init__(
        self,
        scheduler: socket.socket,
        setup: NodeSetup,
        arena: memoryview,
        fs: FileSystem,
    ) -> None:
        """`arena` holds the slots, one block each."""
        hello = setup.hello
        roots = [Path(path) for path in hello.paths]
        self._selector = selectors.DefaultSelector()
        self._waker = Waker(self._selector)
        self._posted: deque[Callable[[], None]] = deque()
        self._scheduler = FrameSocket(scheduler, to_node.decode, self._selector, self._ordered)
        self._writer: FrameSocket | None = None
        self._unwanted = () if setup.wants_changes else (Stored, Removed, TierFigures)
        """Types of messages that the scheduler does not get."""
        self._search = WriterSearch(
            fs,
            roots,
            hello.options,
            hello.name,
            setup.trusts_boot,
            lambda joined: self.post(partial(self._has_joined, joined)),
            lambda text: self.post(partial(self._cannot_lead, text)),
            was_here=hello.epoch is not None,
        )
        self._is_closing = False
        try:
            self._io = IOThreads(
                fs,
                roots,
                hello.namespace,
                setup.io_threads,
                arena,
                self.post,
                has_bounce=has_huge_pages() and not setup.is_arena_huge,
            )
        except KVCascadeError:  # a thread that is left would make the lack worse
            self._search.end()
            raise
        self._node = PathNode(hello, self, self._io, time.monotonic, setup.patience_s)

    def run(self, *, waits_for_io: bool = False) -> None:
        """Serve until the scheduler closes its socket; then close a writer of this process.

        With `waits_for_io`, the transfers in flight end before that.
        """
        self._node.start()
        self._io.warm_up()
        self.tell(NodeReady())
        ticked_s = time.monotonic()
        try:
            while not self._scheduler.has_ended:
                self._flush()
                for key, _ in self._selector.select(TICK_S):
                    key.data()
                while self._posted:
                    self._posted.popleft()()
                now_s = time.monotonic()
                if now_s - ticked_s >= TICK_S:
                    ticked_s = now_s
                    self._node.tick()
        finally:
            self.close(waits_for_io)

    def close(self, waits_for_io: bool) -> None:
        """End all threads, and close all files. `run` calls it; a loop that never ran needs it."""
        self._io.close()
        if waits_for_io:
            self._io.wait()
            self._io.release_writes()
            self.hang_up()
        elif self._writer is not None:  # a process keeps its grants until it has ended
            self._writer.flush()
        self._search.end()
        self._is_closing = True
        while self._posted:
            self._posted.popleft()()
        self._search.close()
        self._scheduler.close()
        self._selector.close()

    def post(self, callback: Callable[[], None]) -> None:
        """Have the node's thread call this. Any thread."""
        self._posted.append(callback)
        self._waker.wake()

    # -- the means of the node -----------------------------------------------------------------

    def join(self) -> None:
        """See `NodeMeans`."""
        self._search.begin()

    def send(self, message: FromNode) -> None:
        """See `NodeMeans`."""
        if self._writer is not None:
            self._writer.send(message)

    def hang_up(self) -> None:
        """See `NodeMeans`."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.flush()
            writer.close()

    def tell(self, message: msgspec.Struct) -> None:
        """See `NodeMeans`."""
        if not isinstance(message, self._unwanted):
            self._scheduler.send(message)

    # -- events --------------------------------------------------------------------------------

    def _ordered(self) -> None:
        for message in self._scheduler.receive():
            if isinstance(message, NodeSetup):
                raise WireError("a second setup")
            self._node.order(message)

    def _heard(self) -> None:
        writer = self._writer
        if writer is None:
            return
        for message in writer.receive():
            self._node.received(message)
            if self._writer is not writer:  # the node hung up
                return

    def _flush(self) -> None:
        self._scheduler.flush()
        writer = self._writer
        if writer is not None:
            writer.flush()
            if writer.has_ended:
                writer.unwatch()
                self._node.lost()

    # -- the search for the writer -------------------------------------------------------------

    def _has_joined(self, joined: Joined) -> None:
        if self._is_closing:
            if joined.connection is not None:
                joined.connection.close()
            return
        if joined.connection is None:
            self._node.not_linked(joined.text, is_final=joined.is_final)
            return
        self._writer = FrameSocket(
            joined.connection, from_writer.decode, self._selector, self._heard
        )
        self._node.linked(joined.is_leader)

    def _cannot_lead(self, text: str) -> None:
        self.tell(NodeNote(self._node.state, text))
