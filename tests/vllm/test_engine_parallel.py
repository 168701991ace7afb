"""Several workers on the real engine: one arena and one demotion per block for all of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from support.engine_rig import AT_ANY_SPEED, Answers, Engine, engine_options, has_device_each
from support.waiting import wait_until

from kvcascade.tools.dev.model import make_llama

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BLOCK_TOKENS = 32
BLOCK_BYTES = 4 * BLOCK_TOKENS * 2 * 128 * 4
"""Of all workers together: layers, tokens, K and V, KV heads times head size, float32."""
PROMPT_TOKENS = 330
PROMPTS = 6
WORKERS = 2
BLOCKS = PROMPTS * (PROMPT_TOKENS // BLOCK_TOKENS)
CACHEABLE = (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS


KINDS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": WORKERS},
    # On a CPU, the second stage has no buffers unless the model was warmed up for compiling.
    "pipeline": {
        "pipeline_parallel_size": WORKERS,
        "enforce_eager": False,
        "compilation_config": {"mode": 1, "backend": "eager"},
        "max_num_batched_tokens": 512,
    },
}


def _texts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(1000) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]


TEXTS = _texts()


def tokens(answers: Answers) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


def cached(answers: Answers) -> list[int]:
    return [answer["cached"] for answer in answers]


def arenas(engine: Engine) -> dict[int, set[int]]:
    """Per arena file that is mapped: the processes that map it."""
    found: dict[int, set[int]] = {}
    for process in [engine.process, *engine.process.children(recursive=True)]:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                if "/kvcascade-" in line:
                    found.setdefault(int(line.split()[4]), set()).add(process.pid)
    return found


def is_shared_by(engine: Engine, processes: int) -> bool:
    """Whether so many processes map one arena, and nobody another one."""
    return [len(mapped_by) for mapped_by in arenas(engine).values()] == [processes]


@pytest.fixture(autouse=True)
def a_device_for_each_worker() -> None:
    if not has_device_each(WORKERS):
        pytest.skip(f"needs {WORKERS} NVIDIA GPUs: the engine has one worker on each")


@pytest.fixture(autouse=True)
def threads_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers shall not be bound to cores that the machine does not have."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")


@pytest.fixture
def options(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The engine's arguments, but for the parallelism."""
    model = make_llama(tmp_path / "llama")
    with TemporaryDirectory(dir="/dev/shm") as shared:
        cpu = {"type": "cpu", "capacity": 80 * BLOCK_BYTES + 4096, "arena_dir": shared}
        nvme = {
            "type": "nvme",
            "capacity": 200 * (BLOCK_BYTES + 4096),
            "path": str(tmp_path / "nvme"),
            "min_free": 0,
        }
        extra = {**AT_ANY_SPEED, "tiers": [cpu, nvme], "offload_prompt_only": True}
        yield engine_options(model, 100, extra)
        assert not list(Path(shared).iterdir())


@pytest.mark.parametrize("kind", ["tensor", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_two_workers(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Blocks of both workers travel together, survive a restart, and are of no use to one alone."""
    log = tmp_path / "engine.log"
    both = options | KINDS[kind]
    with Engine(log, both) as engine:
        wait_until(partial(is_shared_by, engine, 4))  # two workers, the scheduler and its node
        computed = engine.generate(TEXTS)
        assert cached(computed) == [0] * PROMPTS
        expected = tokens(computed)
        assert len({tuple(answer) for answer in expected}) == PROMPTS
        engine.reset(connector=False)
        again = engine.generate(TEXTS)
        assert tokens(again) == expected
        assert cached(again) == [CACHEABLE] * PROMPTS
        seen = engine.metrics()
        assert seen["vllm:kvcascade_stored_blocks"] == BLOCKS, "one per block, not per worker"
        engine.stop()
    with Engine(log, both) as engine:
        found = engine.metrics()["vllm:kvcascade_tier_blocks[nvme]"]
        assert found == BLOCKS, "one demotion per block, for both workers"
        again = engine.generate(TEXTS)
        assert tokens(again) == expected
        assert cached(again) == [CACHEABLE] * PROMPTS
        seen = engine.metrics()
        assert seen["vllm:kvcascade_promoted_blocks[nvme]"] == PROMPTS * CACHEABLE // BLOCK_TOKENS
        engine.stop()
    with Engine(log, options) as engine:
        alone = engine.generate(TEXTS)
        assert cached(alone) == [0] * PROMPTS
        engine.stop()
