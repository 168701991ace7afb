"""`kvcascade bench`: what kvcascade costs, beside what vLLM ships and what the machine can do.

Every figure is measured in this run, on this machine, contenders taking turns. Tables go to the
screen, everything (all samples, machine, versions) to `bench.json`. A goal that is missed is
shown, and is no failure: the exit status says only whether the measurements could be made.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..commands.common import (
    ExitCode,
    answering_apart,
    check_place,
    code_of,
    complain,
    emit,
    lacks,
    sentence,
    terminable,
)

if TYPE_CHECKING:
    from .measurement import Measurement, Setup
    from .results import Table
    from .scale import Scale

NEEDED = ("vllm", "rich")
"""Modules that the benchmark needs and the package does not."""
BARE, BARE_NEEDED = ("gpu", "round_trip", "gpu_engine"), ("torch", "rich")
"""Measurements that run without vLLM, LMDB and msgspec, and what those need."""
_LOG_LEVEL = "VLLM_LOGGING_LEVEL"

MEASUREMENTS = {
    "manager": "what one block costs the scheduler's thread in the CPU tier",
    "reopening": "how long a start takes, and what it keeps in memory",
    "lookups": "what a question about a block on NVMe costs the scheduler's thread",
    "transfers": "CPU to NVMe, and back to the device after a restart",
    "busy": "the same while the scheduler's thread never rests",
    "engine": "time to the first token in the real engine, and bytes written to the disk",
    "restart": "what a server computes again after a restart, and how it serves a storm",
    "gpu": "device to CPU tier and back, on a machine with a GPU; then the two below",
    "round_trip": "all tiers without an engine: store, write, restart, read back, compare",
    "gpu_engine": "the engine on a GPU, where vLLM is installed: tokens, time to the first one",
}
"""Name (and module) of every measurement, and what it is about, in the order in which they run:
`lookups` uses blocks of the tiers in which `reopening` looks for the order of the last use."""
ASKED_FOR = BARE
"""Measured only if asked for by name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    listed = "; ".join(f"{name}: {summary}" for name, summary in MEASUREMENTS.items())
    parser.add_argument("--quick", action="store_true", help="smaller sizes, under two minutes")
    parser.add_argument(
        "--only",
        action="append",
        choices=tuple(MEASUREMENTS),
        metavar="NAME",
        help=f"this measurement only (may be given more than once). {listed}",
    )
    parser.add_argument(
        "--repeats", type=_count, metavar="N", help="how often everything is measured"
    )
    parser.add_argument(
        "--nvme",
        action="append",
        type=_option,
        default=[],
        metavar="OPTION=VALUE",
        help="an option of our NVMe tier in transfers, such as io_threads=8 or direct_io=false",
    )
    parser.add_argument(
        "--path",
        type=Path,
        metavar="FOLDER",
        help="a folder on the disk to measure (default: the one of --out)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out"),
        metavar="FOLDER",
        help="where bench.json goes (default: out)",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="PNG", help="also draw the results (needs kvcascade[plot])"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document, progress on standard error"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark; returns the exit status."""
    is_bare = set(arguments.only or MEASUREMENTS) <= set(BARE)
    needed: tuple[str, ...] = BARE_NEEDED if is_bare else NEEDED
    needed = (*needed, "matplotlib") if arguments.plot else needed
    if lacks(needed, "bench", arguments.json):
        return ExitCode.MISSING
    from ...errors import KVCascadeError
    from .results import BenchError

    try:
        with _only_errors_of_vllm(), terminable():
            with answering_apart(arguments.json):
                found = _run(arguments)
    except BenchError as error:
        return complain(str(error), ExitCode.PROBLEMS, arguments.json, "\nbench")
    except KVCascadeError as error:
        return complain(sentence(error), code_of(error), arguments.json, "\nbench")
    except KeyboardInterrupt:
        return complain("interrupted", ExitCode.INTERRUPTED, arguments.json, "\nbench")
    if arguments.json:
        emit("bench", found)
    return ExitCode.OK


