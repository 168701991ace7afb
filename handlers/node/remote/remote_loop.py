"""The thread of a remote tier's node: the socket to the scheduler, and the ends of calls."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from concurrent.futures import Executor

from ....logs import get_logger
from ....threads import started_pool
from ....tiers.remote.base import RemoteEngine
from ....tiers.remote.objects import ObjectFormat
from ....tiers.remote.remote_probe import ServerFinding
from ....tiers.remote.remote_store import RemoteStore, StoreOptions
from ..path.path_link import FrameSocket, Waker
from ..path_wire import NodeReady
from .remote_node import RemoteNode
from .remote_wire import RemoteSetup, to_remote_node

TICK_S = 0.05
STOP_LIMIT_S = 1.0
"""Longest time that a node at its end waits for calls of the server."""
FIRST_QUESTION_S = 5.0
"""Time from the start to the first question whether the server is of use. The engine begins to
serve meanwhile, and its first lookups come before it."""
COMPLAINT_INTERVAL_S = 60.0
"""Shortest time between two lines of the log about failures of the server."""

_log = get_logger(__name__)


class Complaints:
    """Says in the log why a server is of no use: after the start, and when a breaker has opened.

    A server that is of use again when it is asked has failed for a short time. The log says that,
    too. A hint about a server that works is said once, and delays no line about a failure. Public
    methods are for one thread.
    """

    def __init__(
        self,
        look: Callable[[], ServerFinding | None],
        threads: Executor,
        name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`look` asks the server, on one of the threads; it returns what is wrong, or None.

        `name` is that of the server's setting. `clock` returns monotonic seconds.
        """
        self._look = look
        self._name = name
        self._threads = threads
        self._clock = clock
        self._openings = 0
        self._next_s = clock()
        self._is_asking = False
        """True while one of the threads asks the server."""
        self._first_s: float | None = clock() + FIRST_QUESTION_S
        """Time of the first question; None after it."""
        self._hinted = False
        """True once a hint was said."""
        self._is_closed = False

    def note(self, openings: int) -> None:
        """Ask for the reason if a breaker has opened since the last time; `openings` only grows."""
        if self._is_asking:
            return
        now_s = self._clock()
        is_first = self._first_s is not None and now_s >= self._first_s
        if not is_first and (openings == self._openings or now_s < self._next_s):
            return
        has_failed = openings > self._openings
        self._openings, self._first_s, self._is_asking = openings, None, True
        self._threads.submit(self._say, has_failed)

    def close(self) -> None:
        """Say nothing any more: a question under way fails when the engine is closed."""
        self._is_closed = True

    def _say(self, has_failed: bool) -> None:
        try:
            found = self._look()
        except OSError as error:  # of a folder
            text = f"{self._name}: the folder cannot be read ({error}); mount it again."
            found = ServerFinding(text)
        if not self._is_closed:
            self._say_found(found, has_failed)
        self._is_asking = False

    def _say_found(self, found: ServerFinding | None, has_failed: bool) -> None:
        is_hint = found is not None and found.is_hint
        said = found.text if found is not None and not is_hint else None
        if said is None and has_failed:
            said = f"{self._name}: the server failed for a while, and answers again."
        if said is not None:
            _log.warning("%s", said)
            self._next_s = self._clock() + COMPLAINT_INTERVAL_S
        if found is not None and is_hint and not self._hinted:
            self._hinted = True
            _log.warning("%s", found.text)


class RemoteLoop:
    """Runs one node until the scheduler's socket is closed."""

    def __init__(
        self,
        scheduler: socket.socket,
        setup: RemoteSetup,
        engine: RemoteEngine,
        objects: ObjectFormat,
        options: StoreOptions,
        arena: memoryview,
        look: Callable[[], ServerFinding | None],
        name: str,
    ) -> None:
        """`arena` holds the slots, one block each. The scheduler decides what is written.

        `look` asks the server, and returns what is wrong with it, or None. `name` is that of the
        server's setting, for the log. Raises `TierIOError` for want of threads.
        """
        self._selector = selectors.DefaultSelector()
        self._waker = Waker(self._selector)
        self._scheduler = FrameSocket(
            scheduler, to_remote_node.decode, self._selector, self._ordered
        )
        # One thread more than the store needs, so that questions of the log hold up nobody.
        self._threads = started_pool(options.threads + 1, "kvcascade-remote")
        self._complaints = Complaints(look, self._threads, name)
        self._store = RemoteStore(
            engine,
            objects,
            self._threads,
            options,
            on_ended=self._waker.wake,
            was_reset=setup.was_reset,
        )
        self._node = RemoteNode(self._store, arena, setup, self._scheduler.send, time.monotonic)

    def run(self) -> None:
        """Serve until the scheduler closes its socket. Calls of the server may go on after that."""
        self._scheduler.send(NodeReady())
        self._store.read_generation()
        try:
            while not self._scheduler.has_ended:
                self._node.work()
                self._complaints.note(sum(self._store.state().openings.values()))
                self._scheduler.flush()
                for key, _ in self._selector.select(TICK_S):
                    key.data()
        finally:
            self._complaints.close()
            self._store.close(STOP_LIMIT_S)
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._scheduler.close()
            self._selector.close()

    def _ordered(self) -> None:
        for message in self._scheduler.receive():
            self._node.order(message)
