"""The scheduler process's side of a node: send jobs, receive answers, restart after a crash.

Only `start`, `wait` and `close` wait for the node, each for a limited time. A job ends when its
answer has arrived, or when `waitpid` has confirmed that the process is dead. Until then the job may
still write to its slots, so they stay reserved. A dead node is restarted, a few times a minute at
most. A node that has work and stays silent for too long is killed.

Threads: any thread may call any method. All processes are started on the single thread of an
executor, because a node dies with the thread that started it.
"""

from __future__ import annotations

import math
import select
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import count
from time import monotonic
from typing import Any

import msgspec

from ...errors import KVCascadeError, TierIOError
from ...logs import get_logger
from ...tiers.nvme.path.frames import DECODE_ERRORS, RECEIVE_BYTES, FrameReader, WireError, frame
from .node_child import Connection
from .path_wire import from_node_process

START_LIMIT_S = 30.0
"""Time limit for the first start. Starting takes long on a busy machine."""
MINUTE_S = 60.0
STARTS_PER_MINUTE = 3
STARTS_AT_MOST = 200
"""Limit of the starts in the life of one tier. Each start takes a range of generations."""
MAX_PAUSE_S = 1800.0
"""Longest pause between two starts. After `STARTS_PER_MINUTE` starts without a ready node, the
pause doubles with each further one."""
MAX_DOUBLINGS = 11
"""Limit of the doublings, after which the pause is `MAX_PAUSE_S` in any case."""
SILENCE_LIMIT_S = 60.0
"""Longest silence of a node that has work or is not ready yet. Then it or its disk is stuck, and
the node is killed."""
LISTEN_INTERVAL_S = 0.02
"""Shortest time between two polls by `listen`. Each poll releases the interpreter lock briefly,
which restarts the wait of a copying thread for the lock."""
JOBS_AT_MOST = 64
BATCH_BYTES = 64 << 10
"""Size of a batch of messages from which on it is sent without waiting for `flush`."""
CLOSE_LIMIT_S = 5.0
"""Time limit for a node to exit by itself after its socket was closed."""
KILL_LIMIT_S = 1.0
"""Time limit for a killed node to exit. Only a stuck disk makes it take longer."""
RECEIVES_PER_POLL = 16
WAIT_SLICE_S = 0.05
"""Time between two checks of a waiting thread: another thread may receive the answer."""

OnEnd = Callable[[Any], None]
"""Callback with the answer to a job, or None if its process died."""
OnNote = Callable[[Any], None]
"""Callback with a message that answers no job, or None if the process died."""
Order = Callable[[int], msgspec.Struct]
"""Builds the message of a job from its ticket."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class KeeperOptions:
    """Limits of a node, and its clock."""

    clock: Callable[[], float] = monotonic
    """Monotonic seconds."""
    silence_limit_s: float = SILENCE_LIMIT_S
    starts_per_minute: int = STARTS_PER_MINUTE
    decode: Callable[[bytes], Any] = from_node_process.decode
    """Decoder of the process's messages. An answer to a job has a `ticket`."""
    remedy: str = '"movers": "threads" does without it'
    """Clause of the message about a process that did not start."""
    on_note: OnNote | None = None
    """Called with the other messages; by any thread that calls a method of `NodeKeeper`."""
    is_batched: bool = False
    """True if jobs and notes are kept until `flush`, `poll` or `wait`, to be sent together."""


