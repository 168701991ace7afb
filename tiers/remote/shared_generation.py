"""The generation of a namespace: a number in the name of every object, which a reset raises.

All hosts agree on it through a counter of the engine. While it is unknown, nothing is read or
written. Each value of the counter has two generations: one for hosts that were reset themselves
since their start, and one for all others. Only the former may have weights that were updated in
place. A new counter begins at the wall-clock time. So if the server loses the counter, the new
value is never one that had blocks.

A second counter holds the mark of the last reset: about the time at which it began. A reset raises
the mark before the generation. A host that sees another generation reads the mark, and so learns
whether there was a reset, or the server lost its counters. A mark may be passed on
several times; its reset is carried out once.

Two hosts may reset at the same time. Blocks that one of them stored after its own reset may be
older than the reset of the other. If a host finds a mark that it did not know when its reset began,
it keeps a smaller mark as its own. Its blocks then count as older than the last reset.

A counter below the mark, or below an earlier value, stands for blocks from before the last reset.
Either that reset is half done, or the server went back to an older state. A host that sees such a
counter raises it.

A mark below a known one, or none, means that the server lost it. A host that missed the reset may
have stored older blocks since then, in any generation up to the present one. So a host that knows
the mark raises the generation, restores the mark, and raises the generation again: for others that
know the mark, and ask before it is back; and for blocks that were stored before it was.

While requests use the generation, it is read again in the background before it is too old for them.
So a request waits for it only after a pause.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..base import RESET_TICKS_PER_S
from .base import FAILURES, CounterAnswer, RemoteEngine, RemoteOutcome
from .objects import generation_of

GENERATION_FRESH_S = 5.0
"""Age after which the generation is not used. Another host's reset is seen no later."""
CLOCKS_DIFFER_S = 60
"""Most seconds by which the clocks of two hosts may differ. A mark that is further ahead is of a
wrong clock, and does not tell whether the namespace had a reset: resets are carried out."""
REFRESH_S = 4.0
"""Age after which the generation is read again in the background."""
IN_USE_S = 60.0
"""Time after the last use for which the generation is read in the background."""


@dataclass(slots=True)
class _Reset:
    """A reset of this host that the server is to be told."""

    mark: int
    """0: the time at which the server is told."""
    is_new: bool
    known: int
    """Greatest mark that this host had heard of when the reset began."""
    own_mark: int | None = None
    """Mark of what this host stored since the reset began; None until the server has the mark."""
    is_raised: bool = True
    """False if the namespace had this reset already."""


class _Counters:
    """The two counters of a namespace on its server. One thread at a time."""

    def __init__(
        self,
        engine: RemoteEngine,
        name: str,
        marks_name: str,
        on_asked: Callable[[RemoteOutcome, int, float], None],
        *,
        may_begin: bool,
    ) -> None:
        self._engine = engine
        self.may_begin = may_begin
        self._name = name
        self._marks_name = marks_name
        self._on_asked = on_asked
        self._requests = 0
        """Number of requests since the last report."""
        self.has_lost_mark = False
        """True from a mark that the server lost until the generation is raised."""

    def report(self, outcome: RemoteOutcome, took_s: float) -> None:
        """Report the end of an exchange with the server, and its requests."""
        self._on_asked(outcome, self._requests, took_s)
        self._requests = 0

    def _sent(self, answer: CounterAnswer) -> CounterAnswer:
        self._requests += answer.requests
        return answer

    def generation(self, begins_at: int, limit_s: float) -> CounterAnswer:
        """Read the counter of generations. If there is none, one begins at this value.

        A host that writes nothing begins none. It reads 0: no block has that generation.
        """
        if self.may_begin:
            return self._sent(self._engine.counter(self._name, begins_at, limit_s))
        return self._read(self._name, limit_s)

    def raise_generation(self, least: int, limit_s: float) -> CounterAnswer:
        """Raise the counter of generations, to `least` or more."""
        raised = self._sent(self._engine.advance(self._name, least, limit_s))
        self.has_lost_mark &= raised.outcome is not RemoteOutcome.OK
        return raised

    def last_mark(self, limit_s: float) -> CounterAnswer:
        """Read the mark of the last reset; 0 if there is none."""
        return self._read(self._marks_name, limit_s)

    def _read(self, name: str, limit_s: float) -> CounterAnswer:
        """Read a counter; 0 if there is none."""
        found = self._sent(self._engine.counter(name, None, limit_s))
        is_none = found.outcome is RemoteOutcome.ABSENT
        return CounterAnswer(RemoteOutcome.OK) if is_none else found

    def restore_mark(self, known: int, limit_s: float) -> CounterAnswer:
        """Bring back a mark that the server lost. Return it, or a later one of another host."""
        self.has_lost_mark = True
        marked = self._sent(self._engine.counter(self._marks_name, known, limit_s))
        is_older = marked.outcome is RemoteOutcome.OK and marked.value < known
        return self.raise_mark(known, limit_s) if is_older else marked

    def raise_mark(self, least: int, limit_s: float) -> CounterAnswer:
        """Raise the mark of the last reset, to `least` or more."""
        return self._sent(self._engine.advance(self._marks_name, least, limit_s))


