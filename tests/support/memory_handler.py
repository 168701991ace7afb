"""`MemoryHandler`: copies between two `MemoryBackend`s; the twin of every real handler in tests.

Jobs run when the test says so (`step`), in any order, and blocks fail on command.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from kvcascade.handlers.base import OffloadingHandler, TransferResult, TransferSpec
from kvcascade.tiers.base import BlockOutcome, SlotSpec

from .memory_backend import MemoryBackend

Fate = Callable[[int, int], BlockOutcome]
"""`fate(source_slot, target_slot)`: what shall become of a block."""


def all_ok(source_slot: int, target_slot: int) -> BlockOutcome:
    """Every block arrives."""
    return BlockOutcome.OK


class MemoryHandler(OffloadingHandler):
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
        self._finished: list[TransferResult] = []
        self.fate: Fate = all_ok
        self.accepts = True

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
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
        assert isinstance(source, SlotSpec) and isinstance(target, SlotSpec)
        pairs = zip(source.slots.tolist(), target.slots.tolist(), strict=True)
        outcomes = tuple(self._copy(a, b) for a, b in pairs)
        is_ok = all(outcome is BlockOutcome.OK for outcome in outcomes)
        size_bytes = len(outcomes) * self._source.block_size
        self._finished.append(TransferResult(job_id, is_ok, size_bytes, 0.0, outcomes))

    def _copy(self, source_slot: int, target_slot: int) -> BlockOutcome:
        outcome = self.fate(source_slot, target_slot)
        view = self._target.view(target_slot)
        if outcome is BlockOutcome.OK:
            view[:] = self._source.view(source_slot)
        else:  # what a failed transfer leaves behind is arbitrary
            view[:] = b"\xee" * len(view)
        return outcome

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: Set[int], timeout_s: float | None = None) -> None:
        for job_id in sorted(job_ids):
            self.step(job_id)
