"""The house rules that a machine can check, over every file that is or would be committed."""

from __future__ import annotations

import ast
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import pytest
from support.project import FOLDERS, PACKAGE, ROOT, files, python_files_outside_tests

PACKAGE_FOLDERS = (PACKAGE, *FOLDERS)
ROOT_ENTRIES = {
    *PACKAGE_FOLDERS,
    *("tests", "docs", ".ci", ".github", "CITATION.cff"),
    *("setup.cfg", "pyproject.toml", "MANIFEST.in", "Makefile", ".gitignore", "LICENSE"),
    *("README.md", "ARCHITECTURE.md", "FORMAT.md", "CHANGELOG.md"),
}

FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 700
FILE_LINES_MEDIAN_MAX = 400
LINE_LENGTH_MAX = 100
CLASS_ATTRIBUTES_MAX = 15
CLASS_METHODS_MAX = 25
RECORD_METHODS_MAX = 5
FILE_BYTES_MAX = 1 << 20

# Patterns are written so that they do not match themselves.
HOST_PATHS = re.compile(r"(?<![\w.~$}>)-])/(?:work|root)\b(?=/)")
HOST_NAMES = re.compile(
    r"pypi[.]org|pythonhosted[.]org|npmjs[.]org|download[.]pytorch|deb[.]debian"
)
UNFINISHED = re.compile(r"\b(?:TO[D]O|FIX[M]E|X[X]X)\b")
ADAPTERS = re.compile(r"^kvcascade/vllm/\w+[.]py$|^tools/dev/(?:\w+/)*vllm_\w+[.]py$")
MOCKS = re.compile(r"\bMagic[M]ock\b|\bunittest[.]mock\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def read(name: str) -> str | None:
    """Text of a file; `None` if it is not text."""
    try:
        return (ROOT / name).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def texts(*suffixes: str) -> Iterator[tuple[str, str]]:
    """Name and text of the files with one of these suffixes, or of all text files."""
    for name in files():
        text = read(name) if name.endswith(suffixes or ("",)) else None
        if text is not None:
            yield name, text


@cache
def parsed(text: str) -> ast.Module:
    """Tree of a module; parsing them all takes seconds."""
    return ast.parse(text)


@cache
def walked(tree: ast.Module) -> Sequence[ast.AST]:
    """Each node of a tree; walking them all takes a second."""
    return tuple(ast.walk(tree))


@pytest.fixture(scope="module", autouse=True)
def _trees_are_dropped() -> Iterator[None]:
    """They are 200 MB."""
    yield
    parsed.cache_clear()
    walked.cache_clear()


def modules(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    """Name and tree of every Python file, or of those in these root folders."""
    for name, text in texts(".py"):
        if not folders or name.split("/")[0] in folders:
            yield name, parsed(text)


def lines_matching(pattern: re.Pattern[str], *suffixes: str) -> list[str]:
    """`file:line` of every line that matches."""
    return [
        f"{name}:{number}"
        for name, text in texts(*suffixes)
        for number, line in enumerate(text.splitlines(), 1)
        if name != "LICENSE" and pattern.search(line)
    ]


def nodes(tree: ast.Module, test: Callable[[ast.AST], bool]) -> list[int]:
    """Line numbers of the nodes that pass a test."""
    return [getattr(node, "lineno", 0) for node in walked(tree) if test(node)]


def test_every_module_is_seen() -> None:
    assert len([*modules(*PACKAGE_FOLDERS)]) == len(python_files_outside_tests())


def test_functions_are_short() -> None:
    long = [
        f"{name}:{node.lineno} {node.name}: {node.end_lineno - node.lineno + 1} lines"
        for name, tree in modules()
        for node in walked(tree)
        if isinstance(node, Function) and node.end_lineno is not None
        if node.end_lineno - node.lineno >= FUNCTION_LINES_MAX
    ]
    assert not long


def test_files_are_short(record_property: Callable[[str, object], None]) -> None:
    lengths = {name: len(text.splitlines()) for name, text in texts(".py")}
    median = statistics.median(lengths.values())
    record_property("median_file_lines", median)
    print(f"{len(lengths)} Python files, median {median:g} lines, longest {max(lengths.values())}")
    assert not {name: length for name, length in lengths.items() if length > FILE_LINES_MAX}
    assert median <= FILE_LINES_MEDIAN_MAX


def _attributes(node: ast.ClassDef) -> set[str]:
    """Names that a class's own methods set on `self`, and its annotated fields."""
    fields = (n.target for n in node.body if isinstance(n, ast.AnnAssign))
    found = {target.id for target in fields if isinstance(target, ast.Name)}
    return found | {
        n.attr
        for n in ast.walk(node)
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
        if isinstance(n.value, ast.Name) and n.value.id == "self"
    }


def _is_large(node: ast.ClassDef) -> bool:
    """A dataclass of few methods is a record: it may have any number of fields."""
    methods = sum(isinstance(inner, Function) for inner in node.body)
    is_data = any("dataclass" in ast.unparse(each) for each in node.decorator_list)
    is_record = is_data and methods <= RECORD_METHODS_MAX
    has_many = len(_attributes(node)) > CLASS_ATTRIBUTES_MAX
    return methods > CLASS_METHODS_MAX or (has_many and not is_record)


def test_classes_are_small() -> None:
    assert not [
        f"{name}:{node.lineno} {node.name}"
        for name, tree in modules(*PACKAGE_FOLDERS)
        for node in walked(tree)
        if isinstance(node, ast.ClassDef) and _is_large(node)
    ]


def test_lines_are_short() -> None:
    long = re.compile(rf".{{{LINE_LENGTH_MAX + 1}}}")
    assert not lines_matching(long, ".py", ".sh", ".cfg", ".toml", ".ini", "Makefile", ".ci/run")


def test_no_trailing_blanks_and_one_newline_at_the_end() -> None:
    assert not lines_matching(re.compile(r"[ \t]+$"), ".py", ".sh", ".md", ".cfg", ".toml")
    assert not [name for name, text in texts(".py") if text and not re.search(r"[^\n]\n\Z", text)]


def test_no_pickle() -> None:
    """Bytes from disk or shared memory must never be able to run code."""

    def imports_pickle(node: ast.AST) -> bool:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        return any(re.match(r"(c?pickle|dill|marshal|shelve)\b", n) for n in names)

    assert not [f"{n}:{line}" for n, tree in modules() for line in nodes(tree, imports_pickle)]


def test_no_path_says_that_what_cannot_be_looked_at_is_not_there() -> None:
    """From Python 3.14 on it would; `file_mode` raises, `os.path.isdir` never does."""

    def asks(node: ast.AST) -> bool:
        called = node.func if isinstance(node, ast.Call) and not node.args else None
        return isinstance(called, ast.Attribute) and called.attr in {"exists", "is_dir", "is_file"}

    found = [f"{n}:{line}" for n, tree in modules(*PACKAGE_FOLDERS) for line in nodes(tree, asks)]
    assert not [where for where in found if not where.startswith("tools/dev/")]


def test_tests_do_not_sleep() -> None:
    def sleeps(node: ast.AST) -> bool:
        if isinstance(node, ast.ImportFrom):
            return node.module == "time" and any(alias.name == "sleep" for alias in node.names)
        return isinstance(node, ast.Attribute) and ast.unparse(node) == "time.sleep"

    assert not [f"{n}:{line}" for n, tree in modules("tests") for line in nodes(tree, sleeps)]


def test_no_mocks() -> None:
    assert not lines_matching(MOCKS, ".py")


def test_nothing_is_left_unfinished() -> None:
    assert not lines_matching(UNFINISHED)


def test_no_paths_or_hosts_of_one_machine() -> None:
    assert not lines_matching(HOST_PATHS)
    assert not lines_matching(HOST_NAMES)


def _definitions(tree: ast.Module) -> Iterator[tuple[str, ast.ClassDef | Function, bool]]:
    """Public classes, functions and methods of a module: qualified name, node, is it a method."""
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | Function) or node.name.startswith("_"):
            continue
        yield node.name, node, False
        for inner in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(inner, Function) and not inner.name.startswith("_"):
                yield f"{node.name}.{inner.name}", inner, True


def test_public_names_are_documented() -> None:
    """A method needs no words of its own where a method of that name says what it does.

    That is how an implementation of a contract refers to the contract. The contract of the modules
    that adapt to vLLM is in vLLM.
    """
    trees = list(modules(*PACKAGE_FOLDERS))
    described = {
        node.name
        for _, tree in trees
        for _, node, is_method in _definitions(tree)
        if is_method and ast.get_docstring(node)
    }
    bare = [name for name, tree in modules() if tree.body and not ast.get_docstring(tree)]
    bare += [
        f"{name}:{node.lineno} {qualified}"
        for name, tree in trees
        for qualified, node, is_method in _definitions(tree)
        if not ast.get_docstring(node)
        if not (is_method and (node.name in described or ADAPTERS.search(name)))
    ]
    assert not bare


def test_names_of_public_classes_are_unique() -> None:
    """But for the one that each generation of vLLM's interface calls the same."""
    found: dict[str, list[str]] = {}
    for file, tree in modules(*PACKAGE_FOLDERS):
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(file)
    twice = {name: places for name, places in found.items() if len(places) > 1}
    assert set(twice) == {"CascadeOffloadingSpec"}, twice


def test_names_of_files_are_unique() -> None:
    """But for what Python demands, and the contracts, which are `base.py` in every folder."""
    names = Counter(name.rsplit("/", 1)[-1] for name, _ in modules(*PACKAGE_FOLDERS))
    twice = {name for name, times in names.items() if times > 1}
    assert twice <= {"__init__.py", "__main__.py", "base.py"}, twice


def test_imports_inside_the_package_are_relative() -> None:
    def is_absolute(node: ast.AST) -> bool:
        if isinstance(node, ast.Import):
            return any(alias.name.split(".")[0] == "kvcascade" for alias in node.names)
        return (
            isinstance(node, ast.ImportFrom)
            and node.level == 0
            and (node.module or "").split(".")[0] == "kvcascade"
        )

    found = [f"{n}:{line}" for n, t in modules(*PACKAGE_FOLDERS) for line in nodes(t, is_absolute)]
    assert not found


def test_nothing_new_at_the_root() -> None:
    assert {name.split("/")[0] for name in files()} <= ROOT_ENTRIES


def test_no_large_files() -> None:
    sizes = {name: (ROOT / name).stat().st_size for name in files()}
    assert not {name: size for name, size in sizes.items() if size > FILE_BYTES_MAX}
