"""What the manager counts. Plain integers that only grow, read by metrics and tools."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


@dataclass(slots=True)
class LinkCounters:
    """Traffic between two neighbouring tiers."""

    demoted_blocks: int = 0
    demoted_bytes: int = 0
    demote_s: float = 0.0
    demote_failed_blocks: int = 0
    demote_refused_blocks: int = 0
    """Not taken by admission or by the write budget."""
    promoted_blocks: int = 0
    promoted_bytes: int = 0
    promote_s: float = 0.0
    promote_gone_blocks: int = 0
    promote_corrupt_blocks: int = 0
    promote_failed_blocks: int = 0


@dataclass(slots=True)
class Counters:
    """Everything since the manager was made."""

    tier_names: tuple[str, ...]
    lookup_misses: int = 0
    loaded_blocks: list[int] = field(default_factory=list)
    """Blocks that requests loaded, by the tier they came from."""
    stored_blocks: int = 0
    store_refused_busy: int = 0
    """Calls answered "offer again"."""
    store_truncated_blocks: int = 0
    """Offered blocks that were not taken because they could not fit."""
    dropped_dirty_blocks: int = 0
    """Blocks that left the last place that held them without a copy below, except in the last."""
    deadline_misses: int = 0
    budget_misses: int = 0
    evicted_blocks: list[int] = field(default_factory=list)
    resets: int = 0
    links: list[LinkCounters] = field(default_factory=list)

    @classmethod
    def for_tiers(cls, names: tuple[str, ...]) -> Counters:
        """Zeros for a chain of tiers."""
        return cls(
            tier_names=names,
            loaded_blocks=[0] * len(names),
            evicted_blocks=[0] * len(names),
            links=[LinkCounters() for _ in names[1:]],
        )

    def as_dict(self) -> dict[str, object]:
        """A copy as plain data."""
        return asdict(self)
