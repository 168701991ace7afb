"""Pages of figures, as the site makes them of the committed JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcascade.tools.commands.bench.bench_results import (
    LIMIT,
    OURS,
    VLLM,
    Goal,
    Quantity,
    Row,
    Table,
    document,
)
from kvcascade.tools.dev.bench import BenchOptions, command_of
from kvcascade.tools.dev.bench.bench_page import main, page

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
RUNS = sorted(FOLDER.glob("*.json"))
MACHINE = {
    "processor": "A processor",
    "cores": 2,
    "memory_bytes": 8 << 30,
    "shared_memory_free_bytes": 4 << 30,
    "load_average": [0.1, 2.0, 3.456],
    "kernel": "6.1",
    "file_system": "ext4",
}


def made() -> dict[str, Any]:
    """A document with one row for each kind of cell."""
    quantity = Quantity("rate", "GB/s", (Goal(0.9, LIMIT, is_least=True),), is_more_better=True)
    rows = [
        Row("64 KiB | two paths", quantity, {OURS: [1.0, 2.0], LIMIT: [2.0, 4.0]}),
        Row("nothing", Quantity("rate", "GB/s"), {}),
    ]
    facts = {
        "date": "2031-05-04",
        "command": "kvcascade bench --quick",
        "machine": MACHINE,
        "versions": {"python": "3.11.2", "vllm": "0.32.0", "kvcascade": "0.1.0"},
        "repeats": 2,
        "notes": ["the disk was busy"],
        "seconds": 61.4,
    }
    return document([Table("transfers", "Transfers", "How.", rows)], facts)


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_a_committed_run_makes_a_page_with_every_row(path: Path) -> None:
    run = json.loads(path.read_text())
    text = page(path.name, run)
    rows = [row for measurement in run["measurements"] for row in measurement["rows"]]
    assert rows and run["command"] in text
    for row in rows:
        section = text.partition(f"### {row['case']}\n")[2]
        assert f"| {row['quantity']} |" in section
        counts = {len(samples) for samples in row["samples"].values()}
        if counts == {1}:
            assert section.lstrip().startswith("One sample.")


def test_every_committed_run_is_listed_for_readers_of_the_repository() -> None:
    listed = (FOLDER / "README.md").read_text()
    assert RUNS and all(f"]({path.name})" in listed for path in RUNS)


def test_a_page_names_run_figures_and_goals() -> None:
    lines = page("2031.json", made()).splitlines()
    assert lines[0] == "# Benchmark: 2031"
    assert "| command | `kvcascade bench --quick` |" in lines
    assert "| date | 2031-05-04 |" in lines
    assert "| load average at the start (1, 5, 15 min) | 0.10, 2.00, 3.46 |" in lines
    assert "Note of the run: the disk was busy" in lines
    begin = lines.index("## Transfers")
    assert lines[begin + 2] == "How."
    assert lines[begin + 4] == "### 64 KiB | two paths"
    assert lines[begin + 6] == "Medians of 2 samples."
    assert lines[begin + 8] == "| quantity | ours | limit | ours / limit | unit | goal |"
    row = "| rate | 1.50 ±33% | 3.00 ±33% | 0.500× | GB/s | ≥ 0.9× limit ✗ |"
    assert lines[begin + 10] == row
    assert lines[begin + 12] == "### nothing"
    assert lines[begin + 16] == "| rate | GB/s |  |"
    assert not any(VLLM in line for line in lines[begin:]), "it has no figure, and no column"


def test_the_command_prints_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "run.json"
    source.write_text(json.dumps(made()))
    main([str(source)])
    assert capsys.readouterr().out.strip() == page("run.json", made()).strip()


def test_the_command_of_a_run_has_its_options_and_no_folder() -> None:
    options = BenchOptions(
        quick=True, only=("busy",), repeats=3, minutes=7.5, path=Path("/mnt/nvme")
    )
    words = "--only busy --repeats 3 --minutes 7.5"
    assert command_of(options) == f"kvcascade bench --quick {words}"
    assert command_of(BenchOptions()) == "kvcascade bench"
    timed = BenchOptions(only=("gpu",), minutes=20.0)
    assert command_of(timed) == "kvcascade bench --only gpu --minutes 20"
