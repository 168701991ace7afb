"""What a replay found: plain data, and the figures that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...config.schema import WriteMode
from ..commands.bench.bench_results import quantile
from .virtual import Rate

FORMAT = 1
"""Version of the JSON document."""


@dataclass(frozen=True, slots=True)
class ReplayedTier:
    """One tier over the whole trace."""

    name: str
    policy: str
    read: Rate
    write: Rate | None
    """Into this tier; None for the first one, where stores take no time."""
    admission: str
    write_budget_bytes: int | None
    capacity_bytes: int
    capacity_blocks: int
    resident_blocks: int
    dirty_blocks: int
    """At the end, in no tier below: a kill would lose them, a shutdown would write them."""
    hit_blocks: int
    """Blocks that requests loaded from here."""
    hit_tokens: int
    """Prompt tokens of the cached prefixes that lay here."""
    demoted_blocks: int
    """Written into this tier from above."""
    promoted_blocks: int
    """Read from this tier and brought up."""
    evicted_blocks: int
    written_bytes: int
    read_bytes: int
    write_amplification: float | None
    """Bytes written here per byte that was computed and stored; None for the first tier."""
    drive_writes_per_day: float | None


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Quantiles:
        """Of at least one sample."""
        p50, p90, p99 = (quantile(samples, share) for share in (0.5, 0.9, 0.99))
        return cls(sum(samples) / len(samples), p50, p90, p99)


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Where loading from a tier takes as long as computing again, queues left out."""

    tier: str
    prefill_tokens_per_s: float
    """A model that computes faster than this is better off computing."""
    least_tokens: float | None
    """Prompts shorter than this are better computed (latency); None if all are, or unknown."""


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """Everything about one run."""

    trace: str
    requests: int
    references: int
    """Blocks asked for."""
    distinct_blocks: int
    block_tokens: float
    block_bytes: int
    trace_s: float
    write_mode: WriteMode
    input_tokens: int
    hit_tokens: int
    stored_blocks: int
    dropped_dirty_blocks: int
    """Lost from the first tier unwritten."""
    unstored_blocks: int
    """Offered, but the first tier could not take them: too many at once, or nothing could leave."""
    requests_loaded: int
    requests_recomputed: int
    """By load or recompute."""
    tiers: tuple[ReplayedTier, ...]
    prefill_s_saved: float | None
    ttft_s: Quantiles | None
    """Waiting for reads and computing; waiting for other requests' computing left out."""
    ttft_without_s: Quantiles | None
    """The same if nothing were cached."""
    break_even: tuple[BreakEven, ...]

    @property
    def hit_ratio(self) -> float:
        """Share of the prompt tokens that were cached."""
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"format": FORMAT, "hit_ratio": self.hit_ratio, **asdict(self)}
