"""Load or recompute: the measurements, the choice, and what a request then gets."""

from __future__ import annotations

import math

import pytest
from support.cascade import BLOCK_SIZE, Cascade, key

from kvcascade.manager.base import LookupState
from kvcascade.manager.below.port import LOAD_RATIO_MAX_HERE as HERE
from kvcascade.manager.below.port import LOAD_RATIO_MAX_REMOTE as REMOTE
from kvcascade.manager.core import ManagerOptions
from kvcascade.manager.promotion.worth import (
    PROBE_INTERVAL_S,
    SAMPLE_BYTES_MIN,
    Backlog,
    LinkSpeed,
    PrefillSpeed,
    Worth,
)
from kvcascade.manager.request import Request
from kvcascade.tiers.base import BlockHash

MIB = 1 << 20
HIT, MISS, PENDING = LookupState.HIT, LookupState.MISS, LookupState.PENDING


# ---- the rate of a link ------------------------------------------------------------------------


def test_an_unknown_rate_speaks_for_loading() -> None:
    assert LinkSpeed().expected_s(1 << 40, 0.0) == 0.0


def test_jobs_side_by_side_count_together() -> None:
    link = LinkSpeed()
    for now in (0.0, 0.0):
        link.started(100 * MIB, now)
    link.ended(100 * MIB, 100 * MIB, 1.0)
    assert link.bytes_per_s(1.0) == 100 * MIB
    link.ended(100 * MIB, 100 * MIB, 1.0)  # in no time at all: no sample
    assert link.bytes_per_s(1.0) == 100 * MIB


def test_time_without_work_is_not_counted() -> None:
    link = LinkSpeed()
    for start in (0.0, 1000.0):
        link.started(100 * MIB, start)
        link.ended(100 * MIB, 100 * MIB, start + 1)
    assert link.bytes_per_s(1001.0) == pytest.approx(100 * MIB)


def test_a_short_small_read_says_nothing_unless_it_was_faster() -> None:
    link = LinkSpeed()
    link.started(4096, 0.0)
    link.ended(4096, 4096, 0.004)
    assert link.bytes_per_s(0.004) == math.inf
    link.started(SAMPLE_BYTES_MIN, 1.0)
    link.ended(SAMPLE_BYTES_MIN, SAMPLE_BYTES_MIN, 9.0)
    link.started(2 * MIB, 10.0)
    link.ended(2 * MIB, 2 * MIB, 10.04)
    assert MIB < link.bytes_per_s(10.04) < 50 * MIB


def test_one_stall_weighs_less_than_the_reads_before() -> None:
    link = LinkSpeed()
    link.started(1000 * MIB, 0.0)
    link.ended(1000 * MIB, 1000 * MIB, 1.0)
    link.started(10 * MIB, 2.0)
    link.ended(10 * MIB, 10 * MIB, 3.0)
    assert 300 * MIB < link.bytes_per_s(3.0) < 400 * MIB


def test_a_device_that_is_silent_is_no_faster_than_its_silence() -> None:
    link = LinkSpeed()
    link.started(MIB, 0.0)
    assert link.bytes_per_s(4.0) == MIB / 4


def test_latency_is_no_part_of_the_rate() -> None:
    link = LinkSpeed(lambda: 0.1)
    link.started(20 * MIB, 0.0)
    link.ended(20 * MIB, 20 * MIB, 0.3)
    assert link.bytes_per_s(0.3) == pytest.approx(100 * MIB)
    assert link.expected_s(10 * MIB, 0.3) == pytest.approx(0.2)


def test_a_small_read_that_latency_dominates_says_nothing() -> None:
    link = LinkSpeed(lambda: 0.1)
    link.started(MIB, 0.0)
    link.ended(MIB, MIB, 0.15)
    assert link.bytes_per_s(0.15) == math.inf
    assert link.expected_s(MIB, 0.15) == 0.1


