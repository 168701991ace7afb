"""Device <-> arena on CUDA: one stream per direction, events for what ended.

Order on the GPU: a job waits for what the compute stream had been given when it was submitted (a
store reads what the model has written; a load must not be overtaken by pending writes, such as
zeroing, to its destination), for the job before it, and for a job of the other direction that
shares a page or slot. The compute stream never waits for us.

Threads: all calls from the worker's main thread. Submissions only enqueue work, if the arena is
pinned; they never wait for the GPU. The arena must stay mapped until `shutdown` has returned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..logs import get_logger
from ..tiers.base import SlotArray
from .base import TransferResult
from .device import DeviceCopier, GpuBlocks
from .geometry import GroupRows, WorkerLayout
from .hazards import Direction, HazardBoard
from .host_register import HostRegistration, cuda_registration
from .staging import STAGING_BYTES, StagedCopier, torch_layouts

if TYPE_CHECKING:
    import torch

logger = get_logger(__name__)

ByteArray = npt.NDArray[np.uint8]

_MS_PER_S = 1000.0


@dataclass(frozen=True, slots=True)
class _Job:
    job_id: int
    number: int
    size_bytes: int
    start: Any
    end: Any
    was_enqueued: bool


class CudaDeviceCopier(DeviceCopier):
    """Copies between the KV tensors of one GPU and the arena."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        layout: WorkerLayout,
        slots: ByteArray,
        *,
        registration: HostRegistration | None = None,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        """`tensors` match `layout.tensors` and lie on one GPU; `slots` is `Arena.slots`.

        Pins the arena, which faults all of it in and may take seconds. Twice `staging_bytes` of GPU
        memory are taken per direction at most. Raises `ConfigError` if tensors, layout and arena
        do not fit together.
        """
        import torch

        if torch_layouts(tensors) != list(layout.tensors):
            raise ConfigError("the KV tensors differ from their layout; describe them again")
        if any(tensor.dtype != torch.int8 or tensor.stride(1) != 1 for tensor in tensors):
            raise ConfigError("KV tensors must be int8 with bytes of a page side by side")
        if slots.shape != (layout.slots, layout.slot_bytes):
            raise ConfigError(f"the arena is {slots.shape}, the layout says {layout.slots} slots")
        cuda: Any = torch.cuda
        self._cuda = cuda
        self._layout = layout
        self._device = tensors[0].device
        self._slots = slots
        arena = torch.from_numpy(slots).view(torch.int8)
        self._copiers = tuple(
            StagedCopier(tensors, layout, arena, staging_bytes=staging_bytes) for _ in Direction
        )
        self._streams = tuple(cuda.Stream(self._device) for _ in Direction)
        for stream in self._streams:  # the staging buffers were zeroed on the current stream
            stream.wait_stream(cuda.current_stream(self._device))
        blocks = max(tensor.num_blocks for tensor in layout.tensors)
        self._board = HazardBoard(blocks, layout.slots)
        self._running: tuple[deque[_Job], deque[_Job]] = (deque(), deque())
        self._is_shut = False
        # Last: nothing after it can fail and leave memory pinned that its owner will unmap.
        self._registration = registration or cuda_registration(self._device)
        self._registration.pin(int(slots.ctypes.data), layout.slots, layout.slot_bytes)

    def submit_store(self, job_id: int, blocks: GpuBlocks, slots: SlotArray) -> bool:
        return self._submit(Direction.STORE, job_id, blocks, slots)

    def submit_load(self, job_id: int, blocks: GpuBlocks, slots: SlotArray) -> bool:
        return self._submit(Direction.LOAD, job_id, blocks, slots)

    def get_finished(self) -> list[TransferResult]:
        results: list[TransferResult] = []
        for jobs in self._running:
            while jobs and self._has_ended(jobs[0]):
                results.append(self._result(jobs.popleft()))
        return results

    def wait(self, job_ids: Set[int]) -> None:
        """See `DeviceCopier.wait`. Not bounded by a time: if the GPU hangs, so does the engine."""
        for jobs in self._running:
            # Jobs of a direction end in order: waiting for the newest one is enough.
            named = [job for job in jobs if job.job_id in job_ids]
            if named:
                self._synchronize(named[-1])

    def shutdown(self, deadline_s: float = 5.0) -> None:
        """See `DeviceCopier.shutdown`. Waits for the GPU even beyond the deadline: memory must not
        be unpinned or unmapped under a running copy."""
        if self._is_shut:
            return
        self._is_shut = True
        for jobs in self._running:
            if jobs:
                self._synchronize(jobs[-1])
            jobs.clear()
        self._registration.release()

    def _submit(
        self, direction: Direction, job_id: int, blocks: GpuBlocks, slots: SlotArray
    ) -> bool:
        if self._is_shut:
            return False
        rows = self._layout.rows(blocks, slots)
        number, after = self._board.admit(direction, rows)
        stream = self._streams[direction]
        cuda = self._cuda
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        stream.wait_stream(cuda.current_stream(self._device))
        earlier = [job for job in self._running[direction.other] if job.number <= after]
        if earlier:
            stream.wait_event(earlier[-1].end)
        with cuda.device(self._device), cuda.stream(stream):
            start.record(stream)
            was_enqueued = self._enqueue(direction, job_id, rows)
            end.record(stream)
        size_bytes = self._layout.total_bytes(rows)
        self._running[direction].append(_Job(job_id, number, size_bytes, start, end, was_enqueued))
        return True

    def _enqueue(self, direction: Direction, job_id: int, rows: list[GroupRows]) -> bool:
        copier = self._copiers[direction]
        try:
            if direction is Direction.STORE:
                copier.store(rows)
            else:
                copier.load(rows)
        except RuntimeError:  # CUDA errors; wrong bytes must not be called stored or loaded
            logger.exception("copying job %d failed", job_id)
            return False
        return True

    def _has_ended(self, job: _Job) -> bool:
        try:
            return bool(job.end.query())
        except RuntimeError:  # the GPU is lost: report the job as failed
            return True

    def _synchronize(self, job: _Job) -> None:
        try:
            job.end.synchronize()
        except RuntimeError:
            logger.exception("waiting for job %d failed", job.job_id)

    def _result(self, job: _Job) -> TransferResult:
        try:
            time_s = job.start.elapsed_time(job.end) / _MS_PER_S
        except RuntimeError:
            return TransferResult(job.job_id, False)
        return TransferResult(job.job_id, job.was_enqueued, job.size_bytes, time_s)
