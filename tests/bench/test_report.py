"""Tables and progress."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvcascade.tools.commands.bench.bench_report import Reporter, number, render
from kvcascade.tools.commands.bench.bench_results import (
    LIMIT,
    OURS,
    VLLM,
    Goal,
    Quantity,
    Row,
    Table,
)


def printed(table: Table) -> str:
    """A table as it comes out of a pipe."""
    console = Console(file=io.StringIO(), width=120)
    console.print(render(table))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_table() -> None:
    goals = (Goal(0.5, VLLM), Goal(0.9, LIMIT, is_least=True))
    rows = [
        Row("small", Quantity("rate", "GB/s", goals), {OURS: [1.0, 2.0], VLLM: [8.0, 8.0]}),
        Row("large", Quantity("rate", "GB/s", goals), {OURS: [1.0], LIMIT: [2.0]}),
    ]
    lines = [line.rstrip() for line in printed(Table("t", "The title", "", rows)).splitlines()]
    assert lines[0] == "The title"
    heading = next(line.split() for line in lines if "unit" in line)
    assert "".join(heading) == "oursvLLMlimitours/vLLMours/limitunitgoal"
    small = next(line for line in lines[lines.index(" small") :] if "rate" in line)
    assert small.split()[1:] == "1.50 ±33% 8.00 – 0.188× – GB/s ≤ 0.5× vllm ✓".split()
    large = next(line for line in lines[lines.index(" large") :] if "rate" in line)
    assert large.split()[1:] == "1.00 – 2.00 – 0.500× GB/s ≥ 0.9× limit ✗".split()


def test_contenders_without_any_figure_have_no_column() -> None:
    text = printed(Table("t", "T", "", [Row("c", Quantity("q", "s"), {OURS: [1.0]})]))
    assert "ours" in text and "vLLM" not in text and "limit" not in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.12345, "0.123"), (1.2345, "1.23"), (12.345, "12.3"), (12345.6, "12,346")],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


def test_progress_in_a_pipe_comes_now_and_then() -> None:
    now = [0.0]
    console = Console(file=io.StringIO(), width=80)
    reporter = Reporter(console, lambda: now[0])
    with reporter.measuring("manager"):
        for second in range(12):
            now[0] = float(second)
            reporter.progress(f"at {second}")
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().split("\n") == [
        "manager ...",
        "    at 0",
        "    at 5",
        "    at 10",
        "",
    ]


def test_progress_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    reporter = Reporter(console)
    with reporter.measuring("manager"):
        reporter.progress("half way")
    assert reporter._status is None
