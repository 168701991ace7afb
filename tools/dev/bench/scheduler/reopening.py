"""Duration of a start, and its resident memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

from ....commands.bench.bench_results import OURS, BenchError, Goal, Quantity
from ....commands.bench.raw_disk import drop_page_cache
from ..measurement import Case, Figures, Measurement, MeasurementSetup
from .filled import filled

TIMEOUT_S = 600
CLEAN, KILLED = "after a clean close", "after kill -9"


def cases(setup: MeasurementSetup) -> Generator[Case, None, None]:
    """Yield a case per size."""
    for blocks in setup.scale.reopen_blocks:
        folder = filled(setup, blocks)
        yield Case(f"{blocks:,} blocks", {OURS: partial(reopen, folder, blocks)})


def reopen(folder: Path, blocks: int) -> Figures:
    """Run two processes: one opens after a clean close and is killed, the next one opens after
    that."""
    figures: dict[str, float] = {}
    for how, end in ((CLEAN, "kill"), (KILLED, "clean")):
        drop_page_cache([folder])
        found = run_probe(folder, blocks, end)
        if not found["was_found"]:
            raise BenchError(f"the tier in {folder} was not found as it was left: {found}")
        figures[f"opening {how}"] = found["open_s"]
        figures[f"first lookup {how}"] = found["first_lookup_s"] * 1e3
        figures[f"resident {how}"] = found["resident_bytes"] / blocks
        figures[f"  not file-backed {how}"] = found["anonymous_bytes"] / blocks
        figures[f"hit rate {how}"] = 100 * found["hit_rate"]
        figures[f"recency kept {how}"] = 100 * found["recency_kept"]
    return figures


def run_probe(folder: Path, blocks: int, end: str) -> dict[str, Any]:
    """Run one process, and return its output."""
    command = [sys.executable, "-m", f"{__package__}.reopen_probe", str(folder), str(blocks), end]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode != (-signal.SIGKILL if end == "kill" else 0):
        raise BenchError(f"the process that reopens ended badly:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def quantities() -> tuple[Quantity, ...]:
    """Return the rows: each after a clean close, and after kill -9.

    Goals on times are for about four million blocks; smaller tiers have the same goals.
    """
    found: list[Quantity] = []
    whole = (Goal(100.0, is_least=True),)
    for how, opening_s in ((CLEAN, 1.0), (KILLED, 5.0)):
        found += [
            Quantity(f"opening {how}", "s", (Goal(opening_s),)),
            Quantity(f"first lookup {how}", "ms", (Goal(10.0),)),
            Quantity(f"resident {how}", "B/block", (Goal(100.0),)),
            Quantity(f"  not file-backed {how}", "B/block"),
            Quantity(f"hit rate {how}", "%", whole, is_more_better=True),
            Quantity(f"recency kept {how}", "%", whole, is_more_better=True),
        ]
    return tuple(found)


MEASUREMENT = Measurement(
    "reopening",
    "Reopening: a new process opens the NVMe tier",
    "Page cache dropped before. Opening: until the manager can be asked, with the writer of the "
    "path and the node in the same process, imports apart. Resident: growth of RssAnon + RssFile + "
    "RssShmem after 50,000 random blocks were asked for, so mapped pages of the index count. "
    "Recency: the 1,000 blocks that would leave next, before and after. vLLM's fs tier keeps no "
    "index: it opens at once, and pays for it at every question.",
    quantities(),
    cases,
)
