"""vLLM's worker as the GPU benchmark drives it, without a GPU: its own code but for streams, events
and the copy of a list of pointers, which moves memory at once."""

from __future__ import annotations

import ctypes
import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from support.executors import InlineExecutor
from vllm.v1.kv_offload.cpu import gpu_worker

from kvcascade.handlers.device.copier import Direction
from kvcascade.handlers.device.device_cpu import CpuDeviceCopier
from kvcascade.tiers.cpu.header import ArenaGeometry
from kvcascade.tools.dev.bench.gpu import gpu_moves
from kvcascade.tools.dev.bench.gpu.gpu import GpuShape
from kvcascade.tools.dev.bench.gpu.gpu_moves import (
    HEAR_LONGEST,
    RATE,
    DeviceMover,
    GpuTransfer,
    check,
    costs,
)
from kvcascade.tools.dev.bench.gpu.vllm_device import VllmCopier

BLOCKS = 24
TRANSFER = GpuTransfer.scattered(16, BLOCKS, BLOCKS)


class CalledGpu(torch.Tensor):
    """Ordinary memory that vLLM takes for a GPU's."""

    is_cuda = True


class Event:
    """Has ended when it is recorded."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: NoStream) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return 250.0


class NoStream:
    """Has nothing to wait for."""

    def wait_stream(self, other: NoStream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass


class Platform:
    """What the worker asks of vLLM's platform, and of its kernels."""

    Stream = NoStream

    def is_xpu(self) -> bool:
        return False

    def current_stream(self) -> NoStream:
        return NoStream()

    def stream(self, stream: NoStream) -> AbstractContextManager[None]:
        return nullcontext()

    def swap_blocks_batch(
        self,
        sources: torch.Tensor,
        targets: torch.Tensor,
        sizes: torch.Tensor,
        is_src_access_order_any: bool,
    ) -> None:
        pointers = zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True)
        for target, source, size in pointers:
            ctypes.memmove(target, source, size)


@pytest.fixture(autouse=True)
def a_gpu_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = Platform()
    monkeypatch.setattr(gpu_worker, "current_platform", platform)
    monkeypatch.setattr(gpu_worker, "ops", platform)
    monkeypatch.setattr(gpu_worker, "PIN_MEMORY", False)
    monkeypatch.setattr(torch, "Event", Event)


@pytest.mark.parametrize("shape", [GpuShape("layers", 5, 192), GpuShape("joined", 1, 8192)])
def test_the_same_blocks_lie_in_the_same_slots(
    shape: GpuShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (BLOCKS, shape.page_bytes)
    tensors: list[torch.Tensor] = [
        torch.randint(-128, 128, page, dtype=torch.int8).as_subclass(CalledGpu)
        for _ in range(shape.layers)
    ]
    theirs = VllmCopier(tensors, BLOCKS)
    assert not theirs.is_pinned
    named = Path("/dev/shm").glob(f"*bench-gpu-{os.getpid()}-*")
    assert not list(named), "a kill would leave nothing"
    mover = DeviceMover(theirs)
    check(mover, tensors, TRANSFER)
    region = theirs._worker._mmap_region
    assert region is not None
    rows = region.base_tensor.numpy().view(np.uint8).reshape(BLOCKS, -1)

    geometry = ArenaGeometry(BLOCKS, shape.block_bytes, 1)
    slots = np.zeros((BLOCKS, geometry.slot_bytes), dtype=np.uint8)
    pages = [tensor.numpy() for tensor in tensors]
    ours = CpuDeviceCopier(pages, shape.layout(BLOCKS, geometry), slots, InlineExecutor())
    check(DeviceMover(ours), tensors, TRANSFER)
    np.testing.assert_array_equal(rows, slots)
    assert slots[TRANSFER.slots].any()

    monkeypatch.setattr(gpu_moves, "BYTES_PER_TIMING", 1)
    size = len(TRANSFER.slots) * shape.block_bytes
    for way in Direction:
        found = costs(mover, way, TRANSFER, size, time.perf_counter)
        assert found[RATE[way]] and found[HEAR_LONGEST[way]]
    theirs.submit_load(99, TRANSFER.blocks, TRANSFER.slots)
    (result,) = theirs.get_finished()
    assert (result.job_id, result.size_bytes, result.time_s) == (99, size, 0.25)
    del rows, region
    theirs.shutdown()
