"""`kvcascade bench`: cost of kvcascade, beside vLLM's own offloading and the machine's limits.

Every figure is measured in this run, on this machine, with the contenders in turn. Tables are
printed; all samples, machine facts and versions go to `bench.json`. A missed goal is shown and is
not a failure: the exit status only says whether the measurements could be made.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...commands.command_line import (
    answering,
    answering_apart,
    check_found,
    emit,
)

if TYPE_CHECKING:
    from ...commands.bench.bench_results import Table
    from .measurement import Measurement, MeasurementSetup
    from .scale import Scale

NEEDED = ("vllm", "rich")
"""Modules that the benchmark needs and the package does not."""
BARE, BARE_NEEDED = ("gpu", "round_trip", "gpu_engine"), ("torch", "rich")
"""Measurements that run without vLLM, LMDB and msgspec, and the modules that those need."""
BARE_MINUTES = 5.0
"""Time limit, in minutes, for these measurements. With the GPU tests they take about 8 minutes at
most."""
BARE_SHARES = {"gpu": 0.8, "gpu_engine": inf}
"""Share of the time limit after which a measurement starts no new case; 1 for others. The engine
starts only if vLLM is installed, and has no limit."""
_LOG_LEVEL = "VLLM_LOGGING_LEVEL"

MEASUREMENTS = {
    "manager": "what one block costs the scheduler's thread in the CPU tier",
    "reopening": "how long a start takes, and what it keeps in memory",
    "lookups": "what a question about a block on NVMe costs the scheduler's thread",
    "path": "lookups, commits and opening of the tables of a path",
    "shared": "rates of several engines that share a path, and the processor time of its writer",
    "transfers": "CPU to NVMe, and back to the device after a restart",
    "busy": "the same while the scheduler's thread never rests",
    "faults": "wrong bytes served, and blocks lost, after faults on disk",
    "engine": "time to the first token in the real engine, and bytes written to the disk",
    "first_token": "time to the first token cold, warm, after a restart and after kill -9",
    "restart": "what a server computes again after a restart, and how it serves a storm",
    "gpu": "device to CPU tier and back, on a machine with a GPU; then the two below",
    "round_trip": "all tiers without an engine: store, write, restart, read back, compare",
    "gpu_engine": "the engine on a GPU, where vLLM is installed: tokens, time to the first one",
    "remote_rates": "rates of remote tiers, beside clients without checks",
    "remote_distance": "reads and lookups of a remote server that is far away",
    "remote_obj": "lookups and reads of blocks on S3, beside vLLM's obj tier",
    "remote_lookups": "lookups with and without a remote tier, for the scheduler's thread",
}
"""Names and subjects of all measurements, in the order in which they run. `lookups` uses blocks of
the tiers whose recency order `reopening` checks."""
_MODULES = {
    "manager": "scheduler.manager_cost",
    "reopening": "scheduler.reopening",
    "lookups": "scheduler.nvme_lookups",
    "path": "path_rates",
    "shared": "shared_path",
    "transfers": "transfer_bench",
    "engine": "engine.engine",
    "first_token": "engine.first_token",
    "restart": "engine.restart",
    "gpu": "gpu.gpu",
    "gpu_engine": "engine.gpu_engine",
}
"""Modules of measurements, where they have another name."""
ASKED_FOR = (*BARE, "faults", "shared", *(name for name in MEASUREMENTS if "remote_" in name))
"""Measurements that run only if their name is given."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Options of the command."""

    quick: bool = False
    only: tuple[str, ...] = ()
    """Names of measurements; empty for those of the scale."""
    repeats: int | None = None
    path: Path | None = None
    """Folder on the disk to measure; None for the folder of `out`."""
    out: Path = Path("out")
    as_json: bool = False
    minutes: float | None = None
    """Time after which no case begins, in minutes; None for `BARE_MINUTES` with `BARE`, and for no
    limit with others."""
    lmcache_python: Path | None = None
    """Python of an environment with LMCache and the engine."""


def run(options: BenchOptions) -> None:
    """Run the benchmark. An error ends the command."""
    is_bare = set(options.only or MEASUREMENTS) <= set(BARE)
    with answering(options.as_json, "bench"):
        check_found(BARE_NEEDED if is_bare else NEEDED, "bench")
    with answering(options.as_json, "\nbench"):  # below the progress
        with _only_errors_of_vllm(), answering_apart(options.as_json):
            found = _run(options)
        if options.as_json:
            emit("bench", found)


@contextmanager
def _only_errors_of_vllm() -> Iterator[None]:
    """Log only vLLM's errors, in this process and its engines.

    The log level of kvcascade follows vLLM's at the first import.
    """
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


