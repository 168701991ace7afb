"""`kvcascade bench PATH`: options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..command_line import JsonOption, answering, answering_apart, emit, given_path

DiskArgument = Annotated[
    Path,
    typer.Argument(metavar="PATH", help="A folder on the disk to measure.", parser=given_path),
]


def bench(path: DiskArgument, as_json: JsonOption = False) -> None:
    """Measure the rates of the tiers on this machine, by block size.

    Takes about a minute, and uses about 1 GiB of the disk and of memory until it ends.
    `kvcascade replay --bench FILE` reads the JSON document.

    Examples:

        kvcascade bench /mnt/nvme

        kvcascade bench /mnt/nvme --json > rates.json
    """
    with answering(as_json):
        from .tier_rates import measure_path

        with answering_apart(as_json):
            found = measure_path(path)
        if as_json:
            emit("bench", found)
