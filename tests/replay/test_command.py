"""The command: tables, JSON, a sweep with CSV and picture, and one sentence for what is wrong."""

from __future__ import annotations

import csv
import json
import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from support.bench_file import write_bench

from kvcascade.errors import FormatError
from kvcascade.tools.__main__ import main
from kvcascade.tools.commands.command_line import SCHEMA_VERSION, ExitCode
from kvcascade.tools.commands.progress import counting
from kvcascade.tools.replay.rates import (
    ASSUMED_CPU,
    ASSUMED_READ,
    ASSUMED_WRITE,
    DiskRates,
    measured_rates,
    rates_of_bench,
    with_rates,
)
from kvcascade.tools.replay.tier_options import parse_tier
from kvcascade.tools.replay.virtual import Rate, RateSource


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Twenty sessions of three turns, twice as many blocks as the small tier below holds."""
    lines = [
        {
            "timestamp": 1000 * (turn * 20 + session),
            "input_length": 512 * 2 * (turn + 1),
            "output_length": 1,
            "hash_ids": list(range(100 * session, 100 * session + 2 * (turn + 1))),
        }
        for turn in range(3)
        for session in range(20)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


CALL = ("--kv-bytes-per-token", "2", "--tier", "cpu=60KiB", "--tier", "nvme=1MiB,lru,read=1MB")


def test_tables(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", trace, *CALL, "--prefill-tokens-per-s", "1000"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for part in ("60 requests", "prefix-hit tokens", "drive writes per day", "break-even of nvme"):
        assert part in printed
    assert "so does this one" not in printed, "without a latency no prompt is too short"
    assert main(["replay", trace, *CALL[:-1], "nvme=1MiB,lru,read=1MB,latency=0.5",
                 "--prefill-tokens-per-s", "1000"]) == 0  # fmt: skip
    assert "so does this one below" in " ".join(capsys.readouterr().out.split())


def test_json(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", trace, *CALL, "--json", "--limit", "30"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["schema_version"]) == ("kvcascade.replay", SCHEMA_VERSION)
    assert (found["requests"], found["ttft_s"]) == (30, None)
    assert [tier["name"] for tier in found["tiers"]] == ["cpu", "nvme"]


def test_a_bar_shows_the_progress_on_a_terminal_only() -> None:
    for is_terminal in (True, False):
        shown = StringIO()
        console = Console(file=shown, force_terminal=is_terminal)
        with counting("replay", "requests", total=4, console=console) as advance:
            for _ in range(3):
                advance(1)
        assert ("75%" in shown.getvalue()) is is_terminal
        rate = re.search(r"3 requests, [\d,]+/s", shown.getvalue())
        assert (rate is not None) is is_terminal


def test_a_sweep_as_json(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", trace, *CALL, "--policies", "lru,arc", "--json", "--limit", "30"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "kvcascade.replay-sweep"
    assert [(point["policy"], point["requests"]) for point in found["points"]] == [
        ("lru", 30),
        ("arc", 30),
    ]
    assert main(["replay", trace, *CALL, "--sweep", "dram=1MiB", "--json"]) == ExitCode.USAGE
    assert json.loads(capsys.readouterr().out)["error"] == "usage"


def test_what_cannot_be_read_is_no_wrong_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(tmp_path / "nowhere.jsonl"), *CALL]) == ExitCode.CANNOT_OPEN
    said = capsys.readouterr().err
    assert "nowhere.jsonl" in said and "Errno" not in said


@pytest.mark.parametrize("option", ["--csv", "--plot"])
def test_a_file_that_cannot_be_written_is_all_that_is_said(
    trace: str, tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where it turns out at the end only: what is on standard output is one document."""
    sweep = [*CALL, "--policies", "lru", "--json", option]
    assert main(["replay", trace, *sweep, str(tmp_path / "no" / "file")]) == ExitCode.USAGE
    assert option in json.loads(capsys.readouterr().out)["message"]
    assert main(["replay", trace, *sweep, "/dev/full"]) == ExitCode.NO_SPACE
    assert json.loads(capsys.readouterr().out)["error"] == "no_space"


