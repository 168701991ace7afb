"""A tier behind a node under somebody else's manager; outcomes come later than answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from support.keys import key, keys
from support.node_rig import ARENA_SLOTS, BLOCK, SLOTS, NodesRig, NodeTwin

from kvcascade.handlers.node.node_keeper import JOBS_AT_MOST
from kvcascade.manager.admission import admit_second_touch
from kvcascade.manager.base import BlockEvent
from kvcascade.manager.below import tier_jobs
from kvcascade.manager.below.single_tier import STALLED_S
from kvcascade.manager.below.tier_jobs import (
    FORGET_FAILED_S,
    JOBS_EACH_WAY,
    TierJobResult,
    TierJobs,
)
from kvcascade.tiers.base import BlockHash
from kvcascade.tiers.breaker import FAILURES_TO_OPEN, REST_S
from kvcascade.tiers.nvme.path.path_messages import Why


class Rig:
    """The other manager; the memory of the node's engine has its slots."""

    def __init__(
        self, *, is_real: bool = False, is_second_touch: bool = False, slots: int = SLOTS
    ) -> None:
        self.nodes = NodesRig(is_real=is_real)
        self.node: NodeTwin = self.nodes.add(slots=slots)
        admission = admit_second_touch if is_second_touch else None
        self.jobs = TierJobs(self.node.tier, admission, self.nodes.clock)
        self.jobs.maintain()
        self._job = 0

    def begin_store(self, *numbers: int) -> Sequence[bytes]:
        for slot, number in enumerate(numbers):
            self.node.arena.view(slot)[:] = content(number)
        self._job += 1
        return self.jobs.store(self._job, [key(n) for n in numbers], range(len(numbers)))

    def store(self, *numbers: int) -> TierJobResult:
        self.begin_store(*numbers)
        return self.end()

    def load(self, *numbers: int) -> TierJobResult:
        self._job += 1
        self.jobs.load(self._job, [key(n) for n in numbers], range(len(numbers)))
        return self.end()

    def end(self) -> TierJobResult:
        self.jobs.drain()
        self.nodes.pump()
        (result,) = self.jobs.finished()
        assert result.job_id == self._job and not self.jobs.is_busy
        self.jobs.maintain()
        return result

    def has(self, *numbers: int) -> list[bool]:
        return [self.jobs.has(key(n)) for n in numbers]


