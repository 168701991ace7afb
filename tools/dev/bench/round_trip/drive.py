"""An engine without a model: manager, worker's half and copier, driven through their contracts.

Both halves of an engine run in this process. The worker's half joins the arena as rank 0 over the
device's tensors. The scheduler's half has the manager over arena and NVMe tier. The calls are those
of the adapter for vLLM, but vLLM is not needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from time import monotonic, perf_counter, sleep
from typing import TYPE_CHECKING

from .....handlers.device.copier import DeviceCopier, GpuBlocks
from .....handlers.device.geometry import WorkerLayout
from .....handlers.node.nvme_handlers import NvmeLoadHandler, NvmeStoreHandler
from .....manager.cascading import ManagerOptions, WriteMode, build_cascade
from .....manager.flow import Link
from .....manager.level import Tier
from .....manager.request import Request
from .....tiers.base import BlockHash, SlotArray, SlotSpec
from .....tiers.cpu.arena import Arena, ArenaRole
from .....tiers.cpu.cpu_backend import CpuBackend
from .....tiers.cpu.header import ArenaGeometry
from .....tiers.policies import create
from ....commands.bench.bench_results import BenchError
from .disk_tier import DiskTier

if TYPE_CHECKING:
    import torch

IO_THREADS = 4
COPY_THREADS = 2
IDLE_S = 0.001
"""Pause between two steps, like that of an idle engine of vLLM."""
TIMEOUT_S = 300.0
"""Time after which a phase counts as hung."""
WINDOW = 6
"""Number of requests that wait for their blocks concurrently."""

_engines = count()


@dataclass(frozen=True, slots=True)
class RequestPart:
    """Blocks of one request, and the device blocks that hold them."""

    keys: list[BlockHash]
    device_blocks: list[int]


@dataclass(slots=True)
class _Job:
    part: RequestPart
    request: Request


class DrivenEngine:
    """One run of an engine over an open NVMe tier, which it closes. One thread."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        layout: WorkerLayout,
        geometry: ArenaGeometry,
        disk: DiskTier,
    ) -> None:
        """Start the engine; `tensors` are int8 of shape `(blocks, page_bytes)`, one per layer, on
        one device.

        On an error it raises a `KVCascadeError`, and leaves the tier open.
        """
        self._tensors = tensors
        self._jobs: dict[int, _Job] = {}
        self._job_ids = count(1)
        name = f"round-trip-{os.getpid()}-{next(_engines)}"
        with ExitStack() as undo:
            self._copier = _worker(tensors, layout, geometry, name, undo)
            stores, loads = (undo.enter_context(ThreadPoolExecutor(IO_THREADS)) for _ in range(2))
            arena = Arena.open(geometry, name, ArenaRole.scheduler())
            undo.callback(arena.close)
            link = Link(
                NvmeStoreHandler(disk.store, arena.slot_view, stores),
                NvmeLoadHandler(disk.store, arena.slot_view, loads),
            )
            slots = geometry.slots
            top = Tier("cpu", CpuBackend.over(arena), create("lru", slots))
            options = ManagerOptions(
                write_mode=WriteMode.THROUGH, load_or_recompute=False, with_events=False
            )
            self._manager = build_cascade([top, disk.tier], [link], options)
            self._undo = undo.pop_all()
        self._disk = disk

    @property
    def on_disk(self) -> int:
        """Return the number of blocks in the NVMe tier."""
        return self._manager.tier_states()[1].blocks

    def close(self) -> None:
        """Shut down in an engine's order: the worker's transfers, the manager, the tiers."""
        has_ended = self._manager.shutdown()
        self._undo.close()
        self._disk.close()
        if not has_ended:
            raise BenchError("transfers to the disk were still under way at the shutdown")

    def store(self, parts: Sequence[RequestPart]) -> float:
        """Store every part in the CPU tier; return the seconds until the last part is stored."""
        began = perf_counter()
        for part in parts:
            request = Request()
            output = self._manager.prepare_store(part.keys, request)
            if output is None or len(output.block_hashes_to_store) != len(part.keys):
                raise BenchError("the CPU tier did not take all blocks")
            assert isinstance(output.store_spec, SlotSpec)
            self._submit(self._copier.submit_store, part, request, output.store_spec)
        ended: list[_Job] = []
        for _ in _until(lambda: not self._jobs, "stores from the device"):
            ended += self._finished()
        took_s = perf_counter() - began
        for job in ended:
            self._manager.complete_store(job.part.keys)
            self._manager.finish_request(job.request)
        return took_s

    def write_down(self) -> float:
        """Write all stored blocks to the NVMe tier; return the seconds."""
        began = perf_counter()
        for _ in _until(self._is_clean, "writes to the disk"):
            sleep(IDLE_S)
            self._manager.end_step()
        return perf_counter() - began

    def load(self, parts: Sequence[RequestPart]) -> float:
        """Load every part to the device, from any tier; return the seconds.

        Raises `BenchError` if a block is in no tier.
        """
        waiting = list(reversed(parts))
        active: list[_Job] = []
        began = perf_counter()
        for _ in _until(lambda: not (waiting or active or self._jobs), "loads to the device"):
            while waiting and len(active) < WINDOW:
                active.append(_Job(waiting.pop(), Request()))
            active[:] = [job for job in active if not self._try_load(job)]
            ended = self._finished()
            for job in ended:
                self._manager.complete_load(job.part.keys)
                self._manager.finish_request(job.request)
            self._manager.end_step()
            if not ended:
                sleep(IDLE_S)
        return perf_counter() - began

    def _try_load(self, job: _Job) -> bool:
        """Look up a request's blocks; return True if all are hits and their copy has begun."""
        keys = job.part.keys
        hits = self._manager.lookup(keys, job.request)
        if hits is None:
            return False
        if hits < len(keys):
            raise BenchError(f"{len(keys) - hits} blocks that were stored are in no tier")
        source = self._manager.prepare_load(keys, job.request)
        assert isinstance(source, SlotSpec)
        self._submit(self._copier.submit_load, job.part, job.request, source)
        return True

    def _submit(
        self,
        start: Callable[[int, GpuBlocks, SlotArray], bool],
        part: RequestPart,
        request: Request,
        spec: SlotSpec,
    ) -> None:
        job_id = next(self._job_ids)
        blocks = GpuBlocks.of(part.device_blocks, [len(part.device_blocks)], [0])
        if not start(job_id, blocks, spec.slots):
            raise BenchError("a transfer between device and arena was refused")
        self._jobs[job_id] = _Job(part, request)

    def _finished(self) -> list[_Job]:
        results = self._copier.get_finished()
        if not all(result.success for result in results):
            raise BenchError("a transfer between device and arena failed; see the log")
        return [self._jobs.pop(result.job_id) for result in results]

    def _is_clean(self) -> bool:
        top, disk = self._manager.tier_states()
        return not (top.dirty_blocks or disk.demote_jobs)


