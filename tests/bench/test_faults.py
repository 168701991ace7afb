"""The measurement of faults: its faults hit what they name, and engines are compared fairly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvcascade.tools.commands.bench.bench_results import BenchError
from kvcascade.tools.dev.bench.faults import (
    AGAIN,
    BLOCK_BYTES,
    FOUND,
    SAME,
    WRONG,
    Fault,
    FaultBench,
    Place,
    cut,
    empty,
    flip,
    places,
    remove,
    swap,
)
from kvcascade.tools.dev.bench.measurement import MeasurementSetup
from kvcascade.tools.dev.bench.scale import QUICK


@pytest.fixture
def hit(tmp_path: Path) -> list[Place]:
    """Two blocks in each of two files."""
    found = []
    for number in range(4):
        path = tmp_path / f"file{number // 2}"
        with path.open("ab") as file:
            found.append(Place(path, file.tell()))
            file.write(bytes([number]) * BLOCK_BYTES)
    return found


def contents(hit: list[Place]) -> list[bytes]:
    return [p.path.read_bytes()[p.offset : p.offset + BLOCK_BYTES] for p in hit]


def test_a_flip_changes_one_byte_of_each_block(hit: list[Place]) -> None:
    flip(hit)
    for number, data in enumerate(contents(hit)):
        assert len(data) - data.count(number) == 1


def test_a_swap_exchanges_neighbours(hit: list[Place]) -> None:
    swap(hit)
    assert [data[0] for data in contents(hit)] == [1, 0, 3, 2]


@pytest.mark.parametrize(("fault", "left"), [(cut, BLOCK_BYTES // 2), (empty, 0)])
def test_files_get_shorter(hit: list[Place], fault: Fault, left: int) -> None:
    fault(hit)
    assert {place.path.stat().st_size for place in hit} == {left}


def test_files_are_removed(hit: list[Place], tmp_path: Path) -> None:
    remove(hit)
    assert list(tmp_path.iterdir()) == []


def test_blocks_are_found_by_their_contents(hit: list[Place], tmp_path: Path) -> None:
    device = torch.arange(4, dtype=torch.int8).repeat_interleave(BLOCK_BYTES).view(4, -1)
    assert places([tmp_path], device) == hit
    with pytest.raises(BenchError, match="1 blocks"):
        places([tmp_path], torch.cat((device, device[:1] + 9)))


@pytest.mark.parametrize(("whose", "wrong", "again"), [("ours_with", 0, 64), ("vllm_with", 16, 56)])
def test_flipped_bytes_in_the_files_of_an_engine(
    tmp_path: Path, whose: str, wrong: int, again: int
) -> None:
    """vLLM's tier serves the 8 damaged blocks at both reads, as it has no checksums."""
    bench = FaultBench(MeasurementSetup(tmp_path, QUICK, print), flip, SAME)
    opened: Callable[..., object] = getattr(bench, whose)
    assert bench.run(opened) == {WRONG: wrong, FOUND: 56, AGAIN: again}  # type: ignore[arg-type]
