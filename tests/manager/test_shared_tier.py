"""A tier that other engines use too: what they do to it, and what the manager makes of that."""

from __future__ import annotations

from support.cascade import Cascade, key

from kvcascade.manager.base import LookupState
from kvcascade.manager.request import Request
from kvcascade.tiers.base import BlockHash, BlockOutcome

DAY_S = 86400


def keys(start: int, stop: int) -> list[BlockHash]:
    return [key(i) for i in range(start, stop)]


def reset_by_another(cascade: Cascade) -> None:
    cascade.backends[1].is_overtaken = True
    cascade.manager.end_step()


def test_a_block_that_another_engine_stored_first_is_settled() -> None:
    cascade = Cascade((4, 16))
    cascade.store(keys(0, 4))
    cascade.down[0].fate = lambda source, target: BlockOutcome.HELD
    assert cascade.manager.flush_dirty(cascade.now_s + 1), "nothing dirty is left"
    counters = cascade.manager.counters.links[0]
    assert (counters.demote_held_blocks, counters.demote_failed_blocks) == (4, 0)
    assert cascade.backends[1].get_num_free_blocks() == 16, "its slots were given back"
    assert cascade.store(keys(4, 8)) == keys(4, 8)
    assert cascade.manager.counters.dropped_dirty_blocks == 0


def test_a_reset_by_another_engine_empties_the_tier_and_nothing_goes_down_again() -> None:
    cascade = Cascade((8, 16))
    cascade.store(keys(0, 4))
    assert cascade.manager.flush_dirty(cascade.now_s + 1)
    cascade.store(keys(4, 6))
    reset_by_another(cascade)
    assert cascade.manager.counters.resets_by_others == 1
    assert len(cascade.policies[1]) == 0
    assert all(cascade.holds(0, block_hash) for block_hash in keys(0, 6)), "these are its own"
    cascade.now_s += DAY_S
    assert cascade.manager.flush_dirty(cascade.now_s + 1)
    assert len(cascade.policies[1]) == 0
    assert cascade.store(keys(6, 14)) == keys(6, 14), "their slots can be had at once"
    assert cascade.manager.flush_dirty(cascade.now_s + 1)
    assert len(cascade.policies[1]) == 8, "what came later goes down as ever"


def test_stores_under_way_end_without_a_trace() -> None:
    cascade = Cascade((8, 16))
    cascade.store(keys(0, 3))
    cascade.manager._demoters[0].demote_coldest(3)
    assert cascade.down[0].queued
    reset_by_another(cascade)
    cascade.down[0].fate = lambda source, target: BlockOutcome.GONE
    cascade.run_transfers()
    assert len(cascade.policies[1]) == 0
    assert cascade.backends[1].get_num_free_blocks() == 16
    cascade.down[0].fate = lambda source, target: BlockOutcome.OK
    cascade.now_s += DAY_S
    assert cascade.manager.flush_dirty(cascade.now_s + 1)
    assert len(cascade.policies[1]) == 0, "what was there before the reset stays above"


def test_loads_under_way_end_and_every_slot_can_be_had_again() -> None:
    cascade = Cascade((8, 16))
    cascade.store(keys(0, 3))
    assert cascade.manager.flush_dirty(cascade.now_s + 1)
    for _, status in cascade.policies[0].evict(3, ()) or ():
        cascade.backends[0].free(status)
    request = Request()
    asked = [cascade.manager.lookup_block(block_hash, request) for block_hash in keys(0, 3)]
    assert asked == [LookupState.PENDING] * 3
    cascade.manager.end_step()
    reset_by_another(cascade)
    cascade.up[0].fate = lambda source, target: BlockOutcome.GONE
    cascade.run_transfers()
    asked = [cascade.manager.lookup_block(block_hash, request) for block_hash in keys(0, 3)]
    assert asked == [LookupState.MISS] * 3
    assert cascade.backends[0].get_num_free_blocks() == 8
    assert cascade.backends[1].get_num_free_blocks() == 16
