"""Transfers between the caller's buffers and the node of a path, through an arena of the cache.

A call sends jobs of a few blocks each, so that copying overlaps with I/O. A call that runs out of
time leaves its jobs behind. Their slots are used again only after the node has answered.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt

from .block_buffers import Bytes
from .handlers.node.bounce import give_back, huge_pages
from .handlers.node.node_keeper import WAIT_SLICE_S, NodeKeeper
from .handlers.node.path.path_jobs import PART_BYTES
from .handlers.node.path_wire import GetJob, JobDone, PutJob, unpack_outcomes
from .tiers.base import BlockOutcome
from .tiers.nvme.path.path_messages import pack_slots

MIN_SLOTS = 2
"""Fewest blocks in the arena: one is copied while another one is transferred."""
RETRY_PAUSE_S = 0.02
"""Pause before blocks are offered again that were not taken."""


@dataclass(slots=True)
class MoveJob:
    """Blocks that were sent to the node together."""

    positions: list[int]
    """Positions of the blocks in the call."""
    slots: list[int]
    """Slots of the arena, one for each block."""
    done: JobDone | None = None
    has_ended: bool = False

    def end(self, done: JobDone | None) -> None:
        """Note the answer, in any thread that calls a method of the client."""
        self.done, self.has_ended = done, True

    @property
    def packed_slots(self) -> bytes:
        """The slots as they are sent."""
        return pack_slots(self.slots)

    @property
    def outcomes(self) -> list[BlockOutcome]:
        """Outcome of each block."""
        if self.done is None:
            return [BlockOutcome.IO_ERROR] * len(self.positions)
        return unpack_outcomes(self.done.outcomes, len(self.positions))


class Move(ABC):
    """The blocks of one call. Subclasses know the direction."""

    def __init__(self, keys: Sequence[bytes], positions: Sequence[int], limit_s: float) -> None:
        """`positions` are those of the keys to move."""
        self.keys = keys
        self.todo = deque(positions)
        """Blocks that are not moved yet and not under way."""
        self.jobs: list[MoveJob] = []
        """Jobs that are under way."""
        self._end_s = monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Time left for the call, in seconds; 0 if none is."""
        return max(0.0, self._end_s - monotonic())

    @property
    def ended(self) -> list[MoveJob]:
        """Jobs that have ended and whose outcomes are not taken yet."""
        return [job for job in self.jobs if job.has_ended]

    @abstractmethod
    def job_maker(self, job: MoveJob, arena: Bytes) -> Callable[[int], Any]:
        """Prepare the job's slots of the arena; return a function from its ticket to its message.

        `arena` has the shape (slots, block bytes).
        """

    @abstractmethod
    def land(self, job: MoveJob, arena: Bytes) -> list[int]:
        """Take the outcomes of a job; return the positions of blocks to send again."""


class PutMove(Move):
    """Blocks that are written."""

    def __init__(
        self,
        keys: Sequence[bytes],
        positions: Sequence[int],
        limit_s: float,
        views: Sequence[Bytes],
        epoch: int | None,
    ) -> None:
        """`views` are the bytes of each key's block; `epoch` is that of the blocks."""
        super().__init__(keys, positions, limit_s)
        self.outcomes = [BlockOutcome.CANCELLED] * len(keys)
        """Outcome of each block; CANCELLED without one."""
        self._views = views
        self._epoch = epoch

    def job_maker(self, job: MoveJob, arena: Bytes) -> Callable[[int], PutJob]:
        for slot, at in zip(job.slots, job.positions, strict=True):
            np.copyto(arena[slot], self._views[at])
        keys = [self.keys[at] for at in job.positions]
        return lambda ticket: PutJob(ticket, keys, job.packed_slots, self._epoch)

    def land(self, job: MoveJob, arena: Bytes) -> list[int]:
        for at, outcome in zip(job.positions, job.outcomes, strict=True):
            self.outcomes[at] = outcome
        return [at for at in job.positions if self.outcomes[at] is BlockOutcome.CANCELLED]


class GetMove(Move):
    """Blocks that are read."""

    def __init__(
        self,
        keys: Sequence[bytes],
        positions: Sequence[int],
        limit_s: float,
        views: Sequence[Bytes] | None,
    ) -> None:
        """`views` are filled with the blocks; without them each block gets an array of its own."""
        super().__init__(keys, positions, limit_s)
        self.read: dict[int, Bytes] = {}
        """Bytes of the blocks that were read and verified, by position."""
        self._views = views

    def job_maker(self, job: MoveJob, arena: Bytes) -> Callable[[int], GetJob]:
        keys = [self.keys[at] for at in job.positions]
        return lambda ticket: GetJob(ticket, keys, job.packed_slots)

    def land(self, job: MoveJob, arena: Bytes) -> list[int]:
        for at, slot, outcome in zip(job.positions, job.slots, job.outcomes, strict=True):
            if outcome is BlockOutcome.OK:
                view = np.empty_like(arena[slot]) if self._views is None else self._views[at]
                np.copyto(view, arena[slot])
                self.read[at] = view
        return []


