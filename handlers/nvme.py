"""Moving blocks between the CPU arena and the NVMe tier.

The bytes move on the threads of an executor that is passed in; `BlockStore` does the work and
says what became of each block. The queue is bounded by `max_jobs`. A large job is cut into parts,
so that the checksums of one overlap the I/O of another.

Threads: the methods belong to one thread (the manager's), which never waits for I/O except in
`wait` and `shutdown`, both bounded in time.
"""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from time import monotonic

from ..tiers.base import BlockOutcome, LoadStoreSpec, SlotSpec
from ..tiers.nvme.backend import NvmeSpec
from ..tiers.nvme.index import Removal
from ..tiers.nvme.store import BlockStore
from .base import OffloadingHandler, TransferResult, TransferSpec

DEFAULT_MAX_JOBS = 16
PART_BYTES = 16 << 20
WAIT_LIMIT_S = 60.0
"""Longest `wait`; a device that stalls for longer is not worth an engine that stands still."""
BREAKER_FAILURES = 3
"""Failed jobs in a row after which a tier takes no stores for a while."""
BREAKER_PROBE_S = 10.0
"""After this, one job may try again."""

ArenaView = Callable[[int], memoryview]
"""The bytes of an arena slot, writable, exactly one block long."""

_log = logging.getLogger(__name__)
_FAULTS = frozenset({BlockOutcome.IO_ERROR, BlockOutcome.NO_SPACE})


