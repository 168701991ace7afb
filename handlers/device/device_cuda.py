"""Copier of CUDA devices, with two streams per direction and an event behind each job.

Order on the GPU: a job waits for everything that the compute stream was given before it was
submitted. So a store reads what the model has written, and a load is not overwritten by pending
writes such as zeroing. A job also waits for earlier jobs of its direction, and for a job of the
other direction that shares a page or slot. The compute stream never waits for a job. Each direction
has a stream of higher priority for kernels, and one for copies. One of the two does all writes to
the destination, and a job's end is recorded there (`staging`).

A job starts with the next call of `get_finished` or `wait`. The engine submits stores before it
launches a forward pass, and loads before or after it. It calls `get_finished` after the pass, so
launching copies does not delay the pass. Each stream is given a limited number of operations at a
time (`stream_feed`). The rest of a very large job follows with later calls, in submission order. By
the contract of `DeviceCopier` the engine goes on calling while a job is in flight. An engine that
does not call while stores are in flight needs `may_hold_back=False`. Its jobs start at once, and
its stores as a whole.

Threads: all calls come from the worker's main thread. If the arena is pinned, `submit_*` and
`get_finished` do not wait for the GPU. The exception is a job that shares a page or slot with a
held-back job of the other direction, which neither engine nor manager submits. The arena must stay
mapped until `shutdown` has returned.
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
from .batched_copy import Batch, SourceOrder, find_driver_batch
from .copier import DeviceCopier, Direction, GpuBlocks, TransferResult
from .geometry import GroupRows, WorkerLayout
from .hazards import HazardBoard
from .host_register import HostRegistration, cuda_registration
from .staging import STAGING_BYTES, StagedCopier, torch_layouts
from .stream_feed import OUTSTANDING_MAX, Mark, Operations, StreamFeed, Work

if TYPE_CHECKING:
    import torch

logger = get_logger(__name__)

ByteArray = npt.NDArray[np.uint8]

_MS_PER_S = 1000.0
KERNEL_PRIORITY = -1
"""Priority above the compute stream's: a kernel takes microseconds, and a copy waits for it."""


