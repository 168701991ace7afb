"""The shares of the test processes: every engine test is in one of them, files stay whole."""

from __future__ import annotations

import ast
from importlib import import_module
from types import SimpleNamespace

from support.parallel import LENGTHY, is_shared, scope_of
from support.project import ROOT, files

STARTERS = {"support.engine_rig": {"Engine"}, "support.server_rig": {"Server", "server"}}
"""Names that start a real engine."""


def test_lengthy_files_exist() -> None:
    assert not [name for name in LENGTHY if f"tests/{name}" not in files()]


def _starts_engines(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.ImportFrom)
        and STARTERS.get(node.module or "", set()) & {alias.name for alias in node.names}
        for node in tree.body
    )


def test_files_that_start_engines_say_so() -> None:
    unmarked, seen = [], 0
    for name in files():
        if name.startswith("tests/") and "/test_" in name and name.endswith(".py"):
            text = (ROOT / name).read_text(encoding="utf-8")
            starts = _starts_engines(ast.parse(text))
            seen += starts
            if starts and "pytest.mark.engine" not in text:
                unmarked.append(name)
    assert seen and not unmarked


def test_a_file_is_not_divided() -> None:
    assert scope_of("tests/a/test_b.py::T::test_c[x@y]") == "tests/a/test_b.py"
    assert scope_of("tests/a/test_b.py::test_c@engines") == "engines"


def test_the_processes_of_xdist_share_the_tests() -> None:
    option = SimpleNamespace(dist="loadgroup")
    config = SimpleNamespace(option=option, getvalue=lambda name: getattr(option, name))
    assert not is_shared(config), "the process that hands tests out"
    import_module("xdist.remote").setup_config(config, None)
    assert is_shared(config)
