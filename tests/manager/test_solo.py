"""One tier under somebody else's manager."""

from __future__ import annotations

import pytest
from support.cascade import BLOCK_SIZE, block_bytes, key
from support.day_log import DayLog, NotedBudget
from support.memory_backend import MemoryBackend
from support.memory_handler import MemoryHandler, all_ok

from kvcascade.manager.admission import Admission, AdmitAll, AdmitSecondTouch
from kvcascade.manager.below.solo import SoloTier
from kvcascade.manager.below.tier_jobs import FORGET_FAILED_S, TierJobResult, TierJobs
from kvcascade.manager.flow import Link
from kvcascade.manager.level import Tier
from kvcascade.tiers.base import BlockHash, BlockOutcome, CachePolicy, Moved
from kvcascade.tiers.breaker import FAILURES_TO_OPEN, REST_S
from kvcascade.tiers.policies import create


class Rig:
    """The other manager: its slots are a memory backend; `now_s` is the clock."""

    def __init__(
        self,
        slots: int = 8,
        admission: Admission | None = None,
        bytes_per_day: int | None = None,
        policy: str = "lru",
    ) -> None:
        self.now_s = 100.0
        self.theirs = MemoryBackend(BLOCK_SIZE, 32, medium="THEIRS")
        ours = self.ours = MemoryBackend(BLOCK_SIZE, slots, medium="OURS")
        self.down = MemoryHandler(self.theirs, ours, False)
        self.up = MemoryHandler(ours, self.theirs, False)
        log = DayLog(lambda: self.now_s)
        budget = NotedBudget(bytes_per_day, log) if bytes_per_day else None
        tier = Tier("ours", ours, create(policy, slots), write_budget=budget)
        self.tier = SoloTier(tier, Link(self.down, self.up), lambda: self.now_s)
        self.solo = TierJobs(self.tier, admission or AdmitAll(), lambda: self.now_s)
        self._jobs = 0

    def store(self, *numbers: int) -> TierJobResult:
        hashes = [key(i) for i in numbers]
        for slot, block_hash in enumerate(hashes):
            self.theirs.view(slot)[:] = block_bytes(block_hash)
        return self._ended(self.solo.store, hashes)

    def load(self, *numbers: int) -> TierJobResult:
        for slot in range(len(numbers)):
            self.theirs.view(slot)[:] = bytes(BLOCK_SIZE)
        return self._ended(self.solo.load, [key(i) for i in numbers])

    def has(self, *numbers: int) -> list[bool]:
        return [self.solo.has(key(i)) for i in numbers]

    def read(self, slot: int) -> bytes:
        return bytes(self.theirs.view(slot))

    def _ended(self, start: object, hashes: list[BlockHash]) -> TierJobResult:
        assert callable(start)
        self._jobs += 1
        start(self._jobs, hashes, list(range(len(hashes))))
        self.solo.drain()
        (result,) = self.solo.finished()
        assert result.job_id == self._jobs and not self.solo.is_busy
        return result


def test_what_was_stored_comes_back() -> None:
    rig = Rig()
    assert rig.store(1, 2, 3).is_whole
    assert rig.has(1, 2, 3, 4) == [True, True, True, False]
    result = rig.load(3, 1)
    assert result.is_whole and result.loaded == (key(3), key(1))
    assert [rig.read(0), rig.read(1)] == [block_bytes(key(3)), block_bytes(key(1))]


def test_it_is_bounded_and_evicts_with_an_event() -> None:
    rig = Rig(slots=4)
    rig.store(1, 2, 3, 4)
    rig.load(1, 2)
    rig.store(5, 6)
    assert rig.has(1, 2, 3, 4, 5, 6) == [True, True, False, False, True, True]
    removed = {h for event in rig.solo.take_events() if event.removed for h in event.block_hashes}
    assert removed == {key(3), key(4)}


def test_a_list_that_cannot_fit_is_taken_from_its_start() -> None:
    rig = Rig(slots=4)
    assert rig.store(*range(9)).is_whole
    assert rig.has(*range(9)) == [True] * 4 + [False] * 5


@pytest.mark.parametrize("outcome", [BlockOutcome.CORRUPT, BlockOutcome.GONE])
def test_a_damaged_block_is_a_miss_and_leaves(outcome: BlockOutcome) -> None:
    rig = Rig()
    rig.store(1, 2)
    rig.up.fate = lambda source, target: outcome if target == 0 else BlockOutcome.OK
    result = rig.load(1, 2)
    assert not result.is_whole and result.loaded == (key(2),)
    rig.now_s += FORGET_FAILED_S + 1
    assert rig.has(1, 2) == [False, True]


