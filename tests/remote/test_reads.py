"""One read of a remote tier: copies of its blocks, and the end of those that do not arrive."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from support.keys import keys

from kvcascade.tiers.remote.base import RemoteOutcome
from kvcascade.tiers.remote.reads import COPIES_AT_A_TIME, RemoteRead
from kvcascade.tiers.remote.remote_job import RemoteJob

N = COPIES_AT_A_TIME + 3
OK, TIMED_OUT = RemoteOutcome.OK, RemoteOutcome.TIMED_OUT


def new_read() -> tuple[RemoteRead, list[bytearray]]:
    """Return a read of `N` blocks of eight bytes, and their destinations."""
    targets = [bytearray(b"unwritten"[:8]) for _ in range(N)]
    return RemoteRead(1, keys(N), [memoryview(each) for each in targets], 1.0), targets


def test_a_block_without_an_outcome_is_copied_once() -> None:
    read, targets = new_read()
    read.deliver(2, memoryview(b"verified"))
    read.deliver(2, memoryview(b"anything"))
    assert targets[2] == b"verified" and read.left == N - 1
    assert read.give_up(TIMED_OUT, waits=False)
    read.deliver(3, memoryview(b"verified"))
    assert targets[3] == b"unwritte", "the memory may be another block's by now"
    assert read.take_end() == [OK if at == 2 else TIMED_OUT for at in range(N)]


def test_a_block_that_is_copied_just_now_delays_no_other_one() -> None:
    read, _ = new_read()
    with read.copying[0]:
        assert not read.give_up(TIMED_OUT, waits=False)
        assert [at for at in range(N) if read.outcomes[at] is None] == [0, COPIES_AT_A_TIME]
        assert read.take_end() is None, "the destination is still written to"
        RemoteJob.conclude(read, [0], [OK])  # as its copy does at the end
    assert read.give_up(TIMED_OUT, waits=False)
    assert read.take_end() == [OK, *[TIMED_OUT] * (N - 1)]


def test_who_needs_the_memory_waits_for_copies() -> None:
    read, _ = new_read()
    last = COPIES_AT_A_TIME - 1
    with ThreadPoolExecutor(1) as thread:
        with read.copying[last]:
            given_up = thread.submit(read.give_up, TIMED_OUT, waits=True)
            while read.left > 1:
                assert not given_up.done()
            assert not given_up.done() and read.outcomes[last] is None
        assert given_up.result() and not read.left


def test_an_outcome_from_another_thread_waits_for_the_copy() -> None:
    """Whoever is told that the read has ended may use the memory."""
    read, targets = new_read()
    with ThreadPoolExecutor(1) as thread:
        with read.copying[0]:
            ended = thread.submit(read.conclude, [1, 0], [TIMED_OUT] * 2)
            while read.outcomes[1] is None:
                assert not ended.done()
            with read.lock:
                assert read.outcomes[0] is None
        ended.result()
    read.deliver(0, memoryview(b"verified"))
    assert targets[0] == b"unwritte" and read.left == N - 2
