"""The engine on a GPU, cold, warm and after a restart, beside vLLM's tiering; tokens are
compared."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from importlib.util import find_spec

from ..measurement import Case, MeasurementSetup
from ..scale import EngineScale
from .engine import MEASUREMENT as ENGINE
from .engine import make_runs, prefixes_case

NEEDED = ("vllm", "lmdb", "msgspec", "safetensors", "tokenizers")
GPU_SCALE = EngineScale(layers=24, hidden=1024, prefix_blocks=120)
"""Model with about 100 KiB of KV cache per token, and prompts of 4,000 tokens."""


def cases(setup: MeasurementSetup) -> Generator[Case, None, None]:
    """Yield the case of repeated long prefixes, run once; none if the engine is not installed."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        setup.note(
            f"the engine is not started: {', '.join(missing)} not found; "
            "pip install 'kvcascade[vllm]' to measure it"
        )
        return
    scale = GPU_SCALE if setup.scale.is_whole else setup.scale.engine
    yield prefixes_case(make_runs(setup, scale), scale, repeats=1)


MEASUREMENT = replace(
    ENGINE,
    name="gpu_engine",
    title="In the engine on a GPU: time to the first token, bytes written, tokens compared",
    cases=cases,
)
