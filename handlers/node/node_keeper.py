"""The scheduler process's side of a node: send jobs, receive answers, restart after a crash.

Only `start`, `wait`, `wait_for_news`, `kill` and `close` wait for the node, for a limited time
each. A job ends when its answer has arrived, or when `waitpid` has confirmed that the process is
dead. Until then the job may still write to its slots, so they stay reserved. A dead node is
restarted, a few times a minute at most. A node that has work and stays silent for too long is
killed. A thread cannot be killed: its socket is shut down, and it is dead once it and its transfers
have ended.

Threads: any thread may call any method. All processes are started on the single thread of an
executor, because a node dies with the thread that started it.
"""

from __future__ import annotations

import atexit
import math
import os
import select
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from itertools import count
from time import monotonic
from typing import Any
from weakref import WeakMethod

import msgspec

from ...errors import KVCascadeError, TierIOError
from ...logs import get_logger
from ...threads import started_pool
from ...tiers.nvme.path.frames import MessageStream, WireError, frame, hang_up
from .node_child import Connection, StartLimits
from .path_wire import from_node_process

START_LIMIT_S = 30.0
"""Time limit for the first start. Starting takes long on a busy machine."""
SILENCE_LIMIT_S = 60.0
"""Longest silence of a node that has work or is not ready yet. Then it or its disk is stuck, and
the node is ended."""
LISTEN_GAP_S = 5.0
"""Most silence that the time between two polls counts for. After a longer gap this process was
stopped, perhaps together with the node (`docker pause`)."""
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
WAIT_SLICE_S = 0.05
"""Time between two checks of a waiting thread: another thread may receive the answer."""

OnEnd = Callable[[Any], None]
"""Callback with the answer to a job, or None if its process died. May raise `WireError`."""
OnNote = Callable[[Any], None]
"""Callback with a message that answers no job, or None if the process died."""
MakeJob = Callable[[int], msgspec.Struct]
"""Builds the message of a job from its ticket."""

_log = get_logger(__name__)


def at_exit(call: Callable[[], object]) -> None:
    """Call this when the process ends, while thread pools still work.

    Thread pools stop before ordinary exit handlers run. A process that `multiprocessing` forked
    runs none of the latter, but it runs this call, which its parent may have registered.
    """
    getattr(threading, "_register_atexit", atexit.register)(call)


def at_own_exit(call: Callable[[], object]) -> None:
    """Call this when this process ends, and not when one ends that is forked later: all belongs to
    its parent."""
    pid = os.getpid()
    at_exit(lambda: call() if os.getpid() == pid else None)


def close_at_exit(close: Callable[[], None]) -> None:
    """Call a bound method when this process ends, if its object still exists."""
    found = WeakMethod(close)
    at_own_exit(lambda: None if (method := found()) is None else method())


class NodeStream(MessageStream):
    """Messages to and from one process. Used under the lock of its `NodeKeeper`."""

    def __init__(
        self,
        connection: Connection,
        decode: Callable[[bytes], Any],
        now_s: float,
        batch_bytes: int,
    ) -> None:
        """Messages of up to `batch_bytes` together are kept until `flush`."""
        super().__init__(connection.socket, decode)
        self.connection = connection
        self._batch_bytes = batch_bytes
        self.heard_s = now_s
        """Time of the last message, or since when a message is expected."""
        self.is_ready = False
        """True once the process takes jobs."""

    def add(self, data: bytes) -> None:
        """Keep the frame of a message for `flush`, or send it with all that are kept."""
        self.unsent += data
        if len(self.unsent) >= self._batch_bytes:
            self.flush()

    def hang_up(self) -> None:
        """End the stream, so that the node ends by itself. What it sent can still be received."""
        hang_up(self._socket)
        self.has_ended = True

    def close(self) -> None:
        """Close the socket; the node ends by itself."""
        self.hang_up()
        self._socket.close()


