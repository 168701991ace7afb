"""Commands with parsers of their own: `add_arguments(parser)` and `run(arguments) -> int`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import NoReturn

import typer

from .common import ExitCode, complain

PACKAGE = __name__.removesuffix(".commands.passed_on")


@dataclass(frozen=True, slots=True)
class PassedOn:
    """One such command."""

    module: str
    summary: str
    """Its line of help."""
    examples: tuple[str, ...] = ()
    """For its own help, unless the module says more there."""


PASSED_ON = {
    "bench": PassedOn(
        "bench",
        "measure beside vLLM's own offloading and the disk's limit",
        (
            "kvcascade bench --quick",
            "kvcascade bench --path /mnt/nvme --only transfers --repeats 5",
            "kvcascade bench --out results --plot results/bench.png",
        ),
    ),
    "demo": PassedOn(
        "demo",
        "run the main job end to end and print what came from where",
        ("kvcascade demo", "kvcascade demo --out results --keep"),
    ),
    "replay": PassedOn("replay.command", "replay a request trace and compare policies and sizes"),
    "version": PassedOn(
        "version",
        "print the version of kvcascade",
        ("kvcascade version", "kvcascade version --json"),
    ),
}


def pass_on(app: typer.Typer) -> None:
    """Register every such command."""
    for name, command in PASSED_ON.items():
        app.command(
            name,
            help=command.summary[0].upper() + command.summary[1:] + ".",
            add_help_option=False,
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )(_runner(name))


class Parser(argparse.ArgumentParser):
    """One that may answer a wrong call with a JSON document."""

    as_json = False

    def error(self, message: str) -> NoReturn:
        """As `argparse` has it."""
        if self.as_json:
            raise typer.Exit(complain(message, ExitCode.USAGE, True))
        super().error(message)


def parser_of(name: str) -> Parser:
    """The parser of such a command."""
    command = PASSED_ON[name]
    parser = Parser(
        prog=f"kvcascade {name}",
        description=command.summary,
        epilog="\n".join(("examples:", *(f"  {example}" for example in command.examples))),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    import_module(f"{PACKAGE}.{command.module}").add_arguments(parser)
    return parser


def _runner(name: str) -> Callable[[typer.Context], None]:
    def run(context: typer.Context) -> None:
        parser = parser_of(name)
        parser.as_json = "--json" in context.args
        arguments = parser.parse_args(context.args)
        raise typer.Exit(import_module(f"{PACKAGE}.{PASSED_ON[name].module}").run(arguments))

    return run
