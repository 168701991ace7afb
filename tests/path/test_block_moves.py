"""Transfers between a caller and the node, whose answers a test gives."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, cast

import numpy as np
import pytest
from support.keys import key

from kvcascade.block_buffers import Bytes
from kvcascade.block_moves import BlockMoves, GetMove, MoveJob, PutMove, RunningCalls
from kvcascade.handlers.node.node_keeper import WAIT_SLICE_S, NodeKeeper
from kvcascade.handlers.node.path.path_jobs import PART_BYTES
from kvcascade.handlers.node.path_wire import JobDone, PutJob, pack_outcomes
from kvcascade.tiers.base import BlockOutcome

BLOCK = 4096
INTERRUPTS = 200
INTERRUPT_INTERVAL_S = 0.001


def content(number: int) -> Bytes:
    """Bytes of a block."""
    return np.full(BLOCK, number, np.uint8)


class HeldClient(NodeKeeper):
    """A node that answers when it is told to. It has no process, so nothing else works."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Any, Callable[[Any], None]]] = []
        self.answers: Callable[[Any], JobDone | None] | None = None

    def submit(self, make_job: Callable[[int], Any], on_end: Callable[[Any], None]) -> bool:
        self.jobs.append((make_job(len(self.jobs) + 1), on_end))
        return True

    def has_job(self, on_end: Callable[[Any], None]) -> bool:
        return any(one == on_end for _, one in self.jobs)

    def wait(self, is_done: Callable[[], bool], limit_s: float) -> bool:
        if self.answers is not None:
            self.answer(self.answers)
        return is_done()

    def answer(self, done_of: Callable[[Any], JobDone | None]) -> None:
        """End every job."""
        jobs, self.jobs = self.jobs, []
        for message, on_end in jobs:
            on_end(done_of(message))


def test_slots_of_a_call_that_ran_out_of_time_are_not_used_before_the_answer() -> None:
    moves, client = BlockMoves(BLOCK, 2 * BLOCK), HeldClient()
    names = [key(n) for n in range(2)]
    blocks = [content(n) for n in range(2)]
    late = PutMove(names, [0, 1], 0.0, blocks, 0)
    moves._mover = PutMove([], [], 0.0, [], 0)
    moves.run(late, client, lambda: None)
    assert not client.jobs, "it had no turn"
    moves._mover = None
    late = PutMove(names, [0, 1], 0.01, blocks, 0)
    moves.run(late, client, lambda: None)
    assert late.outcomes == [BlockOutcome.CANCELLED] * 2 and len(client.jobs) == 1
    before = bytes(moves.memory)
    other = PutMove([key(5)], [0], 0.01, [content(5)], 0)
    moves.run(other, client, lambda: None)
    assert bytes(moves.memory) == before, "the node may still read these slots"
    client.answers = lambda message: JobDone(message.ticket)
    other = PutMove([key(5)], [0], 10.0, [content(5)], 0)
    moves.run(other, client, lambda: None)
    assert other.outcomes == [BlockOutcome.OK] and not client.jobs


def test_a_node_that_died_costs_its_blocks_and_refused_blocks_are_offered_again() -> None:
    moves, client = BlockMoves(BLOCK, 4 * BLOCK), HeldClient()
    client.answers = lambda message: None
    read = GetMove([key(0)], [0], 10.0, None)
    moves.run(read, client, lambda: None)
    assert not read.read
    offered: list[Any] = []

    def later(message: Any) -> JobDone:
        offered.append(message)
        outcome = BlockOutcome.CANCELLED if len(offered) < 3 else BlockOutcome.OK
        return JobDone(message.ticket, pack_outcomes((outcome,)))

    client.answers = later
    put = PutMove([key(0)], [0], 10.0, [content(0)], 3)
    moves.run(put, client, lambda: None)
    assert put.outcomes == [BlockOutcome.OK] and len(offered) == 3
    assert all(isinstance(each, PutJob) and each.epoch == 3 for each in offered)


class InterruptedClient(HeldClient):
    """A node whose first `submit` raises an error, before or after the job was sent."""

    def __init__(self, *, is_sent: bool) -> None:
        super().__init__()
        self._is_sent = is_sent
        self._is_first = True

    def submit(self, make_job: Callable[[int], Any], on_end: Callable[[Any], None]) -> bool:
        was_first, self._is_first = self._is_first, False
        if self._is_sent or not was_first:
            super().submit(make_job, on_end)
        if was_first:
            raise TimeoutError
        return True


