"""Claims of requests on blocks below, and the room that promotions may take for them.

Used under the manager's lock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..tiers.base import BlockHash
from .holds import Holds
from .level import Level
from .promotion import Promoter
from .request import Request
from .workers import WorkerTransfers

STORE_SHARE = 16
"""Promotions leave one slot of so many to stores, beside those of dirty blocks. Half of the tier is
theirs in any case."""
SMALL_SHARE = 8
"""A claim is small if it takes at most one slot of so many of the budget."""
OVERTAKING_SHARE = 2
"""Small claims that overtake the same one take at most one slot of so many of the budget."""


@dataclass(slots=True, eq=False)
class Claim:
    """What one request waits for."""

    request: Request
    since_s: float
    wanted: dict[BlockHash, int] = field(default_factory=dict)
    """Blocks of its prefix in the order asked, with the level where each was found. Level 0 stands
    for the first tier, and for blocks on their way there."""
    is_admitted: bool = False
    has_waited: bool = False
    """True if it was not admitted in the step in which it asked."""
    new_slots: int | None = None
    """Slots that it would take beyond those that others have taken; None: not counted yet."""
    blocks: list[int] = field(default_factory=list)
    """Per level: blocks that would have to be read."""
    saved_blocks: int = 0
    """Blocks that need not be computed by anybody if those are read."""
    overtaken_blocks: int = 0
    """Slots that went to claims behind it while it waited."""
    ready_s: float | None = None
    """When nothing of it was on its way any more; None before."""


class PromotionRoom:
    """Slots of the first tier that promotions may take or hold."""

    def __init__(
        self,
        top: Level,
        promoter: Promoter,
        holds: Holds,
        workers: WorkerTransfers,
        budget_slots: int | None,
    ) -> None:
        """`budget_slots`: slots of the first tier for promotions; None: what is clean, or half."""
        self._top = top
        self._promoter = promoter
        self._holds = holds
        self._workers = workers
        self._given_budget = budget_slots
        self._store_need = 0
        """Blocks of the largest store that was put off in the last step."""
        self._refused_stores = 0
        """The same of this step."""

    def note_refused_store(self, blocks: int) -> None:
        """A store of so many blocks was put off for want of room: it comes before promotions."""
        self._refused_stores = max(self._refused_stores, blocks)

    def end_step(self) -> None:
        """The step's stores were offered."""
        self._store_need, self._refused_stores = self._refused_stores, 0

    def room_for(self, claim: Claim, budget: int, blocked: Claim | None) -> int | None:
        """Slots that the claim may take now; None: it waits.

        `blocked` is the first claim that waits, if there is one before it. A claim that nobody else
        disturbs may take what dirty blocks take now: they are written down for it. It is cut only
        if it is larger than all that there is.
        """
        if claim.new_slots is None:
            return None
        if blocked is None:
            is_alone = self.taken() == len(claim.request.holds)
            most = self._most()
            room = self.left(most if is_alone else budget)
            is_too_large = claim.new_slots > most - len(claim.request.holds)
            may_be_cut = is_alone and is_too_large and not self._workers.loads
            return room if claim.new_slots <= room or may_be_cut else None
        if not claim.new_slots:
            return 0
        room = self.left(budget)
        is_small = claim.new_slots <= min(room, budget // SMALL_SHARE)
        overtaken = blocked.overtaken_blocks + claim.new_slots
        return room if is_small and overtaken <= budget // OVERTAKING_SHARE else None

    def budget(self) -> int:
        """Slots of the first tier that promotions may take or hold now."""
        if self._given_budget is not None:
            return self._given_budget
        kept = self._top.dirt.dirty_blocks + self._store_need
        return max(1, self._top.capacity // 2, self._most() - kept)

    def _most(self) -> int:
        """Slots that promotions may take or hold if nothing is dirty."""
        capacity = self._top.capacity
        return self._given_budget or max(1, capacity - capacity // STORE_SHARE)

    def taken(self) -> int:
        """Slots that promotions have taken."""
        return self._promoter.in_flight + len(self._holds)

    def left(self, budget: int) -> int:
        """Slots that are left of a budget; those that workers read now cannot be had."""
        capacity = self._top.capacity
        most = capacity - capacity // STORE_SHARE - len(self._workers.loads)
        return min(budget, most) - self.taken()
