"""Inclusive tiers below: what is written where, which copy counts, and resets of one of them."""

from __future__ import annotations

import pytest
from support.below_twin import BelowTwin
from support.cascade import BLOCK_SIZE
from support.clock import ManualClock
from support.keys import key, keys
from support.memory_backend import MemoryBackend
from support.node_rig import NodesRig
from support.twin_engine import TwinEngine

from kvcascade.config.schema import WriteMode
from kvcascade.manager.admission import AdmissionFunction, admit_second_touch
from kvcascade.manager.base import LookupState
from kvcascade.manager.below.chain import (
    ABSENT_AFTER_S,
    LOWER_SHARE,
    PASS_ON_AFTER_S,
    BelowChain,
    ChainedTier,
)
from kvcascade.manager.below.port import ASKING, Ended, Put
from kvcascade.manager.core import MAX_JOBS_IN_FLIGHT
from kvcascade.manager.request import Request
from kvcascade.tiers.base import BlockOutcome

OK, FAILED = BlockOutcome.OK, BlockOutcome.IO_ERROR
SLOTS = 32
NEAR, FAR = 8, 16
LIMIT = SLOTS // LOWER_SHARE
"""Blocks that may be in flight to the lower tier."""


class Chain:
    """Two twins behind a chain."""

    def __init__(self, admission: AdmissionFunction | None = None) -> None:
        self.clock = ManualClock()
        self.arena = MemoryBackend(BLOCK_SIZE, SLOTS, medium="CPU")
        self.near = BelowTwin(self.arena.view, NEAR, BLOCK_SIZE)
        self.far = BelowTwin(self.arena.view, FAR, BLOCK_SIZE)
        tiers = [ChainedTier(self.near, None), ChainedTier(self.far, admission)]
        self.below = BelowChain(tiers, SLOTS, self.clock)
        self.ticket = 0

    def begin(self, start: int, stop: int) -> list[Put]:
        """Offer blocks by number."""
        self.ticket += 1
        return list(self.below.put(self.ticket, keys(start, stop), range(stop - start)))

    def put(self, start: int, stop: int) -> Ended:
        """Offer blocks, and wait until the put has ended."""
        assert Put.STARTED in self.begin(start, stop)
        self.run()
        (ended,) = self.below.poll()
        return ended

    def run(self) -> None:
        """Let transfers end."""
        self.near.run()
        self.far.run()

    def held(self, number: int) -> tuple[bool, bool]:
        """Whether each tier holds a block."""
        return bool(self.near.may_hold(key(number))), bool(self.far.may_hold(key(number)))


def test_a_put_ends_once_when_every_tier_has_ended_its_part() -> None:
    chain = Chain()
    chain.far.is_stalled = True
    assert chain.begin(0, 3) == [Put.STARTED] * 3 and chain.below.late_puts == 0
    chain.run()
    assert list(chain.below.poll()) == [] and chain.below.late_puts == 1
    assert chain.held(0) == (True, False) and chain.below.may_hold(key(0)) == 1
    chain.far.is_stalled = False
    chain.run()
    (ended,) = chain.below.poll()
    assert (ended.ticket, ended.tier, list(ended.outcomes)) == (1, 1, [OK] * 3)
    assert list(chain.below.poll()) == [] and chain.below.late_puts == 0
    assert chain.held(0) == (True, True)


def test_the_blocks_in_flight_to_a_lower_tier_are_limited() -> None:
    chain = Chain()
    chain.far.is_stalled = True
    assert chain.begin(0, LIMIT + 2) == [Put.STARTED] * (LIMIT + 2)
    assert chain.begin(LIMIT + 2, NEAR) == [Put.STARTED] * (NEAR - LIMIT - 2)
    assert chain.below.links[1].demote_missed_blocks == NEAR - LIMIT
    chain.run()
    assert [ended.ticket for ended in chain.below.poll()] == [2], "it has no part there"
    chain.far.is_stalled = False
    chain.run()
    (ended,) = chain.below.poll()
    assert len(ended.outcomes) == LIMIT + 2
    assert [chain.held(n)[1] for n in range(NEAR)] == [True] * LIMIT + [False] * (NEAR - LIMIT)