class NodeKeeper:
    """Keeper of one process of a node: it starts the process, and again when it dies."""

    def __init__(
        self,
        launch: Callable[[], Connection],
        on_note: OnNote,
        *,
        decode: Callable[[bytes], Any] = from_node_process.decode,
        is_batched: bool = False,
        clock: Callable[[], float] = monotonic,
        starter: Executor | None = None,
    ) -> None:
        """`launch` starts a process. It is called on `starter`, an executor with one thread.

        `decode` decodes the process's messages. An answer to a job has a `ticket`. `on_note` is
        called with the others, by any thread that calls a method. If `is_batched`, jobs and notes
        are kept until `flush`, `poll` or `wait`, to be sent together. `clock`: monotonic seconds.
        """
        self._launch = launch
        self._on_note = on_note
        batch_bytes = BATCH_BYTES if is_batched else 0
        self._stream_to = partial(NodeStream, decode=decode, batch_bytes=batch_bytes)
        self._clock = clock
        self._starter = starter or started_pool(1, "kvcascade-keeper")
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._stream: NodeStream | None = None
        """Stream to the process; None while there is none."""
        self._is_starting = False
        self._is_closed = False
        self._tickets = count(1)
        self._jobs: dict[int, OnEnd] = {}
        self._limits = StartLimits()
        self._starts_noted = 0
        """Number of starts when the log said last that the node rests."""
        self._polled_s = -math.inf

    @property
    def pid(self) -> int | None:
        """Process number of the node, or None while there is no process."""
        with self._lock:
            return None if self._stream is None else self._stream.connection.child.pid

    @property
    def is_up(self) -> bool:
        """True if a job can be sent."""
        with self._lock:
            return self._can_send

    @property
    def _can_send(self) -> bool:
        stream = self._stream
        return stream is not None and stream.is_ready and not (stream.has_ended or self._is_closed)

    @property
    def _has_given_up(self) -> bool:
        with self._lock:
            return self._stream is None and not self._is_starting

    def start(self, remedy: str = '"movers": "threads" does without it') -> None:
        """Start the process and wait until it is ready. Raises `TierIOError` with `remedy`."""
        self._start_if_allowed()
        self.wait(lambda: self.is_up or self._has_given_up, START_LIMIT_S)
        if not self.is_up:
            raise TierIOError(
                None,
                "the process that moves blocks did not start; its own message says why, and "
                + remedy,
            )

    def submit(self, make_job: MakeJob, on_end: OnEnd) -> bool:
        """Send a job, or keep it for a batch. Return False if it cannot be taken now.

        The methods that receive messages call `on_end`. If this raises an error, `has_job` tells
        whether the job may have been sent.
        """
        with self._lock:
            if not self._can_send:
                self.poll()  # without jobs no other call receives `Ready`
            stream = self._stream
            if stream is None or not self._can_send or len(self._jobs) >= JOBS_AT_MOST:
                return False
            ticket = next(self._tickets)
            data = frame(make_job(ticket))  # first, since it raises if the message is invalid
            if not self._jobs:
                stream.heard_s = self._clock()
            self._jobs[ticket] = on_end
            try:
                stream.add(data)
            except BaseException:  # an interrupt: the node may have the job, or never get it
                stream.has_ended = stream.was_interrupted = True
                raise
            return True

    def has_job(self, on_end: OnEnd) -> bool:
        """Return True if the job with this callback has not ended."""
        with self._lock:
            return on_end in self._jobs.values()

    def tell(self, message: msgspec.Struct) -> None:
        """Send a message that has no answer; it is lost if the process is not up."""
        with self._lock:
            if self._stream is not None and self._can_send:
                self._stream.add(frame(message))

    def flush(self) -> None:
        """Send what the socket takes now; never blocks."""
        stream = self._stream
        if stream is not None and stream.unsent:
            with self._lock:
                stream.flush()

    def poll(self) -> None:
        """Receive messages, and restart a dead node. Takes microseconds and never blocks."""
        with self._lock:
            now_s = self._clock()
            unheard_s = max(0.0, now_s - self._polled_s - LISTEN_GAP_S)
            self._polled_s, stream = now_s, self._stream
            if stream is None:
                self._start_if_allowed()
                return
            stream.heard_s = min(now_s, stream.heard_s + unheard_s)
            if stream.unsent:
                stream.flush()
            before = stream.received_bytes
            try:
                for message in stream.receive(to_the_end=self._is_closed):
                    self._take(stream, message)
                    if stream.has_ended:
                        break
            except WireError as error:  # an answer that its job cannot understand
                stream.error, stream.has_ended = error, True
            except BaseException:  # an interrupt: what was received may be lost
                stream.was_interrupted = True
                stream.close()
                raise
            if stream.received_bytes > before:
                stream.heard_s = now_s
            owes_message = bool(self._jobs) or not stream.is_ready
            is_silent = owes_message and now_s - stream.heard_s > SILENCE_LIMIT_S
            if is_silent and not stream.has_ended:
                _log.warning("the process that moves blocks says nothing any more; it is ended")
                stream.has_ended = True
            if stream.has_ended:
                self._bury(stream)

    def listen(self) -> None:
        """Poll for maintenance, unless the last poll was within `LISTEN_INTERVAL_S`."""
        if self._clock() - self._polled_s >= LISTEN_INTERVAL_S:
            self.poll()

    def wait(self, is_done: Callable[[], bool], limit_s: float) -> bool:
        """Poll until the condition holds or the time is over. Return True if the condition holds.

        The limit is in real time, not in that of `clock`: a process does the work.
        """
        end_s = monotonic() + limit_s
        while True:
            self.poll()
            if is_done():
                return True
            left_s = end_s - monotonic()
            if left_s <= 0:
                return False
            self.wait_for_news(left_s)

    def wait_for_news(self, limit_s: float) -> None:
        """Send what was taken, and wait until there may be something to receive; receive nothing.

        It waits for `WAIT_SLICE_S` at most, because another thread may receive the answer.
        """
        self.flush()
        limit_s = min(limit_s, WAIT_SLICE_S)
        with self._lock:  # an interrupt may leave a condition locked
            stream = self._stream
            if stream is None or stream.has_ended:
                self._changed.wait(limit_s)
                return
            poller = select.poll()
            poller.register(stream.connection.socket, select.POLLIN)
        poller.poll(limit_s * 1000)

    def replace(self) -> None:
        """Kill the process, and start another one; the next polls do it, as if it were silent."""
        with self._lock:
            if self._stream is not None:
                self._stream.has_ended = True

    def kill(self) -> bool:
        """Kill the process. Return True if no job is left; jobs in flight have failed then."""
        with self._lock:
            self._is_closed = True
            stream = self._stream
        if stream is not None:
            stream.connection.kill()
            stream.connection.has_ended_within(KILL_LIMIT_S)
            self.poll()
        with self._lock:
            return not self._jobs

    def close(self) -> bool:
        """End the process, by force if necessary. Return True if it is dead. Idempotent."""
        with self._lock:
            self._is_closed = True
            stream = self._stream
            if stream is not None:
                stream.close()
        if stream is not None:
            # A node that is not ready holds no data, and would go on importing for seconds.
            if not (stream.is_ready and stream.connection.has_ended_within(CLOSE_LIMIT_S)):
                stream.connection.kill()
                stream.connection.has_ended_within(KILL_LIMIT_S)
            self.poll()
        self._starter.shutdown(wait=False)  # last: a node dies with that thread
        return stream is None or stream.connection.has_died()

    # -- inside --------------------------------------------------------------------------------

    def _take(self, stream: NodeStream, message: Any) -> None:
        ticket = getattr(message, "ticket", None)
        if ticket is None:  # the first such message says that the process is ready
            self._on_note(message)
            stream.is_ready = True
            return
        on_end = self._jobs.get(ticket)
        if on_end is None:
            _log.error("the process that moves blocks answers to nothing (%s)", ticket)
            stream.has_ended = True
            return
        on_end(message)
        del self._jobs[ticket]
        self._limits.fruitless = 0

    def _bury(self, stream: NodeStream) -> None:
        """Kill the process of a closed connection. Once it is dead, fail its jobs and restart."""
        connection = stream.connection
        if not connection.has_died():
            connection.kill()
            if not connection.has_died():
                stream.hang_up()  # a thread ends by itself, once its transfers have returned
                return
        if stream.error is not None:
            _log.error("the process that moves blocks cannot be understood: %s", stream.error)
        was_interrupted, stream.was_interrupted = stream.was_interrupted, False
        self._limits.note_end(self._clock(), was_interrupted=was_interrupted)
        connection.socket.close()
        self._stream = None
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
        self._on_note(None)
        self._changed.notify_all()
        self._start_if_allowed()

    def _start_if_allowed(self) -> None:
        with self._lock:
            if self._is_closed or self._is_starting or self._stream is not None:
                return
            now_s = self._clock()
            wait_s = self._limits.wait_s(now_s)
            if wait_s > 0:
                self._note_rest(wait_s)
                return
            self._limits.note_start(now_s)
            self._is_starting = True
            try:
                self._starter.submit(self._start)
            except RuntimeError:  # shutting down
                self._is_starting = False

    def _note_rest(self, wait_s: float) -> None:
        """Log once after each start that the node is not started for now."""
        starts = self._limits.starts
        if starts == self._starts_noted:
            return
        self._starts_noted = starts
        _log.warning(
            "the process that moves blocks ended %d times; its tier rests, and the next start is "
            "in %.0f s; its own lines above say why it ended, and status -9 without one is often "
            "a lack of memory",
            starts,
            wait_s,
        )

    def _start(self) -> None:
        """Start a process. Runs on the thread of the starter."""
        connection: Connection | None = None
        try:
            connection = self._launch()
        except KVCascadeError as error:
            _log.error("%s", error)
        except Exception:
            if not self._is_closed:  # else the arena may be closed by now
                _log.exception("the process that moves blocks could not be started")
        with self._changed:
            self._is_starting = False
            if connection is not None and self._is_closed:
                connection.kill()
                hang_up(connection.socket)
                connection.socket.close()
                connection.has_ended_within(KILL_LIMIT_S)
            elif connection is not None:
                self._stream = self._stream_to(connection, now_s=self._clock())
            self._changed.notify_all()
