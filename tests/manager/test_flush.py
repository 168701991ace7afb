"""A shutdown uses the time it has: a tier that rests after a failure is tried again."""

from __future__ import annotations

import pytest
from support.cascade import Cascade, key
from support.inside import demoters
from support.twin_engine import TwinEngine

from kvcascade.handlers.node.node_keeper import WAIT_SLICE_S
from kvcascade.manager import first_tier, flush
from kvcascade.manager.below.port import Put
from kvcascade.manager.below.single_tier import NODE_STOP_S, STALLED_S
from kvcascade.manager.core import ManagerOptions
from kvcascade.manager.flush import JOIN_LIMIT_S, JOIN_POLL_S, RESTS_AT_MOST
from kvcascade.manager.request import Request
from kvcascade.tiers.base import BlockHash, BlockOutcome
from kvcascade.tiers.breaker import REST_S

LONG_S = 100 * REST_S


def keys(start: int, stop: int) -> list[BlockHash]:
    return [key(i) for i in range(start, stop)]


def failing(cascade: Cascade, times: int, outcome: BlockOutcome = BlockOutcome.IO_ERROR) -> None:
    """The next so many blocks that are written down fail."""
    left = iter(range(times))
    fate = lambda _a, _b: BlockOutcome.OK if next(left, None) is None else outcome  # noqa: E731
    cascade.down[0].fate = fate


def hang(cascade: Cascade, seconds: float, node: int = 0) -> None:
    """A device does nothing for some time. A wait for news takes a slice of it."""
    client, ends_s = cascade.nodes[node], cascade.now_s + seconds
    go_on = client.wait_for_news

    def wait_for_news(limit_s: float) -> None:
        if cascade.now_s < ends_s:
            cascade.now_s += min(limit_s, WAIT_SLICE_S)
        else:
            go_on(limit_s)

    client.wait_for_news = wait_for_news  # type: ignore[method-assign]


def written(cascade: Cascade) -> int:
    return sum(cascade.holds(1, key(i)) for i in range(64))


def test_one_failed_write_costs_a_rest_and_no_block() -> None:
    cascade = Cascade((16, 64))
    cascade.store(keys(0, 8))
    failing(cascade, 8)
    start_s = cascade.now_s
    assert cascade.manager.flush_dirty(start_s + LONG_S)
    assert written(cascade) == 8 and cascade.now_s == start_s + REST_S


def test_a_handler_that_takes_nothing_is_asked_again() -> None:
    """As one whose process is just being started."""
    cascade = Cascade((16, 64))
    cascade.store(keys(0, 8))
    cascade.down[0].accepts = False
    pass_time = cascade.manager._closing._pause

    def pause(seconds: float) -> None:
        pass_time(seconds)
        cascade.down[0].accepts = True

    cascade.manager._closing._pause = pause
    assert cascade.manager.flush_dirty(cascade.now_s + LONG_S) and written(cascade) == 8


def test_a_tier_that_rested_already_is_waited_for() -> None:
    cascade = Cascade((16, 64))
    cascade.store(keys(0, 8))
    failing(cascade, 1)
    demoters(cascade.manager)[0].demote_coldest(1)
    cascade.run_transfers()
    assert cascade.manager._core.below.is_blocked
    assert cascade.manager.flush_dirty(cascade.now_s + LONG_S) and written(cascade) == 8


def test_a_device_that_always_fails_is_given_up() -> None:
    cascade = Cascade((16, 64))
    cascade.store(keys(0, 8))
    failing(cascade, 1000)
    start_s = cascade.now_s
    assert not cascade.manager.flush_dirty(start_s + LONG_S)
    assert cascade.now_s == start_s + RESTS_AT_MOST * REST_S


def test_a_stall_that_ends_before_the_deadline_loses_nothing() -> None:
    cascade = Cascade((64, 128))
    cascade.store(keys(0, 64))
    hang(cascade, STALLED_S + 1)
    assert cascade.manager.flush_dirty(cascade.now_s + STALLED_S + 5) and written(cascade) == 64


def test_a_stall_from_before_the_shutdown_is_not_waited_for() -> None:
    cascade = Cascade((64, 128))
    cascade.store(keys(0, 64))
    demoters(cascade.manager)[0].demote_coldest(1)
    hang(cascade, LONG_S)
    cascade.now_s += STALLED_S
    start_s = cascade.now_s
    assert not cascade.manager.flush_dirty(start_s + STALLED_S)
    assert cascade.now_s == start_s


