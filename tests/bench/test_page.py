"""Pages of figures: each committed page is what the command makes of the JSON beside it."""

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
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")
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


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_committed_page_is_made_from_its_json(path: Path) -> None:
    source = path.with_suffix(".json")
    assert path.read_text() == page(source.name, json.loads(source.read_text()))


def test_every_committed_json_has_its_page() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == {path.stem for path in PAGES}


def test_a_page_names_run_figures_and_goals() -> None:
    lines = page("2031.json", made()).splitlines()
    assert lines[0] == "# Benchmark: 2031"
    assert "| command | `kvcascade bench --quick` |" in lines
    assert "| date | 2031-05-04 |" in lines
    assert "| load average at the start (1, 5, 15 min) | 0.10, 2.00, 3.46 |" in lines
    assert "Note of the run: the disk was busy" in lines
    begin = lines.index("## Transfers")
    assert lines[begin + 2] == "| case | quantity | ours | limit | ours / limit | unit | goal |"
    assert lines[begin + 4] == (
        "| 64 KiB / two paths | rate | 1.50 ±33% | 3.00 ±33% | 0.500× | GB/s | ≥ 0.9× limit ✗ |"
    )
    assert lines[begin + 5] == "| nothing | rate | – | – | – | GB/s |  |"
    assert lines[begin + 7] == "How."
    assert not any(VLLM in line for line in lines[begin:]), "it has no figure, and no column"


def test_the_page_is_written_beside_its_json(tmp_path: Path) -> None:
    source = tmp_path / "run.json"
    source.write_text(json.dumps(made()))
    main([str(source)])
    assert (tmp_path / "run.md").read_text() == page("run.json", made())


def test_the_command_of_a_run_has_its_options_and_no_folder() -> None:
    nvme = {"io_threads": 8, "direct_io": False, "policy": "lru"}
    options = BenchOptions(
        quick=True, only=("busy",), repeats=3, minutes=7.5, nvme=nvme, path=Path("/mnt/nvme")
    )
    words = "--only busy --repeats 3 --minutes 7.5"
    nvme_words = "--nvme io_threads=8 --nvme direct_io=false --nvme policy=lru"
    assert command_of(options) == f"kvcascade bench --quick {words} {nvme_words}"
    assert command_of(BenchOptions()) == "kvcascade bench"
    timed = BenchOptions(only=("gpu",), minutes=20.0)
    assert command_of(timed) == "kvcascade bench --only gpu --minutes 20"
