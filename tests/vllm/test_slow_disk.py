"""A disk slower than the model, under the real engine: requests compute instead of waiting.

The record that the engine keeps meanwhile is replayed in the end.
"""

from __future__ import annotations

import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from support.engine_rig import Engine, engine_options
from support.slow_disk import READ_RATE

from kvcascade.tools.dev.model import make_llama
from kvcascade.tools.replay.simulation import replay
from kvcascade.tools.replay.tier_options import ReplayOptions, TierOptions
from kvcascade.tools.replay.traces import read_trace

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

BLOCK_TOKENS = 32
BLOCK_BYTES = 4 * BLOCK_TOKENS * 2 * 128 * 4
"""Layers, tokens, K and V, KV heads times head size, float32."""
PROMPTS = 8
PROMPT_TOKENS = 640
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
BYTES_PER_S = 500_000
"""A prompt takes five seconds to read, and a small part of that to compute."""


def prompts() -> list[list[int]]:
    """Prompts that share nothing."""
    rng = random.Random(5)
    return [[rng.randrange(1000) for _ in range(PROMPT_TOKENS + 8)] for _ in range(PROMPTS)]


def ask(engine: Engine, prompt: list[int]) -> list[int]:
    """Return the engine's answer, once the first tier has room again for a whole prompt."""
    (answer,) = engine.generate([prompt])
    engine.settle()
    tokens: list[int] = answer["tokens"]
    return tokens


def test_nobody_waits_for_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(READ_RATE, str(BYTES_PER_S))
    with TemporaryDirectory(dir="/dev/shm") as shared:
        tiers = [
            {"type": "cpu", "capacity": 40 * BLOCK_BYTES + 4096, "arena_dir": shared},
            {"type": "nvme", "capacity": "200MiB", "path": str(tmp_path / "kv"), "min_free": 0,
             "movers": "threads"},
        ]  # fmt: skip
        slow = {"spec_name": "SlowDiskSpec", "spec_module_path": "support.slow_disk"}
        soon: dict[str, Any] = {"write_mode": "back", "dirty_age_s": 0.1}
        extra = {"tiers": tiers, "record": str(tmp_path / "record"), **soon, **slow}
        options = engine_options(make_llama(tmp_path / "llama"), 80, extra)
        with Engine(tmp_path / "engine.log", options) as engine:
            answers = [ask(engine, prompt) for prompt in prompts()]
            refused = engine.metrics().get("vllm:kvcascade_store_refused_busy", 0)
            again = [ask(engine, prompt) for prompt in prompts()]
            seen = engine.metrics()
            engine.stop()
    assert refused == 0, "every prompt went to the disk"
    assert answers == again
    assert seen["vllm:kvcascade_promotions_not_worth"] >= PROMPTS // 2, "computed, not read"
    loaded = seen.get("vllm:kvcascade_loaded_blocks[nvme]", 0)
    assert loaded <= 2 * PROMPT_BLOCKS, "only until the rate was known"
    trace = read_trace(tmp_path / "record")
    assert [len(request.ids) for request in trace.requests] == [PROMPT_BLOCKS] * 2 * PROMPTS
    roomy = ReplayOptions((TierOptions("cpu", 1 << 30),), kv_bytes_per_token=1)
    assert replay(trace, roomy).hit_tokens == PROMPTS * PROMPT_BLOCKS * BLOCK_TOKENS
