"""Fabricated results of the demo."""

from __future__ import annotations

from typing import Any

from kvcascade.tools.dev.demo.demo_results import DemoTimes, Need, Other, Phase, Reply, Sources
from kvcascade.tools.dev.demo.workload import Turn


def reply(number: int, cached: int = 64, ttft_s: float = 0.25) -> Reply:
    """An answer to a prompt of 100 tokens."""
    return Reply(100, cached, ttft_s, (5, 6, 7), Turn(0, number))


def phase(key: str, **changes: Any) -> Phase:
    """A phase in which everything went well."""
    good: dict[str, Any] = {
        "key": key,
        "title": f"phase {key}",
        "replies": [reply(1), reply(2)],
        "sources": Sources(gpu=32, cpu=32, nvme=64, recomputed=72),
        "wrong_tokens": 0,
        "reference": Other(Sources(gpu=32, cpu=0, nvme=0, recomputed=168), DemoTimes(0.5, 0.75)),
        "start_s": 12.5,
        "written_bytes": 3 << 20,
        "read_bytes": 2 << 20,
    }
    return Phase(**{**good, **changes})


def with_tiering(key: str) -> Phase:
    """A phase whose requests vLLM's own tiering got too."""
    other = Other(Sources(gpu=32, cpu=64, nvme=64, recomputed=40), DemoTimes(0.3, 0.35), 2)
    return phase(key, tiering=other)


def reference() -> Phase:
    """The phase without offloading."""
    sources = Sources(gpu=128, cpu=0, nvme=0, recomputed=72)
    return phase("a", sources=sources, written_bytes=0, read_bytes=0, needs=Need.NOTHING)
