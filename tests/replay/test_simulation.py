"""The simulator against what is known of the traces, and against itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from support.traces import TRACES, reference

from kvcascade.config.schema import WriteMode
from kvcascade.errors import ConfigError
from kvcascade.tools.replay.replay_report import Quantiles, ReplayReport
from kvcascade.tools.replay.simulation import replay
from kvcascade.tools.replay.tier_options import ReplayOptions, TierOptions
from kvcascade.tools.replay.traces import Trace, TraceRequest, read_trace
from kvcascade.tools.replay.virtual import Rate

TAU = "tau_airline_toolagent"
BLOCK_TOKENS = 16


@cache
def tau(requests: int | None = None) -> Trace:
    """The small trace, whole or its beginning."""
    reference(TAU)  # skips where it is not at hand
    return read_trace(TRACES / f"{TAU}.npz", requests)


def conversations(seed: int = 3, count: int = 60, turns: int = 6) -> Trace:
    """Sessions that grow turn by turn, ten seconds apart, taking turns."""
    rng = np.random.default_rng(seed)
    chains = np.arange(count * turns * 8, dtype=np.uint64).reshape(count, turns * 8)
    requests = []
    for turn in range(turns):
        for number, session in enumerate(rng.permutation(count)):
            ids = chains[session, : (turn + 1) * 8]
            arrived_s = float(turn * count + number)
            requests.append(TraceRequest(arrived_s, len(ids) * BLOCK_TOKENS, ids))
    return Trace("conversations", BLOCK_TOKENS, requests)


def options(*tiers: TierOptions, prefill: float | None = None) -> ReplayOptions:
    return ReplayOptions(tuple(tiers), kv_bytes_per_token=1, prefill_tokens_per_s=prefill)


def tier(name: str, blocks: int, policy: str = "lru") -> TierOptions:
    """So many blocks of one byte per token; transfers take no time."""
    return TierOptions(name, blocks * BLOCK_TOKENS, policy)


def check(report: ReplayReport) -> None:
    """What must add up in any run."""
    top, *lower = report.tiers
    assert sum(t.hit_tokens for t in report.tiers) == report.hit_tokens <= report.input_tokens
    came = report.stored_blocks + sum(one.promoted_blocks for one in lower)
    assert came == top.resident_blocks + top.evicted_blocks, "every block stayed or left"
    for one in lower:
        assert one.demoted_blocks == one.resident_blocks + one.evicted_blocks
    assert all(t.resident_blocks <= t.capacity_blocks for t in report.tiers)
    assert report.stored_blocks + report.unstored_blocks >= report.distinct_blocks


@pytest.mark.parametrize(
    "fraction",
    ["0.01", "0.1", *(pytest.param(f, marks=pytest.mark.soak) for f in ("0.05", "0.3"))],
)
def test_one_tier_equals_the_reference_of_prefix_lru(fraction: str) -> None:
    known = reference(TAU)
    report = replay(tau(), options(tier("cpu", known["cache_sizes"][fraction])))
    expected = known["prefix_lru"]["leaf_first"][fraction]["hit_token_ratio"]
    assert report.hit_ratio == pytest.approx(expected, abs=1e-4)
    check(report)


def test_a_second_tier_never_costs_hits_and_everything_adds_up() -> None:
    trace = tau(700)
    one = replay(trace, options(tier("cpu", 300)))
    two = replay(trace, options(tier("cpu", 300), tier("nvme", 3000)))
    large = replay(trace, options(tier("cpu", 300), tier("nvme", 1 << 20)))
    assert one.hit_tokens < two.hit_tokens <= large.hit_tokens
    for report in (one, two, large):
        check(report)
    assert two.tiers[1].hit_tokens > 0


def test_three_tiers() -> None:
    report = replay(
        conversations(), options(tier("cpu", 100), tier("nvme", 1000), tier("far", 1 << 14))
    )
    check(report)
    assert all(t.hit_blocks for t in report.tiers[1:])


@pytest.mark.parametrize("tokens", [16.0, 16 / 3, 1.5, 0.4])
def test_tokens_by_tier_follow_the_blocks(tokens: float) -> None:
    """A recording of several groups has blocks of no whole number of tokens."""
    whole = conversations(count=30)
    requests = [replace(r, input_tokens=round(len(r.ids) * tokens)) for r in whole.requests]
    block_bytes = round(1000 * tokens)
    tiers = [TierOptions("cpu", 100 * block_bytes), TierOptions("nvme", 4000 * block_bytes)]
    report = replay(Trace("parts", tokens, requests), ReplayOptions(tuple(tiers), 1000))
    assert sum(one.hit_tokens for one in report.tiers) == report.hit_tokens
    for one in report.tiers:
        assert one.hit_blocks > 0
        assert one.hit_tokens == pytest.approx(one.hit_blocks * tokens, abs=len(requests))


def test_the_same_run_gives_the_same_report() -> None:
    slow = replace(tier("nvme", 1 << 14), read=Rate(1e3))
    given = options(tier("cpu", 200), slow, prefill=100.0)
    assert replay(conversations(), given) == replay(conversations(), given)


def test_what_is_found_costs_no_prefill() -> None:
    roomy = options(tier("cpu", 1 << 14), prefill=1000.0)
    report = replay(conversations(), roomy)
    assert report.prefill_s_saved == report.hit_tokens / 1000
    assert report.ttft_s is not None and report.ttft_without_s is not None
    assert report.ttft_s.mean * 2 < report.ttft_without_s.mean
    assert report.hit_ratio == pytest.approx(15 / 21), "1 + ... + 5 of 1 + ... + 6 eighths"


def prompts(blocks: Sequence[int], start: int = 0) -> list[TraceRequest]:
    """A prompt of so many blocks each, all different, a minute apart."""
    begin = np.cumsum([0, *blocks])
    return [
        TraceRequest(60.0 * (start + i), n * BLOCK_TOKENS, np.arange(first, first + n, dtype="u8"))
        for i, (first, n) in enumerate(zip(begin, blocks, strict=False))
    ]


def test_the_distribution_of_the_time_to_the_first_token() -> None:
    """Ten prompts of 10 to 100 blocks of 16 tokens, computed at 1,600 tokens/s, then found."""
    sizes = range(10, 101, 10)
    trace = Trace("twice", BLOCK_TOKENS, prompts(sizes) + prompts(sizes, start=10))
    report = replay(trace, options(tier("cpu", 1 << 12), prefill=1600.0))
    assert report.ttft_without_s == Quantiles(mean=0.55, p50=0.5, p90=0.9, p99=1.0)
    assert report.ttft_s == Quantiles(mean=0.275, p50=0.0, p90=0.8, p99=1.0)


def test_the_time_to_the_first_token_counts_the_wait_for_a_tier() -> None:
    """Half of the first prompt comes up in the latency of the disk; the second pushed it there."""
    first, second = prompts([40, 80])
    again = replace(first, arrived_s=1000.0)
    disk = replace(tier("nvme", 1 << 12), read=Rate(1e12, 0.125))
    trace = Trace("disk", BLOCK_TOKENS, [first, second, again])
    report = replay(trace, options(tier("cpu", 100), disk, prefill=640.0))
    assert [one.hit_blocks for one in report.tiers] == [20, 20]
    assert report.ttft_s is not None
    assert report.ttft_s.mean == pytest.approx((1.0 + 2.0 + 0.125) / 3, abs=0.01)


def test_every_request_is_told_of_as_progress() -> None:
    told: list[int] = []
    trace = conversations(count=5)
    replay(trace, options(tier("cpu", 64)), told.append)
    assert sum(told) == len(trace.requests)


def test_a_slow_disk_is_not_waited_for() -> None:
    """Reading a block takes 1.6 s, computing it 0.016 s."""
    slow = replace(tier("nvme", 1 << 14), read=Rate(10.0))
    given = options(tier("cpu", 200), slow, prefill=1000.0)
    wise = replay(conversations(), given)
    stubborn = replay(conversations(), replace(given, load_or_recompute=False))
    assert wise.requests_recomputed > wise.requests_loaded
    assert stubborn.requests_recomputed == 0
    assert wise.ttft_s is not None and stubborn.ttft_s is not None
    assert wise.ttft_s.mean * 3 < stubborn.ttft_s.mean
    (even,) = wise.break_even
    assert even.prefill_tokens_per_s == 10.0


def test_a_latency_makes_short_prompts_not_worth_it() -> None:
    far = replace(tier("nvme", 1 << 14), read=Rate(1e6, 0.5))
    report = replay(conversations(count=5), options(tier("cpu", 64), far, prefill=1000.0))
    (even,) = report.break_even
    assert even.least_tokens == pytest.approx(500, rel=0.01)


def test_a_tier_without_room_for_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="cpu: 15 bytes hold no block of 16 bytes"):
        replay(conversations(), options(TierOptions("cpu", 15)))


def test_the_report_is_json() -> None:
    report = replay(conversations(count=5), options(tier("cpu", 64), tier("nvme", 64)))
    document = json.loads(json.dumps(report.document()))
    assert document["hit_tokens"] == report.hit_tokens
    assert [t["name"] for t in document["tiers"]] == ["cpu", "nvme"]


@pytest.mark.parametrize("mode", [WriteMode.BACK, WriteMode.THROUGH])
def test_written_early_every_block_is_written_once(mode: WriteMode) -> None:
    """Demotion leaves the CPU tier's share for a stop."""
    given = options(tier("cpu", 200), tier("nvme", 1 << 14))
    late = replay(conversations(), given)
    early = replay(conversations(), replace(given, write_mode=mode))
    assert early.tiers[0].dirty_blocks == 0 < late.tiers[0].dirty_blocks <= 200
    assert early.tiers[1].write_amplification == 1.0
    rest = late.tiers[0].dirty_blocks * late.block_bytes
    assert late.tiers[1].written_bytes + rest == early.tiers[1].written_bytes