def test_reads_side_by_side_wait_for_the_latency_once() -> None:
    link = LinkSpeed(lambda: 0.1)
    for _ in range(2):
        link.started(50 * MIB, 0.0)
    for now in (0.6, 1.1):
        link.ended(50 * MIB, 50 * MIB, now)
        assert link.bytes_per_s(now) == pytest.approx(100 * MIB)


# ---- the speed of computing --------------------------------------------------------------------


def test_prefill_is_measured_from_offers_and_steps() -> None:
    prefill = PrefillSpeed()
    prefill.offered(1000, 10.0)
    prefill.end_step(10.5)
    prefill.end_step(10.6)
    assert prefill.tokens_per_s is None
    prefill.end_step(11.0)
    assert prefill.tokens_per_s == 1000


def test_a_long_prefill_is_measured_as_it_goes() -> None:
    prefill = PrefillSpeed()
    for step in range(30):
        prefill.offered(500, step * 0.1)
        prefill.end_step(step * 0.1 + 0.05)
    assert prefill.tokens_per_s is not None
    assert 4000 < prefill.tokens_per_s < 6000


@pytest.mark.parametrize("step_s", [0.125, 0.25, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("ends_first", [True, False])
def test_prefill_is_measured_in_long_steps_of_every_engine(step_s: float, ends_first: bool) -> None:
    """vLLM ends a step after its offers from 0.33 on, and before them earlier."""
    prefill = PrefillSpeed()
    for step in range(20):
        if ends_first:
            prefill.end_step(step * step_s)
        prefill.offered(500, step * step_s)
        if not ends_first:
            prefill.end_step(step * step_s)
    assert prefill.tokens_per_s == pytest.approx(500 / step_s)


def test_a_few_tokens_say_nothing_and_what_is_given_is_not_measured() -> None:
    decode, given = PrefillSpeed(), PrefillSpeed(7000.0)
    for prefill in (decode, given):
        prefill.offered(16, 0.0)
        for now in (1.0, 2.0, 3.0):
            prefill.end_step(now)
    assert (decode.tokens_per_s, given.tokens_per_s) == (None, 7000.0)


# ---- the choice --------------------------------------------------------------------------------


def measured(bytes_per_s: float, prefill: float = 1000.0, ratio_max: float = HERE) -> Worth:
    """Blocks of 1 MiB that save 100 tokens: 0.1 s each to compute."""
    worth = Worth([ratio_max], MIB, 100, PrefillSpeed(prefill))
    worth.links[0].started(64 * MIB, 0.0)
    worth.links[0].ended(64 * MIB, 64 * MIB, 64 * MIB / bytes_per_s)
    return worth


@pytest.mark.parametrize(
    ("ratio_max", "mib_per_s", "is_worth"),
    [
        (HERE, 20, True),
        (HERE, 6, True),
        (HERE, 4, False),
        (REMOTE, 12, True),
        (REMOTE, 8, False),
    ],
)
def test_loading_is_refused_where_it_is_slower_by_the_ratio_of_the_tier(
    ratio_max: float, mib_per_s: int, is_worth: bool
) -> None:
    worth = measured(mib_per_s * MIB, ratio_max=ratio_max)
    assert worth.is_worth(1, 10, 0, 10, 100.0) is is_worth
    assert worth.is_hopeless(1, 100.0) is not is_worth


def test_the_queue_counts_and_a_long_prefix_outweighs_it() -> None:
    worth = measured(20 * MIB)
    assert worth.is_worth(1, 1, 3, 1, 100.0)
    assert not worth.is_worth(1, 1, 4, 1, 100.0)
    assert worth.is_worth(1, 2, 4, 2, 100.0)
    worth.links[0].started(4 * MIB, 100.0)
    assert not worth.is_worth(1, 1, 0, 1, 100.0)


def test_each_tier_has_its_own_ratio() -> None:
    worth = Worth([HERE, REMOTE], MIB, 100, PrefillSpeed(1000.0))
    for link in worth.links:
        link.started(64 * MIB, 0.0)
        link.ended(64 * MIB, 64 * MIB, 8.0)
    assert worth.is_worth(1, 8, 0, 8, 100.0)
    assert not worth.is_worth(2, 8, 0, 8, 100.0)
    assert (worth.is_hopeless(1, 100.0), worth.is_hopeless(2, 100.0)) == (False, True)


def test_every_link_on_the_way_counts() -> None:
    worth = Worth([HERE, HERE], MIB, 100, PrefillSpeed(1000.0))
    for link, bytes_per_s in zip(worth.links, (100 * MIB, 2 * MIB), strict=True):
        link.started(64 * MIB, 0.0)
        link.ended(64 * MIB, 64 * MIB, 64 * MIB / bytes_per_s)
    assert worth.is_worth(1, 8, 0, 8, 100.0)
    assert not worth.is_worth(2, 8, 0, 8, 100.0)
    assert (worth.is_hopeless(1, 100.0), worth.is_hopeless(2, 100.0)) == (False, True)


# ---- what a request gets -----------------------------------------------------------------------

TOKENS = 100
KEYS = [key(i) for i in range(4)]


class Slow:
    """Four blocks below a first tier of eight; a read of all of them once took `read_s`."""

    def __init__(
        self,
        read_s: float,
        prefill_tokens_per_s: float | None = 1000.0,
        served_end: bytes = b"",
    ) -> None:
        options = ManagerOptions(
            tokens_per_block=TOKENS,
            prefill_tokens_per_s=prefill_tokens_per_s,
            promotion_budget_slots=8,
            served_end=served_end,
        )
        self.cascade = Cascade((8, 64), options)
        self.manager = self.cascade.manager
        self.counters = self.manager.counters
        self.fill()
        first = Request()
        assert self.ask(first) == [PENDING] * 4, "nothing is known yet"
        self.manager.end_step()
        self.cascade.now_s += read_s
        self.cascade.run_transfers()
        self.manager.finish_request(first)
        self.fill()

    def fill(self) -> None:
        """Bring the blocks down by storing others above them."""
        self.cascade.store(KEYS)
        for start in range(100, 140, 4):
            for _ in range(2):  # the first time may only make room
                self.cascade.store([key(start + i) for i in range(4)])
                self.cascade.run_transfers()
        assert not any(self.cascade.holds(0, k) for k in KEYS)
        assert all(self.cascade.holds(1, k) for k in KEYS)

    def run(self) -> None:
        """Steps until nothing is under way."""
        for _ in range(3):
            self.manager.end_step()
            self.cascade.run_transfers()

    def ask(self, request: Request) -> list[LookupState]:
        """As the scheduler does: up to the first miss."""
        states: list[LookupState] = []
        for block_hash in KEYS:
            states.append(self.manager.lookups.lookup_block(block_hash, request))
            if states[-1] is MISS:
                break
        return states


def test_a_fast_tier_is_read() -> None:
    slow = Slow(read_s=0.1)
    request = Request()
    assert slow.ask(request) == [PENDING] * 4
    slow.run()
    assert slow.ask(request) == [HIT] * 4
    assert slow.counters.promotions_worth == 2
    assert slow.counters.promotions_not_worth == 0


def test_a_slow_tier_is_not_and_nobody_waits() -> None:
    slow = Slow(read_s=4.0)
    promoted = slow.counters.links[0].promoted_blocks
    probing = Request()
    slow.ask(probing)
    slow.run()
    assert slow.counters.promotion_probes == 1
    probed = slow.counters.links[0].promoted_blocks - promoted
    assert 1 <= probed < 4
    slow.manager.finish_request(probing)
    for _ in range(5):
        request = Request()
        for _ in range(3):  # asked again, it is not thought over again
            assert slow.ask(request)[-1] is MISS
        slow.manager.finish_request(request)
        slow.run()
    assert slow.counters.promotions_not_worth == 6
    assert slow.counters.links[0].promoted_blocks - promoted == probed
    assert not slow.manager.has_pending_work()


@pytest.mark.parametrize(("served_end", "found"), [(b"", PENDING), (KEYS[3][-8:], MISS)])
def test_only_blocks_that_stand_for_tokens_make_reading_worth_it(
    served_end: bytes, found: LookupState
) -> None:
    """All four are read in 0.5 s; the tokens of one are computed in 0.1."""
    slow = Slow(read_s=0.5, served_end=served_end)
    request = Request()
    assert slow.ask(request) == [PENDING] * 4
    slow.manager.end_step()
    assert slow.ask(request)[0] is found


def test_a_probe_brings_blocks_that_nobody_waits_for() -> None:
    slow = Slow(read_s=4.0)
    request = Request()
    assert slow.ask(request) == [PENDING] * 4
    slow.manager.end_step()
    assert slow.ask(request) == [MISS], "the next step computes"
    assert request.claim is None
    slow.run()
    assert slow.cascade.holds(0, KEYS[0]) and not slow.cascade.holds(0, KEYS[3])


def test_a_tier_that_recovers_is_used_again() -> None:
    slow = Slow(read_s=40.0)
    for _ in range(12):
        slow.cascade.now_s += PROBE_INTERVAL_S
        request = Request()
        slow.ask(request)
        slow.manager.end_step()
        slow.cascade.now_s += 0.001
        slow.run()
        slow.manager.finish_request(request)
        if slow.counters.promotions_worth > 1:
            break
        slow.fill()
    assert slow.counters.promotions_worth == 2
    assert slow.counters.promotion_probes >= 1


def test_without_a_prefill_speed_everything_is_read() -> None:
    slow = Slow(read_s=40.0, prefill_tokens_per_s=None)
    assert slow.ask(Request()) == [PENDING] * 4
    slow.manager.end_step()
    assert slow.counters.promotions_not_worth == 0


def test_prefill_is_measured_by_what_a_request_computes() -> None:
    cascade = Cascade((64, 64), ManagerOptions(tokens_per_block=TOKENS))
    manager = cascade.manager
    held, computed = [key(i) for i in range(20)], [key(i) for i in range(20, 30)]
    request = Request()
    assert (
        manager.lookups.lookup_block(computed[0], request) is MISS
    )  # the device holds what is before
    output = manager.prepare_store(held + computed, request)
    assert output is not None
    cascade.now_s += 0.5
    for _ in range(3):
        manager.end_step()
    assert manager._claims.choice.worth is not None
    assert manager._claims.choice.worth.prefill.tokens_per_s == len(computed) * TOKENS / 0.5


def test_what_is_put_off_does_not_make_computing_look_faster() -> None:
    """Ten blocks are computed every 0.1 s, and none is taken while the tier below is silent."""
    cascade = Cascade((300, 1000), ManagerOptions(tokens_per_block=TOKENS))
    manager = cascade.manager
    assert manager._claims.choice.worth is not None
    request, prompt = Request(), [key(i) for i in range(260)]
    cascade.store([key(i) for i in range(1000, 1300)])
    assert manager.lookups.lookup_block(prompt[0], request) is MISS
    for step in range(25):
        assert manager.prepare_store(prompt[: 10 * (step + 1)], request) is None
        cascade.now_s += 0.1
        manager.end_step()
    while manager.prepare_store(prompt, request) is None:
        cascade.run_transfers()
    for _ in range(12):
        cascade.now_s += 0.1
        manager.end_step()
    assert manager._claims.choice.worth.prefill.tokens_per_s is not None
    assert 7000 < manager._claims.choice.worth.prefill.tokens_per_s <= 11000


WINDOW_KEYS = [BlockHash(k[:-1] + b"\1") for k in KEYS]
"""Of a second KV group, of which only the last blocks of a prefix are loaded."""


def test_tokens_are_saved_by_the_blocks_that_stand_for_them() -> None:
    worth = Worth([HERE], 1 << 20, 100, PrefillSpeed(1000.0), served_end=b"\0")
    chain = KEYS + WINDOW_KEYS[3:]
    assert worth.saved_blocks(KEYS, KEYS) == 4
    assert worth.saved_blocks(KEYS[1:], chain) == 3, "the one that is here is saved either way"
    assert worth.saved_blocks(WINDOW_KEYS[3:], chain) == 4, "without it none is of use"
    assert worth.saved_blocks(WINDOW_KEYS[3:], []) == 1, "of what is not known, as many"
    assert Worth([HERE], 1 << 20, 100, PrefillSpeed(1000.0)).saved_blocks(KEYS, chain) == 5


def test_a_window_is_loaded_for_the_sake_of_all_before_it() -> None:
    """Reading all takes 8 s, computing 4: by the same measure as for blocks of one group."""
    worth = Worth([HERE], 1 << 20, 100, PrefillSpeed(100.0), served_end=b"\0")
    worth.links[0].started(8 << 20, 0.0)
    worth.links[0].ended(8 << 20, 8 << 20, 8.0)  # 1 MiB a second
    saved = worth.saved_blocks(KEYS + WINDOW_KEYS, KEYS + WINDOW_KEYS)
    assert saved == 4
    assert worth.is_worth(1, 8, 0, saved, 10.0)
    assert not worth.is_worth(1, 8, 0, 3, 10.0)


@pytest.mark.parametrize("first", [KEYS, WINDOW_KEYS], ids=["full first", "window first"])
def test_a_prompt_of_several_groups_is_counted_once(first: list[BlockHash]) -> None:
    """The whole window was asked for after the first block was missed, and is offered, too."""
    cascade = Cascade((64, 64), ManagerOptions(tokens_per_block=TOKENS, served_end=b"\0"))
    manager, request = cascade.manager, Request()
    assert manager._claims.choice.worth is not None
    for block_hash in (KEYS[1], *reversed(WINDOW_KEYS)):
        assert manager.lookups.lookup_block(block_hash, request) is MISS
    second = WINDOW_KEYS if first is KEYS else KEYS
    assert manager.prepare_store(first + second, request) is not None
    cascade.now_s += 0.5
    for _ in range(3):
        manager.end_step()
    assert manager._claims.choice.worth.prefill.tokens_per_s == 3 * TOKENS / 0.5


def test_it_computes_from_what_it_missed_when_it_asked_last() -> None:
    """Meanwhile the device gave blocks of a waiting request to others."""
    cascade = Cascade((64, 64), ManagerOptions(tokens_per_block=TOKENS))
    manager, request = cascade.manager, Request()
    for missed in (KEYS[3], KEYS[0]):
        assert manager.lookups.lookup_block(missed, request) is MISS
        manager.end_step()
    assert manager.prepare_store(KEYS, request) is not None
    cascade.now_s += 0.5
    for _ in range(3):
        manager.end_step()
    assert manager._claims.choice.worth is not None
    assert manager._claims.choice.worth.prefill.tokens_per_s == 4 * TOKENS / 0.5


def test_an_offer_beside_one_that_is_put_off_is_not_counted() -> None:
    """A state, and the end of a prompt that fills no block: what is put off comes again later."""
    worth, request = Worth([HERE], 1 << 20, 100, PrefillSpeed()), Request()
    request.is_computing = True
    worth.note_offer(KEYS[:3], request, False, 10.0)
    request.note_deferred(KEYS[:3])
    worth.note_offer(WINDOW_KEYS[:1], request, True, 10.0)
    request.note_stored(WINDOW_KEYS[:1], ())
    worth.note_offer(KEYS, request, True, 10.0)
    for now in (10.5, 10.6, 11.0):
        worth.prefill.end_step(now)
    assert worth.prefill.tokens_per_s == 400


def test_that_all_is_stored_says_nothing_of_what_was_put_off() -> None:
    prefill = PrefillSpeed()
    prefill.offered(1000, 10.0)
    prefill.offered(1000, 10.5, is_taken=False)
    prefill.all_stored(10.5)  # the second thousand is being computed now
    assert prefill.tokens_per_s is None
    for now in (11.0, 11.5, 12.0):
        prefill.end_step(now)
    assert prefill.tokens_per_s == 1000


def test_a_block_that_somebody_else_waits_for_still_comes() -> None:
    slow = Slow(read_s=0.1)
    first, second = Request(), Request()
    assert slow.ask(first) == [PENDING] * 4
    assert slow.ask(second) == [PENDING] * 4, "it waits for the same blocks, at no cost"
    slow.run()
    assert slow.ask(first) == slow.ask(second) == [HIT] * 4
    assert slow.counters.links[0].promoted_bytes == 8 * BLOCK_SIZE


def test_who_asks_for_the_same_blocks_does_not_wait_for_what_is_not_worth_it() -> None:
    """A batch of prompts that begin alike comes in one step."""
    slow = Slow(read_s=0.5, served_end=KEYS[3][-8:])
    requests = [Request() for _ in range(3)]
    for request in requests:
        assert slow.ask(request) == [PENDING] * 4
    slow.manager.end_step()
    assert [slow.ask(request)[0] for request in requests] == [MISS] * 3
    assert slow.counters.promotions_not_worth == 3
    assert not slow.manager.has_pending_work()


def test_a_probe_is_one_however_many_ask_for_the_same_blocks() -> None:
    slow = Slow(read_s=4.0)
    promoted = slow.counters.links[0].promoted_blocks
    requests = [Request(), Request()]
    for request in requests:
        assert slow.ask(request) == [PENDING] * 4
    slow.manager.end_step()
    assert [slow.ask(request)[0] for request in requests] == [MISS, MISS]
    slow.run()
    assert 1 <= slow.counters.links[0].promoted_blocks - promoted < 4
    assert slow.counters.promotion_probes == 1


def test_what_another_loads_anyway_costs_no_more() -> None:
    """Behind what is on its way, one block alone takes longer than it saves; four do not."""
    slow = Slow(read_s=0.5)
    assert slow.manager._claims.choice.worth is not None
    slow.manager._claims.choice.worth.links[0].started(2 * BLOCK_SIZE, slow.cascade.now_s)
    long, short = Request(), Request()
    assert slow.ask(long) == [PENDING] * 4
    assert slow.manager.lookups.lookup_block(KEYS[0], short) is PENDING
    slow.manager.end_step()
    assert slow.counters.promotions_worth == 3 and slow.counters.promotions_not_worth == 0


def test_blocks_of_a_backlog_leave_with_the_request_that_named_them_last() -> None:
    backlog, first, last = Backlog(), Request(), Request()
    blocks = [key(n) for n in range(4)]
    backlog.expect(first, 64.0, blocks[:3])
    backlog.expect(last, 32.0, blocks[2:])
    backlog.end(first)
    assert [block in backlog for block in blocks] == [False, False, True, True]
    backlog.end(last)
    assert not backlog.shared(blocks) and backlog.tokens == 0.0


def test_a_read_that_was_given_up_and_ends_in_an_idle_tier_is_no_measure() -> None:
    link = LinkSpeed()
    link.started(1 << 30, 0.0)
    link.ended(1 << 30, 1 << 30, 1.0)
    known = link.bytes_per_s(1.0)
    link.started(1 << 20, 2.0)
    link.given_up(1 << 20)
    link.ended(0, 1 << 20, 600.0)
    assert link.bytes_per_s(600.0) == known == 1 << 30