@pytest.mark.parametrize("is_sent", [False, True])
def test_an_error_frees_the_slots_of_a_job_unless_the_node_has_it(is_sent: bool) -> None:
    moves, client = BlockMoves(BLOCK, 2 * BLOCK), InterruptedClient(is_sent=is_sent)
    names, blocks = [key(n) for n in range(2)], [content(n) for n in range(2)]
    with pytest.raises(TimeoutError):
        moves.run(PutMove(names, [0, 1], 10.0, blocks, 0), client, lambda: None)
    before = bytes(moves.memory)
    other = [content(9)] * 2
    moves.run(PutMove(names, [0, 1], 0.01, other, 0), client, lambda: None)
    assert len(client.jobs) == 1, "the node has the first job, or else the second"
    assert (bytes(moves.memory) == before) == is_sent, "it may still read the slots"
    client.answers = lambda message: JobDone(message.ticket)
    put = PutMove(names, [0, 1], 10.0, blocks, 0)
    moves.run(put, client, lambda: None)
    assert put.outcomes == [BlockOutcome.OK] * 2


def opcodes_of(function: Any, at: int) -> Callable[[Any, str, Any], Any]:
    """Return a tracer that raises an interrupt before the instruction `at` of a function."""
    seen = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal seen
        if frame.f_code is not function.__code__:
            return trace
        frame.f_trace_opcodes = True
        if event == "opcode":
            seen += 1
            if seen == at:
                raise KeyboardInterrupt
        return trace

    return trace


@pytest.mark.parametrize("name", ["_submit", "_step", "_take_back", "_count_free"])
def test_an_interrupt_at_any_instruction_loses_no_slot(name: str) -> None:
    names, function, at = [key(n) for n in range(8)], getattr(BlockMoves, name), 0
    has_raised = True
    while has_raised:
        at, has_raised = at + 1, False
        moves, client = BlockMoves(BLOCK, 8 * BLOCK), HeldClient()
        moves.run(PutMove(names, [*range(8)], 0.0, [content(0)] * 8, 0), client, lambda: None)
        client.answers = lambda message: JobDone(message.ticket)
        read = GetMove(names, [*range(8)], 10.0, None)
        before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # Python 3.12 asks the frame that sets the tracer
        sys.settrace(opcodes_of(function, at))
        try:
            moves.run(read, client, lambda: None)
        except KeyboardInterrupt:
            has_raised = True
        finally:
            sys.settrace(before)
        after = GetMove(names, [*range(8)], 10.0, None)
        moves.run(after, client, lambda: None)
        assert len(after.read) == 8 and sorted(moves._free) == [*range(8)], at
    assert at > 10


class InterruptedRead(GetMove):
    """A read that is interrupted while a block is copied."""

    def land(self, job: MoveJob, arena: Bytes) -> list[int]:
        raise KeyboardInterrupt


def test_an_error_while_a_block_is_copied_frees_the_slots_of_every_job() -> None:
    moves, client = BlockMoves(PART_BYTES, 2 * PART_BYTES), HeldClient()
    client.answers = lambda message: JobDone(message.ticket)
    names = [key(n) for n in range(2)]
    with pytest.raises(KeyboardInterrupt):
        moves.run(InterruptedRead(names, [0, 1], 10.0, None), client, lambda: None)
    read = GetMove(names, [0, 1], 10.0, None)
    moves.run(read, client, lambda: None)
    assert len(read.read) == len(names)
    assert len(moves._free) == moves.slots


def interrupted(work: Callable[[], object]) -> Iterator[None]:
    """Do work again and again; go on after each interrupt, which comes at a moment of chance."""
    is_working = False

    def interrupt(*_: object) -> None:
        nonlocal is_working
        if is_working:
            is_working = False
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, INTERRUPT_INTERVAL_S, INTERRUPT_INTERVAL_S)
    try:
        for _ in range(INTERRUPTS):
            with suppress(KeyboardInterrupt):
                is_working = True
                while True:
                    with suppress(TimeoutError):
                        work()
            yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def stop() -> None:
    raise TimeoutError