class NodeKeeper:
    """Keeper of one process of a node: it starts the process, and again when it dies."""

    def __init__(
        self,
        launch: Callable[[], Connection],
        keeper: Executor,
        options: KeeperOptions | None = None,
    ) -> None:
        """`launch` starts a process. It is called on `keeper`, an executor with one thread."""
        self._launch = launch
        self._keeper = keeper
        self._options = options or KeeperOptions()
        self._clock = self._options.clock
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._connection: Connection | None = None
        self._reader = FrameReader()
        self._is_ready = False
        self._is_starting = False
        self._is_closed = False
        self._has_hung_up = False
        self._has_said_given_up = False
        self._fruitless = 0
        """Number of starts since a node was last ready."""
        self._tickets = count(1)
        self._jobs: dict[int, OnEnd] = {}
        self._unsent = bytearray()
        self._starts_s: deque[float] = deque(maxlen=self._options.starts_per_minute)
        self._heard_s = 0.0
        self._polled_s = -math.inf
        self.starts = 0
        """Number of processes that were started."""

    @property
    def pid(self) -> int | None:
        """Process number of the node, or None while there is no process."""
        with self._lock:
            return None if self._connection is None else self._connection.child.pid

    @property
    def is_up(self) -> bool:
        """True if a job can be sent."""
        with self._lock:
            return self._can_send

    @property
    def _can_send(self) -> bool:
        return self._is_ready and not self._has_hung_up and not self._is_closed

    @property
    def _has_given_up(self) -> bool:
        with self._lock:
            return self._connection is None and not self._is_starting

    def start(self) -> None:
        """Start the process and wait until it is ready. Raises `TierIOError`."""
        self._start_if_allowed()
        self.wait(lambda: self.is_up or self._has_given_up, START_LIMIT_S)
        if not self.is_up:
            raise TierIOError(
                None,
                "the process that moves blocks did not start; its own message says why, and "
                + self._options.remedy,
            )

    def submit(self, order: Order, on_end: OnEnd) -> bool:
        """Send a job; see `KeeperOptions.is_batched`. Return False if it cannot be taken now.

        The methods that receive messages call `on_end`.
        """
        with self._lock:
            if not self._can_send:
                self.poll()  # without jobs no other call receives `Ready`
            if not self._can_send or len(self._jobs) >= JOBS_AT_MOST:
                return False
            ticket = next(self._tickets)
            if not self._jobs:
                self._heard_s = self._clock()
            self._jobs[ticket] = on_end
            self._enqueue(order(ticket))
            return True

    def tell(self, message: msgspec.Struct) -> None:
        """Send a message that has no answer; it is lost if the process is not up."""
        with self._lock:
            if self._can_send:
                self._enqueue(message)

    def flush(self) -> None:
        """Send what the socket takes now; never blocks."""
        if self._unsent:
            with self._lock:
                if self._connection is not None:
                    self._send()

    def poll(self) -> None:
        """Receive messages, and restart a dead node. Takes microseconds and never blocks."""
        with self._lock:
            now_s = self._polled_s = self._clock()
            if self._connection is None:
                self._start_if_allowed()
                return
            self._send()
            self._receive(now_s)
            if not self._has_hung_up and self._is_silent(now_s):
                _log.warning("the process that moves blocks says nothing any more; it is killed")
                self._has_hung_up = True
            if self._has_hung_up:
                self._bury()

    def listen(self) -> None:
        """Poll for maintenance, unless the last poll was within `LISTEN_INTERVAL_S`."""
        if self._clock() - self._polled_s >= LISTEN_INTERVAL_S:
            self.poll()

    def wait(self, is_done: Callable[[], bool], limit_s: float) -> bool:
        """Poll until the condition holds or the time is over. Return True if the condition holds.

        The limit is in real time, not in that of the options' clock: a process does the work.
        """
        end_s = monotonic() + limit_s
        while True:
            self.poll()
            if is_done():
                return True
            left_s = end_s - monotonic()
            if left_s <= 0:
                return False
            self._wait_for_news(min(left_s, WAIT_SLICE_S))

    def kill(self, limit_s: float = KILL_LIMIT_S) -> bool:
        """Kill the process. Return True if no job is left; jobs in flight have failed then."""
        with self._lock:
            self._is_closed = True
            connection = self._connection
        if connection is not None:
            connection.kill()
            connection.has_ended_within(limit_s)
            self.poll()
        with self._lock:
            return not self._jobs

    def close(self) -> bool:
        """End the process, by force if necessary. Return True if it is dead. Idempotent."""
        with self._lock:
            self._is_closed = True
            connection, is_ready = self._connection, self._is_ready
            if connection is not None:
                connection.socket.close()
                self._has_hung_up = True
        if connection is not None:
            # A node that is not ready holds no data, and would go on importing for seconds.
            if not is_ready or not connection.has_ended_within(CLOSE_LIMIT_S):
                connection.kill()
                connection.has_ended_within(KILL_LIMIT_S)
            self.poll()
        self._keeper.shutdown(wait=False)  # last: a node dies with that thread
        return connection is None or connection.has_died()

    # -- inside --------------------------------------------------------------------------------

    def _wait_for_news(self, limit_s: float) -> None:
        with self._changed:
            connection = self._connection
            if connection is None or self._has_hung_up:
                self._changed.wait(limit_s)
                return
            poller = select.poll()
            poller.register(connection.socket, select.POLLIN)
        poller.poll(limit_s * 1000)

    def _enqueue(self, message: msgspec.Struct) -> None:
        self._unsent += frame(message)
        if not self._options.is_batched or len(self._unsent) >= BATCH_BYTES:
            self._send()

    def _send(self) -> None:
        connection, unsent = self._connection, self._unsent
        assert connection is not None
        while unsent and not self._has_hung_up:
            try:
                sent = connection.socket.send(unsent)
            except BlockingIOError:
                return
            except OSError:
                self._has_hung_up = True
                return
            del unsent[:sent]

    def _receive(self, now_s: float) -> None:
        connection = self._connection
        assert connection is not None
        for _ in range(RECEIVES_PER_POLL):
            try:
                data = self._reader.receive(connection.socket)
            except BlockingIOError:
                return
            except OSError:
                data = memoryview(b"")
            if not data:
                self._has_hung_up = True
                return
            self._heard_s = now_s
            try:
                for body in self._reader.feed(data):
                    self._take(self._options.decode(body))
            except DECODE_ERRORS as error:
                _log.error("the process that moves blocks cannot be understood: %s", error)
                self._has_hung_up = True
                return
            if len(data) < RECEIVE_BYTES and not self._is_closed:
                return  # that was all, or the next poll finds the end of the stream

    def _take(self, message: Any) -> None:
        ticket = getattr(message, "ticket", None)
        if ticket is None:
            self._take_note(message)
            return
        on_end = self._jobs.get(ticket)
        if on_end is None:
            raise WireError(f"an answer to nothing ({ticket})")
        on_end(message)
        del self._jobs[ticket]

    def _take_note(self, message: Any) -> None:
        """The first message without a ticket says that the process is ready."""
        if self._options.on_note is not None:
            self._options.on_note(message)
        if not self._is_ready:
            self._is_ready = True
            self._fruitless = 0

    def _is_silent(self, now_s: float) -> bool:
        if self._is_ready and not self._jobs:
            return False
        limit_s = self._options.silence_limit_s if self._is_ready else SILENCE_LIMIT_S
        return now_s - self._heard_s > limit_s

    def _bury(self) -> None:
        """Kill the process of a closed connection. Once it is dead, fail its jobs and restart."""
        connection = self._connection
        assert connection is not None
        if not connection.has_died():
            connection.kill()
            if not connection.has_died():
                return
        connection.socket.close()
        self._connection = None
        self._is_ready = False
        self._unsent.clear()
        lost, self._jobs = self._jobs, {}
        if not self._is_closed:
            _log.warning(
                "the process that moves blocks ended (status %s) with %d jobs under way; "
                "their blocks count as not moved",
                connection.child.poll(),
                len(lost),
            )
        for on_end in lost.values():
            on_end(None)
        if self._options.on_note is not None:
            self._options.on_note(None)
        self._changed.notify_all()
        self._start_if_allowed()

    def _start_if_allowed(self) -> None:
        with self._lock:
            if self._is_closed or self._is_starting or self._connection is not None:
                return
            now_s = self._clock()
            is_often = len(self._starts_s) == self._starts_s.maxlen
            if self.starts >= STARTS_AT_MOST:
                self._say_given_up()
                return
            if is_often and now_s - self._starts_s[0] < MINUTE_S:
                return
            if self._starts_s and now_s - self._starts_s[-1] < self._pause_s:
                return
            self._starts_s.append(now_s)
            self._fruitless += 1
            self.starts += 1
            self._is_starting = True
            try:
                self._keeper.submit(self._start)
            except RuntimeError:  # shutting down
                self._is_starting = False

    @property
    def _pause_s(self) -> float:
        """Shortest time from the last start to the next one."""
        too_many = self._fruitless - self._options.starts_per_minute
        return min(MAX_PAUSE_S, 2.0 ** min(too_many, MAX_DOUBLINGS)) if too_many > 0 else 0.0

    def _say_given_up(self) -> None:
        if not self._has_said_given_up:
            self._has_said_given_up = True
            _log.error(
                "the process that moves blocks ended %d times and is not started again: its "
                "tier does nothing until the engine is started anew",
                self.starts,
            )

    def _start(self) -> None:
        """Start a process. Runs on the keeper's thread."""
        connection: Connection | None = None
        try:
            connection = self._launch()
        except KVCascadeError as error:
            _log.error("%s", error)
        except Exception:
            _log.exception("the process that moves blocks could not be started")
        with self._changed:
            self._is_starting = False
            self._reader = FrameReader()
            self._has_hung_up = False
            self._heard_s = self._clock()
            if connection is not None and self._is_closed:
                connection.kill()
                connection.socket.close()
                connection.has_ended_within(KILL_LIMIT_S)
            else:
                self._connection = connection
            self._changed.notify_all()