def test_a_read_error_is_a_miss_for_a_while() -> None:
    rig = Rig()
    rig.store(1)
    rig.up.fate = lambda source, target: BlockOutcome.IO_ERROR
    assert rig.load(1).loaded == ()
    assert rig.has(1) == [False], "nobody asks for it in a loop"
    rig.now_s += FORGET_FAILED_S + 1
    assert rig.has(1) == [True]
    rig.up.fate = all_ok
    assert rig.load(1).is_whole


def test_a_failed_write_is_not_there() -> None:
    rig = Rig()
    rig.down.fate = lambda source, target: BlockOutcome.IO_ERROR
    assert not rig.store(1).is_whole
    assert rig.has(1) == [False]
    rig.down.fate = all_ok
    rig.now_s += REST_S
    assert rig.store(1).is_whole and rig.has(1) == [True]


def test_while_writes_fail_nothing_leaves_for_what_cannot_come() -> None:
    rig = Rig(slots=4)
    rig.store(1, 2, 3, 4)
    rig.down.fate = lambda source, target: BlockOutcome.IO_ERROR
    assert not rig.store(5).is_whole
    for number in range(6, 20):
        assert rig.store(number).is_whole, "nobody tried"
    assert sum(rig.has(1, 2, 3, 4)) == 3
    rig.down.fate = all_ok
    rig.now_s += REST_S
    rig.store(20)
    assert rig.has(20) == [True]


def test_while_reads_fail_nothing_is_here() -> None:
    rig = Rig()
    rig.store(*range(8))
    rig.up.fate = lambda source, target: BlockOutcome.IO_ERROR
    for number in range(FAILURES_TO_OPEN):
        assert rig.has(7) == [True]
        rig.load(number)
    assert rig.has(7) == [False]
    rig.up.fate = all_ok
    rig.now_s += REST_S
    assert rig.has(7) == [True] and rig.load(7).is_whole


def test_a_load_of_what_is_gone_says_what_came() -> None:
    rig = Rig()
    rig.store(1)
    result = rig.load(1, 9)
    assert not result.is_whole and result.loaded == (key(1),)


def test_second_touch_takes_what_is_offered_again() -> None:
    rig = Rig(admission=AdmitSecondTouch())
    rig.store(1, 2)
    assert rig.has(1, 2) == [False, False]
    rig.store(2, 3)
    assert rig.has(1, 2, 3) == [False, True, False]


def test_the_write_budget_holds() -> None:
    rig = Rig(bytes_per_day=2 * BLOCK_SIZE)
    rig.store(1, 2, 3)
    assert rig.has(1, 2, 3) == [True, True, False]
    assert rig.store(4).is_whole and rig.has(4) == [False]


def test_a_block_that_another_engine_stored_first_is_no_failure() -> None:
    rig = Rig(slots=4)
    rig.down.fate = lambda source, target: BlockOutcome.HELD
    assert rig.store(1, 2).is_whole
    rig.down.fate = all_ok
    assert rig.store(3, 4, 5, 6).is_whole and rig.has(3, 4, 5, 6) == [True] * 4, "slots came back"


def test_a_reset_by_another_engine_empties_it() -> None:
    rig = Rig()
    rig.store(1, 2)
    backend = rig.tier.level.backend
    assert isinstance(backend, MemoryBackend)
    backend.is_overtaken = True
    rig.solo.maintain()
    assert rig.has(1, 2) == [False, False]
    assert rig.store(3).is_whole and rig.has(3) == [True]


def test_a_reset_by_another_engine_spares_what_is_being_read() -> None:
    rig = Rig(slots=2)
    rig.store(1, 2)
    backend = rig.tier.level.backend
    assert isinstance(backend, MemoryBackend)
    for job_id in (9, 10):
        rig.solo.load(job_id, [key(1)], [job_id])
    backend.is_overtaken = True
    rig.solo.maintain()
    assert rig.has(1, 2) == [False, False] and rig.solo.is_busy
    rig.up.step()
    (result,) = rig.solo.finished()
    assert result.loaded == (key(1),) and rig.read(9) == block_bytes(key(1))
    assert rig.solo.store(11, [key(1)], [0]) == [key(1)], "it may come anew, into the other slot"
    rig.down.step()
    assert [ended.job_id for ended in rig.solo.finished()] == [11]
    rig.up.fate = lambda source, target: BlockOutcome.GONE
    rig.solo.drain()
    (result,) = rig.solo.finished()
    assert not result.is_whole and rig.has(1) == [True]
    assert rig.store(3).is_whole and rig.has(1, 3) == [True, True], "both slots can be had"


