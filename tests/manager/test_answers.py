"""Answers of a step: hits that are looked up one by one or in adjacent slots, and misses."""

from __future__ import annotations

import numpy as np
import pytest
from support.cascade import Cascade
from support.keys import key, keys

from kvcascade.manager.base import LookupState
from kvcascade.manager.core import ManagerOptions
from kvcascade.manager.lookup import Answers
from kvcascade.manager.request import Request
from kvcascade.tiers.base import BlockHash

A, B, C, D = (BlockHash(name) for name in (b"a", b"b", b"c", b"d"))
NONE = BlockHash(b"")


def follow(answers: Answers, *blocks: BlockHash) -> list[bool]:
    """Ask as an adapter does; True for what was found in the run."""
    found = []
    for block in blocks:
        is_next = answers.ready_at[answers.at] == block
        answers.at += is_next
        found.append(is_next)
    return found


def test_a_hit_leads_to_its_neighbours() -> None:
    answers = Answers([A, B, C, NONE, D, NONE])
    assert follow(answers, A) == [False], "nobody knows yet where to look"
    answers.hit(A, 0)
    assert follow(answers, B, C, D) == [True, True, False]
    answers.hit(D, 4)
    assert follow(answers, A) == [False], "the end of the tier"
    assert answers.hits() == {A, B, C, D}


def test_what_is_asked_by_whom() -> None:
    answers = Answers([A, B, C, D, NONE])
    answers.begin()
    answers.hit(A, 0)
    follow(answers, B)
    answers.begin()
    assert follow(answers, C) == [False], "another request finds its own way"
    answers.hit(C, 2)
    follow(answers, D)
    assert (answers.of_request(), answers.hits()) == ([C, D], {A, B, C, D})
    answers.clear()
    assert not answers.hits() and not answers.of_request()
    assert follow(answers, A) == [False]


def test_hits_are_those_of_the_step() -> None:
    answers = Answers([A, B, C, D, NONE])
    assert answers.hits() == set()
    answers.hit(A, 0)
    follow(answers, B)
    assert answers.hits() == {A, B}
    answers.hit(C, 2)
    assert answers.hits() == {A, B, C}
    answers.clear()
    assert answers.hits() == set()
    answers.hit(D)
    assert answers.hits() == {D}


def test_the_stores_of_a_step_share_one_set_of_its_hits() -> None:
    """Each of them copied all hits: 64 stores beside 60,000 hits took 160 ms."""
    answers = Answers([NONE])
    for block in (A, B, C):
        answers.hit(block)
    assert answers.hits() is answers.hits()


def test_without_slots_every_hit_is_looked_up() -> None:
    answers = Answers([NONE])
    answers.hit(A, 0)
    assert follow(answers, B) == [False]
    assert answers.hits() == {A}


def test_only_blocks_that_are_there_are_in_a_run() -> None:
    cascade = Cascade((8, 16))
    answers = cascade.manager.lookups.answers
    output = cascade.manager.prepare_store([key(i) for i in range(4)])
    assert output is not None
    assert not any(answers.ready_at), "nothing has arrived"
    cascade.manager.complete_store(set(output.block_hashes_to_store))
    assert sum(map(bool, answers.ready_at)) == 4
    evicted = cascade.policies[0].evict(1, ())
    assert evicted is not None and evicted[0][0] not in answers.ready_at
    cascade.manager.reset_cache()
    assert not any(answers.ready_at)


def test_hits_in_a_run_stay_until_the_end_of_the_step() -> None:
    cascade = Cascade((8, 64), ManagerOptions(promotion_budget_slots=8))
    blocks = [key(i) for i in range(8)]
    cascade.store(blocks)
    cascade.manager.flush_dirty(cascade.now_s + 60)
    manager, request = cascade.manager, Request()
    assert manager.lookups.lookup_block(blocks[0], request) is LookupState.HIT
    assert follow(manager.lookups.answers, *blocks[1:]) == [True] * 7
    output = manager.prepare_store([key(100)])
    assert output is None or not output.block_hashes_evicted, "all eight are promised"
    assert all(cascade.holds(0, block) for block in blocks)
    manager.end_step()
    output = manager.prepare_store([key(100)])
    assert output is not None and len(output.block_hashes_evicted) == 1


def test_the_background_takes_nothing_while_a_request_is_asking() -> None:
    cascade = Cascade((4, 64), ManagerOptions(promotion_budget_slots=4))
    below = [key(i) for i in range(4)]
    cascade.store(below)
    cascade.manager.flush_dirty(cascade.now_s + 60)
    for start in (10, 20):
        cascade.store([key(start + i) for i in range(4)])
        cascade.manager.flush_dirty(cascade.now_s + 60)
    manager = cascade.manager
    assert manager.lookups.lookup_block(below[0], Request()) is LookupState.PENDING
    manager.lookups.begin_asking(Request(), key(0))
    manager.maintain()
    assert cascade.policies[0].coldest(4), "all slots still hold what they held"
    assert len(cascade.policies[0]) == 4
    manager.end_step()
    cascade.run_transfers()
    assert cascade.holds(0, below[0])


@pytest.mark.parametrize("sizes", [(8,), (8, 16)])
def test_misses_count_once_until_the_request_loads_or_stores(sizes: tuple[int, ...]) -> None:
    """A request that waits for blocks of the device is looked up in every step."""
    cascade, request, other = Cascade(sizes), Request(), Request()
    cascade.store(keys(0, 3))
    manager = cascade.manager

    def misses_after(steps: int) -> int:
        for _ in range(steps):
            for block_hash in keys(0, 3) + keys(5, 7):
                manager.lookups.lookup_block(block_hash, request)
            assert manager.lookups.lookup_block(key(7), other) is LookupState.MISS
            manager.end_step()
        return manager.counters.lookup_misses

    assert misses_after(20) == 2 + 1
    assert manager.lookups.lookup_block(key(6), request) is LookupState.MISS
    manager.prepare_load(keys(0, 3), request)
    manager.complete_load(keys(0, 3))
    manager.end_step()
    assert misses_after(0) == 2 + 1, "the load ended the wait"
    assert misses_after(20) == 2 + 1 + 2, "a preempted request asks again"
    assert manager.prepare_store(keys(3, 4), request) is not None
    assert misses_after(20) == 2 + 1 + 2 + 2


def test_slots_come_in_the_order_of_the_blocks() -> None:
    """Those of a store in the order of its offer, those of a load in the order of its list."""
    cascade = Cascade((8,))
    blocks = [key(i) for i in range(6)]
    stored = cascade.manager.prepare_store(blocks)
    assert stored is not None and stored.store_spec.slots.dtype == np.int32
    places = cascade.policies[0].get_many(blocks)
    slots = [status.block_id for status in places if status is not None]
    assert stored.store_spec.slots.tolist() == slots
    cascade.manager.complete_store(set(blocks))
    loaded = cascade.manager.prepare_load(blocks[::-2])
    assert loaded.slots.dtype == np.int32 and loaded.slots.tolist() == slots[::-2]