class CircuitBreaker:
    """Refuses work after failures in a row, then lets one probe through at a time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures = 0
        self._closed_until_s = 0.0
        self._is_probing = False

    @property
    def is_open(self) -> bool:
        """True while work is refused."""
        if self._failures < BREAKER_FAILURES:
            return False
        return self._is_probing or self._clock() < self._closed_until_s

    def started(self) -> None:
        """A job was let through."""
        self._is_probing = self._failures >= BREAKER_FAILURES

    def ended(self, is_failure: bool) -> None:
        """A job ended."""
        self._is_probing = False
        self._failures = self._failures + 1 if is_failure else 0
        if self._failures >= BREAKER_FAILURES:
            self._closed_until_s = self._clock() + BREAKER_PROBE_S


@dataclass(slots=True)
class _Part:
    """Blocks `begin .. end - 1` of a job."""

    begin: int
    end: int
    removals: tuple[Removal, ...] = ()
    future: Future[None] | None = None


@dataclass(slots=True)
class _Job:
    """A transfer; `outcomes` fill up as its parts end."""

    job_id: int
    arena_slots: list[int]
    blocks: NvmeSpec
    outcomes: list[BlockOutcome]
    parts: list[_Part]
    left: int
    started_s: float | None = None


class _NvmeHandler(OffloadingHandler):
    """What both directions share."""

    def __init__(
        self,
        store: BlockStore,
        arena_view: ArenaView,
        executor: Executor,
        max_jobs: int = DEFAULT_MAX_JOBS,
        clock: Callable[[], float] = monotonic,
        wait_limit_s: float = WAIT_LIMIT_S,
    ) -> None:
        """`clock` gives monotonic seconds."""
        self._store = store
        self._arena_view = arena_view
        self._executor = executor
        self._max_jobs = max_jobs
        self._clock = clock
        self._wait_limit_s = wait_limit_s
        self._jobs: dict[int, _Job] = {}
        self._finished: deque[TransferResult] = deque()
        self._changed = threading.Condition()
        self._is_shut_down = False

    @abstractmethod
    def _move(self, job: _Job, part: _Part) -> list[BlockOutcome]:
        """Move one part, on an I/O thread."""

    @abstractmethod
    def _ends(self, spec: TransferSpec) -> tuple[LoadStoreSpec, LoadStoreSpec]:
        """(arena, NVMe)."""

    def _on_cancel(self, job: _Job, part: _Part) -> None:
        """A part will never run."""

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        with self._changed:
            if self._is_shut_down or len(self._jobs) >= self._max_jobs:
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
        """As in the contract, but for `wait_limit_s` at most."""
        limit_s = self._wait_limit_s if timeout_s is None else min(timeout_s, self._wait_limit_s)
        with self._changed:
            self._changed.wait_for(lambda: job_ids.isdisjoint(self._jobs), limit_s)

    def shutdown(self, deadline_s: float = 5.0) -> bool:
        """Parts that have not started are cancelled; the others get `deadline_s` seconds."""
        with self._changed:
            self._is_shut_down = True
            parts = [(job, part) for job in self._jobs.values() for part in job.parts]
        for job, part in parts:
            if part.future is not None and part.future.cancel():
                self._cancel(job, part)
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, deadline_s)

    # -- inside --------------------------------------------------------------------------------

    def _job_for(self, job_id: int, spec: TransferSpec) -> _Job:
        arena, blocks = self._ends(spec)
        assert isinstance(arena, SlotSpec) and isinstance(blocks, NvmeSpec)
        n = len(blocks.hashes)
        assert len(arena.slots) == n, "both ends list the same blocks"
        per_part = max(1, PART_BYTES // self._store.block_bytes)
        parts = [_Part(i, min(i + per_part, n)) for i in range(0, n, per_part)]
        share_removals(parts, blocks)
        outcomes = [BlockOutcome.CANCELLED] * n
        return _Job(job_id, arena.slots.tolist(), blocks, outcomes, parts, len(parts))

    def _submit(self, job: _Job, part: _Part) -> None:
        try:
            part.future = self._executor.submit(self._run, job, part)
        except RuntimeError:  # the executor takes no more work
            self._cancel(job, part)

    def _cancel(self, job: _Job, part: _Part) -> None:
        self._on_cancel(job, part)
        self._part_ended(job)

    def _run(self, job: _Job, part: _Part) -> None:
        if job.started_s is None:
            job.started_s = self._clock()
        try:
            job.outcomes[part.begin : part.end] = self._move(job, part)
        except Exception:
            _log.exception("a transfer failed in a way it should not")
            failed = [BlockOutcome.IO_ERROR] * (part.end - part.begin)
            job.outcomes[part.begin : part.end] = failed
        self._part_ended(job)

    def _part_ended(self, job: _Job) -> None:
        with self._changed:
            job.left -= 1
            if job.left:
                return
        self._end(job)

    def _end(self, job: _Job) -> None:
        done = job.outcomes.count(BlockOutcome.OK)
        is_ok = done == len(job.outcomes)
        elapsed = 0.0 if job.started_s is None else self._clock() - job.started_s
        result = TransferResult(
            job.job_id,
            is_ok,
            done * self._store.block_bytes,
            elapsed,
            () if is_ok else tuple(job.outcomes),
        )
        with self._changed:
            del self._jobs[job.job_id]
            self._finished.append(result)
            self._note_end(job)
            self._changed.notify_all()

    def _note_end(self, job: _Job) -> None:
        """A job ended; called under the lock."""


class NvmeStoreHandler(_NvmeHandler):
    """Arena to NVMe."""

    def __init__(
        self,
        store: BlockStore,
        arena_view: ArenaView,
        executor: Executor,
        max_jobs: int = DEFAULT_MAX_JOBS,
        clock: Callable[[], float] = monotonic,
        wait_limit_s: float = WAIT_LIMIT_S,
    ) -> None:
        super().__init__(store, arena_view, executor, max_jobs, clock, wait_limit_s)
        self._breaker = CircuitBreaker(clock)

    @property
    def accepts_stores(self) -> bool:
        """False while the device failed too often and rests."""
        with self._changed:
            return not self._breaker.is_open

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        with self._changed:
            if self._breaker.is_open or len(self._jobs) >= self._max_jobs:
                return self._refuse(spec)
            self._breaker.started()
        return super().transfer_async(job_id, spec) or self._refuse(spec)

    def _refuse(self, spec: TransferSpec) -> bool:
        """Removals are handed out once: keep those of a refused job for the next one."""
        blocks = spec[1]
        assert isinstance(blocks, NvmeSpec)
        self._store.owe(blocks.removals, blocks.epoch)
        return False

    def _ends(self, spec: TransferSpec) -> tuple[LoadStoreSpec, LoadStoreSpec]:
        return spec

    def _move(self, job: _Job, part: _Part) -> list[BlockOutcome]:
        span = slice(part.begin, part.end)
        return self._store.write(
            job.blocks.hashes[span],
            job.blocks.slots[span].tolist(),
            list(map(self._arena_view, job.arena_slots[span])),
            job.blocks.epoch,
            part.removals,
        )

    def _on_cancel(self, job: _Job, part: _Part) -> None:
        self._store.owe(part.removals, job.blocks.epoch)

    def _note_end(self, job: _Job) -> None:
        self._breaker.ended(not _FAULTS.isdisjoint(job.outcomes))


class NvmeLoadHandler(_NvmeHandler):
    """NVMe to arena. A block is OK only if its checksum matched."""

    def _ends(self, spec: TransferSpec) -> tuple[LoadStoreSpec, LoadStoreSpec]:
        return spec[1], spec[0]

    def _move(self, job: _Job, part: _Part) -> list[BlockOutcome]:
        span = slice(part.begin, part.end)
        values = job.blocks.values
        return self._store.read(
            job.blocks.hashes[span],
            job.blocks.slots[span].tolist(),
            list(map(self._arena_view, job.arena_slots[span])),
            None if values is None else values[span],
        )


def share_removals(parts: Sequence[_Part], blocks: NvmeSpec) -> None:
    """Each part removes what lay in the slots that it writes; the first one all the rest."""
    if not parts or not blocks.removals:
        return
    slots = blocks.slots.tolist()
    part_of = {slot: p for p, part in enumerate(parts) for slot in slots[part.begin : part.end]}
    shared: list[list[Removal]] = [[] for _ in parts]
    for removal in blocks.removals:
        shared[part_of.get(removal.slot, 0)].append(removal)
    for part, removals in zip(parts, shared, strict=True):
        part.removals = tuple(removals)
