"""Order of promotions: each request is admitted for its whole prefix.

A lookup that finds blocks below makes a *claim*. It lists all blocks of the request's prefix, in
the order of the lookups. At the end of the step each claim is in one of three states:

- *admitted*: it gets slots for its whole prefix. Its blocks in the first tier are pinned, and its
  blocks below are queued for reading.
- *waiting*: it takes no slots and pins nothing until its turn comes.
- *given up*: one of its tiers is left out (`LoadChoice`). The request then asks again.

The queue follows the order in which the scheduler asks, because the scheduler runs the requests in
that order. Up to a limit, small claims overtake a large one that does not fit yet. A claim larger
than the budget gets the whole budget once no other request uses it. A claim that only loads in
flight have kept waiting for a deadline gets the slots that are left. In both cases the request
computes the remaining blocks.

Deadlock is impossible, because only admitted claims take slots. An admitted claim ends in one of
these cases:

- the request loads its blocks, or stores blocks that it computed;
- a read is late (`Promoter`), or computing is faster than the wait for it (`LoadChoice`);
- all blocks are ready, but the request does not load them within `HOLD_DEADLINES` deadlines.

Used under the manager's lock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from ...tiers.base import BlockHash
from ..base import MISS, PENDING, LookupState
from ..core import ManagerCore
from ..counters import Reason
from ..request import Request
from .claims import Claim, Holds, PromotionRoom
from .load_choice import LoadChoice
from .promoter import Promoter

if TYPE_CHECKING:
    from ..lookup import Answers

HOLD_DEADLINES = 2
"""Number of deadlines for which ready blocks stay pinned for a request that does not load them."""
MAX_ADMITTED_PER_STEP = 4096
"""Number of blocks after which a step admits no more, at 1 to 2 µs each. If many requests end at
once, there is room for a whole tier of blocks."""
MAX_CHECKED = 256
"""Number of waiting claims that one check looks at again, at 2 µs each, in rotation. It also looks
at new claims, and at all claims up to the first one that does not fit."""
LOOK_AGAIN_S = 0.02
"""Seconds between two checks of waiting claims, if none is new and the first does not fit. A claim
may have become pointless meanwhile. Each check counts one waiting claim anew, at 0.4 µs a block."""


@dataclass(slots=True, eq=False)
class ClaimQueue:
    """Queue of waiting claims, and the admitted ones."""

    _core: ManagerCore
    _promoter: Promoter
    _holds: Holds
    room: PromotionRoom
    choice: LoadChoice
    """May give claims up."""
    _answers: Answers
    """Hits of this step."""
    _asked: list[Claim] = field(default_factory=list)
    """Waiting claims whose requests asked in this step, in that order."""
    _queue: dict[Claim, None] = field(default_factory=dict)
    """Waiting claims, in the order of their turns."""
    _owned: set[BlockHash] = field(default_factory=set)
    """Own blocks of the waiting claims."""
    admitted: dict[Claim, None] = field(default_factory=dict)
    """Claims whose blocks are pinned or being read."""
    _look_again_s: float = -math.inf
    """Time of the next check of the queue; `-inf` once a claim was made or shortened."""
    _checked: int = 0
    """Number of claims that the checks of this rotation have passed."""
    _recounted: int = 0
    """Index of the waiting claim that the last check counted anew."""

    @property
    def waiting(self) -> int:
        """Number of requests that have waited for their turn for at least one step."""
        return sum(claim.has_waited for claim in self._queue)

    # ---- lookups -------------------------------------------------------------------------

    def must_wait(self, claim: Claim, first: BlockHash) -> bool:
        """Return True if a request that asks again must go on waiting.

        `first` is the first block of its new lookups. If the claim starts with another block, the
        device cache changed meanwhile. Blocks before `first` are then no longer wanted. A claim
        without `first` is dropped, unless it was made by lookups from there on.
        """
        request = claim.request
        if claim.is_admitted:
            return bool(request.pending)
        if first not in claim.wanted and first != claim.first:
            self.release(request)
            return False
        if first in claim.wanted and first != next(iter(claim.wanted)):
            at = list(claim.wanted).index(first)
            claim.wanted = dict(islice(claim.wanted.items(), at, None))
            claim.first, claim.new_slots = first, None
            self._look_again_s = -math.inf
        self._asked.append(claim)
        return True

    def want(self, block_hash: BlockHash, tier: int, request: Request) -> LookupState:
        """Add a block to the request's claim. A new claim begins with its hits of this step.

        `tier` holds it; 0 means that it is in flight, or that a worker is storing it.
        """
        if tier and not self.choice.may_read(tier, request):
            return MISS
        claim = request.claim
        if claim is None or claim.is_admitted:
            if claim is not None:
                if not tier and block_hash in claim.wanted:
                    return PENDING
                self.admitted.pop(claim, None)  # its pins last until the end of the step
            hits = dict.fromkeys(self._answers.of_request(), 0)
            claim = request.claim = Claim(request, self._core.clock(), request.first, hits)
            self._queue[claim] = None
            self._asked.append(claim)
            self._look_again_s = -math.inf
        claim.wanted[block_hash] = tier
        return PENDING

    def release(self, request: Request) -> None:
        """Drop the claim and the pins of a request."""
        claim = request.claim
        if claim is not None:
            self._leave_queue(claim)
            self.admitted.pop(claim, None)
            if request.pending:
                self._promoter.leave(request)
            request.end_wait()
        self._holds.release(request)

    def orphan(self) -> None:
        """Drop every claim and pin, after a reset of the first tier. Waiting requests ask anew."""
        self._holds.forget_all()
        for claim in (*self._queue, *self.admitted):
            claim.request.end_wait()
        self._queue.clear()
        self._owned.clear()
        self.admitted.clear()
        self._asked.clear()

    # ---- the end of a step -----------------------------------------------------------------

    def end_step(self) -> None:
        """Reorder the queue: requests that asked in this step come first, in the order of their
        lookups."""
        if self.choice.worth is not None:
            self.choice.worth.prefill.end_step(self._core.clock())
        room = self.room
        room.store_need, room.refused_store = room.refused_store, 0
        if self._asked:
            first = filter(self._queue.__contains__, self._asked)
            self._queue = dict.fromkeys(first) | self._queue
            self._asked.clear()

    def maintain(self) -> None:
        """Drop expired pins, admit claims, and read their blocks."""
        if self.admitted:
            self._release_expired()
            self.choice.leave_stalled(self.admitted)
        if self._queue:
            self._admit_waiting()
        self._promoter.flush(self._answers.hits, may_displace=bool(self._queue))

    def _admit_waiting(self) -> None:
        """Admit waiting claims that fit, and give up those that are better computed.

        Until it is time to look again, nothing changes unless the first claim fits.
        """
        now_s, budget = self._core.clock(), self.room.budget()
        if now_s < self._look_again_s:
            if self.room.room_for(next(iter(self._queue)), budget, None) is None:
                return
        self._look_again_s = now_s + LOOK_AGAIN_S
        ahead = [0, *(len(queue.queued) for queue in self._promoter.queues)]
        blocked: Claim | None = None
        admitted = 0
        waiting = list(self._queue)
        start = self._checked if self._checked < len(waiting) else 0
        stop = start + MAX_CHECKED
        self._recounted = (self._recounted + 1) % len(waiting)
        for number, claim in enumerate(waiting):
            is_exact = claim.new_slots is None or number == self._recounted
            if blocked is None or is_exact or start <= number < stop:
                if is_exact:
                    self._count(claim)
                if self.choice.rejects(claim, ahead, now_s):
                    self.release(claim.request)
                    continue
                room = self.room.room_for(claim, budget, blocked)
                if room is not None and not is_exact:  # blocks may have been evicted since
                    self._count(claim)
                    room = self.room.room_for(claim, budget, blocked)
                if room is None:
                    blocked = blocked or claim
                    claim.has_waited = True
                    self._holds.release(claim.request)  # no hold and wait: no deadlock
                else:
                    if blocked is not None:
                        blocked.overtaken_blocks += claim.new_slots or 0
                    self._admit(claim, room, now_s)
                    admitted += len(claim.wanted)
                    if admitted >= MAX_ADMITTED_PER_STEP:
                        self._look_again_s = -math.inf  # the next step goes on
                        return
            for tier, blocks in enumerate(claim.own_blocks):
                ahead[tier] += blocks
        self._checked = stop

    def _release_expired(self) -> None:
        """Unpin ready blocks that their request did not load in time."""
        now_s, deadline_s = self._core.clock(), self._core.options.promotion_deadline_s
        for claim in list(self.admitted):
            if claim.request.pending:
                claim.ready_s = None
            elif claim.ready_s is None:
                claim.ready_s = now_s
            elif now_s >= claim.ready_s + HOLD_DEADLINES * deadline_s:
                self.release(claim.request)

    # ---- one claim ---------------------------------------------------------------------------

    def _count(self, claim: Claim) -> None:
        """Count the slots and reads that the claim needs now, and the blocks that it would save.

        A block that several waiting claims want is read once, so it counts as read for one of them.
        If that one leaves without reading it, the others count it when they are counted anew.
        """
        users, get = self._holds.users, self._core.top.policy.get
        pending, below, owned = self._promoter.pending, self._core.below, self._owned
        blocks = [0] * len(self._core.counters.tier_names)
        to_read: list[BlockHash] = []
        new_slots = 0
        for block_hash in claim.request.holds:
            claim.wanted.setdefault(block_hash, 0)
        for at, (block_hash, tier) in enumerate(claim.wanted.items()):
            status = get(block_hash)
            if status is not None:
                new_slots += status.ref_cnt >= 0 and status.block_id not in users
            elif block_hash not in pending:
                tier = tier or below.may_hold(block_hash, claim.request.allowed_media)
                if not tier:  # evicted everywhere, so the rest is useless
                    claim.wanted = dict(islice(claim.wanted.items(), at))
                    break
                claim.wanted[block_hash] = tier
                blocks[tier] += 1
                to_read.append(block_hash)
        claim.new_slots, claim.blocks = new_slots + len(to_read), blocks
        claim.own_blocks = blocks
        if claim.own != to_read:
            owned.difference_update(claim.own)
            claim.own = [h for h in to_read if h not in owned]
            owned.update(claim.own)
            tiers = [claim.wanted[h] for h in claim.own]
            claim.own_blocks = [tiers.count(tier) for tier in range(len(blocks))]
        self.choice.count_saved(claim, to_read)

    def _admit(self, claim: Claim, room: int, now_s: float) -> None:
        """Admit a claim: pin its blocks in the first tier, and queue its blocks below."""
        counters, new_slots = self._core.counters, claim.new_slots or 0
        counters.promotions_worth += self.choice.worth is not None
        if claim.has_waited:
            counters.turn_waits += 1
            counters.turn_waits_s.append(now_s - claim.since_s)
        claim.since_s = now_s
        if new_slots <= room:
            self._take_first(list(claim.wanted), claim, room)
        else:
            self._take_part(claim, room)
        claim.is_admitted = True
        self._leave_queue(claim)
        self.admitted[claim] = None

    def _leave_queue(self, claim: Claim) -> None:
        """Remove a claim from the queue, if it is there."""
        self._queue.pop(claim, None)
        self._owned.difference_update(claim.own)
        claim.own.clear()

    def _take_part(self, claim: Claim, room: int) -> None:
        """Take the part of a claim that fits. The request computes the rest.

        Windows and states at the end of a prefix are useless if the prefix is cut. The request asks
        next for those at the cut, so as many slots are reserved for them.
        """
        end, request = self._core.options.served_end, claim.request
        served = [h for h in claim.wanted if h.endswith(end)]
        others = [h for h in claim.wanted if not h.endswith(end)]
        before = self.room.taken()
        at = self._take_first(served, claim, room - len(others))
        missed = served[at:]
        if not missed:
            at = self._take_first(others, claim, room - (self.room.taken() - before))
            missed = others[at:]
        request.missed.update(missed)
        self.choice.count_recomputed(missed, Reason.BUDGET)

    def _take_first(self, block_hashes: Sequence[BlockHash], claim: Claim, room: int) -> int:
        """Take blocks in order while `room` slots are left. Return the number taken."""
        holds, promoter, request = self._holds, self._promoter, claim.request
        get, find = self._core.top.policy.get, promoter.pending.get
        for at, block_hash in enumerate(block_hashes):
            status, pending = get(block_hash), find(block_hash)
            if status is not None and status.ref_cnt >= 0:
                takes_slot = status.block_id not in holds.users
            else:
                takes_slot = status is None and pending is None
            if takes_slot:
                if room <= 0:
                    return at
                room -= 1
            if status is not None and status.ref_cnt >= 0:
                holds.pin(request, block_hash, status)
            elif pending is not None and pending.is_late:
                request.missed.add(block_hash)
            elif status is None or pending is not None:  # otherwise a worker is storing it
                pending = pending or promoter.begin(block_hash, claim.wanted[block_hash])
                pending.waiters[request] = None
                request.pending.add(block_hash)
        return len(block_hashes)
