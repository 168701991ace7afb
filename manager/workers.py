"""Transfers of workers from and to slots of the first tier.

After a reset the engine reports no completion of earlier transfers, but workers may go on writing
for a few steps. These slots are in *quarantine* until every worker has certainly stopped. The
engine does not know of a reset by another engine, and reports all completions. Such transfers are
*outdated*, and each completion frees its slot.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain

import numpy as np

from ..tiers.base import BlockHash, BlockStatus, LoadStoreSpec
from .core import ManagerCore
from .first_tier import SPENT
from .request import Request


class WorkerTransfers:
    """Stores and loads of workers in flight, and the quarantine. Used under the manager's lock."""

    def __init__(self, core: ManagerCore) -> None:
        self._counters = core.counters
        self._top = core.top
        self._media = [core.top.medium, *(facts.medium for facts in core.below.tiers)]
        self._options = core.options
        self._step = 0
        """Number of steps in which slots were in quarantine."""
        self.quarantine: list[tuple[int, list[BlockStatus]]] = []
        """For each reset: the step at which its quarantine ends, and the slots to unpin then."""
        self.stores: dict[BlockHash, BlockStatus] = {}
        """Blocks that workers write now, with their slots."""
        self.loads: dict[BlockHash, tuple[BlockStatus, int]] = {}
        """Blocks that workers read now, with the slot and the number of loads."""
        self.outdated: dict[BlockHash, tuple[BlockStatus, int]] = {}
        """Blocks removed during a worker's transfer, with the slot and the number of completions
        expected. Such a hash must not be stored again, because completions are matched by hash."""

    @property
    def is_busy(self) -> bool:
        """True if transfers in flight will free or unpin slots."""
        return bool(self.stores or self.loads or self.outdated or self.quarantine)

    def begin_loads(
        self, block_hashes: Collection[BlockHash], request: Request | None
    ) -> LoadStoreSpec:
        """Pin blocks that a worker reads, and return their slots."""
        hashes = list(block_hashes)
        if request is not None:
            request.sources.clear()  # of an earlier load, before a preemption
        loads, origin, served_end = self.loads, self._top.origin, self._options.served_end
        loaded, served = self._counters.loaded_blocks, self._counters.served_blocks
        slots: list[int] = []
        for block_hash, status in zip(hashes, self._top.policy.get_many(hashes), strict=True):
            assert status is not None and status.ref_cnt >= 0, "only hits can be loaded"
            status.ref_cnt += 1
            entry = loads.get(block_hash)
            loads[block_hash] = (status, 1 if entry is None else entry[1] + 1)
            slot = status.block_id
            slots.append(slot)
            source = origin[slot]
            if source:  # the first load counts for the tier below, later ones for the first tier
                origin[slot] = 0 if source == SPENT else SPENT
                source = 0 if source == SPENT else source
                if source and request is not None:
                    request.sources[block_hash] = self._media[source]
            loaded[source] += 1
            served[source] += block_hash.endswith(served_end)
        if request is None:
            self._top.policy.touch(hashes)
        else:
            request.keys.update(dict.fromkeys(hashes, False))
        return LoadStoreSpec(np.array(slots, np.int32))

    def end_loads(self, block_hashes: Collection[BlockHash]) -> None:
        """Remove one pin of each block, because a worker has read them."""
        pop = self.loads.pop
        for block_hash in block_hashes:
            entry = pop(block_hash, None)
            if entry is None:  # from before a reset
                self.report(block_hash)
                continue
            status, left = entry
            if left > 1:
                self.loads[block_hash] = (status, left - 1)
            assert status.ref_cnt > 0, "a loading block is pinned"
            status.ref_cnt -= 1
        self._top.dirt.evictable_max += len(block_hashes)

    def using(self) -> list[BlockStatus]:
        """Return the slots that workers use now, each once."""
        others = chain(self.loads.values(), self.outdated.values())
        return [*self.stores.values(), *(status for status, _ in others)]

    def outdate(self) -> None:
        """Treat every transfer in flight as outdated, because all blocks leave the cache.

        Transfers in flight still complete; each slot is freed when `report` has seen its last
        transfer.
        """
        for block_hash, status in self.stores.items():
            self.outdated[block_hash] = (status, 1)
        self.outdated.update(self.loads)
        self.stores.clear()
        self.loads.clear()

    def report(self, block_hash: BlockHash) -> None:
        """Take in a completion for a block that left the cache, or that was never prepared."""
        entry = self.outdated.pop(block_hash, None)
        if entry is None:
            return
        status, left = entry
        if left > 1:
            self.outdated[block_hash] = (status, left - 1)
        else:
            self._top.release([status])

    def quarantined(self) -> Iterator[BlockStatus]:
        """Yield the slots in quarantine."""
        return chain.from_iterable(statuses for _, statuses in self.quarantine)

    def forget(self, statuses: list[BlockStatus]) -> None:
        """Forget all transfers, because the engine reports no more completions of them.

        `statuses` are in quarantine from now on, each with one count.
        """
        self.stores.clear()
        self.loads.clear()
        self.outdated.clear()
        if statuses:
            self.quarantine.append((self._step + self._options.steps_until_flushed, statuses))

    def end_step(self) -> None:
        """End a step: release the slots whose quarantine is over.

        Without a quarantine it need not be called.
        """
        self._step += 1
        while self.quarantine and self.quarantine[0][0] <= self._step:
            self._top.release(self.quarantine.pop(0)[1])

    def all_flushed(self) -> None:
        """End the quarantine: all worker transfers from before the last reset have ended."""
        while self.quarantine:
            self._top.release(self.quarantine.pop(0)[1])
