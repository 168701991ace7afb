"""Results of a replay: plain data, and figures computed from it."""

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
    """Results of one tier over the whole trace."""

    name: str
    policy: str
    read: Rate
    write: Rate | None
    """Rate of writes into this tier; None for the first tier, whose stores take no time."""
    admission: str
    write_budget_bytes: int | None
    capacity_bytes: int
    capacity_blocks: int
    resident_blocks: int
    dirty_blocks: int
    """Blocks that no lower tier has at the end; a kill would lose them, a shutdown would write
    them."""
    hit_blocks: int
    """Blocks that requests loaded from this tier."""
    hit_tokens: int
    """Prompt tokens of the cached prefixes in this tier."""
    demoted_blocks: int
    """Blocks written into this tier from the tier above."""
    promoted_blocks: int
    """Blocks read from this tier and promoted."""
    evicted_blocks: int
    written_bytes: int
    read_bytes: int
    write_amplification: float | None
    """Bytes written to this tier per byte that was computed and stored; None for the first tier."""
    drive_writes_per_day: float | None


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles of a distribution, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Quantiles:
        """Return the quantiles of at least one sample."""
        p50, p90, p99 = (quantile(samples, share) for share in (0.5, 0.9, 0.99))
        return cls(sum(samples) / len(samples), p50, p90, p99)


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Break-even of loading from a tier and computing again, without queueing."""

    tier: str
    prefill_tokens_per_s: float
    """Prefill rate of a model; at higher rates, computing is faster than loading."""
    least_tokens: float | None
    """Length of the shortest prompts that load faster than they compute, due to latency; None if
    there are none or it is unknown."""


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """Results of one run."""

    trace: str
    requests: int
    references: int
    """Blocks that requests referenced."""
    distinct_blocks: int
    block_tokens: float
    block_bytes: int
    trace_s: float
    write_mode: WriteMode
    input_tokens: int
    hit_tokens: int
    stored_blocks: int
    dropped_dirty_blocks: int
    """Dirty blocks that left the first tier without being written."""
    unstored_blocks: int
    """Blocks that the first tier could not take: too many at once, or no block could be evicted."""
    requests_loaded: int
    requests_recomputed: int
    """Requests that were computed instead of loaded."""
    tiers: tuple[ReplayedTier, ...]
    prefill_s_saved: float | None
    ttft_s: Quantiles | None
    """Time to the first token: waiting for reads, and computing. Waiting for the computation of
    other requests is not included."""
    ttft_without_s: Quantiles | None
    """Time to the first token without any cache."""
    break_even: tuple[BreakEven, ...]

    @property
    def hit_ratio(self) -> float:
        """Return the share of the prompt tokens that were cached."""
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0

    def document(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {"format": FORMAT, "hit_ratio": self.hit_ratio, **asdict(self)}
