"""A mover as the scheduler's process sees it: jobs go in, answers come out, and it may die.

Guarantees: nothing here waits for the mover but `start`, `wait` and `close`, each for a limited
time. A job is over when its answer came or when the process is gone for certain (it was waited
for), never before: what a job may still write stays out of use. A mover that died is started again,
a few times a minute at most; one that says nothing for too long with work to do is killed.

Threads: every method may be called from any thread. Processes are started on the one thread of an
executor, since a mover dies with the thread that started it.
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

import msgspec

from ...errors import KVCascadeError, TierIOError
from ...logs import get_logger
from .mover_child import Connection
from .mover_wire import Answer, FrameReader, Ready, WireError, frame, from_mover

START_LIMIT_S = 30.0
"""For the first start; a busy machine takes its time."""
MINUTE_S = 60.0
STARTS_PER_MINUTE = 3
STARTS_AT_MOST = 200
"""In the life of one tier: each takes its own range of generations."""
MAX_PAUSE_S = 1800.0
"""Between two starts; the pause doubles with each start after which no mover became ready, once
there were as many of them as may be in a minute."""
MAX_DOUBLINGS = 11
"""From then on the pause is the longest one in any case."""
SILENCE_LIMIT_S = 60.0
"""With work to do, or before it is ready; then the mover is killed: it or its disk stands still."""
LISTEN_INTERVAL_S = 0.02
"""Between two looks of upkeep. Each gives the interpreter lock up for a moment, and a thread that
waits for it, to copy, begins to wait anew."""
JOBS_AT_MOST = 64
CLOSE_LIMIT_S = 5.0
"""For a mover to end by itself once it was told to."""
KILL_LIMIT_S = 1.0
"""For a killed one; longer only if its disk holds it."""
RECEIVE_BYTES = 256 << 10
RECEIVES_PER_POLL = 16
WAIT_SLICE_S = 0.05
"""Another thread may take in the answer that one waits for."""

OnEnd = Callable[[Answer | None], None]
"""Told what became of a job; None: its process died."""
Order = Callable[[int], msgspec.Struct]
"""Makes a job's message, given its ticket."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class MoverOptions:
    """Limits, and the clock."""

    clock: Callable[[], float] = monotonic
    """Monotonic seconds."""
    silence_limit_s: float = SILENCE_LIMIT_S
    starts_per_minute: int = STARTS_PER_MINUTE


