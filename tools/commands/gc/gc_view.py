"""`kvcascade gc` as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from .. import show
from .collect import GcReport


def print_collected(reports: Sequence[GcReport], is_dry_run: bool) -> None:
    """What went, or would go."""
    title = "Would be removed" if is_dry_run else "Removed"
    names = ["blocks", "of", "segments", "freed", "last use, ago"]
    table = show.columns(title, "namespace", *names, "", right=names)
    for report in reports:
        note = "the whole namespace" if report.was_removed else report.skipped
        cells = (report.blocks_removed, report.blocks_before, report.segments_removed)
        shown = [show.UNKNOWN if cell is None else f"{cell:,}" for cell in cells]
        hottest = show.duration(report.hottest_idle_s)
        table.add_row(report.name, *shown, show.size(report.bytes_freed), hottest, Text(note))
    show.console().print(table)