def test_what_never_began_is_sent_again() -> None:
    """As when the writer of the path is replaced, and each block of memory is dirty."""
    cascade = Cascade((8, 64))
    cascade.store(keys(0, 8))
    failing(cascade, 8, BlockOutcome.CANCELLED)
    assert cascade.manager.flush_dirty(cascade.now_s + LONG_S) and written(cascade) == 8


def without_writer(
    lower: int, until_s: float, *, only_lower: bool = False, n: int = 4
) -> TwinEngine:
    """An engine with `n` dirty blocks, and paths that have no writer for some time."""
    engine = TwinEngine(slots=16, below=64, lower=lower)
    twins = [engine.lower] if only_lower else [engine.twin, engine.lower]
    assert engine.offer(keys(0, n)) == keys(0, n)
    start_s = engine.clock()

    def pause(seconds: float) -> None:
        engine.clock.advance(seconds)
        for twin in twins:
            twin.is_joining = engine.clock() < start_s + until_s

    engine.manager._closing._pause = pause
    pause(0.0)
    return engine


@pytest.mark.parametrize("lower", [0, 64])
def test_another_engine_that_takes_over_is_waited_for(lower: int) -> None:
    """Two engines of a path are stopped together, and the one that is the writer ends first."""
    engine = without_writer(lower, 3.0)
    start_s = engine.clock()
    assert engine.manager.flush_dirty(start_s + LONG_S)
    assert engine.twin.state()[0].blocks == 4
    assert start_s + 3.0 <= engine.clock() < start_s + 3.1


@pytest.mark.parametrize("takes", [0, 2])
@pytest.mark.parametrize("dirty", [8, 16])
def test_what_a_lower_tier_failed_to_write_is_sent_to_the_nearest(takes: int, dirty: int) -> None:
    """The path of the nearest one gets a writer in time. `takes`: failures until it is left out."""
    engine = TwinEngine(slots=16, below=64, lower=64)
    assert engine.offer(keys(0, dirty)) == keys(0, dirty)
    start_s, run, failed = engine.clock(), engine.lower.run, [0]

    def pause(seconds: float) -> None:
        engine.clock.advance(seconds)
        engine.twin.is_joining = engine.clock() < start_s + 3.0

    def fail() -> None:
        failed[0] += bool(engine.lower._queued)
        run()
        if failed[0] >= takes:
            engine.lower.answer = Put.RESTING

    engine.manager._closing._pause = pause
    engine.twin.is_joining = True
    engine.lower.outcome = BlockOutcome.REFUSED
    engine.lower.run = fail  # type: ignore[method-assign]
    assert engine.manager.flush_dirty(start_s + LONG_S)
    assert engine.twin.state()[0].blocks == dirty


def test_a_writer_is_waited_for_although_a_lower_tier_hangs() -> None:
    """Most blocks were sent to nobody: a lower tier takes an eighth of memory at a time."""
    engine = without_writer(64, 3.0, n=16)
    engine.lower.is_joining, engine.lower.is_stalled = False, True
    pause = engine.manager._closing._pause

    def pass_on(seconds: float) -> None:
        pause(seconds)
        engine.lower.is_joining = False

    engine.manager._closing._pause = engine.lower.pass_time = pass_on
    engine.manager.flush_dirty(engine.clock() + LONG_S)
    assert engine.twin.state()[0].blocks >= 14


def test_a_lower_tier_without_a_writer_is_waited_for() -> None:
    """It is the only one that will take blocks: the device of the nearest one failed for good."""
    engine = without_writer(64, 3.0, only_lower=True)
    engine.twin.answer, start_s = Put.RESTING, engine.clock()
    assert engine.manager.flush_dirty(start_s + LONG_S)
    assert engine.lower.state()[0].blocks == 4


@pytest.mark.parametrize("outcome", [BlockOutcome.REFUSED, BlockOutcome.CANCELLED])
@pytest.mark.parametrize("is_joining", [False, True])
def test_what_a_lower_tier_never_takes_is_not_sent_for_ever(
    outcome: BlockOutcome, is_joining: bool
) -> None:
    """The nearest tier takes nothing meanwhile."""
    engine = TwinEngine(slots=16, below=64, lower=64)
    engine.twin.is_joining, engine.twin.answer = is_joining, Put.RESTING
    engine.lower.outcome = outcome
    assert engine.offer(keys(0, 4)) == keys(0, 4)
    rounds, collect = [0], engine.manager._closing._collect

    def count() -> None:
        rounds[0] += 1
        collect()

    engine.manager._closing._collect = count
    engine.manager.flush_dirty(engine.clock() + LONG_S)
    assert rounds[0] < 20 + JOIN_LIMIT_S / JOIN_POLL_S


