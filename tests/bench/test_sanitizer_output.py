"""What is made of the output of `compute-sanitizer`, which the CPU has not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.children import TESTS, environment
from support.sanitizer import TIMEOUT_S, judge, run_sanitizer, small_cases

BEGIN = "========= COMPUTE-SANITIZER\n"
CLEAN = BEGIN + "....   [100%]\n4 passed in 9.00s\n========= ERROR SUMMARY: 0 errors\n"
FAILED = CLEAN.replace("4 passed", "FAILED a.py::b - assert\n1 failed, 3 passed, 1 warning")
UNWELL = CLEAN.replace("4 passed", "2 passed, 2 errors")
SKIPPED = CLEAN.replace("4 passed", "2 passed, 2 skipped")
WRONG = BEGIN + "========= Invalid __global__ read\nF\n========= ERROR SUMMARY: 3 errors\n"
REFUSED = BEGIN + "========= Error: Device not supported\n"
NOT_BEGUN = (
    BEGIN + "========= Target application terminated before first instrumented API call\n"
    "========= ERROR SUMMARY: 0 errors\n"
)


def test_clean_and_wrong() -> None:
    assert judge(CLEAN, 4).is_checked and judge(CLEAN, 4).errors == 0
    assert judge(WRONG, 4).errors == 3
    assert "Invalid" in judge(WRONG, 4).words


@pytest.mark.parametrize(("output", "errors"), [(FAILED, 1), (UNWELL, 2)])
def test_a_test_that_fails_is_an_error(output: str, errors: int) -> None:
    """Bytes may be wrong although every access is right."""
    assert judge(output, 4).errors == errors
    assert output is UNWELL or "FAILED a.py::b" in judge(output, 4).words


@pytest.mark.parametrize("output", [REFUSED, NOT_BEGUN, SKIPPED, "cannot start\n", ""])
def test_what_was_not_checked_is_not_called_clean(output: str) -> None:
    verdict = judge(output, 4)
    assert not verdict.is_checked and verdict.errors == 0
    last = output.splitlines()[-1:]
    assert not last or last[0] in verdict.words
    assert output is not SKIPPED or "2 passed, 2 skipped" in verdict.words


def test_the_tests_that_it_is_run_over_exist() -> None:
    collected = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
        + small_cases(),
        cwd=TESTS.parent,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert collected.returncode == 0, collected.stdout + collected.stderr


def test_where_it_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    verdict = run_sanitizer([], "--version")
    assert not verdict.is_checked and "not installed" in verdict.words


def test_it_is_run_over_pytest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that runs what it is given, and finds nothing."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        "#!/bin/bash\necho ========= COMPUTE-SANITIZER of $KVCASCADE_GPU_TESTS_S s\n"
        'while [[ $1 == --* ]]; do shift; done\n"$@"\n'
        "echo '========= ERROR SUMMARY: 0 errors'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    case = "tests/bench/test_sanitizer_output.py::test_clean_and_wrong"
    verdict = run_sanitizer([case], "-p", "no:cacheprovider")
    assert verdict.is_checked
    assert f"of {TIMEOUT_S} s" in verdict.words, "not the limit for tests that nothing slows"
