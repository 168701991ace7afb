"""A tier that fails or stalls is left alone, tried again, and used again."""

from __future__ import annotations

from support.cascade import Cascade
from support.clock import ManualClock
from support.keys import key, keys

from kvcascade.manager.base import LookupState
from kvcascade.manager.below.single_tier import STALLED_S
from kvcascade.manager.core import ManagerOptions
from kvcascade.manager.request import Request
from kvcascade.tiers.base import BlockOutcome
from kvcascade.tiers.breaker import FAILURES_TO_OPEN, REST_S, Breaker

STALL_S = 10.0
MISS, PENDING, HIT = LookupState.MISS, LookupState.PENDING, LookupState.HIT


def run(breaker: Breaker, is_failure: bool) -> None:
    breaker.started()
    breaker.ended(is_failure)


class TestBreaker:
    def setup_method(self) -> None:
        self.clock = ManualClock()
        self.breaker = Breaker(self.clock, STALL_S)

    def test_opens_after_failures_in_a_row_only(self) -> None:
        for _ in range(5):
            for _ in range(FAILURES_TO_OPEN - 1):
                run(self.breaker, is_failure=True)
            run(self.breaker, is_failure=False)
        assert not self.breaker.is_open and self.breaker.openings == 0
        for _ in range(FAILURES_TO_OPEN):
            run(self.breaker, is_failure=True)
        assert self.breaker.is_open and self.breaker.openings == 1

    def test_a_probe_closes_it_or_opens_it_again(self) -> None:
        for _ in range(FAILURES_TO_OPEN):
            run(self.breaker, is_failure=True)
        self.clock.advance(REST_S)
        assert not self.breaker.is_open
        self.breaker.started()
        assert self.breaker.is_open, "one probe at a time"
        self.breaker.ended(is_failure=True)
        assert self.breaker.is_open and self.breaker.openings == 2
        self.clock.advance(REST_S)
        run(self.breaker, is_failure=False)
        assert not self.breaker.is_open and self.breaker.openings == 2

    def test_a_stall_opens_it_until_it_ends(self) -> None:
        self.breaker.started()
        self.clock.advance(STALL_S - 0.1)
        self.breaker.look_at_clock()
        assert not self.breaker.is_open
        seen = 0
        for pause_s in [1.0] * 50 + [REST_S + 1] * 5:
            self.clock.advance(pause_s)
            seen += self.breaker.look_at_clock()
        assert self.breaker.is_open and seen == 1
        self.breaker.ended(is_failure=False)
        assert not self.breaker.is_open

    def test_slow_is_not_stalled(self) -> None:
        self.breaker.started()
        for _ in range(20):
            self.breaker.started()
            self.clock.advance(STALL_S - 1)
            self.breaker.ended(is_failure=False)
            self.breaker.look_at_clock()
        assert not self.breaker.is_open

    def test_an_idle_device_is_not_stalled(self) -> None:
        run(self.breaker, is_failure=False)
        self.clock.advance(1e6)
        self.breaker.look_at_clock()
        assert not self.breaker.is_open


def ask(cascade: Cascade, i: int) -> LookupState:
    """A new request's answer for a block, after the transfers have run if it has to wait."""
    request = Request()
    state = cascade.manager.lookups.lookup_block(key(i), request)
    if state is PENDING:
        cascade.manager.end_step()
        cascade.run_transfers()
        state = cascade.manager.lookups.lookup_block(key(i), request)
    cascade.manager.finish_request(request)
    cascade.manager.end_step()
    return state


