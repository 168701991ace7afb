"""Copier of the CPU platform, where the device tensors are ordinary memory.

Copies run on an executor, with at most one task per direction at a time. The jobs of a direction
run in submission order. A job that shares a page or slot with an earlier job of the other direction
waits for it without holding a thread. So one thread is enough, and two overlap the directions. The
interpreter lock is released while bytes move (see `memcopy`).

Threads: one thread calls the methods of the contract. The tasks share the lanes with it under one
lock, which is never held during a copy.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Executor
from dataclasses import dataclass, field
from threading import Condition

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError, TierIOError
from ...logs import get_logger
from ...tiers.base import SlotArray
from .copier import DeviceCopier, Direction, GpuBlocks, TransferResult
from .geometry import GroupRows, IntArray, TensorLayout, WorkerLayout, merge_adjacent
from .hazards import HazardBoard
from .memcopy import copy_scattered
from .switch_interval import SWITCH_INTERVAL, SwitchInterval

logger = get_logger(__name__)

PageArray = npt.NDArray[np.int8]
ByteArray = npt.NDArray[np.uint8]

WAIT_TIMEOUT_S = 600.0
"""Longest time that `wait` blocks. Copies take milliseconds, so the executor is dead after it. If
`wait` returned, the engine would overwrite pages that are still to be read."""
JOBS_AT_ONCE = 4
"""Limit of the queued jobs that one task copies together. A task waits for the interpreter lock
before each copy and after it, up to 5 ms beside a busy scheduler."""


@dataclass(frozen=True, slots=True)
class _Job:
    job_id: int
    number: int
    after: int
    rows: list[GroupRows]


@dataclass(slots=True)
class _Lane:
    """Queue and progress of one direction."""

    queue: deque[_Job] = field(default_factory=deque)
    is_running: bool = False
    task: object = None
    """Task that was started and has not begun."""
    done: int = 0
    """Number of the last job that ended. Jobs end in order."""


def cpu_layouts(tensors: Sequence[PageArray]) -> list[TensorLayout]:
    """Describe KV tensors, int8 of shape `(num_blocks, page_bytes)`, for `WorkerLayout`."""
    return [TensorLayout(tensor.shape[0], tensor.shape[1], tensor.strides[0]) for tensor in tensors]


class CpuDeviceCopier(DeviceCopier):
    """Copies between numpy views of the KV tensors and the arena."""

    def __init__(
        self,
        tensors: Sequence[PageArray],
        layout: WorkerLayout,
        slots: ByteArray,
        executor: Executor,
        *,
        clock: Callable[[], float] = time.perf_counter,
        switch_interval: SwitchInterval = SWITCH_INTERVAL,
    ) -> None:
        """`tensors` match `layout.tensors`; `slots` is `Arena.slots`; the executor stays the
        caller's.

        Raises `ConfigError` if tensors, layout and arena do not fit together.
        """
        if cpu_layouts(tensors) != list(layout.tensors) or any(t.strides[1] != 1 for t in tensors):
            raise ConfigError("the KV tensors differ from their layout; describe them again")
        if slots.shape != (layout.slots, layout.slot_bytes):
            raise ConfigError(f"the arena is {slots.shape}, the layout says {layout.slots} slots")
        self._tensors = list(tensors)
        """Kept, because copies use their addresses."""
        self._layout = layout
        self._slots = slots
        self._executor = executor
        self._clock = clock
        self._switch_interval = switch_interval
        self._bases: IntArray = np.array([t.ctypes.data for t in tensors], dtype=np.int64)
        blocks = max((tensor.num_blocks for tensor in layout.tensors), default=0)
        self._board = HazardBoard(blocks, layout.slots)
        self._changed = Condition()
        self._lanes = (_Lane(), _Lane())
        self._unfinished: set[int] = set()
        self._finished: list[TransferResult] = []
        self._is_shut = False

    def submit(
        self, direction: Direction, job_id: int, blocks: GpuBlocks, slots: SlotArray
    ) -> bool:
        if self._is_shut:
            return False
        rows = self._layout.rows(blocks, slots)
        number, after = self._board.admit(direction, rows)
        with self._changed:
            assert job_id not in self._unfinished, f"job {job_id} is running already"
            self._unfinished.add(job_id)
            self._lanes[direction].queue.append(_Job(job_id, number, after, rows))
        self._start(direction)
        return True

    def get_finished(self) -> list[TransferResult]:
        with self._changed:
            finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: Set[int]) -> None:
        """Wait as in the contract. Raises `TierIOError` after `WAIT_TIMEOUT_S` seconds."""
        with self._changed:
            ended = self._changed.wait_for(
                lambda: self._unfinished.isdisjoint(job_ids), WAIT_TIMEOUT_S
            )
            stuck = sorted(self._unfinished & job_ids)
        if not ended:
            raise TierIOError(
                f"copies of jobs {stuck} did not end in {WAIT_TIMEOUT_S:.0f} s: the thread pool is "
                f"dead or the memory gone; restart the engine"
            )

    def shutdown(self, deadline_s: float = 5.0) -> None:
        with self._changed:
            self._is_shut = True
            if not self._changed.wait_for(lambda: not self._unfinished, deadline_s):
                logger.warning(
                    "%d copies did not end within %.1f s and are dropped; no stored block "
                    "depends on them",
                    len(self._unfinished),
                    deadline_s,
                )
            for lane in self._lanes:
                self._unfinished.difference_update(job.job_id for job in lane.queue)
                lane.queue.clear()

    def _start(self, direction: Direction) -> None:
        """Start a task for a lane that has a job to run and no task."""
        with self._changed:
            lane = self._lanes[direction]
            if lane.is_running or not self._is_runnable(direction):
                return
            lane.is_running = True
            task = lane.task = object()
        self._switch_interval.shorten()
        try:
            self._executor.submit(self._run, direction, task)
        except RuntimeError:  # it was shut down, or has no thread; accepted jobs must be done
            self._run(direction, task)

    def _is_runnable(self, direction: Direction) -> bool:
        queue = self._lanes[direction].queue
        return bool(queue) and queue[0].after <= self._lanes[direction.other].done

    def _run(self, direction: Direction, task: object) -> None:
        """Run the lane's jobs until none may run. Runs as a task of the executor.

        An executor that cannot start a thread raises an error, and may run the task later all the
        same. A task that has begun does nothing the second time.
        """
        lane = self._lanes[direction]
        with self._changed:
            if lane.task is not task:
                return
            lane.task = None
        while True:
            with self._changed:
                jobs = self._take(direction)
                if not jobs:
                    lane.is_running = False
                    self._switch_interval.restore()
                    return
            results = self._perform(direction, jobs)
            with self._changed:
                lane.done = jobs[-1].number
                self._unfinished.difference_update(job.job_id for job in jobs)
                self._finished += results
                self._changed.notify_all()
            self._start(direction.other)

    def _take(self, direction: Direction) -> list[_Job]:
        """Take the next jobs that may run, in order."""
        jobs: list[_Job] = []
        while len(jobs) < JOBS_AT_ONCE and self._is_runnable(direction):
            jobs.append(self._lanes[direction].queue.popleft())
        return jobs

    def _perform(self, direction: Direction, jobs: list[_Job]) -> list[TransferResult]:
        start = self._clock()
        try:
            self._copy(direction, [rows for job in jobs for rows in job.rows])
        except Exception:
            # Only a bug leads here. Wrong bytes must not be reported as stored or loaded.
            logger.exception("copying jobs %s failed", [job.job_id for job in jobs])
            return [TransferResult(job.job_id, False) for job in jobs]
        sizes = [self._layout.total_bytes(job.rows) for job in jobs]
        s_per_byte = (self._clock() - start) / max(1, sum(sizes))
        return [
            TransferResult(job.job_id, True, size, size * s_per_byte)
            for job, size in zip(jobs, sizes, strict=True)
        ]

    def _copy(self, direction: Direction, rows: list[GroupRows]) -> None:
        device, arena, size = merge_adjacent(self._layout.copy_list(rows, self._bases))
        arena = arena + int(self._slots.ctypes.data)
        is_store = direction is Direction.STORE
        target, source = (arena, device) if is_store else (device, arena)
        copy_scattered(target, source, size)