def _worker(
    tensors: Sequence[torch.Tensor],
    layout: WorkerLayout,
    geometry: ArenaGeometry,
    name: str,
    undo: ExitStack,
) -> DeviceCopier:
    """Return the worker's half; `undo` closes it."""
    arena = Arena.open(geometry, name, ArenaRole.worker(0))
    undo.callback(arena.close)
    arena.publish_layout(layout.digest(""))
    executor: Executor = undo.enter_context(ThreadPoolExecutor(COPY_THREADS))
    copier: DeviceCopier
    if tensors[0].is_cuda:
        from .....handlers.device.device_cuda import CudaDeviceCopier

        copier = CudaDeviceCopier(tensors, layout, arena.slots)
    else:
        from .....handlers.device.device_cpu import CpuDeviceCopier

        copier = CpuDeviceCopier([t.numpy() for t in tensors], layout, arena.slots, executor)
    undo.callback(copier.shutdown)
    return copier


def _until(is_done: Callable[[], bool], what: str) -> Iterator[None]:
    """Yield once per step until a condition holds. Raises `BenchError` after `TIMEOUT_S`."""
    end_s = monotonic() + TIMEOUT_S
    while not is_done():
        if monotonic() > end_s:
            raise BenchError(f"{what} did not end within {TIMEOUT_S:.0f} s")
        yield
