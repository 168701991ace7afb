"""Only `generation` compares vLLM's versions and looks for names in vLLM's modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from support.project import ROOT

HOME = "generation.py"
MODULES = sorted((ROOT / "kvcascade" / "vllm").glob("*.py"))
IMPORT_FAULTS = {"ImportError", "ModuleNotFoundError", "AttributeError"}


def gates(tree: ast.Module) -> Iterator[str]:
    """Every comparison of a version, look for a name, and import that may fail."""
    theirs = set(names_of_vllm(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and mentions_version(node):
            yield f"line {node.lineno} compares versions"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("hasattr", "getattr") and root_of(node.args[0]) in theirs:
                yield f"line {node.lineno} looks for a name of vLLM"
        if isinstance(node, ast.Try) and faults_of(node) & IMPORT_FAULTS and imports_vllm(node):
            yield f"line {node.lineno} tries whether vLLM has a module"


def names_of_vllm(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from (alias.asname or alias.name for alias in node.names if not node.level)
        if isinstance(node, ast.Import):
            yield from (
                (alias.asname or alias.name).split(".")[0]
                for alias in node.names
                if alias.name.split(".")[0] == "vllm"
            )


def mentions_version(node: ast.AST) -> bool:
    names = {getattr(each, "id", getattr(each, "attr", "")) for each in ast.walk(node)}
    return any("version" in name.lower() for name in names)


def root_of(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def faults_of(node: ast.Try) -> set[str]:
    kinds = [each for handler in node.handlers if handler.type for each in ast.walk(handler.type)]
    return {kind.id for kind in kinds if isinstance(kind, ast.Name)}


def imports_vllm(node: ast.Try) -> bool:
    return bool(list(names_of_vllm(ast.Module(node.body, []))))


@pytest.mark.parametrize("name", [path.name for path in MODULES if path.name != HOME])
def test_no_gate_outside_its_home(name: str) -> None:
    path = ROOT / "kvcascade" / "vllm" / name
    assert not list(gates(ast.parse(path.read_text(encoding="utf-8"))))


@pytest.mark.parametrize(
    "code",
    [
        "from .generation import vllm_version\nnew = vllm_version() >= (0, 31)",
        "import vllm\nold = vllm.__version__ < '0.30'",
        "from vllm.v1.kv_offload import base\nmedium = getattr(base, 'Medium', None)",
        "from vllm.v1.kv_offload.base import OffloadingManager as M\nhasattr(M, 'lock')",
        "try:\n    from vllm.v1.kv_offload import config\nexcept ImportError:\n    config = None",
    ],
)
def test_gates_are_seen(code: str) -> None:
    assert len(list(gates(ast.parse(code)))) == 1


def test_the_home_is_there() -> None:
    assert HOME in [path.name for path in MODULES]
    assert len(MODULES) > 10