def _run(options: BenchOptions) -> dict[str, Any]:
    """Measure, print and save; return the saved document."""
    from ...commands.bench.bench_report import Reporter
    from ...commands.bench.bench_results import LMCACHE, document
    from ...commands.bench.machine_facts import headline, run_facts
    from .measurement import MeasurementSetup
    from .peers.lmcache_peer import version_of

    out, folder = _folders(options)
    scale = scale_of(options)
    names = names_of(options.only, scale)
    reporter, began = Reporter(), time.monotonic()
    minutes = minutes_of(options)
    facts = run_facts(command_of(options), folder, scale.repeats, is_quick=options.quick)
    if options.lmcache_python is not None:
        facts["versions"][LMCACHE] = version_of(options.lmcache_python)

    def note(line: str) -> None:
        facts["notes"].append(line)
        reporter.print(f"note: {line}")

    def has_time(name: str) -> bool:
        share = 1.0 if options.minutes is not None else BARE_SHARES.get(name, 1.0)
        return time.monotonic() - began < minutes * 60 * share

    def keep(table: Table) -> None:
        write(out / "bench.json", [*tables, table], facts)

    reporter.print(f"kvcascade bench: {headline(facts)}")
    tables: list[Table] = []
    try:
        for name in names:
            if not has_time(name):
                note(f"{name} is not measured, the time is up; --minutes gives more")
            else:
                with reporter.measuring(name):
                    in_time = partial(has_time, name)
                    setup = MeasurementSetup(
                        folder / name,
                        scale,
                        reporter.progress,
                        note,
                        in_time,
                        options.lmcache_python,
                        keep,
                    )
                    tables.append(measure(name, setup))
                reporter.table(tables[-1])
            facts["seconds"] = round(time.monotonic() - began, 1)
            write(out / "bench.json", tables, facts)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    reporter.print(f"{facts['seconds']:.0f} s in all; saved {out / 'bench.json'}")
    return document(tables, facts)


def command_of(options: BenchOptions) -> str:
    """Return the command that repeats these measurements; folders of this machine are left out."""
    words = ["kvcascade", "bench"]
    words += ["--quick"] if options.quick else []
    words += [word for name in options.only for word in ("--only", name)]
    words += ["--repeats", str(options.repeats)] if options.repeats else []
    words += ["--minutes", f"{options.minutes:g}"] if options.minutes is not None else []
    words += ["--lmcache-python", "PYTHON"] if options.lmcache_python else []
    return shlex.join(words)


def _folders(options: BenchOptions) -> tuple[Path, Path]:
    """Return the folder for results, and an empty folder for measurements.

    Raises the mapped form of an `OSError`.
    """
    from ....errors import os_errors

    out: Path = options.out.absolute()
    folder = (options.path or out).absolute() / "kvcascade-bench"
    with os_errors(f"making {out}"):
        out.mkdir(parents=True, exist_ok=True)
    with os_errors(f"making {folder}"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    return out, folder


def scale_of(options: BenchOptions) -> Scale:
    """Return the sizes of the measurements."""
    from dataclasses import replace

    from .scale import FULL, QUICK

    scale = QUICK if options.quick else FULL
    n = options.repeats
    return replace(scale, repeats=n, engine_repeats=min(n, scale.engine_repeats)) if n else scale


def minutes_of(options: BenchOptions) -> float:
    """Return the minutes within which measurements may begin."""
    if options.minutes is not None:
        return options.minutes
    return BARE_MINUTES if options.only and {*options.only} <= {*BARE} else inf


def names_of(only: Sequence[str], scale: Scale) -> list[str]:
    """Return the measurements to make: those asked for, or those of the scale.

    `gpu` adds all measurements that a machine with a GPU runs first.
    """
    if only:
        asked = {*only, *BARE} if "gpu" in only else {*only}
        return [name for name in MEASUREMENTS if name in asked]
    left_out = ASKED_FOR if scale.is_whole else (*ASKED_FOR, "engine", "first_token", "restart")
    return [name for name in MEASUREMENTS if name not in left_out]


def measurement_of(name: str) -> Measurement:
    """Return one of the `MEASUREMENTS`."""
    module = import_module(f".{_MODULES.get(name, name)}", __package__)
    measurement: Measurement = module.MEASUREMENT
    return measurement


def measure(name: str, setup: MeasurementSetup) -> Table:
    """Run one measurement in a folder that is removed afterwards."""
    from .measurement import run as run_measurement

    measurement = measurement_of(name)
    setup.folder.mkdir(parents=True)
    try:
        return run_measurement(measurement, setup)
    finally:
        shutil.rmtree(setup.folder, ignore_errors=True)


def write(path: Path, tables: Sequence[Table], facts: dict[str, Any]) -> None:
    """Save all results so far."""
    from ...commands.bench.bench_results import document

    path.write_text(json.dumps(document(tables, facts), indent=1, ensure_ascii=False) + "\n")
