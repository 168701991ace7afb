"""Device <-> arena on CUDA: two streams per direction, events for what ended.

Order on the GPU: a job waits for what the compute stream had been given when it was submitted (a
store reads what the model has written; a load must not be overtaken by pending writes, such as
zeroing, to its destination), for the job before it, and for a job of the other direction that
shares a page or slot. The compute stream never waits for us. Kernels have a stream of higher
priority, copies another; the last of the two for a direction is the one that writes to the
destination, and the job's end is recorded there (`staging`).

A load starts when it is submitted. A store starts with the next call of `get_finished` or `wait`:
the engine submits stores before it launches a forward pass and asks what ended after it, so that
launching copies does not delay the pass. A direction is given a bounded number of operations at a
time (`stream_feed`); the rest of a job follows with later calls, in the order of submission. That
the engine calls again while a job is under way, and leaves its pages alone until it is reported or
waited for, is the contract of `DeviceCopier`; an engine that does not call again while stores are
under way needs `may_hold_back_stores=False`, and its stores start at once.

Threads: all calls from the worker's main thread. If the arena is pinned, submitting and asking what
ended never wait for the GPU, except for a job of the other direction that is still held back and
shares a page or slot, which neither engine nor manager asks for. The arena must stay mapped until
`shutdown` has returned.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError
from ...logs import get_logger
from ...tiers.base import SlotArray
from ..base import TransferResult
from .batched_copy import Batch, find_driver_batch
from .copier import DeviceCopier, GpuBlocks
from .geometry import GroupRows, WorkerLayout
from .hazards import Direction, HazardBoard
from .host_register import HostRegistration, cuda_registration
from .staging import STAGING_BYTES, StagedCopier, torch_layouts
from .stream_feed import OUTSTANDING_MAX, StreamFeed, Work

if TYPE_CHECKING:
    import torch

logger = get_logger(__name__)

ByteArray = npt.NDArray[np.uint8]

_MS_PER_S = 1000.0
KERNEL_PRIORITY = -1
"""Above the compute stream's: gathering a piece takes microseconds, and a copy waits for it."""


@dataclass(slots=True)
class _Job:
    job_id: int
    number: int
    size_bytes: int
    ready: Any
    """Event of the compute stream: the job comes after it."""
    start: Any
    end: Any
    is_handed_out: bool = False
    """True once the stream has all of it, `end` included."""
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class _Lane:
    """One direction."""

    streams: tuple[Any, Any]
    """The first of a job's steps go to the first, the last to the second."""
    feed: StreamFeed
    move: Callable[[Sequence[GroupRows]], Work]
    jobs: deque[_Job] = field(default_factory=deque)
    """Not reported yet, oldest first."""

    @property
    def last(self) -> Any:
        """The stream whose end is a job's end."""
        return self.streams[1]


