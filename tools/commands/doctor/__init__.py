"""`kvcascade doctor`: options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..command_line import (
    ExitCode,
    JsonOption,
    answering,
    answering_apart,
    check_is_file,
    emit,
    finish,
)

ConfigArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="[CONFIG.json]",
        help="vLLM's --kv-transfer-config, as a file; -: standard input.",
        readable=False,
    ),
]


def doctor(config: ConfigArgument = None, as_json: JsonOption = False) -> None:
    """Find problems of machine and configuration, each with its remedy.

    Without a file, the configuration is that of the environment variables, if there are any.
    Nothing is created; a few files without names are, briefly, where the tiers will lie.

    Examples:

        kvcascade doctor

        kvcascade doctor transfer.json

        kvcascade doctor transfer.json --json
    """
    with answering(as_json):
        if config is not None and str(config) != "-":
            check_is_file("CONFIG", config)
        with answering_apart(True):  # vLLM prints to standard output
            from .doctor_facts import look
            from .findings import Severity, findings, print_findings

            found = findings(look(config))
        if as_json:
            emit("doctor", {"findings": found})
        else:
            print_findings(found)
    has_problem = any(each.level is Severity.PROBLEM for each in found)
    finish(ExitCode.PROBLEMS if has_problem else ExitCode.OK)
