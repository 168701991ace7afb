"""Load or recompute with several tiers below: a slow one costs no block of a fast one."""

from __future__ import annotations

import pytest
from support.cascade import BLOCK_SIZE, Cascade, key

from kvcascade.manager.core import ManagerOptions
from kvcascade.manager.counters import Reason
from kvcascade.manager.promotion.claims import PromotionRoom
from kvcascade.manager.request import Request
from kvcascade.tiers.base import BlockHash

END = b"\1"
"""End of the blocks of the group that counts, if there are several."""
HEAD = [key(i) for i in range(4)]
TAIL = [BlockHash(key(i)[:-1] + END) for i in range(4, 8)]
PROMPT = HEAD + TAIL
BLOCKS_PER_S = 10.0
"""Speed of computing."""
FAST_S, SLOW_S = 0.001, 10.0
"""Time to read a block."""


class Rig:
    """Tier 1 holds `near` and tier 2 the whole prompt. Reading from them takes the given times."""

    def __init__(
        self, near: list[BlockHash], block_s: tuple[float, float], **given: object
    ) -> None:
        options = ManagerOptions(
            tokens_per_block=100.0,
            prefill_tokens_per_s=100.0 * BLOCKS_PER_S,
            **given,  # type: ignore[arg-type]
        )
        self.cascade = cascade = Cascade((64, 12, 64), options)
        self.manager = cascade.manager
        cascade.below_only([h for h in PROMPT if h not in near])
        for start in (100, 104, 108):
            cascade.below_only([key(start + i) for i in range(4)])
        if near:
            cascade.below_only(near)
        cascade.run_transfers()
        assert [cascade.holds(1, h) for h in PROMPT] == [h in near for h in PROMPT]
        assert all(cascade.holds(2, h) for h in PROMPT)
        worth = self.manager._claims.choice.worth
        assert worth is not None
        self.worth = worth
        self.set_rates(*block_s)

    def set_rates(self, *block_s: float) -> None:
        """Let all that is known be that a block takes so long to read from each tier."""
        for link, seconds in zip(self.worth.links, block_s, strict=True):
            link._bytes_per_s = BLOCK_SIZE / seconds

    def serve(self, request: Request, prompt: list[BlockHash] = PROMPT) -> tuple[int, int]:
        """Return the hits of a prompt, and the steps that it waited for them."""
        for waited in range(8):
            hits = self.manager.lookup(prompt, request)
            if hits is not None:
                return hits, waited
            self.cascade.run_transfers()
        raise AssertionError("it waits for ever")


@pytest.mark.parametrize("is_probing", [False, True])
def test_a_slow_tail_costs_the_fast_head_nothing(is_probing: bool) -> None:
    rig, request = Rig(HEAD, (FAST_S, SLOW_S)), Request()
    if not is_probing:
        rig.worth.probe_blocks(2, rig.cascade.now_s)
    hits, waited = rig.serve(request)
    assert hits == len(HEAD) + is_probing, "a block that was read anyway is a hit"
    assert waited <= 3
    counters = rig.manager.counters
    assert counters.recomputed_blocks[Reason.NOT_WORTH] == len(TAIL)
    assert counters.promotion_probes == is_probing
    assert counters.links[0].promoted_blocks == len(HEAD)


def test_what_lies_behind_a_slow_block_is_counted_as_computed() -> None:
    """The first two blocks lie in both tiers; tier 1 has the last four, and tier 2 all."""
    rig, request = Rig(TAIL, (FAST_S, SLOW_S)), Request()
    rig.worth.probe_blocks(2, rig.cascade.now_s)
    assert rig.serve(request)[0] == 0
    counters = rig.manager.counters
    assert counters.recomputed_blocks[Reason.NOT_WORTH] == 0, "nothing was claimed"
    rig.set_rates(FAST_S, FAST_S)
    later = Request()
    assert rig.manager.lookup(PROMPT, later) is None
    rig.set_rates(FAST_S, SLOW_S)
    rig.manager.end_step()
    assert counters.recomputed_blocks[Reason.NOT_WORTH] == len(PROMPT)
    assert not counters.links[0].promoted_blocks


def test_a_tail_is_compared_with_its_own_computing() -> None:
    """A second to read the tail, 0.4 s to compute it, 0.8 s for the prompt: the limit is twice."""
    rig, request = Rig(HEAD, (FAST_S, 1.0 / len(TAIL))), Request()
    rig.worth.probe_blocks(2, rig.cascade.now_s)
    assert rig.serve(request)[0] == len(HEAD)


@pytest.mark.parametrize(("head_s", "hits"), [(1.0, 8), (1.7, 0)], ids=["read", "computed"])
def test_a_head_is_compared_with_all_that_is_useless_without_it(head_s: float, hits: int) -> None:
    """The head takes 0.4 s to compute and the prompt 0.8 s: the limit is 1.6 s."""
    rig, request = Rig(HEAD, (head_s / len(HEAD), FAST_S)), Request()
    assert rig.serve(request)[0] == hits


