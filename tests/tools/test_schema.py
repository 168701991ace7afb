"""Every field of every JSON document is in docs/cli.md."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from demo.demo_phases import phase

from kvcascade.tiers.remote.base import FAILURES
from kvcascade.tools.commands.bench.bench_results import Quantity, Row, Table
from kvcascade.tools.commands.bench.bench_results import document as bench_document
from kvcascade.tools.commands.block_scan import DAMAGED
from kvcascade.tools.commands.carry.export_writer import ExportReport
from kvcascade.tools.commands.carry.import_report import ImportReport
from kvcascade.tools.commands.check.config_check import CheckReport, TierReport
from kvcascade.tools.commands.command_line import SCHEMA_VERSION, ExitCode
from kvcascade.tools.commands.gc.collect import GcReport
from kvcascade.tools.commands.inspect.block_report import BlockReport, LayerStatistics
from kvcascade.tools.commands.inspect.namespace_report import GroupReport, NamespaceReport
from kvcascade.tools.commands.remote.collect_remote import CollectedNamespace, RemoteCollected
from kvcascade.tools.commands.remote.examine_object import Verdict
from kvcascade.tools.commands.remote.remote_contents import (
    GenerationReport,
    GenerationState,
    RemoteContents,
)
from kvcascade.tools.commands.remote.verify_remote import RemoteVerified
from kvcascade.tools.commands.top.top_frame import Frame, TierFrame
from kvcascade.tools.commands.verify.verify_report import BlockProblem, VerifyReport
from kvcascade.tools.dev.demo.demo_results import document as demo_document
from kvcascade.tools.replay.replay_report import BreakEven, Quantiles, ReplayedTier, ReplayReport

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)[^\n]*\n(.*?)(?=^## |\Z)", DOCS, re.M | re.S))
DOCUMENTS: list[tuple[str, type[Any]]] = [
    ("inspect", NamespaceReport), ("inspect", GroupReport), ("inspect", BlockReport),
    ("inspect", LayerStatistics), ("top", Frame), ("top", TierFrame), ("verify", VerifyReport),
    ("verify", BlockProblem), ("gc", GcReport),
    ("export", ExportReport), ("export", ImportReport), ("check", CheckReport),
    ("check", TierReport), ("replay", ReplayReport), ("replay", ReplayedTier),
    ("replay", Quantiles), ("replay", BreakEven),
    ("remote", RemoteContents), ("remote", GenerationReport), ("remote", RemoteVerified),
    ("remote", RemoteCollected), ("remote", CollectedNamespace),
]  # fmt: skip


@pytest.mark.parametrize(("section", "document"), DOCUMENTS)
def test_every_field_is_described(section: str, document: type[Any]) -> None:
    assert {each.name for each in fields(document)} <= _named(section)


def test_statuses_problems_and_version() -> None:
    for code in ExitCode:
        assert f"| {code.value} | `{code.name.lower()}` |" in DOCS
    for problem in DAMAGED:
        assert f"| `{problem}` |" in SECTIONS["verify"]
    for state in GenerationState:
        assert f"| `{state}` |" in SECTIONS["remote"]
    assert {*Verdict, *FAILURES} <= _named("remote")
    assert f"`schema_version` is **{SCHEMA_VERSION}**" in DOCS


def test_figures_of_benchmark_and_demo() -> None:
    measured = bench_document([Table("n", "t", "", [Row("c", Quantity("q", "s"))])], {})
    demonstrated = demo_document([phase("b")], {})
    for document in (measured, measured["measurements"][0], measured["measurements"][0]["rows"][0]):
        assert document.keys() <= _named("bench")
    for document in (demonstrated, demonstrated["phases"][0]):
        assert document.keys() <= _named("demo")


def _named(section: str) -> set[str]:
    return set(re.findall(r"`([a-z0-9_]+)`", SECTIONS[section]))
