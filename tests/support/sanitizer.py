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
_PASSED = re.compile(r"^\d+ passed", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a run."""

    is_checked: bool
    """False if the tool did not look at the tests: it refuses the device, or is not installed."""
    errors: int
    """Wrong accesses that it found."""
    words: str
    """The last lines of its own output."""


def small_cases() -> list[str]:
    """Tests that copy the small layouts, by every way that copies take."""
    test = "tests/gpu/test_device_cuda.py::test_moves_the_pages"
    ways = ("batched", "one_by_one", "unpinned")
    return [f"{test}[{name}-{way}]" for name in NAMED_CASES for way in ways]


def judge(output: str) -> Verdict:
    """Read the output of a run over pytest.

    A run counts only if the tool gave a summary and the tests ran: it ends with a summary of no
    errors also where it could not begin.
    """
    own = [line for line in output.splitlines() if line.startswith("=========")]
    words = "\n".join(own[-LINES_SHOWN:] or output.splitlines()[-LINES_SHOWN:])
    found = _SUMMARY.search(output)
    errors = int(found[1]) if found else 0
    return Verdict(bool(found and (errors or _PASSED.search(output))), errors, words)


def run_sanitizer(arguments: Sequence[str]) -> Verdict:
    """Run pytest with these arguments under the tool."""
    command = [*COMMAND, sys.executable, "-m", "pytest", "-q", *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=TESTS.parent,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )
    except FileNotFoundError:
        return Verdict(False, 0, "compute-sanitizer is not installed; the CUDA toolkit has it")
    return judge(done.stdout)