@pytest.mark.parametrize(
    ("near", "far", "merged"),
    [(FAILED, OK, OK), (OK, FAILED, OK), (FAILED, BlockOutcome.GONE, FAILED)],
)
def test_the_outcome_is_ok_if_any_tier_stored_the_block(
    near: BlockOutcome, far: BlockOutcome, merged: BlockOutcome
) -> None:
    chain = Chain()
    chain.near.outcome, chain.far.outcome = near, far
    assert list(chain.put(0, 2).outcomes) == [merged] * 2


def test_outcomes_are_in_the_order_of_the_keys_that_any_tier_started() -> None:
    chain = Chain()
    chain.near.answer = Put.OVER_BUDGET
    chain.put(1, 2)
    chain.near.answer = Put.STARTED
    chain.put(2, 3)
    chain.far.outcome = BlockOutcome.NO_SPACE
    assert chain.begin(0, 4) == [Put.STARTED, Put.STARTED, Put.ALREADY, Put.STARTED]
    chain.near.outcome = FAILED
    chain.run()
    (ended,) = chain.below.poll()
    assert list(ended.outcomes) == [FAILED] * 3


@pytest.mark.parametrize("refusal", [Put.RESTING, Put.FULL, Put.OVER_BUDGET, Put.NOT_TAKEN])
def test_a_lower_tier_takes_what_the_nearest_does_not(refusal: Put) -> None:
    chain = Chain()
    chain.near.answer = refusal
    below = chain.below
    assert below.takes_puts and not below.is_blocked and below.room(2) == 2
    assert below.write_state().rest_left_s == 0
    chain.put(0, 2)
    assert chain.held(0) == (False, True) and below.may_hold(key(0)) == 2
    assert chain.begin(0, 2) == [Put.ALREADY] * 2
    chain.far.answer = Put.RESTING
    assert chain.begin(2, 3) == [refusal]
    assert below.takes_puts == (refusal is not Put.RESTING)
    assert below.is_blocked == (refusal is Put.RESTING)


def test_a_tier_that_leaves_blocks_out_waits_for_the_nearest() -> None:
    chain = Chain()
    below = chain.below
    chain.near.answer, chain.far.answer = Put.RESTING, Put.UNWANTED
    assert chain.begin(0, 2) == [Put.RESTING] * 2
    assert not below.takes_puts and below.is_blocked and below.write_state().rest_left_s > 0
    chain.near.answer = Put.OVER_BUDGET
    assert below.takes_puts and chain.begin(0, 2) == [Put.ALREADY] * 2
    chain.near.answer = Put.STARTED
    chain.put(0, 2)
    assert chain.held(0) == (True, False) and not below.links[1].demote_missed_blocks


@pytest.mark.parametrize("answer", [Put.STARTED, Put.UNWANTED, Put.RESTING])
def test_a_full_nearest_tier_costs_no_block_that_a_lower_one_may_take(answer: Put) -> None:
    chain = Chain()
    chain.near.is_full, chain.far.answer = True, answer
    assert chain.below.takes_puts, "each block is offered to both"
    assert chain.below.is_blocked == (answer is Put.RESTING)


def test_a_tier_that_admits_by_uses_counts_no_offer_while_the_nearest_rests() -> None:
    chain = Chain(admit_second_touch)
    chain.near.answer = Put.RESTING
    assert [chain.begin(0, 1), chain.begin(0, 1)] == [[Put.RESTING]] * 2
    assert not chain.below.takes_puts and chain.held(0) == (False, False)


def test_the_lower_tiers_decide_alone_if_the_nearest_takes_nothing_for_long() -> None:
    chain = Chain()
    chain.near.answer, chain.far.answer = Put.RESTING, Put.UNWANTED
    chain.clock.advance(ABSENT_AFTER_S + 1.0)
    assert chain.below.takes_puts and not chain.below.is_blocked and chain.below.room(2) == 2
    assert chain.begin(0, 2) == [Put.ALREADY] * 2
    chain.near.answer = Put.STARTED
    chain.below.maintain()
    chain.near.answer = Put.RESTING
    assert chain.begin(0, 2) == [Put.RESTING] * 2


