"""A contender without vLLM: a batched copy with one descriptor per page, like vLLM's.

vLLM's worker passes all pages of a transfer to the driver in one call, between the device and a
pinned region in shared memory. This copier makes the same call over an arena of its own.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from .....handlers.device.batched_copy import Batch, SourceOrder
from .....handlers.device.copier import DeviceCopier, Direction, GpuBlocks, TransferResult
from .....handlers.device.host_register import HostRegistration
from .....tiers.base import SlotArray
from .....tiers.cpu.arena import Arena, ArenaRole
from .....tiers.cpu.header import ArenaGeometry
from ....commands.bench.bench_results import BenchError

if TYPE_CHECKING:
    import torch

MS_PER_S = 1000.0
_ORDER = {Direction.STORE: SourceOrder.STREAM, Direction.LOAD: SourceOrder.ANY}
"""Order of source accesses, as in vLLM's worker."""

_arenas = count()


@dataclass(frozen=True, slots=True)
class _Job:
    job_id: int
    size_bytes: int
    start: Any
    end: Any


class PageCopier(DeviceCopier):
    """Copies between tensors of shape `(blocks, page_bytes)` and an arena of its own.

    One stream per direction; a transfer is one call, whatever its size. One thread.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        slots: int,
        batch: Batch,
        registration: HostRegistration,
    ) -> None:
        """Create the copier; `registration` pins its `slots` rows of CPU memory.

        Raises `BenchError` if the memory cannot be pinned.
        """
        import torch

        cuda: Any = torch.cuda
        self._cuda, self._batch, self._registration = cuda, batch, registration
        self._device = tensors[0].device
        pages = [tensor.shape[1] for tensor in tensors]
        geometry = ArenaGeometry(slots, sum(pages), 1)
        role = ArenaRole.scheduler(expect_workers=False)
        self._arena = Arena.open(geometry, f"bench-pages-{os.getpid()}-{next(_arenas)}", role)
        rows = self._arena.slots
        if not registration.pin(int(rows.ctypes.data), slots, geometry.slot_bytes):
            self._arena.close()
            raise BenchError("its CPU memory could not be pinned")
        offsets = np.cumsum([0, *pages[:-1]])
        self._pages = np.array(pages, dtype=np.uint64)
        self._bases = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64)
        self._strides = np.array([tensor.stride(0) for tensor in tensors], dtype=np.uint64)
        self._places = (offsets + rows.ctypes.data).astype(np.uint64)
        self._slot_bytes = np.uint64(geometry.slot_bytes)
        self._streams = {way: cuda.Stream(self._device) for way in Direction}
        self._jobs: dict[Direction, deque[_Job]] = {way: deque() for way in Direction}
        self._events: list[Any] = []
        """Events of finished transfers, for reuse."""

    def submit(
        self, direction: Direction, job_id: int, blocks: GpuBlocks, slots: SlotArray
    ) -> bool:
        ids, rows = blocks.block_ids.astype(np.uint64), slots.astype(np.uint64)
        device = (self._bases[:, None] + ids * self._strides[:, None]).ravel()
        memory = (self._places[:, None] + rows * self._slot_bytes).ravel()
        sizes = np.repeat(self._pages, len(ids))
        sources, targets = (device, memory) if direction is Direction.STORE else (memory, device)
        stream = self._streams[direction]
        start, end = self._event(), self._event()
        stream.wait_stream(self._cuda.current_stream(self._device))
        start.record(stream)
        with self._cuda.device(self._device), self._cuda.stream(stream):
            self._batch(targets, sources, sizes, _ORDER[direction])
        end.record(stream)
        self._jobs[direction].append(_Job(job_id, int(sizes.sum()), start, end))
        return True

    def get_finished(self) -> list[TransferResult]:
        found: list[TransferResult] = []
        for jobs in self._jobs.values():
            while jobs and jobs[0].end.query():
                job = jobs.popleft()
                time_s = job.start.elapsed_time(job.end) / MS_PER_S
                found.append(TransferResult(job.job_id, True, job.size_bytes, time_s))
                self._events += (job.start, job.end)
        return found

    def wait(self, job_ids: Set[int]) -> None:
        for jobs in self._jobs.values():
            for job in jobs:
                if job.job_id in job_ids:
                    job.end.synchronize()

    def shutdown(self, deadline_s: float = 5.0) -> None:
        for jobs in self._jobs.values():
            if jobs:
                jobs[-1].end.synchronize()
            jobs.clear()
        self._registration.release()
        self._arena.close()

    def _event(self) -> Any:
        return self._events.pop() if self._events else self._cuda.Event(enable_timing=True)
