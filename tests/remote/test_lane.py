"""How many calls a lane makes at a time, by the time that they take."""

from __future__ import annotations

import pytest
from support.clock import ManualClock
from support.executors import SteppingExecutor
from support.keys import keys
from support.remote_rig import PAYLOAD_BYTES, RemoteRig
from support.remote_twin import RemoteTwin

from kvcascade.tiers.breaker import Breaker
from kvcascade.tiers.remote import remote_store
from kvcascade.tiers.remote.base import RemoteOutcome
from kvcascade.tiers.remote.lane import FEWEST_CALLS, CallLimit, Errand, Lane, TokenBucket

MOST, SLOW_S = 64, 0.5
DISTANT_S = 0.03
MANY = 10_000


def settled(limit: CallLimit, distance_s: float, share_s: float, ends: int = MANY) -> int:
    """Let calls end, and return how many are made at a time then.

    A call alone takes `distance_s + share_s`. The part `share_s` occupies a link or a processor,
    which calls at the same time use one after the other.
    """
    for _ in range(ends):
        took_s = distance_s + share_s * limit.calls
        limit.note(took_s, RemoteOutcome.OK, is_needed=True)
    return limit.calls


@pytest.mark.parametrize("distance_s", [0.005, 0.03, 0.1, 0.2])
def test_a_distant_server_gets_many_calls(distance_s: float) -> None:
    assert settled(CallLimit(MOST, SLOW_S), distance_s, 0.0001) == MOST


def test_a_thin_link_gets_few_calls() -> None:
    """100 Mbit, and blocks of 512 KiB and of 2 MiB."""
    for share_s, most in ((0.042, 12), (0.17, FEWEST_CALLS)):
        calls = settled(CallLimit(MOST, SLOW_S), 0.001, share_s)
        assert calls <= most and share_s * calls < 1.5, "calls end well within 2 s"


def test_a_busy_processor_gets_few_calls() -> None:
    limit = CallLimit(MOST, SLOW_S)
    limit.note(0.0006, RemoteOutcome.OK, is_needed=False)  # a call alone
    assert settled(limit, 0.0002, 0.0004, ends=300) == FEWEST_CALLS


def test_a_link_that_becomes_thin_lowers_the_number_at_once() -> None:
    limit = CallLimit(MOST, SLOW_S)
    settled(limit, DISTANT_S, 0.0001)
    assert settled(limit, DISTANT_S, 0.042, ends=MOST) <= 12


def test_a_server_that_moves_away_gets_many_calls_in_time() -> None:
    limit = CallLimit(MOST, SLOW_S)
    settled(limit, 0.0002, 0.0004, ends=300)
    assert settled(limit, DISTANT_S, 0.0001) == MOST


def test_failures_lower_the_number() -> None:
    limit = CallLimit(MOST, SLOW_S)
    settled(limit, DISTANT_S, 0.0001)
    for _ in range(MOST):
        limit.note(0.001, RemoteOutcome.BUSY, is_needed=True)
    assert limit.calls == FEWEST_CALLS


def test_the_number_grows_only_for_work_that_waits() -> None:
    limit = CallLimit(MOST, SLOW_S)
    for _ in range(MANY):
        limit.note(DISTANT_S, RemoteOutcome.OK, is_needed=False)
    assert limit.calls == FEWEST_CALLS


@pytest.mark.parametrize("outcome", [RemoteOutcome.ABSENT, RemoteOutcome.DROPPED])
def test_a_call_without_payload_makes_no_other_one_slow(outcome: RemoteOutcome) -> None:
    limit = CallLimit(MOST, SLOW_S)
    limit.note(1e-5, outcome, is_needed=True)
    assert settled(limit, DISTANT_S, 0.0001, ends=2 * MOST) == MOST


def test_a_low_limit_is_kept() -> None:
    assert settled(CallLimit(2, SLOW_S), DISTANT_S, 0.0001) == 2
    assert settled(CallLimit(2, SLOW_S), DISTANT_S, 0.4) == 2


def test_threads_come_and_go_with_the_number() -> None:
    clock, executor, takes_s = ManualClock(), SteppingExecutor(), [DISTANT_S]
    limit = CallLimit(MOST, SLOW_S)
    bucket = TokenBucket(None, clock)
    lane = Lane(executor, clock, limit, Breaker(clock, 60.0), bucket, RemoteOutcome.TIMED_OUT)
    done: list[int] = []

    def add(number: int) -> None:
        def run() -> RemoteOutcome:
            clock.advance(takes_s[0])
            done.append(number)
            return RemoteOutcome.OK

        lane.add(Errand(clock() + 1e6, 0, run, lambda outcome: None))

    for number in range(200):
        add(number)
    assert len(executor) == FEWEST_CALLS
    executor.step()
    assert len(executor) == MOST - 1 and len(done) == 200, "each quick call made room for another"
    executor.run_all()

    for number in range(200):
        add(number)
    assert len(executor) == MOST
    limit.note(2 * SLOW_S, RemoteOutcome.OK, is_needed=True)
    lane.pump()
    executor.step()
    assert len(done) == 200, "a thread too many ends without a call"
    takes_s[0] = 2 * SLOW_S
    for fewer in range(1, MOST - FEWEST_CALLS):
        executor.step()
        assert len(done) == 200 + fewer, "a slow call ends its thread"
    assert limit.calls == len(executor) == FEWEST_CALLS
    executor.run_all()
    assert len(done) == 400 and lane.is_idle


def calls_of(lane: Lane) -> list[RemoteOutcome]:
    """Return the outcomes of the calls that a lane makes from now on."""
    calls: list[RemoteOutcome] = []
    note = lane._limit.note

    def noted(took_s: float, outcome: RemoteOutcome, *, is_needed: bool) -> bool:
        calls.append(outcome)
        return note(took_s, outcome, is_needed=is_needed)

    lane._limit.note = noted  # type: ignore[method-assign]
    return calls


def test_a_call_without_payload_says_so() -> None:
    rig = RemoteRig()
    reads, writes = calls_of(rig.store._reading), calls_of(rig.store._writing)
    rig.write(keys(2))
    rig.write(keys(2))
    rig.write(keys(1, 3))
    rig.read(keys(2))
    rig.read(keys(8, 10))
    rig.read(keys(2, 5))
    assert writes == [RemoteOutcome.OK, RemoteOutcome.EXISTS, RemoteOutcome.OK]
    assert reads == [RemoteOutcome.OK, RemoteOutcome.ABSENT, RemoteOutcome.OK]


@pytest.mark.parametrize(("bytes_at_a_time", "most"), [(1 << 30, 20), (10 * PAYLOAD_BYTES, 10)])
def test_a_store_reads_many_blocks_at_a_time(
    monkeypatch: pytest.MonkeyPatch, bytes_at_a_time: int, most: int
) -> None:
    monkeypatch.setattr(remote_store, "BYTES_AT_A_TIME", bytes_at_a_time)
    executor, twin = SteppingExecutor(), RemoteTwin(names_per_call=1)
    rig = RemoteRig(twin, executor, reads_at_a_time=20)
    twin.before = lambda method: rig.clock.advance(DISTANT_S / 10 if method == "get_into" else 0)
    rig.begin_write(keys(40))
    executor.run_all()
    rig.store.poll()
    rig.store.get(9, keys(40), rig.slots(40))
    executor.step()
    assert len(executor) == most - 1
    executor.run_all()
    (ended,) = rig.store.poll()
    assert [*ended.outcomes] == [RemoteOutcome.OK] * 40
