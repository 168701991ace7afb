"""Handler between two NVMe tiers, for cascades with more than one.

A block is read and verified, and only verified blocks are written, so damage does not spread. The
bytes pass through one buffer per thread, of one part at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor

from ...tiers.base import BlockOutcome
from ...tiers.nvme.index.index_port import Removal
from ...tiers.nvme.nvme_backend import NvmeSpec
from ...tiers.nvme.segments.store import BlockStore
from ..base import TransferSpec
from .bounce import BounceBuffers
from .nvme_jobs import Job, NvmeJobHandler, Part, QueueOptions


class NvmePairHandler(NvmeJobHandler):
    """Copies blocks from one NVMe tier to another. Only the manager's thread may call it."""

    def __init__(
        self,
        source: BlockStore,
        target: BlockStore,
        executor: Executor,
        options: QueueOptions | None = None,
    ) -> None:
        assert source.block_bytes == target.block_bytes, "blocks of one cascade have one size"
        super().__init__(source.block_bytes, executor, options)
        self._source = source
        self._target = target
        self._bounce = BounceBuffers(source.block_bytes)

    def _written(self, spec: TransferSpec) -> NvmeSpec:
        blocks = spec[1]
        assert isinstance(blocks, NvmeSpec)
        return blocks

    def _owe(self, removals: Sequence[Removal], epoch: int) -> None:
        self._target.defer_removals(removals, epoch)

    def _move(self, job: Job, part: Part) -> list[BlockOutcome]:
        source, target = job.spec
        assert isinstance(source, NvmeSpec) and isinstance(target, NvmeSpec)
        span = slice(part.begin, part.end)
        hashes, to = target.hashes[span], target.slots[span].tolist()
        views = self._bounce.blocks(len(hashes))
        values = None if source.values is None else source.values[span]
        outcomes = self._source.read(
            source.hashes[span], source.slots[span].tolist(), views, values
        )
        right = [i for i, outcome in enumerate(outcomes) if outcome is BlockOutcome.OK]
        written = self._target.write(
            [hashes[i] for i in right],
            [to[i] for i in right],
            [views[i] for i in right],
            target.epoch,
            part.removals,
        )
        for i, outcome in zip(right, written, strict=True):
            outcomes[i] = outcome
        return outcomes
