"""Output of a replay: its report as tables, a sweep as table, CSV or picture."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from ...config import sizes
from ...errors import os_errors
from ..commands import show
from ..commands.picture import draw_ratios, head, new_figure, save
from .replay_report import Quantiles, ReplayedTier, ReplayReport
from .virtual import Rate

UNKNOWN = "-"

TIER_ROWS: dict[str, Callable[[ReplayedTier], str]] = {
    "hit blocks": lambda tier: f"{tier.hit_blocks:,}",
    "prefix-hit tokens": lambda tier: f"{tier.hit_tokens:,}",
    "demoted into": lambda tier: f"{tier.demoted_blocks:,}",
    "promoted from": lambda tier: f"{tier.promoted_blocks:,}",
    "evicted": lambda tier: f"{tier.evicted_blocks:,}",
    "dirty at the end": lambda tier: f"{tier.dirty_blocks:,}",
    "written": lambda tier: sizes.human(tier.written_bytes),
    "read": lambda tier: sizes.human(tier.read_bytes),
    "read rate": lambda tier: _rate(tier.read),
    "write rate": lambda tier: _rate(tier.write),
    "admission": lambda tier: tier.admission,
    "write budget": lambda tier: _budget(tier.write_budget_bytes),
    "write amplification": lambda tier: _figure(tier.write_amplification, ".2f"),
    "drive writes per day": lambda tier: _figure(tier.drive_writes_per_day, ".2f"),
}
"""Rows of the table: title, and function that returns a tier's cell."""


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One run of a sweep."""

    tier: str
    capacity_bytes: int
    policy: str
    report: ReplayReport

    def document(self) -> dict[str, Any]:
        """Return the point as a JSON object."""
        swept = {"tier": self.tier, "capacity_bytes": self.capacity_bytes, "policy": self.policy}
        return {**swept, **self.report.document()}


CSV_FIELDS = (
    "tier",
    "capacity_bytes",
    "policy",
    "hit_ratio",
    "hit_tokens",
    "input_tokens",
    "written_bytes",
    "read_bytes",
    "ttft_p50_s",
    "ttft_p99_s",
)


def print_report(report: ReplayReport) -> None:
    """Print the report of one run."""
    console = show.console()
    console.print(
        f"{report.trace}: {report.requests:,} requests, {report.references:,} blocks of "
        f"{report.block_tokens:g} tokens ({sizes.human(report.block_bytes)}), "
        f"{report.distinct_blocks:,} distinct, over {report.trace_s / 3600:.2f} h"
    )
    console.print(_tier_table(report))
    facts = Table(show_header=False, box=None)
    for name, value in _facts(report):
        facts.add_row(name, value)
    console.print(facts)


def _tier_table(report: ReplayReport) -> Table:
    table = Table()
    table.add_column("")
    for tier in report.tiers:
        title = f"{tier.name} {sizes.human(tier.capacity_bytes)} {tier.policy}"
        table.add_column(title, justify="right")
    for name, value in TIER_ROWS.items():
        table.add_row(name, *(value(tier) for tier in report.tiers))
    return table


def _facts(report: ReplayReport) -> list[tuple[str, str]]:
    facts = [
        ("write mode", str(report.write_mode)),
        ("prefix-hit tokens", f"{report.hit_tokens:,} ({report.hit_ratio:.2%} of the prompts)"),
        ("not stored", f"{report.unstored_blocks:,} blocks"),
        ("dirty blocks lost", f"{report.dropped_dirty_blocks:,} blocks"),
    ]
    if report.prefill_s_saved is None:
        facts.append(("prefill saved, TTFT", "unknown: give --prefill-tokens-per-s"))
    else:
        facts += [
            ("prefill saved", f"{report.prefill_s_saved:,.0f} s"),
            ("TTFT", _quantiles(report.ttft_s)),
            ("TTFT without a cache", _quantiles(report.ttft_without_s)),
            (
                "load or recompute",
                f"{report.requests_loaded:,} requests loaded from below, "
                f"{report.requests_recomputed:,} computed instead",
            ),
        ]
    for even in report.break_even:
        text = f"a model above {even.prefill_tokens_per_s:,.0f} tokens/s computes faster"
        if round(even.least_tokens or 0) > 0:
            text += f"; so does this one below {even.least_tokens:,.0f} tokens"
        facts.append((f"break-even of {even.tier}", text))
    return facts


def print_sweep(points: Sequence[SweepPoint]) -> None:
    """Print the hit ratio by size and policy."""
    policies = list(dict.fromkeys(point.policy for point in points))
    table = Table(title=f"prefix-hit tokens by size of {points[0].tier}")
    table.add_column("size", justify="right")
    for policy in policies:
        table.add_column(policy, justify="right")
    ratios = {(point.capacity_bytes, point.policy): point.report.hit_ratio for point in points}
    for capacity in sorted({point.capacity_bytes for point in points}):
        row = [f"{ratios[capacity, policy]:.2%}" for policy in policies]
        table.add_row(sizes.human(capacity), *row)
    show.console().print(table)


def write_csv(points: Sequence[SweepPoint], path: Path) -> None:
    """Write one line per run as CSV. Raises the mapped form of an `OSError`."""
    with os_errors(f"writing {path}"), path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(CSV_FIELDS)
        for point in points:
            report = point.report
            (tier,) = (tier for tier in report.tiers if tier.name == point.tier)
            ttft = report.ttft_s
            writer.writerow(
                [
                    *(point.tier, point.capacity_bytes, point.policy, f"{report.hit_ratio:.6f}"),
                    *(report.hit_tokens, report.input_tokens),
                    *(tier.written_bytes, tier.read_bytes),
                    *(("", "") if ttft is None else (f"{ttft.p50:.6f}", f"{ttft.p99:.6f}")),
                ]
            )


def write_png(points: Sequence[SweepPoint], path: Path) -> None:
    """Draw the hit-rate curve as PNG, or as SVG if the name ends so.

    Raises `CommandError` without matplotlib, and the mapped form of an `OSError`.
    """
    figure = new_figure(7.6, 4.4)
    sizes_bytes = sorted({point.capacity_bytes for point in points})
    lines: dict[str, tuple[list[int], list[float]]] = {}
    for point in sorted(points, key=lambda point: point.capacity_bytes):
        places, ratios = lines.setdefault(point.policy, ([], []))
        places.append(point.capacity_bytes)
        ratios.append(point.report.hit_ratio)
    axes = draw_ratios(figure, lines, f"size of {points[0].tier}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes_bytes, [f"{size / (1 << 30):g} GiB" for size in sizes_bytes])
    axes.minorticks_off()
    head(figure, show.plain(points[0].report.trace), "prompt tokens found, of all prompt tokens")
    save(figure, path)


def _rate(rate: Rate | None) -> str:
    """Return a rate as text, such as `3 GB/s + 0.1 ms, assumed`."""
    if rate is None:
        return UNKNOWN
    shown = "instant" if math.isinf(rate.bytes_per_s) else f"{rate.bytes_per_s / 1e9:.3g} GB/s"
    latency = f" + {rate.latency_s * 1e3:g} ms" if rate.latency_s else ""
    return f"{shown}{latency}, {rate.source}"


def _budget(bytes_per_day: int | None) -> str:
    return "none" if bytes_per_day is None else f"{sizes.human(bytes_per_day)} in 24 h"


def _quantiles(found: Quantiles | None) -> str:
    if found is None:
        return UNKNOWN
    named = (("mean", found.mean), ("p50", found.p50), ("p90", found.p90), ("p99", found.p99))
    return ", ".join(f"{name} {value:.3f} s" for name, value in named)


def _figure(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)
