"""The table of the demo."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from .demo_results import DemoTimes, Other, Phase

SAME = "–"
"""Cell of a comparison that was not made."""
WITHOUT, TIERING = "without offloading", "vLLM's tiering"


def table(phases: Sequence[Phase]) -> Table:
    """Return a table of the phases with one column each."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False)
    made.add_column("", no_wrap=True)
    for phase in phases:
        made.add_column(f"({phase.key})\n{phase.title}", justify="right")
    for name, cell in ROWS:
        made.add_row(name, *map(cell, phases))
    return made


def _tokens(source: str) -> Callable[[Phase], str]:
    return lambda phase: f"{getattr(phase.sources, source):,}"


def _both(values: DemoTimes) -> str:
    return f"{values.p50_s * 1000:.0f} / {values.p95_s * 1000:.0f}"


def _reference(cell: Callable[[Other], str]) -> Callable[[Phase], str]:
    return lambda phase: cell(phase.reference) if phase.needs else SAME


def _tiering(cell: Callable[[Other], str]) -> Callable[[Phase], str]:
    return lambda phase: SAME if phase.tiering is None else cell(phase.tiering)


def _recomputed(other: Other) -> str:
    return f"{other.sources.recomputed:,}"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f}"


ROWS: tuple[tuple[str, Callable[[Phase], str]], ...] = (
    ("requests", lambda phase: str(len(phase.replies))),
    ("prompt tokens", lambda phase: f"{phase.prompt_tokens:,}"),
    ("  from GPU cache", _tokens("gpu")),
    ("  from CPU tier", _tokens("cpu")),
    ("  from NVMe tier", _tokens("nvme")),
    ("  from remote tier", _tokens("remote")),
    ("  recomputed", _tokens("recomputed")),
    (f"    {WITHOUT}", _reference(_recomputed)),
    (f"    {TIERING}", _tiering(_recomputed)),
    ("TTFT p50 / p95, ms", lambda phase: _both(phase.ttft)),
    (f"  {WITHOUT}", _reference(lambda other: _both(other.ttft))),
    (f"  {TIERING}", _tiering(lambda other: _both(other.ttft))),
    ("MiB written to NVMe", lambda phase: _mebibytes(phase.written_bytes)),
    ("MiB read from NVMe", lambda phase: _mebibytes(phase.read_bytes)),
    ("MiB written to remote", lambda phase: _mebibytes(phase.remote_written_bytes)),
    ("MiB read from remote", lambda phase: _mebibytes(phase.remote_read_bytes)),
    ("wrong tokens", lambda p: str(p.wrong_tokens) if p.needs else SAME),
    (f"  {TIERING}", _tiering(lambda other: str(other.wrong_tokens))),
)
"""Rows of the table: title, and function that returns a phase's cell."""

LEGEND = (
    "TTFT: from sending a request to the arrival of its first token. Without offloading: the same\n"
    "requests in (a). vLLM's tiering: the same requests to a server with vLLM's CPU and fs tiers."
)
