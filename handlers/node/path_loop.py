"""The thread of a node: sockets to the scheduler and to the writer, and the ends of transfers.

`NodeLoop` is the `NodeMeans` of a `PathNode`. The search for the writer runs on a thread of its
own, because it opens files. If this node wins the election, its process serves the path
(`WriterService`).
"""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from ...errors import FINAL_ERRORS, ConfigError, KVCascadeError
from ...logs import get_logger
from ...tiers.nvme.disk.filesystem import FileLock, FileSystem
from ...tiers.nvme.path.frames import WireError
from ...tiers.nvme.path.path_lock import PathDoor, try_lead
from ...tiers.nvme.path.path_messages import PROTOCOL, FromNode, Hello, Welcome, from_writer
from ...tiers.nvme.path.writer.path_options import PATH_FOLDER, check_options
from .path_io import IOThreads, NodeIO
from .path_link import FrameSocket, Waker
from .path_node import PathNode
from .path_service import WriterService
from .path_wire import NodeNote, NodeReady, NodeSetup, to_node

TICK_S = 0.05
CONNECT_LIMIT_S = 1.0
"""Longest wait for a writer whose backlog is full."""
WRITER_STOP_LIMIT_S = 4.0
"""Time for the writer of this process to close cleanly at the end."""
RETIRED_PAUSE_S = 5.0
"""Time for which a node whose writer was asked to close does not lead again."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Joined:
    """Result of one search for the writer."""

    connection: socket.socket | None
    is_leader: bool = False
    text: str = ""
    is_final: bool = False


class NodeLoop:
    """Runs one node until the scheduler's socket is closed."""

    def __init__(
        self,
        scheduler: socket.socket,
        setup: NodeSetup,
        arena: memoryview,
        fs: FileSystem,
        *,
        has_bounce: bool,
    ) -> None:
        """`arena` holds the slots, one block each."""
        roots = [Path(path) for path in setup.paths]
        block_bytes = setup.namespace.block_bytes
        self._setup, self._fs, self._roots = setup, fs, roots
        self._selector = selectors.DefaultSelector()
        self._waker = Waker(self._selector, lambda: None)
        self._posted: deque[Callable[[], None]] = deque()
        self._scheduler = FrameSocket(scheduler, to_node.decode, self._selector, self._ordered)
        self._writer: FrameSocket | None = None
        self._service: WriterService | None = None
        self._place: PathDoor | None = None
        """Folder of the tier when it was first found. A mount point without it is another tier."""
        self._may_lead_s = 0.0
        self._cannot_lead: str | None = None
        """Reason why this process cannot be the writer; empty if there is none, None if unknown."""
        self._is_closing = False
        self._joiner = ThreadPoolExecutor(1, "kvcascade-join")
        self._io = NodeIO(
            fs,
            roots,
            setup.namespace,
            is_durable=setup.options.durability == "power",
            transfers=setup.io_threads,
        )
        self._workers = IOThreads(
            self._io, arena, block_bytes, setup.io_threads, self.post, has_bounce=has_bounce
        )
        hello = Hello(
            PROTOCOL,
            setup.name,
            setup.paths,
            setup.namespace,
            setup.options,
            setup.wants_events,
            is_reader=setup.is_reader,
        )
        self._node = PathNode(hello, self, time.monotonic)

    def run(self) -> None:
        """Serve until the scheduler closes its socket; then close a writer of this process."""
        self._node.start()
        self._workers.warm_up()
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
            self._close()

    def post(self, callback: Callable[[], None]) -> None:
        """Have the node's thread call this. Any thread."""
        self._posted.append(callback)
        self._waker.wake()

    # -- the means of the node -----------------------------------------------------------------

    @property
    def workers(self) -> IOThreads:
        """See `NodeMeans`."""
        return self._workers

    def join(self) -> None:
        """See `NodeMeans`."""
        self._joiner.submit(self._join)

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
        self._scheduler.send(message)

    def open_namespace(self, welcome: Welcome) -> str:
        """See `NodeMeans`."""
        return self._io.open(welcome)

    def forget_segments(self, numbers: Sequence[int]) -> None:
        """See `NodeMeans`."""
        self._io.forget_segments(numbers)

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
                self.hang_up()
                self._node.lost()

    # -- the search for the writer -------------------------------------------------------------

    def _join(self) -> None:
        """Find the writer, or become it. Runs on the joiner's thread."""
        try:
            joined = self._find_writer()
        except FINAL_ERRORS as error:
            joined = _Joined(None, text=str(error), is_final=True)
        except KVCascadeError as error:
            joined = _Joined(None, text=str(error))
        except Exception:
            _log.exception("the search for the writer failed in a way it should not")
            joined = _Joined(None, text="the search for the writer of the path failed")
        self.post(partial(self._has_joined, joined))

    def _find_writer(self) -> _Joined:
        service = self._service
        if service is not None and not service.is_alive:
            self._service = None
            if service.was_retired:
                self._may_lead_s = time.monotonic() + RETIRED_PAUSE_S
        elif service is not None:
            return _Joined(service.connect(), is_leader=True)
        root = self._roots[0]
        if self._place is not None and not self._place.is_in_place():
            text = f"{root} was replaced or unmounted; put it back, or restart the engine"
            return _Joined(None, text=text)
        text = self._obstacle()
        may_lead = not text and time.monotonic() >= self._may_lead_s
        lock = try_lead(self._fs, root) if may_lead else None
        if lock is not None:
            return self._lead(lock)
        if text and not self._fs.exists(root / PATH_FOLDER):
            return _Joined(None, text=text)
        if self._place is None:
            self._place = PathDoor(root)
        if not text:
            text = (
                f"nobody answers at {root} though its lock is held; stop the process that holds "
                "it, which may be on another host"
            )
        return _Joined(self._place.connect(CONNECT_LIMIT_S), text=text)

    def _obstacle(self) -> str:
        """Return why this process cannot be the writer with its options; empty if it can.

        A policy of the user's own may be found by the engine's process and not by this one.
        """
        if self._cannot_lead is None:
            self._cannot_lead = ""
            try:
                check_options(self._setup.options)
            except ConfigError as error:
                self._cannot_lead = f"this engine cannot write the path, others can: {error}"
                note = NodeNote(self._node.state, self._cannot_lead)
                self.post(partial(self.tell, note))
        return self._cannot_lead

    def _lead(self, lock: FileLock) -> _Joined:
        """Serve the path from this process."""
        setup = self._setup
        self._service = WriterService(self._fs, self._roots, setup.options, lock, name=setup.name)
        if self._place is None:
            self._place = PathDoor(self._roots[0])
        return _Joined(self._service.connect(), is_leader=True)

    def _has_joined(self, joined: _Joined) -> None:
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

    def _close(self) -> None:
        self._workers.close()
        self.hang_up()
        self._joiner.shutdown(wait=True)
        self._is_closing = True
        while self._posted:
            self._posted.popleft()()
        if self._service is not None:
            self._service.stop(WRITER_STOP_LIMIT_S)
        if self._place is not None:
            self._place.close()
        self._scheduler.close()
        self._selector.close()
