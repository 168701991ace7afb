"""The command line: `kvcascade COMMAND`, or `python -m kvcascade.tools COMMAND`.

A command is a module of this package with `add_arguments(parser)` and `run(arguments) -> int`; it
is imported only when it is the one that was asked for.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {
    "bench": "measure beside vLLM's own offloading and the disk's limit",
    "demo": "run the main job end to end and print what came from where",
    "version": "print the version of kvcascade",
}
"""Command (and module) name to its line of help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (2 for a wrong call, as argparse has it)."""
    parser = argparse.ArgumentParser(prog="kvcascade", description="Multi-tier KV-cache offloading")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    asked = list(sys.argv[1:] if argv is None else argv)
    modules = {}
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name in asked[:1]:
            modules[name] = import_module(f".{name}", __package__)
            modules[name].add_arguments(command)
    arguments = parser.parse_args(asked)
    status: int = modules[arguments.command].run(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
