"""Pinned memory on a GPU: registered once, by several processes, and what it takes of the GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.children import Start
from support.kv_layouts import make_job, model_load, model_store, one_group, written_mask

from kvcascade.handlers.device.device_cuda import CudaDeviceCopier
from kvcascade.handlers.device.host_register import HostRegistration, cuda_registration
from kvcascade.tiers.cpu.arena import Arena, ArenaRole
from kvcascade.tiers.cpu.header import ArenaGeometry

pytestmark = pytest.mark.gpu

MIB = 1 << 20
TAKEN_BYTES_MAX = 64 * MIB
"""Of the GPU's memory, by pinning `LARGE`: the driver's tables, and nothing that grows with use."""
SMALL = ArenaGeometry(64, 65536, 1)
LARGE = ArenaGeometry(512, MIB, 1)
ALONE = ArenaRole.scheduler(expect_workers=False)

SECOND_RANK = """
import os, sys, torch
from kvcascade.handlers.device.host_register import cuda_registration
from kvcascade.tiers.cpu.arena import Arena, ArenaRole
from kvcascade.tiers.cpu.header import ArenaGeometry
slots, rank_bytes = map(int, sys.argv[2:4])
arena = Arena.open(
    ArenaGeometry(slots, rank_bytes, 2), "gpu-test", ArenaRole.worker(1), arena_dir=sys.argv[1]
)
registration = cuda_registration(torch.device("cuda"))
rows = arena.slots
assert registration.pin(int(rows.ctypes.data), *rows.shape)
on_device = torch.from_numpy(rows[:1]).to("cuda", non_blocking=True)
torch.cuda.synchronize()
print("pinned", flush=True)
sys.stdin.readline()
if sys.argv[4] == "released":
    registration.release()
    arena.close()
os._exit(0)
"""


def pin(registration: HostRegistration, arena: Arena) -> bool:
    """Register all slots."""
    rows = arena.slots
    return registration.pin(int(rows.ctypes.data), rows.shape[0], rows.shape[1])


def kernel_works() -> bool:
    """A kernel that is launched now reports no error of an earlier call."""
    return float(torch.full((1024,), 2.0, device="cuda").sum()) == 2048.0


def test_a_range_is_registered_once(shared: Path) -> None:
    with Arena.open(SMALL, "gpu-test", ALONE, arena_dir=str(shared)) as arena:
        first, second = (cuda_registration(torch.device("cuda")) for _ in range(2))
        assert pin(first, arena)
        assert not pin(second, arena) and not second.is_pinned
        assert kernel_works(), "the driver's error is not left for the next launch"
        first.release()
        assert pin(second, arena), "the failure left nothing registered"
        second.release()
        assert kernel_works()


@pytest.mark.parametrize("how", ["released", "killed"])
def test_one_of_two_processes_leaves_first(how: str, shared: Path, child: Start) -> None:
    """Both ranks pin the whole arena; the one that stays stores and loads as before."""
    case = one_group(*[16384] * 8, world=2, rank=0, num_blocks=64, slots=48)
    geometry = case.geometry
    role = ArenaRole.worker(0)
    with Arena.open(geometry, "gpu-test", role, arena_dir=str(shared)) as arena:
        rng = np.random.default_rng(0)
        tensors = case.tensors(rng)
        devices = [torch.from_numpy(np.ascontiguousarray(t)).cuda() for t in tensors]
        registration = cuda_registration(devices[0].device)
        copier = CudaDeviceCopier(devices, case.layout, arena.slots, registration=registration)
        assert registration.is_pinned
        other = child(SECOND_RANK, shared, geometry.slots, geometry.rank_bytes, how)
        assert other.stdin is not None
        other.stdin.write("leave\n")
        other.stdin.flush()
        assert other.wait(60) == 0
        job = make_job(case, rng)
        assert copier.submit_store(1, job.blocks, job.slots)
        copier.wait({1})
        model = arena.slots.copy()
        model_store(case, job, tensors, model)
        pages = written_mask(case, job)
        assert (arena.slots[pages] == model[pages]).all()
        job = make_job(case, rng)
        assert copier.submit_load(2, job.blocks, job.slots)
        copier.wait({2})
        model_load(case, job, tensors, arena.slots)
        for device, want in zip(devices, tensors, strict=True):
            assert (device.cpu().numpy() == want).all()
        assert all(result.success for result in copier.get_finished())
        copier.shutdown()


def test_pinning_takes_next_to_nothing_of_the_gpu(
    shared: Path, want_shared: Callable[[int], None]
) -> None:
    want_shared(LARGE.data_bytes)
    with Arena.open(LARGE, "gpu-test", ALONE, arena_dir=str(shared)) as arena:
        assert kernel_works()
        torch.cuda.synchronize()
        before, _ = torch.cuda.mem_get_info()
        registration = cuda_registration(torch.device("cuda"))
        assert pin(registration, arena)
        during, _ = torch.cuda.mem_get_info()
        registration.release()
        after, _ = torch.cuda.mem_get_info()
    size = LARGE.slots * LARGE.slot_bytes
    print(
        f"{size // MIB} MiB pinned: {before - during} bytes of the GPU, {before - after} after it"
    )
    assert before - during <= TAKEN_BYTES_MAX
    assert before - after <= TAKEN_BYTES_MAX
