"""What an idle engine, an aborted request, a reset or a failing tier leaves behind: nothing."""

from __future__ import annotations

import pytest
from support.cascade import Cascade
from support.inside import first_tier
from support.keys import key, keys

from kvcascade.config.schema import OnReset, WriteMode
from kvcascade.manager.base import LookupState
from kvcascade.manager.below.node_tier import FAILURES_OF_SEVERAL_PATHS, FULL_LIMIT_S
from kvcascade.manager.core import MAX_JOBS_IN_FLIGHT, ManagerOptions
from kvcascade.manager.demotion import AGING_PER_SLOT
from kvcascade.manager.request import Request
from kvcascade.tiers.base import BlockOutcome
from kvcascade.tiers.breaker import REST_S

TOKENS = 100


def test_an_idle_engine_does_not_write_for_ever_into_a_small_tier() -> None:
    """What the small tier evicts is dirty again above, and among the coldest."""
    cascade = Cascade((50, 4))
    for i in range(50):
        cascade.store([key(i)])
        cascade.manager.end_step()
    written = cascade.manager.counters.links[0]
    for _ in range(100):
        cascade.run_transfers()
    assert written.demoted_blocks <= 50
    before = written.demoted_blocks
    for _ in range(100):
        cascade.run_transfers()
    assert written.demoted_blocks == before


def test_a_shutdown_writes_each_block_once() -> None:
    cascade = Cascade((8, 4), is_immediate=True)
    cascade.store(keys(0, 8))
    cascade.manager.shutdown()
    assert cascade.manager.counters.links[0].demoted_blocks == 4, "as many as there is place for"
    assert [cascade.holds(1, h) for h in keys(0, 8)] == [True] * 4 + [False] * 4


def test_an_aborted_request_leaves_nothing_that_needs_steps() -> None:
    """A stalled tier would keep the engine going through empty steps for ever."""
    cascade = Cascade((8, 16))
    cascade.below_only(keys(0, 2))
    request = Request()
    assert cascade.manager.lookup(keys(0, 2), request) is None
    cascade.manager.end_step()
    assert cascade.manager.has_pending_work()
    cascade.manager.finish_request(request)
    assert not cascade.manager.has_pending_work()
    for handler in cascade.handlers:
        handler.wait(set(handler.queued))
    cascade.manager.maintain()
    assert cascade.manager.lookup(keys(0, 2)) == 2, "the background took them in"


def test_a_request_that_waits_again_after_it_was_given_up_can_be_reset() -> None:
    """What it holds is known to who resets, and its end gives nothing back twice."""
    cascade = Cascade((8, 16), ManagerOptions(promotion_deadline_s=10.0))
    manager = cascade.manager
    cascade.below_only(keys(0, 2))
    cascade.store(keys(4, 5))
    old = Request()
    assert manager.lookup([key(0)], old) is None
    manager.end_step()
    for _ in range(2):  # the read is late, and then the request does not ask for twice the deadline
        cascade.now_s += 20
        manager.end_step()
    assert old.claim is None and key(0) in old.missed
    cascade.run_transfers()
    assert manager.lookup([key(4), key(1)], old) is None
    manager.end_step()
    assert old.claim is not None and list(old.holds) == [key(4)]
    manager.reset_cache()
    manager.finish_request(old)
    cascade.run_transfers()
    assert cascade.backends[0].get_num_free_blocks() == 8


def test_a_kept_load_ends_after_a_reset_by_another_engine() -> None:
    cascade = Cascade((8, 16), ManagerOptions(on_reset=OnReset.KEEP))
    cascade.store(keys(0, 2))
    cascade.manager.prepare_load(keys(0, 2), Request())
    cascade.manager.reset_cache()
    cascade.backends[1].is_overtaken = True
    cascade.manager.end_step()
    assert cascade.backends[0].get_num_free_blocks() == 6, "a worker may read them still"
    cascade.manager.on_reset_flushed()
    assert cascade.backends[0].get_num_free_blocks() == 8


@pytest.mark.parametrize("mode", [WriteMode.BACK, WriteMode.THROUGH])
def test_what_waits_to_be_written_is_bounded_while_the_tier_below_fails(mode: WriteMode) -> None:
    cascade = Cascade((8, 16), ManagerOptions(write_mode=mode), is_immediate=True)
    cascade.down[0].accepts = False
    for i in range(200):
        cascade.store([key(i)])
        cascade.manager.end_step()
    aging = cascade.manager._demoter.aging
    assert aging is not None
    assert len(aging.stored) <= AGING_PER_SLOT * 8 and len(aging.due) <= 2 * 8
    cascade.down[0].accepts = True
    for _ in range(8):
        cascade.now_s += REST_S + 1
        cascade.manager.maintain()
    assert all(cascade.holds(1, h) for h in keys(192, 200)), "and written when it recovers"


@pytest.mark.parametrize("mode", [WriteMode.BACK, WriteMode.THROUGH])
def test_a_block_in_use_is_written_however_many_come_and_go_while_the_tier_below_fails(
    mode: WriteMode,
) -> None:
    cascade = Cascade((8, 16), ManagerOptions(write_mode=mode), is_immediate=True)
    cascade.down[0].accepts = False
    cascade.store([key(1000)])
    for i in range(200):
        cascade.store([key(i)])
        cascade.policies[0].touch([key(1000)])
        cascade.manager.end_step()
    cascade.down[0].accepts = True
    for _ in range(8):
        cascade.now_s += REST_S + 1
        cascade.manager.maintain()
    assert cascade.holds(1, key(1000))


