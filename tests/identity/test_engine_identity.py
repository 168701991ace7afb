"""The real engine over one path: whatever shapes the bytes of a block is changed, one at a time.

Nothing of another identity is hit, tokens are those of an engine that computed everything, and with
the first configuration again the old blocks are hit again. The CPU platform knows one KV layout
only and refuses any other: what another one means is shown in `test_fingerprint.py`.

`KVCASCADE_CHANGES=ranks,quantisation` limits the long test to these changes.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from support.engine_rig import (
    AT_ANY_SPEED,
    Answers,
    Engine,
    EngineFailed,
    engine_options,
    has_device_each,
)
from support.small_models import ADAPTER_RANK, make_adapter, make_int8_llama

from kvcascade.tools.dev.model import make_llama
from kvcascade.tools.dev.server import is_on_cpu

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

DEVICE_BLOCKS = 64
PROMPT_TOKENS = 300
MIB = 1 << 20
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": ADAPTER_RANK}
NAMESPACES_KEPT = 3
"""So many fit beside another one; which of them leave is decided by their last use."""
HUB_NAME = "somebody/llama"
REVISIONS = ("a" * 40, "b" * 40)
BLOCK_TOKENS = 32
ROUNDED = ("type of the model", "type of the cache", "quantisation")
"""Numbers so short that the order of a sum shows in the tokens."""


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

    def hub(self) -> Path:
        """A hub's cache with two revisions of one model, of equal weights."""
        cached = self._folder / "hub" / f"models--{HUB_NAME.replace('/', '--')}"
        for commit in REVISIONS:
            shutil.copytree(self.model, cached / "snapshots" / commit)
        return cached.parent

    def start(
        self,
        model: Path | str | None = None,
        label: str = "",
        weights_id: str | None = None,
        **options: Any,
    ) -> Engine:
        """An engine; `options` are vLLM's."""
        disk = str(self._folder / "kv")
        tiers = [
            {"type": "cpu", "capacity": 64 * MIB, "arena_dir": str(self._shared)},
            {"type": "nvme", "capacity": 2048 * MIB, "path": disk, "min_free": 0},
        ]
        extra = {**AT_ANY_SPEED, "tiers": tiers, "label": label, "weights_id": weights_id}
        defaults = engine_options(Path(model or self.model), DEVICE_BLOCKS, extra)
        defaults["max_model_len"] = 2 * PROMPT_TOKENS  # fits the device at every block size
        return Engine(self._folder / "engine.log", {**defaults, **options})

    def namespaces(self) -> set[str]:
        """The names of those on disk."""
        return {file.parent.name for file in (self._folder / "kv").glob("*/namespace.json")}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with TemporaryDirectory(dir="/dev/shm") as shared:
        yield Place(tmp_path, Path(shared))


def cold_then_warm(
    engine: Engine, salt: str | None = None, adapter: Path | None = None, is_exact: bool = True
) -> list[list[int]]:
    """Nothing is hit at first; then everything is, and the tokens stay the same. The tokens.

    Not `is_exact`: what was computed in one go may differ from what was computed after a hit; then
    a hit in the device's own cache says what is right.
    """
    cold = engine.generate(prompts(), salt=salt, adapter=adapter)
    assert [answer["cached"] for answer in cold] == [0] * len(cold), "something stale was hit"
    engine.reset(connector=False)
    warm = engine.generate(prompts(), salt=salt, adapter=adapter)
    assert all(answer["cached"] > 0 for answer in warm)
    reference = cold if is_exact else engine.generate(prompts(), salt=salt, adapter=adapter)
    assert tokens(warm) == tokens(reference)
    return tokens(cold)


def tokens(answers: Answers) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


