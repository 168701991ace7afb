"""Additions of the site to the files of `docs/`: pages of other files, and generated parts.

A generated part stands between two marks in a page. Between them the page has a line for readers of
the repository, which the site replaces:

    <!-- generated: command inspect -->
    Run `kvcascade inspect --help`.
    <!-- end -->
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from .... import __all__ as public_names
from ....observe.metrics import METRICS, VLLM_METRICS, Kind
from ..bench.bench_page import page
from ..versions import tables
from .command_reference import all_commands, command_reference
from .config_reference import UndescribedError, config_reference

ROOT = Path(__file__).resolve().parents[3]
DOCS, BENCHMARKS, DECISIONS = "docs/", "docs/benchmarks/", "docs/decisions/"
OF_ROOT: Mapping[str, str] = {
    "index.md": "README.md",
    "architecture.md": "ARCHITECTURE.md",
    "format.md": "FORMAT.md",
    "changelog.md": "CHANGELOG.md",
}
"""Pages of the site that are files of the root, by their name on the site."""

_MARKED = re.compile(r"<!-- generated: ([\w ]+) -->\n(.*?)<!-- end -->", re.S)
_FENCED = re.compile(r"(^```.*?^```\n)", re.M | re.S)
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


class DeadLinkError(Exception):
    """A page links to a file that does not exist; the message names both."""


def metric_table() -> str:
    """Return the table of all metrics. Raises `UndescribedError`."""
    lines = ["| metric | kind | labels | what it says |", "|---|---|---|---|"]
    for metric in (*METRICS, *VLLM_METRICS):
        if not metric.documentation.strip():
            raise UndescribedError(f"the metric {metric.name} has no documentation")
        suffix = "_total" if metric.kind is Kind.COUNTER else ""
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        name = f"`{metric.full_name}{suffix}`"
        lines.append(f"| {name} | {metric.kind.value} | {labels} | {metric.documentation} |")
    return "\n".join(lines)


def api() -> str:
    """Return a directive of mkdocstrings for each public name; errors come last."""
    names = [name for name in public_names if not name.startswith("_")]
    names.sort(key=lambda name: (name.endswith("Error") or name == "ErrorKind", name))
    return "\n\n".join(f"::: kvcascade.{name}" for name in names)


def benchmark_index() -> str:
    """Return a list of the pages that are made of JSON files."""
    found = {path.stem: json.loads(path.read_text()) for path in benchmark_files()}
    rows = [f"| [{name}]({name}.md) | `{run['command']}` |" for name, run in found.items()]
    return "\n".join(["| page | command |", "|---|---|", *rows])


def benchmark_files() -> list[Path]:
    """Return the committed JSON files of benchmark runs."""
    return sorted((ROOT / BENCHMARKS).glob("*.json"))


GENERATORS: Mapping[str, Callable[[], str]] = {
    "configuration": config_reference,
    "metrics": metric_table,
    "compatibility": tables,
    "benchmarks": benchmark_index,
    "api": api,
}
"""Functions that return a generated part, by the word in its mark."""


def generate(what: str) -> str:
    """Return the Markdown for a mark. Raises `KeyError` for an unknown one, `UndescribedError`."""
    kind, _, name = what.partition(" ")
    return command_reference(name) if kind == "command" else GENERATORS[what]()


def filled(text: str) -> str:
    """Return a page with its generated parts."""
    return _MARKED.sub(lambda mark: generate(mark[1]), text)


def marks(text: str) -> list[str]:
    """Return the generated parts that a page asks for."""
    return [mark[0] for mark in _MARKED.findall(text)]


def unplaced(pages: Mapping[str, str]) -> set[str]:
    """Return the generated parts that no page asks for; commands included."""
    wanted = {*GENERATORS, *(f"command {name}" for name in all_commands())}
    return wanted - {mark for text in pages.values() for mark in marks(text)}


def virtual_pages() -> dict[str, str]:
    """Return the pages that are no files of `docs/`, by their name on the site."""
    found = {name: (ROOT / source).read_text() for name, source in OF_ROOT.items()}
    for path in benchmark_files():
        name = path.with_suffix(".md").name
        found[f"benchmarks/{name}"] = page(path.name, json.loads(path.read_text()))
    return found


def relinked(name: str, text: str, known: Callable[[str], bool]) -> str:
    """Return a page with links that are true on the site; they are true in the repository before.

    Of a link to a file that only the repository has, the text stays. `name`: of the page, on the
    site. `known` says whether the site has a file of a name. Raises `DeadLinkError`.
    """
    source = OF_ROOT.get(name, DOCS + name)
    names = {path: each for each, path in OF_ROOT.items()}

    def replaced(match: re.Match[str]) -> str:
        text, (link, mark, section) = match[1], match[2].partition("#")
        if not link or "://" in match[2] or link.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        target = names.get(path) or path.removeprefix(DOCS)
        if (path in names or path.startswith(DOCS)) and known(target):
            here = posixpath.relpath(target, posixpath.dirname(name) or ".")
            return f"[{text}]({here}{mark}{section})"
        if path.startswith("..") or not (ROOT / path).exists():
            raise DeadLinkError(f"{source} links to {path}, which does not exist")
        return text

    parts = _FENCED.split(text)
    return "".join(p if p.startswith("```") else _LINK.sub(replaced, p) for p in parts)


def benchmark_nav() -> list[str]:
    """Return the pages of benchmark runs."""
    return [f"benchmarks/{path.stem}.md" for path in benchmark_files()]


def decision_nav() -> list[str]:
    """Return the pages of decisions, in the order of their index."""
    index = (ROOT / DECISIONS / "README.md").read_text()
    linked = dict.fromkeys(re.findall(r"\]\(([\w-]+\.md)\)", index))
    return [f"decisions/{name}" for name in linked]
