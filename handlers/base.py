"""The contract of moving bytes: one handler per (source medium, destination medium).

A handler holds no policy. `transfer_async` returns at once; what became of each block is
reported by `get_finished`. A transfer that fails is an outcome, never an exception, once accepted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Set
from dataclasses import dataclass

from ..tiers.base import BlockOutcome, LoadStoreSpec

TransferSpec = tuple[LoadStoreSpec, LoadStoreSpec]
"""(source, destination); both list the same blocks in the same order."""


@dataclass(frozen=True, slots=True)
class TransferResult:
    """One finished job."""

    job_id: int
    success: bool
    """True if every block arrived."""
    size_bytes: int = 0
    """Bytes that were moved."""
    time_s: float = 0.0
    """Seconds from the start of the copy to its end, waiting in a queue left out."""
    outcomes: tuple[BlockOutcome, ...] = ()
    """One per block of the job, in its order; empty means all OK."""


class OffloadingHandler(ABC):
    """Moves blocks from one medium to another, asynchronously."""

    @abstractmethod
    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Start a job. False (and nothing is done) if it cannot be taken now: try again later.

        `job_id` is unique among unfinished jobs. Called by one thread at a time.
        """

    @abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """Jobs that ended since the last call; each is reported exactly once. Never blocks."""

    @abstractmethod
    def wait(self, job_ids: Set[int], timeout_s: float | None = None) -> None:
        """Block until these jobs ended (ids that are unknown or finished are ignored).

        Returns after `timeout_s` seconds at the latest; None leaves the limit to the handler.
        """

    def shutdown(self, deadline_s: float = 5.0) -> bool:
        """Finish or cancel what is queued within `deadline_s` seconds and stop; idempotent.

        False if transfers are still under way: what they use must stay open.
        """
        return True
