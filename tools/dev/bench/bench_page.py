"""Pages of figures, made from the JSON that `kvcascade bench` saves.

    python -m kvcascade.tools.dev.bench.bench_page docs/benchmarks/2-cores-quick.json

prints one page. The site makes a page of each JSON file in `docs/benchmarks/`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from ...commands.bench.bench_report import NOTHING, TITLES, number
from ...commands.bench.bench_results import CONTENDERS, OURS
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
                ["repetitions", str(document["repeats"])],
                ["duration", f"{document['seconds']:.0f} s"],
            ],
        ),
        *(f"Note of the run: {note}" for note in document["notes"]),
    ]
    for measurement in document["measurements"]:
        parts += [f"## {measurement['title']}", measurement["note"]]
        for case, rows in groupby(measurement["rows"], key=itemgetter("case")):
            parts += [f"### {case}", _rows(rows)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _rows(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the rows of a case; a contender without any figure has no column."""
    rows = list(rows)
    there = [who for who in CONTENDERS if any(who in row["median"] for row in rows)]
    head = ["quantity", *(TITLES[who] for who in there)]
    others = [who for who in there if who != OURS]
    head += [*(f"ours / {TITLES[who]}" for who in others), "unit", "goal"]
    lines = [
        [
            row["quantity"],
            *(_figure(row, who) for who in there),
            *(_ratio(row, who) for who in others),
            row["unit"],
            ", ".join(f"{each['goal']} {'✓' if each['met'] else '✗'}" for each in row["goals"]),
        ]
        for row in rows
    ]
    return _table(head, lines)


def _figure(row: Mapping[str, Any], who: str) -> str:
    if who not in row["median"]:
        return NOTHING
    middle, spread = row["median"][who], row["spread"][who]
    return f"{number(middle)} ±{spread:.0%}" if spread else number(middle)


def _ratio(row: Mapping[str, Any], who: str) -> str:
    ratio = row["ratio"].get(who)
    return NOTHING if ratio is None else f"{number(ratio)}×"


def _table(head: list[str], lines: Iterable[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)


def main(paths: Iterable[str]) -> None:
    """Print the page of each JSON file."""
    for path in map(Path, paths):
        print(page(path.name, json.loads(path.read_text())))


if __name__ == "__main__":
    main(sys.argv[1:])
