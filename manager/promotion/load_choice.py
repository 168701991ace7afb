"""Load or recompute, for one request: the tiers from which it reads.

A tier is left out if it rests, or if computing is expected to be faster (`Worth`). The request then
asks again, and gets what the other tiers have.

Used under the manager's lock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from itertools import islice

from ...tiers.base import BlockHash
from ..core import ManagerCore
from ..counters import Reason
from ..request import Request
from .claims import Claim, PromotionRoom
from .promoter import Promoter
from .worth import Worth

STALL_S_MIN = 1.0
"""Shortest time without an arrival after which a request stops waiting for a tier."""
STALL_CHECK_S = 0.1
"""Seconds between two looks at those who wait for a tier from which nothing arrives."""
MAX_LEFT_PER_STEP = 4096
"""Number of blocks after which no other request stops waiting in this step, at 0.3 µs each. What
those that have stopped compute is ahead of the others then."""


class LoadChoice:
    """Choice between loading blocks and computing them."""

    def __init__(
        self, core: ManagerCore, promoter: Promoter, room: PromotionRoom, worth: Worth | None
    ) -> None:
        """`worth` compares the speeds; None: tiers are left out only while they rest."""
        self._core = core
        self._below = core.below
        self._promoter = promoter
        self._room = room
        self.worth = worth
        self._served_end = core.options.served_end
        self._elsewhere = [n for n, tier in enumerate(core.below.tiers, 1) if tier.is_elsewhere]
        """Numbers of the tiers that have to be asked."""
        self._look_again_s = -math.inf
        """Time of the next look at those who wait for a tier from which nothing arrives."""

    def may_read_elsewhere(self, request: Request) -> bool:
        """Return True if the request may read from a tier that has to be asked.

        False: computing is faster than reading any number of its blocks.
        """
        worth, too_slow = self.worth, request.too_slow
        return any(
            worth is None or (n not in too_slow and self._may_pay(n, worth))
            for n in self._elsewhere
        )

    def may_read(self, tier: int, request: Request) -> bool:
        """Return False if a block of the tier is a miss for the request.

        Once the request has made a claim in this step, the whole claim is compared instead.
        """
        if self._below.rests(tier):
            if not request.counted_misses:  # else it asks again
                self._core.counters.links[tier - 1].promote_refused_blocks += 1
            return False
        if tier in request.too_slow:
            return False
        worth, claim = self.worth, request.claim
        if worth is None or (claim is not None and not claim.is_admitted):
            return True
        if self._may_pay(tier, worth):
            return True
        self._leave_out(request, {tier})
        return False

    def count_saved(self, claim: Claim, to_read: Sequence[BlockHash]) -> None:
        """Count the blocks that reading would save. `to_read`: those that `claim.blocks` counts."""
        if self.worth is None:
            return
        wanted, chain = claim.wanted, list(claim.wanted)
        claim.saved_blocks = [0] * len(claim.blocks)
        for tier, blocks in enumerate(claim.blocks):
            if blocks:
                is_all = blocks == len(to_read)
                in_tier = to_read if is_all else [h for h in to_read if wanted[h] == tier]
                claim.saved_blocks[tier] = self.worth.saved_blocks(in_tier, chain)

    def rejects(self, claim: Claim, ahead: Sequence[int], now_s: float) -> bool:
        """Return True if the claim has to be given up, because a tier of it is left out.

        `ahead[tier]`: number of blocks queued in each tier before the claim.
        """
        worth, slow = self.worth, set[int]()
        for tier, blocks in enumerate(claim.blocks):
            if not blocks:
                continue
            if self._below.rests(tier):
                return True
            if worth is None:
                continue
            # Blocks that an earlier claim owns are in `ahead` already.
            saved = claim.saved_blocks[tier]
            others = max(0, ahead[tier] + claim.own_blocks[tier] - blocks)
            if not worth.is_worth(tier, blocks, others, saved, now_s, claim.request):
                slow.add(tier)
        if worth is None or not slow:
            return False
        return self._compute_instead(claim, slow, worth, now_s)

    def leave_stalled(self, admitted: Iterable[Claim]) -> None:
        """Let requests compute that have waited for longer than that is worth.

        A tier from which nothing arrives may go on at any time. A request waits for it as long as
        it would have waited for a slow one (`Worth.is_worth`).
        """
        worth, now_s = self.worth, self._core.clock()
        if worth is None or now_s < self._look_again_s:
            return
        queues = self._promoter.queues
        silent = [q for q in queues if q.jobs and now_s >= q.arrived_s + STALL_S_MIN]
        if not silent:
            return
        self._look_again_s, left = now_s + STALL_CHECK_S, 0
        for claim in admitted:
            for queue in silent if claim.request.pending else ():
                waited_s = now_s - max(queue.arrived_s, claim.since_s)
                if waited_s >= STALL_S_MIN:
                    left += self._leave_stalled(claim, queue.tier, waited_s, worth)
            if left >= MAX_LEFT_PER_STEP:
                self._look_again_s = -math.inf
                return

    def count_recomputed(self, block_hashes: Sequence[BlockHash], reason: Reason) -> None:
        """Count blocks that a tier holds and a request computes."""
        served = sum(h.endswith(self._served_end) for h in block_hashes)
        self._core.counters.recomputed_blocks[reason] += served

    def _may_pay(self, tier: int, worth: Worth) -> bool:
        """Return True if reading a block of the tier may be worth it, or if a probe is due."""
        now_s = self._core.clock()
        return not worth.is_hopeless(tier, now_s) or worth.may_probe(tier, now_s)

    def _leave_out(self, request: Request, tiers: Set[int]) -> None:
        self._core.counters.promotions_not_worth += not request.too_slow
        request.too_slow |= tiers
        request.awaits_answers = self.may_read_elsewhere(request)

    def _compute_instead(self, claim: Claim, slow: Set[int], worth: Worth, now_s: float) -> bool:
        """Turn blocks in slow tiers into misses. Those behind the first one are computed, too.

        Return False if the claim wants none of them any more: they arrived for another request.
        """
        request, wanted = claim.request, claim.wanted
        missed = [h for h, tier in wanted.items() if tier in slow]
        if not missed:
            return False
        if not all(h.endswith(self._served_end) for h in missed):
            # Without this window or state the rest is of no use.
            slow = {tier for tier in wanted.values() if tier}
            missed = [h for h, tier in wanted.items() if tier]
        self._leave_out(request, slow)
        start = list(wanted).index(missed[0])
        computed = [h for h, tier in islice(wanted.items(), start, None) if tier]
        for tier in slow:
            if worth.is_hopeless(tier, now_s) and worth.may_probe(tier, now_s):
                self._probe(tier, [h for h in missed if wanted[h] == tier], worth, now_s)
        request.missed.update(missed)
        self.count_recomputed(computed, Reason.NOT_WORTH)
        worth.expect_computing(request, computed)
        return True

    def _leave_stalled(self, claim: Claim, tier: int, waited_s: float, worth: Worth) -> int:
        """End the waits of a request for a tier if computing is faster. Return their number."""
        request, needed = claim.request, len(claim.request.pending)
        if self._served_end:  # a window or a state may be waited for, for the sake of all the rest
            if claim.served_blocks is None:
                claim.served_blocks = sum(h.endswith(self._served_end) for h in claim.wanted)
            needed = claim.served_blocks
        if waited_s < worth.patience_s(tier, needed, request):
            return 0
        pending = self._promoter.pending
        missed = [h for h in request.pending if pending[h].tier == tier]
        if missed and self._served_end:
            missed = list(request.pending)
        self._promoter.give_up(request, missed)
        self.count_recomputed(missed, Reason.DEADLINE)
        worth.expect_computing(request, missed)
        return len(missed)

    def _probe(
        self, tier: int, block_hashes: Sequence[BlockHash], worth: Worth, now_s: float
    ) -> None:
        """Read a few blocks of a slow tier for which no request waits."""
        room = self._room.left(self._room.budget())
        if room <= 0:
            return
        for block_hash in block_hashes[: min(room, worth.probe_blocks(tier, now_s))]:
            if block_hash not in self._promoter.pending:
                self._promoter.begin(block_hash, tier, is_probe=True)
        self._core.counters.promotion_probes += 1
