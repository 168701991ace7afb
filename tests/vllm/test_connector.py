"""vLLM's scheduler and connector over the cascade: random requests, every byte compared.

Chunked prefill, preemption, aborts, resets, damaged files and overlapped steps (async scheduling),
at the speed of a scheduler without a model.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from support.kv_bytes import Shape, damage, tiers
from support.scheduler_rig import (
    CHUNK_BLOCKS,
    LAYERS,
    PAGE_BYTES,
    Kind,
    SchedulerRig,
    survives_aborts,
)

from kvcascade.tools.model import make_llama

SHAPE = Shape(pages=(PAGE_BYTES,) * len(LAYERS), chunk=CHUNK_BLOCKS)
STEPS = 400
UNFINISHED_MAX = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Only its configuration is read."""
    return make_llama(tmp_path_factory.mktemp("model"), layers=1, hidden=64, heads=2, kv_heads=1)


class Story:
    """Chooses what happens, by seed."""

    def __init__(
        self, seed: int, model: Path, path: Path, is_async: bool, kind: Kind | None = None
    ) -> None:
        self.rng = random.Random(seed)
        self.path = path
        options: dict[str, Any] = {
            "write_mode": self.rng.choice(["demote", "back", "through"]),
            "dirty_age_s": 0.01,
            "offload_prompt_only": self.rng.random() < 0.3,
            "weights_id": "test",
        }
        cpu, nvme = self.rng.choice([8, 20]), self.rng.choice([32, 96])
        self.rig = SchedulerRig(
            model,
            {"tiers": tiers(SHAPE, path, cpu=cpu, nvme=nvme), **options},
            device_blocks=self.rng.choice([40, 64]),
            is_async=is_async,
            kind=kind,
        )
        self.families = [self._tokens(700) for _ in range(5)]
        self.names = (f"request-{number}" for number in range(STEPS))
        self.resets = 0
        self.may_abort = survives_aborts()

    def _tokens(self, n: int) -> list[int]:
        return [self.rng.randrange(256) for _ in range(n)]

    def run(self) -> None:
        """All steps, and the end of every request."""
        for _ in range(STEPS):
            self._act()
            self.rig.step()
        self.rig.drain()

    def _act(self) -> None:
        chance = self.rng.random()
        if chance < 0.25 and len(self.rig.unfinished) < UNFINISHED_MAX:
            shared = self.rng.choice(self.families)[: self.rng.randrange(40, 700)]
            prompt = shared + self._tokens(self.rng.choice([0, 0, 20]))
            self.rig.add(next(self.names), prompt, self.rng.choice([1, 5, 40]))
        elif chance < 0.27 and self.rig.unfinished and self.may_abort:
            self.rig.abort(self.rng.choice(self.rig.unfinished))
        elif chance < 0.28 and (self.may_abort or not self.rig.unfinished):
            self.resets += self.rig.reset()
        elif chance < 0.29:
            damage(self.path, every=4096)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(8))
def test_random_requests(seed: int, is_async: bool, model: Path, tmp_path: Path) -> None:
    story = Story(seed, model, tmp_path, is_async)
    try:
        story.run()
    finally:
        story.rig.close()


KINDS = {"mla": Kind(is_mla=True), "pipeline": Kind(stages=2)}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_kinds_that_no_engine_runs_here(
    seed: int, kind: str, is_async: bool, model: Path, tmp_path: Path
) -> None:
    """On a CPU, vLLM continues no MLA model from cached blocks, and no pipeline without
    compiling."""
    story = Story(100 + seed, model, tmp_path, is_async, KINDS[kind])
    try:
        story.run()
    finally:
        story.rig.close()
