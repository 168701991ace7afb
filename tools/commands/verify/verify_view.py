"""Results of `kvcascade verify`, for people."""

from __future__ import annotations

from rich.text import Text

from .. import show
from .verify_report import VerifyReport

MAX_SHOWN = 20
"""Number of blocks to print; `--json` lists all."""


def print_verified(report: VerifyReport) -> None:
    """Print the results of one namespace."""
    console = show.console()
    rate = report.bytes_read / report.seconds if report.seconds else 0.0
    console.print(Text(report.name, style="bold"))
    if report.problem is not None:
        console.print(Text(f"  {report.problem}", style="red"))
    if not report.space:  # nothing was verified
        return
    rows = [
        ("blocks", f"{report.blocks:,}, of which {report.ok:,} are intact"),
        ("read", f"{show.size(report.bytes_read)} in {show.duration(report.seconds)}"),
        ("rate", f"{show.size(rate)}/s"),
        ("free space", report.space),
    ]
    if report.changed:
        rows.append(("changed meanwhile", f"{report.changed:,} blocks"))
    if report.dropped:
        rows.append(("dropped", f"{report.dropped:,} blocks"))
    if report.dropped_at_opening:
        rows.append(("segments missing", f"{report.dropped_at_opening:,} blocks were removed"))
    console.print(show.facts("", rows))
    for path, problem in report.segments_damaged.items():
        console.print(Text(f"  {path}: {problem}", style="red"))
    if report.problems:
        table = show.columns("Problems", "block", "slot", "problem", right=["slot"])
        for each in report.problems[:MAX_SHOWN]:
            table.add_row(each.hash, str(each.slot), str(each.problem))
        console.print(table)
        more = len(report.problems) - MAX_SHOWN
        if more > 0:
            console.print(f"  and {more:,} more (--json lists all)")
    verdict = "no problems found" if report.is_clean else "problems found"
    style = "green" if report.is_clean else "red"
    console.print(Text(f"  {verdict}", style=style))
