"""The contender that copies page by page, over a twin of torch.cuda whose batches move memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.cuda_twin import TwinCuda, batch, pinned, twin_of_cuda
from support.executors import InlineExecutor

from kvcascade.handlers.device.batched_copy import NoBatchedCopyError
from kvcascade.handlers.device.device_cpu import CpuDeviceCopier
from kvcascade.handlers.device.host_register import HostRegistration
from kvcascade.tiers.cpu.header import ArenaGeometry
from kvcascade.tools.commands.bench.bench_results import PAGES, VLLM, BenchError
from kvcascade.tools.dev.bench.gpu import gpu_device
from kvcascade.tools.dev.bench.gpu.gpu import GpuShape
from kvcascade.tools.dev.bench.gpu.gpu_moves import DeviceMover, GpuTransfer, check
from kvcascade.tools.dev.bench.gpu.page_copies import PageCopier

BLOCKS = 24
SHAPE = GpuShape("layers", 5, 192)
TRANSFER = GpuTransfer.scattered(16, BLOCKS, BLOCKS)


@pytest.fixture
def twin(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwinCuda]:
    with twin_of_cuda(monkeypatch) as cuda:
        yield cuda


def test_pages_lie_in_slots_as_ours_do(twin: TwinCuda) -> None:
    shape = (BLOCKS, SHAPE.page_bytes)
    tensors = [torch.randint(-128, 128, shape, dtype=torch.int8) for _ in range(SHAPE.layers)]
    addresses: list[int] = []
    theirs = PageCopier(tensors, BLOCKS, batch, pinned(addresses))
    assert addresses, "its memory is pinned"
    check(DeviceMover(theirs), tensors, TRANSFER)
    assert [stream.given for stream in twin.streams] == [4, 4], "one batch a transfer"
    geometry = ArenaGeometry(BLOCKS, SHAPE.block_bytes, 1)
    slots = np.zeros((BLOCKS, geometry.slot_bytes), dtype=np.uint8)
    pages = [tensor.numpy() for tensor in tensors]
    ours = CpuDeviceCopier(pages, SHAPE.layout(BLOCKS, geometry), slots, InlineExecutor())
    check(DeviceMover(ours), tensors, TRANSFER)
    np.testing.assert_array_equal(theirs._arena.slots, slots)
    theirs.shutdown()
    assert not addresses


def test_a_transfer_is_heard_of_when_it_has_ended(twin: TwinCuda) -> None:
    tensors = [torch.zeros((BLOCKS, 64), dtype=torch.int8)]
    copier = PageCopier(tensors, BLOCKS, batch, pinned([]))
    copier.submit_store(1, TRANSFER.blocks, TRANSFER.slots)
    assert copier.get_finished() == []
    copier.wait({1})
    (result,) = copier.get_finished()
    assert (result.job_id, result.size_bytes, result.time_s) == (1, 16 * 64, 0.25)
    copier.shutdown()


def test_memory_that_is_not_pinned_is_not_given_to_the_driver(twin: TwinCuda) -> None:
    tensors = [torch.zeros((BLOCKS, 64), dtype=torch.int8)]
    refused = HostRegistration(lambda address, length: "the test", lambda address: None)
    with pytest.raises(BenchError, match="could not be pinned"):
        PageCopier(tensors, BLOCKS, batch, refused)
    assert not twin.streams


def test_who_stands_in_for_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies that its worker makes are measured beside it, too: they decide about staging."""
    monkeypatch.setattr(gpu_device, "find_spec", lambda name: object())
    monkeypatch.setattr(gpu_device, "driver_batch", lambda: batch)
    others, notes = gpu_device._others()
    assert [*others] == [VLLM, PAGES] and not notes
    monkeypatch.setattr(gpu_device, "find_spec", lambda name: None)
    others, (note,) = gpu_device._others()
    assert [*others] == [PAGES] and "stands in" in note

    def none() -> None:
        raise NoBatchedCopyError("too old")

    monkeypatch.setattr(gpu_device, "driver_batch", none)
    others, (absent, note) = gpu_device._others()
    assert not others and "vLLM is not installed" in absent and "too old" in note