class Mover:
    """One helper process, started again when it dies."""

    def __init__(
        self,
        launch: Callable[[], Connection],
        keeper: Executor,
        options: MoverOptions | None = None,
    ) -> None:
        """`launch` starts a process; it is called on `keeper`, which has one thread."""
        self._launch = launch
        self._keeper = keeper
        self._options = options or MoverOptions()
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
        """Starts since a mover was ready."""
        self._tickets = count(1)
        self._jobs: dict[int, OnEnd] = {}
        self._unsent: deque[memoryview] = deque()
        self._starts_s: deque[float] = deque(maxlen=self._options.starts_per_minute)
        self._heard_s = 0.0
        self._polled_s = -math.inf
        self.starts = 0
        """How often a process was started."""

    @property
    def pid(self) -> int | None:
        """The process; None while there is none."""
        with self._lock:
            return None if self._connection is None else self._connection.child.pid

    @property
    def is_up(self) -> bool:
        """True if a job could be sent."""
        with self._lock:
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
                '"movers": "threads" does without it',
            )

    def submit(self, order: Order, on_end: OnEnd) -> bool:
        """Send a job; False if it cannot be taken now. `on_end` is called by `poll` and others."""
        with self._lock:
            if not self.is_up:
                self.poll()  # without jobs nobody else hears that it is ready
            if not self.is_up or len(self._jobs) >= JOBS_AT_MOST:
                return False
            ticket = next(self._tickets)
            if not self._jobs:
                self._heard_s = self._clock()
            self._jobs[ticket] = on_end
            self._unsent.append(memoryview(frame(order(ticket))))
            self._send()
            return True

    def poll(self) -> None:
        """Take in what there is; notice a death, start anew. Never blocks: microseconds."""
        with self._lock:
            self._polled_s = self._clock()
            if self._connection is None:
                self._start_if_allowed()
                return
            self._send()
            self._receive()
            if not self._has_hung_up and self._is_silent():
                _log.warning("the process that moves blocks says nothing any more; it is killed")
                self._has_hung_up = True
            if self._has_hung_up:
                self._bury()

    def listen(self) -> None:
        """`poll`, unless somebody did a moment ago: for upkeep, which need not know at once."""
        if self._clock() - self._polled_s >= LISTEN_INTERVAL_S:
            self.poll()

    def wait(self, is_done: Callable[[], bool], limit_s: float) -> bool:
        """Poll until something is so, or the time is over; True if it is so.

        In real time, whatever the clock of the options says: a process is waited for.
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
        """End the process now; True if no job is left: those under way have failed."""
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
        """Let the process end, by force if need be; True if it is gone. Idempotent."""
        with self._lock:
            self._is_closed = True
            connection, is_ready = self._connection, self._is_ready
            if connection is not None:
                connection.socket.close()
                self._has_hung_up = True
        if connection is not None:
            # One that is not ready holds nothing yet, and would go on importing for seconds.
            if not is_ready or not connection.has_ended_within(CLOSE_LIMIT_S):
                connection.kill()
                connection.has_ended_within(KILL_LIMIT_S)
            self.poll()
        self._keeper.shutdown(wait=False)  # not before: a mover dies with that thread
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

    def _send(self) -> None:
        connection = self._connection
        assert connection is not None
        while self._unsent and not self._has_hung_up:
            piece = self._unsent[0]
            try:
                sent = connection.socket.send(piece)
            except BlockingIOError:
                return
            except OSError:
                self._has_hung_up = True
                return
            if sent < len(piece):
                self._unsent[0] = piece[sent:]
            else:
                self._unsent.popleft()

    def _receive(self) -> None:
        connection = self._connection
        assert connection is not None
        for _ in range(RECEIVES_PER_POLL):
            try:
                data = connection.socket.recv(RECEIVE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._has_hung_up = True
                return
            self._heard_s = self._clock()
            try:
                for body in self._reader.feed(data):
                    self._take(from_mover.decode(body))
            except (WireError, msgspec.MsgspecError) as error:
                _log.error("the process that moves blocks cannot be understood: %s", error)
                self._has_hung_up = True
                return

    def _take(self, message: Ready | Answer) -> None:
        if isinstance(message, Ready):
            self._is_ready = True
            self._fruitless = 0
            return
        on_end = self._jobs.get(message.ticket)
        if on_end is None:
            raise WireError(f"an answer to nothing ({message.ticket})")
        on_end(message)
        del self._jobs[message.ticket]

    def _is_silent(self) -> bool:
        if self._is_ready and not self._jobs:
            return False
        limit_s = self._options.silence_limit_s if self._is_ready else SILENCE_LIMIT_S
        return self._clock() - self._heard_s > limit_s

    def _bury(self) -> None:
        """The connection is over. Once the process is too, fail its jobs and start another."""
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
        """Least time between the last start and the next one."""
        too_many = self._fruitless - self._options.starts_per_minute
        return min(MAX_PAUSE_S, 2.0 ** min(too_many, MAX_DOUBLINGS)) if too_many > 0 else 0.0

    def _say_given_up(self) -> None:
        if not self._has_said_given_up:
            self._has_said_given_up = True
            _log.error(
                "the process that moves blocks ended %d times and is not started again: the NVMe "
                "tier does nothing until the engine is started anew",
                self.starts,
            )

    def _start(self) -> None:
        """On the keeper's thread."""
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
