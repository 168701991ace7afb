"""The command: its arguments, what it refuses, and every measurement at the smallest size."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from support.bench_scale import SMOKE
from support.clock import ManualClock

from kvcascade.errors import ConfigError
from kvcascade.tools.__main__ import main
from kvcascade.tools.commands.bench.bench_results import (
    OURS,
    VLLM,
    BenchError,
    Quantity,
    Row,
    Table,
)
from kvcascade.tools.commands.bench.machine_facts import headline, machine_facts, version_facts
from kvcascade.tools.commands.command_line import SCHEMA_VERSION, ExitCode
from kvcascade.tools.dev import bench
from kvcascade.tools.dev import dev_commands as command
from kvcascade.tools.dev.bench import BenchOptions
from kvcascade.tools.dev.bench.measurement import MeasurementSetup
from kvcascade.tools.dev.bench.scale import FULL, QUICK

LOG_LEVEL = "VLLM_LOGGING_LEVEL"
EVERYTHING = {
    "manager": (7 + 3) * len(SMOKE.manager_blocks) + 7,
    "lookups": 7 * len(SMOKE.index_blocks),
    "transfers": 2 * len(SMOKE.block_sizes) + 3,
    "busy": 9,
    "reopening": 12 * len(SMOKE.reopen_blocks),
    "path": 8 + 12 * len(SMOKE.path_blocks),
}
"""Rows of each measurement."""


def status_of(options: BenchOptions) -> int:
    """The exit status of a run that fails."""
    with pytest.raises(typer.Exit) as ended:
        bench.run(options)
    return ended.value.exit_code


def test_arguments() -> None:
    assert bench.scale_of(BenchOptions()) == FULL
    assert bench.scale_of(BenchOptions(quick=True)) == QUICK
    assert bench.scale_of(BenchOptions(quick=True, repeats=7)).repeats == 7


def test_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[BenchOptions] = []

    monkeypatch.setattr(command, "run", asked.append)
    assert main(["bench"]) == 0
    words = "bench --quick --only busy --only manager --repeats 3"
    more = "--path /mnt --out here --json --minutes 7 --lmcache-python python"
    assert main([*words.split(), *more.split()]) == 0
    places = (Path("/mnt"), Path("here"))
    assert asked == [
        BenchOptions(),
        BenchOptions(
            True,
            ("busy", "manager"),
            3,
            *places,
            as_json=True,
            minutes=7.0,
            lmcache_python=Path("python").absolute(),
        ),
    ]
    assert "--lmcache-python PYTHON" in bench.command_of(asked[1])


def test_measurements_on_a_gpu_are_bounded_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.minutes_of(BenchOptions(only=("gpu",))) == bench.BARE_MINUTES
    assert bench.minutes_of(BenchOptions(only=("gpu", "busy"))) == math.inf
    assert bench.minutes_of(BenchOptions()) == math.inf
    asked = BenchOptions(only=("round_trip",), minutes=0.0, out=tmp_path)
    assert bench.minutes_of(asked) == 0
    bench.run(asked)
    said = "round_trip is not measured, the time is up; --minutes gives more"
    assert json.loads((tmp_path / "bench.json").read_text())["notes"] == [said]
    assert said in " ".join(capsys.readouterr().out.split())


def test_the_round_trip_has_time_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first part, for which there is a GPU, ends before the limit; the engine has none."""
    clock, asked = ManualClock(), dict[str, list[bool]]()

    def measure(name: str, setup: MeasurementSetup) -> Table:
        began_s = clock.now_s
        for passed_s in (239.0, 241.0, 299.0, 301.0):
            clock.now_s = began_s + passed_s
            asked.setdefault(name, []).append(setup.has_time())
        clock.now_s = began_s
        return Table(name, name, "", [])

    monkeypatch.setattr(bench, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(bench, "measure", measure)
    bench.run(BenchOptions(only=("gpu",), out=tmp_path))
    assert asked == {
        "gpu": [True, False, False, False],
        "round_trip": [True, True, True, False],
        "gpu_engine": [True, True, True, True],
    }


def test_a_gpu_is_asked_everything_it_is_there_for() -> None:
    assert bench.names_of(["gpu"], FULL) == ["gpu", "round_trip", "gpu_engine"]
    assert bench.names_of(["busy", "round_trip"], FULL) == ["busy", "round_trip"]
    assert not {"gpu", "round_trip", "gpu_engine"} & {*bench.names_of((), FULL)}


@pytest.mark.parametrize(
    "wrong",
    [["--only", "sleep"], ["--repeats", "0"], ["--repeats", "x"], ["one", "two"]],
)
def test_wrong_arguments(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *wrong]) == ExitCode.USAGE
    assert "Usage: kvcascade bench" in capsys.readouterr().err


