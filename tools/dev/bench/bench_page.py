"""Pages of figures, made from the JSON that `kvcascade bench` saves.

    python -m kvcascade.tools.dev.bench.bench_page docs/benchmarks/2-cores-quick.json

prints one page. The site makes a page of each JSON file in `docs/benchmarks/`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from ...commands.bench.bench_report import table_cells
from ...commands.bench.machine_facts import headline


def page(name: str, document: dict[str, Any]) -> str:
    """Return the page of one run in Markdown; `name` is the file name of its JSON."""
    machine = document["machine"]
    load = ", ".join(f"{value:.2f}" for value in machine["load_average"])
    versions = ", ".join(f"{key} {value}" for key, value in document["versions"].items())
    parts = [
        f"# Benchmark: {name.removesuffix('.json')}",
        f"Made from [{name}]({name}), which holds every sample.",
        _table(
            ["run", ""],
            [
                ["command", f"`{document['command']}`"],
                ["date", document["date"]],
                ["machine", headline(document)],
                ["kernel", machine["kernel"]],
                ["load average at the start (1, 5, 15 min)", load],
                ["versions", versions],
                ["duration", f"{document['seconds']:.0f} s"],
            ],
        ),
        *(f"Note of the run: {note}" for note in document["notes"]),
    ]
    for measurement in document["measurements"]:
        parts += [f"## {measurement['title']}", measurement["note"]]
        for case, rows in groupby(measurement["rows"], key=itemgetter("case")):
            found = list(rows)
            parts += [f"### {case}", samples_of(found), _table(*table_cells(found))]
    return "\n\n".join(part for part in parts if part) + "\n"


def samples_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return in words how often rows were measured; nothing if they were not.

    A case may have a number of its own.
    """
    counts = sorted({len(each) for row in rows for each in row["samples"].values()})
    if not counts:
        return ""
    if counts[-1] == 1:
        return "One sample."
    return f"Medians of {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} samples."


def _table(head: list[str], lines: Iterable[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)


def main(paths: Iterable[str]) -> None:
    """Print the page of each JSON file."""
    for path in map(Path, paths):
        print(page(path.name, json.loads(path.read_text())))


if __name__ == "__main__":
    main(sys.argv[1:])
