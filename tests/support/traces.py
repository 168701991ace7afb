"""The recorded workloads with reference hit ratios, where they are at hand: ../shared/traces."""

from __future__ import annotations

import json
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
FRACTIONS = ("0.01", "0.05", "0.1", "0.3")
"""Sizes of the reference, as shares of the distinct blocks."""
LLM = ("mooncake_conversation", "cc_agentic_global", "tau_airline_toolagent")
"""Traces of requests for prompts; the others are of single blocks."""


@cache
def reference(trace: str) -> dict[str, Any]:
    """What is known of a trace. Skips the test where the traces are not at hand."""
    path = TRACES / "reference_hit_ratios.json"
    if not path.is_file():
        pytest.skip(f"the recorded workloads are not at hand (expected in {TRACES.name}/ beside)")
    found: dict[str, Any] = json.loads(path.read_text())["traces"][trace]
    return found


@cache
def block_references(trace: str, limit: int | None = None) -> tuple[int, ...]:
    """Block ids in the order in which they are looked up, all of them or the first `limit`."""
    requests = reference(trace)["requests"]
    with np.load(TRACES / f"{trace}.npz") as arrays:
        runs = int(arrays["run_offset"][requests])
        starts, lengths = arrays["run_start"][:runs].tolist(), arrays["run_len"][:runs].tolist()
    ids = (i for start, n in zip(starts, lengths, strict=True) for i in range(start, start + n))
    return tuple(islice(ids, limit))


def block_chains(trace: str, limit: int) -> list[list[int]]:
    """Block ids of each of the first `limit` requests."""
    reference(trace)  # skips where there are none
    with np.load(TRACES / f"{trace}.npz") as arrays:
        offsets = arrays["run_offset"][: limit + 1].tolist()
        starts, lengths = arrays["run_start"], arrays["run_len"]
        runs = [range(s, s + n) for s, n in zip(starts.tolist(), lengths.tolist(), strict=True)]
    return [
        [i for run in runs[first:stop] for i in run]
        for first, stop in zip(offsets, offsets[1:], strict=False)
    ]


def capacities(trace: str, limit: int) -> list[int]:
    """The sizes of the reference, for the first `limit` references of a trace."""
    distinct = len(set(block_references(trace, limit)))
    return [max(1, round(float(fraction) * distinct)) for fraction in FRACTIONS]
