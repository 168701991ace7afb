"""A tier in a real folder, an arena in memory without a name, and handlers with or without a mover.

The steps are the manager's: make room, allocate, start, land.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from kvcascade.handlers.base import OffloadingHandler, TransferResult
from kvcascade.handlers.node.mover import Mover, MoverOptions
from kvcascade.handlers.node.mover_child import Connection, launch
from kvcascade.handlers.node.mover_process import (
    MoverBackground,
    MoverLoadHandler,
    MoverStoreHandler,
)
from kvcascade.handlers.node.mover_wire import Setup
from kvcascade.handlers.node.nvme_handlers import NvmeLoadHandler, NvmeStoreHandler
from kvcascade.handlers.node.nvme_jobs import QueueOptions
from kvcascade.tiers.base import BlockHash, BlockOutcome, BlockStatus, SlotSpec
from kvcascade.tiers.nvme.attach import attachment_of

from .nvme_rig import BLOCK, Rig, config_for, content

ARENA_SLOTS = 64
ARENA_OFFSET = 4096
LIMIT_S = 60.0
"""Nothing in a test takes this long unless it is broken."""


class MoverRig:
    """Both handlers over one tier. `mover` is None for the twin with threads."""

    def __init__(
        self,
        path: Path,
        *,
        has_process: bool,
        slots: int = 64,
        options: MoverOptions | None = None,
        queue: QueueOptions | None = None,
    ) -> None:
        self.is_closed = False
        self._undo = [ThreadPoolExecutor(2), ThreadPoolExecutor(2)]
        self.rig = Rig(config_for([path], slots=slots))
        self._fd = os.memfd_create("arena")
        os.ftruncate(self._fd, ARENA_OFFSET + ARENA_SLOTS * BLOCK)
        self.arena = memoryview(mmap.mmap(self._fd, 0))[ARENA_OFFSET:]
        self.mover: Mover | None = None
        self.down: OffloadingHandler
        self.up: OffloadingHandler
        store = self.rig.tier.store
        if not has_process:
            self.down = NvmeStoreHandler(store, self.view, self._undo[0], queue)
            self.up = NvmeLoadHandler(store, self.view, self._undo[1], queue)
            return
        self.mover = Mover(self._launch, ThreadPoolExecutor(1), options)
        self.mover.start()
        self.rig.backend.use_background(MoverBackground(store, self.mover))
        self.down = MoverStoreHandler(store, self.mover, queue)
        self.up = MoverLoadHandler(store, self.mover, queue)

    @property
    def process(self) -> Mover:
        """The mover, which must be there."""
        assert self.mover is not None
        return self.mover

    def view(self, slot: int) -> memoryview:
        """The bytes of an arena slot."""
        return self.arena[slot * BLOCK : (slot + 1) * BLOCK]

    def begin_store(self, job_id: int, hashes: Sequence[BlockHash], first_slot: int = 0) -> bool:
        """Start to store from arena slots; if that is refused, nothing stays."""
        for slot, block_hash in enumerate(hashes, first_slot):
            self.view(slot)[:] = content(block_hash)
        statuses = self.rig.begin_store(hashes)
        spec = self.rig.backend.get_load_store_spec(hashes, statuses)
        if self.down.transfer_async(job_id, (_slots(first_slot, len(hashes)), spec)):
            return True
        for block_hash in hashes:
            self.rig.drop(block_hash)
        return False

    def begin_load(self, job_id: int, hashes: Sequence[BlockHash], first_slot: int = 32) -> bool:
        """Start to load into arena slots; the blocks are pinned until `end_load`."""
        found: list[BlockStatus] = []
        for block_hash in hashes:
            status = self.rig.policy.get(block_hash)
            assert status is not None, "only what is there can be loaded"
            status.ref_cnt += 1
            found.append(status)
        spec = self.rig.backend.get_load_store_spec(hashes, found)
        return self.up.transfer_async(job_id, (spec, _slots(first_slot, len(hashes))))

    def end(self, handler: OffloadingHandler, job_id: int) -> TransferResult:
        """Wait for one job and take its result."""
        handler.wait({job_id}, LIMIT_S)
        (result,) = handler.get_finished()
        assert result.job_id == job_id
        return result

    def land(self, hashes: Sequence[BlockHash], result: TransferResult) -> None:
        """A store has ended."""
        for block_hash, outcome in zip(hashes, outcomes_of(result, len(hashes)), strict=True):
            status = self.rig.policy.get(block_hash)
            assert status is not None
            if outcome is BlockOutcome.OK:
                status.ref_cnt = 0
            else:
                self.rig.drop(block_hash)

    def end_load(self, hashes: Sequence[BlockHash], result: TransferResult) -> list[bool]:
        """A load has ended: unpin, and what is not there any more leaves. True where it is OK."""
        outcomes = outcomes_of(result, len(hashes))
        for block_hash, outcome in zip(hashes, outcomes, strict=True):
            status = self.rig.policy.get(block_hash)
            assert status is not None
            status.ref_cnt -= 1
            if outcome in (BlockOutcome.CORRUPT, BlockOutcome.GONE):
                self.rig.drop(block_hash)
        return [outcome is BlockOutcome.OK for outcome in outcomes]

    def store(self, job_id: int, hashes: Sequence[BlockHash]) -> TransferResult:
        """Store, wait, land."""
        assert self.begin_store(job_id, hashes)
        result = self.end(self.down, job_id)
        self.land(hashes, result)
        return result

    def load(self, job_id: int, hashes: Sequence[BlockHash], first_slot: int = 32) -> list[bool]:
        """Load, wait, and check every byte of what is said to be there."""
        for slot in range(first_slot, first_slot + len(hashes)):
            self.view(slot)[:] = bytes(BLOCK)
        assert self.begin_load(job_id, hashes, first_slot)
        is_there = self.end_load(hashes, self.end(self.up, job_id))
        for slot, (block_hash, is_ok) in enumerate(zip(hashes, is_there, strict=True), first_slot):
            assert not is_ok or self.view(slot) == content(block_hash), "wrong bytes were served"
        return is_there

    def close(self) -> None:
        """As an engine does; idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        self.down.shutdown()
        self.up.shutdown()
        if self.mover is not None:
            assert self.mover.close()
        for executor in self._undo:
            executor.shutdown()
        self.rig.close()
        os.close(self._fd)

    def _launch(self) -> Connection:
        setup = Setup(attachment_of(self.rig.tier), ARENA_OFFSET, BLOCK, ARENA_SLOTS, 2, True)
        return launch(setup, os.dup(self._fd))


def outcomes_of(result: TransferResult, n: int) -> list[BlockOutcome]:
    """One per block."""
    return list(result.outcomes) or [BlockOutcome.OK] * n


def _slots(first: int, n: int) -> SlotSpec:
    return SlotSpec(np.arange(first, first + n, dtype=np.int32))
