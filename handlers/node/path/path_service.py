"""The writer of a path on a thread of its own: sockets around a `PathWriter`.

Every node of the path is a client, the node of the same process too. The service ends when it is
stopped, when another process asks for that, or when it fails. It also ends when the lock or the
folder of the path is no longer in place. Its lock is released at the end, and the clients see their
sockets closed.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path

from ....errors import InUseError, KVCascadeError, os_errors
from ....logs import get_logger
from ....threads import start_thread, started_pool
from ....tiers.nvme.disk.filesystem import FileLock, FileSystem
from ....tiers.nvme.path.frames import hang_up
from ....tiers.nvme.path.lmdb_block_table import open_block_table
from ....tiers.nvme.path.path_lock import PathDoor
from ....tiers.nvme.path.path_messages import MAX_FRAME_BYTES, PathOptions, from_node
from ....tiers.nvme.path.presence_file import boot_id
from ....tiers.nvme.path.writer.namespace.namespace_start import StartMeans
from ....tiers.nvme.path.writer.namespace.waiting_grants import Reply
from ....tiers.nvme.path.writer.path_writer import PathWriter
from ....tiers.nvme.path.writer_note import note_of_this_process, save_note
from .path_link import FrameSocket, Waker

PLACE_CHECK_INTERVAL_S = 1.0
"""Time between two checks that the namespaces of the path are still in place."""
IO_THREADS = 3
"""Threads that create and delete segment files, and open namespaces, which takes one at most."""

_log = get_logger(__name__)


class ClientSockets:
    """Connections of the nodes of a path to its writer, by number. The writer's thread."""

    def __init__(self, listener: socket.socket, writer: PathWriter) -> None:
        """`writer` learns of each client, and gets its messages."""
        self._listener = listener
        self._writer = writer
        self._selector = selectors.DefaultSelector()
        self._waker = Waker(self._selector)
        self._numbers = count(1)
        self._links: dict[int, FrameSocket] = {}
        self._ended: dict[int, FrameSocket] = {}
        """Links that failed while their clients may write to their slots."""
        self._is_deaf = True
        """True while nobody is accepted, because this process has too many open files."""
        self.listen()

    def wake(self) -> None:
        """End the `wait`. Any thread."""
        self._waker.wake()

    def listen(self) -> None:
        """Accept connections, also after too many files were open."""
        if self._is_deaf:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._is_deaf = False

    def wait(self, limit_s: float | None) -> list[Callable[[], None]]:
        """Wait for connections and messages. Return the calls that hand them to the writer."""
        return [key.data for key, _ in self._selector.select(limit_s)]

    def send(self, replies: Iterable[Reply]) -> None:
        """Queue messages of the writer; those to clients that are gone are dropped."""
        for client, message in replies:
            link = self._links.get(client)
            if link is not None:
                link.send(message)

    def flush(self) -> None:
        """Send what is queued, as far as the sockets take it."""
        for link in self._links.values():
            link.flush()

    def drop_ended(self) -> None:
        """Drop the clients that are gone, and those that the writer has dropped.

        A client that does not read, or that sends nonsense, may write to its slots still. Only its
        end of the connection proves that it does not: it hangs up without running writes.
        """
        served = {client.number: client.namespace for client in self._writer.clients}
        for client, link in [*self._links.items(), *self._ended.items()]:
            if client in served and not link.has_ended:
                continue
            if served.get(client) is None or link.has_hung_up():
                self._links.pop(client, None)
                self._ended.pop(client, None)
                link.close()
                self._writer.disconnect(client)
            elif client in self._links:
                self._ended[client] = self._links.pop(client)
                link.end_sending()
                self._writer.cut_off(client)

    def close(self) -> None:
        """Close all connections, but not the listener."""
        for link in [*self._links.values(), *self._ended.values()]:
            link.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # who came is gone again
        except OSError as error:  # too many open files: who waits is accepted later
            _log.warning("the writer of the path takes no engine for now: %s", error)
            self._selector.unregister(self._listener)
            self._is_deaf = True
            return
        client = next(self._numbers)
        ready = partial(self._receive, client)
        self._links[client] = FrameSocket(
            connection, from_node.decode, self._selector, ready, MAX_FRAME_BYTES
        )
        self._writer.connect(client)

    def _receive(self, client: int) -> None:
        link = self._links.get(client)
        if link is not None:
            # The end of a node counts before the `Hello` of the one that takes its place.
            for message in link.receive(to_the_end=True):
                self._writer.receive(client, message)


