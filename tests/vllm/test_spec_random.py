"""Random engines without a model: whatever happens to tiers and requests, no wrong byte is loaded.

Requests overlap as they do in vLLM: some wait for promotions, some load, some are computed and
store, while blocks are evicted, files are damaged, caches reset and engines restarted. Driver and
manager are checked at every step; the seed is in the test's name.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.inside import first_tier
from support.kv_bytes import Shape, damage, tiers
from support.spec_driver import Driver
from support.spec_parts import Job, Request
from vllm.v1.kv_offload.base import LookupResult, Medium, TierFilter, TierMatcher

STEPS = 250
WAITING_MAX = 4
SHAPES = (
    Shape(),
    Shape(pages=(512, 512), groups=((0, 1),), chunk=2, world=2),
    Shape(pages=(256, 256, 512), groups=((0, 1), (2,)), chunk=4),
)
FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"load_tier_filter": TierFilter((TierMatcher(Medium.STORAGE),))},
    {"load_tier_filter": TierFilter((TierMatcher(Medium.CPU),))},
)


@dataclass
class Live:
    """A request and how far it is."""

    request: Request
    chunks: int
    is_waiting: bool = True
    load: Job | None = None
    stored: int = 0
    """Chunks that need not be offered any more."""


class Engine:
    """Chooses what happens next."""

    def __init__(self, seed: int, path: Path) -> None:
        self.rng = random.Random(seed)
        self.path = path
        self.shape = self.rng.choice(SHAPES)
        self.is_late = self.rng.random() < 0.5
        self.options: dict[str, Any] = {
            "write_mode": self.rng.choice(["demote", "back", "through"]),
            "dirty_age_s": 0.01,
            "on_reset": self.rng.choice(["invalidate", "invalidate", "keep"]),
            "promotion_deadline_s": self.rng.choice([0.02, 10.0]),
        }
        self.tier_options = tiers(
            self.shape,
            path,
            cpu=self.rng.choice([6, 12, 24]),
            nvme=self.rng.choice([32, 96]),
            policy=self.rng.choice(["lru", "arc"]),
            admission=self.rng.choice(["all", "second_touch"]),
        )
        self.live: list[Live] = []
        self.driver = self._open()

    def _open(self) -> Driver:
        return Driver(self.shape, self.tier_options, self.is_late, **self.options)

    def run(self) -> None:
        """All steps, then a clean end."""
        for _ in range(STEPS):
            self.step()
        self._finish_all()
        self.driver.close()

    def step(self) -> None:
        """One step of the engine, in vLLM's order."""
        rng = self.rng
        if len(self.live) < WAITING_MAX and rng.random() < 0.5:
            chunks = rng.randint(1, 7)
            text = f"text {rng.randrange(8)}"
            request = self.driver.request(text, chunks, **rng.choice(FILTERS))
            self.live.append(Live(request, chunks))
        for each in [live for live in self.live if live.is_waiting]:
            self._schedule(each)
        if rng.random() < 0.5:
            self.driver.wait_for_transfers()
        for each in self.live:
            if not each.is_waiting and each.load is None and rng.random() < 0.7:
                self._offer(each)
        self.driver.step()
        for each in self.live:
            if each.load is not None and each.load.job_id not in self.driver.jobs:
                each.load = None
        self._end_some()
        self._strike()

    def _schedule(self, live: Live) -> None:
        hits = self.driver.look_up(live.request)
        if hits is None:
            return
        live.is_waiting = False
        if hits and self.rng.random() < 0.9:
            live.load = self.driver.begin_load(live.request, hits)
            live.stored = hits

    def _offer(self, live: Live) -> None:
        if live.stored < live.chunks:
            end = self.rng.randint(live.stored + 1, live.chunks)
            if self.driver.offer(live.request, live.stored, end) is not None:
                live.stored = end

    def _end_some(self) -> None:
        if self.rng.random() < 0.3:
            waited = self.rng.sample(sorted(self.driver.jobs), min(2, len(self.driver.jobs)))
            self.driver.flush |= set(waited)  # preempted, or blocks reused
        for each in list(self.live):
            is_done = each.load is None and each.stored == each.chunks and not each.is_waiting
            if is_done or self.rng.random() < 0.02:  # finished, or aborted at any moment
                self.live.remove(each)
                self.driver.finish(each.request)

    def _strike(self) -> None:
        chance = self.rng.random()
        if chance < 0.02:
            damage(self.path, every=4096)
        elif chance < 0.03:
            self._reset()
        elif chance < 0.04:
            self._finish_all()
            self.driver.close()
            self.driver = self._open()

    def _reset(self) -> None:
        self.driver.reset()
        asking = self.driver.request("asking", 0)
        for each in self.live:
            each.load, each.stored = None, 0
            if self.options["on_reset"] == "invalidate":
                for key in each.request.span(0, each.chunks):
                    result = self.driver.manager.lookup(key, asking.context)
                    assert result is LookupResult.MISS, "nothing outlives a reset"
        self.driver.finish(asking)

    def _finish_all(self) -> None:
        for each in self.live:
            self.driver.finish(each.request)
        self.live.clear()
        self.driver.settle()
        top = first_tier(self.driver.cascade.manager)
        used = top.capacity - top.backend.get_num_free_blocks()
        assert len(top.policy) <= used


@pytest.mark.parametrize("seed", range(20))
def test_random_engine(seed: int, tmp_path: Path) -> None:
    Engine(seed, tmp_path).run()
