"""Resets of the cache by this engine, and by other engines that share a tier.

Used under the manager's lock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain

from ..config.schema import OnReset
from ..logs import get_logger
from .core import ManagerCore
from .demotion import Demoter
from .lookup import Lookups
from .promotion.claim_queue import ClaimQueue
from .promotion.promoter import Promoter
from .workers import WorkerTransfers

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Resets:
    """Make older blocks unreachable."""

    _core: ManagerCore
    _demoter: Demoter
    _promoter: Promoter
    _claims: ClaimQueue
    _lookups: Lookups
    _workers: WorkerTransfers

    def reset(self) -> None:
        """Implement `CascadingOffloadingManager.reset_cache`."""
        self._core.counters.resets += 1
        if self._core.options.on_reset is OnReset.KEEP:
            _log.info("the cache was reset, and keeps its blocks (on_reset)")
            self._forget_worker_transfers()
            return
        _log.info("the cache was reset: no block stored before is found any more")
        self._core.events.clear()  # the engine announces that every block is gone, before these
        self._core.below.reset()
        self._forget_top(is_own=True)

    def follow(self) -> None:
        """Empty the first tier, because another engine reset a tier below."""
        self._core.counters.resets_by_others += 1
        _log.info("another engine reset the cache: no block stored before is found any more")
        self._forget_top(is_own=False)

    def _forget_worker_transfers(self) -> None:
        for block_hash, status in self._workers.stores.items():
            self._core.top.policy.remove(block_hash)
            status.ref_cnt = 1
        for loading, count in self._workers.loads.values():
            loading.ref_cnt -= count - 1  # the quarantine keeps one pin; workers may still read
        self._workers.forget(self._workers.using())

    def _forget_top(self, *, is_own: bool) -> None:
        """Empty the first tier.

        `is_own`: the engine requested the reset, and reports no completion of transfers in flight.
        If another process reset a tier, the engine does not know of it. It then continues its
        transfers and reports all of them.
        """
        self._claims.orphan()
        jobs = [*self._promoter.orphan(), *self._demoter.orphan()]
        workers = self._workers.using()
        if not is_own:
            self._workers.outdate()
        users = Counter(status.block_id for job in jobs for status in job.statuses)
        users.update(s.block_id for s in chain(workers, self._workers.quarantined()))
        if not is_own and self._core.with_events:
            self._core.top.note_loss()
        self._core.top.empty(users)
        self._lookups.end_step()
        if is_own:
            self._workers.forget(workers)