def test_a_tier_whose_writes_all_fail_takes_nothing_although_it_tries() -> None:
    chain = Chain()
    below = chain.below
    chain.near.outcome, chain.far.answer = FAILED, Put.UNWANTED
    for _ in range(10):
        chain.near.answer = Put.STARTED
        assert list(chain.put(0, 1).outcomes) == [FAILED]
        chain.near.answer = Put.RESTING
        chain.clock.advance(ABSENT_AFTER_S / 9)
        below.maintain()
        chain.near.answer = Put.STARTED
        below.maintain()
    chain.near.answer = Put.RESTING
    assert below.takes_puts and chain.begin(0, 2) == [Put.ALREADY] * 2
    chain.near.answer, chain.near.outcome = Put.STARTED, OK
    chain.put(2, 3)
    below.maintain()
    chain.near.answer = Put.RESTING
    assert not below.takes_puts


def test_what_a_stand_in_refuses_afterwards_is_offered_again() -> None:
    """A remote tier refuses what it could not upload, so that nothing waits for it."""
    chain = Chain()
    chain.near.answer, chain.far.outcome = Put.RESTING, BlockOutcome.REFUSED
    assert list(chain.put(0, 2).outcomes) == [FAILED] * 2
    chain.near.answer = Put.OVER_BUDGET
    assert list(chain.put(0, 2).outcomes) == [BlockOutcome.REFUSED] * 2


