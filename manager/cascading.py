"""`CascadingOffloadingManager`: N tiers, each a backend and a policy, chained by handlers.

Blocks enter at the top, are demoted ahead of demand, and come up again when a lookup finds them
below. Nothing here knows what a tier is made of.

Threads: one lock guards everything that changes state. The scheduler thread calls the contract; a
background thread may call `maintain` so that demotion goes on while the engine is idle. Nothing
under the lock waits for a file: it only starts transfers and takes in finished ones. Lookups of
blocks in the first tier take no lock (`Lookups`).
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from ..config.schema import OnReset, WriteMode
from ..tiers.base import BlockHash, BlockStatus, LoadStoreSpec
from .admission import EnduranceWatch
from .base import BlockEvent, LookupState, OffloadingManager, PrepareStoreOutput
from .counters import Counters
from .demotion import Demoter
from .flow import Clock, Flow, Link
from .flush import FlushMeans, flush_all, refresh_recency_below
from .holds import Holds
from .level import Level, Pairs, Tier
from .lookup import Lookups
from .promotion import SPENT, Promoter
from .request import Request, runs_from_the_end
from .state import TierState
from .turns import Turns
from .workers import WorkerTransfers
from .worth import PrefillSpeed, Worth

HANDLER_STOP_S = 1.0
"""Least time that a handler gets to end what it is in the middle of."""
STEPS_UNTIL_FLUSHED = 8
"""Steps after a reset by which every worker has finished the transfers from before it: the depth
of the engine's pipeline (stages + 2) with room to spare; engines that say so need not wait."""
AGING_PER_SLOT = 2
"""Stored blocks per slot whose age is known: enough unless nothing could be written meanwhile."""
MAX_PUT_OFFS = 32
"""Steps that a request's blocks wait for dirty ones to be written: several times what that takes.
After that the first of them are taken, as many as there is room for."""


@dataclass(frozen=True, slots=True)
class ManagerOptions:
    """Behaviour of the cascade; sizes are shares of the upper tier of each link."""

    write_mode: WriteMode = WriteMode.DEMOTE
    on_reset: OnReset = OnReset.INVALIDATE
    low_watermark: float = 0.4
    high_watermark: float = 0.5
    dirty_age_s: float = 5.0
    promotion_budget_slots: int | None = None
    """Slots of the first tier that promotions may take or hold; None: those that are not dirty, but
    for a reserve, and half of them at least."""
    promotion_deadline_s: float = 10.0
    load_or_recompute: bool = True
    """Bring blocks up only where that is expected to be faster than computing them again."""
    prefill_tokens_per_s: float | None = None
    """Speed of computing; None: measured."""
    tokens_per_block: float = 0.0
    """Tokens that a block stands for; 0: unknown, everything is brought up."""
    served_end: bytes = b""
    """End of the hashes of those blocks by which tokens are counted; empty: all are."""
    offered_once: tuple[bytes, ...] = ()
    """Ends of the hashes of blocks that the engine never offers again, whatever the answer."""
    shutdown_flush_s: float = 20.0
    steps_until_flushed: int = STEPS_UNTIL_FLUSHED
    waits_for_stores: bool = True
    """True: a block that a worker is storing is pending; False: a miss, for an engine that reports
    stores only when their request ends."""
    with_events: bool = True


