"""A server that is stopped as orchestrators stop it, and many clients at once after its restart."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.engine_rig import Engine, engine_options
from support.server_rig import VOCABULARY, Server, words

from kvcascade.observe.metrics import PREFIX
from kvcascade.tools.dev.server import Completion, ServerProcess, served_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BLOCK_TOKENS, BLOCK_BYTES = 32, 4 * 32 * 2 * 128 * 4
DOCUMENTS, DOCUMENT_BLOCKS, TAIL_TOKENS = 6, 15, 10
REQUESTS, CLIENTS = 18, 8
DEVICE_BLOCKS = 2 * (DOCUMENT_BLOCKS + 3)
DEVICE: dict[str, Any] = {
    "num_gpu_blocks_override": DEVICE_BLOCKS,
    "max_model_len": (DEVICE_BLOCKS - 1) * BLOCK_TOKENS,  # vLLM keeps one block
}
SMALL_CPU_BLOCKS = 2 * DOCUMENT_BLOCKS + 8
WRITTEN_LIMIT_S = 180.0


DOCUMENT_TOKENS = [words(f"document {i}", DOCUMENT_BLOCKS * BLOCK_TOKENS) for i in range(DOCUMENTS)]
STORM = [DOCUMENT_TOKENS[i % DOCUMENTS] + words(f"end {i}", TAIL_TOKENS) for i in range(REQUESTS)]


def cascade(path: Path, cpu_blocks: int) -> dict[str, Any]:
    """The configuration of the docs, but for its sizes, and that no speed decides what is read."""
    return {
        "load_or_recompute": False,
        "tiers": [
            {"type": "cpu", "capacity": cpu_blocks * BLOCK_BYTES},
            {"type": "nvme", "capacity": "256MiB", "path": str(path), "min_free": 0},
        ],
    }


def wait_until_written(running: Server) -> None:
    """Blocks are written some seconds after they were stored: nothing asks for it."""
    end_s = time.monotonic() + WRITTEN_LIMIT_S
    while running.metrics().get((PREFIX + "tier_dirty_ratio", "cpu"), 1.0):
        assert time.monotonic() < end_s, running.log_tail()
        running.complete([3] * 4)


def computed(answers: Sequence[Completion]) -> int:
    return sum(answer.prompt_tokens - answer.cached_tokens for answer in answers)


def check(process: ServerProcess, expected: Sequence[tuple[int, ...]], clients: int) -> None:
    """All answers are right, and nothing is computed but what fills no block."""
    answers = process.complete_all(STORM, 6, clients)
    assert [answer.tokens for answer in answers] == list(expected)
    assert computed(answers) == REQUESTS * TAIL_TOKENS


def test_stop_kill_and_storm(tmp_path: Path) -> None:
    model = served_model(tmp_path / "model", VOCABULARY, seed=9)
    plain = {**engine_options(model, DEVICE_BLOCKS, None), **DEVICE}
    with Engine(tmp_path / "reference.log", plain) as engine:
        expected = [tuple(answer["tokens"]) for answer in engine.generate(STORM, 6)]

    disk = tmp_path / "disk"
    roomy = cascade(disk, cpu_blocks=2 * DOCUMENTS * DOCUMENT_BLOCKS)
    small = cascade(disk, cpu_blocks=SMALL_CPU_BLOCKS)
    with Server(tmp_path / "first.log", model, roomy, **DEVICE) as running:
        running.process.complete_all(DOCUMENT_TOKENS, 1, 1)
        wait_until_written(running)
        running.process.stop()
        assert "--shutdown-timeout" in running.log(), "it says what a stop may lose, and the flag"
    with Server(tmp_path / "second.log", model, small, **DEVICE) as running:
        check(running.process, expected, CLIENTS)
        wait_until_written(running)
        running.process.kill()
    with Server(tmp_path / "third.log", model, small, **DEVICE) as running:
        check(running.process, expected, 1)
