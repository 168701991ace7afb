"""Processes that a test starts: what they run under, and those made of a few lines of code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .waiting import wait_until

TESTS = Path(__file__).resolve().parent.parent

WRITERS_MAX = 30
LONG_PUT = """
import sys, obstore
store = obstore.store.LocalStore(sys.argv[1])
obstore.put(store, sys.argv[2], bytes(1 << 30), mode="create", use_multipart=False)
"""

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


def left_by_a_killed_writer(root: Path, target: Path) -> Path:
    """Kill writers of a remote folder until one has not completed its file; return what it left."""
    for _ in range(WRITERS_MAX):
        target.unlink(missing_ok=True)
        name = str(target.relative_to(root))
        writer = subprocess.Popen([sys.executable, "-c", LONG_PUT, root, name])
        wait_until(lambda: target.exists() or any(root.rglob(f"{target.name}#1")))
        writer.kill()
        writer.wait()
        if not target.exists():
            (left,) = root.rglob("*#*")
            return left
    raise AssertionError("every writer completed its file before it was killed")
