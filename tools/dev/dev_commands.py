"""Commands that only a checkout has: options of `kvcascade bench` without a path, and of `demo`.

`tools/command_app` registers `COMMANDS` where this module is importable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from ..commands.bench import bench as bench_path
from ..commands.command_line import (
    ExitCode,
    JsonOption,
    OutOption,
    complain,
)
from .bench import BARE, BARE_MINUTES, MEASUREMENTS, BenchOptions, run


def _known(names: list[str] | None) -> list[str] | None:
    for name in names or ():
        if name not in MEASUREMENTS:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(MEASUREMENTS)}")
    return names


def _begun(incomplete: str) -> list[tuple[str, str]]:
    return [pair for pair in MEASUREMENTS.items() if pair[0].startswith(incomplete)]


DEFAULT_OUT = Path("out")
_LISTED = "; ".join(f"{name}: {summary}" for name, summary in MEASUREMENTS.items())
QuickOption = Annotated[bool, typer.Option("--quick", help="Smaller sizes, under two minutes.")]
OnlyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="NAME",
        callback=_known,
        autocompletion=_begun,
        help=f"This measurement only (repeatable). {_LISTED}.",
    ),
]
RepeatsOption = Annotated[
    int | None,
    typer.Option("--repeats", metavar="N", min=1, help="Number of repetitions of each case."),
]
MinutesOption = Annotated[
    float | None,
    typer.Option(
        "--minutes",
        metavar="N",
        min=0,
        help=f"Limit in minutes to start cases; {BARE_MINUTES:g} for {', '.join(BARE)}, else none.",
    ),
]
LMCacheOption = Annotated[
    Path | None,
    typer.Option(
        "--lmcache-python",
        metavar="PYTHON",
        help="Python of an environment with LMCache and vLLM; first_token and faults measure it.",
    ),
]
PathOption = Annotated[
    Path | None,
    typer.Option(
        "--path", metavar="FOLDER", help="Folder on the disk to measure; default: that of --out."
    ),
]


DiskOption = Annotated[
    Path | None,
    typer.Argument(
        metavar="PATH",
        help="Measure the disk of this folder through our tiers, without vLLM.",
        readable=False,
    ),
]
KeepOption = Annotated[bool, typer.Option("--keep", help="Keep the NVMe tier's files.")]


def bench(
    disk: DiskOption = None,
    quick: QuickOption = False,
    only: OnlyOption = None,
    repeats: RepeatsOption = None,
    path: PathOption = None,
    out: OutOption = DEFAULT_OUT,
    minutes: MinutesOption = None,
    lmcache_python: LMCacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure beside vLLM's own offloading and the disk's limit.

    With PATH it measures the rates of the tiers alone, as an installed `kvcascade bench` does.

    Examples:

        kvcascade bench --quick

        kvcascade bench --path /mnt/nvme --only transfers --repeats 5
    """
    names = tuple(only or ())
    python = lmcache_python and lmcache_python.absolute()  # servers have other working folders
    asked = BenchOptions(quick, names, repeats, path, out, as_json, minutes, python)
    if disk is not None:
        if asked != BenchOptions(as_json=as_json):
            said = "PATH stands alone; options other than --json are for comparisons without PATH"
            raise typer.Exit(complain(said, ExitCode.USAGE, as_json))
        bench_path(disk, as_json)
        return
    run(asked)


def demo(
    out: OutOption = DEFAULT_OUT, keep: KeepOption = False, as_json: JsonOption = False
) -> None:
    """Run the main use end to end, and print the sources of tokens.

    Examples:

        kvcascade demo

        kvcascade demo --out results --keep
    """
    from .demo import run as run_demo

    run_demo(out, keep, as_json)


COMMANDS: Mapping[str, Callable[..., None]] = {"bench": bench, "demo": demo}
"""Commands by name."""
