"""The parts of the site that are made of the code: complete, described, and placed on a page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import click
import matplotlib
import pytest
import typer
import yaml

import kvcascade
from kvcascade.config.schema import TIER_TYPES, VLLM_KEYS, CascadeConfig, options_class
from kvcascade.tools.commands.picture import LINES, draw_ratios, new_figure
from kvcascade.tools.dev.site import command_reference as commands
from kvcascade.tools.dev.site.command_reference import all_commands, command_reference
from kvcascade.tools.dev.site.config_reference import (
    UndescribedError,
    config_reference,
    key_rows,
)
from kvcascade.tools.dev.site.figures import SHOWN, TRACES, draw_policies, policy_table
from kvcascade.tools.dev.site.site_pages import (
    GENERATORS,
    OF_ROOT,
    DeadLinkError,
    api,
    benchmark_nav,
    decision_nav,
    filled,
    relinked,
    unplaced,
    virtual_pages,
)

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CONFIG = ROOT / "tools" / "dev" / "site" / "mkdocs.yml"
CLASSES: list[type[Any]] = [CascadeConfig, *map(options_class, TIER_TYPES)]


def pages() -> dict[str, str]:
    """Every page of the folder, by its name on the site."""
    return {path.relative_to(DOCS).as_posix(): path.read_text() for path in DOCS.rglob("*.md")}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_key_has_a_row_with_its_meaning(cls: type[Any]) -> None:
    rows = list(key_rows(cls))
    assert [row.name for row in rows] == [e.name for e in fields(cls) if e.name != "key"]
    for row in rows:
        assert row.values and row.default and len(row.meaning.split()) > 3, row
        assert f"| `{row.name}` | {row.values} | {row.default} |" in config_reference()


def test_files_are_not_called_folders() -> None:
    values = {row.name: row.values for cls in CLASSES for row in key_rows(cls)}
    assert (values["password_file"], values["arena_dir"]) == ("file", "folder")


def test_every_key_of_vllm_has_a_meaning() -> None:
    found = config_reference()
    for name, (_, meaning) in VLLM_KEYS.items():
        assert meaning and f"| `{name}` | {meaning} |" in found


def test_a_key_without_a_description_ends_the_build() -> None:
    @dataclass(frozen=True)
    class Options:
        """One key that says what it is, and one that does not."""

        key: str
        old: int = 3
        """Description of the key."""
        new: int = 4

    with pytest.raises(UndescribedError, match="new"):
        list(key_rows(Options))


def test_every_command_has_its_arguments_and_options() -> None:
    assert len(all_commands()) > 10
    for name, command in all_commands().items():
        text = command_reference(name)
        assert f"kvcascade {name}" in text
        for parameter in command.params:
            for option in parameter.opts:
                is_shown = not option.startswith("--") or option == "--help"
                assert is_shown or f"`{option}" in text, f"{name} {option}"


def test_an_option_without_help_ends_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer()

    @app.command()
    def lift(weight: Annotated[int, typer.Option("--weight")] = 1) -> None:
        """Lift."""

    group = click.Group(commands={"lift": typer.main.get_command(app)})  # type: ignore[dict-item]
    monkeypatch.setattr(commands, "all_commands", lambda: dict(commands._commands(group)))
    with pytest.raises(UndescribedError, match="--weight"):
        command_reference("lift")


def test_every_generated_part_is_on_a_page() -> None:
    assert not unplaced(pages())
    lacking = unplaced({**pages(), "cli.md": "", "metrics.md": ""})
    assert {"metrics", "command verify"} <= lacking


def test_marks_are_replaced_and_the_line_between_them_goes() -> None:
    text = "a\n\n<!-- generated: command version -->\nRun it.\n<!-- end -->\n\nz"
    assert "kvcascade version [OPTIONS]" in filled(text) and "Run it" not in filled(text)
    assert filled(text).startswith("a\n") and filled(text).endswith("\nz")
    with pytest.raises(KeyError):
        filled(text.replace("version", "conversion"))
    for name, page in pages().items():
        assert "generated:" not in filled(page), name


def test_every_public_name_is_documented() -> None:
    listed = re.findall(r"^::: kvcascade\.(\w+)$", api(), re.M)
    assert sorted(listed) == sorted(n for n in kvcascade.__all__ if n != "__version__")


def test_pages_of_the_root_and_of_benchmark_runs_are_added() -> None:
    added = virtual_pages()
    assert {*OF_ROOT} <= {*added} and {*benchmark_nav()} <= {*added}
    assert not {*added} & {*pages()}, "each page has one source"


@pytest.mark.parametrize(
    ("name", "link", "there"),
    [
        ("index.md", "docs/configure.md#all-keys", "configure.md#all-keys"),
        ("index.md", "ARCHITECTURE.md", "architecture.md"),
        ("limits.md", "../README.md", "index.md"),
        ("decisions/resets.md", "../../FORMAT.md", "../format.md"),
        ("architecture.md", "docs/decisions/README.md", "decisions/README.md"),
        ("benchmarks/README.md", "../comparison.md#measured", "../comparison.md#measured"),
        ("limits.md", "#things", "#things"),
        ("limits.md", "https://example.org/a.md", "https://example.org/a.md"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(name: str, link: str, there: str) -> None:
    known = {*pages(), *OF_ROOT}
    assert relinked(name, f"see [it]({link}).", known.__contains__) == f"see [it]({there})."


def test_links_in_code_stay_and_links_to_nothing_end_the_build() -> None:
    code = "```\n[it](../nothing.md)\n```\n"
    assert relinked("limits.md", code, lambda name: False) == code
    assert (
        relinked("limits.md", "by [the file](../Makefile).", lambda name: False) == "by the file."
    )
    for link in ("../nothing", "nothing.md", "../../elsewhere.md"):
        with pytest.raises(DeadLinkError, match="limits"):
            relinked("limits.md", f"[it]({link})", {*pages()}.__contains__)


def test_charts_of_policies_are_drawn_from_the_tables_of_their_page(tmp_path: Path) -> None:
    page = (DOCS / "policies.md").read_text()
    for trace, title in TRACES.items():
        table = policy_table(page, trace)
        assert {*SHOWN} <= {*table.rows} and all(0 <= r <= 1 for r in table.rows["lru"])
        draw_policies(table, title, tmp_path / "chart.svg")
        committed = DOCS / f"policies-{trace}.svg"
        drawn = (tmp_path / "chart.svg").read_text()
        if f"v{matplotlib.__version__}," in committed.read_text():
            assert committed.read_text() == drawn, "run `make figures`"
    with pytest.raises(ValueError, match="nothing"):
        policy_table(page, "nothing")


def test_names_of_lines_are_beside_them_in_their_order() -> None:
    """Each has a sample: on grey paper only dash and marker say which line a name belongs to."""
    last = dict(zip("abcdefgh", (0.2, 0.5, 0.5, 0.1, 0.9, 0.3, 0.4, 0.8), strict=True))
    lines = {f"${name}$": ((0, 1), (0.0, ratio)) for name, ratio in last.items()}
    axes = draw_ratios(new_figure(5, 4), lines, "")
    names = axes.get_legend()
    assert [text.get_text().strip("$") for text in names.get_texts()] == list("ehbcgfad")
    assert not any(text.get_parse_math() for text in names.get_texts())
    looks = [(line.get_linestyle(), line.get_marker()) for line in names.get_lines()]
    assert looks == [(LINES[i].dash, LINES[i].marker) for i in (4, 7, 1, 2, 6, 5, 0, 3)]
    assert len({*looks}) == len(LINES)
    axes.figure.draw_without_rendering()
    assert names.get_window_extent().x0 >= axes.get_window_extent().x1


def leaves(part: Any) -> list[str]:
    """The pages of a part of the navigation."""
    if isinstance(part, str):
        return [part]
    inner = part.values() if isinstance(part, dict) else part
    return [page for each in inner for page in leaves(each)]


def test_every_page_is_in_the_navigation_once() -> None:
    listed = leaves(yaml.safe_load(CONFIG.read_text())["nav"])
    listed += [*decision_nav(), *benchmark_nav()]
    assert sorted(listed) == sorted([*pages(), *virtual_pages()])


def titled(part: Any) -> Iterator[str]:
    """Yield the pages that have a title in the navigation."""
    if isinstance(part, dict):
        for inner in part.values():
            yield from [inner] if isinstance(inner, str) else titled(inner)
    elif not isinstance(part, str):
        for each in part:
            yield from titled(each)


def test_no_page_hides_behind_the_title_of_its_section() -> None:
    """The feature `navigation.indexes` drops the title of a README from its section's list."""
    config = yaml.safe_load(CONFIG.read_text())
    assert "navigation.indexes" in config["theme"]["features"]
    hidden = [page for page in titled(config["nav"]) if Path(page).stem in ("README", "index")]
    assert not hidden


def test_what_is_generated_is_more_than_a_heading() -> None:
    for name, make in GENERATORS.items():
        assert len(make().splitlines()) > 3, name