def test_a_reset_leaves_nothing_to_find() -> None:
    rig = Rig(slots=4)
    rig.store(1, 2)
    rig.up.fate = lambda source, target: BlockOutcome.IO_ERROR
    rig.load(1)
    rig.up.fate = all_ok
    rig.solo.store(8, [key(3)], [0])  # under way, and nobody was told of its end
    rig.solo.drain()
    rig.solo.reset()
    assert rig.has(1, 2, 3) == [False] * 3
    assert rig.solo.take_events() == [], "a reset removes without naming"
    (result,) = rig.solo.finished()
    assert result.job_id == 8 and not rig.solo.is_busy
    assert rig.store(1, 4, 5, 6).is_whole and rig.has(1, 4, 5, 6) == [True] * 4, "no slot is lost"


def test_tails_leave_before_heads_however_they_came() -> None:
    rig = Rig(slots=4)
    rig.store(2)
    rig.store(0)
    rig.store(1)
    rig.solo.finish_request([key(i) for i in range(3)], {key(i) for i in range(3)})
    rig.store(7)
    rig.solo.finish_request([key(0), key(7)], {key(7)})
    rig.store(8)
    assert rig.has(0, 1, 2, 7, 8) == [True, True, False, True, True]


def test_a_policy_that_wants_chains_is_told_of_them() -> None:
    """Two requests with one beginning: `prefix` keeps it, whoever came last."""
    rig = Rig(slots=8, policy="prefix")
    shared = [0, 1]
    for tail in ([10, 11], [20, 21]):
        chain = [key(i) for i in [*shared, *tail]]
        rig.store(*shared, *tail)
        rig.solo.finish_request(chain, set(chain))
    policy = rig.tier.level.policy
    assert policy.wants_chains
    coldest = [h for h, _ in policy.coldest(6)]
    assert set(coldest[-2:]) == {key(i) for i in shared}
    assert coldest.index(key(11)) < coldest.index(key(10))


def test_what_another_engine_took_becomes_events() -> None:
    """Blocks that are here all the same are left out."""
    rig = Rig()
    rig.store(1, 2)
    rig.solo.take_events()
    rig.ours.moved.append(Moved([key(2), key(8), key(9)], removed=True))
    rig.ours.moved.append(Moved([key(1), key(7)], removed=False))
    (event,) = rig.solo.take_events()
    assert event.removed and event.block_hashes == (key(8), key(9))
    (event,) = rig.solo.take_events()
    assert not event.removed and event.block_hashes == (key(1),)
    assert rig.solo.take_events() == []


def test_closing_ends_its_handlers() -> None:
    rig = Rig()
    rig.store(1)
    assert rig.solo.close(1.0)
    assert not rig.solo.is_busy


def test_a_damaged_block_keeps_its_slot_while_another_job_reads_it() -> None:
    rig = Rig(slots=2)
    rig.store(1, 2)
    rig.solo.load(8, [key(1)], [0])
    rig.solo.load(9, [key(1)], [1])
    rig.up.fate = lambda source, target: BlockOutcome.CORRUPT if target == 0 else BlockOutcome.OK
    rig.up.step()
    rig.solo.finished()
    rig.solo.store(10, [key(3)], [2])
    rig.down.step()
    rig.solo.finished()
    rig.up.step()
    rig.solo.finished()
    rig.store(4, 5)
    assert rig.has(4, 5) == [True, True], "no slot is pinned for ever"


def test_what_opening_held_of_the_tier_is_released_before_the_first_step() -> None:
    """An engine that nobody asks takes no step."""
    looked_after: list[CachePolicy] = []

    class Held(MemoryBackend):
        def maintain(self, policy: CachePolicy) -> bool:
            looked_after.append(policy)
            return False

    backend, policy = Held(BLOCK_SIZE, 4), create("lru", 4)
    idle = MemoryHandler(backend, backend)
    SoloTier(Tier("ours", backend, policy), Link(idle, idle), lambda: 0.0)
    assert looked_after == [policy]