def all_hit(engine: Engine, expected: Sequence[Sequence[int]], adapter: Path | None = None) -> None:
    """What an engine like this one stored is there, every block of it."""
    answers = engine.generate(prompts(), adapter=adapter)
    cached = (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert [answer["cached"] for answer in answers] == [cached] * len(answers)
    assert tokens(answers) == list(expected)


def test_another_identity_hits_nothing_and_the_old_one_everything(
    place: Place, tmp_path: Path
) -> None:
    one, two = (make_adapter(tmp_path / f"adapter-{seed}", seed) for seed in (1, 2))
    with place.start(weights_id="base and two adapters", **LORA) as engine:
        expected = cold_then_warm(engine)
        assert cold_then_warm(engine, salt="tenant a") == expected
        assert cold_then_warm(engine, salt="tenant b") == expected, "tenants share nothing"
        adapted = [cold_then_warm(engine, adapter=adapter) for adapter in (one, two)]
        assert len({str(each) for each in [expected, *adapted]}) == 3, "the adapters bite"
        engine.stop()
    with place.start(place.other_weights) as engine:
        assert cold_then_warm(engine) != expected
        engine.stop()
    with place.start(block_size=2 * BLOCK_TOKENS) as engine:
        assert cold_then_warm(engine) == expected
        engine.stop()
    with place.start(weights_id="base and two adapters", **LORA) as engine:
        all_hit(engine, expected)
        all_hit(engine, adapted[1], adapter=two)
        all_hit(engine, adapted[0], adapter=one)
        engine.stop()
    assert len(place.namespaces()) == 3


def test_an_adapter_that_was_replaced_in_its_place_is_never_stale(
    place: Place, tmp_path: Path
) -> None:
    adapter = tmp_path / "adapter"
    found = []
    for seed in (1, 2):
        with place.start(**LORA) as engine:
            found.append(cold_then_warm(engine, adapter=make_adapter(adapter, seed)))
            engine.stop()
    assert found[0] != found[1]


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_the_whole_matrix(place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # for two ranks on few cores
    monkeypatch.setenv("HF_HUB_CACHE", str(place.hub()))
    changes: dict[str, dict[str, Any]] = {
        "nothing": {},
        "weights": {"model": place.other_weights},
        "one revision": {"model": HUB_NAME, "revision": REVISIONS[0]},
        "another revision": {"model": HUB_NAME, "revision": REVISIONS[1]},
        "block size": {"block_size": 2 * BLOCK_TOKENS},
        "label": {"label": "somebody else"},
        "type of the model": {"dtype": "bfloat16"},
        "type of the cache": {"kv_cache_dtype": "fp8"},
        "positions": {"hf_overrides": {"rope_theta": 20_000.0}},
        "hash": {"prefix_caching_hash_algo": "sha256_cbor"},
        # vLLM's int8 kernel of Intel's processors refuses float32
        "quantisation": {"model": make_int8_llama(tmp_path / "int8"), "dtype": "bfloat16"},
        "ranks": {"tensor_parallel_size": 2},
    }
    if "KVCASCADE_CHANGES" in os.environ:
        chosen = ["nothing", *os.environ["KVCASCADE_CHANGES"].split(",")]
        changes = {name: changes[name] for name in chosen}
    if not has_device_each(2):
        changes.pop("ranks", None)
    expected: dict[str, list[list[int]]] = {}
    namespaces: set[str] = set()

    def back(name: str) -> None:
        print("back:", name, flush=True)
        with place.start(**changes[name]) as engine:
            all_hit(engine, expected[name])
            engine.stop()

    for number, (name, change) in enumerate(changes.items(), start=1):
        print("changed:", name, flush=True)
        with place.start(**change) as engine:
            expected[name] = cold_then_warm(engine, is_exact=name not in ROUNDED)
            engine.stop()
        namespaces |= place.namespaces()
        if number % NAMESPACES_KEPT == 0:
            back("nothing")
    exact = [name for name in changes if name not in ROUNDED]
    for name in dict.fromkeys(("nothing", *exact[-2:])):
        back(name)
    assert len(namespaces) == len(changes)
    same = ("one revision", "another revision", "block size", "label", "ranks", "hash")
    assert all(expected[name] == expected["nothing"] for name in same if name in expected)


@pytest.mark.soak
def test_the_cpu_platform_knows_one_layout(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should that change, it belongs into the matrix."""
    if not is_on_cpu():
        pytest.skip("the engine that is installed is for GPUs, which know several")
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "NHD")
    with pytest.raises(EngineFailed, match="layout"):
        place.start().kill()


@pytest.mark.soak
def test_made_up_weights_are_never_shared(place: Place) -> None:
    """`load_format="dummy"`: weights that no file names, so no other process can have them."""
    for _ in range(2):
        with place.start(load_format="dummy") as engine:
            cold_then_warm(engine)
            engine.stop()
