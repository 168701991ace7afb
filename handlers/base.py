"""The contract of handlers, which move bytes from one medium to another.

A handler holds no policy. `transfer_async` returns at once, and `get_finished` reports the outcome
of each block. Once a transfer is accepted, a failure is an outcome and never an exception.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Set
from dataclasses import dataclass

from ..tiers.base import BlockOutcome, LoadStoreSpec

TransferSpec = tuple[LoadStoreSpec, LoadStoreSpec]
"""Source and destination of a transfer. Both list the same blocks in the same order."""


@dataclass(frozen=True, slots=True)
class TransferResult:
    """Result of a finished job."""

    job_id: int
    success: bool
    """True if every block arrived."""
    size_bytes: int = 0
    """Bytes that the job moved."""
    time_s: float = 0.0
    """Seconds from the start of the copy to its end, without the time in a queue."""
    outcomes: tuple[BlockOutcome, ...] = ()
    """Outcome of each block, in the order of the job; empty if all are OK."""


class OffloadingHandler(ABC):
    """Moves blocks from one medium to another, asynchronously."""

    @abstractmethod
    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Start a job. Return False, with nothing done, if it cannot be taken now.

        The caller may try again later. `job_id` is unique among unfinished jobs. One thread at a
        time calls this.
        """

    @abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that ended since the last call, each exactly once. Never blocks."""

    @abstractmethod
    def wait(self, job_ids: Set[int], timeout_s: float | None = None) -> None:
        """Block until these jobs have ended. Unknown and finished ids are ignored.

        Returns after `timeout_s` seconds at the latest. None leaves the limit to the handler.
        """

    def shutdown(self, deadline_s: float = 5.0) -> bool:
        """Finish or cancel the queued jobs within `deadline_s` seconds, and stop. Idempotent.

        Return False if transfers are still in flight. The memory and files they use must stay open.
        """
        return True
