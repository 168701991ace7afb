"""`kvcascade top`: figures of a running engine or of a path, and their rates.

A reading is a set of numbers at one moment; two readings give rates. Readings come from an engine's
`/metrics` (all its counters) or from a path (`PathReadings`).
"""

from __future__ import annotations

import errno
import math
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPException

from ....errors import TierIOError
from ....observe.metrics import PREFIX

FETCH_TIMEOUT_S = 5.0
MAX_METRICS_BYTES = 64 << 20
MAX_REASON_CHARS = 200
ALL = ""
"""Tier name of figures that belong to no tier."""

Figures = Mapping[tuple[str, str], float]
"""Mapping of (name without prefix, tier) to value."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Figures at one moment."""

    at_s: float
    figures: Figures
    problems: Mapping[str, str] = field(default_factory=dict)
    """Mapping of tiers without figures to the reason, with a remedy."""


@dataclass(frozen=True, slots=True)
class TierFrame:
    """One tier at one moment; None if unknown. Rates are per second since the last reading."""

    tier: str
    blocks: float | None = None
    used_ratio: float | None = None
    dirty_ratio: float | None = None
    hits: float | None = None
    """Number of blocks that requests have loaded since the engine started."""
    hits_per_s: float | None = None
    tokens_per_s: float | None = None
    """Prompt tokens per second that were loaded instead of computed."""
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None
    up_bytes: float | None = None
    down_bytes: float | None = None
    up_latency_s: float | None = None
    """Mean latency of the batches since the last reading."""
    down_latency_s: float | None = None
    pending_blocks: float | None = None
    budget_left_bytes: float | None = None
    is_blocked: bool | None = None
    problem: str | None = None
    """Reason why no figures are known, with a remedy."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Figures of one picture."""

    source: str
    tiers: list[TierFrame] = field(default_factory=list)
    misses: float | None = None
    misses_per_s: float | None = None
    waiting_requests: float | None = None
    """Number of requests that wait in the queue for reads."""
    corrupt_blocks: float | None = None
    dropped_dirty_blocks: float | None = None


def parse_metrics(text: str) -> Figures:
    """Parse an engine's `/metrics`: finite values only.

    Values that differ only in other labels than `tier`, such as the engine, are summed up. Of
    ratios, the largest counts. Several API servers each keep a copy of a gauge; there, too, the
    largest counts.
    """
    from prometheus_client.parser import text_string_to_metric_families

    copies: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in text_string_to_metric_families(text):
        if not family.name.startswith(PREFIX):
            continue
        for sample in family.samples:
            if sample.name.endswith(("_bucket", "_created")) or not math.isfinite(sample.value):
                continue
            labels = sorted(pair for pair in sample.labels.items() if pair[0] != "pid")
            series = sample.name, tuple(labels)
            copies[series] = max(copies.get(series, sample.value), sample.value)
    found: dict[tuple[str, str], float] = {}
    for (full_name, pairs), value in copies.items():
        name = full_name.removeprefix(PREFIX).removesuffix("_total")
        key = (name, dict(pairs).get("tier", ALL))
        had = found.get(key, 0.0)
        found[key] = max(had, value) if name.endswith("_ratio") else had + value
    return found


def read_url(url: str) -> Reading:
    """Fetch an engine's metrics. Raises `TierIOError`."""
    address = _address(url)
    try:
        with urllib.request.urlopen(address, timeout=FETCH_TIMEOUT_S) as answer:
            text = answer.read(MAX_METRICS_BYTES).decode("utf-8", "replace")
        figures = parse_metrics(text)
    except (OSError, ValueError, HTTPException) as error:
        reason = str(error.reason if isinstance(error, urllib.error.URLError) else error)
        shown = textwrap.shorten(reason, MAX_REASON_CHARS)
        raise TierIOError(
            errno.EIO, f"{address} gives no metrics ({shown}); is the engine up?"
        ) from None
    if not figures:
        raise TierIOError(
            errno.ENOENT,
            f"{address} has no metrics of kvcascade; they begin with the first request; was one "
            "sent, and does this engine use kvcascade, with metrics on?",
        )
    return Reading(time.monotonic(), figures)


def _address(url: str) -> str:
    """Return the address of the metrics; the path may be left out."""
    scheme, _, rest = (url if "://" in url else f"http://{url}").partition("://")
    host, _, path = rest.partition("/")
    return f"{scheme}://{host}/{path or 'metrics'}"


def frame(source: str, now: Reading, before: Reading | None = None) -> Frame:
    """Return the frame of a reading, with rates since the reading before."""
    known = {tier for _, tier in now.figures if tier != ALL}
    names = sorted(known | now.problems.keys(), key=lambda name: (name != "cpu", name))
    change = _Change(now, before)
    return Frame(
        source=source,
        tiers=[_tier_frame(name, change, now.problems.get(name)) for name in names],
        misses=change.value("lookup_misses"),
        misses_per_s=change.rate("lookup_misses"),
        waiting_requests=change.value("waiting_requests"),
        corrupt_blocks=change.sum("promote_corrupt_blocks"),
        dropped_dirty_blocks=change.value("dropped_dirty_blocks"),
    )


class _Change:
    """Values, and their changes since the last reading."""

    def __init__(self, now: Reading, before: Reading | None) -> None:
        self._now = now
        self._before = before

    def value(self, name: str, tier: str = ALL) -> float | None:
        return self._now.figures.get((name, tier))

    def sum(self, name: str) -> float | None:
        found = [value for (n, _), value in self._now.figures.items() if n == name]
        return sum(found) if found else None

    def grown(self, name: str, tier: str = ALL) -> float | None:
        """Return the increase of a counter; None if unknown, also if it was absent before or if the
        engine restarted its counters."""
        now = self.value(name, tier)
        before = self._before.figures.get((name, tier)) if self._before else None
        if now is None or before is None:
            return None
        return now - before if now >= before else None

    def rate(self, name: str, tier: str = ALL) -> float | None:
        grown = self.grown(name, tier)
        if grown is None or self._before is None:
            return None
        seconds = self._now.at_s - self._before.at_s
        return grown / seconds if seconds > 0 else None

    def mean(self, name: str, tier: str) -> float | None:
        total, count = self.grown(f"{name}_sum", tier), self.grown(f"{name}_count", tier)
        if self._before is None:
            total, count = self.value(f"{name}_sum", tier), self.value(f"{name}_count", tier)
        return total / count if total is not None and count else None


def _tier_frame(tier: str, change: _Change, problem: str | None) -> TierFrame:
    blocked = change.value("tier_blocked", tier)
    return TierFrame(
        tier=tier,
        blocks=change.value("tier_blocks", tier),
        used_ratio=change.value("tier_used_ratio", tier),
        dirty_ratio=change.value("tier_dirty_ratio", tier),
        hits=change.value("loaded_blocks", tier),
        hits_per_s=change.rate("loaded_blocks", tier),
        tokens_per_s=change.rate("served_tokens", tier),
        up_bytes_per_s=change.rate("promoted_bytes", tier),
        down_bytes_per_s=change.rate("demoted_bytes", tier),
        up_bytes=change.value("promoted_bytes", tier),
        down_bytes=change.value("demoted_bytes", tier),
        up_latency_s=change.mean("promotion_seconds", tier),
        down_latency_s=change.mean("demotion_seconds", tier),
        pending_blocks=change.value("pending_blocks", tier),
        budget_left_bytes=change.value("write_budget_left_bytes", tier),
        is_blocked=None if blocked is None else blocked > 0,
        problem=problem,
    )
