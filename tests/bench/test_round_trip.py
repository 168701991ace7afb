"""The drive without an engine, on the CPU: both kinds of index, restarts, damage."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvcascade.tiers.base import BlockHash, BlockOutcome
from kvcascade.tiers.nvme.index.index_port import Removal
from kvcascade.tiers.nvme.segments.format import IndexEntry
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
)
from kvcascade.tools.dev.bench.round_trip.disk_tier import (
    LMDB,
    RECORDS,
    DiskTier,
    DiskTierOptions,
    RecordIndex,
    open_disk_tier,
)
from kvcascade.tools.dev.bench.round_trip.drive import DrivenEngine, RequestPart
from kvcascade.tools.dev.bench.scale import SMOKE

SMALL = GpuShape("small", 3, 4096)
BLOCKS = 24
with_lmdb = pytest.mark.skipif(not find_spec("lmdb"), reason="lmdb is not installed")
indices = pytest.mark.parametrize("index", [pytest.param(LMDB, marks=with_lmdb), RECORDS])


@indices
def test_every_byte_comes_back(index: str, tmp_path: Path) -> None:
    found = RoundTrip(tmp_path / "tier", "cpu", SMALL, BLOCKS, index)()
    assert set(found) == {STORED, WRITTEN, BROUGHT_UP, LOADED, OPENED}
    assert all(figure and figure > 0 for figure in found.values())


def test_it_says_what_it_ran_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_trip, "SHAPE", SMALL)
    monkeypatch.setattr(round_trip, "index_here", lambda: RECORDS)
    notes: list[str] = []
    setup = MeasurementSetup(tmp_path, SMOKE, lambda line: None, note=notes.append)
    cases = list(round_trip.cases(setup, "cpu"))
    assert len(cases) == 1 and RECORDS in cases[0].label and "cpu" in cases[0].label
    assert ["CUDA" in notes[0], "lmdb" in notes[1]] == [True, True]
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


@indices
def test_a_damaged_block_is_missed_and_never_loaded(index: str, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="in no tier"):
        Halted(tmp_path / "tier", "cpu", SMALL, BLOCKS, index)()


def test_other_bytes_are_noticed() -> None:
    before = [torch.arange(8, dtype=torch.int8).reshape(4, 2)]
    after = [before[0].flip(0)]
    keys = [BlockHash(b"%d" % i) for i in range(4)]
    there, back = [RequestPart(keys, [0, 1, 2, 3])], [RequestPart(keys, [3, 2, 1, 0])]
    round_trip._compare(after, before, there, back)
    after[0][1, 1] += 1
    with pytest.raises(BenchError, match="other bytes"):
        round_trip._compare(after, before, there, back)


def opened(folder: Path) -> DiskTier:
    return open_disk_tier(DiskTierOptions(folder, 8, 4096), RECORDS)


def write(disk: DiskTier, names: Sequence[str], slots: Sequence[int]) -> None:
    """Blocks whose bytes are their names."""
    keys = [BlockHash(name.encode()) for name in names]
    buffers = [memoryview(name.encode().ljust(4096)) for name in names]
    assert disk.store.write(keys, slots, buffers, 0) == [BlockOutcome.OK] * len(names)


def test_the_index_in_memory_comes_from_slot_records(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    write(disk, ["a", "b", "c"], [0, 1, 2])
    write(disk, ["d"], [1])  # takes the slot of b
    write(disk, ["a"], [5])  # leaves an older record of a behind
    disk.close()
    disk = opened(tmp_path)
    policy, free = disk.tier.policy, disk.tier.backend.get_num_free_blocks()
    held = {name: policy.get(BlockHash(name.encode())) for name in "abcd"}
    assert {n: s and s.block_id for n, s in held.items()} == {"a": 5, "b": None, "c": 2, "d": 1}
    assert free == 5
    buffer = memoryview(bytearray(4096))
    key = BlockHash(b"d")
    assert disk.store.read([key], [1], [buffer]) == [BlockOutcome.OK]
    assert bytes(buffer).rstrip() == b"d"
    write(disk, ["e"], [1])
    assert disk.store.read([key], [1], [buffer]) == [BlockOutcome.GONE]
    disk.close()


class NoSegments:
    """Of which there are none."""

    numbers: tuple[int, ...] = ()


def test_entries_leave_only_if_they_are_those_that_were_meant() -> None:
    index = RecordIndex(NoSegments())  # type: ignore[arg-type]
    one, two = BlockHash(b"1"), BlockHash(b"2")
    entry = IndexEntry(4, 4096, 7, 1)
    index.commit(0, (), [(one, entry)])
    index.commit(0, [Removal(one, 4, 2), Removal(one, 3, 1), Removal(two, 4, 1)])
    assert index.entry(one) == entry
    index.commit(0, [Removal(one, 4, 1)], [(two, entry)])
    assert dict(index.keys()) == {two: entry}
    assert index.take_away(0, [(one, entry.pack(one)), (two, b"x")])[1] == 0
    assert index.take_away(0, [(two, entry.pack(two))])[1] == 1
    assert not dict(index.keys())


@indices
def test_a_tier_that_cannot_be_driven_is_closed(
    index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trip = RoundTrip(tmp_path / "tier", "cpu", SMALL, BLOCKS, index)
    monkeypatch.setattr(round_trip, "DrivenEngine", _refuse)
    with pytest.raises(BenchError, match="refused"):
        trip()
    monkeypatch.undo()
    wanted = DiskTierOptions(tmp_path / "tier", BLOCKS, trip._geometry.slot_bytes)
    open_disk_tier(wanted, index).close()


def _refuse(*arguments: object) -> DrivenEngine:
    raise BenchError("refused")


def test_no_thread_is_left(tmp_path: Path) -> None:
    before = threading.active_count()
    RoundTrip(tmp_path / "tier", "cpu", SMALL, 4, RECORDS)()
    assert threading.active_count() == before
