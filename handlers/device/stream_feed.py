"""Work for the two GPU streams of a direction, handed out so that neither queue fills up.

A stream's queue holds about 1,000 operations (vLLM's pull request 29013). A thread that adds
another one waits until the GPU has done one. So a feed keeps at most `OUTSTANDING_MAX` operations
in each queue. The rest of the work stays with the feed until earlier operations have ended. An
event on each stream, behind each group of operations, shows that they have ended.

With one kernel and one batched copy a piece, 9 GB fit into the queues, and a job is handed out as a
whole. A feed holds back jobs of many small operations only.

The feed belongs to the thread that submits. Only `push` blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

OUTSTANDING_MAX = 896
"""Limit of the operations in the queue of each stream. The last step of a turn may exceed it."""
TURN_OPERATIONS = 64
"""Operations of the busier stream from one mark to the next."""


class Operations(NamedTuple):
    """Operations that a step of work gave to each stream."""

    kernels: int
    copies: int


Work = Iterator[Operations]
"""Enqueues operations as it is iterated, a few at each step."""


Mark = tuple[Any, ...]
"""Place behind everything that the streams were given: an event on each stream. Its methods raise
`RuntimeError` if the GPU is lost; nothing is under way then."""


class StreamFeed:
    """Hands out work in the order in which it came."""

    def __init__(self, mark: Callable[[], Mark], *, outstanding_max: int = OUTSTANDING_MAX) -> None:
        """`mark` enqueues an operation on each stream. It must not raise."""
        self._mark = mark
        self._outstanding_max = outstanding_max
        self._kernels = self._copies = 0
        self._work: deque[Work] = deque()
        self._turns: deque[tuple[Mark, Operations]] = deque()
        """Turns that have not ended: the mark behind each turn, and the operations of the turn."""

    @property
    def has_work(self) -> bool:
        """True if not everything has been handed out."""
        return bool(self._work)

    def add(self, work: Work) -> None:
        """Take work. Nothing of it is done before the next `advance` or `push`."""
        self._work.append(work)

    def advance(self) -> None:
        """Hand out as much work as the queues have room for. Never blocks."""
        while self._turns and _has_ended(self._turns[0][0]):
            _, ended = self._turns.popleft()
            self._kernels -= ended.kernels
            self._copies -= ended.copies
        while self._work and self._has_room():
            self._take_turn()

    def push(self) -> None:
        """Hand out more work. If there is no room, wait until the oldest turn has ended."""
        if self._turns and not self._has_room():
            with suppress(RuntimeError):
                for event in self._turns[0][0]:
                    event.synchronize()
        self.advance()

    def drop(self) -> None:
        """Forget the work that has not been handed out."""
        self._work.clear()

    def _has_room(self) -> bool:
        return max(self._kernels, self._copies) + TURN_OPERATIONS <= self._outstanding_max

    def _take_turn(self) -> None:
        kernels = copies = 1  # the mark
        while self._work and max(kernels, copies) < TURN_OPERATIONS:
            step = next(self._work[0], None)
            if step is None:
                self._work.popleft()
            else:
                kernels += step.kernels
                copies += step.copies
        self._turns.append((self._mark(), Operations(kernels, copies)))
        self._kernels += kernels
        self._copies += copies


def _has_ended(mark: Mark) -> bool:
    """Return True if everything before the mark has ended."""
    try:
        return all(event.query() for event in mark)
    except RuntimeError:
        return True
