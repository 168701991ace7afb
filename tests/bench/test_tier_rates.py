"""`kvcascade bench PATH`: figures of every block size, nothing left behind, and refusals."""

from __future__ import annotations

import json
import os
from collections import namedtuple
from functools import partial
from pathlib import Path

import pytest
from support.cache_rig import call

from kvcascade.tools.commands.bench import tier_rates
from kvcascade.tools.commands.bench.bench_results import (
    DOWN,
    KIB,
    LIMIT,
    MIB,
    OURS,
    TRANSFERS,
    UP,
    BenchError,
    Quantity,
    Row,
    Table,
    transfer_case,
)
from kvcascade.tools.commands.bench.tier_rates import (
    QUANTITIES,
    RatesScale,
    measure_path,
    recommended_block_bytes,
)
from kvcascade.tools.commands.command_line import ExitCode
from kvcascade.tools.replay.rates import rates_of_bench

SMALL = RatesScale(block_sizes=(4 * KIB, 64 * KIB), total_bytes=1 * MIB, repeats=2)
ARENAS = Path("/dev/shm")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command measures little."""
    monkeypatch.setattr(tier_rates, "measure_path", partial(measure_path, scale=SMALL))


def arenas() -> set[str]:
    """Arenas of this process in shared memory."""
    return {path.name for path in ARENAS.iterdir() if f"bench-{os.getpid()}" in path.name}


@pytest.mark.usefixtures("small")
def test_replay_reads_what_was_measured(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    answer = call("bench", disk, "--json")
    assert answer.code == 0, answer.err
    assert not [*disk.iterdir()] and not arenas()
    document = answer.document
    assert document["schema"] == "kvcascade.bench" and document["repeats"] == SMALL.repeats
    assert document["recommended_block_bytes"] in SMALL.block_sizes
    (measured,) = document["measurements"]
    rows = {(row["case"], row["quantity"]): row for row in measured["rows"]}
    assert len(rows) == len(QUANTITIES) * len(SMALL.block_sizes)
    for row in rows.values():
        assert len(row["samples"][OURS]) == SMALL.repeats
        if row["quantity"] in ("down", "up"):
            assert row["median"][OURS] > 0 and row["ratio"][LIMIT] > 0
    saved = tmp_path / "rates.json"
    saved.write_text(json.dumps(document))
    found = rates_of_bench(saved, 64 * KIB)
    assert found.write.bytes_per_s == rows["64 KiB blocks", "down"]["median"][OURS] * 1e9
    assert found.read.bytes_per_s == rows["64 KiB blocks", "up"]["median"][OURS] * 1e9


@pytest.mark.usefixtures("small")
def test_the_table(tmp_path: Path) -> None:
    answer = call("bench", tmp_path)
    assert answer.code == 0, answer.err
    assert all(quantity.name in answer.out for quantity in QUANTITIES)
    assert "ours / limit" in answer.out and "Recommended: blocks of" in answer.out


@pytest.mark.parametrize(
    ("down", "up", "size"),
    [
        ((2.0, 2.1, 2.2), (1.9, 2.0, 2.0), 64 * KIB),  # all are nearly the best
        ((1.0, 2.1, 2.2), (1.9, 2.0, 2.0), 512 * KIB),  # the smallest is slow in one direction
        ((1.0, 2.0, 1.6), (2.0, 1.0, 1.7), 2 * MIB),  # none is good in both
    ],
)
def test_the_smallest_block_size_with_good_rates_is_recommended(
    down: tuple[float, ...], up: tuple[float, ...], size: int
) -> None:
    cases = [transfer_case(each) for each in (64 * KIB, 512 * KIB, 2 * MIB)]
    rows = [
        Row(case, Quantity(name, "GB/s"), {OURS: [rate]})
        for name, rates in ((DOWN, down), (UP, up))
        for case, rate in zip(cases, rates, strict=True)
    ]
    assert recommended_block_bytes(Table(TRANSFERS, "", "", rows)) == size


def refused(path: Path, code: ExitCode) -> str:
    """The sentence with which a path is refused."""
    answer = call("bench", path)
    assert answer.code == code and answer.err.count("\n") == 1 and not answer.out
    return answer.err


def test_what_cannot_be_measured_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "there is no folder" in refused(tmp_path / "nowhere", ExitCode.CANNOT_OPEN)
    (tmp_path / "file").write_text("")
    assert "there is no folder" in refused(tmp_path / "file", ExitCode.CANNOT_OPEN)
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as full:
        full.setattr(tier_rates, "disk_usage", lambda path: usage(10 << 30, 10 << 30, 1 << 20))
        said = refused(tmp_path, ExitCode.NO_SPACE)
    assert "1.0 MiB free" in said and "make room" in said
    with monkeypatch.context() as read_only:
        read_only.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
        assert "cannot be written" in refused(tmp_path, ExitCode.CANNOT_OPEN)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


class BrokenDisk:
    """A raw disk that cannot be measured."""

    def __init__(self, *arguments: object, is_overwritten: bool) -> None:
        raise BenchError("the disk is gone")


@pytest.mark.usefixtures("small")
def test_nothing_is_left_behind_by_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_rates, "RawDisk", BrokenDisk)
    assert "the disk is gone" in call("bench", tmp_path).err
    assert not [*tmp_path.iterdir()] and not arenas()


def test_options_of_comparisons_are_refused_beside_a_path(tmp_path: Path) -> None:
    answer = call("bench", tmp_path, "--quick")
    assert answer.code == ExitCode.USAGE and "stands alone" in answer.err