def _wait_until(is_done: Callable[[], bool], changed: threading.Condition, limit_s: float) -> bool:
    """Wait until the condition holds or the time is over. Return True if the condition holds.

    The caller holds the lock of `changed`. An interrupt of another thread may lose a notification,
    so `is_done` is also called after each slice of time.
    """
    end_s = monotonic() + limit_s
    while not is_done():
        left_s = end_s - monotonic()
        if left_s <= 0:
            return False
        changed.wait(min(left_s, WAIT_SLICE_S))
    return True


class RunningCalls:
    """The calls that have begun and not ended, so that `close` can wait for them. Any thread."""

    def __init__(self) -> None:
        self._threads: dict[object, int] = {}
        """Thread of each call. A thread is there twice if a signal interrupted its call."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @contextmanager
    def one(self, check: Callable[[], None]) -> Iterator[None]:
        """Context of a call. It does not begin if `check` raises an error."""
        call = object()
        try:
            with self._lock:
                check()
                self._threads[call] = threading.get_ident()
            yield
        finally:
            self._threads.pop(call, None)  # first: an interrupt may end the wait for the lock
            with self._lock:
                self._changed.notify_all()

    def wait(self, limit_s: float) -> bool:
        """Wait until the calls of other threads have ended, or the time is over.

        Return True if no call is left, this thread's neither.
        """
        thread = threading.get_ident()
        with self._lock:
            _wait_until(lambda: set(self._threads.values()) <= {thread}, self._changed, limit_s)
            return not self._threads


class BlockMoves:
    """The arena of a cache, and its calls: one moves blocks at a time. Any thread."""

    def __init__(self, block_bytes: int, buffer_bytes: int) -> None:
        self.slots = max(MIN_SLOTS, buffer_bytes // block_bytes)
        """Number of blocks in the arena."""
        self.memory = huge_pages(self.slots * block_bytes)
        """The arena, for the node."""
        self._arena: npt.NDArray[np.uint8] = np.frombuffer(self.memory, np.uint8)
        self._arena = self._arena.reshape(self.slots, block_bytes)
        self._most = max(1, PART_BYTES // block_bytes)
        """Most blocks of one job."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        """Notified when a turn ends. Enter the lock: an interrupt may leave a condition locked."""
        self._mover: Move | None = None
        """Call that has its turn."""
        self._free = list(range(self.slots))
        self._left: list[MoveJob] = []
        """Jobs of calls that ran out of time, or that an error ended."""

    def run(self, move: Move, client: NodeKeeper, check: Callable[[], None]) -> None:
        """Move blocks until all have an outcome or the time of the call is over.

        `check` raises an error if it is of no use to go on.
        """
        try:
            if move.todo and self._has_turn(move):
                self._count_free(client)
                while move.todo or move.jobs:
                    check()
                    self._step(move, client)
                    if not move.left_s:
                        return
        finally:
            if self._mover is move:
                self._left += move.jobs
                self._mover = None  # first: an interrupt may end the wait for the lock
                with self._lock:
                    self._changed.notify_all()

    def give_back(self) -> None:
        """Free the memory of the arena before its last user is gone. No call may follow."""
        give_back(self.memory)

    # -- inside, for the call that has its turn ------------------------------------------------

    def _has_turn(self, move: Move) -> bool:
        """Wait until no other call moves blocks. Return False if the time is over before that."""
        with self._lock:
            if _wait_until(lambda: self._mover in (None, move), self._changed, move.left_s):
                self._mover = move
            return self._mover is move

    def _count_free(self, client: NodeKeeper) -> None:
        """Begin a turn: all slots are free but those of jobs that the node has.

        An interrupt may have ended the last turn between any two instructions.
        """
        self._left = [job for job in self._left if not job.has_ended and client.has_job(job.end)]
        taken = {slot for job in self._left for slot in job.slots}
        self._free = [slot for slot in range(self.slots) if slot not in taken]

    def _step(self, move: Move, client: NodeKeeper) -> None:
        """Send jobs, wait for an answer, and take the answers."""
        self._take_back()
        is_taken = True
        while move.todo and self._free and is_taken:
            is_taken = self._submit(move, client)
        limit_s = move.left_s if move.jobs or not self._free else min(RETRY_PAUSE_S, move.left_s)
        client.wait(lambda: bool(move.ended) or self._has_back, limit_s)
        again: list[int] = []
        for job in move.ended:
            again += move.land(job, self._arena)
            move.jobs.remove(job)
            self._free += job.slots
        if again:
            client.wait(lambda: False, min(RETRY_PAUSE_S, move.left_s))
            move.todo.extendleft(reversed(again))

    def _submit(self, move: Move, client: NodeKeeper) -> bool:
        """Send the next blocks; return False if the node takes none now."""
        count = min(len(move.todo), len(self._free), self._most)
        positions = [move.todo.popleft() for _ in range(count)]
        job = MoveJob(positions, [self._free.pop() for _ in range(count)])
        move.jobs.append(job)  # first: after an interrupt, the node may have the job
        if client.submit(move.job_maker(job, self._arena), job.end):
            return True
        move.jobs.pop()
        move.todo.extendleft(reversed(positions))
        self._free += job.slots
        return False

    @property
    def _has_back(self) -> bool:
        return any(job.has_ended for job in self._left)

    def _take_back(self) -> None:
        """Take back the slots of ended jobs whose call did not take them."""
        for job in [job for job in self._left if job.has_ended]:
            self._left.remove(job)
            self._free += job.slots
