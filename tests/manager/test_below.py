"""The manager over a port that lies, stalls, fails or refuses, and over several tiers behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.below_twin import BelowTwin
from support.cascade import Cascade
from support.inside import demoters
from support.keys import key, keys
from support.twin_engine import DEADLINE_S, TwinEngine

from kvcascade.config.schema import WriteMode
from kvcascade.handlers.node.node_keeper import JOBS_AT_MOST
from kvcascade.manager.base import LookupState
from kvcascade.manager.below.port import Put
from kvcascade.manager.below.single_tier import PUTS_AT_MOST
from kvcascade.manager.core import ManagerOptions
from kvcascade.manager.counters import Reason
from kvcascade.manager.promotion.claim_queue import HOLD_DEADLINES
from kvcascade.manager.request import Request
from kvcascade.tiers.base import NOT_READY, BlockOutcome

HIT, MISS, PENDING = LookupState.HIT, LookupState.MISS, LookupState.PENDING


def test_blocks_go_down_and_come_up() -> None:
    engine, request = TwinEngine(), Request()
    engine.below_only(keys(4))
    assert engine.ask(request, keys(3)) == [PENDING] * 3
    engine.step()
    engine.step()
    assert engine.ask(request, keys(3)) == [HIT] * 3
    engine.loads(request, keys(3))
    assert request.sources == dict.fromkeys(keys(3), "twin")


def test_a_key_that_is_said_to_be_held_and_is_not_becomes_a_miss() -> None:
    engine, request = TwinEngine(), Request()
    engine.below_only(keys(2))
    engine.twin.lies = {key(2): 1}
    assert engine.ask(request, keys(3)) == [PENDING] * 3
    engine.step()
    engine.step()
    assert engine.ask(request, keys(3)) == [HIT, HIT, MISS]
    engine.loads(request, keys(2))
    assert engine.top.get_num_free_blocks() == 2, "its slot came back"


def test_a_key_that_is_held_and_said_not_to_be_is_a_miss_and_is_not_written_twice() -> None:
    engine, request = TwinEngine(), Request()
    engine.below_only(keys(2))
    engine.twin.lies = dict.fromkeys(keys(2), 0)
    assert engine.ask(request, keys(2)) == [MISS, MISS]
    assert engine.offer(keys(2)) == keys(2)
    assert engine.manager.flush_dirty(engine.clock() + 1.0), "settled: the port holds them"
    assert engine.twin.state()[0].blocks == 2


@pytest.mark.parametrize("outcome", [BlockOutcome.CORRUPT, BlockOutcome.GONE])
def test_a_block_that_failed_is_dirty_again_where_it_is_held_above(outcome: BlockOutcome) -> None:
    engine, request = TwinEngine(), Request()
    engine.below_only(keys(1))
    assert engine.ask(request, keys(1)) == [PENDING]
    engine.manager.end_step()
    engine.twin.outcome = outcome
    engine.step()
    assert engine.ask(request, keys(1)) == [MISS] and not engine.twin.may_hold(key(0))
    engine.twin.outcome = BlockOutcome.OK
    assert engine.offer(keys(1)) == keys(1)
    assert engine.manager.flush_dirty(engine.clock() + 1.0) and engine.twin.may_hold(key(0))


def test_a_port_that_stalls_costs_a_miss_by_the_deadline() -> None:
    engine, request = TwinEngine(), Request()
    engine.below_only(keys(2))
    engine.twin.is_stalled = True
    assert engine.ask(request, keys(2)) == [PENDING] * 2
    engine.step()
    engine.clock.advance(DEADLINE_S + 0.1)
    engine.step()
    assert engine.ask(request, keys(2)) == [MISS] * 2
    assert engine.manager.counters.recomputed_blocks[Reason.DEADLINE] == 2
    engine.twin.is_stalled = False
    engine.step()
    assert engine.ask(Request(), keys(2)) == [HIT] * 2, "late, but verified"


def test_a_port_that_makes_room_puts_stores_off_and_loses_nothing() -> None:
    engine = TwinEngine()
    assert engine.offer(keys(4)) == keys(4)
    engine.twin.answer = Put.LATER
    for _ in range(3):
        assert engine.offer(keys(4, 6)) is None
        engine.step()
    engine.twin.answer = Put.STARTED
    assert engine.offer(keys(4, 6)) is None
    engine.step()
    assert engine.offer(keys(4, 6)) == keys(4, 6)
    assert engine.manager.counters.dropped_dirty_blocks == 0


def test_slots_of_an_interrupted_put_keep_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a notebook, while the node has the message already."""
    engine, request = TwinEngine(), Request()
    assert engine.offer(keys(4)) == keys(4)
    put = engine.twin.put

    def interrupted(*arguments: Any) -> Sequence[Put]:
        put(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.twin, "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.offer(keys(4, 8))
    monkeypatch.undo()
    for _ in range(3):
        assert engine.offer(keys(4, 8)) is None
        engine.manager.end_step()
    engine.step()
    assert engine.offer(keys(4, 8)) == keys(4, 8)
    assert engine.manager.flush_dirty(engine.clock() + 1.0), "their slots can be free again"
    assert engine.ask(request, keys(4)) == [PENDING] * 4
    engine.step()
    engine.step()
    assert engine.ask(request, keys(4)) == [HIT] * 4
    engine.loads(request, keys(4))


def test_small_stores_that_are_put_off_do_not_fill_the_queue_with_small_writes() -> None:
    engine = TwinEngine(slots=64, below=128)
    assert engine.offer(keys(64)) == keys(64)
    for number in range(64, 72):
        assert engine.offer([key(number)]) is None
    sizes = [len(write.hashes) for write in demoters(engine.manager)[0].jobs.values()]
    assert sizes == [8] * 4, "the other half may leave, if these never end"


@pytest.mark.parametrize("answer", [Put.LATER, Put.FULL])
def test_a_block_that_is_put_off_beside_one_that_is_there_is_written_later(answer: Put) -> None:
    engine = TwinEngine(mode=WriteMode.THROUGH)
    engine.below_only(keys(1))
    engine.twin.lies, engine.twin.answer = {key(0): 0}, answer
    assert engine.offer(keys(2)) == keys(2)
    engine.step()
    engine.twin.answer = Put.STARTED
    for _ in range(2):
        engine.clock.advance(1.0)
        engine.step()
    assert engine.twin.may_hold(key(1))


@pytest.mark.parametrize("answer", [Put.FULL, Put.RESTING, Put.NOT_TAKEN])
def test_nobody_waits_for_a_port_that_takes_nothing(answer: Put) -> None:
    engine = TwinEngine()
    engine.twin.answer = answer
    assert engine.offer(keys(4)) == keys(4)
    assert engine.offer(keys(4, 8)) == keys(4, 8)
    assert engine.manager.counters.dropped_dirty_blocks == 4


def test_what_the_write_budget_refuses_may_leave() -> None:
    engine = TwinEngine()
    engine.twin.answer = Put.OVER_BUDGET
    assert engine.offer(keys(4)) == keys(4)
    assert engine.offer(keys(4, 8)) == keys(4, 8)
    assert engine.manager.counters.dropped_dirty_blocks == 0, "settled, not lost"


def test_what_leaves_the_port_is_written_again() -> None:
    engine = TwinEngine(slots=4, below=2)
    assert engine.offer(keys(2)) == keys(2)
    assert engine.manager.flush_dirty(engine.clock() + 1.0)
    assert engine.offer(keys(2, 4)) == keys(2, 4)
    engine.manager.flush_dirty(engine.clock() + 1.0)
    assert engine.manager.tier_states()[0].dirty_blocks == 2, "the first two left"


def test_what_leaves_the_port_before_its_write_has_ended_is_written_again() -> None:
    engine = TwinEngine()
    assert engine.offer(keys(2)) == keys(2)
    demoters(engine.manager)[0].demote_coldest(2)
    engine.twin.lose_early([key(0)])
    engine.manager.end_step()
    engine.step()
    assert engine.manager.tier_states()[0].dirty_blocks == 1
    assert engine.manager.flush_dirty(engine.clock() + 1.0)
    assert all(engine.twin.may_hold(block_hash) for block_hash in keys(2))


def test_an_old_loss_that_is_told_during_the_next_write_makes_nothing_dirty() -> None:
    engine = TwinEngine()
    assert engine.offer(keys(2)) == keys(2)
    demoters(engine.manager)[0].demote_coldest(2)
    engine.twin._lost.append(key(0))
    engine.manager.end_step()
    engine.step()
    assert engine.manager.tier_states()[0].dirty_blocks == 0


def test_a_reset_by_another_process_empties_the_first_tier_too() -> None:
    engine = TwinEngine()
    engine.below_only(keys(2))
    engine.offer(keys(2, 4))
    engine.twin.is_overtaken = True
    engine.step()
    assert engine.ask(Request(), keys(4)) == [MISS] * 4
    assert engine.manager.counters.resets_by_others == 1


def test_a_shutdown_waits_for_a_stalled_port_no_longer_than_it_may() -> None:
    engine = TwinEngine()
    engine.offer(keys(4))
    engine.twin.is_stalled = True
    start_s = engine.clock()
    assert not engine.manager.shutdown()
    assert engine.clock() - start_s <= 1.0


def test_a_block_of_the_last_tier_comes_up_at_once_and_goes_to_the_next_one_later() -> None:
    """One read; it is written on the way down, when it is the coldest of the first tier."""
    cascade = Cascade((16, 8, 32))
    cascade.below_only(keys(0, 2))
    for block_hash in keys(0, 2):
        status = cascade.policies[1].remove(block_hash)
        assert status is not None
        cascade.backends[1].free(status)
        del cascade.nodes[0].presence.slots[block_hash]
    request = Request()
    assert cascade.manager.lookup(keys(0, 2), request) is None
    cascade.manager.end_step()
    cascade.run_transfers()
    assert cascade.manager.lookup(keys(0, 2), request) == 2
    assert cascade.manager.counters.links[1].promoted_blocks == 2
    assert not cascade.holds(1, key(0)), "nothing was written for it"
    cascade.manager.finish_request(request)
    cascade.manager.flush_dirty(cascade.now_s + 1)
    assert cascade.holds(1, key(0)) and cascade.holds(2, key(0))


def test_the_background_takes_in_no_failed_read_while_a_request_is_asking() -> None:
    """A lookup takes no lock: a slot that became free meanwhile would look like a ready block."""
    engine, waits, asks = TwinEngine(8), Request(), Request()
    engine.below_only(keys(1))
    assert engine.ask(waits, keys(1)) == [PENDING]
    engine.manager.end_step()
    engine.twin.outcome = BlockOutcome.IO_ERROR
    engine.twin.run()
    assert engine.ask(asks, [key(9)]) == [MISS]
    engine.manager.maintain()
    status = engine.policy.get(key(0))
    assert status is not None and status.ref_cnt == NOT_READY, "still on its way"
    engine.manager.end_step()
    assert engine.policy.get(key(0)) is None and engine.ask(waits, keys(1)) == [MISS]


def test_the_background_releases_no_hold_while_its_request_is_asking() -> None:
    engine, request = TwinEngine(8), Request()
    engine.below_only(keys(2))
    assert engine.ask(request, keys(2)) == [PENDING] * 2
    engine.step()
    engine.step()
    assert engine.ask(request, keys(2)) == [HIT] * 2, "but the device has no room for them"
    engine.clock.advance(HOLD_DEADLINES * DEADLINE_S + 1.0)
    engine.manager.maintain()
    assert list(request.holds) == keys(2)
    engine.loads(request, keys(2))


@pytest.mark.parametrize("hits", [0, 1])
@pytest.mark.parametrize("is_silent", [False, True])
def test_a_request_does_not_wait_for_room_that_only_it_would_give_back(
    hits: int, is_silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first tier is full of dirty blocks, and nothing below takes any."""
    engine, request = TwinEngine(4), Request()
    engine.below_only(keys(1))
    engine.twin.answer = Put.RESTING if is_silent else Put.FULL
    if is_silent:  # as while the writer of a path is stopped
        for name in ("takes_puts", "is_blocked"):
            monkeypatch.setattr(BelowTwin, name, False)
    dirty = keys(10, 14)
    assert engine.offer(dirty) == dirty
    asked = dirty[:hits] + keys(1)
    for _ in range(4):
        engine.manager.lookup(asked, request)
        engine.step()
    assert engine.manager.lookup(asked, request) == hits


def test_a_block_that_a_request_loads_again_comes_from_memory() -> None:
    engine, request = TwinEngine(), Request()
    engine.below_only(keys(2))
    assert engine.ask(request, keys(2)) == [PENDING] * 2
    engine.step()
    engine.step()
    engine.loads(request, keys(2))
    assert request.sources == dict.fromkeys(keys(2), "twin")
    engine.manager.end_step()
    engine.loads(request, keys(2))  # after a preemption
    assert request.sources == {}


def test_a_request_that_was_served_asks_no_tier_elsewhere_when_it_loads_again() -> None:
    engine, request = TwinEngine(lower=8), Request()
    engine.below_only(keys(2))
    engine.lower.is_elsewhere = True
    assert engine.manager.lookup(keys(3), request) is None
    engine.step()
    engine.lower.is_elsewhere = False
    engine.step()
    assert engine.manager.lookup(keys(3), request) == 2
    engine.loads(request, keys(2))
    engine.manager.end_step()
    engine.lower.is_elsewhere = True  # its answer is forgotten
    assert engine.manager.lookup(keys(2), request) == 2


def test_a_read_of_before_a_reset_makes_no_later_one_late() -> None:
    engine = TwinEngine(slots=16)
    engine.below_only(keys(1))
    assert engine.ask(Request(), keys(1)) == [PENDING]
    engine.manager.end_step()
    old = engine.twin._queued.pop()
    engine.manager.reset_cache()
    engine.below_only(keys(4))
    for block_hash in keys(1, 4):  # reads go on, so the old one is late after three deadlines
        engine.clock.advance(DEADLINE_S * 0.9)
        request = Request()
        assert engine.ask(request, [block_hash]) == [PENDING]
        engine.manager.end_step()
        engine.step()
        assert engine.ask(request, [block_hash]) == [HIT]
        engine.manager.end_step()
    request = Request()
    assert engine.ask(request, keys(1)) == [PENDING]
    engine.manager.end_step()
    engine.clock.advance(DEADLINE_S * 0.4)
    engine.manager.end_step()
    assert engine.manager.counters.recomputed_blocks[Reason.DEADLINE] == 0
    engine.step()
    assert engine.ask(request, keys(1)) == [HIT]
    engine.twin._queued.append(old)
    engine.step()
    assert engine.manager.counters.recomputed_blocks[Reason.DEADLINE] == 0


def test_a_slow_second_tier_takes_reads_and_resets_while_its_writes_wait() -> None:
    """Writes filled its node: reads were misses, and a reset had to wait."""
    cascade = Cascade((1024, 1024, 4096), ManagerOptions(write_mode=WriteMode.THROUGH))
    manager, (near, far), old = cascade.manager, cascade.nodes, keys(4)
    cascade.store(old)
    manager.end_step()
    cascade.run_transfers()
    for policy, backend in zip(cascade.policies[:2], cascade.backends[:2], strict=True):
        for each in old:
            status = policy.remove(each)
            assert status is not None
            backend.free(status)
    for each in old:
        del near.presence.slots[each]
    for number in range(10, 10 + JOBS_AT_MOST + 8):
        cascade.store([key(number)])
        manager.end_step()
        near.down.wait(set(near.down.queued))
        manager.maintain()
    assert len(far.down.queued) == PUTS_AT_MOST
    request = Request()
    assert manager.lookup(old, request) is None
    manager.end_step()
    far.up.wait(set(far.up.queued))
    manager.maintain()
    assert manager.lookup(old, request) == len(old)
    epoch = far.presence.epoch
    manager.reset_cache()
    assert far.presence.epoch == epoch + 1
    assert manager.counters.links[1].demote_openings == 0