def test_an_interrupt_at_any_moment_leaves_the_turn_to_the_next_call() -> None:
    moves, client = BlockMoves(BLOCK, 2 * BLOCK), HeldClient()
    client.answers = lambda message: JobDone(message.ticket)

    def move(check: Callable[[], None]) -> GetMove:
        read = GetMove([key(0)], [0], 0.0, None)
        moves.run(read, client, check)
        return read

    for _ in interrupted(lambda: move(stop)):
        assert move(lambda: None).read


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="`with` may leave its lock held there")
def test_an_interrupt_at_any_moment_keeps_no_other_thread_from_its_call() -> None:
    calls = RunningCalls()
    changed: Any = calls._changed

    def call() -> None:
        with calls.one(lambda: None):
            """It ends at once."""

    for _ in interrupted(call):
        assert not changed._is_owned()


class InterruptedLock:
    """A lock with an interrupt in one of its uses.

    It comes just after the release, or while another thread makes the caller wait.
    """

    def __init__(self, lock: Any, at_use: int, *, is_waiting: bool) -> None:
        self._lock = lock
        self._left = at_use
        self._is_waiting = is_waiting

    def __enter__(self) -> None:
        self._left -= 1
        if self._is_waiting:
            self._interrupt()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if not self._is_waiting:
            self._interrupt()

    def _interrupt(self) -> None:
        if self._left == 0:
            raise KeyboardInterrupt


USES = [(1, False), (1, True), (2, False), (2, True)]
"""Uses of the lock in a call that meets no other one, and whether each is interrupted in a wait."""


@pytest.mark.parametrize(("at_use", "is_waiting"), USES)
def test_an_interrupt_at_the_lock_leaves_the_turn_to_the_next_call(
    at_use: int, is_waiting: bool
) -> None:
    moves, client = BlockMoves(BLOCK, 2 * BLOCK), HeldClient()
    client.answers = lambda message: JobDone(message.ticket)
    lock = moves._lock
    moves._lock = cast(Any, InterruptedLock(lock, at_use, is_waiting=is_waiting))
    with pytest.raises(KeyboardInterrupt):
        moves.run(GetMove([key(0)], [0], 10.0, None), client, lambda: None)
    assert moves._mover is None
    moves._lock = lock
    read = GetMove([key(0)], [0], 10.0, None)
    moves.run(read, client, lambda: None)
    assert read.read


@pytest.mark.parametrize(("at_use", "is_waiting"), USES)
def test_a_close_waits_for_no_call_that_was_interrupted_at_the_lock(
    at_use: int, is_waiting: bool
) -> None:
    calls = RunningCalls()
    calls._lock = cast(Any, InterruptedLock(calls._lock, at_use, is_waiting=is_waiting))
    with pytest.raises(KeyboardInterrupt), calls.one(lambda: None):
        """It ends at once."""
    assert not calls._threads


class DeafCondition(threading.Condition):
    """A condition whose notifications are lost, because each notifying thread is interrupted.

    No time passes in `wait`. The other call ends during the third one.
    """

    def __init__(self, lock: Any, end_other: Callable[[], None]) -> None:
        super().__init__(lock)
        self._end_other = end_other
        self.waits_s: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits_s.append(timeout)
        if len(self.waits_s) == 3:
            self._end_other()
        return False


def test_a_call_whose_notification_is_lost_gets_its_turn() -> None:
    moves, client = BlockMoves(BLOCK, 2 * BLOCK), HeldClient()
    client.answers = lambda message: JobDone(message.ticket)
    moves._mover = PutMove([], [], 0.0, [], 0)
    changed = moves._changed = DeafCondition(moves._lock, lambda: setattr(moves, "_mover", None))
    read = GetMove([key(0)], [0], 10.0, None)
    moves.run(read, client, lambda: None)
    assert read.read and changed.waits_s == [WAIT_SLICE_S] * 3


def test_a_close_whose_notification_is_lost_sees_the_end_of_the_last_call() -> None:
    calls, other = RunningCalls(), -1
    calls._threads[other] = other
    changed = calls._changed = DeafCondition(calls._lock, calls._threads.clear)
    calls.wait(10.0)
    assert not calls._threads and changed.waits_s == [WAIT_SLICE_S] * 3
