"""`"persist": true` in the real engine: killed, and warm again from shared memory alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support.engine_rig import Engine, engine_options
from support.waiting import wait_until

from kvcascade.tools.dev.model import make_llama

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BLOCK_BYTES = 4 * 32 * 2 * 128 * 4
TOKENS = 700
PROMPTS = 3
BLOCKS = PROMPTS * (TOKENS // 32)


@pytest.fixture
def arenas() -> Iterator[Path]:
    """A folder in shared memory."""
    with TemporaryDirectory(dir="/dev/shm", prefix="kvcascade-test-") as folder:
        yield Path(folder)


def has_stored(engine: Engine) -> bool:
    """Whether every block of the prompts is stored; each look is a step of the engine."""
    return engine.metrics()["vllm:kvcascade_stored_blocks"] >= BLOCKS


def test_a_killed_engine_leaves_its_blocks_to_the_next(tmp_path: Path, arenas: Path) -> None:
    model = make_llama(tmp_path / "model", seed=11)
    cpu = {"type": "cpu", "capacity": 100 * BLOCK_BYTES, "persist": True, "arena_dir": str(arenas)}
    rng = random.Random(4)
    prompts = [[rng.randrange(1000) for _ in range(TOKENS)] for _ in range(PROMPTS)]
    with Engine(tmp_path / "first.log", engine_options(model, 80, {"tiers": [cpu]})) as engine:
        first = [engine.generate([prompt])[0] for prompt in prompts]
        wait_until(partial(has_stored, engine))
        engine.kill()
    assert len(list(arenas.iterdir())) == 1
    with Engine(tmp_path / "second.log", engine_options(model, 80, {"tiers": [cpu]})) as engine:
        again = [engine.generate([prompt])[0] for prompt in prompts]
        engine.stop()
    assert [answer["tokens"] for answer in again] == [answer["tokens"] for answer in first]
    assert all(answer["cached"] >= TOKENS - 2 * 32 for answer in again)
    assert len(list(arenas.iterdir())) == 1
