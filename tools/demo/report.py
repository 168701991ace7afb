"""How the demo speaks: progress while it runs, a table at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .results import Phase, Times

PLAIN_WIDTH = 160
"""Columns where the output is not a terminal."""
PLAIN_STEPS = 4
"""Lines of progress per phase where the output is not a terminal."""


class Count(Protocol):
    """Takes note of requests that were answered."""

    def __call__(self, answered: int) -> None: ...


class Reporter:
    """Prints progress: bars on a terminal, lines anywhere else."""

    def __init__(self, console: Console | None = None) -> None:
        plain = Console()
        self.console = console or (plain if plain.is_terminal else Console(width=PLAIN_WIDTH))

    def say(self, text: str) -> None:
        """One line."""
        self.console.print(text, highlight=False, markup=False)

    @contextmanager
    def requests(self, total: int) -> Iterator[Count]:
        """Progress over so many requests; the value counts those that were answered."""
        if not self.console.is_terminal:
            yield self._plain_count(total)
            return
        columns = (TextColumn("    requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True) as progress:
            task = progress.add_task("requests", total=total)
            yield lambda answered: progress.advance(task, answered)

    def _plain_count(self, total: int) -> Count:
        done = 0

        def count(answered: int) -> None:
            nonlocal done
            before, done = done, done + answered
            if before * PLAIN_STEPS // total != done * PLAIN_STEPS // total:
                self.say(f"    {done} of {total} requests answered")

        return count


def table(phases: Sequence[Phase]) -> Table:
    """The phases side by side."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False)
    made.add_column("phase")
    for heading in (
        "requests", "prompt\ntokens", "from\nGPU", "from\nCPU tier", "from\nNVMe tier",
        "recom-\nputed", "TTFT ms\np50", "\np95", "without\np50", "\np95",
        "NVMe MiB\nwritten", "\nread", "wrong\ntokens",
    ):  # fmt: skip
        made.add_column(heading, justify="right", no_wrap=True)
    for phase in phases:
        made.add_row(f"({phase.key}) {phase.title}", *_cells(phase))
    return made


def _cells(phase: Phase) -> list[str]:
    sources = phase.sources
    is_reference = not phase.needs_nvme
    return [
        str(len(phase.replies)),
        *(
            f"{tokens:,}"
            for tokens in (
                phase.prompt_tokens, sources.gpu, sources.cpu, sources.nvme, sources.recomputed,
            )
        ),
        *_milliseconds(phase.ttft),
        *(("", "") if is_reference else _milliseconds(phase.reference_ttft)),
        *(f"{count / 2**20:.1f}" for count in (phase.written_bytes, phase.read_bytes)),
        str(phase.wrong_tokens),
    ]  # fmt: skip


def _milliseconds(values: Times) -> tuple[str, str]:
    return f"{values.p50_s * 1000:.0f}", f"{values.p95_s * 1000:.0f}"


LEGEND = (
    "TTFT: from the arrival of a request at the engine's front end to its first token there; "
    "(a) shows all requests,\n"
    '"without" the same requests as the phase, answered by (a), the engine without offloading.'
)
