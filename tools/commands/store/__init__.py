"""`kvcascade store`: options."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..command_line import AlsoOption, ExitCode, answering, finish, given_path

TierPath = Annotated[
    Path, typer.Argument(metavar="PATH", help="The tier's first path.", parser=given_path)
]
CapacityOption = Annotated[
    str | None,
    typer.Option(
        "--capacity", metavar="SIZE", help="Disk space over all paths: 2TiB, 500GB or 80%."
    ),
]
PolicyOption = Annotated[
    str | None, typer.Option("--policy", metavar="NAME", help="Eviction policy of the path.")
]
DurabilityOption = Annotated[
    str | None,
    typer.Option(
        "--durability",
        metavar="KIND",
        help='"process", or "power" for blocks that survive a loss of power.',
    ),
]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        "--write-budget", metavar="AMOUNT", help="Maximum to write in 24 hours: 500GB, 0.3 DWPD."
    ),
]
MinFreeOption = Annotated[
    str | None,
    typer.Option("--min-free", metavar="SIZE", help="Disk space that is never used: 50GB, 5%."),
]
SegmentOption = Annotated[
    str | None,
    typer.Option("--segment-size", metavar="SIZE", help="Approximate size of a new file: 1GiB."),
]
WaitOption = Annotated[
    bool, typer.Option("--wait", help="Wait while another process is the writer; then take over.")
]
TakeOverOption = Annotated[
    bool, typer.Option("--take-over", help="Ask another writer to close the path, and take over.")
]


def store(
    path: TierPath,
    also: AlsoOption = None,
    capacity: CapacityOption = None,
    policy: PolicyOption = None,
    durability: DurabilityOption = None,
    write_budget: BudgetOption = None,
    min_free: MinFreeOption = None,
    segment_size: SegmentOption = None,
    wait: WaitOption = False,
    take_over: TakeOverOption = False,
) -> None:
    """Write a path for all engines, as a service, until it is stopped.

    SIGTERM, SIGINT and SIGHUP stop it. Engines of the path find this writer, and elect none among
    themselves while it runs. It moves no blocks. Options that are not given are read from the
    environment (KVCASCADE_NVME_CAPACITY and so on), then from the record of the path; the rest has
    the defaults of the configuration.

    Examples:

        kvcascade store /mnt/nvme/kv --capacity 2TiB

        kvcascade store /mnt/nvme/kv --policy s3fifo --take-over
    """
    given = {
        "capacity": capacity,
        "policy": policy,
        "durability": durability,
        "write_budget": write_budget,
        "min_free": min_free,
        "segment_size": segment_size,
    }
    words = {name: value for name, value in given.items() if value is not None}
    with answering(as_json=False):
        try:
            code = _serve([path, *(also or ())], words, wait, take_over)
        except KeyboardInterrupt:  # the signal came before it could be the writer
            code = ExitCode.OK
    finish(code)


def _serve(
    paths: Sequence[Path], words: Mapping[str, object], wait: bool, take_over: bool
) -> ExitCode:
    from ....handlers.node.child_start import allow_open_files
    from ....logs import log_to_stderr
    from .serve_path import Rival, StoreEnd, parts_of, serve

    log_to_stderr("kvcascade store", logging.INFO)
    allow_open_files()  # the writer keeps one open for each namespace and folder
    rival = Rival.ASKED if take_over else Rival.AWAITED if wait else Rival.REFUSED
    end = serve(parts_of(paths, words, os.environ), rival=rival)
    return ExitCode.CANNOT_OPEN if end is StoreEnd.FAILED else ExitCode.OK
