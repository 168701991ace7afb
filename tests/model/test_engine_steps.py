"""Whole steps of an engine over three tiers, after each of which the books are counted anew.

The model plays vLLM's scheduler and its worker: requests of two KV groups that wait, load, compute,
are preempted and aborted; transfers that end late, in any order, and fail; resets, its own and
others'. Other than `test_manager_model.py`, which calls anything at any time, it keeps to the order
of calls in a step, so it can say exactly what must be pinned, dirty, held and announced.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
from support.books import Books
from support.cascade import BLOCK_SIZE, Cascade
from support.inside import first_tier

from kvcascade.config.schema import OnReset, WriteMode
from kvcascade.manager.admission import admit_second_touch
from kvcascade.manager.base import LookupState
from kvcascade.manager.below.chain import PASS_ON_AFTER_S, BelowChain
from kvcascade.manager.below.node_tier import NodeTier
from kvcascade.manager.core import ManagerOptions
from kvcascade.manager.request import Request
from kvcascade.tiers.base import BlockHash, BlockOutcome, LoadStoreSpec, Pairs

SEEDS = 40
STEPS = 120
FULL, WINDOW = b"\0\0\0\0", b"\0\0\0\1"
"""Ends of the hashes of a group with full attention and of one with a window."""
WINDOW_BLOCKS = 2
CAPACITIES = [(12, 20, 60), (16, 16, 200), (24, 12, 40), (10, 40, 30)]
POLICIES = ("lru", "arc", "s3fifo", "sieve", "slru", "lirs", "fifo", "prefix")
DEADLINE_S = 10.0
STEPS_UNTIL_FLUSHED = 3
FAILURES = [outcome for outcome in BlockOutcome if outcome is not BlockOutcome.OK]


@dataclass(eq=False, slots=True)
class Prompt:
    """A request as the engine sees it."""

    document: int
    blocks: int
    computed: int = 0
    is_running: bool = False
    asked_since_s: float | None = None
    request: Request = field(default_factory=Request)

    def keys(self, group: bytes, start: int, stop: int) -> list[BlockHash]:
        """Blocks `start .. stop - 1` of a group, as vLLM's keys."""
        digests = (bytes([self.document, number]) * 16 for number in range(start, stop))
        return [BlockHash(digest + group) for digest in digests]

    def preempt(self) -> None:
        """It begins anew."""
        self.is_running, self.computed, self.asked_since_s = False, 0, None


@dataclass(eq=False, slots=True)
class WorkerJob:
    """What a worker does with slots of the first tier."""

    prompt: Prompt
    hashes: list[BlockHash]
    slots: list[int]
    is_load: bool
    steps_left: int


