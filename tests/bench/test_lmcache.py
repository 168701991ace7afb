"""LMCache as a contender: its version, and its tiers behind pipes, in a process that only acts."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
import typer

from kvcascade.tools.commands.bench.bench_results import LMCACHE, BenchError
from kvcascade.tools.commands.command_line import ExitCode
from kvcascade.tools.dev import bench
from kvcascade.tools.dev.bench import BenchOptions, faults
from kvcascade.tools.dev.bench.measurement import MeasurementSetup
from kvcascade.tools.dev.bench.peers import lmcache_peer
from kvcascade.tools.dev.bench.peers.lmcache_peer import LMCacheTiers, version_of
from kvcascade.tools.dev.bench.peers.vllm_calls import random_keys
from kvcascade.tools.dev.bench.scale import QUICK

PYTHON = Path(sys.executable)
ACTOR = """
import json, sys
adapter, device, block_bytes, blocks = sys.argv[1:]
kept = json.loads(adapter)["base_path"] + "/kept"
print(json.dumps({"open": True}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["do"] == "store":
        data = open(device, "rb").read()
        open(kept, "wb").write(data)
    else:
        with open(device, "r+b") as memory:
            memory.write(open(kept, "rb").read())
    print(json.dumps({"blocks": list(range(len(asked["keys"]) - 1))}), flush=True)
"""
"""A cache that loses the last block, in place of `lmcache_tiers`."""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "actor.py"
    path.write_text(ACTOR)
    monkeypatch.setattr(lmcache_peer, "DRIVER", path)
    (tmp_path / "disk0").mkdir()
    return path


def test_blocks_pass_through_the_process(tmp_path: Path, driver: Path) -> None:
    device = torch.arange(4, dtype=torch.int8).repeat_interleave(4096).view(4, -1)
    stored, keys = device.clone(), random_keys(4)
    with closing(LMCacheTiers(PYTHON, device, tmp_path / "disk0")) as cache:
        cache.store(keys)
    device.zero_()
    with closing(LMCacheTiers(PYTHON, device, tmp_path / "disk0")) as cache:
        assert cache.ask(keys) == [0, 1, 2]
    assert torch.equal(device, stored)


def test_a_process_that_ends_is_an_error_with_its_words(tmp_path: Path, driver: Path) -> None:
    driver.write_text("raise SystemExit('no such adapter')")
    with pytest.raises(BenchError, match="no such adapter"):
        LMCacheTiers(PYTHON, torch.zeros((1, 4096), dtype=torch.int8), tmp_path / "disk0")


def test_an_environment_without_it_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BenchError, match="has no lmcache"):
        version_of(tmp_path / "python")
    asked = BenchOptions(only=("faults",), out=tmp_path, lmcache_python=tmp_path / "python")
    with pytest.raises(typer.Exit) as ended:
        bench.run(asked)
    assert ended.value.exit_code == ExitCode.PROBLEMS
    assert "--lmcache-python" in capsys.readouterr().err


@pytest.mark.parametrize("python", [None, PYTHON])
def test_faults_are_made_for_it_where_it_is(tmp_path: Path, python: Path | None) -> None:
    notes: list[str] = []
    setup = MeasurementSetup(tmp_path, QUICK, print, note=notes.append, lmcache_python=python)
    for case in faults.cases(setup):
        assert (LMCACHE in case.contenders) is (python is not None)
    assert len(notes) == (python is None)
