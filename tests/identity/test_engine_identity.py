"""The real engine over one path: whatever shapes the bytes of a block is changed, one at a time.

Nothing of another identity is hit, tokens are those of an engine that computed everything, and with
the first configuration again the old blocks are hit again. What the CPU platform cannot change is
shown on the fingerprint: quantisation, KV layout and LoRA in `test_fingerprint.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from support.engine_rig import Engine, engine_options

from kvcascade.tools.model import make_llama

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

DEVICE_BLOCKS = 64
PROMPT_TOKENS = 300
MIB = 1 << 20


def prompts() -> list[list[int]]:
    """The same at every start."""
    rng = random.Random(7)
    return [[rng.randrange(1000) for _ in range(PROMPT_TOKENS)] for _ in range(3)]


class Place:
    """A path that all engines share, and two models that differ in their weights only."""

    def __init__(self, folder: Path, shared: Path) -> None:
        self._folder = folder
        self._shared = shared
        self.model = make_llama(folder / "llama", seed=0)
        self.other_weights = make_llama(folder / "other", seed=1)

    def start(self, model: Path | None = None, label: str = "", **options: Any) -> Engine:
        """An engine; `options` are vLLM's."""
        tiers = [
            {"type": "cpu", "capacity": 64 * MIB, "arena_dir": str(self._shared)},
            {"type": "nvme", "capacity": 1024 * MIB, "path": str(self._folder / "kv")},
        ]
        extra = {"tiers": tiers, **({"label": label} if label else {})}
        defaults = engine_options(model or self.model, DEVICE_BLOCKS, extra)
        defaults["max_model_len"] = 2 * PROMPT_TOKENS  # fits the device at every block size
        return Engine(self._folder / "engine.log", {**defaults, **options})

    @property
    def namespaces(self) -> int:
        """How many there are on disk."""
        return len(list((self._folder / "kv").glob("*/namespace.json")))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with TemporaryDirectory(dir="/dev/shm") as shared:
        yield Place(tmp_path, Path(shared))


def cold_then_warm(engine: Engine, salt: str | None = None) -> list[list[int]]:
    """Nothing is hit at first; then everything is, and the tokens stay the same. The tokens."""
    cold = engine.generate(prompts(), salt=salt)
    assert [answer["cached"] for answer in cold] == [0] * len(cold), "something stale was hit"
    engine.reset(connector=False)
    warm = engine.generate(prompts(), salt=salt)
    assert all(answer["cached"] > 0 for answer in warm)
    assert [a["tokens"] for a in warm] == [a["tokens"] for a in cold]
    return [answer["tokens"] for answer in cold]


def all_hit(engine: Engine, expected: Sequence[Sequence[int]], block_tokens: int = 32) -> None:
    """What the first engine stored is there, every block of it."""
    answers = engine.generate(prompts())
    cached = (PROMPT_TOKENS - 1) // block_tokens * block_tokens
    assert [answer["cached"] for answer in answers] == [cached] * len(answers)
    assert [answer["tokens"] for answer in answers] == list(expected)


def test_another_identity_hits_nothing_and_the_old_one_everything(place: Place) -> None:
    with place.start() as engine:
        expected = cold_then_warm(engine)
        assert cold_then_warm(engine, salt="tenant a") == expected
        assert cold_then_warm(engine, salt="tenant b") == expected, "tenants share nothing"
        engine.stop()
    with place.start(place.other_weights) as engine:
        assert cold_then_warm(engine) != expected
        engine.stop()
    with place.start(block_size=64) as engine:
        assert cold_then_warm(engine) == expected
        engine.stop()
    with place.start() as engine:
        all_hit(engine, expected)
        engine.stop()
    assert place.namespaces == 3


@pytest.mark.soak
def test_the_whole_matrix(place: Place) -> None:
    with place.start() as engine:
        expected = cold_then_warm(engine)
        engine.stop()
    changes: dict[str, dict[str, Any]] = {
        "weights": {"model": place.other_weights},
        "block size": {"block_size": 64},
        "label": {"label": "somebody else"},
        "type of the model": {"dtype": "bfloat16"},
        "positions": {"hf_overrides": {"rope_theta": 20_000.0}},
        "hash": {"prefix_caching_hash_algo": "sha256_cbor"},
    }
    for name, change in changes.items():
        print("changed:", name)
        with place.start(**change) as engine:
            cold_then_warm(engine)
            engine.stop()
        with place.start() as engine:
            all_hit(engine, expected)
            engine.stop()
    assert place.namespaces == 1 + len(changes)


@pytest.mark.soak
def test_made_up_weights_are_never_shared(place: Place) -> None:
    """`load_format="dummy"`: weights that no file names, so no other process can have them."""
    for _ in range(2):
        with place.start(load_format="dummy") as engine:
            cold_then_warm(engine)
            engine.stop()