@dataclass(slots=True)
class _Job:
    job_id: int
    number: int
    size_bytes: int
    ready: Any
    """Event of the compute stream that the job waits for."""
    start: Any
    end: Any
    is_handed_out: bool = False
    """True once the streams were given the whole job and `end` is recorded."""
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class _Lane:
    """Streams and jobs of one direction."""

    streams: tuple[Any, Any]
    """Stream of the first step of a piece, and stream of its last step."""
    feed: StreamFeed
    copier: StagedCopier
    move: Callable[[Sequence[GroupRows], SourceOrder], Work]
    jobs: deque[_Job] = field(default_factory=deque)
    """Jobs that have not been reported, oldest first."""

    @property
    def last(self) -> Any:
        """Stream on which the ends of jobs are recorded."""
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
        may_hold_back: bool = True,
    ) -> None:
        """`tensors` match `layout.tensors` and lie on one GPU. `slots` is `Arena.slots`.

        Pins the arena, which maps all of it and may take seconds. `staging_bytes` limits the GPU
        memory of each direction's staging buffer. `may_hold_back` says that the engine calls
        `get_finished` as long as jobs are in flight. Raises `ConfigError` if tensors, layout and
        arena do not fit together, or if the GPU cannot copy.
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
        self._starts_late = may_hold_back
        self._registration = registration or cuda_registration(self._device)
        self._registration.pin(int(slots.ctypes.data), layout.slots, layout.slot_bytes)
        arena = torch.from_numpy(slots).view(torch.int8)
        batch = find_batch() if self._registration.is_pinned else None
        copier = partial(
            StagedCopier,
            tensors,
            layout,
            arena,
            cuda.Event,
            staging_bytes=staging_bytes,
            batch=batch,
        )
        store_max = OUTSTANDING_MAX if may_hold_back else sys.maxsize
        try:
            self._lanes: tuple[_Lane, ...] = (
                self._open_lane(Direction.STORE, copier, store_max),
                self._open_lane(Direction.LOAD, copier, OUTSTANDING_MAX),
            )
        except Exception as error:
            self._registration.release()  # its owner will unmap the memory
            if not isinstance(error, RuntimeError):
                raise
            raise ConfigError(
                f"the GPU could not be made ready for copies ({_first_line(error)}); if it is out "
                f"of memory, leave it some with a lower gpu_memory_utilization"
            ) from error

    @property
    def is_batched(self) -> bool:
        """Return True if copies of both directions are made in batched calls of the driver."""
        return all(lane.copier.is_batched for lane in self._lanes)

    def submit(
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
            self._hand_out(other, each)  # only a recorded end can be waited for
        # The driver must not read a slot before an earlier store has written it.
        is_settled = direction is Direction.LOAD and not earlier
        order = SourceOrder.ANY if is_settled else SourceOrder.STREAM
        lane.feed.add(self._work(lane, job, earlier, lane.move(rows, order)))
        lane.jobs.append(job)  # after an interrupt, no job waits for work that is not in the feed
        if not self._starts_late:
            self._advance(lane)
        return True

    def get_finished(self) -> list[TransferResult]:
        results: list[TransferResult] = []
        for lane in self._lanes:
            self._advance(lane)
            while lane.jobs and self._has_ended(lane.jobs[0]):
                results.append(self._result(lane.jobs.popleft()))
        return results

    def wait(self, job_ids: Set[int]) -> None:
        """Wait as in the contract, without a time limit: if the GPU hangs, so does the engine."""
        for lane in self._lanes:
            # Jobs of a direction end in order, so waiting for the newest one is enough.
            named = [job for job in lane.jobs if job.job_id in job_ids]
            if named:
                self._hand_out(lane, named[-1])
                self._synchronize(named[-1])

    def shutdown(self, deadline_s: float = 5.0) -> None:
        """Drop the work that no stream was given, and wait for the rest even beyond the deadline.

        Memory must not be unpinned or unmapped while a copy uses it.
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
        self._lanes = ()  # they refer to this object, which keeps the arena mapped
        self._registration.release()

    def _open_lane(
        self, direction: Direction, make: Callable[..., StagedCopier], outstanding_max: int
    ) -> _Lane:
        """Make the streams of a direction and warm up their kernels."""
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
        feed = StreamFeed(partial(self._mark, streams), outstanding_max=outstanding_max)
        return _Lane(streams, feed, copier, copier.store if is_store else copier.load)

    def _make_job(self, job_id: int, number: int, rows: list[GroupRows]) -> _Job:
        ready = self._cuda.Event()
        start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        job = _Job(job_id, number, self._layout.total_bytes(rows), ready, start, end)
        try:
            ready.record(self._cuda.current_stream(self._device))
        except RuntimeError:  # the GPU is lost
            logger.exception("submitting job %d failed", job_id)
            job.has_failed = True
        return job

    def _work(self, lane: _Lane, job: _Job, earlier: list[_Job], move: Work) -> Work:
        """Enqueue a job, from its first wait to its end event, as the result is iterated."""
        try:
            if not job.has_failed:
                yield from self._begin(lane, job, earlier)
                yield from move
        except Exception:  # wrong bytes must not be reported as stored or loaded
            logger.exception("copying job %d failed", job.job_id)
            job.has_failed = True
        except BaseException:  # an interrupt: its slots are in use until what was launched ends
            job.has_failed = True
            raise
        finally:
            self._end(lane, job)
        yield Operations(1, 1)

    def _end(self, lane: _Lane, job: _Job) -> None:
        """Record the end of a job: nothing of it comes later."""
        try:
            job.end.record(lane.last)
        except RuntimeError:  # the GPU is lost
            job.has_failed = True
        except BaseException:  # an interrupt
            job.has_failed = True
            raise
        finally:
            job.is_handed_out = True

    def _begin(self, lane: _Lane, job: _Job, earlier: list[_Job]) -> Work:
        """Wait for the compute stream and the earlier jobs, and record the job's start."""
        for event in (job.ready, *(each.end for each in earlier)):
            for stream in lane.streams:
                stream.wait_event(event)
            yield Operations(1, 1)
        job.start.record(lane.last)
        yield Operations(1, 1)

    def _advance(self, lane: _Lane) -> None:
        """Hand out as much work as the streams have room for. Never blocks."""
        if lane.feed.has_work:
            with self._cuda.device(self._device):
                lane.feed.advance()

    def _hand_out(self, lane: _Lane, job: _Job) -> None:
        """Hand out all work up to the end of a job, and wait for room if necessary."""
        with self._cuda.device(self._device):
            while not job.is_handed_out:
                lane.feed.push()

    def _mark(self, streams: tuple[Any, Any]) -> Mark:
        events = tuple(self._cuda.Event() for _ in streams)
        for event, stream in zip(events, streams, strict=True):
            with suppress(RuntimeError):  # the GPU is lost; an unrecorded event counts as ended
                event.record(stream)
        return events

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        """Make the stream the current one."""
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
        if job.has_failed:  # without a recorded event, torch raises `ValueError`
            return TransferResult(job.job_id, False)
        try:
            time_s = job.start.elapsed_time(job.end) / _MS_PER_S
        except RuntimeError:  # the GPU is lost
            return TransferResult(job.job_id, False)
        return TransferResult(job.job_id, True, job.size_bytes, time_s)


def _check(tensors: Sequence[torch.Tensor], layout: WorkerLayout, slots: ByteArray) -> None:
    """Check that they fit together. Raises `ConfigError`."""
    import torch

    if torch_layouts(tensors) != list(layout.tensors):
        raise ConfigError("the KV tensors differ from their layout; describe them again")
    if any(tensor.dtype != torch.int8 or tensor.stride(1) != 1 for tensor in tensors):
        raise ConfigError("KV tensors must be int8 with bytes of a page side by side")
    if slots.shape != (layout.slots, layout.slot_bytes):
        raise ConfigError(f"the arena is {slots.shape}, the layout says {layout.slots} slots")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
