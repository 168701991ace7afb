"""Imports point one way: tools -> spec -> manager -> handlers -> tiers; vLLM and torch stay out.

The line is drawn over the source, so imports inside functions and for type checkers count too.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import pytest
from support.project import FOLDERS, ROOT, files, module_files, python_files_outside_tests

ORDER = ("base", "tiers", "handlers", "manager", "spec", "tools")
"""Layers from the bottom up; a module may import its own layer and those below."""

BASE = (
    "logs",
    "errors",
    "threads",
    "config.sizes",
    "config.options",
    "config.remote",
    "config.schema",
    "config.cgroup",
    "config.machine",
)
"""Modules that every layer may import, from the bottom up; each imports only those before it."""

ENGINE_FREE = ("tiers", "manager")
"""Folders that must not load torch: decisions and places, which run without a device."""


@dataclass(frozen=True)
class Import:
    """One imported module, as an absolute dotted name."""

    source: str
    target: str
    line: int
    at_module_level: bool

    def __str__(self) -> str:
        return f"{self.source} imports {self.target} (line {self.line})"


def dotted(path_in_wheel: str) -> str:
    """Name of a module."""
    return path_in_wheel.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


MODULES = {dotted(name): path for name, path in module_files().items()}


def imports_of(module: str, tree: ast.Module) -> Iterator[Import]:
    """Every import of a module; `from . import x` names `x` if that is a module."""
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.Lambda)]
    late = {id(inner) for function in functions for inner in ast.walk(function)}
    late |= {id(inner) for node in tree.body if _for_checkers(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        for target in _targets(node, package):
            yield Import(module, target, getattr(node, "lineno", 0), id(node) not in late)


def _for_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _targets(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        parents = package.split(".")
        above = parents[: len(parents) - node.level + 1] if node.level else []
        base = ".".join([*above, *filter(None, [node.module])])
        for alias in node.names:
            inner = f"{base}.{alias.name}"
            yield inner if inner in MODULES else base


@cache
def imports() -> Sequence[Import]:
    """Every import of every module."""
    return [
        found
        for module, path in MODULES.items()
        for found in imports_of(module, ast.parse(path.read_text(encoding="utf-8")))
    ]


def layer(module: str) -> str:
    """Layer of a module of the package: its folder, `base`, or `spec` for the engine's entry."""
    second = [*module.split("."), ""][1]
    if second in FOLDERS:
        return second
    return "base" if second in BASE or second == "config" else "spec"


def speaks_vllm(module: str) -> bool:
    """Whether a module may import vLLM."""
    if module.startswith("kvcascade.tools.dev."):  # comparisons with vLLM itself
        return module.rpartition(".")[2].startswith("vllm_")
    return module.startswith("kvcascade.vllm.")


def test_every_module_is_seen() -> None:
    assert {"kvcascade", "kvcascade.errors", "kvcascade.tiers.base"} <= MODULES.keys()
    assert len(MODULES) == len(python_files_outside_tests())
    assert any(found.target == "kvcascade.errors" for found in imports())
    unresolved = [
        str(found)
        for found in imports()
        if found.target.split(".")[0] == "kvcascade" and found.target not in MODULES
    ]
    assert not unresolved


ABSOLUTE = re.compile(r"\bfrom (kvcascade[\w.]*) import ([\w, ]*)|\bimport (kvcascade[\w.]*\w)")
"""An import in any text: code that a test or a script keeps in a string is never compiled here."""


def resolves(module: str, names: str) -> bool:
    """Whether there is such a module, and whether it speaks of all these names."""
    if module not in MODULES:
        return False
    source = MODULES[module].read_text(encoding="utf-8")
    each = [part.split()[0] for part in names.split(",") if part.strip()]
    return all(f"{module}.{n}" in MODULES or re.search(rf"\b{n}\b", source) for n in each)


def test_imports_in_strings_and_pages_name_what_there_is() -> None:
    wrong = [
        f"{name}: {found[0]}"
        for name in files()
        for found in ABSOLUTE.finditer((ROOT / name).read_bytes().decode(errors="replace"))
        if not resolves(found[1] or found[3], found[2] or "")
    ]
    assert not wrong


def test_imports_point_down() -> None:
    wrong = [
        str(found)
        for found in imports()
        if found.source != "kvcascade" and found.target.startswith("kvcascade.")
        if ORDER.index(layer(found.target)) > ORDER.index(layer(found.source))
    ]
    assert not wrong


def test_base_modules_import_only_those_below() -> None:
    place = {f"kvcascade.{name}": number for number, name in enumerate(BASE)}
    wrong = [
        str(found)
        for found in imports()
        if found.source in place and found.target.startswith("kvcascade.")
        if place.get(found.target, len(BASE)) >= place[found.source]
    ]
    assert not wrong


def test_only_the_adapters_know_vllm() -> None:
    wrong = [
        str(found)
        for found in imports()
        if found.target.split(".")[0] == "vllm" and not speaks_vllm(found.source)
    ]
    assert not wrong


def is_development(module: str) -> bool:
    """Whether a module stays in the repository: `tools/dev`."""
    return f"{module}.".startswith("kvcascade.tools.dev.")


def test_the_product_imports_nothing_of_development() -> None:
    assert any(is_development(module) for module in MODULES)
    wrong = [
        str(found)
        for found in imports()
        if is_development(found.target) and not is_development(found.source)
    ]
    assert not wrong


def test_decisions_and_places_do_not_load_torch() -> None:
    wrong = [
        str(found)
        for found in imports()
        if found.at_module_level and found.target.split(".")[0] == "torch"
        if layer(found.source) in (*ENGINE_FREE, "base")
        if not speaks_vllm(found.source)
    ]
    assert not wrong


@pytest.mark.parametrize(
    "module", ["kvcascade", "kvcascade.config.machine", "kvcascade.tools.command_app"]
)
def test_importing_is_light(module: str) -> None:
    heavy = {"torch", "vllm", "numpy", "lmdb", "transformers"}
    code = f"import sys, {module}; print(sorted({heavy!r} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
