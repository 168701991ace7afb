"""Work is handed to a stream in order, and never more of it than the stream has room for."""

from __future__ import annotations

import pytest

from kvcascade.handlers.device.stream_feed import (
    OUTSTANDING_MAX,
    TURN_OPERATIONS,
    Mark,
    Operations,
    StreamFeed,
    Work,
)


class Queue:
    """What a stream was given: numbers, and marks that end when it has come so far."""

    def __init__(self, is_first: bool = True) -> None:
        self.is_first = is_first
        self.given: list[object] = []
        self.done = 0
        self.is_lost = False
        self.waits = 0

    @property
    def outstanding(self) -> int:
        return len(self.given) - self.done

    def work(self, name: str, operations: int, at_a_time: int = 1) -> Work:
        for first in range(0, operations, at_a_time):
            step = range(first, min(first + at_a_time, operations))
            self.given += [(name, number) for number in step]
            yield Operations(len(step), 0) if self.is_first else Operations(0, len(step))

    def mark(self) -> Mark:
        self.given.append("mark")
        return (Event(self),)

    def names(self) -> list[str]:
        """Whose operations were given, without repetition."""
        found = [entry[0] for entry in self.given if isinstance(entry, tuple)]
        return [name for at, name in enumerate(found) if at == 0 or found[at - 1] != name]


class Event:
    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._position = len(queue.given)

    def query(self) -> bool:
        self._check()
        return self._queue.done >= self._position

    def synchronize(self) -> None:
        self._queue.waits += 1
        self._check()
        self._queue.done = max(self._queue.done, self._position)

    def _check(self) -> None:
        if self._queue.is_lost:
            raise RuntimeError("CUDA error: the device is lost")


def test_little_work_is_handed_out_at_once() -> None:
    queue = Queue()
    feed = StreamFeed(queue.mark)
    feed.add(queue.work("a", 3))
    assert queue.given == [] and feed.has_work
    feed.advance()
    assert queue.given == [("a", 0), ("a", 1), ("a", 2), "mark"]
    assert not feed.has_work


@pytest.mark.parametrize("is_first", [True, False], ids=["kernels", "copies"])
def test_much_work_fills_the_stream_and_no_more(is_first: bool) -> None:
    queue = Queue(is_first)
    feed = StreamFeed(queue.mark)
    feed.add(queue.work("a", 5000))
    feed.advance()
    feed.advance()
    assert queue.outstanding == OUTSTANDING_MAX
    queue.done = TURN_OPERATIONS - 1
    feed.advance()
    assert len(queue.given) == OUTSTANDING_MAX, "the first turn has not ended"
    queue.done = TURN_OPERATIONS
    feed.advance()
    assert queue.outstanding == OUTSTANDING_MAX
    assert queue.waits == 0, "it never waits"


def test_all_of_it_is_handed_out_in_order() -> None:
    queue = Queue()
    feed = StreamFeed(queue.mark)
    works: list[Work] = [queue.work(name, 700, 3) for name in "abc"]
    for work in works:
        feed.add(work)
        feed.advance()
    most = 0
    for _ in range(100):
        feed.advance()
        most = max(most, queue.outstanding)
        queue.done = min(queue.done + 50, len(queue.given))
    assert not feed.has_work
    assert queue.names() == ["a", "b", "c"]
    assert sum(entry != "mark" for entry in queue.given) == 3 * 700
    assert most <= OUTSTANDING_MAX + 3, "a step is not taken apart"


def test_many_small_works_count_as_what_they_are() -> None:
    queue = Queue()
    feed = StreamFeed(queue.mark)
    for number in range(5000):
        feed.add(queue.work(str(number), 1))
        feed.advance()
    assert OUTSTANDING_MAX - TURN_OPERATIONS < queue.outstanding <= OUTSTANDING_MAX


def test_pushing_waits_only_for_room_and_ends_with_all_handed_out() -> None:
    queue = Queue()
    feed = StreamFeed(queue.mark)
    feed.add(queue.work("a", 1000))
    feed.push()
    assert queue.outstanding == OUTSTANDING_MAX and queue.waits == 0
    feed.push()
    assert queue.outstanding == OUTSTANDING_MAX and queue.waits == 1
    for _ in range(1000):
        if feed.has_work:
            feed.push()
    assert not feed.has_work
    assert queue.outstanding > 0, "what was handed out last is not waited for"


def test_a_lost_device_holds_nothing_up() -> None:
    queue = Queue()
    feed = StreamFeed(queue.mark)
    feed.add(queue.work("a", 2 * OUTSTANDING_MAX))
    feed.advance()
    queue.is_lost = True
    for _ in range(20):
        feed.push()
    assert not feed.has_work


def test_a_limit_of_ones_own() -> None:
    queue = Queue()
    feed = StreamFeed(queue.mark, outstanding_max=10**9)
    feed.add(queue.work("a", 5000))
    feed.advance()
    assert not feed.has_work


def test_what_is_dropped_is_never_handed_out() -> None:
    queue = Queue()
    feed = StreamFeed(queue.mark)
    feed.add(queue.work("a", 5000))
    feed.advance()
    feed.drop()
    queue.done = len(queue.given)
    feed.push()
    assert len(queue.given) == OUTSTANDING_MAX and not feed.has_work


def test_each_stream_has_a_queue_of_its_own() -> None:
    """Both are full at the same time; neither counts for the other."""
    kernels, copies = Queue(), Queue(is_first=False)

    def both() -> Work:
        for one, other in zip(kernels.work("a", 5000), copies.work("b", 5000), strict=True):
            yield Operations(one.kernels, other.copies)

    feed = StreamFeed(kernels.mark)
    feed.add(both())
    feed.advance()
    marks = kernels.given.count("mark")
    assert len(kernels.given) == len(copies.given) + marks == OUTSTANDING_MAX
