"""Kinds of models and KV caches on the real engine: what comes back gives the same tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from support.engine_rig import AT_ANY_SPEED, Answers, Engine, EngineFailed, engine_options
from support.small_models import MAKERS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT_TOKENS = 700
PROMPTS = 4


@dataclass(frozen=True)
class Kind:
    """One kind of model, or of its cache."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    """More arguments of the engine."""
    chunk: int = 1
    least_cached: int = PROMPT_TOKENS - 64
    """Tokens of a prompt that must come back."""


SLOW = pytest.mark.slow
KINDS = {
    "sliding_window": Kind("sliding"),
    "chunks_of_4": Kind("llama", chunk=4, least_cached=PROMPT_TOKENS - 128),
    "fp8": Kind("llama", {"kv_cache_dtype": "fp8"}),
    "state_space": Kind("state_space", least_cached=1),
}
IN_EVERY_RUN = ("sliding_window",)


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(1000) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]


def tokens(answers: Answers) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder in shared memory that nobody else uses; nothing may be left in it."""
    with TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)
        assert not list(Path(folder).iterdir())


@pytest.mark.parametrize(
    "name", [pytest.param(k, marks=[] if k in IN_EVERY_RUN else SLOW) for k in KINDS]
)
def test_blocks_come_back(name: str, shared: Path, tmp_path: Path) -> None:
    """Computed once; then from memory; then from disk, in another process."""
    kind = KINDS[name]
    model = MAKERS[kind.model](tmp_path / "model")
    extra: dict[str, Any] = {
        **AT_ANY_SPEED,
        "blocks_per_chunk": kind.chunk,
        "tiers": [
            {"type": "cpu", "capacity": "192MiB", "arena_dir": str(shared)},
            {
                "type": "nvme",
                "capacity": "512MiB",
                "path": str(tmp_path / "nvme"),
                "min_free": 0,
                "segment_size": "16MiB",
            },
        ],
    }
    options = engine_options(model, 220, extra) | kind.options
    log = tmp_path / "engine.log"
    texts = prompts()
    with Engine(log, options) as engine:
        computed = engine.generate(texts)
        assert [answer["cached"] for answer in computed] == [0] * PROMPTS
        expected = tokens(computed)
        assert len({tuple(answer) for answer in expected}) == PROMPTS
        engine.reset(connector=False)
        check(engine.generate(texts), expected, kind)
        engine.stop()
    with Engine(log, options) as engine:
        check(engine.generate(texts), expected, kind)
        engine.stop()


@SLOW
def test_a_model_that_cannot_be_continued_is_refused(shared: Path, tmp_path: Path) -> None:
    """With MLA, on a CPU without AMX, tokens would be wrong (calls: `test_connector.py`)."""
    if torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM can on this CPU")
    model = MAKERS["mla"](tmp_path / "model")
    extra = {"tiers": [{"type": "cpu", "capacity": "64MiB", "arena_dir": str(shared)}]}
    with pytest.raises(EngineFailed, match="kv_transfer_config: vLLM cannot continue a model"):
        Engine(tmp_path / "engine.log", engine_options(model, 220, extra))


@SLOW
@pytest.mark.parametrize("kind", ["sliding", "state_space"])
def test_chunks_with_gaps_are_refused(kind: str, shared: Path, tmp_path: Path) -> None:
    """Tokens would be wrong (bytes: `test_connector.py`)."""
    model = MAKERS[kind](tmp_path / "model")
    tiers = [{"type": "cpu", "capacity": "64MiB", "arena_dir": str(shared)}]
    extra = {"tiers": tiers, "blocks_per_chunk": 2}
    with pytest.raises(EngineFailed, match="blocks_per_chunk: 2 does not work with this model"):
        Engine(tmp_path / "engine.log", engine_options(model, 220, extra))


def check(answers: Answers, expected: list[list[int]], kind: Kind) -> None:
    assert tokens(answers) == expected
    assert min(answer["cached"] for answer in answers) >= kind.least_cached, answers
