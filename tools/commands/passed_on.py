"""Commands with parsers of their own: `add_arguments(parser)` and `run(arguments) -> int`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import typer

PACKAGE = __name__.removesuffix(".commands.passed_on")
PASSED_ON = {
    "bench": ("bench", "measure beside vLLM's own offloading and the disk's limit"),
    "demo": ("demo", "run the main job end to end and print what came from where"),
    "replay": ("replay.command", "replay a request trace and compare policies and sizes"),
    "version": ("version", "print the version of kvcascade"),
}
"""Command name to its module and its line of help."""


def pass_on(app: typer.Typer) -> None:
    """Register every such command that is there."""
    for name, (module, summary) in PASSED_ON.items():
        if _is_there(f"{PACKAGE}.{module}"):
            app.command(
                name,
                help=summary[0].upper() + summary[1:] + ".",
                add_help_option=False,
                context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
            )(_runner(name, module, summary))


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _runner(name: str, module: str, summary: str) -> Callable[[typer.Context], None]:
    def run(context: typer.Context) -> None:
        command = import_module(f"{PACKAGE}.{module}")
        parser = argparse.ArgumentParser(prog=f"kvcascade {name}", description=summary)
        command.add_arguments(parser)
        raise typer.Exit(command.run(parser.parse_args(context.args)))

    return run
