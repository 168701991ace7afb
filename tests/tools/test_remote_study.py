"""Hosts on paper: what a shared server gains, when it is written to, and what it costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvcascade.config.remote import WriteWhen
from kvcascade.tiers.base import BlockHash
from kvcascade.tiers.remote.engines.object_store import RENEW_AFTER_S
from kvcascade.tools.dev import remote_study
from kvcascade.tools.dev.policy_study import StudyWorkload, load_workload
from kvcascade.tools.dev.remote_study import Bucket, Host, Setup, Valkey, cells, routes, run

DAY_S = 86400.0
SETUP = Setup(bytes_per_token=1000, object_tokens=10)
THROUGH, SECOND_TOUCH = WriteWhen.THROUGH, WriteWhen.SECOND_TOUCH


def chain(*names: int) -> list[BlockHash]:
    return [BlockHash(bytes([name]) * 16) for name in names]


def workload(*prompts: list[BlockHash]) -> StudyWorkload:
    """Requests, 100 s apart, with blocks of 20 tokens."""
    tokens = [20 * len(prompt) for prompt in prompts]
    return StudyWorkload("w", list(prompts), tokens, [100.0 * n for n in range(len(prompts))], 20)


def host(server: Bucket | Valkey | None, when: WriteWhen = THROUGH, slots: int = 10) -> Host:
    return Host(slots, slots, server, when)


def test_what_one_host_wrote_is_a_hit_on_another() -> None:
    bucket = Bucket(DAY_S, objects=1)
    assert host(bucket).serve(chain(1, 2, 3), 0) == []
    assert bucket.asked == 1, "a cold prompt costs one question"
    assert host(bucket).serve(chain(1, 2, 3, 4), 1) == ["remote"] * 3
    assert (bucket.up, bucket.down) == (4, 3)
    assert host(None).serve(chain(1, 2, 3), 2) == []


def test_a_second_use_counts_on_its_own_host_only() -> None:
    bucket = Bucket(DAY_S, objects=1)
    first, second = host(bucket, SECOND_TOUCH), host(bucket, SECOND_TOUCH)
    for each in (first, second):
        assert each.serve(chain(1, 2), 0) == []
    assert bucket.up == 0
    assert first.serve(chain(1, 2), 100) == ["cpu", "cpu"]
    assert bucket.up == 2
    assert host(bucket, SECOND_TOUCH).serve(chain(1, 2), 200) == ["remote"] * 2


def test_the_nearest_tier_counts_and_the_server_fills_the_rest() -> None:
    bucket = Bucket(DAY_S, objects=1)
    host(bucket).serve(chain(1, 2, 3, 4), 0)
    small = Host(1, 2, bucket, THROUGH)
    small.serve(chain(1, 2), 100)
    assert small.serve(chain(1, 2, 3, 4, 5), 200) == ["cpu", "nvme", "remote", "remote"]


def test_a_known_absence_is_not_asked_about_again_for_some_seconds() -> None:
    bucket = Bucket(DAY_S, objects=1)
    reader = Host(1, 1, bucket, WriteWhen.OFF)
    reader.serve(chain(1, 2), 0)
    asked = bucket.asked
    host(bucket).serve(chain(1, 2), 1)
    asked_since = bucket.asked - asked
    assert reader.serve(chain(2), 2) == []
    assert bucket.asked - asked == asked_since
    assert reader.serve(chain(1, 2), 10) == ["remote", "cpu"]


def test_objects_expire_by_age_unless_they_are_in_use() -> None:
    bucket = Bucket(DAY_S, objects=1)
    writer, reader = host(bucket), Host(1, 1, bucket, WriteWhen.OFF)
    writer.serve(chain(1, 2), 0)
    writer.serve(chain(1), RENEW_AFTER_S + 1)
    assert bucket.up == 3
    assert bucket.kept_s == 3 * DAY_S - (DAY_S - RENEW_AFTER_S - 1)
    assert reader.serve(chain(1, 2), DAY_S) == ["remote"]


def test_valkey_evicts_what_was_used_least() -> None:
    valkey = Valkey(3)
    host(valkey).serve(chain(1, 2), 0)
    host(valkey).serve(chain(3), 10)
    assert host(valkey).serve(chain(1, 2), 20) == ["remote"] * 2
    host(valkey).serve(chain(4), 30)
    assert [valkey.has(key, 40) for key in chain(1, 2, 3, 4)] == [True, True, False, True]
    assert valkey.up == 4


def test_a_session_stays_on_its_host() -> None:
    sessions = [[*chain(0), *chain(name)] for name in range(1, 101)]
    work = workload(*sessions, *sessions)
    by_session, at_random = (routes(work, name, 10) for name in ("session", "random"))
    assert set(by_session) == set(at_random) == set(range(10)), "the shared head names none"
    # A session has 2 of 200 requests, which is no more than 1 %.
    assert by_session[:100] == by_session[100:]
    assert at_random[:100] != at_random[100:]


def test_random_routing_gains_what_session_routing_has_already() -> None:
    sessions = [chain(name, name + 100) for name in range(100)]
    work = workload(*sessions, *sessions)
    found = {(c.routing, c.server, c.writes): c for c in cells(work, SETUP, [10])}
    assert len(found) == 2 * 5
    for (routing, server, writes), cell in found.items():
        is_whole = routing == "session" or (server, writes) == ("bucket", "through")
        assert (cell.hits == pytest.approx(0.5)) == (
            is_whole or server == "valkey" and writes == "through"
        )
        assert cell.down_bytes == pytest.approx(cell.remote_hits * sum(work.tokens) * 1000)
    alone, shared = found["random", "none", "off"], found["random", "bucket", "through"]
    price = SETUP.gpu_usd / 3600 / SETUP.prefill_tokens_per_s
    assert shared.saved_usd == pytest.approx((shared.hits - alone.hits) * 8000 * price)
    assert found["session", "bucket", "through"].saved_usd == 0


def test_costs_are_amounts_times_prices() -> None:
    work = workload(chain(1, 2), chain(1, 2))
    setup = replace(SETUP, put_usd=3, get_usd=5, bucket_usd=7, egress_usd=11, valkey_usd=13)
    setup = replace(setup, bucket_hours=24 * 30, valkey_bytes=10**9, cpu_bytes=1, nvme_bytes=1)
    bucket = run(work, setup, 1, "random", "bucket", THROUGH)
    # Blocks have 20 kB and two objects. One slot each for CPU and NVMe: the head is there.
    assert (bucket.up_bytes, bucket.down_bytes) == (40_000, 20_000)
    lists = 2 * (1 + 15 + 1)  # two each: at once, in the background, and after a pause
    questions = bucket.requests - 4 - 2 - lists
    assert bucket.requests_usd == pytest.approx(((4 + lists) * 3 + (questions + 2) * 5) / 1000)
    assert bucket.storage_usd == pytest.approx(40e3 / 1e9 * 7)
    assert bucket.egress_usd == pytest.approx(20e3 / 1e9 * 11)
    valkey = run(work, setup, 1, "random", "valkey", THROUGH)
    assert valkey.requests_usd == 0
    assert valkey.storage_usd == pytest.approx(13 * 100 / remote_study.MONTH_S)


def test_the_command_writes_a_table_and_figures(tmp_path: Path) -> None:
    trace = tmp_path / "chat.jsonl"
    requests = [
        {"timestamp": n * 1000, "input_length": 1024, "hash_ids": [0, n % 3 + 1]} for n in range(9)
    ]
    trace.write_text("".join(json.dumps(request) + "\n" for request in requests))
    options = ["--hosts", "2", "--cpu", "1GiB", "--put-usd", "1"]
    assert remote_study.main([str(tmp_path / "out"), str(trace), *options]) == 0
    found = json.loads((tmp_path / "out" / "chat.json").read_text())
    assert found["setup"]["cpu_bytes"] == 1 << 30 and found["setup"]["put_usd"] == 1
    table = (tmp_path / "out" / "chat.md").read_text().splitlines()
    assert len(table) == 2 + len(found["cells"]) == 2 + 2 * 5


def test_small_blocks_are_merged(tmp_path: Path) -> None:
    trace = tmp_path / "chat.jsonl"
    trace.write_text(
        json.dumps({"timestamp": 5, "input_length": 2560, "hash_ids": [0, 1, 2, 3, 4]})
    )
    work = load_workload(str(trace), 1100)
    assert (len(work.chains[0]), work.block_tokens, work.arrived_s) == (2, 1024, [0.0])
    assert work.chains[0] == load_workload(str(trace)).chains[0][1::2]
