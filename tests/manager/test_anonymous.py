"""Requests without names: what an engine of block hashes is promised, on tiers in memory.

Every iterable is handed over as such an engine does: it can be read once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import pytest
from support.cascade import Cascade, block_bytes
from support.keys import key, keys
from support.memory_handler import MemoryHandler

from kvcascade.manager.core import ManagerOptions
from kvcascade.manager.promotion import anonymous
from kvcascade.manager.promotion.anonymous import AnonymousManager
from kvcascade.tiers.base import BlockHash, BlockOutcome

STEPS = 3
OPTIONS = ManagerOptions(waits_for_stores=False, promotion_deadline_s=10.0)


def once(hashes: list[BlockHash]) -> Iterator[BlockHash]:
    return islice(hashes, 0, None)


def made(*capacities: int) -> tuple[Cascade, AnonymousManager]:
    cascade = Cascade(capacities, OPTIONS)
    return cascade, AnonymousManager(cascade.manager, STEPS, lambda: cascade.now_s)


def store(cascade: Cascade, requests: AnonymousManager, hashes: list[BlockHash]) -> None:
    """A request came, was computed, stored and finished."""
    requests.touch(once(hashes))
    assert requests.lookup(once(hashes)) is not None
    output = requests.prepare_store(once(hashes))
    assert output is not None
    for block_hash, slot in zip(
        output.block_hashes_to_store,
        output.store_spec.slots.tolist(),
        strict=True,
    ):
        cascade.write_top(slot, block_bytes(block_hash))
    if output.block_hashes_to_store:
        requests.touch(once(hashes))
    requests.complete_store(set(output.block_hashes_to_store))
    requests.take_events()


def load(cascade: Cascade, requests: AnonymousManager, hashes: list[BlockHash]) -> None:
    """Load what was answered as hits, and compare every byte."""
    slots = requests.prepare_load(once(hashes)).slots.tolist()
    assert [cascade.read_top(slot) for slot in slots] == [block_bytes(h) for h in hashes]
    requests.complete_load(set(hashes))


def send_below(cascade: Cascade, requests: AnonymousManager, hashes: list[BlockHash]) -> None:
    """Stored, demoted, and gone from the first tier."""
    store(cascade, requests, hashes)
    cascade.manager.flush_dirty(cascade.now_s + 60)
    evicted = cascade.policies[0].evict(len(hashes), ())
    assert evicted is not None
    for _, status in evicted:
        cascade.backends[0].free(status)


def run(handlers: list[MemoryHandler]) -> None:
    for handler in handlers:
        handler.wait(set(handler.queued))


def test_what_was_stored_is_loaded() -> None:
    cascade, requests = made(8, 16)
    store(cascade, requests, keys(0, 4))
    assert requests.lookup(once(keys(0, 6))) == 4
    load(cascade, requests, keys(0, 4))
    assert requests.lookup(once(keys(4, 6))) == 0
    assert requests.lookup(once([])) == 0


def test_a_block_that_is_being_stored_is_a_miss() -> None:
    """The engine reports stores when their request ends: nobody waits that long."""
    _, requests = made(8, 16)
    requests.prepare_store(once(keys(0, 4)))
    assert requests.lookup(once(keys(0, 4))) == 0


def test_a_promotion_begins_with_the_lookup_and_is_waited_for() -> None:
    cascade, requests = made(8, 16)
    send_below(cascade, requests, keys(0, 4))
    assert requests.lookup(once(keys(0, 4))) is None
    assert cascade.up[0].queued, "no end of a step was needed"
    assert requests.lookup(once(keys(0, 4))) is None, "still on its way"
    run(cascade.up)
    requests.take_events()
    assert requests.lookup(once(keys(0, 4))) == 4
    load(cascade, requests, keys(0, 4))
    assert not requests._waiting


def test_promoted_blocks_stay_until_they_are_loaded() -> None:
    """The device may have no room for the request for a while, and others store meanwhile."""
    cascade, requests = made(8, 32)
    send_below(cascade, requests, keys(0, 4))
    assert requests.lookup(once(keys(0, 4))) is None
    run(cascade.up)
    requests.take_events()
    for other in range(100, 140, 4):
        assert requests.lookup(once(keys(0, 4))) == 4
        requests.prepare_store(once(keys(other, other + 4)))
        requests.complete_store(set(keys(other, other + 4)))
        run(cascade.down)
        requests.take_events()
    assert requests.lookup(once(keys(0, 4))) == 4
    load(cascade, requests, keys(0, 4))


def test_a_wait_ends_by_the_deadline_and_the_next_request_asks_anew() -> None:
    cascade, requests = made(8, 16)
    send_below(cascade, requests, keys(0, 4))
    assert requests.lookup(once(keys(0, 4))) is None
    cascade.now_s += 11.0
    assert requests.lookup(once(keys(0, 4))) == 0
    run(cascade.up)
    requests.take_events()
    assert requests.lookup(once(keys(0, 4))) == 4


def test_failed_reads_are_misses() -> None:
    cascade, requests = made(8, 16)
    send_below(cascade, requests, keys(0, 4))
    cascade.up[0].fate = lambda source, target: BlockOutcome.CORRUPT
    assert requests.lookup(once(keys(0, 4))) is None
    run(cascade.up)
    requests.take_events()
    assert requests.lookup(once(keys(0, 4))) == 0


def test_requests_that_never_come_back_are_forgotten() -> None:
    cascade, requests = made(8, 16)
    send_below(cascade, requests, keys(0, 4))
    assert requests.lookup(once(keys(0, 4))) is None
    run(cascade.up)
    requests.take_events()
    assert requests._waiting
    cascade.now_s += 21.0
    requests.take_events()
    assert not requests._waiting
    assert len(cascade.policies[0].coldest(8)) == 4, "nothing is held any more"


def test_the_number_of_remembered_requests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anonymous, "WAITING_MAX", 2)
    cascade, requests = made(16, 32)
    for first in range(0, 12, 4):
        send_below(cascade, requests, keys(first, first + 4))
    for first in range(0, 12, 4):
        requests.lookup(once(keys(first, first + 4)))
    assert len(requests._waiting) == 2


def test_stores_that_workers_may_not_have_done_are_no_hits_and_are_not_written() -> None:
    """A preempted request's stores are reported before the workers wait for them."""
    cascade, requests = made(8, 16)
    requests.prepare_store(once(keys(0, 4)))
    stored = set(keys(0, 4))
    requests.complete_store(stored, is_done=False)
    stored.clear()  # as the engine does
    for _ in range(STEPS - 1):
        assert requests.lookup(once(keys(0, 4))) is None
        requests.take_events()
        cascade.manager.flush_dirty(cascade.now_s + 1)
        assert not cascade.down[0].queued
    requests.take_events()
    assert requests.lookup(once(keys(0, 4))) == 4