class CudaDeviceCopier(DeviceCopier):
    """Copies between the KV tensors of one GPU and the arena."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        layout: WorkerLayout,
        slots: ByteArray,
        *,
        registration: HostRegistration | None = None,
        find_batch: Callable[[], Batch | None] = find_driver_batch,
        staging_bytes: int = STAGING_BYTES,
        may_hold_back_stores: bool = True,
    ) -> None:
        """`tensors` match `layout.tensors` and lie on one GPU; `slots` is `Arena.slots`.

        Pins the arena, which faults all of it in and may take seconds. `staging_bytes` of GPU
        memory are taken per direction at most. `may_hold_back_stores`: the engine asks what ended
        as long as stores are under way. Raises `ConfigError` if tensors, layout and arena do not
        fit together, or the GPU cannot copy.
        """
        import torch

        _check(tensors, layout, slots)
        cuda: Any = torch.cuda
        self._cuda = cuda
        self._layout = layout
        self._device = tensors[0].device
        self._slots = slots
        blocks = max(tensor.num_blocks for tensor in layout.tensors)
        self._board = HazardBoard(blocks, layout.slots)
        self._is_shut = False
        self._starts_late = frozenset({Direction.STORE} if may_hold_back_stores else ())
        self._registration = registration or cuda_registration(self._device)
        self._registration.pin(int(slots.ctypes.data), layout.slots, layout.slot_bytes)
        arena = torch.from_numpy(slots).view(torch.int8)
        batch = find_batch() if self._registration.is_pinned else None
        copier = partial(
            StagedCopier, tensors, layout, arena, staging_bytes=staging_bytes, batch=batch
        )
        store_max = OUTSTANDING_MAX if may_hold_back_stores else sys.maxsize
        try:
            self._lanes = (
                self._open_lane(Direction.STORE, copier, store_max),
                self._open_lane(Direction.LOAD, copier, OUTSTANDING_MAX),
            )
        except RuntimeError as error:
            self._registration.release()  # its owner will unmap the memory
            raise ConfigError(
                f"the GPU could not be made ready for copies ({_first_line(error)}); if it is out "
                f"of memory, leave it some with a lower gpu_memory_utilization"
            ) from error

    def submit_store(self, job_id: int, blocks: GpuBlocks, slots: SlotArray) -> bool:
        return self._submit(Direction.STORE, job_id, blocks, slots)

    def submit_load(self, job_id: int, blocks: GpuBlocks, slots: SlotArray) -> bool:
        return self._submit(Direction.LOAD, job_id, blocks, slots)

    def get_finished(self) -> list[TransferResult]:
        results: list[TransferResult] = []
        for lane in self._lanes:
            self._advance(lane)
            while lane.jobs and self._has_ended(lane.jobs[0]):
                results.append(self._result(lane.jobs.popleft()))
        return results

    def wait(self, job_ids: Set[int]) -> None:
        """See `DeviceCopier.wait`. Not bounded by a time: if the GPU hangs, so does the engine."""
        for lane in self._lanes:
            # Jobs of a direction end in order: waiting for the newest one is enough.
            named = [job for job in lane.jobs if job.job_id in job_ids]
            if named:
                self._hand_out(lane, named[-1])
                self._synchronize(named[-1])

    def shutdown(self, deadline_s: float = 5.0) -> None:
        """See `DeviceCopier.shutdown`. What a stream was not given yet is dropped. Waits for the
        rest even beyond the deadline: memory must not be unpinned or unmapped under a running copy.
        """
        if self._is_shut:
            return
        self._is_shut = True
        for lane in self._lanes:
            lane.feed.drop()
            for stream in lane.streams:
                with suppress(RuntimeError):  # the GPU is lost, and nothing is running
                    stream.synchronize()
            lane.jobs.clear()
        self._registration.release()

    def _open_lane(
        self, direction: Direction, make: Callable[..., StagedCopier], outstanding_max: int
    ) -> _Lane:
        """Streams that have done everything once that jobs do."""
        kernels = self._cuda.Stream(self._device, priority=KERNEL_PRIORITY)
        copies = self._cuda.Stream(self._device)
        copier = make(on_kernels=partial(self._on, kernels), on_copies=partial(self._on, copies))
        is_store = direction is Direction.STORE
        streams = (kernels, copies) if is_store else (copies, kernels)
        for stream in streams:  # the current stream zeroed the buffers
            stream.wait_stream(self._cuda.current_stream(self._device))
        copier.warm_up()
        for stream in streams:
            stream.synchronize()
        feed = StreamFeed(partial(self._mark, streams[1]), outstanding_max=outstanding_max)
        return _Lane(streams, feed, copier.store if is_store else copier.load)

    def _submit(
        self, direction: Direction, job_id: int, blocks: GpuBlocks, slots: SlotArray
    ) -> bool:
        if self._is_shut:
            return False
        rows = self._layout.rows(blocks, slots)
        number, after = self._board.admit(direction, rows)
        job = self._make_job(job_id, number, rows)
        lane, other = self._lanes[direction], self._lanes[direction.other]
        earlier = [each for each in other.jobs if each.number <= after][-1:]
        for each in earlier:
            self._hand_out(other, each)  # its end must be there to be waited for
        lane.jobs.append(job)
        lane.feed.add(self._work(lane, job, rows, earlier))
        if direction not in self._starts_late:
            self._advance(lane)
        return True

    def _make_job(self, job_id: int, number: int, rows: list[GroupRows]) -> _Job:
        ready = self._cuda.Event()
        ready.record(self._cuda.current_stream(self._device))
        start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        return _Job(job_id, number, self._layout.total_bytes(rows), ready, start, end)

    def _work(self, lane: _Lane, job: _Job, rows: list[GroupRows], earlier: list[_Job]) -> Work:
        """All of a job, from waiting for what comes before it to the event behind it."""
        try:
            for event in (job.ready, *(each.end for each in earlier)):
                for stream in lane.streams:
                    stream.wait_event(event)
                yield len(lane.streams)
            job.start.record(lane.last)
            yield 1
            yield from lane.move(rows)
        except Exception:  # CUDA errors; wrong bytes must not be called stored or loaded
            logger.exception("copying job %d failed", job.job_id)
            job.has_failed = True
        try:
            job.end.record(lane.last)
        except RuntimeError:  # the GPU is lost
            job.has_failed = True
        job.is_handed_out = True
        yield 1

    def _advance(self, lane: _Lane) -> None:
        """Hand out what there is room for; never blocks."""
        if lane.feed.has_work:
            with self._cuda.device(self._device):
                lane.feed.advance()

    def _hand_out(self, lane: _Lane, job: _Job) -> None:
        """Hand out everything up to the end of a job, waiting for room as often as it takes."""
        with self._cuda.device(self._device):
            while not job.is_handed_out:
                lane.feed.push()

    def _mark(self, stream: Any) -> Any:
        mark = self._cuda.Event()
        with suppress(RuntimeError):  # the GPU is lost; a mark that is not there counts as ended
            mark.record(stream)
        return mark

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        """What is enqueued meanwhile goes to the stream."""
        with self._cuda.device(self._device), self._cuda.stream(stream):
            yield

    def _has_ended(self, job: _Job) -> bool:
        try:
            return job.is_handed_out and bool(job.end.query())
        except RuntimeError:  # the GPU is lost: report the job as failed
            return True

    def _synchronize(self, job: _Job) -> None:
        try:
            job.end.synchronize()
        except RuntimeError:
            logger.exception("waiting for job %d failed", job.job_id)

    def _result(self, job: _Job) -> TransferResult:
        if job.has_failed:  # an event of it may be missing, and torch then raises `ValueError`
            return TransferResult(job.job_id, False)
        try:
            time_s = job.start.elapsed_time(job.end) / _MS_PER_S
        except RuntimeError:  # the GPU is lost
            return TransferResult(job.job_id, False)
        return TransferResult(job.job_id, True, job.size_bytes, time_s)


def _check(tensors: Sequence[torch.Tensor], layout: WorkerLayout, slots: ByteArray) -> None:
    """Raises `ConfigError` if they do not fit together."""
    import torch

    if torch_layouts(tensors) != list(layout.tensors):
        raise ConfigError("the KV tensors differ from their layout; describe them again")
    if any(tensor.dtype != torch.int8 or tensor.stride(1) != 1 for tensor in tensors):
        raise ConfigError("KV tensors must be int8 with bytes of a page side by side")
    if slots.shape != (layout.slots, layout.slot_bytes):
        raise ConfigError(f"the arena is {slots.shape}, the layout says {layout.slots} slots")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
