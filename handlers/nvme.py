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
from .bounce import BounceBuffers, copy_block
from .nvme_jobs import Job, NvmeJobHandler, Part, QueueOptions

ArenaView = Callable[[int], memoryview]
"""The bytes of an arena slot, writable, exactly one block long."""


class _ArenaHandler(NvmeJobHandler):
    """What both directions share."""

    def __init__(
        self,
        store: BlockStore,
        arena_view: ArenaView,
        executor: Executor,
        options: QueueOptions | None = None,
        *,
        bounce: BounceBuffers | None = None,
    ) -> None:
        """With `bounce` the bytes pass through it, for the disk's sake."""
        super().__init__(store.block_bytes, executor, options)
        self._store = store
        self._arena_view = arena_view
        self._bounce = bounce


class NvmeStoreHandler(_ArenaHandler):
    """Arena to NVMe."""

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
        payloads = list(map(self._arena_view, arena.slots[span].tolist()))
        return self._store.write(
            blocks.hashes[span],
            blocks.slots[span].tolist(),
            payloads if self._bounce is None else self._bounce.copies(payloads),
            blocks.epoch,
            part.removals,
        )


class NvmeLoadHandler(_ArenaHandler):
    """NVMe to arena. A block is OK only if its checksum matched."""

    def _written(self, spec: TransferSpec) -> None:
        return None

    def _move(self, job: Job, part: Part) -> list[BlockOutcome]:
        blocks, arena = job.spec
        assert isinstance(arena, SlotSpec) and isinstance(blocks, NvmeSpec)
        span = slice(part.begin, part.end)
        targets = list(map(self._arena_view, arena.slots[span].tolist()))
        buffers = targets if self._bounce is None else self._bounce.blocks(len(targets))
        outcomes = self._store.read(
            blocks.hashes[span],
            blocks.slots[span].tolist(),
            buffers,
            None if blocks.values is None else blocks.values[span],
        )
        if self._bounce is not None:
            for target, buffer, outcome in zip(targets, buffers, outcomes, strict=True):
                if outcome is BlockOutcome.OK:
                    copy_block(target, buffer)
        return outcomes
