"""Claims of requests on blocks below, their pins in the first tier, and the slots for promotions.

Used under the manager's lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...tiers.base import BlockHash, BlockStatus
from ..core import ManagerCore
from ..first_tier import Dirt
from ..request import Request
from ..workers import WorkerTransfers

if TYPE_CHECKING:
    from .promoter import Promoter

STORE_SHARE = 16
"""Promotions leave 1/STORE_SHARE of the slots to stores, in addition to dirty slots. Half of the
tier is available to promotions in any case."""
SMALL_SHARE = 8
"""A claim is small if it takes at most 1/SMALL_SHARE of the budget."""
OVERTAKING_SHARE = 2
"""Small claims that overtake the same claim take at most 1/OVERTAKING_SHARE of the budget."""


@dataclass(slots=True, eq=False)
class Claim:
    """Blocks that one request wants in the first tier."""

    request: Request
    since_s: float
    """Time at which it began to wait for its turn. Once it is admitted: for its blocks."""
    first: BlockHash | None = None
    """First block of the lookups that made the claim. It may be in no tier: if all layers have a
    sliding window, the engine asks from the end of the prompt on."""
    wanted: dict[BlockHash, int] = field(default_factory=dict)
    """Blocks of the prefix in lookup order, with the tier that holds each. 0 means the first tier,
    or a block in flight to it."""
    is_admitted: bool = False
    has_waited: bool = False
    """True if the claim was not admitted in the step of its first lookup."""
    new_slots: int | None = None
    """Slots that the claim would take and no other request has taken; None: not counted yet."""
    blocks: list[int] = field(default_factory=list)
    """Number of blocks to read from each tier; index 0 stands for the first tier."""
    own: list[BlockHash] = field(default_factory=list)
    """Blocks to read that no other waiting claim counts as its own."""
    own_blocks: list[int] = field(default_factory=list)
    """Number of own blocks in each tier."""
    saved_blocks: list[int] = field(default_factory=list)
    """Number of blocks that no request has to compute if the blocks of each tier are read."""
    served_blocks: int | None = None
    """Number of its blocks by which tokens are counted; None: not counted yet."""
    overtaken_blocks: int = 0
    """Slots that later claims took while this claim waited."""
    alone_since_s: float | None = None
    """Time since which only loads in flight have kept the claim from its slots."""
    ready_s: float | None = None
    """Time at which the last block in flight arrived; None before."""


class Holds:
    """Pins of ready blocks of the first tier, for requests that wait for the rest of their prefix.

    A held block cannot be evicted. A block that several requests hold takes one slot of the
    promotion budget.
    """

    def __init__(self, dirt: Dirt) -> None:
        """`dirt` counts the slots that may be evicted again."""
        self._dirt = dirt
        self.users: dict[int, int] = {}
        """Number of requests that hold each slot; 0 is left out."""
        self._requests: dict[Request, None] = {}
        """Requests that hold a block, in the order of their first pin."""

    def pin(self, request: Request, block_hash: BlockHash, status: BlockStatus) -> None:
        """Pin a ready block until the request loads it. No effect if the request holds it."""
        if block_hash not in request.holds:
            status.ref_cnt += 1
            request.holds[block_hash] = status
            self._requests[request] = None
            self.users[status.block_id] = self.users.get(status.block_id, 0) + 1

    def release(self, request: Request) -> None:
        """Unpin all blocks that the request holds."""
        if not request.holds:
            return
        for status in request.holds.values():
            status.ref_cnt -= 1
            users = self.users.pop(status.block_id)
            if users > 1:
                self.users[status.block_id] = users - 1
        self._dirt.evictable_max += len(request.holds)
        request.holds.clear()
        del self._requests[request]

    @property
    def will_end(self) -> bool:
        """True if a request holds blocks and waits for no other: it will load them."""
        return any(not request.pending for request in self._requests)

    def blocks(self) -> Iterator[BlockHash]:
        """Yield the held blocks in prefix order. A block held by several requests comes several
        times."""
        for request in self._requests:
            yield from request.holds

    def forget_all(self) -> None:
        """Forget every hold without unpinning, because the first tier was reset."""
        self.users.clear()
        for request in self._requests:
            request.holds.clear()
        self._requests.clear()


class PromotionRoom:
    """Slots of the first tier that promotions may take or hold."""

    def __init__(
        self, core: ManagerCore, promoter: Promoter, holds: Holds, workers: WorkerTransfers
    ) -> None:
        top = self._top = core.top
        self._clock = core.clock
        self._deadline_s = core.options.promotion_deadline_s
        self._promoter = promoter
        self._holds = holds
        self._workers = workers
        self._given_budget = core.options.promotion_budget_slots
        most = max(1, top.capacity - top.capacity // STORE_SHARE)
        self._most = min(self._given_budget or most, most)
        """Slots that promotions may take or hold if no slot is dirty."""
        self.refused_store = 0
        """Size in blocks of the largest store that was refused in this step for lack of slots."""
        self.store_need = 0
        """Largest refused store of the previous step, in blocks. Promotions leave room for it."""

    def room_for(self, claim: Claim, budget: int, blocked: Claim | None) -> int | None:
        """Return the slots that the claim may take now; None if it must wait.

        `blocked` is the first waiting claim in the queue, if it comes before this one. If no other
        claim has slots, this claim may also take those of dirty blocks, which are written back for
        it. With many hits, some load is always in flight, so a claim may be cut in two cases:

        - it is larger than the whole budget without late blocks, and loads in flight leave more
          than half of that;
        - loads in flight alone have kept it waiting for `promotion_deadline_s`.
        """
        if claim.new_slots is None:
            return None
        if blocked is None:
            held, late = len(claim.request.holds), self._promoter.late_blocks
            is_alone = self.taken() - late == held
            room = self.left(self._most if is_alone else budget)
            if claim.new_slots <= room:
                return room
            if not is_alone:
                claim.alone_since_s = None
                return None
            return room if self._may_cut(claim, room + held, self._most - late) else None
        claim.alone_since_s = None
        if not claim.new_slots:
            return 0
        room = self.left(budget)
        is_small = claim.new_slots <= min(room, budget // SMALL_SHARE)
        overtaken = blocked.overtaken_blocks + claim.new_slots
        return room if is_small and overtaken <= budget // OVERTAKING_SHARE else None

    def _may_cut(self, claim: Claim, available: int, most: int) -> bool:
        """Return True if a claim that only loads in flight keep waiting may be cut.

        `available`: slots that it holds or may take now. `most`: the same without loads in flight.
        """
        now_s = self._clock()
        if claim.alone_since_s is None:
            claim.alone_since_s = now_s
        is_too_large = (claim.new_slots or 0) + len(claim.request.holds) > most
        is_quiet = available > most // 2
        return is_too_large and is_quiet or now_s >= claim.alone_since_s + self._deadline_s

    def budget(self) -> int:
        """Return the number of slots that promotions may take or hold now."""
        if self._given_budget is not None:
            return self._given_budget
        kept = self._top.dirt.dirty_blocks + self.store_need
        return max(1, self._top.capacity // 2, self._most - kept)

    def taken(self) -> int:
        """Return the number of slots that promotions have taken."""
        return len(self._promoter.pending) + len(self._holds.users)

    def left(self, budget: int) -> int:
        """Return the slots left of a budget. Slots that workers read now are not available."""
        capacity = self._top.capacity
        most = capacity - capacity // STORE_SHARE - len(self._workers.loads)
        return min(budget, most) - self.taken()
