"""`kvcascade demo`: options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...commands.command_line import JsonOption, OutOption

KeepOption = Annotated[bool, typer.Option("--keep", help="Leave the NVMe tier's files there.")]


def demo(
    out: OutOption = Path("out"), keep: KeepOption = False, as_json: JsonOption = False
) -> None:
    """Run the main job end to end, and print what came from where.

    Examples:

        kvcascade demo

        kvcascade demo --out results --keep
    """
    from . import run

    raise typer.Exit(run(out, keep, as_json))
