"""Blocks that an engine does not offer again: the states of a state-space layer, and what left a
window while a store was put off."""

from __future__ import annotations

import pytest
from support.cascade import Cascade
from support.keys import key, keys

from kvcascade.manager.core import ManagerOptions
from kvcascade.manager.request import Request
from kvcascade.manager.stores import MAX_DEFERRALS
from kvcascade.tiers.base import BlockHash

STATE = b"\0\0\0\1"


def state(number: int) -> BlockHash:
    return BlockHash(key(number) + STATE)


def full_of_dirty(capacity: int = 4) -> Cascade:
    """A first tier of blocks that are nowhere else, and no write below has ended."""
    cascade = Cascade((capacity, 64), ManagerOptions(offered_once=(STATE,)))
    cascade.store(keys(0, capacity))
    return cascade


def test_a_block_that_is_offered_once_takes_the_place_of_the_coldest() -> None:
    cascade, request = full_of_dirty(), Request()
    output = cascade.manager.prepare_store([state(9)], request)
    assert output is not None and output.block_hashes_to_store == [state(9)]
    assert sum(cascade.holds(0, block_hash) for block_hash in keys(0, 4)) == 3
    counters = cascade.manager.counters
    assert (counters.dropped_dirty_blocks, counters.store_refused_busy) == (1, 0)
    assert cascade.manager.prepare_store(keys(20, 22), request) is None, "others wait as ever"


def test_of_what_is_offered_once_as_much_is_taken_as_fits() -> None:
    cascade, request = full_of_dirty(), Request()
    busy = cascade.manager.prepare_store([state(n) for n in range(10, 13)], request)
    assert busy is not None and len(busy.block_hashes_to_store) == 3, "their slots are being filled"
    output = cascade.manager.prepare_store([state(20), key(21), key(22)], request)
    assert output is not None and output.block_hashes_to_store == [state(20)]
    assert cascade.manager.counters.store_truncated_blocks == 2
    nothing = cascade.manager.prepare_store([state(30)], request)
    assert nothing is not None and nothing.block_hashes_to_store == []
    cascade.manager.finish_request(request)
    counters = cascade.manager.counters
    assert (counters.store_truncated_blocks, counters.store_lost_blocks) == (3, 0)


@pytest.mark.parametrize("again", [True, False])
def test_what_is_left_out_of_the_next_offer_is_lost(again: bool) -> None:
    """A device block that left the window was given to somebody else meanwhile."""
    cascade, request = full_of_dirty(), Request()
    assert cascade.manager.prepare_store(keys(10, 13), request) is None
    cascade.run_transfers()
    if again:
        assert cascade.manager.prepare_store(keys(11, 13), request) is not None
    cascade.manager.finish_request(request)
    assert cascade.manager.counters.store_lost_blocks == (1 if again else 3)


def test_an_offer_beside_the_one_that_is_put_off_does_not_begin_its_time_anew() -> None:
    cascade, request = full_of_dirty(), Request()
    for number in range(MAX_DEFERRALS):
        assert cascade.manager.prepare_store(keys(50, 53), request) is None
        assert cascade.manager.prepare_store([state(number)], request) is not None
    output = cascade.manager.prepare_store(keys(50, 53), request)
    assert output is not None, "it waited for as long as others do"
    cascade.manager.finish_request(request)
    assert cascade.manager.counters.store_lost_blocks == 0