class TestReads:
    def test_a_disk_that_fails_every_read_is_asked_a_few_times_only(self) -> None:
        cascade = Cascade((8, 16))
        cascade.below_only(keys(0, 8))
        link = cascade.manager.counters.links[0]
        cascade.up[0].fate = lambda source, target: BlockOutcome.IO_ERROR
        assert [ask(cascade, i % 8) for i in range(50)] == [MISS] * 50
        assert link.promote_failed_blocks == FAILURES_TO_OPEN
        assert link.promote_openings == 1
        assert link.promote_refused_blocks == 50 - FAILURES_TO_OPEN
        cascade.now_s += REST_S
        assert [ask(cascade, i) for i in range(8)] == [MISS] * 8
        assert link.promote_failed_blocks == FAILURES_TO_OPEN + 1, "one probe"
        assert link.promote_openings == 2
        cascade.up[0].fate = lambda source, target: BlockOutcome.OK
        assert ask(cascade, 0) is MISS
        cascade.now_s += REST_S
        assert [ask(cascade, i) for i in range(8)] == [HIT] * 8

    def test_a_request_that_waits_for_the_device_is_refused_once(self) -> None:
        cascade, waiting = Cascade((8, 16)), Request()
        cascade.below_only(keys(0, 8))
        link = cascade.manager.counters.links[0]
        cascade.up[0].fate = lambda source, target: BlockOutcome.IO_ERROR
        assert [ask(cascade, i) for i in range(FAILURES_TO_OPEN)] == [MISS] * FAILURES_TO_OPEN
        for _ in range(20):
            assert cascade.manager.lookups.lookup_block(key(7), waiting) is MISS
            cascade.manager.end_step()
        assert link.promote_refused_blocks == 1

    def test_damaged_blocks_are_not_the_silence_of_a_device(self) -> None:
        cascade = Cascade((8, 16))
        cascade.below_only(keys(0, 8))
        cascade.up[0].fate = lambda source, target: BlockOutcome.CORRUPT
        assert [ask(cascade, i) for i in range(7)] == [MISS] * 7
        cascade.up[0].fate = lambda source, target: BlockOutcome.OK
        assert ask(cascade, 7) is HIT
        assert cascade.manager.counters.links[0].promote_openings == 0

    def test_while_a_read_stalls_nobody_else_waits_for_the_disk(self) -> None:
        cascade = Cascade((8, 16), ManagerOptions(promotion_deadline_s=3.0))
        cascade.below_only(keys(0, 8))
        first = Request()
        assert cascade.manager.lookups.lookup_block(key(0), first) is PENDING
        cascade.manager.end_step()
        cascade.now_s += 3.0
        cascade.manager.end_step()
        assert cascade.manager.lookups.lookup_block(key(0), first) is MISS, "its deadline"
        assert cascade.manager.lookups.lookup_block(key(1), Request()) is MISS
        assert not cascade.up[0].queued[1:], "nothing more was started"
        assert cascade.manager.counters.links[0].promote_openings == 1
        cascade.run_transfers()
        assert ask(cascade, 1) is HIT


class TestWrites:
    def test_a_stalled_disk_does_not_stop_stores(self) -> None:
        cascade = Cascade((4, 16))
        cascade.store(keys(0, 4))
        assert cascade.manager.prepare_store(keys(4, 6)) is None, "waiting a little may help"
        cascade.now_s += STALLED_S
        cascade.store(keys(10, 12))
        cascade.manager.end_step()
        link = cascade.manager.counters.links[0]
        assert link.demote_openings == 1
        cascade.run_transfers()
        cascade.now_s += REST_S
        assert cascade.store(keys(4, 8)) == keys(4, 8), "and goes on when the disk does"
        assert link.demote_openings == 1
        assert all(cascade.holds(1, block_hash) for block_hash in keys(0, 4))

    def test_a_second_window_of_a_stall_is_not_a_second_opening(self) -> None:
        cascade = Cascade((4, 16))
        cascade.store(keys(0, 4))
        assert cascade.manager.prepare_store(keys(4, 6)) is None
        for _ in range(60):
            cascade.now_s += 1.0
            cascade.manager.end_step()
        assert cascade.manager.counters.links[0].demote_openings == 1

    def test_stores_take_what_is_left_while_the_disk_stalls(self) -> None:
        cascade = Cascade((8, 64), ManagerOptions(low_watermark=0.1, high_watermark=0.4))
        cascade.store(keys(0, 8))
        cascade.manager.end_step()
        assert cascade.down[0].queued, "the cold end is on its way"
        cascade.now_s += STALLED_S
        cascade.manager.end_step()
        taken = cascade.store(keys(20, 24))
        assert taken, "blocks that are not on their way may be dropped"
        assert cascade.manager.counters.dropped_dirty_blocks > 0
