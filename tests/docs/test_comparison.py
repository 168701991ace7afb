"""The page beside other systems: each row is complete, has a version, and says how it is known."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from kvcascade.config.schema import (
    AdmissionMode,
    CascadeConfig,
    CpuTierOptions,
    NvmeTierOptions,
    WriteMode,
)
from kvcascade.tiers.policies import ORDERS
from kvcascade.tools.dev.versions import RELEASES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "comparison.md"
WORDS = {"tests", "measured", "read", "docs", "reported"}
"""How something may be known."""
THREAD = re.compile(r"\b\w+#\d+")


@dataclass(frozen=True, slots=True)
class Table:
    """One table of the page."""

    section: str
    """Its heading."""
    head: list[str]
    """Names of the columns."""
    rows: list[dict[str, str]]
    """Cells of each row by column."""


def cells(line: str) -> list[str]:
    """The cells of one line."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables() -> Iterator[Table]:
    """Every table of the page; a row that is not as wide as its head fails."""
    for section in PAGE.read_text().split("\n## "):
        for block in re.findall(r"(?:^\|.*\n)+", section, re.M):
            head, _, *rows = map(cells, block.splitlines())
            pairs = [dict(zip(head, row, strict=True)) for row in rows]
            yield Table(section.splitlines()[0], head, pairs)


TABLES = list(tables())
VERSIONS = {row["system"]: row["version"] for t in TABLES if "version" in t.head for row in t.rows}
QUESTIONS = [t for t in TABLES if t.head[0] == "system" and "version" not in t.head]
KNOWN = [t for t in TABLES if t.head[-1] == "known by"]
OURS = [row for t in QUESTIONS for row in t.rows if row["system"] == "kvcascade"]


def named(row: dict[str, str]) -> set[str]:
    """What stands between backticks."""
    return set(re.findall(r"`([^`]+)`", " ".join(row.values())))


def section(of: list[Table]) -> list[str]:
    """Headings, as names of test cases."""
    return [table.section for table in of]


def test_the_page_is_read() -> None:
    """Or the others would look at nothing."""
    assert len(VERSIONS) >= 7
    assert len(QUESTIONS) >= 7
    assert len(OURS) == len(QUESTIONS)


@pytest.mark.parametrize("table", QUESTIONS, ids=section(QUESTIONS))
def test_each_question_is_answered_for_every_system_with_a_version(table: Table) -> None:
    assert [row["system"] for row in table.rows] == list(VERSIONS)
    for row in table.rows:
        assert all(row.values()), row


def test_versions_are_versions() -> None:
    for system, version in VERSIONS.items():
        assert system == "kvcascade" or re.search(r"\d+\.\d+\.\d+", version), system
    assert RELEASES[-1].version in VERSIONS["vLLM `fs`"]


@pytest.mark.parametrize("table", KNOWN, ids=section(KNOWN))
def test_each_row_says_how_it_is_known(table: Table) -> None:
    for row in table.rows:
        for part in row["known by"].split(";"):
            assert WORDS & set(re.findall(r"\w+", part)), row


@pytest.mark.parametrize("table", TABLES, ids=section(TABLES))
def test_what_only_a_thread_says_is_reported(table: Table) -> None:
    for row in table.rows:
        for column, text in row.items():
            if THREAD.search(text):
                assert column == "known by", text
                assert "reported:" in text, text


def test_what_is_said_of_kvcascade_is_in_its_configuration() -> None:
    options = {
        each.name
        for kind in (CascadeConfig, CpuTierOptions, NvmeTierOptions)
        for each in fields(kind)
    }
    values = {*ORDERS, *WriteMode, *AdmissionMode}
    used = set().union(*map(named, OURS)) - {"vllm serve", "kill -9"}
    assert used <= options | values
    assert used >= set(ORDERS)


def test_defaults_of_kvcascade_are_as_said() -> None:
    cells = [value for row in OURS for value in row.values()]
    default = {
        each.name: each.default
        for kind in (CascadeConfig, NvmeTierOptions)
        for each in fields(kind)
    }
    said = re.findall(r"`promotion_deadline_s`\D{0,20}(\d+) s", " ".join(cells))
    assert [float(seconds) for seconds in said] == [default["promotion_deadline_s"]]
    for option in ("write_budget", str(AdmissionMode.SECOND_TOUCH)):
        assert any(f"`{option}`" in cell for cell in cells), option
    assert default["write_budget"] is None
    assert default["admission"] != AdmissionMode.SECOND_TOUCH