class WriterService:
    """Writer of one path, until `stop`."""

    def __init__(
        self,
        fs: FileSystem,
        roots: Sequence[Path],
        options: PathOptions | None,
        lock: FileLock,
        *,
        name: str = "kvcascade",
        trusts_boot: bool = True,
    ) -> None:
        """Begin to serve; `lock` makes this process the writer. Raises a `KVCascadeError`.

        `name` is recorded for tools. Without options, those that are recorded stay in force.
        Without `trusts_boot`, an index is checked although a writer of this boot opened it before.

        The lock belongs to the service from now on, and is released if this fails.
        """
        self._lock = lock
        self._checked_s = time.monotonic()
        self._is_stopping = False
        self._is_clean = True
        """False if everything is to be left as a kill would leave it."""
        self.was_retired = False
        """True if a newer version, or a tool, asked this writer to close."""
        self._held = held = ExitStack()  # in reverse: a socket without a lock is nobody's
        with ExitStack() as if_failed:
            if_failed.callback(held.close)
            held.callback(lock.release)
            self._door = PathDoor(roots[0])
            held.callback(self._door.close)
            executor = started_pool(IO_THREADS, "kvcascade-segments")
            held.callback(executor.shutdown)
            save_note(fs, roots[0], note_of_this_process(name))
            listener = self._door.listen()
            held.callback(listener.close)
            held.callback(hang_up, listener)  # a forked process may have a copy
            boot = boot_id() if trusts_boot else b""
            means = StartMeans(fs, time.time, open_block_table, boot)
            self._writer = PathWriter(means, roots, options, time.monotonic, executor)
            if_failed.callback(self._writer.close, is_clean=False)
            with os_errors("beginning to serve a path"):
                self._clients = ClientSockets(listener, self._writer)
                if_failed.callback(self._clients.close)
                self._thread = start_thread(self._run, "kvcascade-writer")
            if_failed.pop_all()

    def connect(self) -> socket.socket:
        """Return a connection for the node of this process. Any thread.

        Raises `InUseError` once the writer has ended, or while too many others wait.
        """
        link = self._door.connect()
        if link is None:
            raise InUseError("the writer of this process takes no connection now; try again")
        return link

    def stop(self, limit_s: float) -> bool:
        """Close the writer; return True if it has ended. Any thread but its own."""
        self._is_stopping = True
        self._clients.wake()
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
        arrived = self._clients.wait(self._writer.wait_s)
        if not self._is_in_place:  # another process may have become the writer during a pause
            self._is_stopping = True
            return
        now_s = time.monotonic()
        if now_s - self._checked_s >= PLACE_CHECK_INTERVAL_S:
            self._checked_s = now_s
            self._clients.listen()
            self._writer.forget_gone()
        for receive in arrived:
            receive()
        self._clients.send(self._writer.step())
        self._clients.flush()
        self._clients.drop_ended()
        if self._writer.wants_close:
            self.was_retired = self._is_stopping = True

    @property
    def _is_in_place(self) -> bool:
        """True while no other process can be the writer of the path."""
        return self._lock.is_in_place() and self._door.is_in_place()

    def _end(self) -> None:
        if not self._is_in_place:
            _log.error("the folder of the tier was replaced or unmounted; nothing is written")
            self._is_clean = False
        try:
            self._clients.send(self._writer.close(is_clean=self._is_clean))
            self._clients.flush()
        except KVCascadeError as error:
            _log.error("the writer of the path did not close cleanly: %s", error)
        except Exception:
            _log.exception("the writer of the path failed at its end in a way it should not")
        self._held.close()
        self._clients.close()  # last: a client that sees it may lead at once