class CascadingOffloadingManager(OffloadingManager):
    """The cascade. Tiers are given top first, links between neighbours."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        links: Sequence[Link],
        options: ManagerOptions | None = None,
        clock: Clock = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """`pause` waits for seconds of the clock, in a shutdown only."""
        assert tiers and len(links) == len(tiers) - 1, "one link between two tiers"
        self.options = options or ManagerOptions()
        self.lock = threading.RLock()
        self.counters = Counters.for_tiers(tuple(tier.name for tier in tiers))
        levels = [Level(tier, is_last=i == len(tiers) - 1) for i, tier in enumerate(tiers)]
        self._flow = Flow(levels, list(links), clock, self.counters)
        self._flow.with_events = self.options.with_events
        self._clock = clock
        self._pause = pause
        self._is_shut_down = False
        self._levels = levels
        self._top = levels[0]
        self._below = list(enumerate(levels))[1:]
        for index, level in enumerate(levels):
            level.on_evicted = partial(self._note_evicted, index)
        low, high = self.options.low_watermark, self.options.high_watermark
        self._demoters = [Demoter(self._flow, i, low, high) for i in range(len(links))]
        if links and self.options.write_mode is not WriteMode.DEMOTE:
            self._demoters[0].on_put_off = self._note_aging
        self._flow.clean_ahead = self._clean_ahead
        self._worth = self._make_worth() if links else None
        self._workers = WorkerTransfers(self._top.backend, self.options.steps_until_flushed)
        self._holds = Holds()
        deadline_s = self.options.promotion_deadline_s
        self._promoter = Promoter(self._flow, self._holds, self._workers, deadline_s, self._worth)
        self._turns = Turns(
            self._flow,
            self._promoter,
            self._holds,
            self._workers,
            self._worth,
            deadline_s,
            self.options.promotion_budget_slots,
            self.options.served_end,
        )
        self.lookups = Lookups(
            self.lock,
            self._flow,
            self._promoter,
            self._turns,
            self._workers,
            self._worth,
            deadline_s if self.options.waits_for_stores else None,
        )
        """The questions of a step; for adapters that inline what can be answered at once."""
        self._aging: deque[tuple[float, BlockHash]] = deque(
            maxlen=AGING_PER_SLOT * self._top.capacity
        )
        """Stored blocks and when, oldest first; beyond the limit they are written as they leave."""
        self._evicted: list[BlockHash] = []
        self._watches = [
            EnduranceWatch(tier.name, tier.day_totals, clock) for tier in tiers if tier.day_totals
        ]
        self._counts_uses = len(tiers) > 1 and tiers[1].admission.counts_uses

    def _make_worth(self) -> Worth | None:
        options = self.options
        if not options.load_or_recompute or not options.tokens_per_block:
            return None
        prefill = PrefillSpeed(options.prefill_tokens_per_s)
        links, size = len(self._levels) - 1, self._top.block_size
        return Worth(links, size, options.tokens_per_block, prefill, options.served_end)

    def _note_evicted(self, index: int, evicted: Pairs) -> None:
        self._flow.on_evicted(index, evicted)
        if index == 0:
            self._evicted += [block_hash for block_hash, _ in evicted]

    def _clean_ahead(self, index: int, n: int) -> bool:
        if index >= len(self._demoters):
            return False
        demoter = self._demoters[index]
        demoter.demote_coldest(n)
        is_moving = demoter.jobs_in_flight and not demoter.is_stalled
        if is_moving or demoter.was_cut_short or demoter.may_find_room:
            return True
        level = self._levels[index]  # what was found to lie below already can leave at once
        return bool(level.policy.coldest(1, set(self.lookups.answers.hits()), level.settled_mask))

    # ---- questions -----------------------------------------------------------------------

    def lookup(
        self, block_hashes: Iterable[BlockHash], request: Request | None = None
    ) -> int | None:
        return self.lookups.lookup(block_hashes, request or Request())

    def lookup_block(self, block_hash: BlockHash, request: Request) -> LookupState:
        """The state of one block: `Lookups.lookup_block`."""
        return self.lookups.lookup_block(block_hash, request)

    # ---- loads ---------------------------------------------------------------------------

    def prepare_load(
        self, block_hashes: Collection[BlockHash], request: Request | None = None
    ) -> LoadStoreSpec:
        hashes = list(block_hashes)
        with self.lock:
            statuses = self._top.policy.get_many(hashes)
            pinned = self._pin_for_load(hashes, statuses, request)
            self._workers.begin_loads(hashes, pinned)
            if request is None:
                self._top.policy.touch(hashes)
            else:
                request.keys.update(dict.fromkeys(hashes, False))
                if request.claim is not None:
                    self._turns.release(request)
            return self._top.backend.get_load_store_spec(hashes, pinned)

    def _pin_for_load(
        self,
        block_hashes: list[BlockHash],
        statuses: list[BlockStatus | None],
        request: Request | None,
    ) -> list[BlockStatus]:
        origin, served_end = self._promoter.origin, self.options.served_end
        loaded, served = self.counters.loaded_blocks, self.counters.served_blocks
        pinned: list[BlockStatus] = []
        for block_hash, status in zip(block_hashes, statuses, strict=True):
            assert status is not None and status.ref_cnt >= 0, "only hits can be loaded"
            status.ref_cnt += 1
            pinned.append(status)
            slot = status.block_id
            source = origin[slot]
            if source:  # its first load is one from below; the second one makes it the tier's own
                origin[slot] = 0 if source == SPENT else SPENT
                source = 0 if source == SPENT else source
                if source and request is not None:
                    request.sources[block_hash] = self._levels[source].medium
            loaded[source] += 1
            served[source] += block_hash.endswith(served_end)
        return pinned

    def complete_load(self, block_hashes: Collection[BlockHash]) -> None:
        with self.lock:
            self._workers.end_loads(block_hashes)

    # ---- stores --------------------------------------------------------------------------

    def prepare_store(
        self, block_hashes: Sequence[BlockHash], request: Request | None = None
    ) -> PrepareStoreOutput | None:
        with self.lock:
            get = self._top.policy.get
            self._evicted.clear()
            new = [block_hash for block_hash in block_hashes if get(block_hash) is None]
            if len(new) > 1:
                new = list(dict.fromkeys(new))
            if self._workers.outdated:
                new = [h for h in new if h not in self._workers.outdated]
            self._top.policy.expect(new)
            room = self._room_for_store(new, block_hashes, request)
            if self._worth is not None and request is not None:
                self._worth.note_offer(block_hashes, request, room is not None, self._clock())
            if room is None:
                self.counters.store_refused_busy += 1
                self._turns.note_refused_store(len(new))
                if request is not None:
                    request.note_put_off(new)
                return None
            if room < len(new):
                self.counters.store_truncated_blocks += len(new) - room
                new = new[:room]
            depth = 0 if request is None else len(request.keys)
            statuses = self._top.take(new, depth) if new else []
            self._workers.stores.update(zip(new, statuses, strict=True))
            if request is not None:
                request.note_taken(block_hashes)
                request.note_stored(block_hashes, new)
            evicted, self._evicted = self._evicted, []
            spec = self._top.backend.get_load_store_spec(new, statuses)
            return PrepareStoreOutput(new, spec, evicted)

    def _room_for_store(
        self, new: list[BlockHash], offered: Sequence[BlockHash], request: Request | None
    ) -> int | None:
        """Slots for the new blocks, evicting; None if waiting a little gives more."""
        need = len(new)
        if need <= self._top.backend.get_num_free_blocks():
            return need
        protected = {*offered, *self.lookups.answers.hits()}
        may_drop = not self._demoters or self._demoters[0].is_blocked
        if need <= self._top.capacity and self._top.make_all_room(need, protected, may_drop):
            return need
        once = self.options.offered_once  # an offer of these is one, or one of each KV group
        if once and any(h.endswith(once) for h in (offered[0], offered[-1])):
            return self._top.make_room(min(need, self._top.capacity), protected, True)
        if request is not None and request.put_offs >= MAX_PUT_OFFS:
            return self._top.make_room(min(need, self._top.capacity), protected, may_drop)
        return self._room_under_pressure(need, protected, may_drop)

    def _room_under_pressure(
        self, need: int, protected: set[BlockHash], may_drop: bool
    ) -> int | None:
        """There is not room for all: free slots by writing blocks down, or take what there is."""
        wanted = min(need, self._top.capacity)
        if not may_drop:
            self._demoters[0].demote_coldest(wanted)
            self._collect()
            if self._demoters[0].jobs_in_flight or self._demoters[0].may_find_room:
                return None
            if self._demoters[0].was_cut_short:  # what it looked at need not be written
                return wanted if self._top.make_all_room(wanted, protected, False) else None
            # Nothing below takes anything: better lose the coldest than the newest.
        if self._top.make_all_room(wanted, protected, may_drop_dirty=True):
            return wanted
        if wanted == need and self._is_busy():
            return None
        return self._top.make_room(wanted, protected, may_drop_dirty=True)

    def _is_busy(self) -> bool:
        """True if slots of the first tier will be given back without anyone's doing."""
        return bool(
            self._workers.is_busy
            or self._promoter.in_flight
            or any(demoter.jobs_in_flight for demoter in self._demoters)
        )

    def complete_store(
        self,
        block_hashes: Collection[BlockHash],
        success: bool = True,
        request: Request | None = None,
    ) -> None:
        with self.lock:
            stored: list[BlockHash] = []
            slots: list[int] = []
            pop, origin = self._workers.stores.pop, self._promoter.origin
            for block_hash in block_hashes:
                status = pop(block_hash, None)
                if status is None:  # from before a reset, or never prepared
                    self._workers.report(block_hash)
                    continue
                if not success:
                    self._top.drop(block_hash, status)
                    continue
                slot = status.block_id
                status.ref_cnt = origin[slot] = 0
                stored.append(block_hash)
                slots.append(slot)
            self._top.policy.mark_ready(stored, slots)
            self._top.set_dirty(slots)
            self.counters.stored_blocks += len(stored)
            self._flow.emit(stored, self._top, removed=False)
            if self._worth is not None and not self._workers.stores:
                self._worth.prefill.all_stored(self._clock())
            if stored and self._demoters and self.options.write_mode is not WriteMode.DEMOTE:
                # A worker reports a set; slots were taken in the order of the offers.
                in_order = [block_hash for _, block_hash in sorted(zip(slots, stored, strict=True))]
                self._note_aging(request.in_prompt_order(in_order) if request else in_order)

    def _note_aging(self, block_hashes: Sequence[BlockHash]) -> None:
        now = self._clock()
        self._aging.extend((now, block_hash) for block_hash in block_hashes)

    # ---- recency, requests, steps --------------------------------------------------------

    def touch(self, block_hashes: Iterable[BlockHash]) -> None:
        with self.lock:
            self._top.policy.touch(block_hashes)

    def finish_request(self, request: Request) -> None:
        """The request ended (transfers may still be under way): set the recency of its blocks.

        Once per request and in the order of its prompt, so that tails leave before heads however
        often the request was looked at, and in whatever order blocks were offered or transferred.
        """
        with self.lock:
            self.lookups.end_request(request)
            self._turns.finish(request)
            self.counters.store_lost_blocks += len(request.put_off)
            request.put_off.clear()
            if request.keys:
                used, request.keys = request.keys, {}
                in_order = request.in_prompt_order(used)
                # Below, blocks come down long after: an order would take that for a return.
                if self._top.policy.wants_chains:
                    self._top.policy.note_chain(in_order)
                else:
                    self._set_recency(in_order, used)
                if self._demoters and not all(used.values()):
                    self._note_reuse([h for h in used if not used[h]])

    def _set_recency(self, in_order: Sequence[BlockHash], is_new: Mapping[BlockHash, bool]) -> None:
        """The end of the prompt comes first, so that it is the first to leave."""
        for new, run in runs_from_the_end(in_order, is_new.__getitem__):
            (self._top.policy.settle if new else self._top.policy.touch)(run)

    def _note_reuse(self, reused: list[BlockHash]) -> None:
        found = [
            (h, s) for h in reused if (s := self._top.policy.get(h)) is not None and s.ref_cnt >= 0
        ]
        self._top.note_reuse([status for _, status in found])
        if not self._counts_uses:
            return
        below = self._levels[1]
        gone = [(h, s.block_id) for h, s in found if not below.holds(h)]
        if self.options.write_mode is not WriteMode.DEMOTE:  # what was refused is dirty anew
            self._note_aging([h for h, slot in gone if not self._top.is_dirty(slot)])
        self._top.set_dirty([slot for _, slot in gone])

    def end_step(self) -> None:
        """The scheduler made its decisions: start what was queued, take in what finished.

        Call it after the last lookup of a step; when exactly does not matter otherwise.
        """
        with self.lock:
            self._workers.end_step()
            if self._worth is not None:
                self._worth.prefill.end_step(self._clock())
            self._turns.end_step()
            self._maintain()
            self._evicted.clear()
            self.lookups.end_step()

    def maintain(self) -> None:
        """Demotion, completions, expiry. Any thread; returns at once if the lock is taken."""
        if self.lock.acquire(blocking=False):
            try:
                self._maintain(may_evict=not self.lookups.is_asking)
            finally:
                self.lock.release()

    def _maintain(self, may_evict: bool = True) -> None:
        self._collect()
        self._turns.release_expired()
        if may_evict:
            self._turns.admit()
            if self._promoter.is_queued:  # slots or jobs may have become free
                protected = set(self.lookups.answers.hits())
                self._promoter.flush(protected, may_displace=self._turns.waiting > 0)
        for demoter in self._demoters:
            demoter.keep_ahead()
        if self._aging:
            self._demote_aged()
        if may_evict:
            self._tend_tiers()
        for watch in self._watches:
            watch.check()

    def _collect(self) -> None:
        self._promoter.collect()
        for demoter in self._demoters:
            demoter.collect()

    def _demote_aged(self) -> None:
        is_through = self.options.write_mode is WriteMode.THROUGH
        age_s = 0.0 if is_through else self.options.dirty_age_s
        due_s = self._clock() - age_s
        due: list[BlockHash] = []
        room = self._demoters[0].room_blocks  # a long queue shall not be turned over at every step
        while len(due) < room and self._aging and self._aging[0][0] <= due_s:
            due.append(self._aging.popleft()[1])
        due = list(dict.fromkeys(due))
        left = self._demoters[0].demote(due) if due else 0
        again = due[len(due) - left :]
        self._aging.extendleft((due_s, block_hash) for block_hash in reversed(again))

    @property
    def waiting_requests(self) -> int:
        """Requests that wait for their turn to have blocks brought up. Any thread."""
        with self.lock:
            return self._turns.waiting

    def has_pending_work(self) -> bool:
        """True if calls are needed for progress that requests wait for."""
        return self._turns.is_waited_for

    def _tend_tiers(self) -> None:
        """Upkeep of every tier; what other processes reset is forgotten, and all above it.

        From the bottom up: who resets begins at the top, so a tier that is not seen reset after one
        below it was is not the other's, and its older blocks are this process's to forget.
        """
        last = len(self._levels) - 1
        overtaken = [i for i in range(last, -1, -1) if self._levels[i].maintain()]
        if overtaken:
            self.counters.resets_by_others += 1
            self._forget_levels(1 + overtaken[0], is_own=False)

    def take_events(self) -> list[BlockEvent]:
        with self.lock:
            self._flow.emit_moved()
            events, self._flow.events = self._flow.events, []
            return events

    # ---- reset and shutdown --------------------------------------------------------------

    def reset_cache(self) -> None:
        """Make every older block unreachable, or with `on_reset` "keep" only what is under way.

        No completion will be reported for earlier worker transfers, yet workers may go on writing
        their slots: those stay out of use until `on_reset_flushed`, or for `steps_until_flushed`
        steps.
        """
        with self.lock:
            self.counters.resets += 1
            if self.options.on_reset is OnReset.KEEP:
                self._forget_worker_transfers()
            else:
                self._forget_levels(len(self._levels), is_own=True)

    def _forget_worker_transfers(self) -> None:
        written = list(self._workers.stores.values())
        for block_hash, status in self._workers.stores.items():
            self._top.policy.remove(block_hash)
            status.ref_cnt = 1
        read = []
        for loading, count in self._workers.loads.values():
            loading.ref_cnt -= count - 1  # the engine may go on with what is being loaded
            read.append(loading)
        written += [status for status, _ in self._workers.outdated.values()]
        self._workers.forget(written, read)

    def _forget_levels(self, n: int, *, is_own: bool) -> None:
        """Empty the first `n` levels.

        `is_own`: the engine asked for it, and will not report what its workers are doing now. If
        another process reset a tier, the engine knows nothing: it goes on with what it was given,
        and everything is reported.
        """
        self._turns.orphan()
        jobs = self._promoter.orphan(n)
        for demoter in self._demoters:
            jobs += demoter.orphan(n)
        workers = self._workers.using()
        self._workers.outdate_pinned()
        if not is_own:
            self._workers.outdate()
        users = Counter((level, status.block_id) for job in jobs for level, status in job.ends())
        users.update((0, s.block_id) for s in chain(workers, self._workers.quarantined()))
        for index, level in enumerate(self._levels[:n]):
            if not is_own and self.options.with_events:
                level.note_loss()
            for status in level.reset():
                count = users[index, status.block_id]
                status.ref_cnt = count  # from now on it counts who still uses the slot
                if count == 0:
                    level.backend.free(status)
        self._aging.clear()
        self.lookups.end_step()
        if is_own:
            self._workers.forget(workers)

    def on_reset_flushed(self) -> None:
        """The workers have ended every transfer from before the last reset."""
        with self.lock:
            self._workers.all_flushed()

    def flush_dirty(self, deadline_s: float) -> bool:
        """Write every dirty block down that would be lost, until `deadline_s` on the clock.

        Those of tiers that last are at the next start what they are now. May block, also while a
        tier rests that failed; for shutdown. True if none is left, nor on its way.
        """
        means = FlushMeans(
            self.lock, self._collect, self._tend_tiers, self._in_use, self._clock, self._pause
        )
        flush_all(self._demoters, means, deadline_s)
        with self.lock:
            self._collect()
            is_moving = any(demoter.jobs_in_flight for demoter in self._demoters)
            losable = (level for level in self._levels if not level.is_lasting)
            return not is_moving and not any(level.dirty_blocks for level in losable)

    def _in_use(self) -> list[BlockHash]:
        """Blocks of the first tier that workers load or requests hold, tails before heads."""
        in_use = dict.fromkeys(chain(self._workers.loads, self._holds.blocks()))
        return list(reversed(in_use))

    def shutdown(self) -> bool:
        """Write what is dirty within `shutdown_flush_s`, then stop the handlers. Idempotent.

        False if a device is so slow that transfers are still under way.
        """
        deadline_s = self._clock() + self.options.shutdown_flush_s
        if not self._is_shut_down:  # else no handler takes anything: it would be waited for in vain
            self.flush_dirty(deadline_s)
        self._is_shut_down = True
        with self.lock:
            refresh_recency_below(self._levels, self._in_use())
            self._tend_tiers()  # nothing of them is held while what follows takes its time
        has_ended = True
        for link in self._flow.links:
            for handler in (link.down, link.up):
                left_s = max(HANDLER_STOP_S, deadline_s - self._clock())
                has_ended = handler.shutdown(left_s) and has_ended
        return has_ended

    def adopt(self, block_hashes: Sequence[BlockHash], statuses: Sequence[BlockStatus]) -> None:
        """The first tier holds these complete blocks already; before the first request."""
        with self.lock:
            self._top.adopt(block_hashes, statuses)
            self._flow.emit(block_hashes, self._top, removed=False)

    def announce(self, index: int, block_hashes: Sequence[BlockHash]) -> None:
        """Make events of those blocks, found by an earlier look, that a tier still holds."""
        with self.lock:
            level = self._levels[index]
            self._flow.emit([h for h in block_hashes if level.owns(h)], level, removed=False)

    def tier_states(self) -> list[TierState]:
        """How things stand in each tier, top first. Any thread."""
        with self.lock:
            return [self._tier_state(index, level) for index, level in enumerate(self._levels)]

    def _tier_state(self, index: int, level: Level) -> TierState:
        budget, totals = level.write_budget, level.day_totals
        return TierState(
            level.name,
            level.medium,
            level.block_size,
            blocks=len(level.policy),
            capacity_blocks=level.capacity,
            dirty_blocks=level.dirty_blocks,
            waiting_blocks=self._promoter.waiting(index),
            demote_jobs=self._demoters[index - 1].jobs_in_flight if index else 0,
            is_blocked=self._demoters[index - 1].is_blocked if index else False,
            budget_left_bytes=None if budget is None else budget.left_bytes(),
            day=None if totals is None else totals(),
        )


__all__ = [
    "CascadingOffloadingManager",
    "Link",
    "ManagerOptions",
    "OnReset",
    "Pairs",
    "Tier",
    "WriteMode",
]
