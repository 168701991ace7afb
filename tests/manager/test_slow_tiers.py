"""Load or recompute with several tiers below: a slow one costs no block of a fast one."""

from __future__ import annotations

import pytest
from support.cascade import BLOCK_SIZE, Cascade, key

from kvcascade.manager.cascading import ManagerOptions
from kvcascade.manager.counters import Reason
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
        self.cascade = cascade = Cascade((64, 8, 64), options)
        self.manager = cascade.manager
        cascade.below_only([h for h in PROMPT if h not in near])
        for start in (100, 104):
            cascade.below_only([key(start + i) for i in range(4)])
        if near:
            cascade.below_only(near)
        cascade.run_transfers()
        assert [cascade.holds(1, h) for h in PROMPT] == [h in near for h in PROMPT]
        assert all(cascade.holds(2, h) for h in PROMPT)
        worth = self.manager._claims.choice.worth
        assert worth is not None
        self.worth = worth
        for link, seconds in zip(worth.links, block_s, strict=True):
            link.started(64 * BLOCK_SIZE, 0.0)
            link.ended(64 * BLOCK_SIZE, 64 * BLOCK_SIZE, 64 * seconds)

    def serve(self, request: Request) -> tuple[int, int]:
        """Return the hits of the prompt, and the steps that it waited for them."""
        for waited in range(8):
            hits = self.manager.lookup(PROMPT, request)
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


def test_a_fast_tail_behind_a_slow_head_is_computed_and_counted() -> None:
    rig, request = Rig(HEAD, (SLOW_S, FAST_S)), Request()
    rig.worth.probe_blocks(1, rig.cascade.now_s)
    assert rig.serve(request)[0] == 0
    assert not rig.manager.counters.links[1].promoted_blocks


def test_a_tail_is_compared_with_its_own_computing() -> None:
    """A second to read the tail, 0.4 s to compute it, 0.8 s for the prompt: the limit is twice."""
    rig, request = Rig(HEAD, (FAST_S, 1.0 / len(TAIL))), Request()
    rig.worth.probe_blocks(2, rig.cascade.now_s)
    assert rig.serve(request)[0] == len(HEAD)


def test_a_head_is_compared_with_all_that_is_useless_without_it() -> None:
    """A second to read the head, 0.8 s to compute the prompt: the limit is twice."""
    rig, request = Rig(HEAD, (1.0 / len(HEAD), FAST_S)), Request()
    assert rig.serve(request)[0] == len(PROMPT)


def test_both_slow_tiers_are_left_at_once() -> None:
    rig, request = Rig(HEAD, (SLOW_S, SLOW_S)), Request()
    rig.worth.probe_blocks(2, rig.cascade.now_s)
    assert rig.serve(request) == (0, 0)
    assert request.too_slow == {1}


@pytest.mark.parametrize(
    ("window_s", "is_read"), [(0.15, True), (0.25, False)], ids=["read", "computed"]
)
def test_a_window_is_compared_with_the_whole_prefix(window_s: float, is_read: bool) -> None:
    """The head is a window here. The four blocks of the other group take 0.4 s to compute."""
    rig, request = Rig(HEAD, (window_s, FAST_S), served_end=END), Request()
    rig.worth.probe_blocks(1, rig.cascade.now_s)
    rig.serve(request)
    assert (1 not in request.too_slow) is is_read
