"""`kvcascade top`: figures from an engine's metrics and from the disk."""

from __future__ import annotations

import errno
import signal
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from support.cache_rig import call
from support.metrics_server import metrics_server
from support.path_cache import (
    BLOCK,
    engine_on,
    fill_path,
    fill_two,
    of_version_2,
    running_engine,
)
from support.path_engine import PathEngine

from kvcascade.errors import TierIOError
from kvcascade.tiers.nvme.namespace import NamespaceKey
from kvcascade.tiers.nvme.path.path_messages import PathOptions
from kvcascade.tools.commands.command_line import ExitCode
from kvcascade.tools.commands.top.path_readings import PathReadings
from kvcascade.tools.commands.top.top_frame import (
    Frame,
    Reading,
    TierFrame,
    frame,
    parse_metrics,
    read_url,
)
from kvcascade.tools.commands.top.top_view import render, run

LABELS = 'engine="0",model_name="m"'


def metrics(hits: int, up: int, samples: int) -> str:
    """What an engine's `/metrics` says, as vLLM's exporter writes it."""
    name = "vllm:kvcascade_promotion_seconds"
    return f"""# HELP vllm:num_requests_running Requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{{LABELS}}} 3.0
# TYPE vllm:kvcascade_loaded_blocks_total counter
vllm:kvcascade_loaded_blocks_total{{{LABELS},tier="cpu"}} {hits}
vllm:kvcascade_loaded_blocks_total{{{LABELS},tier="nvme"}} 7.0
# TYPE vllm:kvcascade_promoted_bytes_total counter
vllm:kvcascade_promoted_bytes_total{{{LABELS},tier="nvme"}} {up}
# TYPE vllm:kvcascade_lookup_misses_total counter
vllm:kvcascade_lookup_misses_total{{{LABELS}}} 11.0
# TYPE vllm:kvcascade_tier_used_ratio gauge
vllm:kvcascade_tier_used_ratio{{{LABELS},tier="cpu"}} 0.5
# TYPE {name} histogram
{name}_bucket{{{LABELS},tier="nvme",le="0.1"}} {samples}
{name}_bucket{{{LABELS},tier="nvme",le="+Inf"}} {samples}
{name}_count{{{LABELS},tier="nvme"}} {samples}
{name}_sum{{{LABELS},tier="nvme"}} {samples * 0.25}
"""


@pytest.fixture
def engine() -> Iterator[tuple[str, list[str]]]:
    """An address that serves metrics, and the texts it serves, the first one first."""
    texts: list[str] = []
    with metrics_server(texts) as address:
        yield address, texts


def test_rates_are_growth_by_time() -> None:
    before = Reading(10.0, parse_metrics(metrics(100, 1000, 4)))
    now = Reading(12.0, parse_metrics(metrics(150, 9000, 8)))
    cpu, nvme = frame("x", now, before).tiers
    assert (cpu.tier, cpu.hits, cpu.hits_per_s, cpu.used_ratio) == ("cpu", 150, 25.0, 0.5)
    assert (nvme.tier, nvme.hits_per_s, nvme.up_bytes_per_s) == ("nvme", 0.0, 4000.0)
    assert nvme.up_latency_s == 0.25 and nvme.budget_left_bytes is None
    assert frame("x", now, before).misses_per_s == 0.0


def test_a_restarted_engine_has_no_rates_for_once() -> None:
    before = Reading(10.0, parse_metrics(metrics(100, 1000, 4)))
    cpu, nvme = frame("x", Reading(11.0, parse_metrics(metrics(3, 2, 1))), before).tiers
    assert cpu.hits_per_s is None and nvme.up_bytes_per_s is None


def test_a_figure_that_appears_has_no_rate_for_once() -> None:
    before = Reading(0.0, {("tier_blocks", "m"): 5.0})
    now = Reading(2.0, {("tier_blocks", "m"): 5.0, ("demoted_bytes", "m"): 4e12})
    (tier,) = frame("p", now, before).tiers
    assert (tier.down_bytes, tier.down_bytes_per_s) == (4e12, None)