class SharedGeneration:
    """The current generation. Any thread."""

    def __init__(
        self,
        engine: RemoteEngine,
        name: str,
        marks_name: str,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        on_moved: Callable[[], None] = lambda: None,
        on_asked: Callable[[RemoteOutcome, int, float], None] = lambda outcome, requests, s: None,
        *,
        was_reset: bool = False,
        may_begin: bool = True,
    ) -> None:
        """`name`, `marks_name`: those of the counters of generations and of the last mark.

        `clock` is monotonic, `wall_clock` Unix time, in seconds. `on_moved` is called, on any
        thread, when the counter is another one without a reset of this host. `on_asked` takes
        the outcome, the number of requests and the seconds of each exchange with the server.
        `was_reset`: this host was reset before, by another object of this class. `may_begin`: this
        host begins a counter that is missing, since it will write blocks.
        """
        self._on_moved = on_moved
        self._counters = _Counters(engine, name, marks_name, on_asked, may_begin=may_begin)
        self._clock = clock
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        """Held while the server is asked."""
        self._changing = threading.Lock()
        """Held while what is known changes; never while the server is asked."""
        self.value: int | None = None
        """The generation as it was last read; None if it is unknown."""
        self._read_s = self._used_s = 0.0
        self._reset: _Reset | None = None
        """The last reset, until all hosts are told."""
        self.mark = 0
        """Mark of the last reset by any host, as it was last read; 0 if there was none."""
        self._newest = 0
        """Greatest value of the counter that was read."""
        self._was_reset = was_reset
        self.own_mark: int | None = None
        """Mark of the last reset of this host, or else of the one before its start.

        None until the server was asked or told. If `mark` is greater, another host has reset the
        namespace since then.
        """
        self._last: CounterAnswer | None = None
        """Answer of the last attempt to ask the server."""

    @property
    def is_reset_pending(self) -> bool:
        """True from `reset` until all hosts are told."""
        return self._reset is not None

    def reset(self, mark: int = 0, *, is_new: bool = True, known: int | None = None) -> None:
        """Make the generation unknown until it was raised. Returns at once.

        `mark`: that of the reset; 0: the time. Without `is_new` it came from another tier, and is
        done if the namespace had a reset of this mark or a later one. `known`: greatest mark that
        the caller had heard of when the reset began; None: the greatest one heard of here.
        """
        with self._changing:
            if self._reset is not None:
                mark, is_new = max(mark, self._reset.mark), is_new or self._reset.is_new
            self._was_reset = self._was_reset or is_new
            self._reset = _Reset(mark, is_new, self.mark if known is None else known)
            self.value = self.own_mark = None

    @property
    def is_due(self) -> bool:
        """True if requests use the generation, and it will soon be too old for them."""
        now_s = self._clock()
        is_in_use = self.value is not None and now_s - self._used_s < IN_USE_S
        return is_in_use and now_s - self._read_s >= REFRESH_S

    def current(self, limit_s: float) -> CounterAnswer:
        """Return the generation for a request; reads or raises the counter first if it must."""
        now_s = self._used_s = self._clock()
        return self._fresh(now_s, GENERATION_FRESH_S) or self._ask(GENERATION_FRESH_S, limit_s)

    def refresh(self, limit_s: float) -> RemoteOutcome:
        """Read or raise the counter if that is due. No request needs it yet."""
        return self._ask(REFRESH_S, limit_s).outcome

    def _fresh(self, now_s: float, fresh_s: float) -> CounterAnswer | None:
        """Return the generation if it is known and younger than `fresh_s`."""
        with self._changing:
            if self.value is None or self._reset is not None or now_s - self._read_s >= fresh_s:
                return None
            return CounterAnswer(RemoteOutcome.OK, self.value)

    def _ask(self, fresh_s: float, limit_s: float) -> CounterAnswer:
        seen = self._last
        with self._lock:
            last = self._last
            if last is not None and last is not seen and last.outcome is not RemoteOutcome.OK:
                return last  # of a call that was waited for: the next one would fail too
            reset, begun_s = self._reset, self._clock()
            fresh = self._fresh(begun_s, fresh_s)
            if fresh is not None:
                return fresh
            now = int(self._wall_clock() * RESET_TICKS_PER_S)
            mark = 0
            if reset is None:
                answer = self._counters.generation(now, limit_s)
            else:
                answer = self._raise(reset, now, limit_s)
            if answer.outcome is RemoteOutcome.OK:
                answer, mark = self._made_good(answer, now, limit_s)
            if answer.outcome is not RemoteOutcome.OK and answer.outcome not in FAILURES:
                # The outcome of a counter says nothing about a block, and must open the breaker.
                answer = replace(answer, outcome=RemoteOutcome.IO_ERROR)
            self._counters.report(answer.outcome, self._clock() - begun_s)
            self._last = answer
            if answer.outcome is not RemoteOutcome.OK:
                with self._changing:
                    self.value = None
                return answer
            return self._take_in(answer, mark, reset, begun_s)

    def _take_in(
        self, answer: CounterAnswer, mark: int, reset: _Reset | None, read_s: float
    ) -> CounterAnswer:
        """Note the counter and the last mark, as they are after this reset, if there was one.

        `read_s`: time before the server was asked. Later resets by others may not be in the answer.
        """
        with self._changing:
            if self._reset is not reset:  # another reset came meanwhile
                return CounterAnswer(RemoteOutcome.BUSY)
            self._reset = None
            if self.own_mark is not None and answer.value != self._newest:
                self._on_moved()
            self.mark = max(self.mark, mark)
            if self.own_mark is None:
                self.own_mark = mark if reset is None else reset.own_mark
            self._newest = max(self._newest, answer.value)
            value = generation_of(answer.value, was_reset=self._was_reset)
            self.value, self._read_s = value, read_s
            return CounterAnswer(RemoteOutcome.OK, value)

    def _made_good(
        self, answer: CounterAnswer, now: int, limit_s: float
    ) -> tuple[CounterAnswer, int]:
        """Return the counter, raised if it must be, and the mark of the last reset.

        The mark is read after the counter, so that it is no older. A host that writes nothing
        raises none. It finds no blocks until others have done it.
        """
        counters = self._counters
        marked = counters.last_mark(limit_s)
        if marked.outcome is not RemoteOutcome.OK:
            return marked, 0
        least = max(now, marked.value, self._newest + 1)
        is_mark_lost = marked.value < self.mark
        is_behind = answer.value < max(self._newest, marked.value)
        if (is_mark_lost or is_behind) and not counters.may_begin:
            return CounterAnswer(RemoteOutcome.OK), marked.value  # others repair the counters
        if is_mark_lost:
            raised = counters.raise_generation(least, limit_s)
            if raised.outcome is not RemoteOutcome.OK:
                return raised, 0
            marked = counters.restore_mark(self.mark, limit_s)
            if marked.outcome is not RemoteOutcome.OK:
                return marked, 0
        if counters.has_lost_mark or answer.value < max(self._newest, marked.value):
            answer = counters.raise_generation(max(least, marked.value), limit_s)
        return answer, marked.value

    def _raise(self, reset: _Reset, now: int, limit_s: float) -> CounterAnswer:
        """Carry out a reset: raise the mark, and then the counter, which is returned."""
        if reset.own_mark is None:
            marked = self._tell(reset, now, limit_s)
            if marked.outcome is not RemoteOutcome.OK:
                return marked
        counters = self._counters
        ask = counters.raise_generation if reset.is_raised else counters.generation
        return ask(now, limit_s)

    def _tell(self, reset: _Reset, now: int, limit_s: float) -> CounterAnswer:
        """Raise the mark, unless the namespace had this reset. Return the last answer."""
        last = self._counters.last_mark(limit_s)
        if last.outcome is not RemoteOutcome.OK:
            return last
        mark = max(last.value, self.mark)
        is_foreign = mark > reset.known and mark != reset.mark
        is_ahead = reset.mark <= now + CLOCKS_DIFFER_S * RESET_TICKS_PER_S < mark
        reset.is_raised = reset.is_new or mark < reset.mark or is_ahead
        if not reset.is_raised:
            reset.own_mark = reset.mark if is_foreign else mark
            return last
        raised = self._counters.raise_mark(reset.mark or now, limit_s)
        if raised.outcome is RemoteOutcome.OK:
            reset.own_mark = reset.known if is_foreign else raised.value
        return raised
