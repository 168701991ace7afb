"""Whose blocks are brought up next: promotion is admitted by request.

A lookup that finds blocks below makes a *claim*: all blocks of the request's prefix, in the order
in which it asked. At the end of the step each claim is either

- *admitted*: it gets room for its whole prefix, what is in the first tier is pinned, and what lies
  below is queued to be read; or
- *waiting*: it takes no room and pins nothing until its turn comes; or
- *given up*: computing is expected to be faster (`Worth`), or the tier rests.

Turns go in the order in which the scheduler asks, which is the order in which it will run them. Up
to a limit, small claims overtake a large one that does not fit yet. A claim larger than the budget
gets all of it once nobody else uses it, and the request computes the rest.

No claim waits for another one that waits: only admitted claims take room. Theirs ends when the
request loads its blocks, when a read is late (`Promoter`), or when a request whose blocks are all
there does not come for them within `HOLD_DEADLINES` deadlines.

Used under the manager's lock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice

from ..tiers.base import BlockHash
from .base import LookupState
from .claims import Claim, PromotionRoom
from .counters import Reason
from .flow import Flow
from .holds import Holds
from .promotion import Promoter
from .request import Request
from .worth import Worth

HOLD_DEADLINES = 2
"""For so many deadlines blocks that are there are held for a request that does not load them."""
LOOK_AGAIN_S = 0.02
"""Claims that wait are looked at this often, if none is new and the first does not fit: others may
compute by now, or find their blocks on their way. One of them is counted anew, 0.2 µs a block."""


class Turns:
    """All claims."""

    def __init__(
        self,
        flow: Flow,
        promoter: Promoter,
        holds: Holds,
        room: PromotionRoom,
        worth: Worth | None,
        deadline_s: float,
        served_end: bytes,
    ) -> None:
        """`served_end`: end of the hashes of blocks by which tokens are counted."""
        self._flow = flow
        self._promoter = promoter
        self._holds = holds
        self.room = room
        self._worth = worth
        self._deadline_s = deadline_s
        self._served_end = served_end
        self._top = flow.top
        self._below = flow.below
        self._asked: list[Claim] = []
        """Claims whose requests asked in this step, in that order."""
        self._queue: dict[Claim, None] = {}
        """Claims that are not admitted, in the order of their turns."""
        self._admitted: dict[Claim, None] = {}
        self._has_new = False
        """True if a claim was made since the last look at the queue."""
        self._look_again_s = -math.inf
        self._turn = 0
        """Which of the waiting claims was counted anew in the last look."""

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return sum(claim.has_waited for claim in self._queue)

    @property
    def is_waited_for(self) -> bool:
        """True if a request waits for its turn, or for something that is on its way up."""
        return bool(self._queue or (self._promoter.in_flight and self._admitted))

    # ---- a request asks --------------------------------------------------------------------

    def puts_off(self, claim: Claim, first: BlockHash) -> bool:
        """A request that waits asks again, for `first` before all: has it to go on waiting?

        If it asks from another block on than it did, the device's cache changed meanwhile. What the
        device holds now is no longer wanted; a claim that lacks the first block is dropped.
        """
        request = claim.request
        if claim.is_admitted:
            if request.pending and self._flow.clock() >= self._promoter.late_s:
                self._promoter.expire()
            return bool(request.pending)
        if first not in claim.wanted:
            self.release(request)
            return False
        if first != next(iter(claim.wanted)):
            at = list(claim.wanted).index(first)
            claim.wanted = dict(islice(claim.wanted.items(), at, None))
            claim.new_slots = None
            self._has_new = True
        self._asked.append(claim)
        return True

    def want(
        self, block_hash: BlockHash, level: int, request: Request, before: Iterable[BlockHash]
    ) -> LookupState:
        """A block that is not in the first tier was found: the request claims it.

        `level` 0: it is on its way, or a worker is storing it. `before`: what the request was
        answered with in this step, if this is its first claim.
        """
        if level and not self._may_be_worth(level, request):
            return LookupState.MISS
        claim = request.claim
        if claim is None or claim.is_admitted:
            claim = self._new_claim(request, before)
        claim.wanted[block_hash] = level
        return LookupState.PENDING

    def note_hit(self, block_hash: BlockHash, request: Request) -> None:
        """A block of the first tier was found after the request's first claim in this step."""
        claim = request.claim
        if claim is not None and not claim.is_admitted:
            claim.wanted[block_hash] = 0

    def release(self, request: Request) -> None:
        """The request is served, over, or starts anew: it wants and holds nothing."""
        claim = request.claim
        if claim is not None:
            self._queue.pop(claim, None)
            self._admitted.pop(claim, None)
            self._promoter.leave(request)
            request.end_wait()
        self._holds.release(request)

    def finish(self, request: Request) -> None:
        """The request is over."""
        self.release(request)
        if self._worth is not None:
            self._worth.backlog.end(request)

    def orphan(self) -> None:
        """The first tier was reset: every request that waits asks anew."""
        self._holds.forget_all()
        for claim in (*self._queue, *self._admitted):
            claim.request.end_wait()
        self._queue.clear()
        self._admitted.clear()
        self._asked.clear()

    # ---- the end of a step -----------------------------------------------------------------

    def end_step(self) -> None:
        """The step's questions were asked: they say whose turn comes first."""
        self.room.end_step()
        if self._asked:
            first = [c for c in self._asked if c in self._queue]
            self._queue = dict.fromkeys(first) | self._queue
            self._asked.clear()

    def admit(self) -> None:
        """Give room to those whose turn it is, and let those compute for whom that is better."""
        if not self._queue or not self._is_time():
            return
        now_s, budget = self._flow.clock(), self.room.budget()
        self._look_again_s = now_s + LOOK_AGAIN_S
        ahead = self._promoter.queued_blocks()
        blocked: Claim | None = None
        self._turn = (self._turn + 1) % len(self._queue)
        for number, claim in enumerate(list(self._queue)):
            is_exact = claim.new_slots is None or number == self._turn
            if is_exact:
                self._count(claim)
            if self._gives_up(claim, ahead, now_s):
                continue
            room = self.room.room_for(claim, budget, blocked)
            if room is not None and not is_exact:  # what others wanted may have left meanwhile
                self._count(claim)
                room = self.room.room_for(claim, budget, blocked)
            if room is None:
                blocked = blocked or claim
                claim.has_waited = True
                self._holds.release(claim.request)  # nobody holds and waits
            else:
                if blocked is not None:
                    blocked.overtaken_blocks += claim.new_slots or 0
                self._admit(claim, room, now_s)
            ahead = [a + b for a, b in zip(ahead, claim.blocks, strict=True)]

    def _is_time(self) -> bool:
        """True if a look at the queue may change something."""
        if self._has_new or self._flow.clock() >= self._look_again_s:
            self._has_new = False
            return True
        first = next(iter(self._queue))
        return self.room.room_for(first, self.room.budget(), None) is not None

    def release_expired(self) -> None:
        """Unpin blocks for which no request came in time."""
        now_s = self._flow.clock()
        for claim in list(self._admitted):
            if claim.request.pending:
                claim.ready_s = None
            elif claim.ready_s is None:
                claim.ready_s = now_s
            elif now_s >= claim.ready_s + HOLD_DEADLINES * self._deadline_s:
                self.release(claim.request)

    # ---- one claim ---------------------------------------------------------------------------

    def _new_claim(self, request: Request, before: Iterable[BlockHash]) -> Claim:
        """What the request holds from an earlier claim stays pinned until the step ends."""
        if request.claim is not None:
            self._admitted.pop(request.claim, None)
        claim = Claim(request, self._flow.clock(), dict.fromkeys(before, 0))
        request.begin_wait(claim)
        self._queue[claim] = None
        self._asked.append(claim)
        self._has_new = True
        return claim

    def _may_be_worth(self, level: int, request: Request) -> bool:
        """False if it need not even be known how many blocks the request finds below."""
        if self._below.rests(level):
            self._flow.counters.links[level - 1].promote_refused_blocks += 1
            return False
        if request.recomputes:
            return False
        worth, now_s = self._worth, self._flow.clock()
        is_new = request.claim is None or request.claim.is_admitted
        if worth is None or not is_new or not worth.is_hopeless(level, now_s):
            return True
        if worth.may_probe(level, now_s):
            return True
        self._recompute(request)
        return False

    def _recompute(self, request: Request) -> None:
        request.recomputes = True
        self._flow.counters.promotions_not_worth += 1

    def _count(self, claim: Claim) -> None:
        """Find out what the claim would take now, and what it would save."""
        holds, get, find = self._holds, self._top.policy.get, self._promoter.find
        blocks = [0] * len(self._flow.counters.tier_names)
        to_read: list[BlockHash] = []
        new_slots = 0
        for block_hash in claim.request.holds:
            claim.wanted.setdefault(block_hash, 0)
        for at, (block_hash, level) in enumerate(claim.wanted.items()):
            status = get(block_hash)
            if status is not None:
                new_slots += status.ref_cnt >= 0 and status.block_id not in holds
            elif find(block_hash) is None:
                level = level or self._below.may_hold(block_hash, claim.request.allowed_media)
                if not level:  # it left every tier meanwhile, and what follows is of no use
                    claim.wanted = dict(islice(claim.wanted.items(), at))
                    break
                claim.wanted[block_hash] = level
                blocks[level] += 1
                to_read.append(block_hash)
        claim.new_slots, claim.blocks = new_slots + len(to_read), blocks
        if self._worth is not None:
            saved = self._worth.saved_blocks(to_read, list(claim.wanted))
            claim.saved_blocks = saved - self._worth.backlog.shared(to_read)

    def _gives_up(self, claim: Claim, ahead: Sequence[int], now_s: float) -> bool:
        """True if the request computes from now on, or is answered anew."""
        needed = [level for level, blocks in enumerate(claim.blocks) if blocks]
        if not needed:
            return False
        if any(self._below.rests(level) for level in needed):
            self.release(claim.request)
            return True
        if self._worth is None:
            return False
        if self._worth.is_worth(claim.blocks, ahead, now_s, claim.saved_blocks):
            return False
        self._compute_instead(claim, now_s)
        return True

    def _compute_instead(self, claim: Claim, now_s: float) -> None:
        """Give the claim up. A few blocks come up all the same if it is time for a probe."""
        assert self._worth is not None
        request = claim.request
        self._recompute(request)
        missed = [h for h, level in claim.wanted.items() if level]
        level = max(level for level, blocks in enumerate(claim.blocks) if blocks)
        if self._worth.is_hopeless(level, now_s) and self._worth.may_probe(level, now_s):
            room = max(0, self.room.left(self.room.budget()))
            for block_hash in missed[: min(room, self._worth.probe_blocks(level, now_s))]:
                if self._promoter.find(block_hash) is None:
                    self._promoter.begin(block_hash, claim.wanted[block_hash], None)
            self._flow.counters.promotion_probes += 1
        self._miss(request, missed, Reason.NOT_WORTH)
        self._worth.expect_computing(request, missed)
        self.release(request)

    def _miss(self, request: Request, missed: Sequence[BlockHash], reason: Reason) -> None:
        request.missed.update(missed)
        served = sum(h.endswith(self._served_end) for h in missed)
        self._flow.counters.recomputed_blocks[reason] += served

    def _admit(self, claim: Claim, room: int, now_s: float) -> None:
        """Pin what is there, and queue what is below."""
        counters, new_slots = self._flow.counters, claim.new_slots or 0
        counters.promotions_worth += self._worth is not None
        if claim.has_waited:
            counters.turn_waits += 1
            counters.turn_waits_s.append(now_s - claim.since_s)
        if new_slots <= room:
            self._take_first(list(claim.wanted), claim, room)
        else:
            self._take_part(claim, room)
        claim.is_admitted = True
        del self._queue[claim]
        self._admitted[claim] = None

    def _take_part(self, claim: Claim, room: int) -> None:
        """Take as much of a claim as there is room for; the rest is computed.

        Windows and states at the end of a prefix that is cut are of no use. As many slots are left
        for those at the place where it is cut: the request asks for them next.
        """
        end, request = self._served_end, claim.request
        served = [h for h in claim.wanted if h.endswith(end)]
        others = [h for h in claim.wanted if not h.endswith(end)]
        before = self.room.taken()
        at = self._take_first(served, claim, room - len(others))
        if at < len(served):
            self._miss(request, served[at:], Reason.BUDGET)
        else:
            at = self._take_first(others, claim, room - (self.room.taken() - before))
            self._miss(request, others[at:], Reason.BUDGET)

    def _take_first(self, block_hashes: Sequence[BlockHash], claim: Claim, room: int) -> int:
        """Take blocks in their order while there is room; returns how many."""
        for at, block_hash in enumerate(block_hashes):
            if self._takes_slot(block_hash):
                if room <= 0:
                    return at
                room -= 1
            self._take(block_hash, claim.wanted[block_hash], claim.request)
        return len(block_hashes)

    def _takes_slot(self, block_hash: BlockHash) -> bool:
        """True if nobody has taken a slot for the block."""
        status = self._top.policy.get(block_hash)
        if status is None:
            return self._promoter.find(block_hash) is None
        return status.ref_cnt >= 0 and status.block_id not in self._holds

    def _take(self, block_hash: BlockHash, level: int, request: Request) -> None:
        """Pin a block for the request, or have it brought up."""
        status, pending = self._top.policy.get(block_hash), self._promoter.find(block_hash)
        if status is not None and status.ref_cnt >= 0:
            self._holds.pin(request, block_hash, status)
        elif pending is not None and pending.is_late:
            request.missed.add(block_hash)
        elif pending is not None:
            self._promoter.join(block_hash, pending, request)
        elif status is None:  # else a worker is storing it
            self._promoter.begin(block_hash, level, request)
