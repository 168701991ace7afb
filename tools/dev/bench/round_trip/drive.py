"""An engine without a model: manager, worker's half and copier, driven through their contracts.

Both halves of an engine run in this process. The worker's half joins the arena as rank 0 over the
device's tensors. The scheduler's half has the manager over arena and NVMe tier, whose node is a
process. The calls are those of the adapter for vLLM, but vLLM is not needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from time import perf_counter, sleep
from typing import TYPE_CHECKING

from .....assembly.node_parts import SlotMemory
from .....config.schema import WriteMode
from .....handlers.device.copier import DeviceCopier, GpuBlocks
from .....handlers.device.geometry import WorkerLayout
from .....manager.cascading import CascadingOffloadingManager
from .....manager.core import ManagerOptions
from .....manager.first_tier import Tier
from .....manager.request import Request
from .....tiers.base import BlockHash, LoadStoreSpec, SlotArray
from .....tiers.cpu.arena import Arena, ArenaRole
from .....tiers.cpu.cpu_backend import CpuBackend
from .....tiers.cpu.header import ArenaGeometry
from .....tiers.nvme.namespace import NamespaceKey
from .....tiers.policies import create
from ....commands.bench.bench_results import BenchError
from ....commands.bench.bench_tier import open_bench_tier
from ..measurement import until
from . import WINDOW

if TYPE_CHECKING:
    from pathlib import Path

    import torch

COPY_THREADS = 2
IDLE_S = 0.001
"""Pause between two steps, like that of an idle engine of vLLM."""

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
    """One run of an engine over an NVMe tier in a folder. One thread."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        layout: WorkerLayout,
        geometry: ArenaGeometry,
        folder: Path,
        disk_bytes: int,
    ) -> None:
        """Start the engine; `tensors` are int8 of shape `(blocks, page_bytes)`, one per layer, on
        one device. The tier in `folder` may take `disk_bytes`. Raises a `KVCascadeError`.
        """
        self._tensors = tensors
        self._jobs: dict[int, _Job] = {}
        self._job_ids = count(1)
        name = f"round-trip-{os.getpid()}-{next(_engines)}"
        with ExitStack() as undo:
            self._copier = _worker(tensors, layout, geometry, name, undo)
            arena = Arena.open(geometry, name, ArenaRole.scheduler())
            undo.callback(arena.close)
            key = NamespaceKey("round-trip", {"block_bytes": geometry.slot_bytes})
            tier = open_bench_tier(folder, disk_bytes, key, SlotMemory.of(arena))
            undo.callback(tier.close)
            backend = CpuBackend(geometry.slot_bytes, geometry.slots)
            top = Tier("cpu", backend, create("lru", geometry.slots))
            options = ManagerOptions(
                write_mode=WriteMode.THROUGH, load_or_recompute=False, with_events=False
            )
            self._manager = CascadingOffloadingManager(top, tier.port, options)
            self._undo = undo.pop_all()

    @property
    def written_blocks(self) -> int:
        """Return the number of blocks that this run wrote to the NVMe tier."""
        return self._manager.counters.links[0].demoted_blocks

    def close(self) -> None:
        """Shut down in an engine's order: the worker's transfers, the manager, the tiers."""
        has_ended = self._manager.shutdown()
        self._undo.close()
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
            self._submit(self._copier.submit_store, part, request, output.store_spec)
        ended: list[_Job] = []
        for _ in until(lambda: not self._jobs, "stores from the device"):
            ended += self._finished()
        took_s = perf_counter() - began
        for job in ended:
            self._manager.complete_store(job.part.keys)
            self._manager.finish_request(job.request)
        return took_s

    def write_down(self) -> float:
        """Write all stored blocks to the NVMe tier; return the seconds."""
        began = perf_counter()
        for _ in until(self._is_clean, "writes to the disk"):
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
        for _ in until(lambda: not (waiting or active or self._jobs), "loads to the device"):
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
        self._submit(self._copier.submit_load, job.part, job.request, source)
        return True

    def _submit(
        self,
        start: Callable[[int, GpuBlocks, SlotArray], bool],
        part: RequestPart,
        request: Request,
        spec: LoadStoreSpec,
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