def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "NEEDED", ("kvcascade", "no_such_module"))
    assert status_of(BenchOptions()) == ExitCode.MISSING
    assert capsys.readouterr().err.startswith("bench: no_such_module not found")


def test_facts(tmp_path: Path) -> None:
    machine, versions = machine_facts(tmp_path), version_facts()
    assert machine["cores"] >= 1 and machine["memory_bytes"] > 0 and machine["file_system"]
    line = headline({"machine": machine, "versions": versions})
    assert versions["kvcascade"] in line and "\n" not in line
    free = machine["shared_memory_free_bytes"] / 2**30
    assert f"{free:.1f} GiB free in /dev/shm" in line


def test_a_machine_without_proc_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.PROCFS_PATH", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="mount /proc"):
        machine_facts(tmp_path)


def test_facts_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine_facts(tmp_path)["gpu"]["driver"] == "unknown"
    asked = tmp_path / "nvidia-smi"
    asked.write_text(f"#!{sys.executable}\nprint('580.65.06\\n580.65.06')\n")
    asked.chmod(0o755)
    machine = machine_facts(tmp_path)
    gpu = {"name": "NVIDIA H100 80GB HBM3", "driver": "580.65.06", "cuda": "13.0"}
    assert machine["gpu"] == gpu
    line = headline({"machine": machine, "versions": version_facts()})
    assert all(value in line for value in gpu.values())
    asked.write_text(f"#!{sys.executable}\nraise SystemExit(9)\n")
    assert machine_facts(tmp_path)["gpu"]["driver"] == "unknown"


def test_every_measurement_at_the_smallest_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "scale_of", lambda options: SMOKE)
    log_level, handler = os.environ.get(LOG_LEVEL), signal.getsignal(signal.SIGTERM)
    bench.run(BenchOptions(out=tmp_path))
    assert os.environ.get(LOG_LEVEL) == log_level, "engines started later would be silent"
    assert signal.getsignal(signal.SIGTERM) == handler
    found = json.loads((tmp_path / "bench.json").read_text())
    assert {"machine", "versions", "is_quick", "repeats", "seconds"} <= found.keys()
    rows = {table["name"]: table["rows"] for table in found["measurements"]}
    assert {name: len(each) for name, each in rows.items()} == EVERYTHING
    assert all(row["samples"][OURS] for each in rows.values() for row in each if _has_ours(row))
    for name in ("manager", "lookups", "transfers", "busy"):
        assert any(VLLM in row["samples"] for row in rows[name]), name
    recency = [row for row in rows["reopening"] if row["quantity"].startswith("recency kept")]
    assert recency and all(row["samples"][OURS] == [100.0] for row in recency), (
        "another measurement used blocks of the same tier"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]
    assert "saved" in capsys.readouterr().out


def test_results_without_a_place_are_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(name: str, setup: MeasurementSetup) -> Table:
        raise AssertionError(f"{name} was measured")

    monkeypatch.setattr(bench, "measure", measure)
    (tmp_path / "file").write_text("")
    assert status_of(BenchOptions(out=tmp_path / "file")) == ExitCode.CANNOT_OPEN


def test_what_was_measured_is_saved_when_the_rest_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(name: str, setup: MeasurementSetup) -> Table:
        setup.keep(Table(name, "", "", [Row("one", Quantity("a", "s"), {OURS: [1.0]})]))
        raise BenchError("no GPU any more")

    monkeypatch.setattr(bench, "measure", measure)
    assert status_of(BenchOptions(only=("gpu",), out=tmp_path)) == ExitCode.PROBLEMS
    (saved,) = json.loads((tmp_path / "bench.json").read_text())["measurements"]
    assert (saved["name"], saved["rows"][0]["samples"]) == ("gpu", {OURS: [1.0]})


def test_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "scale_of", lambda options: SMOKE)
    bench.run(BenchOptions(only=("lookups",), out=tmp_path, as_json=True))
    said = capfd.readouterr()
    head = {"schema": "kvcascade.bench", "schema_version": SCHEMA_VERSION}
    assert json.loads(said.out) == {**head, **json.loads((tmp_path / "bench.json").read_text())}
    assert "saved" in said.err


def _has_ours(row: dict[str, object]) -> bool:
    assert isinstance(row["samples"], dict)
    return OURS in row["samples"]