def test_ratios_of_several_engines_are_not_summed_up() -> None:
    name = "vllm:kvcascade_tier_"
    lines = [
        f'{name}{figure}{{engine="{engine}",tier="cpu"}} {value}'
        for figure, values in (("used_ratio", (0.9, 0.8)), ("blocks", (9, 8)))
        for engine, value in enumerate(values)
    ]
    (cpu,) = frame("x", Reading(1.0, parse_metrics("\n".join(lines) + "\n"))).tiers
    assert (cpu.used_ratio, cpu.blocks) == (0.9, 17)


def test_gauges_of_several_api_servers_are_not_summed_up() -> None:
    lines = [
        f'vllm:kvcascade_tier_capacity_bytes{{engine="{engine}",tier="nvme",pid="{pid}"}} {value}'
        for engine, pid, value in ((0, 7, 100), (0, 8, 100), (1, 7, 0), (1, 8, 50))
    ]
    figures = parse_metrics("\n".join(lines) + "\n")
    assert figures == {("tier_capacity_bytes", "nvme"): 150}


@pytest.mark.parametrize("address", ["{}", "{}/", "http://{}", "http://{}/", "http://{}/metrics"])
def test_an_address_without_a_path_is_that_of_the_metrics(
    engine: tuple[str, list[str]], address: str
) -> None:
    host, texts = engine
    texts.append(metrics(100, 1000, 4))
    assert read_url(address.format(host)).figures["lookup_misses", ""] == 11


def test_from_an_engine(engine: tuple[str, list[str]]) -> None:
    address, texts = engine
    texts.append(metrics(100, 1000, 4))
    answer = call("top", "--url", address, "--json")
    assert answer.code == ExitCode.OK and answer.document["misses"] == 11
    assert [tier["tier"] for tier in answer.document["tiers"]] == ["cpu", "nvme"]
    shown = call("top", "--url", f"http://{address}/metrics", "--once").out
    assert "nvme" in shown and "misses 11" in shown and " 250 " in shown
    assert render(frame("x", read_url(address)))


def test_an_engine_without_our_metrics(engine: tuple[str, list[str]]) -> None:
    address, texts = engine
    texts.append("# TYPE a gauge\na 1\n")
    answer = call("top", "--url", address, "--json")
    assert answer.code == ExitCode.CANNOT_OPEN and "no metrics of kvcascade" in answer.out
    assert "the first request" in answer.out, "before it an engine has none"
    texts[0] = "a{{{ 1"
    assert call("top", "--url", address).code == ExitCode.CANNOT_OPEN


@pytest.mark.parametrize(
    "answer",
    [
        "SSH-2.0-OpenSSH_9.2\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1000\r\nvllm:kvcascade_x 1\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        "HTTP/1.1 200 OK\r\nX: " + "a" * 70_000 + "\r\n\r\n",
        "HTTP/1.1 200 " + "a" * 60_000 + "\n",
        "",
    ],
)
def test_what_speaks_no_http_is_one_sentence(answer: str) -> None:
    with metrics_server([answer], has_head=False) as address:
        said = call("top", "--url", address, "--once")
    assert said.code == ExitCode.CANNOT_OPEN and len(said.err) < 400
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("url", ["http://a b/x", "localhost:port", "http://[::1/x", ""])
def test_what_is_no_address_is_one_sentence(url: str) -> None:
    said = call("top", "--url", url, "--once")
    assert said.code == ExitCode.CANNOT_OPEN and said.err.count("\n") == 1


def test_figures_that_are_no_numbers_are_left_out(engine: tuple[str, list[str]]) -> None:
    address, texts = engine
    used = 'vllm:kvcascade_tier_used_ratio{tier="[/x]"}'
    texts.append(f'{used} NaN\nvllm:kvcascade_tier_blocks{{tier="[/x]"}} +Inf\n'
                 'vllm:kvcascade_loaded_blocks_total{tier="[/x]"} 3\n')  # fmt: skip
    (tier,) = call("top", "--url", address, "--json").document["tiers"]
    assert (tier["used_ratio"], tier["blocks"], tier["hits"]) == (None, None, 3)
    assert "[/x]" in call("top", "--url", address, "--once").out


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PathEngine]:
    """An engine with a process of its own, and 20 blocks."""
    with running_engine(tmp_path / "kv", 20) as engine:
        yield engine


