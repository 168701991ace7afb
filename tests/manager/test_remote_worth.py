"""Load or recompute over a remote tier: its latency and its rate, with a virtual clock."""

from __future__ import annotations

import pytest
from support.keys import keys
from support.remote_rig import PAYLOAD_BYTES
from support.remote_tier_rig import RemoteTierRig

from kvcascade.config.schema import WriteMode
from kvcascade.manager.below.port import Put
from kvcascade.manager.cascading import CascadingOffloadingManager
from kvcascade.manager.core import ManagerOptions
from kvcascade.manager.first_tier import Tier
from kvcascade.manager.promotion.worth import PROBE_INTERVAL_MAX_S, PROBE_INTERVAL_S
from kvcascade.manager.request import Request
from kvcascade.tiers.base import BlockHash
from kvcascade.tiers.policies import create

SLOTS, PROMPT_BLOCKS, TOKENS = 128, 8, 16
PREFILL_TOKENS_PER_S = 10_000.0
REAL_BLOCK_BYTES = 512 << 10
"""Blocks of the test are smaller; its links are slower by the same factor."""
STEP_S, MAX_STEPS = 0.01, 1000


class Link:
    """A host whose server is behind a link of a given rate and latency."""

    def __init__(self, mbit_per_s: float, latency_s: float) -> None:
        writer = RemoteTierRig(slots=SLOTS)
        writer.pump()
        writer.tier.put(1, keys(SLOTS), range(SLOTS))
        writer.pump()
        self.clock, self.twin = writer.clock, writer.twin
        self.rig = RemoteTierRig(writer.twin, writer.clock, slots=SLOTS)
        self.rig.pump()
        self.bytes_per_s = mbit_per_s * 1e6 / 8 * PAYLOAD_BYTES / REAL_BLOCK_BYTES
        self.latency_s = latency_s
        options = ManagerOptions(
            write_mode=WriteMode.THROUGH,
            tokens_per_block=TOKENS,
            prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
        )
        top = Tier("cpu", self.rig.arena, create("lru", SLOTS))
        self.manager = CascadingOffloadingManager(
            top, self.rig.tier, options, self.clock, self.clock.advance
        )
        self.twin.before = self._spend

    def _spend(self, method: str) -> None:
        moves = method == "get_into"
        moving_s = self.twin.names_per_call * PAYLOAD_BYTES / self.bytes_per_s if moves else 0.0
        self.clock.advance(self.latency_s + moving_s)

    def serve(self, prompt: list[BlockHash]) -> tuple[int, int]:
        """A request: its hits, and the number of steps that it waited for them."""
        request = Request()
        waited = 0
        while (hits := self.manager.lookup(prompt, request)) is None:
            self.manager.end_step()
            self.rig.pump()
            self.clock.advance(STEP_S)
            waited += 1
            assert waited < MAX_STEPS, "it waits for ever"
        self.manager.finish_request(request)
        for _ in range(2):  # a probe ends
            self.manager.end_step()
            self.rig.pump()
        self.clock.advance(2.0)
        self.rig.pump()  # the node says what it measured
        return hits, waited


def prompt(number: int, blocks: int = PROMPT_BLOCKS) -> list[BlockHash]:
    """A prefix that the server has and no earlier request had."""
    return keys(SLOTS)[number * PROMPT_BLOCKS :][:blocks]


@pytest.mark.parametrize(
    ("mbit_per_s", "latency_s", "blocks", "is_read"),
    [
        (10_000.0, 0.0005, 8, True),
        (10_000.0, 0.0005, 1, True),
        (100.0, 0.0005, 8, False),
        (100.0, 0.0005, 1, False),
        (10_000.0, 0.005, 1, False),
        (10_000.0, 0.005, 8, True),
    ],
)
def test_what_computing_beats_is_computed(
    mbit_per_s: float, latency_s: float, blocks: int, is_read: bool
) -> None:
    link = Link(mbit_per_s, latency_s)
    link.serve(prompt(0))
    hits, waited = link.serve(prompt(1, blocks))
    assert hits == (blocks if is_read else 0)
    if not is_read:
        assert waited == 2, "for the lookup, and for the decision"


def test_nobody_waits_for_an_answer_that_cannot_help() -> None:
    link = Link(100.0, 0.0005)
    for number in range(2):
        link.serve(prompt(number))
    assert link.manager.counters.promotion_probes == 1
    request = Request()
    assert link.manager.lookup(prompt(2), request) is None, "the server is asked"
    link.manager.end_step()
    assert link.manager.lookup(prompt(2), request) == 0
    link.manager.finish_request(request)
    link.manager.end_step()
    link.rig.pump()
    offered = link.rig.tier.put(7, prompt(2), range(PROMPT_BLOCKS))
    assert Put.STARTED not in offered, "the answer says that the blocks are there"
    link.clock.advance(PROBE_INTERVAL_S)
    assert link.serve(prompt(3))[1] == 2, "a probe needs to know where the blocks are"
    assert link.manager.counters.promotion_probes == 2


def test_who_has_left_a_server_out_does_not_ask_it_again() -> None:
    link, request = Link(100.0, 0.0005), Request()
    link.serve(prompt(0))
    while link.manager.lookup(prompt(1), request) is None:
        link.manager.end_step()
        link.rig.pump()
    assert request.too_slow == {1}
    asked = link.twin.calls["exist_many"]
    assert link.manager.lookup(prompt(2), request) == 0
    link.manager.end_step()
    link.rig.pump()
    assert link.twin.calls["exist_many"] == asked


def test_a_link_that_is_slow_for_a_while_is_read_again() -> None:
    link = Link(100.0, 0.0005)
    for number in range(2):
        link.serve(prompt(number))
    assert link.manager.counters.promotions_not_worth == 1
    link.bytes_per_s *= 1000
    found = [link.serve(prompt(2 + number))[0] for number in range(14)]
    assert found[-1] == PROMPT_BLOCKS, "probes have measured it anew"


def test_a_link_that_stays_slow_is_probed_less_often() -> None:
    link = Link(100.0, 0.0005)
    link.serve(prompt(0))
    began_s = link.clock()
    for number in range(1, 10):
        link.serve(prompt(number))
        link.clock.advance(PROBE_INTERVAL_S)
    assert link.clock() - began_s > 12 * PROBE_INTERVAL_S
    assert link.manager.counters.promotion_probes == 4, "5, 10 and 20 s after the one before"
    link.bytes_per_s *= 1000
    link.clock.advance(PROBE_INTERVAL_MAX_S)
    for number in range(10, 12):
        link.serve(prompt(number))
        link.clock.advance(PROBE_INTERVAL_S)
    assert link.manager.counters.promotion_probes == 6, "again 5 s after one that was faster"
