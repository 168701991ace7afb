"""The generation of a namespace: part of every name, and moved by a reset.

All hosts agree on it through a counter of the engine. While it is unknown, nothing is read or
written. A new counter begins at the wall-clock time, so that a counter that the server lost never
returns to a generation that had blocks.
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
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """`name`: that of the counter; `clock` is monotonic, `wall_clock` Unix time, in seconds."""
        self._engine = engine
        self._name = name
        self._clock = clock
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._value: int | None = None
        self._first: int | None = None
        self._read_s = 0.0
        self._resets_wanted = 0
        self._resets_done = 0
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
    def first(self) -> int | None:
        """The first generation that was read since the start or the last `reset`.

        If the present one is another, another host has reset the namespace since then.
        """
        return self._first

    def reset(self) -> None:
        """Make the generation unknown until it was raised. Returns at once."""
        self._resets_wanted += 1
        self._value = self._first = None

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
                answer = self._engine.advance(self._name, now, limit_s)
            else:
                answer = self._engine.counter(self._name, now, limit_s)
            self._attempts += 1
            self._failure = None if answer.outcome is RemoteOutcome.OK else answer
            if self._failure is not None:
                self._value = None
                return answer
            self._resets_done = wanted
            if self.is_reset_pending:  # another reset came meanwhile
                return CounterAnswer(RemoteOutcome.BUSY)
            self._first = answer.value if self._first is None else self._first
            self._value, self._read_s = answer.value, self._clock()
            return answer
