"""Our NVMe tier and our policies under vLLM's own manager, in the real engine."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from support.engine_rig import Answers, Engine, engine_options

from kvcascade.tools.dev.model import make_llama
from kvcascade.tools.dev.server import is_on_cpu, tiering_options

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BLOCK_BYTES = 4 * 32 * 2 * 128 * 4
CPU_BLOCKS = 70
NVME_BLOCKS = 260
PROMPTS = 10
TOKENS = 900


def options(model: Path, disk: Path) -> dict[str, Any]:
    """`TieringOffloadingSpec` with our tier below and our policy above."""
    extra = {
        **tiering_options(is_on_cpu(), CPU_BLOCKS * BLOCK_BYTES, disk),
        "eviction_policy": "S3FifoPolicy",
        "cache_policy_module_path": "kvcascade.vllm_policies",
        "secondary_tiers": [
            {
                "type": "KVCascadeTier",
                "module_path": "kvcascade.vllm_tier",
                "path": str(disk),
                "capacity": NVME_BLOCKS * BLOCK_BYTES,
                "policy": "prefix",
                "min_free": 0,
            }
        ],
    }
    return engine_options(model, 80, extra)


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    shared = [rng.randrange(1000) for _ in range(200)]
    return [shared + [rng.randrange(1000) for _ in range(TOKENS - 200)] for _ in range(PROMPTS)]


def one_by_one(engine: Engine) -> Answers:
    return [answer for prompt in prompts() for answer in engine.generate([prompt])]


def tokens(answers: Answers) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


def cached(answers: Answers) -> int:
    return sum(answer["cached"] for answer in answers)


def test_our_tier_under_their_manager(tmp_path: Path) -> None:
    model = make_llama(tmp_path / "model", seed=9)
    with Engine(tmp_path / "plain.log", engine_options(model, 80, None)) as plain:
        reference = tokens(one_by_one(plain))
        plain.stop()
    disk = tmp_path / "disk"
    with Engine(tmp_path / "first.log", options(model, disk)) as engine:
        assert tokens(one_by_one(engine)) == reference
        engine.reset(connector=False)
        again = one_by_one(engine)
        assert tokens(again) == reference
        engine.stop()
    used = sum(file.stat().st_blocks * 512 for file in disk.rglob("*") if file.is_file())
    assert used <= NVME_BLOCKS * BLOCK_BYTES, "the tier is bounded"
    with Engine(tmp_path / "second.log", options(model, disk)) as engine:
        restarted = one_by_one(engine)
        assert tokens(restarted) == reference
        assert cached(restarted) > TOKENS * PROMPTS // 4, "blocks survive a restart"
        engine.stop()
