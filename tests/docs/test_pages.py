"""Everything that the pages name exists: sections, files, messages, modules, statuses, calls."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from kvcascade.tools.command_app import app
from kvcascade.tools.commands.command_line import ExitCode

ROOT = Path(__file__).resolve().parents[2]
CODE = ("kvcascade", "tiers", "handlers", "manager", "tools")
DOCS, FORGE = ROOT / "docs", ROOT / ".github"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *FORGE.glob("*.md")])
EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
OVERVIEW_LINES_MAX = 200
"""Of ARCHITECTURE.md: reasons and figures have pages of their own."""
README_WORDS_MAX = 600
INDEXES = {"decisions": "docs/decisions/README.md", "extending": "ARCHITECTURE.md"}
"""Folders of docs, and the page that lists what is in each."""
NOT_OURS = {"Too many open files", "Read-only file system"}
"""Messages of the system's."""


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """Names of its sections in links."""
    heads = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def links(page: Path) -> list[str]:
    """What a page refers to, other sites left out."""
    found = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    return [link for link in found if "://" not in link]


def test_links_are_found() -> None:
    """Or the next test would look at nothing."""
    assert sum(len(links(page)) for page in PAGES) > 25


@EACH_PAGE
def test_links_lead_to_files_and_sections(page: Path) -> None:
    for link in links(page):
        name, _, section = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not section or section in anchors(target), link


@EACH_PAGE
def test_what_is_inside_a_list_item_is_indented_as_the_site_needs(page: Path) -> None:
    """With fewer than four blanks, the site ends the list there, and begins the next one at 1."""
    assert not re.findall(r"^ {1,3}(?:[-*] |```).*", prose(page), re.M)


def test_every_picture_has_a_text_and_a_picture() -> None:
    pictures = [
        (page, *found)
        for page in PAGES
        for found in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text())
    ]
    assert len(pictures) > 3
    for page, text, file in pictures:
        assert (page.parent / file).exists(), file
        assert len(text.split()) > 3, f"{page.name}: {file} needs a text for who cannot see it"


def test_every_page_of_docs_is_linked() -> None:
    linked = {
        (page.parent / link.partition("#")[0]).resolve() for page in PAGES for link in links(page)
    }
    assert {page for page in PAGES if DOCS in page.parents} <= linked


@EACH_PAGE
def test_modules_and_folders_that_are_named_exist(page: Path) -> None:
    code = "|".join((*CODE, "tests"))
    named = set(re.findall(rf"`((?:{code})/[\w/]*(?:\.py)?)[`:]", prose(page)))
    named |= {f"{name}.py" for name in re.findall(rf"`((?:{code})/\w+)`", prose(page))}
    for name in named:
        paths = (ROOT / name, ROOT / name.removesuffix(".py"))
        assert any(path.exists() for path in paths), name


def sentences() -> Iterator[str]:
    """Every text in the code, with a blank where a value is put in."""
    for folder in CODE:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = (p.value if isinstance(p, ast.Constant) else " " for p in node.values)
                    yield "".join(map(str, parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield re.sub("%[sd]", " ", node.value)


def test_messages_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    named = set(re.findall(r"^\| `([^`]+)` ", page, re.M)) - NOT_OURS
    assert len(named) > 20
    known = [" ".join(text.split()) for text in sentences()]
    for message in named:
        parts = [part.strip() for part in message.replace("/dev/shm", "...").split("...")]
        assert any(all(part in text for part in parts) for text in known), message


def test_modules_for_all_layers_are_named() -> None:
    tree = ast.parse((ROOT / "tests" / "test_layers.py").read_text())
    (base,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "BASE"
    )
    named = re.findall(r"`(?:kvcascade\.)?([\w.]+)`", (ROOT / "ARCHITECTURE.md").read_text())
    assert base and set(base) <= set(named)


def test_the_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= README_WORDS_MAX


def test_the_overview_is_short() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) <= OVERVIEW_LINES_MAX


def test_every_decision_and_guide_is_in_its_index() -> None:
    for folder, index in INDEXES.items():
        pages = {path.name for path in (ROOT / "docs" / folder).glob("*.md")} - {"README.md"}
        listed = {Path(link.partition("#")[0]).name for link in links(ROOT / index)}
        assert pages and pages <= listed, folder


def test_every_exit_status_is_documented() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    listed = re.findall(r"^\| (\d+) \| `(\w+)` \|", page, re.M)
    assert listed == [(str(int(each)), each.name.lower()) for each in ExitCode]


def test_examples_of_help_are_right_calls() -> None:
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    found = [
        (command, shlex.split(line.partition(" | ")[0]))
        for command in commands.values()
        for line in re.findall(r"^ +kvcascade (.*)$", command.help or "", re.M)
    ]
    assert len(found) > 15
    for command, words in found:
        command.make_context(words[0], words[1:])
