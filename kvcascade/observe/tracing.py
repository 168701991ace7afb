"""Report promotions and demotions as trace spans.

One span stands for one batch: the job that the manager started, from its start until its outcome
was taken in. Spans cover transfers between the first tier and the tiers below it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

from ..logs import get_logger
from ..manager.below.port import Ended
from ..tiers.base import BlockOutcome

logger = get_logger(__name__)

NS_PER_S = 1_000_000_000


class EmitSpan(Protocol):
    """Function that makes one finished span. It must not wait."""

    def __call__(
        self,
        span_name: str,
        start_time: int,
        end_time: int,
        attributes: Mapping[str, str | int | float],
    ) -> object:
        """`start_time` and `end_time` are nanoseconds since the epoch."""


class TransferSpans:
    """Turns ended transfers into spans. Called under the manager's lock, by one thread at a time.

    If a span cannot be made, one line is logged and no more are made: tracing never harms serving.
    """

    def __init__(
        self,
        emit: EmitSpan,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`clock` is the manager's clock."""
        self._emit: EmitSpan | None = emit
        self._clock = clock
        self._wall_ns = wall_ns

    def __call__(self, tier_name: str, ended: Ended, begun_s: float) -> None:
        """Make the span of a transfer between the first tier and the tier below of that name, which
        began at `begun_s` on the manager's clock."""
        if self._emit is None:
            return
        end_ns = self._wall_ns()
        start_ns = end_ns - round((self._clock() - begun_s) * NS_PER_S)
        name = "kvcascade.promote" if ended.is_get else "kvcascade.demote"
        try:
            self._emit(name, start_ns, end_ns, self._attributes(tier_name, ended))
        except Exception:
            self._emit = None
            logger.exception("kvcascade: a trace span could not be made; no more will be")

    def _attributes(self, tier_name: str, ended: Ended) -> dict[str, str | int | float]:
        outcomes = Counter(ended.outcomes)
        found: dict[str, str | int | float] = {
            "kvcascade.tier": tier_name,
            "kvcascade.blocks": len(ended.outcomes),
            "kvcascade.bytes": ended.size_bytes,
            "kvcascade.transfer_seconds": ended.time_s,
        }
        for outcome, blocks in outcomes.items():
            if outcome is not BlockOutcome.OK:
                found[f"kvcascade.blocks.{outcome.name.lower()}"] = blocks
        return found
