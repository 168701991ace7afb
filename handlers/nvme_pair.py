"""Moving blocks between two NVMe tiers, for cascades with more than one.

A block is read and verified, and only what was right is written on: damage does not travel. The
bytes pass through scratch memory of one job at most per thread.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections import deque
from collections.abc import Callable, Set
from concurrent.futures import Executor, Future
from time import monotonic

from ..tiers.base import BlockOutcome
from ..tiers.nvme.backend import NvmeSpec
from ..tiers.nvme.store import BlockStore
from .base import OffloadingHandler, TransferResult, TransferSpec

DEFAULT_MAX_JOBS = 8
WAIT_LIMIT_S = 60.0

_log = logging.getLogger(__name__)


class NvmePairHandler(OffloadingHandler):
    """From one NVMe tier to another, in either direction. Called by the manager's thread."""

    def __init__(
        self,
        source: BlockStore,
        target: BlockStore,
        executor: Executor,
        max_jobs: int = DEFAULT_MAX_JOBS,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        assert source.block_bytes == target.block_bytes, "blocks of one cascade have one size"
        self._source = source
        self._target = target
        self._executor = executor
        self._max_jobs = max_jobs
        self._clock = clock
        self._jobs: dict[int, NvmeSpec] = {}
        self._futures: dict[int, Future[None]] = {}
        self._finished: deque[TransferResult] = deque()
        self._changed = threading.Condition()
        self._is_shut = False

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        source, target = spec
        assert isinstance(source, NvmeSpec) and isinstance(target, NvmeSpec)
        with self._changed:
            if self._is_shut or len(self._jobs) >= self._max_jobs:
                self._target.owe(target.removals, target.epoch)
                return False
            self._jobs[job_id] = target
        future = self._executor.submit(self._run, job_id, source, target)
        with self._changed:
            if job_id in self._jobs:
                self._futures[job_id] = future
        return True

    def get_finished(self) -> list[TransferResult]:
        finished: list[TransferResult] = []
        while self._finished:
            finished.append(self._finished.popleft())
        return finished

    def wait(self, job_ids: Set[int], timeout_s: float | None = None) -> None:
        limit_s = WAIT_LIMIT_S if timeout_s is None else min(timeout_s, WAIT_LIMIT_S)
        with self._changed:
            self._changed.wait_for(lambda: job_ids.isdisjoint(self._jobs), limit_s)

    def shutdown(self, deadline_s: float = 5.0) -> bool:
        with self._changed:
            self._is_shut = True
            futures = list(self._futures.items())
        for job_id, future in futures:
            if future.cancel():
                target = self._jobs[job_id]
                self._target.owe(target.removals, target.epoch)
                self._end(job_id, [BlockOutcome.CANCELLED] * len(target.hashes), 0.0)
        self.wait(set(self._jobs), deadline_s)
        return not self._jobs

    def _run(self, job_id: int, source: NvmeSpec, target: NvmeSpec) -> None:
        started_s = self._clock()
        try:
            outcomes = self._move(source, target)
        except Exception:
            _log.exception("a transfer between NVMe tiers failed in a way it should not")
            outcomes = [BlockOutcome.IO_ERROR] * len(target.hashes)
        self._end(job_id, outcomes, self._clock() - started_s)

    def _move(self, source: NvmeSpec, target: NvmeSpec) -> list[BlockOutcome]:
        size = self._source.block_bytes
        n = len(source.hashes)
        scratch = memoryview(mmap.mmap(-1, max(1, n) * size))  # page-aligned, for direct I/O
        views = [scratch[i * size : (i + 1) * size] for i in range(n)]
        outcomes = self._source.read(source.hashes, source.slots.tolist(), views, source.values)
        right = [i for i, outcome in enumerate(outcomes) if outcome is BlockOutcome.OK]
        slots = target.slots.tolist()
        written = self._target.write(
            [target.hashes[i] for i in right],
            [slots[i] for i in right],
            [views[i] for i in right],
            target.epoch,
            target.removals,
        )
        for i, outcome in zip(right, written, strict=True):
            outcomes[i] = outcome
        return outcomes

    def _end(self, job_id: int, outcomes: list[BlockOutcome], time_s: float) -> None:
        done = outcomes.count(BlockOutcome.OK)
        size_bytes = done * self._source.block_bytes
        is_ok = done == len(outcomes)
        result = TransferResult(job_id, is_ok, size_bytes, time_s, () if is_ok else tuple(outcomes))
        with self._changed:
            self._jobs.pop(job_id, None)
            self._futures.pop(job_id, None)
            self._finished.append(result)
            self._changed.notify_all()
