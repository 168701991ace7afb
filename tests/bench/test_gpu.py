"""The part of the GPU benchmark that needs no GPU: shapes, choices, figures, and what it says."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

from kvcascade.handlers.device_cpu import CpuDeviceCopier
from kvcascade.tiers.cpu import Arena, ArenaGeometry, ArenaRole
from kvcascade.tools.bench import gpu
from kvcascade.tools.bench.gpu import Mover, Shape, Transfer
from kvcascade.tools.bench.measurement import Setup
from kvcascade.tools.bench.results import BenchError
from kvcascade.tools.bench.scale import SMOKE

SMALL = Shape("small", 3, 64)


def test_blocks_and_slots_are_scattered_and_different() -> None:
    transfer = Transfer.scattered(16, 20, 24)
    ids, slots = transfer.blocks.block_ids.tolist(), transfer.slots.tolist()
    assert len(set(ids)) == len(set(slots)) == 16
    assert max(ids) < 20 and max(slots) < 24
    assert sorted(ids) != ids and transfer.blocks.group_sizes == (16,)
    assert Transfer.scattered(16, 20, 24).slots.tolist() == slots, "the same in every run"


def test_counts_follow_the_memory() -> None:
    (llama, mla) = gpu.SHAPES
    assert llama.block_bytes == 2 << 20 and mla.block_bytes == 61 * 18 << 10
    assert gpu.counts_that_fit(llama, 1 << 40) == list(gpu.COUNTS)
    assert gpu.counts_that_fit(llama, 1 << 30) == [1, 16, 256]
    assert gpu.counts_that_fit(llama, 2 << 20) == []


def test_a_rate_is_that_of_the_repeated_transfer() -> None:
    seconds, runs = count(0.0, 2.0), []
    assert gpu.rate(lambda: runs.append(1), 1 << 30, lambda: next(seconds)) == (1 << 31) / 2e9
    assert len(runs) == 1 + gpu.repeats_for(1 << 30) == 3
    assert gpu.repeats_for(1) == gpu.REPEATS_MAX and gpu.repeats_for(1 << 40) == 1


def test_transfers_move_what_they_say(tmp_path: Path) -> None:
    blocks, slots = 20, 24
    geometry = ArenaGeometry(slots, SMALL.block_bytes, 1)
    arena = Arena.open(
        geometry, "bench", ArenaRole.scheduler(expect_workers=False), arena_dir=str(tmp_path)
    )
    rng = np.random.default_rng(0)
    tensors = [rng.integers(-128, 128, (blocks, 64), dtype=np.int8) for _ in range(SMALL.layers)]
    before = [tensor.copy() for tensor in tensors]
    transfer = Transfer.scattered(16, blocks, slots)
    with ThreadPoolExecutor(2) as executor:
        copier = CpuDeviceCopier(tensors, SMALL.layout(blocks, geometry), arena.slots, executor)
        mover = Mover(copier)
        mover.down(transfer)
        for tensor in tensors:
            tensor[transfer.blocks.block_ids] = 0
        mover.up(transfer)
        copier.shutdown()
    arena.close()
    for tensor, was in zip(tensors, before, strict=True):
        np.testing.assert_array_equal(tensor, was)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do(tmp_path: Path) -> None:
    setup = Setup(tmp_path, SMOKE, lambda line: None)
    with pytest.raises(BenchError, match="make bench-gpu"):
        next(gpu.cases(setup))