def test_what_a_request_computes_anyway_is_not_ahead_of_its_head() -> None:
    """The tail takes 0.4 s to compute, and the head, too: 0.8 s are its limit."""
    rig, request = Rig(HEAD, (0.9 / len(HEAD), SLOW_S)), Request()
    rig.worth.probe_blocks(1, rig.cascade.now_s)
    rig.worth.probe_blocks(2, rig.cascade.now_s)
    rig.set_rates(0.3 / len(HEAD), 0.5)
    assert rig.manager.lookup(PROMPT, request) is None
    rig.manager.end_step()
    assert request.too_slow == {2}
    rig.set_rates(0.9 / len(HEAD), 0.5)
    assert rig.serve(request)[0] == 0
    assert request.too_slow == {1, 2}
    assert rig.worth.backlog.tokens == 100.0 * len(PROMPT), "nothing is counted twice or lost"
    assert rig.manager.counters.promotions_not_worth == 1, "it counts requests"


def test_a_request_that_ends_in_the_step_of_its_miss_leaves_nothing_behind() -> None:
    rig = Rig([], (FAST_S, FAST_S))
    backlog = rig.worth.backlog
    for number in range(200, 203):
        request = Request(positions={key(number): 100})
        assert rig.manager.lookup([key(number)], request) == 0
        rig.manager.finish_request(request)
        rig.manager.end_step()
        assert (backlog.tokens, backlog._left, backlog._named) == (0.0, {}, {})


def test_each_slow_tier_has_probes_of_its_own() -> None:
    rig = Rig(HEAD, (SLOW_S, SLOW_S))
    rig.serve(Request())
    assert rig.manager.counters.promotion_probes == 2
    for _ in range(2):
        rig.cascade.run_transfers()
    assert [link.promoted_blocks > 0 for link in rig.manager.counters.links] == [True, True]


def test_a_claim_whose_slow_block_has_arrived_is_kept() -> None:
    """It came by another way, and nobody has counted the claim anew since."""
    options = ManagerOptions(
        tokens_per_block=100.0, prefill_tokens_per_s=1000.0, promotion_budget_slots=8
    )
    cascade = Cascade((32, 128), options)
    manager, prompt = cascade.manager, [key(i) for i in range(64)]
    for start in range(0, 64, 16):
        cascade.below_only(prompt[start : start + 16])
    worth = manager._claims.choice.worth
    assert worth is not None
    worth.links[0]._bytes_per_s = BLOCK_SIZE / FAST_S
    assert manager.lookup(prompt[:8], Request()) is None
    manager.end_step()
    large, other, first, second = (Request() for _ in range(4))
    asked = {large: prompt[30:38], other: prompt[40:46], first: prompt[20:21]}
    asked[second] = prompt[20:21]
    for step in range(5):
        if step:
            worth.links[0]._bytes_per_s = BLOCK_SIZE / 50.0
        for request, blocks in asked.items():
            manager.lookup(blocks, request)
        manager.end_step()
        cascade.now_s += 0.03
        cascade.store(prompt[20:21])
    assert not second.too_slow


def test_a_tier_that_was_left_out_stays_out_for_the_request() -> None:
    rig, request = Rig(HEAD, (FAST_S, SLOW_S)), Request()
    rig.worth.probe_blocks(2, rig.cascade.now_s)
    rig.serve(request, PROMPT[:6])
    rig.set_rates(FAST_S, FAST_S)
    assert rig.manager.lookup(PROMPT[6:], request) == 0
    assert rig.manager.lookup(PROMPT[6:], Request()) is None


def test_a_tier_that_hangs_costs_nothing_of_one_that_does_not() -> None:
    rig, request = Rig(HEAD, (FAST_S, FAST_S)), Request()
    near, far = rig.cascade.up
    assert rig.manager.lookup([key(104)], Request()) is None
    rig.manager.end_step()
    assert rig.manager.lookup(PROMPT, request) is None
    rig.manager.end_step()
    rig.cascade.now_s += 1.5
    first, second = near.queued
    near.step(first)
    rig.manager.end_step()
    rig.cascade.now_s += 0.5
    rig.manager.end_step()
    assert rig.manager.lookup(PROMPT, request) is None and request.pending == set(HEAD)
    near.step(second)
    rig.manager.end_step()
    assert rig.manager.lookup(PROMPT, request) == len(HEAD) and far.queued


@pytest.mark.parametrize(
    ("window_s", "is_read"), [(0.15, True), (0.25, False)], ids=["read", "computed"]
)
def test_a_window_is_compared_with_the_whole_prefix(window_s: float, is_read: bool) -> None:
    """The head is a window here. The four blocks of the other group take 0.4 s to compute."""
    rig, request = Rig(HEAD, (window_s, FAST_S), served_end=END), Request()
    rig.worth.probe_blocks(1, rig.cascade.now_s)
    rig.serve(request)
    assert (1 not in request.too_slow) is is_read


def test_without_its_window_nothing_of_a_prefix_is_read() -> None:
    rig, request = Rig(TAIL, (FAST_S, 0.25), served_end=END), Request()
    rig.worth.probe_blocks(2, rig.cascade.now_s)
    assert rig.serve(request, TAIL + HEAD)[0] == 0
    assert request.too_slow == {1, 2}
    assert not rig.manager.counters.links[0].promoted_blocks
    assert rig.manager.counters.recomputed_blocks[Reason.NOT_WORTH] == len(TAIL)


def test_a_probe_for_which_there_is_no_room_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig([], (FAST_S, SLOW_S))
    with monkeypatch.context() as full:
        full.setattr(PromotionRoom, "left", lambda room, budget: 0)
        assert rig.serve(Request())[0] == 0
    assert rig.manager.counters.promotion_probes == 0
    rig.manager.end_step()
    assert rig.serve(Request())[0] == 0
    assert rig.manager.counters.promotion_probes == 1