class Engine:
    """One engine and its worker; what it does is drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        choose = self.random.choice
        self.options = ManagerOptions(
            write_mode=choose(list(WriteMode)),
            on_reset=choose(list(OnReset)),
            dirty_age_s=choose([0.5, 5.0]),
            promotion_deadline_s=DEADLINE_S,
            promotion_budget_slots=choose([None, 3, 6]),
            load_or_recompute=choose([True, False]),
            prefill_tokens_per_s=choose([None, 1e2, 1e5]),
            tokens_per_block=choose([0.0, 16.0]),
            served_end=FULL,
            offered_once=choose([(), (WINDOW,)]),
            steps_until_flushed=STEPS_UNTIL_FLUSHED,
        )
        self.cascade = Cascade(
            choose(CAPACITIES),
            self.options,
            choose(POLICIES),
            admission=choose([None, None, admit_second_touch]),
            bytes_per_day=choose([None, None, 40 * BLOCK_SIZE]),
        )
        self.manager = self.cascade.manager
        self.ends_step_first = choose([True, False])
        """Up to vLLM 0.32 a step ends before its blocks are offered."""
        self.failure_rate = choose([0.0, 0.0, 0.15])
        self.transfer_rate = choose([0.2, 0.6, 1.0])
        self.may_lose = self.failure_rate > 0
        self.epoch = 0
        self.prompts: list[Prompt] = []
        self.jobs: list[WorkerJob] = []
        self.lost: list[WorkerJob] = []
        """From before a reset: they end, and nobody is told."""
        top = first_tier(self.manager)
        top.on_evicted = partial(self.check_evicted, top.on_evicted)

    def content(self, block_hash: BlockHash) -> bytes:
        """The right bytes; after a reset they are others."""
        return (bytes([self.epoch % 251]) + block_hash * 2)[:BLOCK_SIZE]

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    # ---- a step --------------------------------------------------------------------------

    def step(self) -> None:
        self.between_steps()
        self.random.shuffle(self.prompts)
        answered: list[BlockHash] = []
        for prompt in self.prompts:
            if not prompt.is_running and not any(job.prompt is prompt for job in self.jobs):
                self.ask(prompt, answered)
        if self.ends_step_first:
            self.end_step(answered)
        for prompt in self.prompts:
            if prompt.is_running:
                self.compute(prompt)
        if not self.ends_step_first:
            self.end_step(answered)
        self.end_requests()
        self.work()
        self.check()
        self.cascade.now_s += self.random.choice([0.01, 0.01, 0.1, 0.5])

    def end_step(self, answered: list[BlockHash]) -> None:
        for status in map(self.manager.lookups.top_get, answered):
            assert status is not None and status.ref_cnt >= 0, "a hit left within its step"
        self.manager.end_step()

    def between_steps(self) -> None:
        if self.chance(0.5) and len(self.prompts) < 6:
            self.prompts.append(Prompt(self.random.randrange(8), self.random.randint(1, 7)))
        if self.chance(0.02):
            self.reset()
        if self.chance(0.01):
            self.reset_by_another()
        if self.chance(0.01):
            self.cascade.now_s += 2 * DEADLINE_S
            for prompt in self.prompts:
                prompt.asked_since_s = None
        self.disturb(self.transfer_rate)

    def ask(self, prompt: Prompt, answered: list[BlockHash]) -> None:
        """Full attention up to a miss, then the window before it; load what was found."""
        request, waits, found = prompt.request, False, 0
        for block_hash in prompt.keys(FULL, 0, prompt.blocks):
            state = self.manager.lookups.lookup_block(block_hash, request)
            if state is LookupState.MISS:
                break
            waits |= state is not LookupState.HIT
            found += state is not LookupState.RETRY
        window = prompt.keys(WINDOW, max(0, found - WINDOW_BLOCKS), found)
        states = [
            self.manager.lookups.lookup_block(block_hash, request)
            for block_hash in reversed(window)
        ]
        waits |= LookupState.PENDING in states or LookupState.RETRY in states
        self.disturb(self.transfer_rate / 4)
        if waits:
            self.check_wait(prompt)
            return
        prompt.asked_since_s = None
        hits = [*prompt.keys(FULL, 0, found), *window] if LookupState.MISS not in states else []
        answered += hits
        if self.chance(0.15):
            return  # the device has no room: it asks again at the next step
        if hits:
            self.start(prompt, hits, self.manager.prepare_load(hits, request), is_load=True)
        prompt.is_running, prompt.computed = True, found if hits else 0

    def check_wait(self, prompt: Prompt) -> None:
        """No request waits for more than its own deadline and that of what it found last."""
        now_s = self.cascade.now_s
        prompt.asked_since_s = now_s if prompt.asked_since_s is None else prompt.asked_since_s
        assert now_s - prompt.asked_since_s <= 2 * DEADLINE_S + 2.0, "waits for ever"

    def compute(self, prompt: Prompt) -> None:
        if any(job.is_load for job in self.jobs if job.prompt is prompt):
            return
        end = min(prompt.blocks, prompt.computed + self.random.randint(1, 3))
        offered = [h for group in (FULL, WINDOW) for h in prompt.keys(group, prompt.computed, end)]
        output = self.manager.prepare_store(offered, prompt.request)
        if output is not None:
            prompt.computed = end
            if output.block_hashes_to_store:
                self.start(prompt, output.block_hashes_to_store, output.store_spec, is_load=False)

    def start(
        self, prompt: Prompt, hashes: list[BlockHash], spec: LoadStoreSpec, is_load: bool
    ) -> None:
        """A worker begins; nobody but readers may share its slots."""
        slots = spec.slots.tolist()
        for job in self.jobs + self.lost:
            if not (is_load and job.is_load):
                assert not set(job.slots) & set(slots), "another transfer still uses them"
        self.jobs.append(WorkerJob(prompt, hashes, slots, is_load, self.random.randint(1, 4)))

    def end_requests(self) -> None:
        """Some end, some are aborted, some are preempted."""
        for prompt in list(self.prompts):
            is_done = prompt.is_running and prompt.computed >= prompt.blocks
            if is_done or self.chance(0.04):
                self.finish(prompt)
            elif prompt.is_running and self.chance(0.04):
                prompt.preempt()

    def finish(self, prompt: Prompt) -> None:
        self.prompts.remove(prompt)
        self.manager.finish_request(prompt.request)

    # ---- what others do --------------------------------------------------------------------

    def work(self) -> None:
        """The worker goes on; what it writes is whole only when a job ends."""
        for job in [*self.lost, *self.jobs]:
            job.steps_left -= 1
            for block_hash, slot in zip(job.hashes, job.slots, strict=True):
                if not job.is_load:
                    self.cascade.write_top(slot, b"half" * (BLOCK_SIZE // 4))
                elif job in self.jobs:
                    assert self.cascade.read_top(slot) == self.content(block_hash), "wrong bytes"
        self.lost = [job for job in self.lost if job.steps_left > 0]
        for job in [job for job in self.jobs if job.steps_left <= 0]:
            self.jobs.remove(job)
            if job.is_load:
                self.manager.complete_load(set(job.hashes))
                continue
            for block_hash, slot in zip(job.hashes, job.slots, strict=True):
                self.cascade.write_top(slot, self.content(block_hash))
            self.manager.complete_store(set(job.hashes))

    def disturb(self, rate: float) -> None:
        """Transfers between the tiers end, in any order, and the background looks after them."""
        for handler in self.cascade.handlers:
            handler.accepts = not self.chance(self.failure_rate / 3)
            while handler.queued and self.chance(rate):
                outcome = self.random.choice(FAILURES)
                is_bad = self.chance(self.failure_rate)
                handler.fate = partial(fate_of, outcome if is_bad else BlockOutcome.OK)
                handler.step(self.random.choice(handler.queued))
        if self.chance(0.5):
            self.manager.maintain()

    def reset(self) -> None:
        self.cascade.apply_events()
        self.manager.reset_cache()
        if self.options.on_reset is OnReset.INVALIDATE:
            self.cascade.forget_events()
            self.epoch += 1
        for job in self.jobs:
            job.steps_left = self.random.randint(1, STEPS_UNTIL_FLUSHED - 1)
        self.lost += self.jobs
        self.jobs = []
        for prompt in self.prompts:
            prompt.preempt()

    def reset_by_another(self) -> None:
        """Of a lower tier; the engine knows nothing and goes on reporting."""
        index = self.random.choice([1, 2])
        self.cascade.apply_events()
        emptied = [self.cascade.backends[i] for i in (0, index)]
        emptied[1].is_overtaken = True
        self.manager.maintain()
        self.cascade.apply_events(but_for=[backend.medium for backend in emptied])
        self.cascade.now_s += PASS_ON_AFTER_S
        self.manager.maintain()
        self.cascade.apply_events()  # the other tier names its blocks

    # ---- what must hold --------------------------------------------------------------------

    def check(self) -> None:
        quarantined = {status.block_id for status in self.manager._workers.quarantined()}
        assert all(quarantined.issuperset(job.slots) for job in self.lost), "given away too early"
        read = [slot for job in self.jobs if job.is_load for slot in job.slots]
        written = [slot for job in self.jobs if not job.is_load for slot in job.slots]
        requests = [prompt.request for prompt in self.prompts]
        Books(self.cascade, read, written).check(requests, self.content)

    def check_evicted(self, note: Callable[[Pairs], None], evicted: Pairs) -> None:
        """What is dropped without being counted is below. `note`: the manager's own books."""
        top, links = first_tier(self.manager), self.manager.counters.links
        self.may_lose |= any(
            link.demote_refused_blocks or link.demote_over_budget_blocks for link in links
        )
        chain = self.manager._core.below
        assert isinstance(chain, BelowChain)
        tiers = [port for port in chain._ports if isinstance(port, NodeTier)]
        # A tier says one step later what it evicted.
        has_mail = any(tier._client.mail for tier in tiers)  # type: ignore[attr-defined]
        is_behind = has_mail or any(tier.feed.lost for tier in tiers)
        for block_hash, status in evicted:
            assert status.ref_cnt == 0, "in use"
            is_counted = self.manager._core.is_single or top.dirt.dirty[status.block_id]
            if not (self.may_lose or is_behind or is_counted):
                below = self.cascade.policies[1:]
                assert any(policy.get(block_hash) for policy in below), "lost and not counted"
        note(evicted)

    def settle(self) -> None:
        """With nothing under way nothing is pinned, and a shutdown leaves nothing dirty."""
        self.failure_rate = 0.0
        self.disturb(1.0)
        for prompt in list(self.prompts):
            self.finish(prompt)
        for _ in range(8):
            self.work()
            self.cascade.now_s += 3 * DEADLINE_S
            self.cascade.run_transfers()
        promoter, claims = self.manager._promoter, self.manager._claims
        assert not (self.jobs or promoter.pending or self.manager._claims._holds.users)
        assert not (claims._queue or claims.admitted)
        self.check()
        self.manager.shutdown()
        self.check()
        self.cascade.check_settled()


def fate_of(outcome: BlockOutcome, source: int, target: int) -> BlockOutcome:
    """About half of the blocks of a transfer that fails fail."""
    return outcome if (source + target) % 2 else BlockOutcome.OK


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_books_of_three_tiers(seed: int) -> None:
    engine = Engine(seed)
    for _ in range(STEPS):
        engine.step()
    engine.settle()