def test_sweep(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, png = tmp_path / "s.csv", tmp_path / "s.png"
    sweep = ["--sweep", "cpu=16KiB,64KiB,1MiB", "--policies", "lru,arc"]
    call = ["--kv-bytes-per-token", "2", "--tier", "cpu=60KiB", *sweep]
    assert main(["replay", trace, *call, "--csv", str(out), "--plot", str(png)]) == 0
    assert "arc" in capsys.readouterr().out
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert len(rows) == 6
    lru = [float(row["hit_ratio"]) for row in rows if row["policy"] == "lru"]
    assert lru == sorted(lru) and lru[0] < lru[-1] == pytest.approx(0.5)
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--tier", "cpu=1MiB"], "give --model"),
        (["--model", "gpt-9", "--tier", "cpu=1MiB"], "'gpt-9' is not a folder with a config.json"),
        (["--kv-bytes-per-token", "2", "--tier", "cpu"], "write it as NAME=SIZE"),
        (["--kv-bytes-per-token", "2", "--tier", "cpu=1MiB,best"], "'best' is not known"),
        (["--kv-bytes-per-token", "2", "--tier", "cpu=1MiB,reed=4"], "'reed'"),
        (["--kv-bytes-per-token", "2", "--tier", "cpu=1MiB,write_budget=x"], "DWPD"),
        (["--kv-bytes-per-token", "2", "--tier", "cpu=1MiB,admission=x"], "admission 'x'"),
        ([*CALL, "--write-mode", "never"], "use one of demote, back, through"),
        (["--kv-bytes-per-token", "2", "--tier", "cpu=lots"], "'lots'"),
        (["--kv-bytes-per-token", "2", "--tier", "cpu=1MiB,latency=x"], "give seconds"),
        (["--kv-bytes-per-token", "2", "--tier", "cpu=1000"], "hold no block"),
        ([*CALL, "--tier", "nvme=2MiB"], "two of cpu, nvme, nvme have one name"),
        ([*CALL, "--tier", "nvme=2MiB", "--sweep", "nvme=1MiB,2MiB"], "have one name"),
        ([*CALL, "--sweep", "dram=1MiB"], "there is no tier 'dram'"),
        ([*CALL, "--sweep", "cpu"], "is not a list"),
        ([*CALL, "--csv", "sweep.csv"], "add --sweep or --policies"),
        ([*CALL, "--plot", "sweep.png"], "add --sweep or --policies"),
    ],
)
def test_wrong_calls(
    trace: str, arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", trace, *arguments]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert problem in said and said.count("\n") == 1


def test_rates_from_a_benchmark(tmp_path: Path) -> None:
    """Those of the nearest block size; two disks at once are faster than the one of a tier."""
    rates = {"64 KiB blocks": 1.0, "512 KiB blocks": 2.5, "512 KiB blocks, two paths": 9.0}
    path = tmp_path / "bench.json"
    write_bench(path, lambda case: rates.get(case, 4.0))
    of_bench = Rate(2.5e9, 0.0, RateSource.BENCH)
    assert rates_of_bench(path, 400_000) == DiskRates(of_bench, of_bench)
    assert rates_of_bench(path, 100 << 20).read.bytes_per_s == 4e9


def test_a_given_rate_comes_first_and_a_disk_says_nothing_of_memory() -> None:
    bench = Rate(2.5e9, 0.0, RateSource.BENCH)
    given = [parse_tier(text) for text in ("cpu=1KiB", "a=1KiB,latency=0.5", "b=1KiB,read=1GB")]
    top, a, b = with_rates(given, DiskRates(bench, bench))
    assert top.read == ASSUMED_CPU
    assert a.read == a.write == Rate(2.5e9, 0.5, RateSource.BENCH)
    assert (b.read, b.write) == (Rate(1e9, 0.0, RateSource.GIVEN), bench)


def test_rates_are_assumed_and_said_to_be(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["--kv-bytes-per-token", "2", "--tier", "cpu=60KiB", "--tier", "nvme=1MiB"]
    assert main(["replay", trace, *call, "--json"]) == 0
    top, nvme = json.loads(capsys.readouterr().out)["tiers"]
    assert (top["read"]["bytes_per_s"], top["read"]["source"]) == (20e9, "assumed")
    assert top["write"] is None
    for key, rate in (("read", ASSUMED_READ), ("write", ASSUMED_WRITE)):
        assert nvme[key] == {
            "bytes_per_s": rate.bytes_per_s,
            "latency_s": rate.latency_s,
            "source": "assumed",
        }
    assert main(["replay", trace, *call]) == 0
    assert "assumed" in capsys.readouterr().out


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    rates = measured_rates(tmp_path, 5000, total_bytes=1 << 20)
    assert rates.read.source is rates.write.source is RateSource.MEASURED
    assert 1e5 < rates.write.bytes_per_s < 1e12 and 1e5 < rates.read.bytes_per_s < 1e12
    assert not list(tmp_path.iterdir())


def test_a_folder_to_measure_that_is_not_there(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = str(tmp_path / "gone")
    assert main(["replay", trace, *CALL, "--path", gone]) == ExitCode.CANNOT_OPEN
    said = capsys.readouterr().err
    assert gone in said and said.count("\n") == 1


def test_a_file_without_transfers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    for text in ("{", "[]", '{"measurements": []}'):
        path.write_text(text)
        with pytest.raises(FormatError, match="bench PATH --json"):
            rates_of_bench(path, 400_000)


def test_the_model_of_a_config_file(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}))
    for model in (config, tmp_path):
        call = ["--model", str(model), "--tier", "cpu=1GiB", "--json", "--limit", "2"]
        assert main(["replay", trace, *call]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["block_bytes"] == 512 * 2 * 4 * 2 * 8 * 2


@pytest.mark.parametrize(
    ("size", "given", "mode"),
    [
        ("120KiB", [], "back"),
        ("119KiB", [], "demote"),
        ("1MiB", ["--write-mode", "through"], "through"),
    ],
)
def test_the_write_mode_is_that_of_an_engine(
    trace: str, size: str, given: list[str], mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers = ["--tier", "cpu=60KiB", "--tier", f"nvme={size}", "--kv-bytes-per-token", "2"]
    assert main(["replay", trace, *tiers, *given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["write_mode"] == mode


def test_each_run_of_a_sweep_has_the_mode_and_the_budget_of_its_size(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers = ["--tier", "cpu=60KiB", "--tier", "nvme=1MiB,lru,write_budget=2 DWPD"]
    call = [*tiers, "--kv-bytes-per-token", "2", "--sweep", "nvme=64KiB,512KiB", "--json"]
    assert main(["replay", trace, *call]) == 0
    small, large = json.loads(capsys.readouterr().out)["points"]
    assert (small["write_mode"], large["write_mode"]) == ("demote", "back")
    budgets = [point["tiers"][1]["write_budget_bytes"] for point in (small, large)]
    assert budgets == [128 << 10, 1 << 20]
