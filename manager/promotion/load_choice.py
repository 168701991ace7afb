"""Load or recompute, for one request: the tiers from which it reads.

A tier is left out if it rests, or if computing is expected to be faster (`Worth`). The request then
asks again, and gets what the other tiers have.

Used under the manager's lock.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import islice

from ...tiers.base import BlockHash
from ..counters import Reason
from ..flow import Flow
from ..request import Request
from .claims import Claim, PromotionRoom
from .promoter import Promoter
from .worth import Worth


class LoadChoice:
    """Choice between loading blocks and computing them."""

    def __init__(
        self,
        flow: Flow,
        promoter: Promoter,
        room: PromotionRoom,
        worth: Worth | None,
        served_end: bytes,
    ) -> None:
        """`worth` compares the speeds; None: tiers are left out only while they rest.

        `served_end`: end of the hashes of blocks by which tokens are counted.
        """
        self._flow = flow
        self._below = flow.below
        self._promoter = promoter
        self._room = room
        self.worth = worth
        self._served_end = served_end
        self._elsewhere = [n for n, tier in enumerate(flow.below.tiers, 1) if tier.is_elsewhere]
        """Numbers of the tiers that have to be asked."""

    def may_read_elsewhere(self, request: Request) -> bool:
        """Return True if the request may read from a tier that has to be asked.

        False: computing is faster than reading any number of its blocks.
        """
        worth, too_slow = self.worth, request.too_slow
        return any(
            worth is None or (n not in too_slow and self._may_pay(n, worth))
            for n in self._elsewhere
        )

    def may_read(self, level: int, request: Request) -> bool:
        """Return False if a block of the tier is a miss for the request.

        Once the request has made a claim in this step, the whole claim is compared instead.
        """
        if self._below.rests(level):
            if not request.counted_misses:  # else it asks again
                self._flow.counters.links[level - 1].promote_refused_blocks += 1
            return False
        if level in request.too_slow:
            return False
        worth, claim = self.worth, request.claim
        if worth is None or (claim is not None and not claim.is_admitted):
            return True
        if self._may_pay(level, worth):
            return True
        self._leave_out(request, {level})
        return False

    def count_saved(self, claim: Claim, to_read: Sequence[BlockHash]) -> None:
        """Count the blocks that reading would save. `to_read`: those that `claim.blocks` counts."""
        worth, chain = self.worth, list(claim.wanted)
        if worth is None:
            return
        claim.saved_blocks = [0] * len(claim.blocks)
        for level, blocks in enumerate(claim.blocks):
            if blocks:
                in_level = [h for h in to_read if claim.wanted[h] == level]
                claim.saved_blocks[level] = worth.saved_blocks(in_level, chain)

    def rejects(self, claim: Claim, ahead: Sequence[int], now_s: float) -> bool:
        """Return True if the claim has to be given up, because a tier of it is left out.

        `ahead[level]`: number of blocks queued in each tier before the claim.
        """
        levels = [level for level, blocks in enumerate(claim.blocks) if blocks]
        if any(self._below.rests(level) for level in levels):
            return True
        worth, slow = self.worth, set[int]()
        if worth is None:
            return False
        for level in levels:
            # Blocks that an earlier claim owns are in `ahead` already.
            blocks, saved = claim.blocks[level], claim.saved_blocks[level]
            others = max(0, ahead[level] + claim.own_blocks[level] - blocks)
            if not worth.is_worth(level, blocks, others, saved, now_s):
                slow.add(level)
        if slow:
            self._compute_instead(claim, slow, worth, now_s)
        return bool(slow)

    def count_recomputed(self, block_hashes: Sequence[BlockHash], reason: Reason) -> None:
        """Count blocks that a tier holds and a request computes."""
        served = sum(h.endswith(self._served_end) for h in block_hashes)
        self._flow.counters.recomputed_blocks[reason] += served

    def _may_pay(self, level: int, worth: Worth) -> bool:
        """Return True if reading a block of the tier may be worth it, or if a probe is due."""
        now_s = self._flow.clock()
        return not worth.is_hopeless(level, now_s) or worth.may_probe(level, now_s)

    def _leave_out(self, request: Request, levels: Set[int]) -> None:
        request.too_slow |= levels
        request.awaits_answers = self.may_read_elsewhere(request)
        self._flow.counters.promotions_not_worth += 1

    def _compute_instead(self, claim: Claim, slow: Set[int], worth: Worth, now_s: float) -> None:
        """Turn blocks in slow tiers into misses. Those behind the first one are computed, too."""
        request, wanted = claim.request, claim.wanted
        self._leave_out(request, slow)
        missed = [h for h, level in wanted.items() if level in slow]
        start = list(wanted).index(missed[0])
        computed = [h for h, level in islice(wanted.items(), start, None) if level]
        level = max(slow)
        if worth.is_hopeless(level, now_s) and worth.may_probe(level, now_s):
            self._probe(level, [h for h in missed if wanted[h] == level], worth, now_s)
        request.missed.update(missed)
        self.count_recomputed(computed, Reason.NOT_WORTH)
        worth.expect_computing(request, computed)

    def _probe(
        self, level: int, block_hashes: Sequence[BlockHash], worth: Worth, now_s: float
    ) -> None:
        """Read a few blocks of a slow tier for which no request waits."""
        room = max(0, self._room.left(self._room.budget()))
        for block_hash in block_hashes[: min(room, worth.probe_blocks(level, now_s))]:
            if block_hash not in self._promoter.pending:
                self._promoter.begin(block_hash, level, is_probe=True)
        self._flow.counters.promotion_probes += 1
