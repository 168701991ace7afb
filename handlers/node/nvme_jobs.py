"""Job queue of the NVMe handlers that run on the threads of an executor.

A job is split into parts, so that the checksums of one overlap the I/O of another. `max_jobs`
bounds the queue. A subclass moves the parts.

Threads: only one thread, the manager's, may call the methods of the contract. It waits for I/O only
in `wait` and `shutdown`, both with a time limit.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from time import monotonic

from ...logs import get_logger
from ...tiers.base import BlockOutcome
from ...tiers.nvme.index.index_port import Removal
from ...tiers.nvme.nvme_backend import NvmeSpec
from ..base import OffloadingHandler, TransferResult, TransferSpec

DEFAULT_MAX_JOBS = 16
WAIT_LIMIT_S = 60.0
"""Longest time that `wait` blocks. Waiting longer for a stalled device would stall the engine."""

_log = get_logger(__name__)


@dataclass(slots=True)
class Part:
    """Consecutive blocks of a job: `begin` to `end - 1`."""

    begin: int
    end: int
    removals: tuple[Removal, ...] = ()
    future: Future[None] | None = None


@dataclass(slots=True)
class Job:
    """A transfer in flight. Each part that ends fills in its `outcomes`."""

    job_id: int
    spec: TransferSpec
    outcomes: list[BlockOutcome]
    parts: list[Part]
    left: int
    started_s: float | None = None


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """Limits of a handler, its clock and its callback."""

    max_jobs: int = DEFAULT_MAX_JOBS
    clock: Callable[[], float] = monotonic
    """Monotonic seconds."""
    wait_limit_s: float = WAIT_LIMIT_S
    part_bytes: int = 16 << 20
    on_finished: Callable[[], None] | None = None
    """Callback on an I/O thread when `get_finished` has a new result."""


class NvmeJobHandler(OffloadingHandler):
    """Queue of an NVMe handler that runs on an executor."""

    def __init__(
        self, block_bytes: int, executor: Executor, options: QueueOptions | None = None
    ) -> None:
        self._options = options or QueueOptions()
        self._block_bytes = block_bytes
        self._executor = executor
        self._clock = self._options.clock
        self._jobs: dict[int, Job] = {}
        self._finished: deque[TransferResult] = deque()
        self._changed = threading.Condition()
        self._is_shut_down = False

    @abstractmethod
    def _move(self, job: Job, part: Part) -> list[BlockOutcome]:
        """Move one part, on an I/O thread."""

    @abstractmethod
    def _written(self, spec: TransferSpec) -> NvmeSpec | None:
        """Return the NVMe side of a job that also commits removals, or None if the job does not
        write."""

    def _owe(self, removals: Sequence[Removal], epoch: int) -> None:
        """Keep the removals of a part that will never run, for the next job to commit."""

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        with self._changed:
            if not self._may_start():
                written = self._written(spec)
                if written is not None:
                    self._owe(written.removals, written.epoch)
                return False
            assert job_id not in self._jobs, "a job id may be used once at a time"
            job = self._jobs[job_id] = self._job_for(job_id, spec)
        if not job.parts:
            self._end(job)
        for part in job.parts:
            self._submit(job, part)
        return True

    def get_finished(self) -> list[TransferResult]:
        finished: list[TransferResult] = []
        while self._finished:
            finished.append(self._finished.popleft())
        return finished

    def wait(self, job_ids: Set[int], timeout_s: float | None = None) -> None:
        """Wait as in the contract, for `wait_limit_s` at most."""
        limit_s = self._options.wait_limit_s
        limit_s = limit_s if timeout_s is None else min(timeout_s, limit_s)
        with self._changed:
            self._changed.wait_for(lambda: job_ids.isdisjoint(self._jobs), limit_s)

    def shutdown(self, deadline_s: float = 5.0) -> bool:
        """Cancel the parts that have not started, and wait `deadline_s` seconds for the others."""
        with self._changed:
            self._is_shut_down = True
            parts = [(job, part) for job in self._jobs.values() for part in job.parts]
        for job, part in parts:
            if part.future is not None and part.future.cancel():
                self._cancel(job, part)
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, deadline_s)

    # -- inside --------------------------------------------------------------------------------

    def _may_start(self) -> bool:
        """Return True if a job can be taken now. Called under the lock."""
        return not self._is_shut_down and len(self._jobs) < self._options.max_jobs

    def _job_for(self, job_id: int, spec: TransferSpec) -> Job:
        nvme = spec[0] if isinstance(spec[0], NvmeSpec) else spec[1]
        assert isinstance(nvme, NvmeSpec)
        n = len(nvme.hashes)
        per_part = max(1, self._options.part_bytes // self._block_bytes)
        parts = [Part(i, min(i + per_part, n)) for i in range(0, n, per_part)]
        written = self._written(spec)
        if written is not None and parts:
            share_removals(parts, written)
        elif written is not None:
            self._owe(written.removals, written.epoch)
        return Job(job_id, spec, [BlockOutcome.CANCELLED] * n, parts, len(parts))

    def _submit(self, job: Job, part: Part) -> None:
        try:
            part.future = self._executor.submit(self._run, job, part)
        except RuntimeError:  # the executor was shut down
            self._cancel(job, part)

    def _cancel(self, job: Job, part: Part) -> None:
        written = self._written(job.spec)
        if written is not None:
            self._owe(part.removals, written.epoch)
        self._part_ended(job)

    def _run(self, job: Job, part: Part) -> None:
        if job.started_s is None:
            job.started_s = self._clock()
        try:
            job.outcomes[part.begin : part.end] = self._move(job, part)
        except Exception:
            _log.exception("a transfer failed in a way it should not")
            failed = [BlockOutcome.IO_ERROR] * (part.end - part.begin)
            job.outcomes[part.begin : part.end] = failed
        self._part_ended(job)

    def _part_ended(self, job: Job) -> None:
        with self._changed:
            job.left -= 1
            if job.left:
                return
        self._end(job)

    def _end(self, job: Job) -> None:
        elapsed = 0.0 if job.started_s is None else self._clock() - job.started_s
        result = result_of(job.job_id, job.outcomes, self._block_bytes, elapsed)
        with self._changed:
            del self._jobs[job.job_id]
            self._finished.append(result)
            self._changed.notify_all()
        if self._options.on_finished is not None:
            self._options.on_finished()


def result_of(
    job_id: int, outcomes: Sequence[BlockOutcome], block_bytes: int, time_s: float
) -> TransferResult:
    """Build the result of a job from its outcomes."""
    done = outcomes.count(BlockOutcome.OK)
    is_ok = done == len(outcomes)
    return TransferResult(
        job_id, is_ok, done * block_bytes, time_s, () if is_ok else tuple(outcomes)
    )


def share_removals(parts: Sequence[Part], blocks: NvmeSpec) -> None:
    """Assign each removal to the part that writes its slot, or else to the first part."""
    if not blocks.removals:
        return
    slots = blocks.slots.tolist()
    part_of = {slot: p for p, part in enumerate(parts) for slot in slots[part.begin : part.end]}
    shared: list[list[Removal]] = [[] for _ in parts]
    for removal in blocks.removals:
        shared[part_of.get(removal.slot, 0)].append(removal)
    for part, removals in zip(parts, shared, strict=True):
        part.removals = tuple(removals)
