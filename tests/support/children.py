"""Processes that a test starts: what they run under, and those made of a few lines of code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent

Start = Callable[..., subprocess.Popen[str]]
"""Code and its arguments to a process that has said that it is ready, by a line on its output."""


def environment() -> dict[str, str]:
    """Ours, in which our modules and those of the tests are found."""
    return os.environ | {"PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}


@contextmanager
def children() -> Iterator[Start]:
    """Gives what starts them; all are killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline(), "it did not start"
        return process

    try:
        yield start
    finally:
        for process in started:
            process.kill()
            process.communicate()
