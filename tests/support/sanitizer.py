"""`compute-sanitizer` over a few tests, and what its output says."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from .children import TESTS, environment
from .kv_layouts import NAMED_CASES

COMMAND = (
    "compute-sanitizer",
    "--tool=memcheck",
    "--report-api-errors=no",  # the tests make calls that are to fail
    "--target-processes=application-only",
)
TIMEOUT_S = 1200.0
LINES_SHOWN = 6
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")
_OWN = re.compile(r"={9}( |$)")
_OUTCOMES = re.compile(r"^\d+ \w+.* in [\d.]+s")
_OUTCOME = re.compile(r"(\d+) (passed|failed|error)")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a run."""

    is_checked: bool
    """False if the tool did not look at every case: it is not installed, or refuses the device, or
    cases were skipped."""
    errors: int
    """Wrong accesses that it found, and tests that failed."""
    words: str
    """The last lines of its own output, the tests that failed, and how many passed."""


def small_cases() -> list[str]:
    """Tests that copy the small layouts, by every way that copies take."""
    test = "tests/gpu/test_device_cuda.py::test_moves_the_pages"
    ways = ("batched", "one_by_one", "unpinned")
    return [f"{test}[{name}-{way}]" for name in NAMED_CASES for way in ways]


def judge(output: str, cases: int) -> Verdict:
    """Read the output of a run over pytest with so many cases.

    A run counts only if the tool gave a summary and all tests ran: it ends with a summary of no
    errors also where it could not begin.
    """
    lines = output.splitlines()
    tests = [line for line in lines if line.startswith("FAILED ") or _OUTCOMES.match(line)]
    shown = [line for line in lines if _OWN.match(line)][-LINES_SHOWN:] + tests[-LINES_SHOWN:]
    counts = {what: int(count) for count, what in _OUTCOME.findall(tests[-1] if tests else "")}
    found = _SUMMARY.search(output)
    is_checked = found is not None and counts.get("passed", 0) >= cases
    errors = sum(counts.get(what, 0) for what in ("failed", "error"))
    errors += int(found[1]) if found else 0
    return Verdict(is_checked, errors, "\n".join(shown or lines[-LINES_SHOWN:]))


def run_sanitizer(cases: Sequence[str], *arguments: str) -> Verdict:
    """Run pytest with these cases under the tool, which slows them many times."""
    command = [*COMMAND, sys.executable, "-m", "pytest", "-q", *arguments, *cases]
    try:
        done = subprocess.run(
            command,
            cwd=TESTS.parent,
            env=environment() | {"KVCASCADE_GPU_TESTS_S": str(TIMEOUT_S)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )
    except FileNotFoundError:
        return Verdict(False, 0, "compute-sanitizer is not installed; the CUDA toolkit has it")
    return judge(done.stdout, len(cases))
