"""Every layout of the CPU tests on CUDA tensors, both ways, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.kv_layouts import (
    NAMED_CASES,
    Case,
    Job,
    in_one_allocation,
    make_job,
    may_change_mask,
    model_load,
    model_store,
    one_group,
    written_mask,
)

from kvcascade.handlers.device.batched_copy import Batch, NoBatchedCopyError, driver_batch
from kvcascade.handlers.device.copier import GpuBlocks
from kvcascade.handlers.device.device_cuda import CudaDeviceCopier
from kvcascade.handlers.device.host_register import HostRegistration, cuda_registration
from kvcascade.tiers.cpu.arena import Arena, ArenaRole

pytestmark = pytest.mark.gpu

LARGE = {
    "llama_8b": one_group(*[65536] * 32, num_blocks=256, slots=192),
    "mla": one_group(*[18432] * 61, num_blocks=256, slots=192),
    "large_pages": one_group(*[1 << 20] * 8, num_blocks=64, slots=32),
    "chunk_4_two_ranks": one_group(*[16384] * 16, chunk=4, world=2, rank=1, slots=48),
}
STAGING_BYTES = 16 << 20


FindBatch = Callable[[], Batch | None]
OpenArena = Callable[[Case], AbstractContextManager[Arena]]


@pytest.fixture
def open_arena(shared: Path, want_shared: Callable[[int], None]) -> OpenArena:
    """Opens an arena for a case, in shared memory of its own."""

    def opened(case: Case) -> Arena:
        want_shared(case.geometry.data_bytes)
        role = ArenaRole.scheduler(expect_workers=False)
        return Arena.open(case.geometry, "gpu-test", role, arena_dir=str(shared))

    return opened


def to_device(pages: np.typing.NDArray[np.int8], gap: int) -> torch.Tensor:
    """The pages on the GPU, in rows with the same gaps."""
    blocks, page = pages.shape
    whole = torch.zeros((blocks, page + gap), dtype=torch.int8, device="cuda")
    rows = whole[:, :page]
    rows.copy_(torch.from_numpy(np.ascontiguousarray(pages)))
    return rows


def registration_of(is_pinned: bool) -> HostRegistration:
    if is_pinned:
        return cuda_registration(torch.device("cuda"))
    return HostRegistration(lambda address, length: "the test", lambda address: None)


def check(case: Case, arena: Arena, seed: int, is_pinned: bool, find_batch: FindBatch) -> None:
    """Layers apart and in one allocation, by turns."""
    rng = np.random.default_rng(seed)
    tensors = case.tensors(rng)
    slots = arena.slots
    slots[:] = rng.integers(0, 256, slots.shape, dtype=np.uint8)
    before, model = slots.copy(), slots.copy()
    if seed % 2:
        devices = in_one_allocation(tensors, "cuda")
    else:
        devices = [to_device(t, gap) for t, gap in zip(tensors, case.gaps, strict=True)]
    registration = registration_of(is_pinned)
    copier = CudaDeviceCopier(
        devices,
        case.layout,
        slots,
        registration=registration,
        find_batch=find_batch,
        staging_bytes=STAGING_BYTES,
    )
    assert registration.is_pinned is is_pinned
    job = make_job(case, rng)
    assert copier.submit_store(1, job.blocks, job.slots)
    copier.wait({1, 99})
    (result,) = copier.get_finished()
    assert (result.job_id, result.success) == (1, True)
    model_store(case, job, tensors, model)
    pages, others = written_mask(case, job), ~may_change_mask(case, job)
    assert (slots[pages] == model[pages]).all()
    assert (slots[others] == before[others]).all()

    job = make_job(case, rng)
    assert copier.submit_load(2, job.blocks, job.slots)
    copier.wait({2})
    model_load(case, job, tensors, slots)
    for device, want in zip(devices, tensors, strict=True):
        assert (device.cpu().numpy() == want).all()
    assert copier.is_batched is (find_batch is driver_batch), "the driver refused the batched call"
    copier.shutdown()
    assert not registration.is_pinned


@pytest.mark.parametrize(
    ("is_pinned", "find_batch"),
    [(True, driver_batch), (True, lambda: None), (False, lambda: None)],
    ids=["batched", "one_by_one", "unpinned"],
)
@pytest.mark.parametrize("name", [*NAMED_CASES, *LARGE])
def test_moves_the_pages(
    name: str, is_pinned: bool, find_batch: FindBatch, open_arena: OpenArena
) -> None:
    if find_batch is driver_batch:
        try:
            driver_batch()
        except NoBatchedCopyError as error:
            pytest.skip(str(error))
    case = {**NAMED_CASES, **LARGE}[name]
    with open_arena(case) as arena:
        for seed in range(2 if name in LARGE else 6):
            check(case, arena, seed, is_pinned, find_batch)


def test_a_store_sees_what_the_compute_stream_was_given_before(open_arena: OpenArena) -> None:
    case = LARGE["llama_8b"]
    with open_arena(case) as arena:
        devices = [to_device(t, 0) for t in case.tensors(np.random.default_rng(0))]
        copier = CudaDeviceCopier(devices, case.layout, arena.slots, staging_bytes=STAGING_BYTES)
        cuda: Any = torch.cuda
        cuda._sleep(200_000_000)  # keeps the compute stream busy on the device
        for device in devices:
            device.fill_(42)
        ids = list(range(128))
        slots = np.arange(128, dtype=np.int32)
        copier.submit_store(1, GpuBlocks.of(ids, [128], [0]), slots)
        assert copier.get_finished() == [], "submitting does not wait for the device"
        copier.wait({1})
        used = arena.slots[:128, : case.geometry.rank_bytes]
        assert (used == 42).all()
        copier.shutdown()


def test_a_load_comes_after_what_is_written_to_its_target(
    open_arena: OpenArena,
) -> None:
    """The engine zeroes blocks before it hands them out: that must not undo the load."""
    case = LARGE["llama_8b"]
    with open_arena(case) as arena:
        devices = [to_device(t, 0) for t in case.tensors(np.random.default_rng(0))]
        copier = CudaDeviceCopier(devices, case.layout, arena.slots, staging_bytes=STAGING_BYTES)
        arena.slots[:128] = 7
        cuda: Any = torch.cuda
        cuda._sleep(200_000_000)
        for device in devices:
            device.zero_()
        ids, slots = list(range(128)), np.arange(128, dtype=np.int32)
        copier.submit_load(1, GpuBlocks.of(ids, [128], [0]), slots)
        assert copier.get_finished() == [], "submitting does not wait for the device"
        copier.wait({1})
        for device in devices:
            assert (device[:128] == 7).all() and not device[128:].any()
        copier.shutdown()


def test_asking_alone_brings_a_job_of_many_operations_to_its_end(open_arena: OpenArena) -> None:
    case = LARGE["mla"]
    cuda: Any = torch.cuda
    with open_arena(case) as arena:
        tensors = case.tensors(np.random.default_rng(0))
        devices = [to_device(t, 0) for t in tensors]
        copier = CudaDeviceCopier(devices, case.layout, arena.slots, staging_bytes=STAGING_BYTES)
        taken = cuda.memory_stats()["allocation.all.allocated"]
        job = Job(GpuBlocks.of(list(range(192)), [192], [0]), np.arange(192, dtype=np.int32)[::-1])
        copier.submit_store(1, job.blocks, job.slots)
        rounds = 0
        while not (results := copier.get_finished()) and rounds < 100:
            cuda.synchronize()
            rounds += 1
        assert rounds > 1, "it is more than a stream is given at a time"
        assert [(result.job_id, result.success) for result in results] == [(1, True)]
        model = arena.slots.copy()
        model_store(case, job, tensors, model)
        assert (arena.slots[written_mask(case, job)] == model[written_mask(case, job)]).all()
        assert cuda.memory_stats()["allocation.all.allocated"] == taken, "jobs take no memory"
        copier.shutdown()


def test_jobs_of_both_directions_on_one_block_keep_their_order(open_arena: OpenArena) -> None:
    case = LARGE["mla"]
    with open_arena(case) as arena:
        devices = [to_device(t, 0) for t in case.tensors(np.random.default_rng(0))]
        copier = CudaDeviceCopier(devices, case.layout, arena.slots, staging_bytes=STAGING_BYTES)
        want = [device[:64].cpu() for device in devices]
        ids = GpuBlocks.of(list(range(64)), [64], [0])
        away = GpuBlocks.of(list(range(64, 128)), [64], [0])
        low, high = np.arange(64, dtype=np.int32), np.arange(64, 128, dtype=np.int32)
        copier.submit_store(1, ids, low)
        copier.submit_load(2, away, low)  # reads what 1 writes
        copier.submit_store(3, away, high)  # reads what 2 writes
        copier.wait({3})
        assert {result.job_id for result in copier.get_finished()} == {1, 2, 3}
        for device, expected in zip(devices, want, strict=True):
            assert torch.equal(device[64:128].cpu(), expected)
        assert (arena.slots[:64] == arena.slots[64:128]).all()
        copier.shutdown()
