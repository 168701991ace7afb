"""Sums, percentiles, the JSON document, and what counts as a failure."""

from __future__ import annotations

import json
from typing import Any

import pytest
from demo.demo_phases import phase, reference, reply, with_tiering

from kvcascade.tools.dev.demo.demo_results import (
    DEVICE_HITS,
    HITS_BY_SOURCE,
    LOADED_BLOCKS,
    DemoError,
    DemoTimes,
    Metrics,
    Need,
    Sources,
    device_sources,
    document,
    problems,
    sources_of,
    tiering_sources,
    times,
)
from kvcascade.tools.dev.server import differing_tokens

COUNTED = {
    DEVICE_HITS: 32.0,
    f"{LOADED_BLOCKS}{{tier=cpu}}": 1.0,
    f"{LOADED_BLOCKS}{{tier=nvme}}": 2.0,
}
BY_SOURCE = {
    f"{HITS_BY_SOURCE}{{source=device}}": 32.0,
    f"{HITS_BY_SOURCE}{{source=host}}": 32.0,
    f"{HITS_BY_SOURCE}{{source=disk}}": 64.0,
}


@pytest.mark.parametrize(
    ("values_s", "expected"),
    [
        ([], DemoTimes(0, 0)),
        ([3.0], DemoTimes(3, 3)),
        ([2.0, 1.0], DemoTimes(1, 2)),
        ([float(value) for value in range(101)], DemoTimes(50, 95)),
    ],
)
def test_percentiles(values_s: list[float], expected: DemoTimes) -> None:
    found = times(values_s)
    assert found.p50_s == pytest.approx(expected.p50_s)
    assert found.p95_s == pytest.approx(expected.p95_s)


@pytest.mark.parametrize(
    ("given", "wrong"), [([1, 2, 3], 0), ([1, 9, 3], 1), ([1, 2], 1), ([1, 2, 3, 4], 1), ([], 3)]
)
def test_wrong_tokens(given: list[int], wrong: int) -> None:
    assert differing_tokens(given, [1, 2, 3]) == wrong


@pytest.mark.parametrize("counted", [COUNTED, COUNTED | BY_SOURCE], ids=["before 0.32", "0.32"])
def test_sources_add_up(counted: dict[str, float]) -> None:
    sources = sources_of([reply(1), reply(2)], Metrics(counted), block_tokens=32)
    assert sources == Sources(gpu=32, cpu=32, nvme=64, recomputed=72)


@pytest.mark.parametrize(
    "changes",
    [
        {DEVICE_HITS: 0.0},
        {f"{LOADED_BLOCKS}{{tier=nvme}}": 3.0},
        {**BY_SOURCE, f"{HITS_BY_SOURCE}{{source=disk}}": 32.0},
    ],
)
def test_counts_that_do_not_add_up(changes: dict[str, float]) -> None:
    with pytest.raises(DemoError, match="do not add up|vLLM counts"):
        sources_of([reply(1), reply(2)], Metrics(COUNTED | changes), block_tokens=32)


def test_more_cached_than_asked() -> None:
    with pytest.raises(DemoError, match="more cached tokens"):
        sources_of([reply(1, cached=101)], Metrics({DEVICE_HITS: 101.0}), block_tokens=32)


def test_success() -> None:
    assert problems([reference(), phase("b"), phase("c")]) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"wrong_tokens": 3}, "3 tokens differ"),
        ({"sources": Sources(128, 0, 0, 72)}, "nothing came back"),
        ({"read_bytes": 0}, "nothing came back"),
        ({"needs": Need.REMOTE}, "nothing came from the remote tier"),
        ({"leftovers": ["kvcascade-1"]}, "left in shared memory: kvcascade-1"),
        ({"replies": []}, "no request"),
    ],
)
def test_failures(changes: dict[str, Any], words: str) -> None:
    found = problems([reference(), phase("b"), phase("c", **changes)])
    assert len(found) == 1 and words in found[0] and found[0].startswith("(c) phase c: ")


def test_what_came_from_the_remote_tier() -> None:
    """vLLM counts it with the disk."""
    counted = {**COUNTED, **BY_SOURCE, f"{LOADED_BLOCKS}{{tier=remote}}": 1.0}
    counted |= {DEVICE_HITS: 0.0, f"{HITS_BY_SOURCE}{{source=device}}": 0.0}
    counted[f"{HITS_BY_SOURCE}{{source=disk}}"] = 96.0
    found = sources_of([reply(1), reply(2)], Metrics(counted), block_tokens=32)
    assert found == Sources(gpu=0, cpu=32, nvme=64, recomputed=72, remote=32)
    other_host = phase("e", needs=Need.REMOTE, sources=found, remote_read_bytes=1)
    assert problems([reference(), other_host]) == []


def test_sources_without_kvcascade() -> None:
    replies = [reply(1), reply(2)]
    assert device_sources(replies) == Sources(gpu=128, cpu=0, nvme=0, recomputed=72)
    found = tiering_sources(replies, Metrics(BY_SOURCE))
    assert found == Sources(gpu=32, cpu=32, nvme=64, recomputed=72)


def test_nothing_done_is_no_success() -> None:
    assert problems([]) == ["No phase was run."]


def test_document() -> None:
    made = json.loads(
        json.dumps(document([with_tiering("a"), phase("b", wrong_tokens=1)], {"x": 1}))
    )
    assert set(made) == {"format", "x", "phases", "problems"} and len(made["problems"]) == 1
    second = made["phases"][1]
    assert second["phase"] == "b" and second["requests"] == 2 and second["wrong_tokens"] == 1
    assert sum(second["tokens_from"].values()) == second["prompt_tokens"] == 200
    assert second["ttft"] == {"p50_s": 0.25, "p95_s": 0.25}
    assert second["nvme_written_bytes"] == 3 << 20 and second["nvme_read_bytes"] == 2 << 20
    assert second["remote_written_bytes"] == second["remote_read_bytes"] == 0
    assert second["reference"]["sources"]["recomputed"] == 168 and second["tiering"] is None
    assert made["phases"][0]["tiering"]["ttft"] == {"p50_s": 0.3, "p95_s": 0.35}
    assert second["first_request"] == {"prompt": 100, "cached": 64}
    assert second["replies"][0] == {
        "conversation": 0,
        "number": 1,
        "prompt_tokens": 100,
        "cached_tokens": 64,
        "ttft_s": 0.25,
        "tokens": [5, 6, 7],
    }
