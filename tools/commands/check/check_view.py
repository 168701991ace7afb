"""`kvcascade check` as tables."""

from __future__ import annotations

from rich.text import Text

from .. import show
from .config_check import CheckReport


def print_checked(report: CheckReport) -> None:
    """What a configuration comes to, or what is wrong with it."""
    console = show.console()
    if report.problems:
        for problem in report.problems:
            console.print(Text(problem, style="red"))
        for doubt in report.doubts:
            console.print(Text(f"  {doubt}", style="yellow"))
        return
    numbers = ["capacity", "blocks", "tokens", "files"]
    table = show.columns("Tiers", "tier", "where", "policy", *numbers, right=numbers)
    for tier in report.tiers:
        counts = (tier.blocks, tier.tokens, tier.segments)
        shown = [show.NOTHING if count is None else f"{count:,}" for count in counts]
        table.add_row(tier.tier, tier.where, tier.policy, show.size(tier.capacity_bytes), *shown)
    console.print(table)
    rows = [("pinned memory", show.size(report.pinned_bytes))]
    if report.block_bytes is not None:
        rows.insert(0, ("block", f"{report.tokens_per_block} tokens, {report.block_bytes:,} bytes"))
        rows.insert(0, ("KV per token", f"{report.bytes_per_token:,} bytes"))
    else:
        rows.insert(0, ("blocks and tokens", "give --model or --kv-bytes-per-token to see them"))
    if report.model is not None:
        rows.insert(0, ("model", report.model))
    if report.write_mode is not None:
        rows.append(("write mode", f"{report.write_mode} ({report.write_mode_reason})"))
        rows.append(("a stop may lose", f"{report.stop_may_lose}"))
        rows.append(("time to write at a stop", _time_to_stop(report.shutdown_timeout_s)))
    if report.prefault_bytes_per_s is not None:
        rate = f"{show.size(report.prefault_bytes_per_s)}/s"
        rows.append(("getting memory", f"{rate} (measured now)"))
    if report.start_s is not None:
        rows.append(("start, about", show.duration(report.start_s)))
    if report.start_after_crash_s is not None:
        rows.append(("after a crash, at most", show.duration(report.start_after_crash_s)))
    console.print(show.facts("", rows))
    for doubt in report.doubts:
        console.print(Text(f"  {doubt}", style="yellow"))
    console.print(Text("  The configuration fits this machine.", style="green"))


def _time_to_stop(needed_s: int | None) -> str:
    if needed_s is None:
        return "not wanted: shutdown_flush_s is 0"
    return (
        "none with vLLM's default --shutdown-timeout 0 (0.32 and later): it kills an engine as "
        f"soon as that is asked to stop; start it with --shutdown-timeout {needed_s}"
    )
