"""What the manager counts. Plain integers that only grow, read by metrics and tools."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

MAX_LATENCIES = 1024
"""Samples that are kept until somebody takes them; the oldest go first."""
MAX_STORE_SIZES = 65_536
"""Limit on the store sizes kept for the metrics; more than a scheduler offers in a second."""


class Reason(StrEnum):
    """Why a request computed blocks that a lower tier held."""

    BUDGET = "budget"
    """Its prefix is larger than the room for promotions, or no room could be made."""
    DEADLINE = "deadline"
    """The tier, or the worker that stored the block, did not move for `promotion_deadline_s`."""
    NOT_WORTH = "not_worth"
    """Computing was expected to be faster."""


def _latencies() -> deque[float]:
    return deque(maxlen=MAX_LATENCIES)


@dataclass(slots=True)
class Departures:
    """Blocks that left one tier to make room."""

    evicted_blocks: int = 0
    lost_dirty_blocks: int = 0
    """Evicted blocks that no tier below held; none in the last tier."""


@dataclass(slots=True)
class LinkCounters:
    """Traffic between two neighbouring tiers."""

    demoted_blocks: int = 0
    demoted_bytes: int = 0
    demote_s: float = 0.0
    demote_failed_blocks: int = 0
    demote_refused_blocks: int = 0
    """Not taken by admission."""
    demote_over_budget_blocks: int = 0
    """Not taken because the day's write budget was spent."""
    demote_openings: int = 0
    """How often the tier took no writes for a while: it failed or stalled."""
    demote_no_space_blocks: int = 0
    """Not written because the tier was full, or its index for the moment."""
    demote_held_blocks: int = 0
    """Not kept: another engine had stored the same block there first."""
    promoted_blocks: int = 0
    promoted_bytes: int = 0
    promote_s: float = 0.0
    promote_gone_blocks: int = 0
    promote_corrupt_blocks: int = 0
    promote_failed_blocks: int = 0
    promote_openings: int = 0
    """How often nothing was read from the tier for a while: it failed or stalled."""
    promote_refused_blocks: int = 0
    """Lookups that were answered as misses meanwhile."""
    demote_latencies_s: deque[float] = field(default_factory=_latencies)
    """Seconds from the start of each write to its end, queues included; taken by the metrics."""
    promote_latencies_s: deque[float] = field(default_factory=_latencies)
    """The same of each read."""


@dataclass(slots=True)
class Counters:
    """Everything since the manager was made."""

    tier_names: tuple[str, ...]
    lookup_misses: int = 0
    loaded_blocks: list[int] = field(default_factory=list)
    """Blocks that requests loaded, by the tier they came from."""
    served_blocks: list[int] = field(default_factory=list)
    """Those of them by which the tokens that need not be computed are counted."""
    stored_blocks: int = 0
    store_sizes: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_STORE_SIZES))
    """Number of slots that each store with new blocks asked for; taken by the metrics."""
    store_refused_busy: int = 0
    """Calls answered "offer again"."""
    store_lost_blocks: int = 0
    """Blocks for which that was the last answer to their request."""
    store_truncated_blocks: int = 0
    """Offered blocks that were not taken because they could not fit."""
    recomputed_blocks: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    """Blocks that requests computed although a tier held them."""
    turn_waits: int = 0
    """Requests that waited for their turn to have blocks brought up."""
    turn_waits_s: deque[float] = field(default_factory=_latencies)
    """Seconds that each of them waited; taken by the metrics."""
    promotions_worth: int = 0
    """Requests for which bringing blocks up was expected to be faster than computing them."""
    promotions_not_worth: int = 0
    """Requests that computed instead."""
    recorded_requests: int = 0
    record_dropped_requests: int = 0
    """Requests that did not fit into the recording's queue, or came after it had failed."""
    promotion_probes: int = 0
    """Reads that nobody waited for, to see whether a slow tier has recovered."""
    departures: list[Departures] = field(default_factory=list)
    """Blocks that left each tier to make room."""
    resets: int = 0
    resets_by_others: int = 0
    """Resets of a shared tier by other engines."""
    links: list[LinkCounters] = field(default_factory=list)

    @classmethod
    def for_tiers(
        cls,
        names: tuple[str, ...],
        links: Sequence[LinkCounters] | None = None,
        departures: Sequence[Departures] | None = None,
    ) -> Counters:
        """Zeros for a cascade; the tiers below count `links` and `departures` if they are given."""
        return cls(
            tier_names=names,
            loaded_blocks=[0] * len(names),
            served_blocks=[0] * len(names),
            departures=list(departures or [Departures() for _ in names]),
            links=list(links or [LinkCounters() for _ in names[1:]]),
        )

    @property
    def evicted_blocks(self) -> list[int]:
        """Blocks that left each tier to make room."""
        return [tier.evicted_blocks for tier in self.departures]

    @property
    def dropped_dirty_blocks(self) -> int:
        """Blocks that left the last place that held them without a copy below, except in the
        last."""
        return sum(tier.lost_dirty_blocks for tier in self.departures)
