"""Slots that a waiting claim may take."""

from __future__ import annotations

import math

import pytest
from support.cascade import BLOCK_SIZE, Cascade
from support.inside import claims_of
from support.keys import key, keys

from kvcascade.manager.core import ManagerOptions
from kvcascade.manager.promotion.claims import Claim
from kvcascade.manager.request import Request

DEADLINE_S = 10.0
HUNG = 4
"""Blocks of a read that never ends, as on one of several devices."""


class BesideHungRead:
    """A first tier of 64 slots. One read never ends, and is late; all others end in their step."""

    def __init__(self) -> None:
        options = ManagerOptions(promotion_deadline_s=DEADLINE_S, tokens_per_block=1.0)
        self.cascade = Cascade((64, 400), options)
        self.manager = self.cascade.manager
        for start in range(0, 300, 30):
            self.cascade.below_only(keys(start, start + 30))
        self._numbers = iter(range(200, 300))
        self.up = self.cascade.up[0]
        first = Request()
        self.manager.lookup(keys(0, HUNG), first)
        self.manager.end_step()
        self.hung = set(self.up.queued)
        while self.manager.lookup(keys(0, HUNG), first) is None:
            self.cascade.now_s += 1.0
            self.ask_small()
        self.manager.finish_request(first)

    def step(self, read_s: float = 0.0) -> None:
        """The reads that were asked for before this step end in it, after `read_s`."""
        self.manager.end_step()
        self.cascade.now_s += read_s
        self.up.wait(set(self.up.queued) - self.hung)
        self.manager.end_step()

    def ask_small(self, read_s: float = 0.0) -> int | None:
        """Return the hits of another prompt of one block after a step."""
        block, request = [key(next(self._numbers))], Request()
        assert self.manager.lookup(block, request) in (None, 0)
        self.step(read_s)
        found = self.manager.lookup(block, request)
        self.manager.finish_request(request)
        return found


def test_a_prompt_that_a_hung_read_leaves_no_room_for_is_cut_at_once() -> None:
    """It waited until its deadline, and all requests behind it did the same."""
    rig, large = BesideHungRead(), Request()
    assert rig.manager.lookup(keys(100, 158), large) is None
    rig.step()
    assert rig.manager.lookup(keys(100, 158), large) == 60 - HUNG
    rig.manager.finish_request(large)
    assert [rig.ask_small() for _ in range(20)] == [1] * 20


def test_a_claim_that_fits_beside_a_hung_read_is_not_cut() -> None:
    rig, large = BesideHungRead(), Request()
    assert rig.manager.lookup(keys(100, 100 + 60 - HUNG), large) is None
    rig.cascade.store(keys(1000, 1020))  # dirty blocks leave it half of the tier beside others
    for _ in range(4):
        rig.cascade.down[0].wait(set(rig.cascade.down[0].queued))
        rig.step()
    assert rig.manager.lookup(keys(100, 100 + 60 - HUNG), large) == 60 - HUNG


def test_a_hung_read_of_before_a_reset_takes_no_room() -> None:
    rig = BesideHungRead()
    assert rig.manager._promoter.late_blocks == HUNG
    rig.manager.reset_cache()
    assert rig.manager._promoter.late_blocks == 0


def test_the_rate_of_a_tier_is_measured_beside_a_hung_read() -> None:
    """The time in which the tier had nothing else to do counted as time of reading."""
    rig = BesideHungRead()
    worth = rig.manager._claims.choice.worth
    assert worth is not None
    for _ in range(10):
        assert worth.may_probe(1, rig.cascade.now_s)
        assert rig.ask_small(read_s=0.1) == 1
        rig.cascade.now_s += DEADLINE_S / 2
    assert worth.links[0].bytes_per_s(rig.cascade.now_s) == pytest.approx(BLOCK_SIZE / 0.1, rel=0.1)
    rig.up.wait(rig.hung)
    rig.manager.end_step()
    assert worth.links[0].in_flight_bytes == 0


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_tier_whose_reads_are_all_late_is_measured_when_they_arrive(is_reset: bool) -> None:
    options = ManagerOptions(promotion_deadline_s=DEADLINE_S, tokens_per_block=1.0)
    cascade, blocks = Cascade((64, 100), options), keys(0, 4)
    cascade.below_only(blocks)
    manager, worth = cascade.manager, claims_of(cascade.manager).choice.worth
    assert worth is not None
    link = worth.links[0]
    assert manager.lookup(blocks, Request()) is None
    manager.end_step()
    if is_reset:
        manager.reset_cache()
    for _ in range(40):
        cascade.now_s += 1.0
        manager.end_step()
    assert link.in_flight_bytes == 0 and link.bytes_per_s(cascade.now_s) == math.inf
    cascade.run_transfers()
    assert link.in_flight_bytes == 0
    measured = math.inf if is_reset else len(blocks) * BLOCK_SIZE / 40
    assert link.bytes_per_s(cascade.now_s) == measured


def test_time_behind_another_claim_cuts_no_claim() -> None:
    """It says nothing about loads in flight: only these may keep a claim waiting for ever."""
    cascade = Cascade((100, 100), ManagerOptions(promotion_deadline_s=DEADLINE_S))
    room, loads, start_s = claims_of(cascade.manager).room, keys(0, 80), cascade.now_s
    cascade.store(loads)
    cascade.manager.lookup(loads, Request())
    cascade.manager.prepare_load(loads, Request())
    first, waiting = Claim(Request(), start_s), Claim(Request(), start_s)
    first.new_slots, waiting.new_slots = 60, 30
    assert room.room_for(waiting, 50, None) is None
    cascade.now_s += DEADLINE_S - 1
    assert room.room_for(waiting, 50, None) is None
    room.room_for(waiting, 50, first)
    cascade.now_s += 2
    assert room.room_for(waiting, 50, None) is None
    cascade.now_s += DEADLINE_S
    assert room.room_for(waiting, 50, None) is not None


def test_a_request_that_asks_from_the_end_on_keeps_its_turn() -> None:
    """An engine with sliding windows alone asks so. The last block of a new prompt is nowhere."""
    cascade = Cascade((64, 200), ManagerOptions(promotion_budget_slots=16))
    manager, large, small = cascade.manager, keys(0, 10), keys(100, 180)
    for blocks in (large, small):
        for start in range(0, len(blocks), 5):
            cascade.below_only(blocks[start : start + 5])
    window, others = Request(), [Request() for _ in small]
    for other, block in zip(others[:12], small, strict=False):
        manager.lookup([block], other)
    steps = 0
    while window.claim is None or not window.claim.is_admitted:
        for block in (key(999), *reversed(large)):
            manager.lookups.lookup_block(block, window)
        manager.lookup([small[12 + steps]], others[12 + steps])
        manager.end_step()
        cascade.run_transfers()
        done = others[steps]
        if manager.lookup([small[steps]], done):
            manager.prepare_load([small[steps]], done)
            manager.complete_load([small[steps]])
        manager.finish_request(done)
        steps += 1
    assert steps < 30
