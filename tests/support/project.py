"""The files that belong to the project, as git lists them: no test keeps a list of its own."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "kvcascade"
FOLDERS = ("tiers", "manager", "handlers", "tools")
"""Of the root; inside the package they are links."""
LINKS = {f"{PACKAGE}/{folder}" for folder in FOLDERS}


@cache
def files() -> tuple[str, ...]:
    """Paths of all files, relative to the root: committed ones and new ones that git would add.

    Skips the test, or the module that asks while it is imported, where this is no git checkout.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(
            "not a git checkout: what belongs to the project cannot be told",
            allow_module_level=True,
        )
    names = set(listed.decode().split("\0")) - {""} - LINKS
    return tuple(sorted(name for name in names if (ROOT / name).is_file()))


@cache
def module_files() -> dict[str, Path]:
    """Every module of the package: its path in a wheel, and its file."""
    modules: dict[str, Path] = {}
    for name in files():
        folder = name.split("/")[0]
        if name.endswith(".py") and folder in (PACKAGE, *FOLDERS):
            modules[name if folder == PACKAGE else f"{PACKAGE}/{name}"] = ROOT / name
    return modules


def python_files_outside_tests() -> list[str]:
    """All of them are modules of the package; a test that sees fewer misses a folder.

    Programs for readers are no modules.
    """
    others = ("tests/", "docs/examples/")
    return [n for n in files() if n.endswith(".py") and not n.startswith(others)]
