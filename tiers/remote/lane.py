"""One direction of a remote tier: queue of calls, limits on threads and rate, circuit breaker.

An `Errand` is one call of the engine. Errands begin in the order in which they were added. One that
cannot begin in time is given up. While the breaker rests, all waiting errands are given up, so that
no request waits for a server that does not answer. While a probe is under way, errands that were
added before it wait for its end.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from ...logs import get_logger
from ..breaker import Breaker
from .base import FAILURES, RemoteOutcome

BURST_S = 1.0
"""A bucket holds as many bytes as may pass in this time."""
FEWEST_CALLS = 8
"""Number of calls at a time with which a lane begins, unless its limit is lower. Slow calls never
lower the number below this one."""
QUICK = 4
"""A call is quick if it takes less than this many times as long as the fastest one."""
FORGET = 1.001
"""Factor by which each call raises the time of the fastest one, because a server may move."""

_log = get_logger(__name__)


class TokenBucket:
    """Limit on the bytes per second of one direction. Its owner guards it with a lock."""

    def __init__(self, bytes_per_s: float | None, clock: Callable[[], float]) -> None:
        """None: no limit. `clock` returns monotonic seconds."""
        self._rate = bytes_per_s
        self._clock = clock
        self._tokens = 0.0 if bytes_per_s is None else bytes_per_s * BURST_S
        self._at_s = clock()

    def take(self, n_bytes: int) -> bool:
        """Take the bytes if the bucket is not empty; it may go below zero by one transfer."""
        if self._rate is None:
            return True
        now_s = self._clock()
        gained = (now_s - self._at_s) * self._rate
        self._tokens = min(self._tokens + gained, self._rate * BURST_S)
        self._at_s = now_s
        if self._tokens <= 0:
            return False
        self._tokens -= n_bytes
        return True


class CallLimit:
    """Number of calls that a lane makes at a time. Its owner guards it with a lock.

    A distant server reaches its rate only with many calls at a time: they take no longer than few.
    Where processor, link or server are busy, many calls only end late together. So calls that take
    about as long as the fastest ones raise the number, and slow or failed ones lower it.
    """

    def __init__(self, most: int, slow_s: float) -> None:
        """A call that takes longer than `slow_s` is slow, however long others take."""
        self.calls = self._fewest = min(FEWEST_CALLS, most)
        """See the class."""
        self._most = most
        self._slow_s = slow_s
        self._fastest_s = math.inf

    def note(self, took_s: float, outcome: RemoteOutcome, *, is_needed: bool) -> bool:
        """Take in a call that ended. Return True if the number grew.

        `is_needed`: more work waits, so a larger number would be used.
        """
        if outcome in FAILURES or took_s > self._slow_s:
            self.calls = max(self._fewest, self.calls - 1)
            return False
        if outcome is not RemoteOutcome.OK:  # without a payload it says little about others
            return False
        self._fastest_s = min(took_s, self._fastest_s * FORGET)
        is_quick = took_s < min(self._slow_s / 2, QUICK * self._fastest_s)
        if not (is_quick and is_needed) or self.calls >= self._most:
            return False
        self.calls += 1
        return True


@dataclass(frozen=True, slots=True)
class Errand:
    """A call of the engine that is to be made."""

    ends_s: float
    """Monotonic time after which it is given up if it has not begun."""
    n_bytes: int
    """Payload bytes that it moves, for the rate."""
    run: Callable[[], RemoteOutcome]
    """Makes the call and hands over its outcomes. Returns that of the call. Runs on a thread."""
    give_up: Callable[[RemoteOutcome], None]
    """Ends the errand without a call, with this outcome. Any thread."""
    is_over: Callable[[], bool] = lambda: False
    """Returns True if nobody waits for it any more. Any thread."""


class Lane:
    """Any thread may call any method; none of them waits for an engine."""

    def __init__(
        self,
        executor: Executor,
        clock: Callable[[], float],
        limit: CallLimit,
        breaker: Breaker,
        bucket: TokenBucket,
        late: RemoteOutcome,
    ) -> None:
        """`late`: outcome of an errand that cannot begin in time."""
        self.breaker = breaker
        self._executor = executor
        self._clock = clock
        self._limit = limit
        self._bucket = bucket
        self._late = late
        self._lock = threading.Lock()
        self._waiting: deque[Errand] = deque()
        self._running = 0
        self._is_closed = False

    @property
    def calls(self) -> int:
        """Number of calls at a time, see `CallLimit`."""
        return self._limit.calls

    @property
    def is_open(self) -> bool:
        """True if errands may be added; False while the breaker is open."""
        with self._lock:
            return not (self._is_closed or self.breaker.is_open)

    @property
    def is_idle(self) -> bool:
        """True if nothing waits and nothing runs."""
        with self._lock:
            return not (self._waiting or self._running)

    def add(self, errand: Errand) -> None:
        """Add an errand, and start it if a thread is free."""
        with self._lock:
            self._waiting.append(errand)
        self.pump()

    def pump(self) -> None:
        """Give up what is late, and start what may begin."""
        given_up: list[tuple[Errand, RemoteOutcome]] = []
        starts = 0
        with self._lock:
            self.breaker.look_at_clock()
            now_s = self._clock()
            if self._is_closed or self.breaker.is_resting:
                given_up += ((errand, RemoteOutcome.RESTING) for errand in self._waiting)
                self._waiting.clear()
            while self._waiting and self._waiting[0].ends_s <= now_s:
                given_up.append((self._waiting.popleft(), self._late))
            starts = max(0, min(len(self._waiting), self._limit.calls - self._running))
            self._running += starts
        for errand, outcome in given_up:
            errand.give_up(outcome)
        for _ in range(starts):
            self._start()

    def drop_all(self) -> None:
        """Give up everything that has not begun."""
        with self._lock:
            dropped = [*self._waiting]
            self._waiting.clear()
        for errand in dropped:
            errand.give_up(RemoteOutcome.DROPPED)

    def close(self) -> None:
        """Give up everything that has not begun, and begin nothing any more."""
        with self._lock:
            self._is_closed = True
        self.pump()

    def _start(self) -> None:
        try:
            self._executor.submit(self._work)
        except RuntimeError:  # the executor is shut down
            with self._lock:
                self._running -= 1
                self._is_closed = True
            self.drop_all()

    def _work(self) -> None:
        """Run errands until none may begin."""
        while True:
            errand, skipped = self._take()
            for other in skipped:
                other.give_up(RemoteOutcome.DROPPED)
            if errand is None:
                return
            begun_s = self._clock()
            try:
                outcome = errand.run()
            except BaseException as error:  # an engine that breaks its contract, or panics
                _log.error("a remote engine raised %s; report it", type(error).__name__)
                outcome = RemoteOutcome.IO_ERROR
                errand.give_up(outcome)
            if self._note_end(outcome, self._clock() - begun_s):
                self.pump()

    def _take(self) -> tuple[Errand | None, list[Errand]]:
        """Return the next errand, counted as begun, and those that nobody waits for.

        Without a next errand the work of this thread has ended.
        """
        skipped: list[Errand] = []
        with self._lock:
            while self._waiting and self._waiting[0].is_over():
                skipped.append(self._waiting.popleft())
            if self._running > self._limit.calls or not self._may_begin():
                self._running -= 1
                return None, skipped
            self.breaker.started()
            return self._waiting.popleft(), skipped

    def _may_begin(self) -> bool:
        if not self._waiting or self._is_closed or self.breaker.is_open:
            return False
        first = self._waiting[0]
        return first.ends_s > self._clock() and self._bucket.take(first.n_bytes)

    def _note_end(self, outcome: RemoteOutcome, took_s: float) -> bool:
        """Return True if more calls at a time may be made than before."""
        with self._lock:
            if outcome is RemoteOutcome.DROPPED:
                self.breaker.withdrawn()
            else:
                self.breaker.ended(outcome in FAILURES)
            if outcome in (RemoteOutcome.TIMED_OUT, RemoteOutcome.DENIED):
                self.breaker.trip()  # it cost a whole deadline, or will not change soon
            return self._limit.note(took_s, outcome, is_needed=bool(self._waiting))