def test_from_a_path(tmp_path: Path) -> None:
    fill_path(tmp_path, 20)
    (tier,) = call("top", tmp_path, "--json").document["tiers"]
    slots = call("inspect", tmp_path, "--json").one["capacity_slots"]
    assert (tier["blocks"], tier["down_bytes"], tier["up_bytes"]) == (20, 20 * BLOCK, 0)
    assert tier["used_ratio"] == 20 / slots, "of the capacity, and not of the files so far"
    assert "20" in call("top", tmp_path, "--once").out


def test_beside_an_engine(tmp_path: Path, server: PathEngine) -> None:
    other = fill_path(tmp_path / "kv", 3, NamespaceKey("other", {"n": 1}))
    readings = PathReadings(tmp_path / "kv", clock=iter((10.0, 12.0)).__next__)
    before = readings.read()
    server.store(range(100, 120))
    now = readings.read()
    tiers = {each.tier: each for each in frame("x", now, before).tiers}
    assert tiers.pop(other.name).blocks == 3
    (tier,) = tiers.values()
    assert (tier.blocks, tier.down_bytes_per_s) == (40, 10 * BLOCK)
    assert call("top", tmp_path / "kv", "--once").code == ExitCode.OK


def test_a_path_without_a_writer_is_opened_once(tmp_path: Path) -> None:
    """Opening it for each picture would wear the disk, and keep engines from leading."""
    folder = fill_path(tmp_path, 20)
    readings = PathReadings(tmp_path)
    first = readings.read()
    opened = (folder / "state" / "session").read_bytes()
    assert readings.read().figures == first.figures
    assert (folder / "state" / "session").read_bytes() == opened
    engine = engine_on(tmp_path)
    engine.store(range(20, 24))
    assert readings.read().figures["tier_blocks", folder.name] == 24
    engine.close()
    assert readings.read().figures["demoted_bytes", folder.name] == 24 * BLOCK


def test_a_stopped_writer_is_named(tmp_path: Path, server: PathEngine) -> None:
    server.signal(signal.SIGSTOP)
    answer = call("top", tmp_path / "kv", "--json")
    assert answer.code == ExitCode.PROBLEMS
    (tier,) = answer.document["tiers"]
    assert (tier["blocks"], tier["down_bytes"]) == (20, None)
    assert "which is stopped" in tier["problem"]
    assert "which is stopped" in " ".join(call("top", tmp_path / "kv", "--once").out.split())