def test_an_engine_that_stops_drops_stores_that_its_workers_may_never_have_begun() -> None:
    cascade, requests = made(8, 16)
    requests.prepare_store(once(keys(0, 4)))
    requests.complete_store(keys(0, 4), is_done=False)
    store(cascade, requests, keys(4, 6))
    requests.workers_ended()
    assert not any(cascade.holds(0, block_hash) for block_hash in keys(0, 4))
    assert all(cascade.holds(0, block_hash) for block_hash in keys(4, 6))


def test_heads_outlive_tails_however_a_prefix_was_stored() -> None:
    cascade, requests = made(8)
    requests.touch(once(keys(0, 6)))
    requests.lookup(once(keys(0, 6)))
    for first in range(0, 6, 2):
        requests.prepare_store(once(keys(first, first + 2)))
        requests.touch(once(keys(0, first + 2)))
    requests.complete_store(set(keys(0, 6)))
    requests.take_events()
    store(cascade, requests, keys(10, 14))
    assert requests.lookup(once(keys(0, 6))) == 4, "the tail left, the head is there"


def test_a_request_that_waits_is_one_use_however_often_it_asks() -> None:
    cascade, requests = made(8, 16)
    store(cascade, requests, keys(0, 2))
    store(cascade, requests, keys(4, 6))
    for _ in range(5):
        requests.touch(once(keys(0, 2)))
        requests.lookup(once(keys(0, 2)))
    coldest = [block_hash for block_hash, _ in cascade.policies[0].coldest(2)]
    assert coldest == [key(5), key(4)]


def test_what_takes_longer_to_read_than_to_compute_is_computed() -> None:
    """With a speed that is given: nothing says how fast such an engine computes."""
    options = replace(OPTIONS, tokens_per_block=100, prefill_tokens_per_s=1000.0)
    cascade = Cascade((8, 64), options)
    requests = AnonymousManager(cascade.manager, STEPS, lambda: cascade.now_s)
    wanted = keys(0, 4)
    send_below(cascade, requests, wanted)
    assert requests.lookup(once(wanted)) is None, "read, as long as nothing is known"
    cascade.now_s += 4.0
    cascade.run_transfers()
    requests.take_events()
    assert requests.lookup(once(wanted)) == 4
    load(cascade, requests, wanted)
    send_below(cascade, requests, wanted)
    assert requests.lookup(once(wanted)) is None
    assert requests.lookup(once(wanted)) == 0, "decided at once"
    assert cascade.manager.counters.promotions_not_worth == 1
