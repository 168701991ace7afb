"""What the README says about versions and models is what the one list says, and has evidence."""

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
    GPU_RUNS,
    RELEASES,
    Feature,
    GpuRun,
    Proof,
    Release,
    blocks,
    files_for,
    status_line,
)
from kvcascade.vllm.generation import SUPPORTED

ROOT = Path(__file__).resolve().parent.parent.parent
ROWS: list[Release | Feature] = [*RELEASES, *FEATURES]


def test_the_readme_has_the_status_line_and_the_tables() -> None:
    text = (ROOT / "README.md").read_text()
    found = re.findall(f"{re.escape(BEGIN)}.*?{re.escape(END)}", text, re.DOTALL)
    assert tuple(found) == blocks(), "paste what `python -m kvcascade.tools.dev.versions` prints"


def test_the_status_line_is_near_the_top_of_the_readme() -> None:
    """Whoever reads one screen has read it."""
    lines = (ROOT / "README.md").read_text().splitlines()
    assert lines.index(status_line()) < lines.index("## Two commands")


def test_the_status_line_covers_every_version_that_was_run_and_no_other() -> None:
    spans = re.findall(r"0\.(\d+)\.\d+(?: to 0\.(\d+)\.\d+)? \(", status_line())
    covered = {n for first, last in spans for n in range(int(first), int(last or first) + 1)}
    run = {int(row.version.split(".")[1]) for row in RELEASES if row.proof is Proof.ENGINE}
    assert covered == run


def test_the_status_line_says_what_was_run_on_gpus() -> None:
    run = GpuRun("NVIDIA X1", "May 2031", "torch 9.9", ("gpu/test_bench.py",))
    assert "NVIDIA X1, May 2031: torch 9.9" in status_line([run])
    assert "never" in status_line([])
    assert "never" not in status_line([run])


def test_runs_on_gpus_name_tests_for_gpus() -> None:
    for run in GPU_RUNS:
        assert run.evidence, run
        for name in run.evidence:
            assert "pytest.mark.gpu" in (ROOT / "tests" / name).read_text(), name


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_row_names_tests_that_exist(row: Release | Feature) -> None:
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


def test_the_sentence_of_the_adapter_names_the_same_versions() -> None:
    minors = [row.version.rpartition(".")[0] for row in RELEASES if row.proof is not Proof.NONE]
    gaps = [i for i in range(1, len(minors)) if int(minors[i][2:]) != int(minors[i - 1][2:]) + 1]
    assert len(gaps) == 1
    last, first = minors[gaps[0] - 1], minors[gaps[0]]
    assert SUPPORTED == f"{minors[0]} to {last} or {first} to {minors[-1]}"


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
