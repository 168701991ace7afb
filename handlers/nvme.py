"""Moving blocks between the CPU arena and the NVMe tier, on threads of this process.

`BlockStore` does the work and says what became of each block; `nvme_jobs` has the queue. The twin
that keeps out of a busy interpreter's way is `mover_process`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from ..tiers.base import BlockOutcome, SlotSpec
from ..tiers.nvme.backend import NvmeSpec
from ..tiers.nvme.index import Removal
from ..tiers.nvme.store import BlockStore
from .base import TransferSpec
from .circuit import CircuitBreaker, is_fault
from .nvme_jobs import Job, NvmeJobHandler, Part, QueueOptions

ArenaView = Callable[[int], memoryview]
"""The bytes of an arena slot, writable, exactly one block long."""


class NvmeStoreHandler(NvmeJobHandler):
    """Arena to NVMe."""

    def __init__(
        self,
        store: BlockStore,
        arena_view: ArenaView,
        executor: Executor,
        options: QueueOptions | None = None,
        *,
        has_breaker: bool = True,
    ) -> None:
        """Without a breaker every job is taken, however many have failed."""
        super().__init__(store.block_bytes, executor, options)
        self._store = store
        self._arena_view = arena_view
        self._breaker = CircuitBreaker(self._clock) if has_breaker else None

    @property
    def accepts_stores(self) -> bool:
        """False while the device failed too often and rests."""
        with self._changed:
            return self._breaker is None or not self._breaker.is_open

    def _may_start(self) -> bool:
        return super()._may_start() and (self._breaker is None or not self._breaker.is_open)

    def _written(self, spec: TransferSpec) -> NvmeSpec:
        blocks = spec[1]
        assert isinstance(blocks, NvmeSpec)
        return blocks

    def _owe(self, removals: Sequence[Removal], epoch: int) -> None:
        self._store.owe(removals, epoch)

    def _move(self, job: Job, part: Part) -> list[BlockOutcome]:
        arena, blocks = job.spec
        assert isinstance(arena, SlotSpec) and isinstance(blocks, NvmeSpec)
        span = slice(part.begin, part.end)
        return self._store.write(
            blocks.hashes[span],
            blocks.slots[span].tolist(),
            list(map(self._arena_view, arena.slots[span].tolist())),
            blocks.epoch,
            part.removals,
        )

    def _note_start(self, job: Job) -> None:
        if self._breaker is not None:
            self._breaker.started()

    def _note_end(self, job: Job) -> None:
        if self._breaker is not None:
            self._breaker.ended(is_fault(job.outcomes))


class NvmeLoadHandler(NvmeJobHandler):
    """NVMe to arena. A block is OK only if its checksum matched."""

    def __init__(
        self,
        store: BlockStore,
        arena_view: ArenaView,
        executor: Executor,
        options: QueueOptions | None = None,
    ) -> None:
        super().__init__(store.block_bytes, executor, options)
        self._store = store
        self._arena_view = arena_view

    def _written(self, spec: TransferSpec) -> None:
        return None

    def _move(self, job: Job, part: Part) -> list[BlockOutcome]:
        blocks, arena = job.spec
        assert isinstance(arena, SlotSpec) and isinstance(blocks, NvmeSpec)
        span = slice(part.begin, part.end)
        return self._store.read(
            blocks.hashes[span],
            blocks.slots[span].tolist(),
            list(map(self._arena_view, arena.slots[span].tolist())),
            None if blocks.values is None else blocks.values[span],
        )
