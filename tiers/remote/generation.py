"""The generation of a namespace: part of every name, and moved by a reset.

All hosts agree on it through a counter of the engine. While it is unknown, nothing is read or
written. A new counter begins at the wall-clock time, so that a counter that the server lost never
returns to a generation that had blocks.

A second counter holds the mark of the last reset: about the time at which it began. It is raised
before the generation. A host that sees another generation thus learns whether that was a reset, or
the server lost its counters. A mark is carried out once, whoever passes it on.

A generation that is smaller than the mark, or than an earlier one, has blocks of before the last
reset: that reset is half done, or the server went back to an older state. Who sees this raises it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from .base import CounterAnswer, RemoteEngine, RemoteOutcome

GENERATION_FRESH_S = 5.0
"""Age after which the generation is read again. Another host's reset is seen no later."""
TICKS_PER_S = 1_000_000


class Generation:
    """The current generation. Any thread."""

    def __init__(
        self,
        engine: RemoteEngine,
        name: str,
        marks_name: str,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """`name`, `marks_name`: those of the counters of the generation and of the last mark.

        `clock` is monotonic, `wall_clock` Unix time, in seconds.
        """
        self._engine = engine
        self._name = name
        self._marks_name = marks_name
        self._clock = clock
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        """Held while the server is asked."""
        self._changing = threading.Lock()
        """Held while what is known changes; never while the server is asked."""
        self._value: int | None = None
        self._read_s = 0.0
        self._resets_wanted = 0
        self._resets_done = 0
        self._wanted = (0, True)
        """Mark of the last reset that is wanted, and whether it is a new one."""
        self._told: tuple[int, int] | None = None
        """Number of the reset whose mark was raised, and that mark."""
        self._mark = 0
        self._newest = 0
        """Greatest generation that was read."""
        self._own_mark: int | None = None
        self._attempts = 0
        self._failure: CounterAnswer | None = None
        """Answer of the last attempt if it failed."""

    @property
    def is_reset_pending(self) -> bool:
        """True from `reset` until all hosts are told."""
        return self._resets_done != self._resets_wanted

    @property
    def value(self) -> int | None:
        """The generation as it was last read; None if it is unknown."""
        return self._value

    @property
    def mark(self) -> int:
        """Mark of the last reset by any host, as it was last read; 0 if there was none."""
        return self._mark

    @property
    def own_mark(self) -> int | None:
        """Mark of the last reset of this host, or else of the one before its start.

        None until the server was asked or told. If `mark` is greater, another host has reset the
        namespace since then.
        """
        return self._own_mark

    def reset(self, mark: int = 0, *, is_new: bool = True) -> None:
        """Make the generation unknown until it was raised. Returns at once.

        `mark`: that of the reset; 0: the time. Without `is_new` it came from another tier, and is
        done if the namespace had a reset of this mark or a later one.
        """
        with self._changing:
            if self.is_reset_pending:
                mark, is_new = max(mark, self._wanted[0]), is_new or self._wanted[1]
            self._wanted = mark, is_new
            self._resets_wanted += 1
            self._value = self._own_mark = None

    def current(self, limit_s: float) -> CounterAnswer:
        """Return the generation; reads or raises it first if that is due."""
        seen = self._attempts
        with self._lock:
            if self._attempts != seen and self._failure is not None:
                return self._failure  # of a call that was waited for: the next one would fail too
            value, wanted = self._value, self._resets_wanted
            is_fresh = self._clock() - self._read_s < GENERATION_FRESH_S
            if value is not None and is_fresh and not self.is_reset_pending:
                return CounterAnswer(RemoteOutcome.OK, value)
            now = int(self._wall_clock() * TICKS_PER_S)
            if self.is_reset_pending:
                answer, mark = self._raise(wanted, now, limit_s)
            else:
                answer, mark = self._read(now, limit_s)
            self._attempts += 1
            self._failure = None if answer.outcome is RemoteOutcome.OK else answer
            if self._failure is not None:
                self._value = None
                return answer
            return self._take_in(answer, mark, wanted, self._clock())

    def _take_in(
        self, answer: CounterAnswer, mark: int, wanted: int, now_s: float
    ) -> CounterAnswer:
        """Note both counters, which are those of after this number of resets."""
        with self._changing:
            self._resets_done = wanted
            if self.is_reset_pending:  # another reset came meanwhile
                return CounterAnswer(RemoteOutcome.BUSY)
            self._mark = max(self._mark, mark)
            self._own_mark = mark if self._own_mark is None else self._own_mark
            self._newest = max(self._newest, answer.value)
            self._value, self._read_s = answer.value, now_s
            return answer

    def _read(self, now: int, limit_s: float) -> tuple[CounterAnswer, int]:
        """Read both counters: the mark last, so that it is no older than the generation."""
        answer = self._engine.counter(self._name, now, limit_s)
        if answer.outcome is not RemoteOutcome.OK:
            return answer, 0
        marked = self._last_mark(limit_s)
        if marked.outcome is RemoteOutcome.OK and marked.value < self._mark:
            marked = self._engine.advance(self._marks_name, self._mark, limit_s)
        if marked.outcome is not RemoteOutcome.OK:
            return marked, 0
        if answer.value < max(self._newest, marked.value):
            answer = self._raised(now, marked.value, limit_s)
        return answer, marked.value

    def _raise(self, number: int, now: int, limit_s: float) -> tuple[CounterAnswer, int]:
        """Carry out the reset of this number: raise the mark, and then the generation."""
        mark, is_new = self._wanted
        if self._told is None or self._told[0] != number:
            marked = self._last_mark(limit_s)
            if marked.outcome is not RemoteOutcome.OK:
                return marked, 0
            if not is_new and marked.value >= mark:
                return self._read(now, limit_s)
            marked = self._engine.advance(self._marks_name, mark or now, limit_s)
            if marked.outcome is not RemoteOutcome.OK:
                return marked, 0
            self._told = number, marked.value
        return self._raised(now, self._told[1], limit_s), self._told[1]

    def _raised(self, now: int, mark: int, limit_s: float) -> CounterAnswer:
        """Raise the generation, to the mark at least."""
        return self._engine.advance(self._name, max(now, mark, self._newest + 1), limit_s)

    def _last_mark(self, limit_s: float) -> CounterAnswer:
        """Read the mark of the last reset; 0 if there was none. One that was lost is set again."""
        marked = self._engine.counter(self._marks_name, self._mark or None, limit_s)
        is_none = marked.outcome is RemoteOutcome.ABSENT
        return CounterAnswer(RemoteOutcome.OK) if is_none else marked
