"""Loads: pins on blocks of the first tier while workers read them.

Used under the manager's lock.
"""

from __future__ import annotations

from collections.abc import Collection

from ..tiers.base import BlockHash, BlockStatus, LoadStoreSpec
from .claim_queue import ClaimQueue
from .flow import Flow
from .promotion import SPENT, Promoter
from .request import Request
from .workers import WorkerTransfers


class Loads:
    """Pin the blocks that workers read."""

    def __init__(
        self,
        flow: Flow,
        promoter: Promoter,
        claims: ClaimQueue,
        workers: WorkerTransfers,
        served_end: bytes,
    ) -> None:
        """`served_end`: last bytes of the hashes of those blocks by which tokens are counted."""
        self._flow = flow
        self._top = flow.top
        self._promoter = promoter
        self._claims = claims
        self._workers = workers
        self._served_end = served_end
        self._media = [flow.top.medium, *(facts.medium for facts in flow.below.tiers)]

    def prepare(
        self, block_hashes: Collection[BlockHash], request: Request | None
    ) -> LoadStoreSpec:
        """Implement `CascadingOffloadingManager.prepare_load`."""
        hashes = list(block_hashes)
        origin, served_end = self._promoter.origin, self._served_end
        counters = self._flow.counters
        loaded, served = counters.loaded_blocks, counters.served_blocks
        pinned: list[BlockStatus] = []
        for block_hash, status in zip(hashes, self._top.policy.get_many(hashes), strict=True):
            assert status is not None and status.ref_cnt >= 0, "only hits can be loaded"
            status.ref_cnt += 1
            pinned.append(status)
            slot = status.block_id
            source = origin[slot]
            if source:  # the first load counts for the tier below, later ones for the first tier
                origin[slot] = 0 if source == SPENT else SPENT
                source = 0 if source == SPENT else source
                if source and request is not None:
                    request.sources[block_hash] = self._media[source]
            loaded[source] += 1
            served[source] += block_hash.endswith(served_end)
        self._workers.begin_loads(hashes, pinned)
        if request is None:
            self._top.policy.touch(hashes)
        else:
            request.keys.update(dict.fromkeys(hashes, False))
            if request.claim is not None:
                self._claims.release(request)
        return self._top.backend.get_load_store_spec(hashes, pinned)
