"""Tiers without bytes, and transfers whose duration a cost model sets.

Single-threaded: one simulation uses them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np

from ...errors import NoSpaceError
from ...handlers.base import OffloadingHandler, TransferResult, TransferSpec
from ...tiers import endurance
from ...tiers.base import NOT_READY, Backend, BlockHash, BlockStatus, SlotSpec
from ...tiers.endurance import DayTotals

NEVER_S = math.inf


class VirtualClock:
    """Virtual clock that the simulation advances; call it like `time.monotonic`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class InlineExecutor(Executor):
    """Runs each task inside `submit`."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class RateSource(StrEnum):
    """Source of a rate."""

    GIVEN = "given"
    BENCH = "from --bench"
    MEASURED = "measured"
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True)
class Rate:
    """Cost of moving bytes in one direction: `latency_s` per batch, then a rate."""

    bytes_per_s: float = math.inf
    latency_s: float = 0.0
    source: RateSource = RateSource.GIVEN

    def time_s(self, size_bytes: int) -> float:
        """Return the seconds for one batch."""
        return self.latency_s + size_bytes / self.bytes_per_s


class DailyWrites:
    """Writes into a tier in the last 24 hours of the clock."""

    def __init__(self, block_bytes: int, clock: VirtualClock) -> None:
        self._block_bytes = block_bytes
        self._clock = clock
        self._record = b""

    def wrote(self, blocks: int) -> None:
        """Record that blocks were written."""
        self._record = endurance.add(self._record, self._clock.now_s, blocks * self._block_bytes, 0)

    def totals(self) -> DayTotals:
        """Return the sums of the last 24 hours."""
        return endurance.day_totals(self._record, self._clock.now_s)


class SlotBackend(Backend):
    """Slots without memory."""

    def __init__(self, block_size: int, capacity: int, medium: str) -> None:
        super().__init__(block_size, medium, capacity)
        self._free: list[BlockStatus] = []
        self._taken = 0

    def get_num_free_blocks(self) -> int:
        return len(self._free) + self.capacity - self._taken

    def allocate_blocks(self, block_hashes: Sequence[BlockHash]) -> list[BlockStatus]:
        n = len(block_hashes)
        if n > self.get_num_free_blocks():
            raise NoSpaceError(f"{n} slots asked for, fewer are free; evict first")
        fresh = min(n, self.capacity - self._taken)
        statuses = [BlockStatus(NOT_READY, self._taken + i) for i in range(fresh)]
        self._taken += fresh
        while len(statuses) < n:
            status = self._free.pop()
            status.ref_cnt = NOT_READY
            statuses.append(status)
        return statuses

    def free(self, status: BlockStatus) -> None:
        status.ref_cnt = 0
        self._free.append(status)

    def get_load_store_spec(
        self, block_hashes: Sequence[BlockHash], statuses: Sequence[BlockStatus]
    ) -> SlotSpec:
        return SlotSpec(np.array([status.block_id for status in statuses], dtype=np.int32))

    def reset(self) -> list[BlockStatus]:
        raise AssertionError("a replay resets nothing")


class Timed(Protocol):
    """Something that ends at times of its own."""

    @property
    def next_end_s(self) -> float:
        """Time of the next end in seconds of the clock; `inf` if nothing is in flight."""
        ...


class TimedHandler(OffloadingHandler):
    """One direction of a link; batches run one after another and take the time of their bytes."""

    def __init__(
        self,
        block_size: int,
        rate: Rate,
        clock: VirtualClock,
        on_landed: Callable[[int], None] = lambda blocks: None,
    ) -> None:
        """Create the handler; `on_landed` receives the number of blocks of each job that has
        ended."""
        self._block_size = block_size
        self._rate = rate
        self._on_landed = on_landed
        self._clock = clock
        self._free_s = 0.0
        self._jobs: deque[tuple[float, TransferResult]] = deque()

    @property
    def next_end_s(self) -> float:
        """Return the end of the next job; `inf` if there is none."""
        return self._jobs[0][0] if self._jobs else NEVER_S

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        source = spec[0]
        assert isinstance(source, SlotSpec)
        size_bytes = len(source.slots) * self._block_size
        time_s = self._rate.time_s(size_bytes)
        self._free_s = max(self._free_s, self._clock.now_s) + time_s
        self._jobs.append((self._free_s, TransferResult(job_id, True, size_bytes, time_s)))
        return True

    def get_finished(self) -> list[TransferResult]:
        ended: list[TransferResult] = []
        while self._jobs and self._jobs[0][0] <= self._clock.now_s:
            ended.append(self._jobs.popleft()[1])
            self._on_landed(ended[-1].size_bytes // self._block_size)
        return ended

    def wait(self, job_ids: Set[int], timeout_s: float | None = None) -> None:
        """Advance the clock until these jobs have ended."""
        ends = [end_s for end_s, result in self._jobs if result.job_id in job_ids]
        self._clock.now_s = max([self._clock.now_s, *ends])
