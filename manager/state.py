"""State of each tier, for metrics and tools."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..handlers.node.remote.remote_wire import RemoteNote
from ..tiers.endurance import DayTotals


@dataclass(frozen=True, slots=True)
class TierState:
    """State of one tier at one time."""

    name: str
    medium: str
    block_bytes: int
    blocks: int
    capacity_blocks: int
    dirty_blocks: int
    """Number of blocks that no tier below holds."""
    writing_blocks: int = 0
    """Slots of the first tier that receive a block now: a store by a worker, or a read from a tier
    below."""
    reading_blocks: int = 0
    """Slots of the first tier that cannot be evicted because a worker, a write to a tier below or a
    waiting request needs their bytes."""
    waiting_blocks: int = 0
    """Number of blocks queued for promotion from this tier, or in flight from it."""
    demote_jobs: int = 0
    """Number of writes into this tier in flight."""
    is_blocked: bool = False
    """True while the tier accepts no writes, because it failed or is full."""
    budget_left_bytes: int | None = None
    """Bytes left of the day's write budget; None: there is no limit."""
    day: DayTotals | None = None
    """Totals of the last day; None if the tier does not record them."""
    remote: RemoteNote | None = None
    """Totals of the requests to a server; None for a tier of this machine."""
    remote_calls_s: Mapping[str, deque[float]] = field(default_factory=dict)
    """Seconds of each call of a server, by verb; the metrics remove them."""
    is_reporter: bool = True
    """True if this engine reports the metrics of the whole tier: one of those that share it."""
    is_path_reporter: bool = True
    """True if this engine reports what tiers of several models share: their write budget."""
