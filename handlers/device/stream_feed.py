"""Work for one GPU stream, handed out so that the stream's queue never fills up.

The queue holds about 1,000 operations (vLLM met the limit in its pull request 29013). Who adds
another one waits until the GPU has done one, 180 µs instead of 2: a worker's main thread that hands
out a job of 4,000 at once is kept until most of it is copied, and no request decodes meanwhile. So
a feed keeps `OUTSTANDING_MAX` in the queue at most, and the rest of the work with itself until
earlier operations have ended, which it knows from a mark, an event, behind each turn.

Belongs to the thread that submits. Only `push` blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Protocol

OUTSTANDING_MAX = 512
"""Operations in the stream's queue, and at most one step of work beyond: half of what it holds."""
TURN_OPERATIONS = 128
"""Operations from one mark to the next: as the first of four turns ends the next one follows, and
the GPU is never without work while somebody pushes."""

Work = Iterator[int]
"""Enqueues operations as it is iterated; each step yields how many it enqueued, a few at most."""


class Mark(Protocol):
    """An event behind what the stream was given. Either call may raise `RuntimeError`: the GPU is
    lost, and nothing is under way any more."""

    def query(self) -> bool:
        """True if all of it has ended."""
        ...

    def synchronize(self) -> None:
        """Block until all of it has ended."""
        ...


class StreamFeed:
    """Hands out work in the order in which it came."""

    def __init__(self, mark: Callable[[], Mark], *, outstanding_max: int = OUTSTANDING_MAX) -> None:
        """`mark` puts a mark into the stream; it counts as an operation and must not raise."""
        self._mark = mark
        self._outstanding_max = outstanding_max
        self._outstanding = 0
        self._work: deque[Work] = deque()
        self._turns: deque[tuple[Mark, int]] = deque()
        """The marks in the stream, and the operations up to each."""

    @property
    def has_work(self) -> bool:
        """True if not everything has been handed out."""
        return bool(self._work)

    def add(self, work: Work) -> None:
        """Take work; nothing of it is done before the next `advance` or `push`."""
        self._work.append(work)

    def advance(self) -> None:
        """Hand out what there is room for. Never blocks."""
        while self._turns and _has_ended(self._turns[0][0]):
            self._outstanding -= self._turns.popleft()[1]
        while self._work and self._has_room():
            self._take_turn()

    def push(self) -> None:
        """Hand out more, after the oldest turn has ended if there is no room."""
        if self._turns and not self._has_room():
            with suppress(RuntimeError):
                self._turns[0][0].synchronize()
        self.advance()

    def drop(self) -> None:
        """Forget what has not been handed out."""
        self._work.clear()

    def _has_room(self) -> bool:
        return self._outstanding + TURN_OPERATIONS <= self._outstanding_max

    def _take_turn(self) -> None:
        operations = 1  # the mark
        while self._work and operations < TURN_OPERATIONS:
            step = next(self._work[0], None)
            if step is None:
                self._work.popleft()
            else:
                operations += step
        self._turns.append((self._mark(), operations))
        self._outstanding += operations


def _has_ended(mark: Mark) -> bool:
    try:
        return mark.query()
    except RuntimeError:
        return True
