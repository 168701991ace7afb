"""Print the findings of `kvcascade doctor`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from .. import show
from .findings import Finding, Level

STYLES = {Level.OK: "green", Level.ADVICE: "yellow", Level.PROBLEM: "red"}
MARKS = {Level.OK: "ok", Level.ADVICE: "advice", Level.PROBLEM: "PROBLEM"}
MARK_WIDTH = 8


def print_findings(found: Sequence[Finding]) -> None:
    """Print one line for each finding, its remedy below it, and a summary."""
    console = show.console()
    for each in found:
        line = Text(MARKS[each.level].ljust(MARK_WIDTH), style=STYLES[each.level])
        line.append(f"{each.subject}: {each.found}", style="default")
        console.print(line)
        if each.remedy:
            console.print(Text(f"{' ' * MARK_WIDTH}→ {each.remedy}"))
    problems = sum(each.level is Level.PROBLEM for each in found)
    advice = sum(each.level is Level.ADVICE for each in found)
    console.print(Text(f"\nproblems: {problems}, advice: {advice}"))
