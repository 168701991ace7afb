"""The writer of a path on a thread of its own: sockets around a `PathWriter`.

Every node of the path is a client, the node of the same process too. The service ends when it is
stopped, when a newer version asks for that, or when it fails. It also ends when the lock or the
folder of the path is no longer in place. Its lock is released at the end, and the clients see their
sockets closed.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

from ...errors import KVCascadeError
from ...logs import get_logger
from ...tiers.nvme.disk.filesystem import FileLock, FileSystem
from ...tiers.nvme.path.lmdb_block_table import open_block_table
from ...tiers.nvme.path.path_lock import PathDoor
from ...tiers.nvme.path.path_messages import MAX_FRAME_BYTES, PathOptions, from_node
from ...tiers.nvme.path.presence_file import boot_id
from ...tiers.nvme.path.writer.namespace_start import StartMeans
from ...tiers.nvme.path.writer.path_writer import PathWriter
from ...tiers.nvme.path.writer_note import note_of_this_process, save_note
from .path_link import FrameSocket, Waker

PLACE_CHECK_INTERVAL_S = 1.0
"""Time between two checks that the lock and the folder of the path are still in place."""
IO_THREADS = 3
"""Threads that create and delete segment files, and open namespaces, which takes one at most."""

_log = get_logger(__name__)


class WriterService:
    """Writer of one path, until `stop`."""

    def __init__(
        self,
        fs: FileSystem,
        roots: Sequence[Path],
        options: PathOptions | None,
        lock: FileLock,
        clock: Callable[[], float] = time.monotonic,
        *,
        name: str = "kvcascade",
    ) -> None:
        """Begin to serve; `lock` makes this process the writer. Raises a `KVCascadeError`.

        `name` is recorded for tools. Without options, those that are recorded stay in force.

        The lock belongs to the service from now on, and is released if this fails.
        """
        self._lock = lock
        try:
            self._door = PathDoor(roots[0])
        except BaseException:
            lock.release()
            raise
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._executor = ThreadPoolExecutor(IO_THREADS, "kvcascade-segments")
        self._numbers = count(1)
        self._clients: dict[int, FrameSocket] = {}
        self._checked_s = clock()
        self._waker = Waker(self._selector, self._woken)
        self._listener: socket.socket | None = None
        self._deaf: socket.socket | None = None
        """The listener while this process has too many open files."""
        self._new: list[socket.socket] = []
        self._is_stopping = False
        self._is_clean = True
        self.was_retired = False
        """True if a newer version asked this writer to close."""
        try:
            save_note(fs, roots[0], note_of_this_process(name))
            self._listener = self._door.listen()
            means = StartMeans(fs, time.time, open_block_table, boot_id())
            self._writer = PathWriter(means, roots, options, clock, self._executor)
        except BaseException:
            self._release()
            raise
        self._listen(self._listener)
        self._thread = threading.Thread(target=self._run, name="kvcascade-writer", daemon=True)
        self._thread.start()

    def connect(self) -> socket.socket:
        """Return a connection for the node of this process. Any thread."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._new.append(theirs)
        self._waker.wake()
        return ours

    def stop(self, limit_s: float, *, is_clean: bool = True) -> bool:
        """Close the writer; return True if it has ended. Any thread but its own.

        Without `is_clean` everything is left as a kill would leave it.
        """
        self._is_clean = self._is_clean and is_clean
        self._is_stopping = True
        self._waker.wake()
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        """True while it serves."""
        return self._thread.is_alive()

    # -- on its own thread ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._serve_once()
        except Exception:
            _log.exception("the writer of the path failed in a way it should not")
            self._is_clean = False
        finally:
            self._end()

    def _serve_once(self) -> None:
        for key, _ in self._selector.select(self._writer.wait_s):
            key.data()
        for client, message in self._writer.step():
            link = self._clients.get(client)
            if link is not None:
                link.send(message)
        for client, link in list(self._clients.items()):
            link.flush()
            if link.has_ended:
                self._drop(client)
        self._check_place()
        if self._writer.wants_close:
            self.was_retired = self._is_stopping = True

    def _listen(self, listener: socket.socket) -> None:
        accept = partial(self._accept, listener)
        self._selector.register(listener, selectors.EVENT_READ, accept)
        self._deaf = None

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # who came is gone again
        except OSError as error:  # too many open files: who waits is accepted later
            _log.warning("the writer of the path takes no engine for now: %s", error)
            self._selector.unregister(listener)
            self._deaf = listener
            return
        self._add(connection)

    def _woken(self) -> None:
        while self._new:
            self._add(self._new.pop(0))

    def _add(self, connection: socket.socket) -> None:
        client = next(self._numbers)
        ready = partial(self._receive, client)
        self._clients[client] = FrameSocket(
            connection, from_node.decode, self._selector, ready, MAX_FRAME_BYTES
        )
        self._writer.connect(client)

    def _receive(self, client: int) -> None:
        link = self._clients.get(client)
        if link is not None:
            for message in link.receive():
                self._writer.receive(client, message)

    def _drop(self, client: int) -> None:
        self._clients.pop(client).close()
        self._writer.disconnect(client)

    def _check_place(self) -> None:
        now_s = self._clock()
        if now_s - self._checked_s < PLACE_CHECK_INTERVAL_S:
            return
        self._checked_s = now_s
        if self._deaf is not None:
            self._listen(self._deaf)
        if not (self._lock.is_in_place() and self._door.is_in_place()):
            _log.error("the folder of the tier was replaced or unmounted; nothing is written")
            self._is_stopping, self._is_clean = True, False

    def _end(self) -> None:
        try:
            for client, message in self._writer.close(is_clean=self._is_clean):
                if client in self._clients:
                    self._clients[client].send(message)
                    self._clients[client].flush()
        except KVCascadeError as error:
            _log.error("the writer of the path did not close cleanly: %s", error)
        except Exception:
            _log.exception("the writer of the path failed at its end in a way it should not")
        self._release()
        for link in self._clients.values():  # last: a client that sees it may lead at once
            link.close()
        for connection in self._new:
            connection.close()
        self._selector.close()

    def _release(self) -> None:
        """Give up socket and lock, in this order: a socket without a lock is nobody's."""
        if self._listener is not None:
            with suppress(KeyError):
                self._selector.unregister(self._listener)
            self._listener.close()
        self._executor.shutdown(wait=True)
        self._door.close()
        self._lock.release()
