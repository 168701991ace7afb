"""Handlers between the CPU arena and the NVMe tier that run on threads of this process.

`BlockStore` does the work and gives the outcome of each block. `nvme_jobs` has the queue.
`mover_process` has handlers with the same contract whose work is done by another process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial

from ...tiers.base import BlockOutcome, SlotArray, SlotSpec
from ...tiers.nvme.index.index_port import Removal
from ...tiers.nvme.nvme_backend import NvmeSpec
from ...tiers.nvme.segments.store import BlockStore
from ..base import TransferSpec
from .bounce import ArenaBounce
from .nvme_jobs import Job, NvmeJobHandler, Part, QueueOptions

ArenaView = Callable[[int], memoryview]
"""Function from an arena slot to its bytes: writable, exactly one block."""


class _ArenaHandler(NvmeJobHandler):
    """Access to the arena, for both directions."""

    def __init__(
        self,
        store: BlockStore,
        arena_view: ArenaView,
        executor: Executor,
        options: QueueOptions | None = None,
        *,
        bounce: ArenaBounce | None = None,
    ) -> None:
        """With `bounce`, all bytes pass through its buffers in huge pages."""
        super().__init__(store.block_bytes, executor, options)
        self._store = store
        self._arena_view = arena_view
        self._bounce = bounce

    def _views(self, slots: SlotArray) -> list[memoryview]:
        return list(map(self._arena_view, slots.tolist()))


class NvmeStoreHandler(_ArenaHandler):
    """Stores blocks from the arena to NVMe."""

    def _written(self, spec: TransferSpec) -> NvmeSpec:
        blocks = spec[1]
        assert isinstance(blocks, NvmeSpec)
        return blocks

    def _owe(self, removals: Sequence[Removal], epoch: int) -> None:
        self._store.defer_removals(removals, epoch)

    def _move(self, job: Job, part: Part) -> list[BlockOutcome]:
        arena, blocks = job.spec
        assert isinstance(arena, SlotSpec) and isinstance(blocks, NvmeSpec)
        span = slice(part.begin, part.end)
        slots = arena.slots[span]
        return self._store.write(
            blocks.hashes[span],
            blocks.slots[span].tolist(),
            self._views(slots) if self._bounce is None else self._bounce.take(slots),
            blocks.epoch,
            part.removals,
        )


class NvmeLoadHandler(_ArenaHandler):
    """Loads blocks from NVMe into the arena. A block is OK only if its checksum matched."""

    def _written(self, spec: TransferSpec) -> None:
        return None

    def _move(self, job: Job, part: Part) -> list[BlockOutcome]:
        blocks, arena = job.spec
        assert isinstance(arena, SlotSpec) and isinstance(blocks, NvmeSpec)
        span = slice(part.begin, part.end)
        slots = arena.slots[span]
        return self._store.read(
            blocks.hashes[span],
            blocks.slots[span].tolist(),
            self._views(slots) if self._bounce is None else self._bounce.blocks(len(slots)),
            None if blocks.values is None else blocks.values[span],
            None if self._bounce is None else partial(self._bounce.give, slots),
        )
