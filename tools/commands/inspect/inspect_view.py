"""`kvcascade inspect` as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Group
from rich.table import Table
from rich.text import Text

from .. import show
from .namespace_report import NamespaceReport

MAX_FIELD_CHARS = 200
HISTOGRAM_CELLS = 12


def print_reports(reports: Sequence[NamespaceReport]) -> None:
    """Print all namespaces of a path."""
    console = show.console()
    for report in reports:
        if report.state.startswith("version"):
            console.print(Text(_other_version(report)))
            continue
        console.print(Text(report.name, style="bold"))
        console.print(f"  {', '.join(report.paths)}", style="dim")
        if report.problem:
            console.print(Text(f"  {report.problem}", style="red"))
        console.print(_render(report))


def print_path(about: Mapping[str, Any]) -> None:
    """Print the options in force of a path, and its writer."""
    budget = about["write_budget_bytes"]
    left = f"{show.size(about['budget_left_bytes'])} left of {show.size(budget)} in a day"
    rows = [
        ("writer", about["writer"] or "none but this command"),
        ("in use", f"{show.size(about['used_bytes'])} of {show.size(about['capacity_bytes'])}"),
        ("write budget", "none" if budget is None else left),
        ("policy", about["policy"]),
        ("durability", about["durability"]),
    ]
    show.console().print(show.facts(f"Path {', '.join(about['paths'])}", rows))


def print_differences(names: tuple[str, str], found: Mapping[str, tuple[Any, Any]]) -> None:
    """Print the fingerprint fields that differ, for `--why`."""
    console = show.console()
    if not found:
        console.print("Every field of the two fingerprints is equal: they share blocks.")
        return
    table = show.columns("Fields that differ", "field", *names)
    for name, (one, other) in found.items():
        table.add_row(name, _cut(one), _cut(other))
    console.print(table)


def _other_version(report: NamespaceReport) -> str:
    removal = f"kvcascade gc {Path(report.paths[0]).parent} -n {report.name} --remove-namespace"
    return f"{report.name}: {report.state}, {show.size(report.disk_bytes)}; `{removal}` clears it"


def _render(report: NamespaceReport) -> Group:
    parts: list[Table | Columns] = [show.facts("", _facts(report))]
    if report.policies:
        parts.append(_policies(report))
    if report.blocks:
        counted = (
            ("Time since write", report.age),
            ("Time since last use", report.idle),
            ("Used", report.reuse),
        )
        parts.append(Columns([_histogram(*each) for each in counted], padding=(0, 4)))
    fields = [(name, _cut(value)) for name, value in report.fields.items()]
    if fields:
        parts.append(show.facts("Fingerprint fields", fields))
    return Group(*parts)


def _facts(report: NamespaceReport) -> list[tuple[str, str]]:
    """Return the known facts as rows; an unreadable namespace has few."""
    engines = ", ".join(report.engines)
    rows = [("state", report.state + (f", open in {engines}" if engines else ""))]
    if report.fingerprint:
        made = f"{report.created[:19]} ({show.duration(report.age_s)} ago)"
        rows += [("label", report.label), ("fingerprint", report.fingerprint), ("made", made)]
    if report.blocks is not None:
        rows += [("blocks", _occupancy(report)), ("payload", show.size(report.payload_bytes))]
    if report.block_bytes is not None:
        rows.append(("block size", f"{report.block_bytes:,} bytes"))
    rows += [
        ("on disk", f"{show.size(report.disk_bytes)}, index {show.size(report.index_bytes)}"),
        ("segments", _segments(report)),
    ]
    if report.written_bytes is not None:
        rows += _life(report)
    return rows


def _occupancy(report: NamespaceReport) -> str:
    """Return the occupancy relative to the capacity, if an engine recorded it; segment files are
    created on demand."""
    made = "" if report.capacity_slots else " of the files so far"
    use = f"{show.bar(report.used_share)} {report.used_share:.0%}"
    return f"{report.blocks:,} of {report.room:,} slots{made}  {use}"


def _life(report: NamespaceReport) -> list[tuple[str, str]]:
    """Return rows about the reads and writes of the namespace so far."""
    day = (report.written_bytes_last_day, report.read_bytes_last_day)
    rows = [
        ("dirty", _dirty(report.dirty_share)),
        ("written / read", f"{show.size(report.written_bytes)} / {show.size(report.read_bytes)}"),
        ("last 24 hours", " / ".join(map(show.size, day))),
        ("endurance", _endurance(report)),
        ("opened", f"{report.sessions} times, {report.epoch} resets"),
    ]
    for group in report.groups:
        tokens = show.UNKNOWN if group.tokens is None else f"{group.tokens:,}"
        rows.append((f"KV group {group.group}", f"{group.blocks:,} blocks, {tokens} tokens"))
    return rows


def _dirty(share: float | None) -> str:
    if share is None:
        return f"{show.UNKNOWN} (only a running engine knows; give the --url of its metrics)"
    return f"{share:.0%} of the CPU tier's slots are dirty"


def _segments(report: NamespaceReport) -> str:
    slots = "" if report.slots is None else f" with {report.slots:,} slots"
    text = show.UNKNOWN if report.segments is None else f"{report.segments} files{slots}"
    if report.segments_damaged:
        text += f", damaged: {', '.join(map(str, report.segments_damaged))}"
    if report.parts is not None and report.parts > 1:
        text += f", over {report.parts} paths"
    if report.parts_missing:
        text += f"; parts {', '.join(map(str, report.parts_missing))} not given (use --also)"
    return text


def _endurance(report: NamespaceReport) -> str:
    if report.written_bytes_per_day is None:
        lived = f"{show.size(report.written_bytes)} in its first {show.duration(report.age_s)}"
        return show.UNKNOWN if report.age_s is None else f"{lived}; per day after an hour"
    text = f"{show.size(report.written_bytes_per_day)} per day since its creation"
    if report.drive_writes_per_day is None:
        return text
    return f"{text}, {report.drive_writes_per_day:.3g} drive writes per day"


def _policies(report: NamespaceReport) -> Table:
    table = show.columns("Policy state", "policy", "slots", "arrays", "size", right=["slots"])
    for policy in report.policies:
        held, arrays = f"{policy['held']:,}", str(policy["arrays"])
        table.add_row(policy["name"], held, arrays, show.size(policy["bytes"]))
    return table


def _histogram(title: str, counts: Mapping[str, int]) -> Table:
    table = show.columns(title, "", "blocks", "", right=["blocks"])
    most = max([1, *counts.values()])
    for name, count in counts.items():
        table.add_row(name, f"{count:,}", show.bar(count / most, HISTOGRAM_CELLS))
    return table


def _cut(value: Any) -> str:
    text = "–" if value is None else str(value)
    return text if len(text) <= MAX_FIELD_CHARS else f"{text[:MAX_FIELD_CHARS]}…"
