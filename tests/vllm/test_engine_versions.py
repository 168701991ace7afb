"""What must hold on the real engine of every vLLM that is supported; run by `make test-vllm`.

Only what every version has is asked for: tokens, and how many of a prompt were cached. The first
engine is told the spec's module, the second its name alone: the installed plugin makes that enough.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from support.engine_rig import Answers, Engine, engine_options

from kvcascade.tools.dev.model import make_llama
from kvcascade.vllm.generation import sees_blocks_of_other_connectors

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

BLOCK_TOKENS = 32
BLOCK_BYTES = 4 * BLOCK_TOKENS * 2 * 128 * 4
"""Layers, tokens, K and V, KV heads times head size, float32."""
DEVICE_BLOCKS = 80
PROMPT_TOKENS = 700
PROMPTS = 8
DECODE_TOKENS = 60
"""With them the long prompts do not fit the device's cache together."""
CHUNK = 2
"""Blocks in one of ours; the tests of the pinned version have single ones."""


def _prompts(seed: int, count: int, length: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1000) for _ in range(length)] for _ in range(count)]


TEXTS = _prompts(1, PROMPTS, PROMPT_TOKENS)
LONG = _prompts(2, 8, 600)
CACHEABLE = (PROMPT_TOKENS - 1) // (CHUNK * BLOCK_TOKENS) * CHUNK * BLOCK_TOKENS
CACHEABLE_BY_THEIRS = (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
"""vLLM's example connector keeps a prompt whole, up to its last full block."""


def tokens(answers: Answers) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def expected(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[list[int]], list[list[int]]]:
    """What an engine without offloading answers, to the texts and to the long ones."""
    log = tmp_path_factory.mktemp("reference") / "engine.log"
    with Engine(log, engine_options(model, 600, None)) as engine:
        return tokens(engine.generate(TEXTS)), tokens(engine.generate(LONG, DECODE_TOKENS))


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder in shared memory that nobody else uses; nothing may be left in it."""
    with TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)
        assert not list(Path(folder).iterdir())


def one_by_one(engine: Engine, prompts: list[list[int]]) -> Answers:
    return [answer for prompt in prompts for answer in engine.generate([prompt])]


def by_name_alone(options: dict[str, Any]) -> dict[str, Any]:
    """The same engine, not told where the spec is."""
    del options["kv_transfer_config"]["kv_connector_extra_config"]["spec_module_path"]
    return options


def test_reset_restart_and_preemption(
    model: Path,
    expected: tuple[list[list[int]], list[list[int]]],
    shared: Path,
    tmp_path: Path,
) -> None:
    """Prompts come back from memory, from disk, and in a new process; answers never change."""
    extra: dict[str, Any] = {
        "blocks_per_chunk": CHUNK,
        "tiers": [
            {"type": "cpu", "capacity": 96 * BLOCK_BYTES + 4096, "arena_dir": str(shared)},
            {
                "type": "nvme",
                "capacity": 600 * (CHUNK * BLOCK_BYTES + 4096),
                "path": str(tmp_path / "nvme"),
                "min_free": 0,
            },
        ],
    }
    texts, long = expected
    log = tmp_path / "engine.log"
    with Engine(log, engine_options(model, DEVICE_BLOCKS, extra)) as engine:
        assert tokens(engine.generate(TEXTS)) == texts
        assert tokens(one_by_one(engine, TEXTS)) == texts
        engine.reset(connector=False)
        again = one_by_one(engine, TEXTS[::-1])
        assert tokens(again) == texts[::-1]
        assert [answer["cached"] for answer in again] == [CACHEABLE] * PROMPTS
        engine.stop()
    with Engine(log, by_name_alone(engine_options(model, 140, extra))) as engine:
        again = one_by_one(engine, TEXTS)
        assert tokens(again) == texts
        assert [answer["cached"] for answer in again] == [CACHEABLE] * PROMPTS
        assert tokens(engine.generate(LONG, DECODE_TOKENS)) == long
        assert engine.metrics()["vllm:num_preemptions"] > 0
        assert tokens(engine.generate(TEXTS)) == texts
        engine.stop()


@pytest.mark.skipif(not sees_blocks_of_other_connectors(), reason="this vLLM is refused with two")
@pytest.mark.parametrize("ours_is", [0, 1], ids=["first", "second"])
def test_another_connector_beside_ours(
    ours_is: int, model: Path, expected: tuple[list[list[int]], list[list[int]]], tmp_path: Path
) -> None:
    """Both store and load, into device blocks that the other may still be storing."""
    extra = {"blocks_per_chunk": CHUNK, "tiers": [{"type": "cpu", "capacity": 200 * BLOCK_BYTES}]}
    options = engine_options(model, DEVICE_BLOCKS, extra)
    ours, kind = options["kv_transfer_config"], {"kv_role": "kv_both"}
    theirs = {"shared_storage_path": str(tmp_path / "theirs")}
    connectors = [{"kv_connector": "ExampleConnector", "kv_connector_extra_config": theirs, **kind}]
    connectors.insert(ours_is, ours)
    options["kv_transfer_config"] = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": connectors},
        **kind,
    }
    options["max_num_batched_tokens"] = 8192  # theirs fails with prompts in parts, also alone
    cached = CACHEABLE_BY_THEIRS if ours_is else CACHEABLE
    with Engine(tmp_path / "engine.log", options) as engine:
        for texts in (TEXTS, TEXTS[::-1], TEXTS):
            answers = engine.generate(texts)
            assert tokens(answers) == (expected[0] if texts is TEXTS else expected[0][::-1])
        engine.reset(connector=False)
        again = one_by_one(engine, TEXTS)
        assert tokens(again) == expected[0]
        assert [answer["cached"] for answer in again] == [cached] * PROMPTS
        engine.stop()
