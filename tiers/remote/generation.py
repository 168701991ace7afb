"""The generation of a namespace: part of every name, and moved by a reset.

All hosts agree on it through a counter of the engine. While it is unknown, nothing is read or
written. A new counter begins at the wall-clock time, so that a counter that the server lost never
returns to a generation that had blocks.

A second counter holds the mark of the last reset: about the time at which it began. It is raised
before the generation. A host that sees another generation thus learns whether that was a reset, or
the server lost its counters. A mark is carried out once, whoever passes it on.

Two hosts may reset at the same time. Blocks that one stored after its own reset may be older than
the other's. So a host that finds a mark which it had not heard of before its reset keeps a smaller
mark as its own. Its blocks then count as older than the last reset.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from ..base import RESET_TICKS_PER_S
from .base import CounterAnswer, RemoteEngine, RemoteOutcome

GENERATION_FRESH_S = 5.0
"""Age after which the generation is read again. Another host's reset is seen no later."""


@dataclass(frozen=True, slots=True)
class ResetWanted:
    """A reset that the server is to be told."""

    mark: int
    """0: the time at which the server is told."""
    is_new: bool
    known: int
    """Greatest mark that this host had heard of when the reset began."""


@dataclass(frozen=True, slots=True)
class _Told:
    """A reset whose mark is at the server."""

    number: int
    own_mark: int
    """Mark of what this host stored since the reset began."""
    is_raised: bool
    """False if the namespace had this reset already."""


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
        self._value: int | None = None
        self._read_s = 0.0
        self._resets_wanted = 0
        self._resets_done = 0
        self._wanted = ResetWanted(0, True, 0)
        """The last reset that is wanted."""
        self._told: _Told | None = None
        self._mark = 0
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

    def reset(self, mark: int = 0, *, is_new: bool = True, known: int | None = None) -> None:
        """Make the generation unknown until it was raised. Returns at once.

        `mark`: that of the reset; 0: the time. Without `is_new` it came from another tier, and is
        done if the namespace had a reset of this mark or a later one. `known`: greatest mark that
        the caller had heard of when the reset began; None: the greatest one heard of here.
        """
        if self.is_reset_pending:
            mark, is_new = max(mark, self._wanted.mark), is_new or self._wanted.is_new
        self._wanted = ResetWanted(mark, is_new, self._mark if known is None else known)
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
            now = int(self._wall_clock() * RESET_TICKS_PER_S)
            own_mark: int | None = None
            if self.is_reset_pending:
                answer, own_mark = self._raise(wanted, now, limit_s)
            else:
                answer = self._engine.counter(self._name, now, limit_s)
            marked = answer
            if answer.outcome is RemoteOutcome.OK:  # read last: no older than the generation
                marked = self._last_mark(limit_s)
                answer = answer if marked.outcome is RemoteOutcome.OK else marked
            self._attempts += 1
            self._failure = None if answer.outcome is RemoteOutcome.OK else answer
            if self._failure is not None:
                self._value = None
                return answer
            self._resets_done = wanted
            if self.is_reset_pending:  # another reset came meanwhile
                return CounterAnswer(RemoteOutcome.BUSY)
            self._mark = max(self._mark, marked.value)
            if self._own_mark is None:
                self._own_mark = marked.value if own_mark is None else own_mark
            self._value, self._read_s = answer.value, self._clock()
            return answer

    def _raise(self, number: int, now: int, limit_s: float) -> tuple[CounterAnswer, int]:
        """Carry out the reset of this number: raise the mark, and then the generation.

        Return the generation, and the mark of what this host stored since the reset began.
        """
        told = self._told
        if told is None or told.number != number:
            marked, told = self._tell(number, now, limit_s)
            if told is None:
                return marked, 0
            self._told = told
        if told.is_raised:
            return self._engine.advance(self._name, now, limit_s), told.own_mark
        return self._engine.counter(self._name, now, limit_s), told.own_mark

    def _tell(self, number: int, now: int, limit_s: float) -> tuple[CounterAnswer, _Told | None]:
        """Raise the mark, unless the namespace had this reset. Return None if that failed."""
        wanted = self._wanted
        last = self._last_mark(limit_s)
        if last.outcome is not RemoteOutcome.OK:
            return last, None
        is_foreign = last.value > wanted.known and last.value != wanted.mark
        if not wanted.is_new and last.value >= wanted.mark:
            return last, _Told(number, wanted.mark if is_foreign else last.value, False)
        raised = self._engine.advance(self._marks_name, wanted.mark or now, limit_s)
        if raised.outcome is not RemoteOutcome.OK:
            return raised, None
        return raised, _Told(number, wanted.known if is_foreign else raised.value, True)

    def _last_mark(self, limit_s: float) -> CounterAnswer:
        """Read the mark of the last reset; 0 if there was none."""
        marked = self._engine.counter(self._marks_name, None, limit_s)
        is_none = marked.outcome is RemoteOutcome.ABSENT
        return CounterAnswer(RemoteOutcome.OK) if is_none else marked
