"""The drive without an engine, on the CPU: restarts, damage, what is left open."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from support.bench_scale import SMOKE
from support.waiting import wait_until

from kvcascade.tiers.base import BlockHash
from kvcascade.tiers.cpu.arena import DEFAULT_ARENA_DIR
from kvcascade.tiers.cpu.cpu_backend import collector_paused
from kvcascade.tools.commands.bench.bench_results import OURS, BenchError
from kvcascade.tools.dev.bench import round_trip
from kvcascade.tools.dev.bench.gpu.gpu import GpuShape
from kvcascade.tools.dev.bench.measurement import MeasurementSetup, run
from kvcascade.tools.dev.bench.round_trip import (
    BROUGHT_UP,
    LOADED,
    OPENED,
    STORED,
    WRITTEN,
    RoundTrip,
    drive,
)
from kvcascade.tools.dev.bench.round_trip.drive import DrivenEngine, RequestPart

SMALL = GpuShape("small", 3, 4096)
BLOCKS = 24


def test_every_byte_comes_back(tmp_path: Path) -> None:
    found = RoundTrip(tmp_path / "tier", "cpu", SMALL, BLOCKS)()
    assert set(found) == {STORED, WRITTEN, BROUGHT_UP, LOADED, OPENED}
    assert all(figure and figure > 0 for figure in found.values())


def test_it_says_what_it_ran_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_trip, "SHAPE", SMALL)
    notes: list[str] = []
    setup = MeasurementSetup(tmp_path, SMOKE, lambda line: None, note=notes.append)
    cases = list(round_trip.cases(setup, "cpu"))
    assert len(cases) == 1 and "cpu" in cases[0].label and "CUDA" in notes[0]
    rows = run(round_trip.MEASUREMENT, setup).rows
    assert len(rows) == 5 and all(row.samples[OURS] for row in rows)
    assert not (tmp_path / "tier").exists()


@pytest.mark.parametrize(("free_mib", "blocks"), [(1 << 20, 64), (64, 8), (8, 0)])
def test_it_takes_no_more_than_there_is(
    free_mib: int, blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(round_trip, "SHAPE", GpuShape("one MiB", 1, 1 << 20))
    usage = SimpleNamespace(free=free_mib << 20)
    monkeypatch.setattr(round_trip, "psutil", SimpleNamespace(disk_usage=lambda path: usage))
    scale = replace(SMOKE, transfer_bytes=64 << 20)
    setup = MeasurementSetup(tmp_path / "folder", scale, lambda line: None, note=notes.append)
    cases = list(round_trip.cases(setup, "cpu"))
    assert [case.label.split()[0] for case in cases] == ([str(blocks)] if blocks else [])
    assert any("--shm-size" in note for note in notes) is (blocks < 64)


def arenas() -> set[str]:
    """Arenas that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line for line in lines if f"{DEFAULT_ARENA_DIR}/kvcascade-" in line}


class Watched(RoundTrip):
    """Notes the mapped arenas before each opening."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "cpu", SMALL, BLOCKS)
        self.mapped: list[set[str]] = []

    def _open(self, tensors: Sequence[torch.Tensor]) -> DrivenEngine:
        self.mapped.append(arenas())
        return super()._open(tensors)


def test_one_arena_is_there_at_a_time(tmp_path: Path) -> None:
    """Only one needs to fit into shared memory."""
    trip = Watched(tmp_path / "tier")
    with collector_paused():
        trip()
        before, between = trip.mapped
    assert between <= before


class Halted(RoundTrip):
    """Changes what lies on the disk before everything is opened again."""

    opened = 0

    def _open(self, tensors: Sequence[torch.Tensor]) -> DrivenEngine:
        self.opened += 1
        if self.opened == 2:
            for path in self._folder.rglob("*.safetensors"):
                with path.open("r+b") as file:
                    file.seek(4096 + 100)  # of the first slot
                    file.write(b"other bytes")
        return super()._open(tensors)


def test_a_damaged_block_is_missed_and_never_loaded(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="in no tier"):
        Halted(tmp_path / "tier", "cpu", SMALL, BLOCKS)()


def test_other_bytes_are_noticed() -> None:
    before = [torch.arange(8, dtype=torch.int8).reshape(4, 2)]
    after = [before[0].flip(0)]
    keys = [BlockHash(b"%d" % i) for i in range(4)]
    there, back = [RequestPart(keys, [0, 1, 2, 3])], [RequestPart(keys, [3, 2, 1, 0])]
    round_trip._compare(after, before, there, back)
    after[0][1, 1] += 1
    with pytest.raises(BenchError, match="other bytes"):
        round_trip._compare(after, before, there, back)


def test_a_tier_that_cannot_be_driven_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(psutil.Process().children())  # other tests may have left a resource tracker
    trip = RoundTrip(tmp_path / "tier", "cpu", SMALL, BLOCKS)
    monkeypatch.setattr(drive, "CascadingOffloadingManager", _refuse)
    with pytest.raises(BenchError, match="refused"):
        trip()
    assert not set(psutil.Process().children()) - before


def _refuse(*arguments: object) -> DrivenEngine:
    raise BenchError("refused")


def test_no_thread_is_left(tmp_path: Path) -> None:
    before = set(threading.enumerate())  # those of other tests may end meanwhile
    RoundTrip(tmp_path / "tier", "cpu", SMALL, 4)()
    wait_until(lambda: before.issuperset(threading.enumerate()))


def test_what_the_tier_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_trip, "NEEDED", ("kvcascade", "no_such_module"))
    notes: list[str] = []
    setup = MeasurementSetup(tmp_path, SMOKE, lambda line: None, note=notes.append)
    assert not list(round_trip.cases(setup, "cpu"))
    assert notes == ["the NVMe tier needs no_such_module: pip install no_such_module"]
