"""`CascadingOffloadingManager`: N tiers, each a backend and a policy, chained by handlers.

Blocks enter at the top, are demoted ahead of demand, and come up again when a lookup finds them
below. Nothing here knows what a tier is made of.

Threads: one lock guards everything that changes state. The scheduler thread calls the contract; a
background thread may call `maintain` so that demotion goes on while the engine is idle. Nothing
under the lock waits for a file: it only starts transfers and takes in finished ones. The answer
"hit" takes no lock: while a request is asking, which begins under the lock, nothing but the
scheduler's own calls takes a block out of the first tier.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress

from ..config import OnReset, WriteMode
from ..tiers.base import BlockHash, BlockStatus, LoadStoreSpec
from .admission import EnduranceWatch
from .answers import Answers
from .base import BlockEvent, LookupState, OffloadingManager, PrepareStoreOutput
from .counters import Counters
from .demotion import Demoter
from .flow import Clock, Flow, Link
from .flush import FlushMeans, flush_all, refresh_recency_below
from .level import Level, Pairs, Tier
from .promotion import Promoter
from .request import Request
from .state import TierState
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
    """Slots of the first tier that promotions may take or hold; None: half of them."""
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
            self._demoters[0].on_failed = self._note_aging
        self._flow.clean_ahead = self._clean_ahead
        budget = self.options.promotion_budget_slots or max(1, self._top.capacity // 2)
        self._worth = self._make_worth() if links else None
        deadline_s = self.options.promotion_deadline_s
        self._promoter = Promoter(self._flow, budget, deadline_s, self._worth)
        self.is_single = len(tiers) == 1
        """True if what is not in the first tier is a miss."""
        self.top_get = self._top.policy.get
        """The status of a block in the first tier; for adapters that inline the plain hit."""
        self.answers = Answers(self._top.policy.ready_at)
        self._asking: Request | None = None
        self._retry_at: BlockHash | None = None
        """At this block the request that is asking was told to ask again in another step."""
        self._knows_misses = False
        """The request that is asking waited in an earlier step: what it misses was found out."""
        self._aging: deque[tuple[float, BlockHash]] = deque(
            maxlen=AGING_PER_SLOT * self._top.capacity
        )
        """Stored blocks and when, oldest first; beyond the limit they are written as they leave."""
        self._workers = WorkerTransfers(self._top.backend, self.options.steps_until_flushed)
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
        return bool(level.policy.coldest(1, set(self.answers.hits()), level.settled_mask))

    # ---- questions -----------------------------------------------------------------------

    def lookup(
        self, block_hashes: Iterable[BlockHash], request: Request | None = None
    ) -> int | None:
        request = request or Request()
        hits, is_waiting = 0, False
        for block_hash in block_hashes:
            state = self.lookup_block(block_hash, request)
            if state is LookupState.MISS:
                break
            if state is LookupState.HIT:
                hits += 1
            else:
                is_waiting = True
        return None if is_waiting else hits

    def lookup_block(self, block_hash: BlockHash, request: Request) -> LookupState:
        """The state of one block. A hit stays one until the end of the step, or its `prepare_load`.

        Lock-free while the block is ready in the first tier, or on its way for this request.
        """
        if request is not self._asking:
            self.begin_asking(request)
        status = self.top_get(block_hash)
        if status is not None and status.ref_cnt >= 0:
            if request.is_plain:
                self.answers.hit(block_hash, status.block_id + 1)
                return LookupState.HIT
            if block_hash in request.holds:
                self.answers.hit(block_hash)
                return LookupState.HIT
        elif block_hash in request.pending:
            return LookupState.PENDING
        return self.look_below(block_hash, status, request)

    def begin_asking(self, request: Request) -> None:
        """The lookups that follow are for this request, until the end of the step."""
        with self.lock:  # after it, the background leaves the first tier's blocks where they are
            self._asking = request
        self._retry_at = request.missed_at = None
        self._knows_misses = request.is_waiting
        self.answers.begin()
        if request.pending and self._clock() >= request.pending_until_s:
            request.forget_pending()

    def look_below(
        self, block_hash: BlockHash, status: BlockStatus | None, request: Request
    ) -> LookupState:
        """`lookup_block` for what is no plain hit; `status` is what `top_get` returned."""
        if status is None and not self._demoters:
            return self._miss(request)
        if status is None and self._retry_at is not None:
            if block_hash == self._retry_at:
                self._retry_at = None
            elif self._knows_misses:  # whatever it is, the request is not served now
                # The engine asks until it misses: that must not be later than it was.
                is_miss = block_hash in request.retry_misses
                return LookupState.MISS if is_miss else LookupState.RETRY
        with self.lock:
            was_waiting = request.is_waiting
            state = self._state_below(block_hash, status, request)
            if state is LookupState.MISS:
                if request.missed_at is None:
                    request.missed_at = block_hash
                if self._retry_at is not None:
                    request.retry_misses.add(block_hash)
                return self._miss(request)
            if state is not LookupState.HIT and not was_waiting:
                self._hold_answered(request)
            if state is LookupState.RETRY:
                self._retry_at = block_hash
            return state

    def _state_below(
        self, block_hash: BlockHash, status: BlockStatus | None, request: Request
    ) -> LookupState:
        if status is not None and status.ref_cnt >= 0 and request.may_read(self._top.medium):
            self.answers.hit(block_hash)
            if request.is_waiting:
                self._promoter.hold(request, block_hash, status)
            return LookupState.HIT
        if block_hash in request.missed or block_hash in self._workers.outdated:
            return LookupState.MISS
        state = self._promoter.ask(block_hash, request)
        if state is not None:
            return state
        if status is not None and request.may_read(self._top.medium):
            if not self.options.waits_for_stores:
                return LookupState.MISS
            return self._promoter.wait_for_store(block_hash, request)
        for index, level in self._below:
            if request.may_read(level.medium):
                below = level.policy.get(block_hash)
                if below is not None and below.ref_cnt >= 0:
                    return self._promoter.start(block_hash, index, request)
        return LookupState.MISS

    def _miss(self, request: Request) -> LookupState:
        if self._retry_at is None and not request.pending:  # else it asks again, and it counts then
            self.answers.misses += 1
        return LookupState.MISS

    def _hold_answered(self, request: Request) -> None:
        """The request begins to wait: the hits it was just given shall still be there then."""
        for block_hash in self.answers.of_request():
            status = self.top_get(block_hash)
            if status is not None and status.ref_cnt >= 0:
                self._promoter.hold(request, block_hash, status)
        self.answers.leave_run()  # from now on hits are held one by one

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
                if request.waiting_since_s is not None:
                    self._promoter.release(request)
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
            loaded[source] += 1
            served[source] += block_hash.endswith(served_end)
            if source:  # its first load is one from below
                origin[slot] = 0
                if request is not None:
                    request.sources[block_hash] = self._levels[source].medium
        return pinned

    def complete_load(self, block_hashes: Collection[BlockHash]) -> None:
        with self.lock:
            self._workers.end_loads(block_hashes)

    # ---- stores --------------------------------------------------------------------------

    def prepare_store(
        self, block_hashes: Sequence[BlockHash], request: Request | None = None
    ) -> PrepareStoreOutput | None:
        with self.lock:
            get = self.top_get
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
                if request is not None:
                    request.note_put_off(new)
                return None
            if room < len(new):
                self.counters.store_truncated_blocks += len(new) - room
                new = new[:room]
            statuses = self._top.take(new) if new else []
            self._workers.stores.update(zip(new, statuses, strict=True))
            if request is not None:
                request.note_taken(block_hashes)
                if len(new) < len(block_hashes):
                    request.keys.update(dict.fromkeys(block_hashes, False))
                request.keys.update(dict.fromkeys(new, True))
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
        protected = {*offered, *self.answers.hits()}
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

    def complete_store(self, block_hashes: Collection[BlockHash], success: bool = True) -> None:
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
                # A worker reports a set: slots, taken in prefix order, bring that order back.
                in_order = sorted(zip(slots, stored, strict=True))
                self._note_aging([block_hash for _, block_hash in in_order])

    def _note_aging(self, block_hashes: Sequence[BlockHash]) -> None:
        now = self._clock()
        self._aging.extend((now, block_hash) for block_hash in block_hashes)

    # ---- recency, requests, steps --------------------------------------------------------

    def touch(self, block_hashes: Iterable[BlockHash]) -> None:
        with self.lock:
            self._top.policy.touch(block_hashes)

    def finish_request(self, request: Request) -> None:
        """The request ended (transfers may still be under way): set the recency of its blocks.

        Once per request and in prefix order, so that tails leave before heads however often the
        request was looked at and in whatever order its transfers ended.
        """
        with self.lock:
            if request is self._asking:
                self._asking = None
            self._promoter.release(request)
            self.counters.store_lost_blocks += len(request.put_off)
            request.put_off.clear()
            if request.keys:
                used, request.keys = request.keys, {}
                new = list(compress(used, used.values()))
                reused = [h for h in used if not used[h]] if len(new) < len(used) else []
                # Below, blocks come down long after: an order would take that for a return.
                if self._top.policy.wants_chains:
                    self._top.policy.note_chain(list(used))
                else:
                    self._top.policy.settle(new)
                    self._top.policy.touch(reused)
                if self._counts_uses:
                    self._note_reuse(reused)

    def _note_reuse(self, reused: list[BlockHash]) -> None:
        found = [(h, s) for h in reused if (s := self.top_get(h)) is not None and s.ref_cnt >= 0]
        self._top.note_reuse([status for _, status in found])
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
                self._promoter.decide()
            self._maintain()
            self._evicted.clear()
            self._stop_asking()

    def _stop_asking(self) -> None:
        self.counters.lookup_misses += self.answers.misses
        self.answers.misses = 0
        self.answers.clear()
        self._asking = None

    def maintain(self) -> None:
        """Demotion, completions, expiry. Any thread; returns at once if the lock is taken."""
        if self.lock.acquire(blocking=False):
            try:
                self._maintain(may_evict=self._asking is None)
            finally:
                self.lock.release()

    def _maintain(self, may_evict: bool = True) -> None:
        self._collect()
        self._promoter.release_expired()
        if self._promoter.is_queued and may_evict:  # slots or jobs may have become free
            self._promoter.flush(set(self.answers.hits()))
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

    def has_pending_work(self) -> bool:
        """True if calls are needed for progress that requests wait for."""
        return self._promoter.is_waited_for

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
        self._stop_asking()
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
        in_use = dict.fromkeys(chain(self._workers.loads, self._promoter.held_blocks()))
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