@pytest.mark.parametrize("mode", list(WriteMode))
def test_one_tier_writes_nothing_down_in_any_mode(mode: WriteMode) -> None:
    given = options(tier("cpu", 200))
    report = replay(conversations(count=5), replace(given, write_mode=mode))
    assert report == replace(replay(conversations(count=5), given), write_mode=mode)


def test_second_touch_writes_what_came_again() -> None:
    """Each session's first block is asked for in every turn, its last one once."""
    disk = replace(tier("nvme", 1 << 14), admission="second_touch")
    given = replace(options(tier("cpu", 1 << 12), disk), write_mode=WriteMode.THROUGH)
    report = replay(conversations(), given)
    assert report.tiers[1].write_amplification == pytest.approx(5 / 6)


def test_the_budget_of_a_day_holds_and_comes_back() -> None:
    trace = Trace("days", BLOCK_TOKENS, prompts([40] * 6))
    days = [replace(one, arrived_s=day * 50_000.0) for day, one in enumerate(trace.requests)]
    disk = replace(tier("nvme", 1 << 12), write_budget_bytes=60 * BLOCK_TOKENS)
    given = replace(options(tier("cpu", 1 << 12), disk), write_mode=WriteMode.THROUGH)
    report = replay(replace(trace, requests=days[:2]), given)
    assert report.tiers[1].demoted_blocks == 60
    assert replay(replace(trace, requests=days), given).tiers[1].demoted_blocks > 120
