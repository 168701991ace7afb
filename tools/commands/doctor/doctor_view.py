"""Print the findings of `kvcascade doctor`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from .. import show
from .findings import Finding, Severity

STYLES = {Severity.OK: "green", Severity.ADVICE: "yellow", Severity.PROBLEM: "red"}
MARKS = {Severity.OK: "ok", Severity.ADVICE: "advice", Severity.PROBLEM: "PROBLEM"}
MARK_WIDTH = 8


def print_findings(found: Sequence[Finding]) -> None:
    """Print one line for each finding, its remedy below it, and a summary."""
    console = show.console()
    for each in found:
        line = Text(MARKS[each.severity].ljust(MARK_WIDTH), style=STYLES[each.severity])
        line.append(f"{each.subject}: {each.found}", style="default")
        console.print(line)
        if each.remedy:
            console.print(Text(f"{' ' * MARK_WIDTH}→ {each.remedy}"))
    problems = sum(each.severity is Severity.PROBLEM for each in found)
    advice = sum(each.severity is Severity.ADVICE for each in found)
    console.print(Text(f"\nproblems: {problems}, advice: {advice}"))
