"""README and site agree with the one list of versions, and each entry has evidence."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kvcascade.tools.dev.versions import (
    BEGIN,
    END,
    FEATURES,
    RELEASES,
    Feature,
    Proof,
    VllmRelease,
    files_for,
    readme_block,
    status_line,
)
from kvcascade.vllm.generation import GENERATIONS, supported

ROOT = Path(__file__).resolve().parent.parent.parent
ROWS: list[VllmRelease | Feature] = [*RELEASES, *FEATURES]


def test_the_readme_has_the_status_line() -> None:
    text = (ROOT / "README.md").read_text()
    found = re.findall(f"{re.escape(BEGIN)}.*?{re.escape(END)}", text, re.DOTALL)
    assert found == [readme_block()], "paste what `python -m kvcascade.tools.dev.versions` prints"


def test_the_status_line_is_near_the_top_of_the_readme() -> None:
    """Whoever reads one screen has read it."""
    lines = (ROOT / "README.md").read_text().splitlines()
    first_section = next(i for i, line in enumerate(lines) if line.startswith("## "))
    assert lines.index(status_line()) < first_section


def test_the_status_line_covers_every_version_that_was_run_and_no_other() -> None:
    spans = re.findall(r"0\.(\d+)\.\d+(?: to 0\.(\d+)\.\d+)? \(", status_line())
    covered = {n for first, last in spans for n in range(int(first), int(last or first) + 1)}
    run = {int(row.version.split(".")[1]) for row in RELEASES if row.proof is Proof.ENGINE}
    assert covered == run


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_row_names_tests_that_exist(row: VllmRelease | Feature) -> None:
    for name in row.evidence:
        path, _, test = name.partition("::")
        text = (ROOT / "tests" / path).read_text()
        assert test.partition("[")[0] in text
        kind = test.partition("[")[2].rstrip("]")
        assert f'"{kind}"' in text or not kind


def test_what_was_run_was_run_on_a_real_engine() -> None:
    for row in ROWS:
        if row.proof is Proof.ENGINE:
            assert any("test_engine" in name for name in row.evidence), row
        assert row.evidence, row


def test_the_adapters_serve_the_versions_that_are_supported() -> None:
    listed = {int(row.version.split(".")[1]) for row in RELEASES if row.proof is not Proof.NONE}
    served = [n for each in GENERATIONS for n in range(each.first, each.last + 1)]
    assert len(set(served)) == len(served) and set(served) == listed
    minors = {int(n) for n in re.findall(r"0\.(\d+)", supported())}
    assert {min(listed), max(listed)} <= minors <= listed


def test_the_extra_takes_the_same_versions() -> None:
    """What is installed and supported stays; what is refused is replaced."""
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    lines = metadata["options.extras_require"]["vllm"].split()
    (extra,) = [one for one in map(Requirement, lines) if one.name == "vllm"]
    taken = {minor for minor in range(40) if extra.specifier.contains(f"0.{minor}.1")}
    rows = [row.version for row in RELEASES if row.proof is not Proof.NONE]
    assert taken == {int(version.split(".")[1]) for version in rows}


def test_only_what_is_run_can_be_run() -> None:
    assert "tests/vllm/test_engine_versions.py" in files_for("0.19.1")
    with pytest.raises(KeyError, match=r"0\.21\.0 is not among those that are tested"):
        files_for("0.21.0")