def test_a_path_that_stays_without_a_writer_is_given_up() -> None:
    engine = without_writer(0, LONG_S)
    start_s = engine.clock()
    assert not engine.manager.flush_dirty(start_s + LONG_S)
    assert engine.clock() == pytest.approx(start_s + JOIN_LIMIT_S, abs=0.1)


def test_nothing_is_waited_for_with_nothing_to_write() -> None:
    for engine in (TwinEngine(), without_writer(0, LONG_S)):
        engine.twin.is_joining = False
        engine.manager.flush_dirty(engine.clock() + 1.0)
        engine.twin.is_joining = True
        start_s = engine.clock()
        assert engine.manager.flush_dirty(start_s + LONG_S) and engine.clock() == start_s


def test_a_tier_that_hangs_takes_no_time_of_a_shutdown() -> None:
    cascade = Cascade((16, 64, 64), ManagerOptions(shutdown_flush_s=LONG_S))
    cascade.store(keys(0, 8))
    hang(cascade, 2 * LONG_S, node=1)
    demoters(cascade.manager)[0].demote_coldest(8)
    cascade.down[0].wait(set(cascade.down[0].queued))
    cascade.now_s += STALLED_S
    start_s = cascade.now_s
    cascade.manager.shutdown()
    assert written(cascade) == 8 and cascade.now_s <= start_s + NODE_STOP_S + WAIT_SLICE_S


def test_a_lower_tier_that_hangs_is_not_waited_for() -> None:
    engine = TwinEngine(slots=16, below=64, lower=64)
    engine.lower.is_stalled = True
    engine.offer(keys(0, 4))
    start_s = engine.clock()
    engine.manager.flush_dirty(start_s + LONG_S)
    assert engine.twin.state()[0].blocks == 4 and engine.clock() - start_s < 1.0


def test_what_goes_on_slowly_is_not_given_up() -> None:
    """Each try writes some and fails at the rest: there are as many rests as it takes."""
    cascade = Cascade((16, 64))
    cascade.store(keys(0, 16))
    tries = iter(range(1000))
    cascade.down[0].fate = lambda _a, _b: (
        BlockOutcome.IO_ERROR if next(tries) % 2 else BlockOutcome.OK
    )
    assert cascade.manager.flush_dirty(cascade.now_s + LONG_S) and written(cascade) == 16


def test_nobody_waits_for_a_full_disk() -> None:
    cascade = Cascade((16, 64))
    cascade.store(keys(0, 8))
    failing(cascade, 1000, BlockOutcome.NO_SPACE)
    start_s = cascade.now_s
    for _ in range(2):
        assert not cascade.manager.flush_dirty(start_s + LONG_S) and cascade.now_s == start_s


def test_a_rest_beyond_the_deadline_is_not_waited_for() -> None:
    cascade = Cascade((16, 64))
    cascade.store(keys(0, 8))
    failing(cascade, 8)
    start_s = cascade.now_s
    assert not cascade.manager.flush_dirty(start_s + REST_S / 2) and cascade.now_s == start_s


def test_a_copy_that_never_ends_is_given_up() -> None:
    cascade = Cascade((16, 64))
    cascade.store(keys(0, 8))
    demoters(cascade.manager)[0].demote_coldest(8)
    cascade.down[0].wait = lambda job_ids: None  # type: ignore[method-assign]
    cascade.now_s += STALLED_S
    start_s = cascade.now_s
    assert not cascade.manager.flush_dirty(start_s + LONG_S)
    assert cascade.now_s == start_s and written(cascade) == 0


def test_a_second_shutdown_waits_for_nothing() -> None:
    cascade = Cascade((16, 64), ManagerOptions(shutdown_flush_s=LONG_S))
    cascade.store(keys(0, 8))
    failing(cascade, 1000)
    cascade.manager.shutdown()
    start_s = cascade.now_s
    cascade.manager.shutdown()
    assert cascade.now_s == start_s


def test_what_finds_no_room_below_is_tried_again_once_there_is_some() -> None:
    """The middle tier is full of what a slow last one has not taken yet."""
    cascade = Cascade((32, 64, 1024))
    stored: list[BlockHash] = []
    for step in range(60):
        stored += cascade.store(keys(4 * step, 4 * step + 4)) or []
        cascade.down[0].wait(set(cascade.down[0].queued))
        cascade.manager.end_step()
    assert cascade.manager.flush_dirty(cascade.now_s + LONG_S)
    assert all(cascade.holds(1, h) or cascade.holds(2, h) for h in stored[-32:])


