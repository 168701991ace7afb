"""Ends of requests: the recency of their blocks is set once, in the order of their prompts.

Used under the manager's lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..config.schema import WriteMode
from ..tiers.base import BlockHash
from .demotion import Aging
from .flow import Flow
from .request import Request, runs_from_the_end


class RequestEnds:
    """Update the first tier when a request ends."""

    def __init__(self, flow: Flow, aging: Aging, mode: WriteMode, *, counts_uses: bool) -> None:
        """`counts_uses`: admission to the tier below goes by uses."""
        self._flow = flow
        self._top = flow.top
        self._aging = aging
        self._mode = mode
        self._counts_uses = counts_uses

    def end(self, request: Request) -> None:
        """Set the recency of the request's blocks.

        Once per request and in the order of its prompt, so that tails leave before heads however
        often the request was looked at, and in whatever order blocks were offered or transferred.
        """
        self._flow.counters.store_lost_blocks += len(request.put_off)
        request.put_off.clear()
        if not request.keys:
            return
        used, request.keys = request.keys, {}
        in_order = request.in_prompt_order(used)
        # Below, blocks come down long after: an order would take that for a return.
        if self._top.policy.wants_chains:
            self._top.policy.note_chain(in_order)
        else:
            self._set_recency(in_order, used)
        if not self._flow.is_single and not all(used.values()):
            self._note_reuse([h for h in used if not used[h]])

    def _set_recency(self, in_order: Sequence[BlockHash], is_new: Mapping[BlockHash, bool]) -> None:
        """The end of the prompt comes first, so that it is the first to leave."""
        for new, run in runs_from_the_end(in_order, is_new.__getitem__):
            (self._top.policy.settle if new else self._top.policy.touch)(run)

    def _note_reuse(self, reused: list[BlockHash]) -> None:
        top = self._top
        found = [(h, s) for h in reused if (s := top.policy.get(h)) is not None and s.ref_cnt >= 0]
        top.uses.note_reuse([status for _, status in found])
        if not self._counts_uses:
            return
        # Settled and not below: admission refused the block, and may take it now.
        settled, may_hold = top.dirt.settled_mask, self._flow.below.may_hold
        refused = [(h, s.block_id) for h, s in found if settled[s.block_id] and may_hold(h) != 1]
        if self._mode is not WriteMode.DEMOTE:
            self._aging.note([h for h, _ in refused])
        top.dirt.set_dirty([slot for _, slot in refused])
