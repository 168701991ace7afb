"""`CascadingOffloadingManager`: a first tier and the tiers below it.

Blocks are stored into the first tier and demoted ahead of demand. If a lookup finds a block below,
the block is promoted. The manager knows the slots of the first tier. It reaches all other tiers
through the port `Below`.

Threads: one lock guards every change of state. The scheduler's thread calls the contract. A
background thread may call `maintain`, so that demotion goes on while the engine is idle. The holder
of the lock never waits for a file: it only starts transfers and collects the ended ones. Only a
shutdown waits with it, for the last transfers. Lookups of blocks in the first tier take no lock
(`Lookups`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from ..config.schema import WriteMode
from ..tiers.base import BlockHash, BlockStatus, LoadStoreSpec
from .admission import AdmissionFunction, PastUses
from .base import BlockEvent, PrepareStoreOutput
from .below.port import Below
from .core import Clock, ManagerCore, ManagerOptions
from .counters import Counters
from .demotion import Aging, Demoter
from .first_tier import Tier, Transfer
from .flush import Closing
from .lookup import Answers, Lookups
from .promotion.claim_queue import ClaimQueue
from .promotion.claims import Holds, PromotionRoom
from .promotion.load_choice import LoadChoice
from .promotion.promoter import Promoter
from .promotion.worth import PrefillSpeed, Worth
from .request import Request, RequestEnds
from .resets import Resets
from .state import TierState
from .stores import Stores
from .workers import WorkerTransfers


class CascadingOffloadingManager:
    """Manager of a cascade: a `FirstTier` with its slots, and a `Below`.

    It decides where each block is stored and which one moves next, does no I/O and does not use
    torch. Names and semantics follow vLLM's `OffloadingManager`.
    """

    def __init__(
        self,
        top: Tier,
        below: Below,
        options: ManagerOptions | None = None,
        clock: Clock = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
        admission: AdmissionFunction | None = None,
    ) -> None:
        """`admission` decides which blocks are written to tier 1; None: all.

        `pause` waits for the given seconds of the clock. Only a flush calls it.
        """
        self.options = options = options or ManagerOptions()
        self.lock = threading.RLock()
        counts_uses = below.tiers and admission is not None
        past = PastUses(below.tiers[0].capacity) if counts_uses else None
        core = self._core = ManagerCore(top, below, clock, past, options)
        mode = options.write_mode
        age_s = 0.0 if mode is WriteMode.THROUGH else options.dirty_age_s
        is_aging = mode is not WriteMode.DEMOTE and not core.is_single
        aging = Aging(clock, core.top, age_s) if is_aging else None
        demoter = self._demoter = Demoter(core, admission, aging)
        worth = _worth_of(core)
        workers = self._workers = WorkerTransfers(core)
        holds = self._holds = Holds(core.top.dirt)
        promoter = self._promoter = Promoter(core, demoter, holds, workers, worth)
        room = PromotionRoom(core, promoter, holds, workers)
        answers = Answers(core.top.policy.ready_at)
        choice = LoadChoice(core, promoter, room, worth)
        claims = self._claims = ClaimQueue(core, promoter, holds, room, choice, answers)
        lookups = self.lookups = Lookups(
            self.lock, core, promoter, claims, workers, worth, answers, self._collect
        )
        """Lookups of the current step, by single blocks, too. Adapters inline the plain hit."""
        self._stores = Stores(
            core, demoter, promoter, claims, workers, answers, worth, self._collect
        )
        self._request_ends = RequestEnds(core, claims, worth, aging)
        self._resets = Resets(core, demoter, promoter, claims, lookups, workers)
        self._closing = Closing(
            core, demoter, workers, holds, self.lock, self._collect, self._maintain_below, pause
        )

    # ---- questions -----------------------------------------------------------------------

    @property
    def counters(self) -> Counters:
        """Counters of the cascade."""
        return self._core.counters

    def lookup(
        self, block_hashes: Iterable[BlockHash], request: Request | None = None
    ) -> int | None:
        """Return the length of the longest prefix of blocks that can be loaded.

        None: blocks of this prefix are in flight; ask again.
        """
        return self.lookups.lookup(block_hashes, request or Request())

    # ---- loads and stores ------------------------------------------------------------------

    def prepare_load(
        self, block_hashes: Collection[BlockHash], request: Request | None = None
    ) -> LoadStoreSpec:
        """Pin blocks that were hits. Return the slots that the worker reads."""
        with self.lock:
            spec = self._workers.begin_loads(block_hashes, request)
            self.lookups.note_progress(request)
            return spec

    def complete_load(self, block_hashes: Collection[BlockHash]) -> None:
        """Undo one `prepare_load`, because the worker has read the blocks."""
        with self.lock:
            self._workers.end_loads(block_hashes)

    def prepare_store(
        self, block_hashes: Sequence[BlockHash], request: Request | None = None
    ) -> PrepareStoreOutput | None:
        """Take slots for the blocks that are absent, and evict others if necessary.

        None: no slot is free now, but some will be soon; offer the same list again. Of a list that
        can never fit, as many of the first blocks are taken as fit.
        """
        with self.lock:
            self.lookups.note_progress(request)
            return self._stores.prepare(block_hashes, request)

    def complete_store(
        self,
        block_hashes: Collection[BlockHash],
        success: bool = True,
        request: Request | None = None,
    ) -> None:
        """Make blocks loadable that the worker wrote; if not `success`, remove them."""
        with self.lock:
            self._stores.complete(block_hashes, success, request)

    # ---- recency, requests, steps --------------------------------------------------------

    def finish_request(self, request: Request) -> None:
        """End a request: set the recency of its blocks. Its transfers may still be in flight."""
        with self.lock:
            self._request_ends.end(request)

    def end_step(self) -> None:
        """End a step of the scheduler: start queued transfers and collect the ended ones.

        Call it at any time after the last lookup of the step.
        """
        with self.lock:
            if self._workers.quarantine:
                self._workers.end_step()
            self._claims.end_step()
            self._maintain()
            self._core.evicted.clear()
            if self.lookups.asking is not None:
                self.lookups.end_step()

    def maintain(self) -> None:
        """Demote blocks, collect ended transfers, and drop expired pins.

        Any thread may call it. It returns at once if the lock is taken, or while requests ask:
        their lookups take no lock, and `end_step` does the same soon.
        """
        if self.lock.acquire(blocking=False):
            try:
                if self.lookups.asking is None:
                    self._maintain()
            finally:
                self.lock.release()

    def _maintain(self) -> None:
        self._collect()
        self._claims.maintain()
        self._demoter.maintain()
        self._maintain_below()

    def _collect(self) -> None:
        """Collect the transfers that ended below, and the keys that the tiers below lost."""
        core, promoter, demoter = self._core, self._promoter, self._demoter
        ended_jobs = core.below.poll()
        for ended in ended_jobs:
            job: Transfer = (promoter if ended.is_get else demoter).land(ended)
            if self.options.on_transfer is not None:
                name = self.counters.tier_names[ended.tier]
                self.options.on_transfer(name, ended, job.created_s)
        lost = core.below.take_lost()
        if lost:  # before any of these blocks is evicted
            core.top.note_lost_below(lost)
        if ended_jobs:
            core.collect_events()
        if core.clock() >= promoter.late_s:
            promoter.expire()

    def _maintain_below(self) -> None:
        """Maintain the tiers below. Empty the first tier if another engine reset one."""
        if self._core.below.maintain():
            self._resets.follow()

    @property
    def waiting_requests(self) -> int:
        """Number of requests whose promotion waits for its turn. Any thread."""
        with self.lock:
            return self._claims.waiting

    def has_pending_work(self) -> bool:
        """Return True if a request waits for a block in flight: further calls make progress.

        Requests that wait for their turn do not count. The ticker admits them, and an engine that
        was paused would wait for their turns, though it schedules none of them.
        """
        return bool(self._promoter.pending and self._claims.admitted)

    def take_events(self) -> list[BlockEvent]:
        """Return the blocks stored or removed since the last call, in order."""
        with self.lock:
            return self._core.take_events()

    # ---- reset and shutdown --------------------------------------------------------------

    def reset_cache(self) -> None:
        """Make every older block unreachable, or with `on_reset` "keep" only those in flight.

        The engine reports no completion of earlier worker transfers. Workers may still write their
        slots, so these stay out of use until `on_reset_flushed`, or for `steps_until_flushed`
        steps.
        """
        with self.lock:
            self._resets.reset()

    def on_reset_flushed(self) -> None:
        """End the quarantine: all worker transfers from before the last reset have ended."""
        with self.lock:
            self._workers.all_flushed()

    def flush_dirty(self, deadline_s: float) -> bool:
        """Write every dirty block of the first tier below it, until `deadline_s` on the clock.

        The call is for shutdown and may block, also while a failed tier rests. Return True if no
        such block is left or in flight.
        """
        return self._closing.flush_dirty(deadline_s)

    def shutdown(self) -> bool:
        """Write dirty blocks within `shutdown_flush_s`, then stop all transfers. Idempotent.

        Return False if transfers are still in flight, because a device is too slow.
        """
        return self._closing.shutdown(self._core.clock() + self.options.shutdown_flush_s)

    # ---- contents of the tiers -----------------------------------------------------------

    def adopt(self, block_hashes: Sequence[BlockHash], statuses: Sequence[BlockStatus]) -> None:
        """Insert complete blocks that the first tier holds already. Call it before the first
        request."""
        with self.lock:
            self._core.adopt(block_hashes, statuses)

    def tier_states(self) -> list[TierState]:
        """Return the state of each tier, the first tier first. Any thread."""
        with self.lock:
            top, queues = self._core.top, self._promoter.queues
            landing = sum(len(job.statuses) for queue in queues for job in queue.jobs.values())
            first = TierState(
                top.name,
                top.medium,
                top.block_size,
                blocks=len(top.policy),
                capacity_blocks=top.capacity,
                dirty_blocks=top.dirt.dirty_blocks,
                writing_blocks=len(self._workers.stores) + landing,
                reading_blocks=self._reading_slots(),
            )
            below = zip(self._core.below.state(), queues, strict=True)
            return [first, *(replace(state, waiting_blocks=queue.blocks) for state, queue in below)]

    def _reading_slots(self) -> int:
        """Return the number of slots of the first tier that are pinned for reads."""
        loads = {status.block_id for status, _ in self._workers.loads.values()}
        writes = (status.block_id for job in self._demoter.jobs.values() for status in job.statuses)
        return len(loads.union(self._holds.users, writes))


def _worth_of(core: ManagerCore) -> Worth | None:
    options = core.options
    if core.is_single or not options.load_or_recompute or not options.tokens_per_block:
        return None
    prefill = PrefillSpeed(options.prefill_tokens_per_s)
    ratios, size = [tier.load_ratio_max for tier in core.below.tiers], core.top.block_size
    latency_s = core.below.latency_s
    return Worth(ratios, size, options.tokens_per_block, prefill, options.served_end, latency_s)
