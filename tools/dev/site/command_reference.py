"""Arguments and options of all commands, made from the command line itself.

A command, argument or option without help is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer.main

from ...command_app import app
from .config_reference import UndescribedError

HELP_OPTIONS = {"--help", "-h"}


def all_commands() -> dict[str, Any]:
    """Return every command by its full name, those of groups included: "shm ls"."""
    return dict(_commands(typer.main.get_command(app)))


def _commands(group: Any, words: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{words}{name} ")
        else:
            yield f"{words}{name}", command


def command_reference(name: str) -> str:
    """Return usage, arguments and options of one command in Markdown.

    Raises `KeyError` if there is no such command, and `UndescribedError`.
    """
    command = all_commands()[name]
    if not (command.help or "").strip():
        raise UndescribedError(f"the command {name} has no help")
    shown = [each for each in command.params if not HELP_OPTIONS & {*each.opts}]
    arguments = [each for each in shown if each.param_type_name == "argument"]
    words = [_argument(each) for each in arguments]
    usage = " ".join(["kvcascade", name, "[OPTIONS]", *words])
    rows = [f"| {_names(each)} | {_default(each)} | {_help(name, each)} |" for each in shown]
    return "\n".join([f"`{usage}`", "", "| argument, option | default | meaning |", "|---|---|---|"]
                     + rows)  # fmt: skip


def _argument(parameter: Any) -> str:
    word = parameter.metavar or parameter.name.upper()
    return str(word) if parameter.required else f"[{word}]"


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    value = "" if getattr(parameter, "is_flag", False) else f" {parameter.metavar or 'VALUE'}"
    return ", ".join(f"`{option}{value}`" for option in parameter.opts)


def _default(parameter: Any) -> str:
    value = parameter.default
    if parameter.required:
        return "**required**"
    is_nothing = value is None or value is False or value == () or callable(value)
    return "" if is_nothing else f"`{value}`"


def _help(name: str, parameter: Any) -> str:
    text = " ".join((getattr(parameter, "help", None) or "").split())
    if not text:
        raise UndescribedError(f"{parameter.opts[0]} of the command {name} has no help")
    return text.replace("|", "\\|")
