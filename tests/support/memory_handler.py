"""`MemoryHandler`: copies between two `MemoryBackend`s; the transfers of `MemoryNode`.

Jobs run when the test says so (`step`), in any order, and blocks fail on command.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

from kvcascade.tiers.base import BlockOutcome, LoadStoreSpec

from .memory_backend import MemoryBackend

TransferSpec = tuple[LoadStoreSpec, LoadStoreSpec]
"""Source and destination of a transfer. Both list the same blocks in the same order."""
Fate = Callable[[int, int], BlockOutcome]
"""`fate(source_slot, target_slot)`: what shall become of a block."""


def all_ok(source_slot: int, target_slot: int) -> BlockOutcome:
    """Every block arrives."""
    return BlockOutcome.OK


@dataclass(frozen=True, slots=True)
class EndedTransfer:
    """A job that ended, and the outcome of each of its blocks."""

    job_id: int
    outcomes: tuple[BlockOutcome, ...]


class MemoryHandler:
    """Moves blocks between two memory backends.

    With `is_immediate`, a job runs inside `transfer_async`; otherwise at the next `step`.
    """

    def __init__(
        self, source: MemoryBackend, target: MemoryBackend, is_immediate: bool = True
    ) -> None:
        self._source = source
        self._target = target
        self._is_immediate = is_immediate
        self._queued: dict[int, TransferSpec] = {}
        self._finished: list[EndedTransfer] = []
        self.fate: Fate = all_ok
        self.accepts = True

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Start a job. Return False, with nothing done, if it cannot be taken now."""
        if not self.accepts:
            return False
        assert job_id not in self._queued, "a job id may be used once at a time"
        self._queued[job_id] = spec
        if self._is_immediate:
            self.step(job_id)
        return True

    @property
    def queued(self) -> list[int]:
        """Jobs that have not run."""
        return list(self._queued)

    def step(self, job_id: int | None = None) -> None:
        """Run one job: this one, or the oldest. No effect if there is none."""
        if job_id is None:
            job_id = next(iter(self._queued), None)
        if job_id is None or job_id not in self._queued:
            return
        source, target = self._queued.pop(job_id)
        pairs = zip(source.slots.tolist(), target.slots.tolist(), strict=True)
        outcomes = tuple(self._copy(a, b) for a, b in pairs)
        self._finished.append(EndedTransfer(job_id, outcomes))

    def _copy(self, source_slot: int, target_slot: int) -> BlockOutcome:
        outcome = self.fate(source_slot, target_slot)
        view = self._target.view(target_slot)
        if outcome is BlockOutcome.OK:
            view[:] = self._source.view(source_slot)
        else:  # what a failed transfer leaves behind is arbitrary
            view[:] = b"\xee" * len(view)
        return outcome

    def get_finished(self) -> list[EndedTransfer]:
        """Return the jobs that ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: Set[int]) -> None:
        """Run these jobs."""
        for job_id in sorted(job_ids):
            self.step(job_id)
