"""How long a request waits for a tier that makes no progress, when computing would be faster."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.cascade import Cascade, key

from kvcascade.manager.core import MAX_JOBS_IN_FLIGHT, ManagerOptions
from kvcascade.manager.counters import Reason
from kvcascade.manager.promotion import load_choice
from kvcascade.manager.request import Request
from kvcascade.tiers.base import BlockHash

DEADLINE_S = 10.0
TOKENS = 100
PROMPT = [key(i) for i in range(8)]
"""Its blocks take 0.8 s to compute at 1,000 tokens/s. Twice of that is the limit."""


class Rig:
    """The prompt lies below, and its read makes no progress until `arrive`."""

    def __init__(self, prefill_tokens_per_s: float | None = 1000.0, **given: object) -> None:
        options = ManagerOptions(
            tokens_per_block=TOKENS,
            prefill_tokens_per_s=prefill_tokens_per_s,
            promotion_deadline_s=DEADLINE_S,
            **given,  # type: ignore[arg-type]
        )
        self.cascade = Cascade((32, 128), options)
        self.manager = self.cascade.manager
        self.cascade.below_only(PROMPT)
        self.cascade.below_only([key(100 + i) for i in range(8)])
        self.began_s = self.cascade.now_s

    def ask(
        self, request: Request, blocks: int = len(PROMPT), of: Sequence[BlockHash] = PROMPT
    ) -> int | None:
        """As a scheduler does in a step."""
        hits = self.manager.lookup(of[:blocks], request)
        self.manager.end_step()
        return hits

    def waits_until(self, request: Request, blocks: int = len(PROMPT)) -> float:
        """Return the seconds until the request is served, in steps of 0.1 s."""
        for _ in range(200):
            if self.ask(request, blocks) is not None:
                return self.cascade.now_s - self.began_s
            self.cascade.now_s += 0.1
        raise AssertionError("it waits for ever")

    def arrive(self) -> None:
        self.cascade.run_transfers()


@pytest.mark.parametrize(
    ("prefill_tokens_per_s", "limit_s"),
    [(1000.0, 1.6), (10_000.0, 1.0), (100.0, DEADLINE_S), (None, DEADLINE_S)],
    ids=["twice the computing", "not at once", "the deadline", "nothing is known"],
)
def test_a_request_waits_no_longer_than_computing_is_worth(
    prefill_tokens_per_s: float | None, limit_s: float
) -> None:
    rig, request = Rig(prefill_tokens_per_s), Request()
    assert rig.waits_until(request) == pytest.approx(limit_s, abs=0.25)
    assert rig.ask(request) == 0
    assert rig.manager.counters.recomputed_blocks[Reason.DEADLINE] == len(PROMPT)
    worth = rig.manager._claims.choice.worth
    assert worth is not None
    if limit_s < DEADLINE_S:
        assert worth.backlog.tokens == TOKENS * len(PROMPT), "others know that it computes"


def test_without_the_comparison_the_deadline_holds() -> None:
    rig = Rig(load_or_recompute=False)
    assert rig.waits_until(Request()) == pytest.approx(DEADLINE_S, abs=0.25)


def test_the_blocks_of_who_has_left_are_hits_once_they_arrive() -> None:
    rig, request = Rig(), Request()
    rig.waits_until(request)
    rig.manager.finish_request(request)
    rig.arrive()
    assert rig.manager.lookup(PROMPT, Request()) == len(PROMPT)
    rig.manager.end_step()
    assert not rig.manager.has_pending_work()
    rig.cascade.check_slots()


def test_who_would_compute_longer_waits_longer() -> None:
    rig, short, long = Rig(), Request(), Request()
    assert rig.ask(long) is rig.ask(short, 2) is None
    assert rig.waits_until(short, 2) == pytest.approx(1.0, abs=0.25)
    assert rig.ask(long) is None
    assert 1.5 < rig.waits_until(long) < 3.0, "what the short one computes is ahead of it"


def test_who_shares_blocks_waits_as_long() -> None:
    rig = Rig(100.0)
    requests = [Request() for _ in range(4)]
    for _ in range(15):
        assert [rig.manager.lookup(PROMPT, request) for request in requests] == [None] * 4
        rig.manager.end_step()
        rig.cascade.now_s += 0.1
    rig.arrive()
    assert [rig.manager.lookup(PROMPT, request) for request in requests] == [len(PROMPT)] * 4


def test_blocks_behind_the_jobs_that_hang_are_given_up_as_well() -> None:
    rig, first, second = Rig(), Request(), Request()
    rig.manager._promoter._batch = len(PROMPT) // MAX_JOBS_IN_FLIGHT
    others = [key(100 + i) for i in range(8)]
    assert rig.ask(first) is None
    assert rig.manager.lookup(others, second) is None
    rig.manager.end_step()
    queue = rig.manager._promoter.queues[0]
    assert len(queue.jobs) == MAX_JOBS_IN_FLIGHT and queue.queued == others
    assert rig.waits_until(first) == pytest.approx(1.6, abs=0.25)
    for _ in range(20):
        rig.cascade.now_s += 0.1
        rig.manager.end_step()
    assert rig.manager.lookup(others, second) == 0


def test_a_block_that_leaves_while_its_read_is_queued_is_a_miss() -> None:
    rig, first, second = Rig(), Request(), Request()
    rig.manager._promoter._batch = len(PROMPT) // MAX_JOBS_IN_FLIGHT
    others, cascade = [key(100 + i) for i in range(8)], rig.cascade
    assert rig.ask(first) is None
    assert rig.ask(second, of=others) is None
    assert rig.manager._promoter.queues[0].queued == others
    status = cascade.policies[1].remove(others[3])
    assert status is not None
    cascade.backends[1].free(status)
    del cascade.nodes[0].presence.slots[others[3]]
    while rig.manager.has_pending_work():
        rig.arrive()
    assert rig.ask(first) == len(PROMPT) and rig.ask(second, of=others) == 3
    assert rig.manager.counters.links[0].promote_gone_blocks == 1
    for request in (first, second):
        rig.manager.finish_request(request)
    assert cascade.backends[0].get_num_free_blocks() == 32 - 8 - 7


def test_many_that_leave_at_once_leave_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_choice, "MAX_LEFT_PER_STEP", 1)
    rig = Rig()
    requests = [Request() for _ in range(3)]
    for request in requests:
        rig.manager.lookup(PROMPT[:2], request)
    rig.manager.end_step()
    rig.cascade.now_s += 1.1
    waiting = []
    for _ in range(3):
        rig.manager.end_step()
        waiting.append(sum(bool(request.pending) for request in requests))
        rig.cascade.now_s += 0.5
    assert waiting == [2, 1, 0]


def test_a_window_is_waited_for_as_long_as_all_that_needs_it() -> None:
    served = [BlockHash(k[:-1] + b"\1") for k in PROMPT]
    rig, request = Rig(served_end=b"\1"), Request()
    rig.cascade.store(served)
    prompt = served + PROMPT[:2]
    for _ in range(14):
        assert rig.manager.lookup(prompt, request) is None
        rig.manager.end_step()
        rig.cascade.now_s += 0.1
    rig.cascade.now_s += 0.4
    rig.manager.end_step()
    assert rig.manager.lookup(prompt, request) == len(served)


def test_progress_of_the_tier_is_waited_for() -> None:
    rig, request = Rig(), Request()
    for others in range(100, 103):
        assert rig.manager.lookup([key(others)], Request()) is None
        rig.manager.end_step()
    assert rig.ask(request) is None
    up = rig.cascade.up[0]
    *earlier, _ = up.queued
    assert len(earlier) == 3
    for job in earlier:
        rig.cascade.now_s += 1.5
        up.step(job)
        assert rig.ask(request) is None
    rig.cascade.now_s += 1.5
    rig.arrive()
    assert rig.ask(request) == len(PROMPT)
