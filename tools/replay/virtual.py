"""Tiers without bytes, and transfers whose duration a cost model sets.

Single-threaded: one simulation uses them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ...errors import NoSpaceError
from ...tiers.base import NOT_READY, Backend, BlockHash, BlockStatus

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

    def reset(self) -> list[BlockStatus]:
        raise AssertionError("a replay resets nothing")