def test_a_block_in_use_is_written_although_many_come_and_go_before_it_is_due() -> None:
    cascade = Cascade((64, 1024), ManagerOptions(write_mode=WriteMode.BACK, dirty_age_s=200.0))
    cascade.store([key(1000)])
    for i in range(190):  # one a second
        cascade.store([key(i)])
        cascade.policies[0].touch([key(1000)])
        cascade.now_s += 1.0
        cascade.run_transfers()
    assert cascade.holds(1, key(1000))


@pytest.mark.parametrize("mode", [WriteMode.BACK, WriteMode.THROUGH])
@pytest.mark.parametrize("outcome", [BlockOutcome.IO_ERROR, BlockOutcome.NO_SPACE])
def test_a_write_that_failed_is_tried_again_without_anybodys_doing(
    mode: WriteMode, outcome: BlockOutcome
) -> None:
    """As when a node dies: what a crash may lose is bounded all the same."""
    cascade = Cascade((50, 60), ManagerOptions(write_mode=mode, dirty_age_s=5.0))
    cascade.store(keys(0, 4))
    cascade.down[0].fate = lambda source, target: outcome
    for _ in range(3):
        cascade.now_s += REST_S + 1
        cascade.run_transfers()
    assert not any(cascade.holds(1, h) for h in keys(0, 4))
    cascade.down[0].fate = lambda source, target: BlockOutcome.OK
    for _ in range(3):
        cascade.now_s += REST_S + 1
        cascade.run_transfers()
    assert all(cascade.holds(1, h) for h in keys(0, 4))
    aging = cascade.manager._demoter.aging
    assert aging is not None and not (aging.stored or aging.due)


@pytest.mark.parametrize("paths", [1, 3])
@pytest.mark.parametrize("outcome", [BlockOutcome.IO_ERROR, BlockOutcome.NO_SPACE])
def test_blocks_that_no_path_takes_do_not_wear_the_disks(paths: int, outcome: BlockOutcome) -> None:
    """As when the index is full: the payload is written each time."""
    cascade = Cascade((50, 60), ManagerOptions(write_mode=WriteMode.THROUGH), paths=paths)
    cascade.down[0].fate = lambda source, target: outcome
    cascade.store(keys(0, 4))
    for _ in range(600):
        cascade.now_s += 0.1
        cascade.run_transfers()
    counters = cascade.manager.counters.links[0]
    tries = (counters.demote_no_space_blocks + counters.demote_failed_blocks) / 4
    assert 60 / REST_S - 2 <= tries <= 60 / REST_S + FAILURES_OF_SEVERAL_PATHS


def test_one_of_several_paths_that_fails_delays_no_write() -> None:
    cascade = Cascade((50, 60), ManagerOptions(write_mode=WriteMode.THROUGH), paths=2)
    outcomes = iter([BlockOutcome.IO_ERROR] * MAX_JOBS_IN_FLIGHT)
    cascade.down[0].fate = lambda source, target: next(outcomes, BlockOutcome.OK)
    cascade.store([key(0)])
    for _ in range(2 * MAX_JOBS_IN_FLIGHT):
        cascade.now_s += 0.1
        cascade.run_transfers()
    assert cascade.holds(1, key(0))


@pytest.mark.parametrize("mode", [WriteMode.BACK, WriteMode.THROUGH])
def test_a_full_tier_is_asked_once_a_second_until_it_has_room(mode: WriteMode) -> None:
    cascade = Cascade((50, 60), ManagerOptions(write_mode=mode, dirty_age_s=5.0))
    cascade.nodes[0].is_full = True
    cascade.store(keys(0, 4))
    for _ in range(600):
        cascade.now_s += 0.1
        cascade.run_transfers()
    refused = cascade.manager.counters.links[0].demote_no_space_blocks
    assert 4 * 10 <= refused <= 4 * 60 / FULL_LIMIT_S
    cascade.nodes[0].is_full = False
    for _ in range(60):
        cascade.now_s += 0.1
        cascade.run_transfers()
    assert all(cascade.holds(1, h) for h in keys(0, 4))


def test_an_idle_engine_does_not_compute() -> None:
    """It takes no steps between the end of a request and the next one: that time says nothing."""
    cascade = Cascade((64, 64), ManagerOptions(tokens_per_block=TOKENS))
    manager, request = cascade.manager, Request()
    assert manager.lookups.lookup_block(key(0), request) is LookupState.MISS
    manager.end_step()
    assert manager.prepare_store(keys(0, 10), request) is not None
    cascade.now_s += 0.5
    manager.complete_store(set(keys(0, 10)))
    manager.end_step()
    manager.finish_request(request)
    cascade.now_s += 3600.0
    for _ in range(3):
        manager.end_step()
    assert manager._claims.choice.worth is not None
    assert manager._claims.choice.worth.prefill.tokens_per_s == 10 * TOKENS / 0.5


def test_names_of_what_another_engine_took_are_kept_for_events_only() -> None:
    cascade = Cascade((8, 16), ManagerOptions(with_events=False))
    cascade.store(keys(0, 8))
    cascade.backends[1].is_overtaken = True
    cascade.manager.end_step()
    assert not first_tier(cascade.manager)._lost
