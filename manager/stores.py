"""Stores: slots of the first tier for blocks that workers write.

Used under the manager's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence, Set
from dataclasses import dataclass
from itertools import filterfalse

import numpy as np

from ..tiers.base import BlockHash, LoadStoreSpec, SlotArray
from .base import PrepareStoreOutput
from .core import MAX_JOBS_IN_FLIGHT, ManagerCore
from .demotion import Demoter
from .lookup import Answers
from .promotion.claim_queue import ClaimQueue
from .promotion.promoter import Promoter
from .promotion.worth import Worth
from .request import Request
from .workers import WorkerTransfers

MAX_DEFERRALS = 32
"""Largest number of consecutive deferred stores of a request. It is several times the usual number.
After that the first blocks are stored, as many as there is room for."""
_NO_SLOTS: SlotArray = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class _Protected(Container[BlockHash]):
    """Blocks that a store must not evict. A union would copy all hits of the step."""

    offered: Set[BlockHash]
    hits: Set[BlockHash]

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self.offered or block_hash in self.hits


@dataclass(frozen=True, slots=True, eq=False)
class Stores:
    """Blocks that are offered, and blocks that workers have written."""

    _core: ManagerCore
    _demoter: Demoter
    _promoter: Promoter
    _claims: ClaimQueue
    _workers: WorkerTransfers
    _answers: Answers
    """Protected hits of this step."""
    _worth: Worth | None
    """Receives the offers of requests."""
    _collect: Callable[[], None]
    """Collects the ended transfers of every tier."""

    def prepare(
        self, block_hashes: Sequence[BlockHash], request: Request | None
    ) -> PrepareStoreOutput | None:
        """Implement `CascadingOffloadingManager.prepare_store`."""
        core, top = self._core, self._core.top
        get = top.policy.get
        core.evicted.clear()
        new = list(dict.fromkeys(filterfalse(get, block_hashes)))
        if self._workers.outdated:
            new = [h for h in new if h not in self._workers.outdated]
        if new:
            core.counters.store_sizes.append(len(new))
        if top.policy.expects:
            top.policy.expect(new)
        room: int | None = len(new)
        if len(new) > top.backend.get_num_free_blocks():
            room = self._make_room(new, block_hashes, request)
        if self._worth is not None and request is not None:
            self._worth.note_offer(block_hashes, request, room is not None, core.clock())
        if room is None:
            core.counters.store_refused_busy += 1
            promotions = self._claims.room
            promotions.refused_store = max(promotions.refused_store, len(new))
            if request is not None:
                request.note_deferred(new)
            return None
        if room < len(new):
            core.counters.store_truncated_blocks += len(new) - room
            new = new[:room]
        depth = 0 if request is None else len(request.keys)
        statuses, slots = top.take(new, depth) if new else ([], _NO_SLOTS)
        self._workers.stores.update(zip(new, statuses, strict=True))
        if request is not None:
            request.note_stored(block_hashes, new)
        evicted, core.evicted = core.evicted, []
        return PrepareStoreOutput(new, LoadStoreSpec(slots), evicted)

    def complete(
        self, block_hashes: Collection[BlockHash], success: bool, request: Request | None
    ) -> None:
        """Implement `CascadingOffloadingManager.complete_store`."""
        core, top, aging = self._core, self._core.top, self._demoter.aging
        stored: list[BlockHash] = []
        slots: list[int] = []
        pop, origin = self._workers.stores.pop, top.origin
        for block_hash in block_hashes:
            status = pop(block_hash, None)
            if status is None:  # from before a reset, or never prepared
                self._workers.report(block_hash)
                continue
            if not success:
                top.drop(block_hash, status)
                continue
            slot = status.block_id
            status.ref_cnt = origin[slot] = 0
            stored.append(block_hash)
            slots.append(slot)
        top.policy.mark_ready(stored, slots)
        top.dirt.set_dirty(slots)
        core.counters.stored_blocks += len(stored)
        core.emit(stored, removed=False)
        if self._worth is not None and not self._workers.stores:
            self._worth.prefill.all_stored(core.clock())
        if stored and aging is not None:
            # A worker reports a set; slots were taken in the order of the offers.
            in_order = sorted(stored, key=dict(zip(stored, slots, strict=True)).__getitem__)
            aging.note(request.in_prompt_order(in_order) if request else in_order)

    def _make_room(
        self, new: list[BlockHash], offered: Sequence[BlockHash], request: Request | None
    ) -> int | None:
        """Make room. Return the number of slots for new blocks; None if a short wait gives more."""
        need, top = len(new), self._core.top
        protected = _Protected(set(offered), self._answers.hits())
        may_drop = self._core.below.is_blocked
        if need <= top.capacity and top.make_all_room(need, protected, may_drop):
            return need
        once = self._core.options.offered_once  # such an offer is one block, or one per KV group
        if once and any(h.endswith(once) for h in (offered[0], offered[-1])):
            return top.make_room(min(need, top.capacity), protected, True)
        if request is not None and request.deferrals >= MAX_DEFERRALS:
            return top.make_room(min(need, top.capacity), protected, may_drop)
        return self._room_under_pressure(need, protected, may_drop)

    def _room_under_pressure(
        self, need: int, protected: Container[BlockHash], may_drop: bool
    ) -> int | None:
        """Free slots by writing blocks down, or store only as many blocks as there is room for."""
        top, demoter = self._core.top, self._demoter
        wanted = min(need, top.capacity)
        if not may_drop:
            # Many stores may follow in this step, and only a few writes may be in flight. Each
            # pins an eighth of a small tier at most: the tier below may hang.
            most = top.capacity // (2 * MAX_JOBS_IN_FLIGHT)
            demoter.demote_coldest(max(wanted, min(demoter.batch_blocks, most)))
            self._collect()
            if demoter.jobs or demoter.may_find_room:
                return None
            if demoter.was_cut_short:  # the inspected blocks need not be written
                return wanted if top.make_all_room(wanted, protected, False) else None
            # No tier below accepts writes: lose the coldest blocks rather than the newest.
        if top.make_all_room(wanted, protected, may_drop_dirty=True):
            return wanted
        will_free = self._workers.is_busy or self._promoter.pending or demoter.jobs
        if wanted == need and will_free:
            return None
        return top.make_room(wanted, protected, may_drop_dirty=True)
