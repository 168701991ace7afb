"""Slots that a waiting claim may take."""

from __future__ import annotations

from support.cascade import Cascade
from support.inside import claims_of
from support.keys import key, keys

from kvcascade.manager.cascading import ManagerOptions
from kvcascade.manager.promotion.claims import Claim
from kvcascade.manager.request import Request

DEADLINE_S = 10.0


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
