"""How things stand in each tier, for metrics and tools."""

from __future__ import annotations

from dataclasses import dataclass

from ..tiers.endurance import DayTotals


@dataclass(frozen=True, slots=True)
class TierState:
    """One tier at one moment."""

    name: str
    medium: str
    block_bytes: int
    blocks: int
    capacity_blocks: int
    dirty_blocks: int
    """Blocks that are in no tier below."""
    writing_blocks: int = 0
    """Slots of the first tier that receive a block now: a store by a worker, or a read from a tier
    below."""
    reading_blocks: int = 0
    """Slots of the first tier that cannot be evicted because a worker, a write to a tier below or a
    waiting request needs their bytes."""
    waiting_blocks: int = 0
    """Blocks that are queued or on their way up from here."""
    demote_jobs: int = 0
    """Writes into this tier that are under way."""
    is_blocked: bool = False
    """True while the tier takes no writes: it failed or is full."""
    budget_left_bytes: int | None = None
    """Of the day's write budget; None: no limit."""
    day: DayTotals | None = None
    """What the last day saw; None: the tier keeps no count."""
