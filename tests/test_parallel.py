"""The shares of the test processes: every engine test is in one of them, files stay whole."""

from __future__ import annotations

import ast
from importlib import import_module
from types import SimpleNamespace

from support.parallel import ENGINES, LENGTHY, engine_files, is_shared, scope_of
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
            if starts and name not in engine_files():
                unmarked.append(name)
    assert seen and not unmarked


def test_a_file_is_not_divided_and_one_process_has_all_engines() -> None:
    assert scope_of("tests/nvme/test_twin.py::T::test_c[x::y]") == "tests/nvme/test_twin.py"
    assert scope_of("tests/vllm/test_engine.py::test_c") == ENGINES
    assert scope_of("tests/identity/test_engine_identity.py::test_c[1]") == ENGINES


def test_the_processes_of_xdist_share_the_tests() -> None:
    option = SimpleNamespace(dist="loadgroup")
    config = SimpleNamespace(option=option, getvalue=lambda name: getattr(option, name))
    assert not is_shared(config), "the process that hands tests out"
    import_module("xdist.remote").setup_config(config, None)
    assert is_shared(config)