def in_use(cascade: Cascade) -> None:
    """Eight dirty blocks: four are loaded by a worker, five held by requests that wait."""
    cascade.below_only(keys(8, 9))
    cascade.store(keys(0, 8))
    assert cascade.manager.lookup(keys(0, 4)) == 4
    cascade.manager.prepare_load(keys(0, 4))
    for request in (Request(), Request()):  # they wait for the same
        assert cascade.manager.lookup(keys(3, 9), request) is None
    cascade.manager.end_step()
    assert not cascade.policies[0].coldest(8), "all are pinned"


def test_what_is_in_use_is_written_too() -> None:
    cascade = Cascade((16, 64))
    in_use(cascade)
    assert cascade.manager.flush_dirty(cascade.now_s + LONG_S)
    assert written(cascade) == 9
    cascade.manager.complete_load(set(keys(0, 4)))


def test_what_is_in_use_and_failed_is_tried_again_and_written_once() -> None:
    cascade = Cascade((16, 64))
    in_use(cascade)
    failing(cascade, 3)
    start_s, counters = cascade.now_s, cascade.manager.counters.links[0]
    assert cascade.manager.flush_dirty(start_s + LONG_S) and cascade.now_s == start_s + REST_S
    assert written(cascade) == 9 and counters.demoted_blocks == 9


def test_what_is_in_use_is_not_written_for_ever_into_a_small_tier() -> None:
    cascade = Cascade((16, 2))
    in_use_blocks = keys(0, 8)
    cascade.store(in_use_blocks)
    assert cascade.manager.lookup(in_use_blocks) == 8
    cascade.manager.prepare_load(in_use_blocks)
    cascade.manager.flush_dirty(cascade.now_s + LONG_S)
    assert cascade.manager.counters.links[0].demoted_blocks == 2
    assert [cascade.holds(1, k) for k in keys(0, 3)] == [True, True, False], "heads before tails"


def test_what_was_in_use_is_the_hottest_below() -> None:
    cascade = Cascade((16, 64), ManagerOptions(shutdown_flush_s=LONG_S))
    cascade.store(keys(0, 8))
    assert cascade.manager.lookup(keys(0, 2)) == 2
    cascade.manager.prepare_load(keys(0, 2))
    cascade.manager.shutdown()
    order = [block_hash for block_hash, _ in cascade.policies[1].coldest(8)]
    assert order[-2:] == [key(1), key(0)]


def test_what_is_worth_most_is_written_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time ends after eight blocks: those that two requests used, then the heads of prompts."""
    monkeypatch.setattr(first_tier, "RUN_BLOCKS", 2)
    cascade = Cascade((32, 64))
    manager = cascade.manager
    for start in (0, 10, 20):
        request = Request()
        for part in range(start, start + 6, 3):
            assert manager.prepare_store(keys(part, part + 3), request) is not None
            manager.complete_store(set(keys(part, part + 3)))
        manager.finish_request(request)
    again = Request()
    assert manager.lookup(keys(10, 14), again) == 4
    manager.prepare_load(keys(10, 14), again)
    manager.complete_load(keys(10, 14))
    manager.finish_request(again)
    order = demoters(manager)[0].search.most_useful(8, ())
    assert order == [*keys(10, 14), *keys(20, 22), *keys(0, 2)]


def test_shutdown_refreshes_the_recency_of_so_many_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flush, "MAX_REFRESHED_BLOCKS", 1)
    cascade = Cascade((8, 16))
    cascade.store(keys(0, 6))
    cascade.manager.flush_dirty(cascade.now_s + 1)
    cascade.policies[0].touch(keys(4, 6))
    cascade.manager.shutdown()
    coldest = [block_hash for block_hash, _ in cascade.policies[1].coldest(16)]
    assert coldest == [key(5), key(3), key(2), key(1), key(0), key(4)], "the hottest one alone"


@pytest.mark.parametrize("slots", [16, 64, 512])
def test_a_small_first_tier_takes_stores_though_the_tier_below_hangs(slots: int) -> None:
    """The writes that never end leave it blocks that may leave."""
    cascade = Cascade((slots, 1000))
    for number in range(slots):
        assert cascade.store([key(number)])
    taken = 0
    for number in range(slots, slots + 80):
        cascade.now_s += 0.5
        cascade.manager.end_step()
        if cascade.manager.prepare_store([key(number)], Request()) is not None:
            cascade.manager.complete_store({key(number)})
            taken += 1
    assert taken >= 40
