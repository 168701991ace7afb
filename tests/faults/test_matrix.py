"""Every test that the fault matrix names is there, and every line of it names one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MATRIX = ROOT / "docs" / "reliability.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::([\w:]+)`")


def names_in(path: Path) -> set[str]:
    """Names of a module's tests, as pytest writes them."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef))
            found |= {f"{node.name}::{method.name}" for method in methods}
    return found


def test_every_test_of_the_matrix_exists() -> None:
    named = NAMED.findall(MATRIX.read_text())
    assert len(named) > 50
    missing = [f"{path}::{name}" for path, name in named if name not in names_in(ROOT / path)]
    assert not missing


def test_every_line_of_the_matrix_names_a_test() -> None:
    rows = [line for line in MATRIX.read_text().splitlines() if line.startswith("| ")]
    heads = [row for row in rows if row.startswith("| fault ")]
    assert len(heads) == 7 and len(rows) > 45
    assert [row for row in rows if row not in heads and not NAMED.search(row)] == []
