"""Counters of the manager. They are plain numbers that only grow; metrics and tools read them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

MAX_LATENCIES = 1024
"""Largest number of samples kept for the metrics. Beyond it, the oldest sample is dropped."""
MAX_STORE_SIZES = 65_536
"""Limit on the store sizes kept for the metrics; more than a scheduler offers in a second."""


class Reason(StrEnum):
    """Reason why a request computed blocks that a lower tier held."""

    BUDGET = "budget"
    """The prefix is larger than the promotion budget, or no room could be made."""
    DEADLINE = "deadline"
    """The tier, or the worker storing the block, made no progress for `promotion_deadline_s`. For a
    tier less is enough if computing is faster."""
    NOT_WORTH = "not_worth"
    """Computing was expected to be faster than reading."""


def latencies() -> deque[float]:
    """Return an empty queue of durations; the oldest ones leave it."""
    return deque(maxlen=MAX_LATENCIES)


@dataclass(slots=True)
class LinkCounters:
    """Traffic between the first tier and one tier below it, and evictions from the latter."""

    evicted_blocks: int = 0
    """Number of blocks that left the tier to make room."""
    demoted_blocks: int = 0
    demoted_bytes: int = 0
    demote_s: float = 0.0
    demote_failed_blocks: int = 0
    demote_refused_blocks: int = 0
    """Number of blocks that admission refused."""
    demote_over_budget_blocks: int = 0
    """Number of blocks refused because the day's write budget was spent."""
    demote_openings: int = 0
    """Number of times the breaker of writes opened, because the tier failed or stalled."""
    demote_no_space_blocks: int = 0
    """Number of attempts to write a block that failed because the tier or its index was full."""
    demote_held_blocks: int = 0
    """Number of written blocks not kept, because another engine had stored them first."""
    demote_missed_blocks: int = 0
    """Number of blocks that only other tiers were given. This one rested, had no room, or had too
    many writes in flight."""
    promoted_blocks: int = 0
    promoted_bytes: int = 0
    promote_s: float = 0.0
    promote_gone_blocks: int = 0
    promote_corrupt_blocks: int = 0
    promote_failed_blocks: int = 0
    promote_openings: int = 0
    """Number of times the breaker of reads opened, because the tier failed or stalled."""
    promote_refused_blocks: int = 0
    """Number of lookups that missed because the breaker of reads was open. After a counted miss of
    any kind, a request counts none until it loads or stores."""
    demote_latencies_s: deque[float] = field(default_factory=latencies)
    """Seconds from start to end of each write, including queues; the metrics remove them."""
    promote_latencies_s: deque[float] = field(default_factory=latencies)
    """Seconds from start to end of each read, including queues; the metrics remove them."""


@dataclass(slots=True)
class Counters:
    """Counters since the start of the manager."""

    tier_names: tuple[str, ...]
    lookup_misses: int = 0
    """Number of lookups that missed. A request that waits counts them once, until it loads or
    stores."""
    loaded_blocks: list[int] = field(default_factory=list)
    """Number of blocks that requests loaded, by the tier from which they were read."""
    served_blocks: list[int] = field(default_factory=list)
    """Number of loaded blocks by which tokens are counted (`served_end`), by tier."""
    stored_blocks: int = 0
    store_sizes: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_STORE_SIZES))
    """Number of slots that each store with new blocks asked for; taken by the metrics."""
    store_refused_busy: int = 0
    """Number of stores that the engine was asked to offer again."""
    store_lost_blocks: int = 0
    """Number of blocks whose request ended before the engine offered them again."""
    store_truncated_blocks: int = 0
    """Number of offered blocks not stored because they could not fit."""
    recomputed_blocks: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    """Number of blocks that requests computed although a tier held them."""
    turn_waits: int = 0
    """Number of requests whose promotion waited for its turn."""
    turn_waits_s: deque[float] = field(default_factory=latencies)
    """Seconds that each of these requests waited; the metrics remove them."""
    promotions_worth: int = 0
    """Number of requests for which reading was expected to be faster than computing."""
    promotions_not_worth: int = 0
    """Number of requests for which computing was expected to be faster than reading."""
    recorded_requests: int = 0
    record_dropped_requests: int = 0
    """Number of requests missing in the recording: its queue was full, or it had failed."""
    promotion_probes: int = 0
    """Number of reads without a waiting request, which measure whether a slow tier recovered."""
    top_evicted_blocks: int = 0
    """Number of blocks evicted from the first tier."""
    dropped_dirty_blocks: int = 0
    """Number of them that no tier below held; 0 if the first tier is the only one."""
    resets: int = 0
    resets_by_others: int = 0
    """Number of resets of a shared tier by other engines."""
    links: list[LinkCounters] = field(default_factory=list)
    """Traffic of each tier below the first."""

    @classmethod
    def for_tiers(
        cls, names: tuple[str, ...], links: Sequence[LinkCounters] | None = None
    ) -> Counters:
        """Return zeros for a cascade. The tiers below update `links` if given."""
        return cls(
            tier_names=names,
            loaded_blocks=[0] * len(names),
            served_blocks=[0] * len(names),
            links=list(links or [LinkCounters() for _ in names[1:]]),
        )

    @property
    def evicted_blocks(self) -> list[int]:
        """Number of blocks evicted from each tier."""
        return [self.top_evicted_blocks, *(link.evicted_blocks for link in self.links)]
