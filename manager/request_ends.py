"""End of a request: set the recency of its blocks once, in the order of its prompt.

Used under the manager's lock.
"""

from __future__ import annotations

from ..tiers.base import BlockHash
from .demotion import Aging
from .flow import Flow
from .request import Request, runs_from_the_end


class RequestEnds:
    """Update the first tier when a request ends."""

    def __init__(self, flow: Flow, aging: Aging | None, *, counts_uses: bool) -> None:
        """`counts_uses`: True if admission to the tier below depends on use counts."""
        self._flow = flow
        self._top = flow.top
        self._aging = aging
        self._counts_uses = counts_uses

    def end(self, request: Request) -> None:
        """Set the recency of the request's blocks.

        It is set once per request and in the order of its prompt. Tails are thus evicted before
        heads, whatever the number of lookups and the order of stores and transfers.
        """
        self._flow.counters.store_lost_blocks += len(request.deferred)
        request.deferred.clear()
        if not request.keys:
            return
        used, request.keys = request.keys, {}
        in_order = request.in_prompt_order(used)
        # The chain is reported to the first tier only: demotion brings its blocks to a tier below
        # much later, which an eviction policy there would count as a reuse.
        if self._top.policy.wants_chains:
            self._top.policy.note_chain(in_order)
        else:
            policy = self._top.policy
            for is_new, run in runs_from_the_end(in_order, used.__getitem__):
                (policy.settle if is_new else policy.touch)(run)
        if not self._flow.is_single and not all(used.values()):
            self._note_reuse([h for h in used if not used[h]])

    def _note_reuse(self, reused: list[BlockHash]) -> None:
        top = self._top
        found = [(h, s) for h in reused if (s := top.policy.get(h)) is not None and s.ref_cnt >= 0]
        top.uses.note_reuse([status for _, status in found])
        settled = top.dirt.settled_mask
        refused = [
            (h, s.block_id) for h, s in found if settled[s.block_id] and self._may_be_taken(h)
        ]
        if self._aging is not None:
            self._aging.note([h for h, _ in refused])
        top.dirt.set_dirty([slot for _, slot in refused])

    def _may_be_taken(self, block_hash: BlockHash) -> bool:
        """Return True if a tier below may take a settled block now that it was used again.

        If tier 1 lacks it, admission refused it, and may accept it now.
        """
        below = self._flow.below
        if self._counts_uses and below.may_hold(block_hash) != 1:
            return True
        return below.wants_again(block_hash)