@pytest.mark.parametrize("refusal", [Put.RESTING, Put.FULL])
def test_what_a_stand_in_has_no_room_for_is_offered_again(
    refusal: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TwinEngine(slots=4 * LOWER_SHARE, lower=2, mode=WriteMode.THROUGH)
    monkeypatch.setattr(engine.lower, "room", lambda n: n)
    engine.twin.answer = refusal
    assert engine.offer(keys(4)) == keys(4)
    engine.step()
    engine.step()
    assert [engine.lower.may_hold(h) for h in keys(4)] == [1, 1, 0, 0]
    engine.step()
    assert [engine.lower.may_hold(h) for h in keys(2, 4)] == [1, 1]


def test_a_shutdown_waits_for_the_rest_of_the_nearest_tier() -> None:
    engine = TwinEngine(lower=64)
    engine.twin.answer, engine.lower.answer = Put.RESTING, Put.UNWANTED
    assert engine.offer(keys(2)) == keys(2)

    def pause(seconds: float) -> None:
        engine.clock.advance(seconds)
        engine.twin.answer = Put.STARTED

    engine.manager._closing._pause = pause
    assert engine.manager.flush_dirty(engine.clock() + 5.0)
    assert [engine.twin.may_hold(h) for h in keys(2)] == [1, 1]


def test_what_the_nearest_tier_takes_later_waits_in_every_tier() -> None:
    chain = Chain()
    chain.near.answer = Put.LATER
    assert chain.begin(0, 2) == [Put.LATER] * 2
    assert chain.held(0) == (False, False) and not chain.far.links[0].demote_missed_blocks


def test_a_block_that_the_nearest_tier_holds_is_written_below_when_it_comes_again() -> None:
    chain = Chain()
    chain.far.answer = Put.RESTING
    chain.put(0, 2)
    assert chain.held(0) == (True, False)
    chain.far.answer = Put.STARTED
    chain.put(0, 2)
    assert chain.held(0) == (True, True)


def test_a_lower_tier_admits_by_the_number_of_offers() -> None:
    chain = Chain(admit_second_touch)
    chain.put(0, 2)
    assert chain.held(0) == (True, False)
    assert chain.below.links[1].demote_refused_blocks == 2
    chain.put(0, 2)
    assert chain.held(0) == (True, True)


def test_a_block_is_lost_when_no_tier_holds_it_and_hot_where_it_is_left() -> None:
    chain = Chain()
    for start in range(0, FAR, LIMIT):
        chain.put(start, start + LIMIT)
    assert chain.below.take_lost() == [], "the lower tier has what left the nearest"
    assert chain.held(0) == (False, True)
    chain.put(FAR, FAR + LIMIT)
    lost = chain.below.take_lost()
    assert lost == [key(n) for n in range(NEAR, NEAR + LIMIT)], "what left early was touched then"
    assert all(chain.below.may_hold(h) == 2 for h in keys(LIMIT))


def test_a_block_that_leaves_before_its_put_has_ended_is_named_afterwards() -> None:
    chain = Chain()
    chain.begin(0, 1)
    chain.near.run()
    assert list(chain.below.poll()) == []
    chain.near._leave(key(0))
    assert chain.below.take_lost() == [key(0)], "the caller still writes it"
    chain.far.outcome = FAILED
    chain.run()
    (ended,) = chain.below.poll()
    assert list(ended.outcomes) == [OK] and chain.below.take_lost() == [key(0)]
    assert chain.below.take_lost() == []


def test_a_tier_that_may_not_be_read_is_passed_over_if_another_holds_the_block() -> None:
    chain = Chain()
    chain.put(0, 1)
    chain.far.answer = Put.RESTING
    chain.put(1, 2)
    chain.near.reads_rest = True
    assert chain.below.may_hold(key(0)) == 2 and not chain.below.rests(2)
    assert chain.below.may_hold(key(1)) == 1 and chain.below.rests(1)


def test_a_lookup_waits_for_a_tier_elsewhere_only_if_no_tier_holds_the_block() -> None:
    chain = Chain()
    chain.put(0, 1)
    chain.near.is_elsewhere = chain.far.is_elsewhere = True
    assert [chain.below.may_hold(h, None, "request") for h in keys(2)] == [1, ASKING]
    assert chain.below.may_hold(key(1)) == 0, "nobody waits for the answer"
    chain.near.reset()
    assert chain.below.may_hold(key(0), None, "request") == 2
    chain.near.lies[key(0)], chain.near.reads_rest = 1, True
    chain.far.reset()
    assert chain.below.may_hold(key(0), None, "request") == 1, "a tier that rests has it"


def test_a_slow_tier_far_below_does_not_hold_up_the_nearest() -> None:
    blocks = 2 * MAX_JOBS_IN_FLIGHT * LOWER_SHARE
    engine = TwinEngine(slots=blocks, below=blocks, lower=blocks)
    engine.lower.is_stalled = True
    for number in range(blocks):
        assert engine.offer([key(number)]) == [key(number)]
        engine.manager.flush_dirty(engine.clock() + 1.0)
        engine.clock.advance(20.0)
    assert engine.twin.state()[0].blocks == blocks
    assert len(engine.manager._demoter.jobs) == blocks // LOWER_SHARE


def test_a_nearest_tier_that_hangs_does_not_hold_up_a_lower_one() -> None:
    hanging = MAX_JOBS_IN_FLIGHT
    engine = TwinEngine(slots=4 * hanging, below=64, lower=64)
    engine.twin.is_stalled = True
    for number in range(hanging):
        assert engine.offer([key(number)]) == [key(number)]
        assert engine.manager._demoter.demote([key(number)]) == 0
    engine.step()
    engine.twin.answer, engine.twin.reads_rest = Put.RESTING, True
    for number in range(hanging, 40):
        engine.step()
        assert engine.offer([key(number)]) == [key(number)], "the older ones were written below"
    assert engine.lower.state()[0].blocks > 40 - 4 * hanging
    assert len(engine.manager._demoter.jobs) >= hanging, "their slots keep their bytes"
    for _ in range(3):
        request, asked = Request(), keys(hanging, 2 * hanging)
        engine.ask(request, asked)
        for _ in range(4):
            engine.step()
        assert engine.ask(request, asked) == [LookupState.HIT] * hanging
        engine.loads(request, asked)
        engine.manager.finish_request(request)


def test_a_damaged_block_comes_from_the_next_tier() -> None:
    engine, request = TwinEngine(SLOTS, lower=64), Request()
    engine.below_only(keys(2))
    asked = [LookupState.PENDING] * 2
    assert engine.ask(request, keys(2)) == asked
    engine.twin.outcome = BlockOutcome.CORRUPT
    engine.step()
    engine.step()
    engine.manager.finish_request(request)
    again = Request()
    assert engine.ask(again, keys(2)) == asked
    engine.step()
    engine.step()
    assert engine.ask(again, keys(2)) == [LookupState.HIT] * 2
    engine.loads(again, keys(2))
    assert engine.manager.counters.loaded_blocks == [0, 0, 2]


def test_a_lower_tier_serves_while_the_nearest_fails() -> None:
    engine, request = TwinEngine(lower=64), Request()
    engine.twin.answer, engine.twin.reads_rest = Put.RESTING, True
    engine.below_only(keys(1))
    assert engine.ask(request, keys(1)) == [LookupState.PENDING]
    assert engine.manager.counters.dropped_dirty_blocks == 0


def test_a_reset_of_one_tier_reaches_the_others_and_nothing_is_found_meanwhile() -> None:
    chain = Chain()
    chain.put(0, 2)
    chain.far.is_overtaken = True
    assert chain.below.maintain()
    assert chain.held(0) == (True, False) and chain.below.may_hold(key(0)) == 0
    chain.far.marks = [77]
    assert not chain.below.maintain() and chain.near.reset_marks == []
    chain.clock.advance(PASS_ON_AFTER_S)
    assert not chain.below.maintain() and chain.near.reset_marks == [77]
    assert chain.far.reset_marks == [] and chain.held(0) == (False, False)
    chain.put(2, 3)
    assert chain.below.may_hold(key(2)) == 1
    chain.near.is_overtaken, chain.near.marks = True, [77]
    assert chain.below.maintain(), "the engine that began it is late"
    assert chain.below.may_hold(key(9)) == 0 and not chain.below._resets.are_open
    assert chain.far.reset_marks == []


def test_a_reset_that_reaches_every_tier_by_itself_is_not_passed_on() -> None:
    chain = Chain()
    chain.near.is_overtaken, chain.near.marks = True, [5]
    chain.below.maintain()
    chain.far.is_overtaken, chain.far.marks = True, [5]
    assert chain.below.maintain() and not chain.below._resets.are_open
    chain.clock.advance(2 * PASS_ON_AFTER_S)
    chain.below.maintain()
    assert chain.near.reset_marks == chain.far.reset_marks == []


def test_a_reset_whose_mark_is_lost_gets_another() -> None:
    chain = Chain()
    chain.near.is_overtaken = True
    chain.below.maintain()
    chain.clock.advance(PASS_ON_AFTER_S)
    chain.below.maintain()
    assert len(chain.far.reset_marks) == 1 and not chain.below._resets.are_open


def test_engines_pass_a_reset_on_once() -> None:
    """An engine that uses one path only resets it; two engines over both paths pass that on."""
    rigs = [NodesRig(is_real=True) for _ in range(2)]
    rigs[1].clock = rigs[0].clock
    chains = [
        BelowChain([ChainedTier(rig.add().tier, None) for rig in rigs], SLOTS, rigs[0].clock)
        for _ in range(2)
    ]
    alone = rigs[0].add().tier
    ports = [*chains, alone]
    alone.maintain()
    alone.reset()
    for _ in range(20):
        for rig in rigs:
            rig.pump()
        for port in ports:
            port.maintain()
        rigs[0].clock.advance(PASS_ON_AFTER_S / 2)
    epochs = [rig.nodes[0].tier.feed.epoch for rig in rigs]
    assert epochs == [1, 1], "each path was reset once"
    assert not any(chain._resets.are_open for chain in chains)


def test_nothing_is_written_until_a_reset_has_reached_every_tier() -> None:
    """A tier that is reset later would lose it, and the first tier would call it settled."""
    engine = TwinEngine(8, lower=32)
    engine.lower.is_overtaken, engine.lower.marks = True, [77]
    engine.step()
    assert engine.offer(keys(2)) == keys(2)
    engine.manager.flush_dirty(engine.clock() + 0.2)
    engine.clock.advance(PASS_ON_AFTER_S)
    engine.step()
    assert engine.twin.reset_marks == [77]
    assert engine.manager.flush_dirty(engine.clock() + 5.0)
    assert [engine.twin.may_hold(h) for h in keys(2)] == [1, 1]