def test_a_budget_is_shown(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    root.mkdir()
    options = PathOptions(64 << 20, segment_bytes=8 * BLOCK, write_budget_bytes=1 << 20)
    PathEngine([root], options, is_thread=True).open().close()
    (tier,) = call("top", root, "--json").document["tiers"]
    assert tier["budget_left_bytes"] == 1 << 20
    assert "may write 1.0 MiB" in call("top", root, "--once").out


def test_one_of_the_two(tmp_path: Path) -> None:
    assert call("top").code == ExitCode.USAGE
    assert call("top", tmp_path, "--url", "x").code == ExitCode.USAGE


def test_one_unreadable_namespace_hides_nothing_of_the_others(tmp_path: Path) -> None:
    folders = sorted(fill_two(tmp_path, {"a": "1"}, {"a": "2"}))
    (folders[0] / "blocks" / "data.mdb").write_bytes(bytes(8192))
    answer = call("top", tmp_path, "--json")
    assert answer.code == ExitCode.PROBLEMS
    broken, whole = answer.document["tiers"]
    assert broken["down_bytes"] is None and "remove" in broken["problem"]
    assert (whole["blocks"], whole["problem"]) == (20, None)
    shown = call("top", tmp_path, "--once")
    assert shown.code == ExitCode.PROBLEMS and "damaged" in " ".join(shown.out.split())
    (folders[0] / "namespace.json").write_text("{")
    assert call("top", folders[0], "--once").code == ExitCode.CANNOT_OPEN
    assert call("top", folders[1], "--once").code == ExitCode.OK


def test_namespaces_of_version_2_are_left_out(tmp_path: Path) -> None:
    fill_path(tmp_path / "kv", 20)
    old = of_version_2(tmp_path / "kv")
    answer = call("top", tmp_path / "kv", "--json")
    assert answer.code == ExitCode.OK and len(answer.document["tiers"]) == 1
    answer = call("top", old, "--once")
    assert answer.code == ExitCode.CANNOT_OPEN and "--remove-namespace" in answer.err


def test_damage_of_the_path(tmp_path: Path) -> None:
    folder = fill_path(tmp_path)
    (tmp_path / ".kvcascade" / "path.json").write_text("{")
    answer = call("top", tmp_path, "--json")
    (tier,) = answer.document["tiers"]
    assert answer.code == ExitCode.PROBLEMS and tier["blocks"] == 20
    assert "path.json is damaged" in tier["problem"]
    (folder / "presence").write_bytes(b"short")
    answer = call("top", tmp_path, "--once")
    assert answer.code == ExitCode.CANNOT_OPEN and answer.err.count("\n") == 1


@pytest.mark.parametrize("width", [80, 120])
def test_a_tier_takes_two_lines(width: int) -> None:
    """A name and its state, and the figures."""
    names = [f"meta-llama--Llama-3.1-8B-Instruct-{number}a2b3c4d5e6f" for number in (1, 2)]
    shown = StringIO()
    figures = TierFrame(
        "", 1e6, 0.5, 0.1, None, None, 54321.0, up_bytes_per_s=9e8, down_bytes_per_s=9e8,
        up_latency_s=1.5,
    )  # fmt: skip
    tiers = [replace(figures, tier=name) for name in names]
    Console(file=shown, width=width).print(render(Frame("http://host:8000", tiers)))
    lines = [line for line in shown.getvalue().splitlines() if line.strip()]
    assert all(sum(name in line for line in lines) == 1 for name in names)
    for figure in ("1,000,000", "858.3 MiB/s  858.3 MiB/s", "54,321", "1,500"):
        assert sum(figure in line for line in lines) == 2, figure
    assert len(lines) == 1 + 2 + 2 + 2, "title, names, head of the table, figures"


def test_a_live_view_goes_on_after_a_reading_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """It ended with the engine, which may only restart."""
    figures = {("lookup_misses", ""): 7.0, ("tier_blocks", "cpu"): 1.0}
    gone = TierIOError(errno.EIO, "the address gives no metrics")
    steps: list[Reading | TierIOError] = [
        Reading(1, figures), gone, gone, Reading(9, {**figures, ("lookup_misses", ""): 15.0})
    ]  # fmt: skip
    left, pauses = iter(steps), list[float]()

    def read() -> Reading:
        step = next(left, None)
        if step is None:
            raise KeyboardInterrupt
        if isinstance(step, TierIOError):
            raise step
        return step

    with pytest.raises(KeyboardInterrupt):
        run("x", read, 2.0, pauses.append)
    assert pauses == [2.0] * 4, "as often as before"
    assert "misses/s 1 " in capsys.readouterr().out, "since the last one that succeeded"
    steps[:] = [gone]
    left = iter(steps)
    with pytest.raises(TierIOError):
        run("x", read, 2.0, pauses.append)


def test_the_reason_of_a_reading_that_fails_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    steps, pauses = [Reading(1, {("tier_blocks", "cpu"): 1.0})], list[float]()

    def read() -> Reading:
        if not steps:
            raise TierIOError(errno.EIO, "the address gives no metrics")
        return steps.pop()

    def pause(seconds: float) -> None:
        if pauses:
            raise KeyboardInterrupt
        pauses.append(seconds)

    with pytest.raises(KeyboardInterrupt):
        run("x", read, 2.0, pause)
    assert "the address gives no metrics" in capsys.readouterr().out


@pytest.mark.parametrize("interval", ["1e30", "nan", "inf", "0"])
def test_an_interval_that_no_clock_can_wait_is_a_wrong_call(interval: str) -> None:
    answer = call("top", "--url", "localhost:1", "--interval", interval)
    assert answer.code == ExitCode.USAGE and "--interval" in answer.err