@contextmanager
def _only_errors_of_vllm() -> Iterator[None]:
    """In this process and its engines. Our own level follows from vLLM's when first imported."""
    loggers = [logging.getLogger(name) for name in ("vllm", "kvcascade")]
    levels, level = [logger.level for logger in loggers], os.environ.get(_LOG_LEVEL)
    os.environ.setdefault(_LOG_LEVEL, "ERROR")
    loggers[0].setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, own in zip(loggers, levels, strict=True):
            logger.setLevel(own)
        if level is None:
            del os.environ[_LOG_LEVEL]


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure, show and save; returns what was saved."""
    from .machine import headline, machine_facts, version_facts
    from .measurement import Setup
    from .report import Reporter
    from .results import document

    out, folder = _folders(arguments)
    scale = scale_of(arguments)
    names = names_of(arguments.only, scale)
    reporter, began = Reporter(), time.monotonic()
    facts: dict[str, Any] = {
        "machine": machine_facts(folder),
        "versions": version_facts(),
        "is_quick": bool(arguments.quick),
        "repeats": scale.repeats,
        "nvme": dict(arguments.nvme),
        "notes": [],
    }

    def note(line: str) -> None:
        facts["notes"].append(line)
        reporter.print(f"note: {line}")

    reporter.print(f"kvcascade bench: {headline(facts)}")
    tables: list[Table] = []
    try:
        for name in names:
            with reporter.measuring(name):
                setup = Setup(folder / name, scale, reporter.progress, dict(arguments.nvme), note)
                tables.append(measure(name, setup))
            reporter.table(tables[-1])
            facts["seconds"] = round(time.monotonic() - began, 1)
            write(out / "bench.json", tables, facts)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    reporter.print(f"{facts['seconds']:.0f} s in all; saved {out / 'bench.json'}")
    found = document(tables, facts)
    if arguments.plot:
        from .plot import plot

        plot(found, arguments.plot)
        reporter.print(f"saved {arguments.plot}")
    return found


def _folders(arguments: argparse.Namespace) -> tuple[Path, Path]:
    """Where results go, and an empty one to measure in. Raises the mapped form of an `OSError`,
    and `ConfigError` if the picture has no place, which is often in the former."""
    from ...errors import os_errors

    out: Path = arguments.out.absolute()
    folder = (arguments.path or out).absolute() / "kvcascade-bench"
    with os_errors(f"making {out}"):
        out.mkdir(parents=True, exist_ok=True)
    check_place("--plot", arguments.plot)
    with os_errors(f"making {folder}"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    return out, folder


def scale_of(arguments: argparse.Namespace) -> Scale:
    """How much the arguments ask for."""
    from dataclasses import replace

    from .scale import FULL, QUICK

    scale = QUICK if arguments.quick else FULL
    n = arguments.repeats
    return replace(scale, repeats=n, engine_repeats=min(n, scale.engine_repeats)) if n else scale


def names_of(only: Sequence[str] | None, scale: Scale) -> list[str]:
    """The measurements that are made: those asked for, or what belongs to the scale. With `gpu`
    comes all that a machine with a GPU is asked first."""
    if only:
        asked = {*only, *BARE} if "gpu" in only else {*only}
        return [name for name in MEASUREMENTS if name in asked]
    left_out = ASKED_FOR if scale.is_whole else (*ASKED_FOR, "engine", "restart")
    return [name for name in MEASUREMENTS if name not in left_out]


def measure(name: str, setup: Setup) -> Table:
    """Run one measurement in its folder, which is gone afterwards."""
    from .measurement import run as run_measurement

    measurement: Measurement = import_module(f".{name}", __package__).MEASUREMENT
    setup.folder.mkdir(parents=True)
    try:
        return run_measurement(measurement, setup)
    finally:
        shutil.rmtree(setup.folder, ignore_errors=True)


def write(path: Path, tables: Sequence[Table], facts: dict[str, Any]) -> None:
    """Save what was measured so far."""
    from .results import document

    path.write_text(json.dumps(document(tables, facts), indent=1, ensure_ascii=False) + "\n")


def _option(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise argparse.ArgumentTypeError("give it as OPTION=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:  # a word
        return name, value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("give a number from 1 up")
    return value
