"""The rules of `NodeKeeper`, with a process that the test plays: nothing blocks or is lost."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from support.clock import ManualClock
from support.executors import InlineExecutor
from support.forks import said_by_fork

from kvcascade.handlers.node import node_child as start_limits
from kvcascade.handlers.node import node_keeper as limits
from kvcascade.handlers.node.node_child import Connection
from kvcascade.handlers.node.node_keeper import NodeKeeper, NodeStream, close_at_exit
from kvcascade.handlers.node.path_wire import JobDone, NodeReady, PutJob, to_node
from kvcascade.handlers.node.remote.remote_node import LIFE_LIMIT_S
from kvcascade.tiers.nvme.path.frames import RECEIVES_PER_CALL, FrameReader, WireError, frame


class InterruptedSocket(socket.socket):
    """A socket. Ctrl-C comes during a call, which Python notices when the call has returned."""

    call = ""
    """Name of the call that is interrupted, once."""

    def send(self, *args: Any) -> int:
        return self._after("send", super().send(*args))

    def recv_into(self, *args: Any, **options: Any) -> int:
        return self._after("recv_into", super().recv_into(*args, **options))

    def _after(self, call: str, result: int) -> int:
        if call == self.call:
            self.call = ""
            raise KeyboardInterrupt
        return result


class PlayedChild:
    """A process that dies when the test says so."""

    def __init__(self) -> None:
        self.pid = 1
        self.status: int | None = None
        self.was_killed = False
        self.dies_when_killed = True
        ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.ours = InterruptedSocket(fileno=ours.detach())
        self.ours.setblocking(False)
        self.theirs.settimeout(10.0)
        self._reader = FrameReader()

    def poll(self) -> int | None:
        return self.status

    def kill(self) -> None:
        self.was_killed = True
        if self.dies_when_killed:
            self.die()

    def wait(self, timeout: float | None = None) -> int:
        if self.status is None:
            self.die(0)
        assert self.status is not None
        return self.status

    def die(self, status: int = -9) -> None:
        self.status = status
        self.theirs.close()

    def say(self, message: msgspec.Struct) -> None:
        self.theirs.sendall(frame(message))

    def hear(self, n: int) -> list[object]:
        """The next `n` orders."""
        heard: list[object] = []
        while len(heard) < n:
            heard += [to_node.decode(b) for b in self._reader.feed(self.theirs.recv(1 << 16))]
        return heard


class Stage:
    """A node, its clock, and all the processes it has started."""

    def __init__(self, *, is_batched: bool = False) -> None:
        self.clock = ManualClock()
        self.children: list[PlayedChild] = []
        self.ended: list[tuple[str, bool]] = []
        self.is_mute = False
        self.keeper = NodeKeeper(
            self.launch,
            lambda note: None,
            is_batched=is_batched,
            clock=self.clock,
            starter=InlineExecutor(),
        )

    def wait_in_silence(self, seconds: float) -> None:
        """Poll every second until the time is over."""
        for _ in range(int(seconds)):
            self.clock.advance(1.0)
            self.keeper.poll()

    def launch(self) -> Connection:
        child = PlayedChild()
        self.children.append(child)
        if not self.is_mute:
            child.say(NodeReady())
        return Connection(child, child.ours)

    def serve(self) -> None:
        """Have the last process answer a job."""
        child = self.children[-1]
        assert self.submit("served")
        (order,) = child.hear(1)
        assert isinstance(order, PutJob)
        child.say(JobDone(order.ticket))
        self.keeper.poll()
        assert self.ended[-1] == ("served", True)

    def submit(self, name: str, slots: int = 1) -> bool:
        return self.keeper.submit(
            lambda ticket: PutJob(ticket, [b"key"], bytes(4 * slots), 0),
            lambda answer: self.ended.append((name, answer is not None)),
        )


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    stage.keeper.start()
    yield stage
    stage.keeper.close()
    for child in stage.children:
        child.theirs.close()
        child.ours.close()


def test_jobs_are_answered_in_any_order(stage: Stage) -> None:
    assert stage.submit("a") and stage.submit("b")
    child = stage.children[0]
    first, second = child.hear(2)
    assert isinstance(first, PutJob) and isinstance(second, PutJob)
    child.say(JobDone(second.ticket))
    stage.keeper.poll()
    assert stage.ended == [("b", True)]
    child.say(JobDone(first.ticket))
    stage.keeper.poll()
    assert stage.ended == [("b", True), ("a", True)]


def test_a_node_that_does_not_listen_blocks_nobody(stage: Stage) -> None:
    """Far more than a socket holds: every call returns, and what was taken is sent in the end."""
    taken = [stage.submit(str(i), slots=20_000) for i in range(limits.JOBS_AT_MOST + 3)]
    assert taken == [True] * limits.JOBS_AT_MOST + [False] * 3
    heard: list[object] = []
    child = stage.children[0]
    while len(heard) < limits.JOBS_AT_MOST:
        heard += child.hear(1)
        stage.keeper.poll()
    assert [order.ticket for order in heard if isinstance(order, PutJob)] == list(
        range(1, limits.JOBS_AT_MOST + 1)
    )


def test_a_job_whose_message_is_invalid_is_not_noted(stage: Stage) -> None:
    """It would never be answered: the node would count as silent, and be killed."""
    with pytest.raises(TypeError):
        stage.keeper.submit(
            lambda ticket: PutJob(ticket, [object()], b"", 0),  # type: ignore[list-item]
            stage.ended.append,
        )
    assert stage.submit("a")
    stage.clock.advance(limits.SILENCE_LIMIT_S)
    (order,) = stage.children[0].hear(1)
    assert isinstance(order, PutJob)
    stage.children[0].say(JobDone(order.ticket))
    stage.keeper.poll()
    stage.clock.advance(2 * limits.SILENCE_LIMIT_S)
    stage.keeper.poll()
    assert stage.ended == [("a", True)] and not stage.children[0].was_killed
    assert not stage.keeper.has_job(stage.ended.append)
    stage.keeper.submit(lambda ticket: PutJob(ticket, [], b"", 0), stage.ended.append)
    assert stage.keeper.has_job(stage.ended.append)


def test_batched_jobs_are_sent_together_and_no_later_than_asked() -> None:
    stage = Stage(is_batched=True)
    stage.keeper.start()
    child = stage.children[0]
    child.theirs.setblocking(False)

    def came() -> int:
        """Bytes that have been sent since the last call."""
        try:
            return len(child.theirs.recv(1 << 20))
        except BlockingIOError:
            return 0

    for ask in (
        stage.keeper.flush,
        stage.keeper.poll,
        lambda: stage.keeper.wait(lambda: True, 0.0),
    ):
        assert stage.submit("a") and stage.submit("b")
        assert came() == 0
        ask()
        assert came() > 0
    stage.keeper.tell(PutJob(0, [b"key"], bytes(limits.BATCH_BYTES), 0))
    assert came() > 0, "a large batch does not wait"
    stage.submit("c")
    child.die()
    stage.keeper.poll()
    assert ("c", False) in stage.ended, "what was not sent has failed, too"
    stage.keeper.flush()
    stage.keeper.close()
    child.ours.close()


def test_jobs_of_a_dead_process_have_failed_and_another_is_started(stage: Stage) -> None:
    assert stage.submit("a")
    stage.children[0].die()
    stage.keeper.poll()
    assert stage.ended == [("a", False)]
    stage.keeper.poll()
    assert len(stage.children) == 2
    assert stage.submit("b")
    (order,) = stage.children[1].hear(1)
    assert isinstance(order, PutJob)
    stage.children[1].say(JobDone(order.ticket))
    stage.keeper.poll()
    assert stage.ended[1:] == [("b", True)]


def test_an_answer_that_was_sent_before_death_counts(stage: Stage) -> None:
    assert stage.submit("a") and stage.submit("b")
    first, _ = stage.children[0].hear(2)
    assert isinstance(first, PutJob)
    stage.children[0].say(JobDone(first.ticket))
    stage.children[0].die()
    stage.keeper.poll()
    assert stage.ended == [("a", True)]
    stage.keeper.poll()
    assert stage.ended == [("a", True), ("b", False)]


def test_a_job_is_not_over_before_its_process_is_gone_for_certain(stage: Stage) -> None:
    """It hung up, but waits for its disk: until then it may write what the job names."""
    child = stage.children[0]
    child.dies_when_killed = False
    assert stage.submit("a")
    child.theirs.close()
    for _ in range(3):
        stage.keeper.poll()
    assert child.was_killed and stage.ended == [] and len(stage.children) == 1
    assert not stage.submit("b")
    child.status = -9
    stage.keeper.poll()
    assert stage.ended == [("a", False)]


def test_a_silent_node_is_killed(stage: Stage) -> None:
    stage.clock.advance(10 * limits.SILENCE_LIMIT_S)
    stage.keeper.poll()
    assert not stage.children[0].was_killed, "without work there is nothing to say"
    assert stage.submit("a")
    stage.wait_in_silence(limits.SILENCE_LIMIT_S)
    assert not stage.children[0].was_killed
    stage.clock.advance(1.0)
    stage.keeper.poll()
    assert stage.children[0].was_killed and stage.ended == [("a", False)]


def test_a_process_that_was_stopped_with_its_node_listens_first(stage: Stage) -> None:
    """`docker pause` stops both, and the node needs a moment to answer."""
    assert stage.submit("a")
    stage.keeper.poll()
    stage.clock.advance(10 * limits.SILENCE_LIMIT_S)
    stage.keeper.poll()
    stage.wait_in_silence(limits.SILENCE_LIMIT_S - limits.LISTEN_GAP_S)
    assert not stage.children[0].was_killed
    stage.clock.advance(1.0)
    stage.keeper.poll()
    assert stage.children[0].was_killed and stage.ended == [("a", False)]


def test_a_silent_node_is_killed_however_rarely_it_is_listened_to(stage: Stage) -> None:
    assert stage.submit("a")
    for _ in range(int(limits.SILENCE_LIMIT_S / limits.LISTEN_GAP_S) + 1):
        stage.clock.advance(3 * limits.LISTEN_GAP_S)
        stage.keeper.poll()
    assert stage.children[0].was_killed and stage.ended == [("a", False)]


def test_a_silent_node_that_cannot_be_killed_is_hung_up_on(stage: Stage) -> None:
    """A thread: it ends when its disk answers, its job ends then, and another one is started."""
    child = stage.children[0]
    child.dies_when_killed = False
    assert stage.submit("a")
    child.hear(1)
    stage.wait_in_silence(limits.SILENCE_LIMIT_S + 1.0)
    assert child.theirs.recv(1) == b"", "the end of the stream"
    stage.keeper.poll()
    assert stage.ended == [] and len(stage.children) == 1
    child.die(0)
    stage.keeper.poll()
    assert stage.ended == [("a", False)]
    stage.keeper.poll()
    assert len(stage.children) == 2 and stage.submit("b")


def test_a_node_that_is_replaced_fails_its_jobs_once_it_is_dead(stage: Stage) -> None:
    child = stage.children[0]
    child.dies_when_killed = False
    assert stage.submit("a")
    stage.keeper.replace()
    assert not stage.keeper.wait(lambda: bool(stage.ended), 0.0) and child.was_killed
    child.die()
    assert stage.keeper.wait(lambda: stage.ended == [("a", False)], 1.0)
    stage.keeper.poll()
    assert len(stage.children) == 2 and stage.submit("b")


def test_an_interrupt_sends_no_job_twice(stage: Stage) -> None:
    """The slots of a job that comes again may be those of another job by then."""
    child = stage.children[0]
    child.dies_when_killed = False
    child.ours.call = "send"
    with pytest.raises(KeyboardInterrupt):
        stage.submit("a")
    assert not stage.submit("b")
    assert child.was_killed and stage.ended == []
    child.hear(1)
    assert child.theirs.recv(1) == b"", "the end of the stream"
    child.die()
    stage.keeper.poll()
    assert stage.ended == [("a", False)]
    stage.keeper.poll()
    assert len(stage.children) == 2 and stage.submit("b")


@pytest.mark.parametrize("call", ["recv_into", "on_end"])
def test_a_job_whose_answer_an_interrupt_loses_has_failed(stage: Stage, call: str) -> None:
    child = stage.children[0]
    child.ours.call = call

    def end(answer: object) -> None:
        stage.ended.append(("a", answer is not None))
        if answer is not None:
            raise KeyboardInterrupt

    stage.keeper.submit(lambda ticket: PutJob(ticket, [b"key"], b"", 0), end)
    assert stage.submit("b")
    for order in child.hear(2):
        assert isinstance(order, PutJob)
        child.say(JobDone(order.ticket))
    with pytest.raises(KeyboardInterrupt):
        stage.keeper.poll()
    stage.keeper.poll()
    assert stage.ended[-2:] == [("a", False), ("b", False)]
    stage.keeper.poll()
    assert len(stage.children) == 2 and stage.submit("c")


@pytest.mark.parametrize("has_answered", [True, False])
def test_nodes_that_interrupts_end_do_not_count_if_they_had_answered(
    stage: Stage, has_answered: bool
) -> None:
    """Nodes that never answer count, because another fault may end them."""
    rounds = 3 * start_limits.STARTS_PER_MINUTE
    for number in range(rounds):
        call = ("send", "recv_into")[number % 2]
        child = stage.children[-1]
        if not stage.keeper.is_up:
            break
        if has_answered:
            assert stage.submit("a")
            (order,) = child.hear(1)
            assert isinstance(order, PutJob)
            child.say(JobDone(order.ticket))
            stage.keeper.poll()
        child.ours.call = call
        if call == "recv_into":
            child.say(JobDone(0))
        with suppress(KeyboardInterrupt):
            stage.submit("b") if call == "send" else stage.keeper.poll()
        for _ in range(2):
            stage.keeper.poll()
    starts = rounds + 1 if has_answered else start_limits.STARTS_PER_MINUTE
    assert len(stage.children) == starts and stage.keeper.is_up == has_answered


def test_a_job_that_an_interrupt_kept_from_the_node_has_failed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its slots would be in use for ever, because the answers to others come."""

    def interrupted(stream: NodeStream, data: bytes) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(NodeStream, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stage.submit("a")
    stage.keeper.poll()
    assert stage.ended == [("a", False)]
    stage.keeper.poll()
    assert len(stage.children) == 2 and stage.submit("b")


@pytest.mark.parametrize("nonsense", [b"\xff\xff\xff\xff", b"\1\0\0\0\xc1", frame(JobDone(77))])
def test_nonsense_ends_the_connection(stage: Stage, nonsense: bytes) -> None:
    assert stage.submit("a")
    stage.children[0].theirs.sendall(nonsense)
    stage.keeper.poll()
    assert stage.children[0].was_killed and stage.ended == [("a", False)]


def test_an_answer_that_its_job_cannot_understand_ends_the_connection(stage: Stage) -> None:
    answers: list[Any] = []

    def take(answer: JobDone | None) -> None:
        if answer is not None:
            raise WireError("too few outcomes")
        answers.append(answer)

    assert stage.keeper.submit(lambda ticket: PutJob(ticket, [b"key"], bytes(4), 0), take)
    (order,) = stage.children[0].hear(1)
    assert isinstance(order, PutJob)
    stage.children[0].say(JobDone(order.ticket))
    stage.keeper.poll()
    assert stage.children[0].was_killed and answers == [None]


def test_a_wait_for_news_sends_and_receives_nothing() -> None:
    """Threads that wait do not hold the lock under which answers land."""
    stage = Stage(is_batched=True)
    stage.keeper.start()
    assert stage.submit("a")
    stage.keeper.wait_for_news(0.0)
    child = stage.children[0]
    (order,) = child.hear(1)
    assert isinstance(order, PutJob)
    child.say(JobDone(order.ticket))
    stage.keeper.wait_for_news(60.0)
    assert stage.ended == []
    stage.keeper.poll()
    assert stage.ended == [("a", True)]
    stage.keeper.close()
    child.ours.close()


def test_starts_are_bounded(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(10):
        stage.children[-1].die()
        stage.keeper.poll()
        stage.keeper.poll()
    assert len(stage.children) == start_limits.STARTS_PER_MINUTE
    assert not stage.submit("a")
    said = [text for text in caplog.messages if "rests" in text]
    assert said == [said[0]] and "ended 3 times" in said[0] and "in 60 s" in said[0]
    stage.clock.advance(60.0)
    assert not stage.submit("b"), "it is only being started"
    assert len(stage.children) == start_limits.STARTS_PER_MINUTE + 1
    stage.keeper.poll()
    for _ in range(2 * start_limits.STARTS_PER_DAY):
        if stage.keeper.is_up:
            stage.serve()
        stage.clock.advance(60.0)
        stage.children[-1].die()
        stage.keeper.poll()
        stage.keeper.poll()
    assert len(stage.children) == start_limits.STARTS_PER_DAY
    stage.clock.advance(start_limits.DAY_S)
    for _ in range(2):  # it is started, it says that it is ready
        stage.keeper.poll()
    stage.serve()


def test_a_node_that_is_killed_now_and_then_is_started_for_years(stage: Stage) -> None:
    for _ in range(2 * start_limits.STARTS_PER_DAY):
        stage.serve()
        stage.clock.advance(start_limits.DAY_S)
        stage.children[-1].die()
        for _ in range(2):  # another one is started, it says that it is ready
            stage.keeper.poll()
    stage.serve()


def test_nodes_that_wait_long_for_a_server_follow_each_other_without_rests(stage: Stage) -> None:
    """A share hangs for days, and the node of a remote tier ends once it has shown life for long
    enough."""
    for _ in range(2 * start_limits.STARTS_PER_DAY):
        stage.clock.advance(LIFE_LIMIT_S)
        stage.children[-1].die()
        for _ in range(2):  # another one is started, it says that it is ready
            stage.keeper.poll()
        assert stage.keeper.is_up


@pytest.mark.parametrize("is_mute", [True, False], ids=["not ready", "ready"])
def test_a_node_that_never_answers_is_tried_more_and_more_rarely(
    stage: Stage, is_mute: bool
) -> None:
    """An idle engine asks at every tick: it must not use up its starts in an hour."""
    stage.is_mute = is_mute
    for _ in range(24 * 60):
        stage.children[-1].die()
        stage.keeper.poll()
        stage.keeper.poll()
        stage.clock.advance(60.0)
    a_day = len(stage.children)
    assert a_day <= start_limits.DAY_S / start_limits.MAX_PAUSE_S + 20 < start_limits.STARTS_PER_DAY
    stage.is_mute = False
    stage.clock.advance(start_limits.MAX_PAUSE_S)
    stage.children[-1].die()
    for _ in range(2):  # it is started, it says that it is ready
        stage.keeper.poll()
    stage.keeper.poll()
    stage.serve()
    assert len(stage.children) == a_day + 1
    stage.children[-1].die()
    stage.keeper.poll()
    assert len(stage.children) == a_day + 2, "one that answered is replaced at once"


def test_a_death_without_jobs_is_found_out_by_whoever_has_one(stage: Stage) -> None:
    """Whoever asks it to work before the next tick: that must be enough."""
    stage.children[0].die()
    taken = [stage.submit(str(i)) for i in range(4)]
    assert taken[0], "the socket has not said anything yet"
    stage.keeper.poll()
    assert stage.ended == [("0", False)]
    assert taken[1:] == [False, True, True] and len(stage.children) == 2


def test_upkeep_takes_answers_without_transfers(stage: Stage) -> None:
    """As many jobs as are taken, and nothing polls meanwhile: upkeep makes room for the next."""
    child = stage.children[0]
    for number in range(limits.JOBS_AT_MOST):
        assert stage.submit(str(number))
    assert not stage.submit("too many")
    for order in child.hear(limits.JOBS_AT_MOST):
        assert isinstance(order, PutJob)
        child.say(JobDone(order.ticket))
    for _ in range(limits.JOBS_AT_MOST // RECEIVES_PER_CALL + 1):
        stage.clock.advance(2 * limits.LISTEN_INTERVAL_S)
        stage.keeper.listen()
    assert limits.JOBS_AT_MOST == sum(stage.submit(str(i)) for i in range(limits.JOBS_AT_MOST))


def test_upkeep_finds_a_process_that_died_idle(stage: Stage) -> None:
    stage.children[0].die()
    for _ in range(2):  # the next process is started, and heard
        stage.clock.advance(2 * limits.LISTEN_INTERVAL_S)
        stage.keeper.listen()
    assert len(stage.children) == 2
    assert stage.keeper.is_up


def test_upkeep_does_not_listen_where_handlers_just_did(stage: Stage) -> None:
    """A second look at every step kept threads that copy from the interpreter."""
    assert stage.submit("a")
    stage.clock.advance(2 * limits.LISTEN_INTERVAL_S)
    stage.keeper.poll()
    (order,) = stage.children[0].hear(1)
    assert isinstance(order, PutJob)
    stage.children[0].say(JobDone(order.ticket))
    stage.keeper.listen()
    assert not stage.ended
    stage.clock.advance(2 * limits.LISTEN_INTERVAL_S)
    stage.keeper.listen()
    assert stage.ended == [("a", True)]


def test_waits_are_bounded(stage: Stage) -> None:
    assert stage.submit("a")
    assert not stage.keeper.wait(lambda: bool(stage.ended), 0.0)
    (order,) = stage.children[0].hear(1)
    assert isinstance(order, PutJob)
    stage.children[0].say(JobDone(order.ticket))
    assert stage.keeper.wait(lambda: bool(stage.ended), 60.0)


class InterruptedCondition(threading.Condition):
    """A condition. An interrupt comes at the end of its `__enter__`, which is Python."""

    def __enter__(self) -> bool:
        super().__enter__()
        raise KeyboardInterrupt


def test_an_interrupted_wait_keeps_no_thread_from_starting_the_next_process(stage: Stage) -> None:
    changed: Any = InterruptedCondition(stage.keeper._lock)
    stage.keeper._changed = changed
    with suppress(KeyboardInterrupt):
        stage.keeper.wait(lambda: False, limits.WAIT_SLICE_S)
    assert not changed._is_owned()


def test_after_closing_nothing_is_taken_or_started(stage: Stage) -> None:
    assert stage.submit("a")
    assert stage.keeper.close()
    assert stage.ended == [("a", False)]
    assert not stage.submit("b")
    stage.keeper.poll()
    assert len(stage.children) == 1 and stage.keeper.close()


def test_one_that_is_not_ready_is_not_waited_for_at_the_end() -> None:
    stage = Stage()
    stage.is_mute = True
    stage.keeper._start_if_allowed()
    (child,) = stage.children
    assert stage.keeper.close() and child.was_killed
    child.ours.close()


def test_one_that_is_ready_ends_by_itself(stage: Stage) -> None:
    assert stage.keeper.close() and not stage.children[0].was_killed


def test_a_node_that_never_gets_ready_is_killed_and_another_started() -> None:
    """With nothing under way: a job is not even taken before it is ready."""
    stage = Stage()
    stage.is_mute = True
    stage.keeper._start_if_allowed()
    assert not stage.submit("too early")
    stage.is_mute = False
    stage.wait_in_silence(limits.SILENCE_LIMIT_S)
    stage.clock.advance(1.0)
    assert not stage.submit("too late")
    assert stage.children[0].was_killed
    assert stage.submit("taken") and len(stage.children) == 2
    for child in stage.children:
        child.die()
    stage.keeper.close()


class Engine:
    """An engine that the end of its process closes."""

    def __init__(self, closed: list[str]) -> None:
        self._closed = closed

    def close(self) -> None:
        self._closed.append("closed")


def test_what_is_open_closes_with_its_process_and_not_with_a_fork(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`multiprocessing` calls these functions at the end of a forked process, too."""
    calls: list[Callable[[], None]] = []
    monkeypatch.setattr(threading, "_register_atexit", calls.append)
    closed: list[str] = []
    left, dropped = Engine(closed), Engine(closed)
    close_at_exit(left.close)
    close_at_exit(dropped.close)
    del dropped
    assert said_by_fork(lambda: [*(call() for call in calls), *closed]) == "[None, None]"
    for call in calls:
        call()
    assert closed == ["closed"]
