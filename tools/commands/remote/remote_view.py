"""Tables of `kvcascade remote`."""

from __future__ import annotations

from datetime import UTC, datetime

from rich.text import Text

from ....tiers.base import RESET_TICKS_PER_S
from ....tiers.remote.objects import parts_of
from .. import show
from ..verify.verify_view import MAX_SHOWN
from .collect_remote import RemoteCollected
from .examine_object import Verdict
from .remote_contents import GenerationReport, RemoteContents
from .verify_remote import RemoteVerified

SHOWN_DIGITS = 12
"""Digits of a namespace that tables show, and that `-n` takes; `--json` has all 32."""
_VERDICTS = {
    Verdict.OK: "intact",
    Verdict.NO_KEY: "intact, not authenticated: that needs the secret key",
    Verdict.OTHER_KEY: "intact, of another secret key or forged",
    Verdict.CORRUPT: "damaged",
    "absent": "gone meanwhile",
}


def print_contents(found: RemoteContents) -> None:
    """Print a row for each generation."""
    if not found.generations:
        print("no blocks there")
        return
    numbers = ["blocks", "size", "oldest", "newest"]
    table = show.columns("", "namespace", "generation", "state", *numbers, right=numbers)
    for each in found.generations:
        ages = (show.duration(age) for age in (each.oldest_age_s, each.newest_age_s))
        size = show.size(each.size_bytes)
        table.add_row(
            each.namespace[:SHOWN_DIGITS],
            _began(each),
            str(each.state),
            f"{each.blocks:,}",
            size,
            *ages,
        )
    console = show.console()
    console.print(table)
    blocks = sum(each.blocks for each in found.generations)
    size_bytes = sum(each.size_bytes for each in found.generations)
    console.print(f"  {blocks:,} blocks, {show.size(size_bytes)}")


def _began(report: GenerationReport) -> str:
    """Return when a generation began: its counter is about the Unix time in microseconds."""
    counter, was_reset = parts_of(report.generation)
    suffix = ", reset engines" if was_reset else ""
    try:
        began = datetime.fromtimestamp(counter / RESET_TICKS_PER_S, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{counter:,}{suffix}"
    return f"{began:%Y-%m-%d %H:%M:%S}{suffix}"


def print_verified(report: RemoteVerified) -> None:
    """Print counts by outcome, and the damaged blocks."""
    console = show.console()
    rate = report.bytes_read / report.seconds if report.seconds else 0.0
    rows = [
        ("blocks", f"{report.listed:,}, of which {report.read:,} were read"),
        ("read", f"{show.size(report.bytes_read)} in {show.duration(report.seconds)}"),
        ("rate", f"{show.size(rate)}/s"),
    ]
    for outcome, count in sorted(report.outcomes.items()):
        rows.append((f"{count:,}", _VERDICTS.get(outcome, outcome.replace("_", " "))))
    if report.removed:
        rows.append(("removed", f"{report.removed:,} damaged blocks"))
    console.print(show.facts("", rows))
    for name in report.damaged[:MAX_SHOWN]:
        console.print(Text(f"  damaged: {name}", style="red"), soft_wrap=True)
    more = report.outcomes.get(Verdict.CORRUPT, 0) - MAX_SHOWN
    if more > 0:
        console.print(f"  and {more:,} more (--json lists them)")
    verdict = "no problems found" if report.is_clean else "problems found"
    console.print(Text(f"  {verdict}", style="green" if report.is_clean else "red"))


def print_collected(report: RemoteCollected) -> None:
    """Print what left, or would leave, each namespace."""
    console = show.console()
    title = "Would be removed" if report.is_dry_run else "Removed"
    numbers = ["blocks", "of", "old generations", "bytes"]
    table = show.columns(title, "namespace", *numbers, right=numbers)
    for each in report.namespaces:
        counts = (each.blocks_removed, each.blocks_before, each.old_blocks_removed)
        shown = [f"{count:,}" for count in counts]
        table.add_row(each.namespace[:SHOWN_DIGITS], *shown, show.size(each.bytes_freed))
    console.print(table)
    if report.staged_removed:
        said = f"{report.staged_removed:,} incomplete files of writers that died"
        console.print(Text(f"  {said}: {show.size(report.staged_bytes)}"))
    if report.unknown_ages:
        said = f"the server knows no age of {report.unknown_ages:,} blocks"
        console.print(Text(f"  {said}; they leave only with a generation", style="yellow"))
    if report.failed:
        console.print(Text(f"  {report.failed:,} blocks could not be removed", style="red"))
    console.print(Text(f"  {report.note}", style="dim"))
