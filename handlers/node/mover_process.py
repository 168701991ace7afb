"""Handlers between the CPU arena and the NVMe tier that have a mover process do the work.

They have the same contract as the handlers in `nvme`, and keep the transfers off the scheduler's
interpreter. A call costs some microseconds per job.

Threads: only one thread at a time, the manager's, may call the methods of the contract.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Set
from functools import partial

from ...tiers.base import BlockOutcome, SlotSpec
from ...tiers.nvme.background import Background
from ...tiers.nvme.index.index_port import Removal
from ...tiers.nvme.nvme_backend import NvmeSpec
from ...tiers.nvme.segments.store import BlockStore
from ...tiers.nvme.writer.failing_devices import OnEnd
from ..base import OffloadingHandler, TransferResult, TransferSpec
from .mover import Mover
from .mover_wire import (
    Answer,
    LoadJob,
    RemoveJob,
    RepairJob,
    StoreJob,
    pack_removals,
    unpack_removals,
)
from .nvme_jobs import QueueOptions, result_of
from .path_wire import pack_slots, unpack_outcomes


class _MoverHandler(OffloadingHandler):
    """Job bookkeeping of both directions."""

    def __init__(
        self, store: BlockStore, mover: Mover, options: QueueOptions | None = None
    ) -> None:
        """`store` belongs to this process. It keeps pending removals and counters."""
        self._store = store
        self._mover = mover
        self._options = options or QueueOptions()
        self._jobs: set[int] = set()
        self._finished: deque[TransferResult] = deque()
        self._is_shut_down = False

    def get_finished(self) -> list[TransferResult]:
        if self._jobs:
            self._mover.poll()
        finished: list[TransferResult] = []
        while self._finished:
            finished.append(self._finished.popleft())
        return finished

    def wait(self, job_ids: Set[int], timeout_s: float | None = None) -> None:
        """Wait as in the contract, for the options' `wait_limit_s` at most."""
        limit_s = self._options.wait_limit_s
        limit_s = limit_s if timeout_s is None else min(timeout_s, limit_s)
        self._mover.wait(lambda: job_ids.isdisjoint(self._jobs), limit_s)

    def shutdown(self, deadline_s: float = 5.0) -> bool:
        """Wait `deadline_s` seconds for jobs in flight, then kill the mover."""
        self._is_shut_down = True
        if self._mover.wait(lambda: not self._jobs, deadline_s):
            return True
        self._mover.kill()
        return not self._jobs

    @property
    def _may_start(self) -> bool:
        return not self._is_shut_down and len(self._jobs) < self._options.max_jobs

    def _submit(
        self, job_id: int, blocks: NvmeSpec, order: Callable[[int], StoreJob | LoadJob]
    ) -> bool:
        assert job_id not in self._jobs, "a job id may be used once at a time"
        if not blocks.hashes:
            self._finished.append(TransferResult(job_id, True))
            return True
        self._jobs.add(job_id)
        if self._mover.submit(order, partial(self._end, job_id, blocks)):
            return True
        self._jobs.discard(job_id)
        return False

    def _end(self, job_id: int, blocks: NvmeSpec, answer: Answer | None) -> None:
        n = len(blocks.hashes)
        if answer is None:
            outcomes = [BlockOutcome.IO_ERROR] * n
            self._store.defer_removals(blocks.removals, blocks.epoch)
        else:
            outcomes = unpack_outcomes(answer.outcomes, n)
            take_books(self._store, answer, blocks.epoch)
        time_s = 0.0 if answer is None else answer.time_s
        self._finished.append(result_of(job_id, outcomes, self._store.block_bytes, time_s))
        self._jobs.discard(job_id)


class MoverStoreHandler(_MoverHandler):
    """Stores blocks from the arena to NVMe."""

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        arena, blocks = spec
        assert isinstance(arena, SlotSpec) and isinstance(blocks, NvmeSpec)
        assert len(arena.slots) == len(blocks.hashes), "both ends list the same blocks"
        removals = [*self._store.take_deferred(), *blocks.removals]
        job = NvmeSpec(blocks.hashes, blocks.slots, blocks.epoch, removals=tuple(removals))
        order = partial(_store_job, arena, job, pack_removals(removals))
        is_taken = self._may_start and self._submit(job_id, job, order)
        if not is_taken or not blocks.hashes:
            self._store.defer_removals(removals, blocks.epoch)
        return is_taken


class MoverLoadHandler(_MoverHandler):
    """Loads blocks from NVMe into the arena. A block is OK only if its checksum matched."""

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        blocks, arena = spec
        assert isinstance(arena, SlotSpec) and isinstance(blocks, NvmeSpec)
        assert len(arena.slots) == len(blocks.hashes), "both ends list the same blocks"
        return self._may_start and self._submit(job_id, blocks, partial(_load_job, arena, blocks))


class MoverBackground(Background):
    """Has the mover commit index changes, off the scheduler's interpreter."""

    def __init__(self, store: BlockStore, mover: Mover) -> None:
        self._store = store
        self._mover = mover

    def commit(self, removals: Sequence[Removal], epoch: int) -> None:
        due = [*self._store.take_deferred(), *removals]
        packed = pack_removals(due)
        is_sent = self._mover.submit(
            lambda ticket: RemoveJob(ticket, packed, epoch), partial(self._end, due, epoch)
        )
        if not is_sent:
            self._store.defer_removals(due, epoch)

    def repair_records(self, slots: Set[int], on_end: OnEnd) -> None:
        wanted = tuple(slots)
        is_sent = self._mover.submit(
            lambda ticket: RepairJob(ticket, wanted), partial(self._end_repair, on_end)
        )
        if not is_sent:
            on_end(None)

    def take_orphans(self) -> list[int]:
        """Return orphaned slots as in the contract, and poll the mover.

        The manager calls this at every step and tick. The handlers poll only while they have jobs.
        Without this poll, answers to commits would pile up, and a dead idle mover would go
        unnoticed.
        """
        self._mover.listen()
        return self._store.take_orphans()

    def _end_repair(self, on_end: OnEnd, answer: Answer | None) -> None:
        self._end([], 0, answer)
        on_end(None if answer is None else answer.counts.get("records_repaired", 0))

    def _end(self, due: Sequence[Removal], epoch: int, answer: Answer | None) -> None:
        if answer is None:
            self._store.defer_removals(due, epoch)
        else:
            take_books(self._store, answer, epoch)


def take_books(store: BlockStore, answer: Answer, epoch: int) -> None:
    """Add a mover's counters and failed removals to those of this process."""
    store.absorb(answer.counts, answer.reported_bytes)
    store.note_orphans(answer.strays)
    if answer.owed:
        store.defer_removals(unpack_removals(answer.owed), epoch)


def _store_job(
    arena: SlotSpec, blocks: NvmeSpec, removals: tuple[tuple[bytes, int, int], ...], ticket: int
) -> StoreJob:
    return StoreJob(
        ticket,
        blocks.hashes,
        pack_slots(blocks.slots),
        pack_slots(arena.slots),
        blocks.epoch,
        removals,
    )


def _load_job(arena: SlotSpec, blocks: NvmeSpec, ticket: int) -> LoadJob:
    return LoadJob(
        ticket, blocks.hashes, pack_slots(blocks.slots), pack_slots(arena.slots), blocks.values
    )
