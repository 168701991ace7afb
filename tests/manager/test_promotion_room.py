"""Slots that a waiting claim may take."""

from __future__ import annotations

from support.cascade import Cascade
from support.inside import claims_of
from support.keys import keys

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