def content(number: int) -> bytes:
    return (key(number) * (BLOCK // 32 + 1))[:BLOCK]


@pytest.mark.parametrize("is_real", [False, True])
def test_what_was_stored_comes_back(is_real: bool) -> None:
    rig = Rig(is_real=is_real)
    assert rig.store(1, 2, 3).is_whole and rig.has(1, 2, 3, 4) == [True, True, True, False]
    result = rig.load(3, 1)
    assert result.is_whole and result.loaded == (key(3), key(1))
    assert [bytes(rig.node.arena.view(slot)) for slot in (0, 1)] == [content(3), content(1)]
    events = [(event.removed, event.block_hashes) for event in rig.jobs.take_events()]
    assert events == [(False, (key(1), key(2), key(3)))]


def test_a_block_is_found_once_its_write_has_ended() -> None:
    rig = Rig()
    assert rig.begin_store(1) == [key(1)]
    assert rig.has(1) == [False] and rig.jobs.is_busy
    assert rig.end().is_whole and rig.has(1) == [True]
    assert rig.begin_store(1) == [], "the tier has it"


@pytest.mark.parametrize("why", [Why.FULL, Why.LATER, Why.BUDGET, Why.RESTING])
def test_blocks_without_room_are_left_out_of_a_store(why: Why) -> None:
    rig = Rig()
    rig.nodes.twin.why = why
    result = rig.store(1, 2)
    assert result.is_whole and rig.has(1, 2) == [False, False]


def test_a_device_that_refuses_a_write_fails_the_store() -> None:
    rig = Rig()
    rig.nodes.fs.fail("pwritev", 5, times=2)
    assert not rig.store(1, 2).is_whole and rig.has(1, 2) == [False, False]


def test_a_store_whose_writer_dies_leaves_its_blocks_out() -> None:
    rig = Rig()
    rig.begin_store(1)
    rig.nodes.step()
    writer = rig.nodes.kill_writer()
    assert rig.end().is_whole and rig.has(1) == [False]
    rig.nodes.writer = writer.successor()
    rig.node.tick(1.0)
    rig.jobs.maintain()
    assert rig.store(1).is_whole and rig.has(1) == [True]


def test_a_full_tier_makes_room_and_keeps_the_newest() -> None:
    rig = Rig(is_real=True)
    events: list[BlockEvent] = []
    for number in range(2 * SLOTS):
        assert rig.store(number).is_whole
        events += rig.jobs.take_events()
    assert rig.has(0, 2 * SLOTS - 1) == [False, True]
    assert any(event.removed for event in events)


def test_a_block_that_cannot_be_read_is_a_miss_for_a_while_only() -> None:
    rig = Rig()
    rig.store(1, 2)
    rig.nodes.fs.fail("preadv", 5, times=4)
    result = rig.load(1)
    assert not result.is_whole and not result.loaded
    rig.nodes.fs.heal()
    assert rig.has(1, 2) == [False, True]
    rig.nodes.clock.advance(FORGET_FAILED_S)
    assert rig.has(1) == [True] and rig.load(1).is_whole


def test_after_a_reset_older_blocks_are_gone_and_newer_ones_are_stored() -> None:
    rig = Rig()
    rig.store(1, 2)
    rig.begin_store(3)
    rig.jobs.reset()
    assert rig.has(1, 2, 3) == [False] * 3
    rig.end()
    assert rig.has(1, 2, 3) == [False] * 3
    assert rig.store(1).is_whole and rig.has(1, 2) == [True, False]


def test_a_reset_by_another_engine_empties_it() -> None:
    rig = Rig()
    rig.store(1, 2)
    other = rig.nodes.add()
    other.tier.reset()
    rig.nodes.pump()
    rig.jobs.maintain()
    assert rig.has(1, 2) == [False, False]
    assert rig.store(3).is_whole and rig.has(3) == [True]


def test_offers_count_as_uses() -> None:
    rig = Rig(is_second_touch=True)
    assert rig.begin_store(1) == []
    assert [result.is_whole for result in rig.jobs.finished()] == [True]
    assert rig.store(1).is_whole and rig.has(1) == [True]


def test_uses_of_a_request_reach_the_writer_in_order() -> None:
    rig = Rig()
    rig.store(2, 1)
    rig.jobs.finish_request(keys(3), {key(1), key(2)})
    rig.nodes.pump()
    assert rig.nodes.twin.uses == [([key(1), key(2)], False, True), ([key(0)], False, False)]


def test_a_request_that_ends_before_its_store_is_reported_after_it() -> None:
    """The writer ignores blocks that it does not hold yet, and would keep the order of a set."""
    rig = Rig()
    rig.begin_store(2, 1)
    rig.jobs.finish_request(keys(3), {key(1), key(2)})
    rig.nodes.pump()
    assert rig.nodes.twin.uses == [], "the outcome was not collected"
    rig.end()
    rig.nodes.pump()
    assert rig.nodes.twin.uses == [([key(1), key(2)], False, True), ([key(0)], False, False)]


class Counted(list[BlockHash]):
    """Keys of a request, and how often one was read."""

    reads = 0

    def __getitem__(self, at: Any) -> Any:
        self.reads += 1
        return super().__getitem__(at)

    def __iter__(self) -> Iterator[BlockHash]:
        for at in range(len(self)):
            yield self[at]


def test_while_stores_wait_ended_requests_are_not_read_again_and_again() -> None:
    """4,000 of them with 500 blocks each took 58 ms of every step."""
    rig = Rig()
    rig.begin_store(19)
    used = Counted(keys(20))
    rig.jobs.finish_request(used, set())
    for _ in range(50):
        assert rig.jobs.finished() == []
    assert used.reads <= len(used) + 51
    rig.end()
    rig.nodes.pump()
    assert rig.nodes.twin.uses, "it is reported once the store has ended"


def test_loads_that_the_node_does_not_take_wait_for_their_turn() -> None:
    """The blocks of each surplus load were misses for 30 s."""
    rig, loads = Rig(), 2 * JOBS_AT_MOST
    rig.store(*range(8))
    for number in range(loads):
        rig.jobs.load(number, [key(number % 8)], [number % 32])
    rig.jobs.drain()
    results = rig.jobs.finished()
    assert [result.job_id for result in results] == [*range(loads)] and not rig.jobs.is_busy
    assert all(result.is_whole for result in results) and rig.has(*range(8)) == [True] * 8


def test_stores_that_the_node_does_not_take_wait_for_their_turn() -> None:
    """A surplus store stopped all writes for 5 s."""
    last = 2 * JOBS_AT_MOST
    rig = Rig(slots=2 * last)
    for number in range(last + 1):
        assert rig.jobs.store(number, [key(number)], [0]) == [key(number)]
    assert rig.jobs.store(last + 1, [key(last)], [0]) == [], "it waits already"
    rig.jobs.finish_request([key(last)], {key(last)})
    rig.nodes.pump()
    assert rig.nodes.twin.uses == [], "the store of its block has not ended"
    rig.jobs.drain()
    rig.nodes.pump()
    assert rig.nodes.twin.uses == [([key(last)], False, True)] and not rig.jobs.is_busy
    results = rig.jobs.finished()
    assert len(results) == last + 2 and all(result.is_whole for result in results)
    assert rig.jobs.below.takes_puts, "the tier does not rest"


def test_a_stall_while_jobs_are_drained_loses_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_jobs, "JOBS_EACH_WAY", 4)
    rig, count = Rig(slots=ARENA_SLOTS), 6
    rig.node.is_device_stalled = True
    for number in range(count):
        rig.begin_store(number)
    ends_s = rig.nodes.clock() + STALLED_S + 1.0
    wait = rig.jobs.below.wait

    def wait_for_the_end(limit_s: float) -> bool:
        rig.node.is_device_stalled = rig.nodes.clock() < ends_s
        return wait(limit_s)

    rig.jobs.below.wait = wait_for_the_end  # type: ignore[method-assign]
    rig.jobs.drain()
    assert rig.has(*range(count)) == [True] * count and not rig.jobs.is_busy


def test_no_store_waits_for_a_stalled_disk() -> None:
    """Stores that waited kept their slots for as long as the disk stalled."""
    rig, count = Rig(slots=ARENA_SLOTS), JOBS_EACH_WAY + 2
    rig.node.is_device_stalled = True
    for number in range(count):
        rig.jobs.store(number, [key(number)], [number])
    assert rig.jobs.finished() == []
    rig.nodes.clock.advance(STALLED_S)
    assert ended(rig) == [(JOBS_EACH_WAY, True), (JOBS_EACH_WAY + 1, True)]
    assert rig.jobs.store(count, [key(count)], [count]) == []
    assert ended(rig) == [(count, True)] and rig.jobs.is_busy
    rig.node.is_device_stalled = False
    rig.jobs.drain()
    assert len(rig.jobs.finished()) == JOBS_EACH_WAY and rig.jobs.below.takes_puts


def test_no_load_waits_for_a_stalled_disk() -> None:
    rig, count = Rig(), JOBS_EACH_WAY + 2
    rig.store(1, 2)
    rig.node.is_device_stalled = True
    for number in range(count):
        rig.jobs.load(number, [key(1 + number // JOBS_EACH_WAY)], [number])
    assert rig.jobs.finished() == []
    rig.nodes.clock.advance(STALLED_S)
    assert ended(rig) == [(JOBS_EACH_WAY, False), (JOBS_EACH_WAY + 1, False)]
    rig.jobs.load(count, [key(2)], [count])
    assert ended(rig) == [(count, False)] and rig.jobs.is_busy
    rig.node.is_device_stalled = False
    rig.jobs.drain()
    assert rig.has(1, 2) == [True, True], "nobody tried to read 2"


def ended(rig: Rig) -> list[tuple[int, bool]]:
    return [(result.job_id, result.is_whole) for result in rig.jobs.finished()]


def test_a_store_that_waited_over_a_reset_is_left_out() -> None:
    rig, count = Rig(), JOBS_EACH_WAY + 1
    for number in range(count):
        rig.jobs.store(number, [key(number)], [number])
    rig.nodes.add().tier.reset()
    rig.nodes.pump()
    rig.jobs.maintain()
    rig.jobs.drain()
    assert len(rig.jobs.finished()) == count and not any(rig.has(*range(count)))


def test_a_node_whose_transfers_do_not_end_is_replaced_before_a_reset() -> None:
    """Else a late read would write into slots that are used again, or the engine would end."""
    rig, count = Rig(), JOBS_EACH_WAY + 1
    rig.store(1)
    rig.node.is_device_stalled = True
    for number in range(count):
        rig.jobs.load(number, [key(1)], [number])
    rig.jobs.store(count, [key(2)], [0])
    rig.jobs.drain()
    results = rig.jobs.finished()
    assert sorted(result.job_id for result in results) == [*range(count + 1)]
    assert not any(result.is_whole for result in results) and not rig.jobs.is_busy


def test_closing_ends_the_jobs() -> None:
    rig = Rig()
    rig.begin_store(1)
    assert rig.jobs.close(1.0) and not rig.jobs.is_busy


def test_closing_begins_no_job_that_waits() -> None:
    """A read that ends after the close would write into memory of the other manager."""
    rig, count = Rig(slots=ARENA_SLOTS), JOBS_EACH_WAY + 1
    rig.store(0)
    for number in range(count):
        rig.jobs.load(number, [key(0)], [number])
        rig.jobs.store(count + number, [key(1 + number)], [number])
    assert rig.jobs.close(1.0) and not rig.jobs.is_busy and not rig.node.engine.jobs


def test_while_writes_fail_nothing_leaves_for_what_cannot_come() -> None:
    rig = Rig(is_real=True)
    rig.store(*range(SLOTS))
    rig.nodes.fs.fail("pwritev", 5, times=1 << 30)
    assert not rig.store(100).is_whole
    held = sum(rig.has(*range(SLOTS)))
    for number in range(101, 120):
        assert rig.store(number).is_whole, "nobody tried"
    assert sum(rig.has(*range(SLOTS))) == held >= SLOTS - 2
    rig.nodes.fs.heal()
    rig.node.tick(REST_S + 1.0)
    rig.store(200)
    assert rig.has(200) == [True]


def test_while_reads_fail_nothing_is_here() -> None:
    rig = Rig(is_real=True)
    rig.store(*range(8))
    rig.nodes.fs.fail("preadv", 5, times=1 << 30)
    for number in range(FAILURES_TO_OPEN):
        assert rig.has(7) == [True]
        rig.load(number)
    assert rig.has(7) == [False]
    rig.nodes.fs.heal()
    rig.nodes.clock.advance(REST_S)
    assert rig.has(7) == [True] and rig.load(7).is_whole
