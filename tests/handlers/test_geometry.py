"""Copy lists against a byte-by-byte model, over named and random layouts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.drawn_layouts import cases
from support.kv_layouts import NAMED_CASES, Case, make_job, one_group, page_places

from kvcascade.errors import ConfigError
from kvcascade.handlers.device.copier import GpuBlocks
from kvcascade.handlers.device.geometry import (
    Copies,
    PageRef,
    TensorLayout,
    WorkerLayout,
    merge_adjacent,
)
from kvcascade.tiers.cpu.header import ArenaGeometry

Byte = tuple[int, int, int]


TENSOR_SHIFT = 40
BASES = np.arange(64, dtype=np.int64) << TENSOR_SHIFT


def bytes_of(copies: Copies) -> set[Byte]:
    """(tensor, device offset, arena offset) of every byte copied."""
    device, *rest = copies
    columns = (device >> TENSOR_SHIFT, device & ((1 << TENSOR_SHIFT) - 1), *rest)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return {(t, d + i, a + i) for t, d, a, size in rows for i in range(size)}


def expected_bytes(case: Case, places: list[tuple[int, int, int, int, int]]) -> set[Byte]:
    return {
        (
            t,
            block * (case.pages[t] + case.gaps[t]) + i,
            slot * case.geometry.slot_bytes + offset + i,
        )
        for t, block, slot, offset, length in places
        for i in range(length)
    }


def check(case: Case, seed: int) -> None:
    job = make_job(case, np.random.default_rng(seed))
    layout = case.layout
    rows = layout.rows(job.blocks, job.slots)
    copies = layout.copy_list(rows, BASES)
    _, _, size = copies
    assert bytes_of(copies) == expected_bytes(case, page_places(case, job))
    assert int(size.sum()) == layout.total_bytes(rows)
    merged = merge_adjacent(copies)
    assert len(merged[2]) <= len(size)
    assert bytes_of(merged) == bytes_of(copies)


@pytest.mark.parametrize("name", NAMED_CASES)
def test_every_byte_goes_to_its_place(name: str) -> None:
    for seed in range(8):
        check(NAMED_CASES[name], seed)


@given(cases(), st.integers(0, 2**32))
def test_every_byte_goes_to_its_place_in_any_layout(case: Case, seed: int) -> None:
    check(case, seed)


def test_neighbours_on_both_sides_become_one_copy() -> None:
    case = one_group(4096)
    blocks = GpuBlocks.of(list(range(3, 11)), [8], [0])
    rows = case.layout.rows(blocks, np.arange(8, dtype=np.int32))
    _, _, size = merge_adjacent(case.layout.copy_list(rows, BASES))
    assert size.tolist() == [8 * 4096]


def test_tensors_that_do_not_fit_are_refused() -> None:
    tensors = [TensorLayout(8, 64, 64)] * 2
    refs = [[PageRef(0, 64), PageRef(1, 64)]]
    with pytest.raises(ConfigError, match="256 bytes per block, the engine announced 255"):
        WorkerLayout(tensors, refs, 2, ArenaGeometry(4, 255, 1), 0)


@pytest.mark.parametrize("ref", [PageRef(1, 8), PageRef(0, 65), PageRef(0, 0), PageRef(-1, 8)])
def test_pages_outside_of_a_tensor_are_refused(ref: PageRef) -> None:
    with pytest.raises(ConfigError, match="outside.*report it"):
        WorkerLayout([TensorLayout(8, 64, 64)], [[ref]], 1, ArenaGeometry(4, 64, 1), 0)


def test_rows_that_overlap_are_refused() -> None:
    with pytest.raises(ConfigError, match="overlaps.*report it"):
        WorkerLayout([TensorLayout(8, 64, 32)], [[PageRef(0, 64)]], 1, ArenaGeometry(4, 64, 1), 0)


@pytest.mark.parametrize(
    ("blocks", "slots", "rule"),
    [
        (GpuBlocks.of([0, 1], [2], [0]), [0, 1], "no slot is left over"),
        (GpuBlocks.of([0, 1, 2], [3], [0]), [0], "a slot for every chunk"),
        (GpuBlocks.of([0, 1], [2], [1]), [0], "a slot for every chunk"),
        (GpuBlocks.of([0, 24], [2], [0]), [0], "device blocks in range"),
        (GpuBlocks.of([0, -1], [2], [0]), [0], "device blocks in range"),
        (GpuBlocks.of([0, 1], [2], [0]), [16], "slots in range"),
        (GpuBlocks.of([0, 1], [2], [0]), [-1], "slots in range"),
        (GpuBlocks.of([0, 1], [1, 1], [0, 0]), [0], "one size per KV group"),
        (GpuBlocks.of([0, 1], [3], [0]), [0, 1], "sizes add up"),
    ],
)
def test_numbers_that_would_become_wild_addresses_are_refused(
    blocks: GpuBlocks, slots: list[int], rule: str
) -> None:
    layout = one_group(8, chunk=2).layout
    with pytest.raises(AssertionError, match=rule):
        layout.rows(blocks, np.array(slots, dtype=np.int32))


def test_digest_tells_layouts_apart_and_nothing_else() -> None:
    different = {case.layout.digest() for case in NAMED_CASES.values()}
    alike = [one_group(8, 8, chunk=2, slots=n, num_blocks=n).layout.digest() for n in (4, 9)]
    assert all(len(digest) == 16 for digest in different)
    # Two named cases differ in rank alone or not at all, which is not a matter of the layout.
    assert len(different) == len(NAMED_CASES)
    assert alike[0] == alike[1]
    assert one_group(8, 8, chunk=1).layout.digest() != alike[0]
