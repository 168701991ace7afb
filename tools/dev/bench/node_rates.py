"""Cost of a block for the scheduler's thread, with a node below: look, put, get, and their ends.

The node is a process. Between two steps the thread sleeps while the node works, so each step begins
with cold caches, as in an engine.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from ....assembly.node_parts import OpenTier, SlotMemory
from ....manager.below.node_tier import NodeTier
from ....tiers.base import BlockHash, BlockOutcome
from ....tiers.cpu.header import HEADER_BYTES
from ....tiers.nvme.namespace import NamespaceKey
from ...commands.bench.bench_results import BenchError, Goal, Quantity
from ...commands.bench.bench_tier import new_keys, open_bench_tier

BLOCK_BYTES = 4096
MAX_BLOCKS = 2048
"""Most blocks that are moved in each row."""
LOOKS = 20
"""Passes over all blocks, of which the fastest is reported."""
JOBS = ((64, 4), (16, 4), (16, 1))
"""Blocks of a job, and jobs of a step."""
STEP_S = 0.01
"""Pause between two steps, in which the node works."""
MAX_STEPS = 3_000
"""Most steps until the jobs have ended."""
CAPACITY_BYTES = 256 << 20


def demoting(blocks: int, jobs: int) -> str:
    """Return the name of a row."""
    return f"demoted block, {jobs} jobs of {blocks} a step"


def promoting(blocks: int, jobs: int) -> str:
    """Return the name of a row."""
    return f"promoted block, {jobs} jobs of {blocks} a step"


PRESENT, ABSENT = "may_hold, present", "may_hold, absent"
GOAL = (Goal(4.0),)
QUANTITIES = (
    *(
        Quantity(name(*shape), "µs/block", GOAL)
        for shape in JOBS[:2]
        for name in (demoting, promoting)
    ),
    *(Quantity(name(*shape), "µs/block") for shape in JOBS[2:] for name in (demoting, promoting)),
    Quantity(PRESENT, "µs/key", (Goal(0.6),)),
    Quantity(ABSENT, "µs/key", (Goal(0.6),)),
)


@contextmanager
def node_tier(folder: Path, slots: int) -> Iterator[OpenTier]:
    """Open a tier whose node is a process, in an empty folder, over an arena of `slots`."""
    size = HEADER_BYTES + slots * BLOCK_BYTES
    fd = os.memfd_create("bench")
    os.ftruncate(fd, size)
    view = memoryview(mmap.mmap(fd, size))[HEADER_BYTES:]
    memory = SlotMemory(BLOCK_BYTES, slots, view, duplicate=lambda: os.dup(fd))
    tier = open_bench_tier(folder, CAPACITY_BYTES, NamespaceKey("bench", {"bench": 1}), memory)
    try:
        yield tier
    finally:
        tier.port.shutdown(time.monotonic() + 5.0)
        tier.close()
        os.close(fd)


class Steps:
    """Steps of a scheduler: jobs are started, and some time later have ended."""

    def __init__(self, tier: NodeTier) -> None:
        self._tier = tier
        self._tickets = count(1)
        self.costs_s: list[float] = []
        """Processor time of this thread in the tier, for the jobs that were started together."""

    def run(self, batches: Sequence[Callable[[int], object]]) -> None:
        """Start jobs in one step, and take their ends in later ones."""
        open_tickets = set[int]()
        began_s = time.thread_time()
        for start in batches:
            ticket = next(self._tickets)
            open_tickets.add(ticket)
            start(ticket)
        self._tier.maintain()
        cost_s = time.thread_time() - began_s
        for _ in range(MAX_STEPS):
            time.sleep(STEP_S)
            began_s = time.thread_time()
            ended = self._tier.poll()
            self._tier.take_lost()
            self._tier.maintain()
            cost_s += time.thread_time() - began_s
            for each in ended:
                open_tickets.discard(each.ticket)
                if set(each.outcomes) != {BlockOutcome.OK}:
                    raise BenchError(f"blocks were not moved: {set(each.outcomes)}")
            if not open_tickets:
                self.costs_s.append(cost_s)
                return
        raise BenchError("a job did not end")


def measure(folder: Path, blocks: int) -> dict[str, float]:
    """Return the figures of all rows; at most `blocks` blocks are moved in each."""
    figures: dict[str, float] = {}
    with TemporaryDirectory(dir=folder) as path, node_tier(Path(path), MAX_BLOCKS) as opened:
        tier, keys = opened.port, new_keys(0)
        for size, jobs in JOBS:
            keys = new_keys(max(size, min(blocks, MAX_BLOCKS) // size * size))
            parts = [(keys[at : at + size], at) for at in range(0, len(keys), size)]
            for name, is_put in ((demoting, True), (promoting, False)):
                steps = Steps(tier)
                for at in range(0, len(parts), jobs):
                    steps.run([_job(tier, is_put, *part) for part in parts[at : at + jobs]])
                figures[name(size, jobs)] = median(steps.costs_s) / (size * jobs) * 1e6
        for row, asked in ((PRESENT, keys), (ABSENT, new_keys(len(keys)))):
            figures[row] = min(looks_us(tier, asked) for _ in range(LOOKS))
    return figures


def looks_us(tier: NodeTier, keys: Sequence[BlockHash]) -> float:
    """Look up all keys once; return the time of a key in µs."""
    may_hold = tier.may_hold
    began_s = time.perf_counter()
    for key in keys:
        may_hold(key)
    return (time.perf_counter() - began_s) / len(keys) * 1e6


def _job(
    tier: NodeTier, is_put: bool, keys: list[BlockHash], first: int
) -> Callable[[int], object]:
    slots = list(range(first, first + len(keys)))
    if is_put:
        return lambda ticket: tier.put(ticket, keys, slots)
    return lambda ticket: tier.get(ticket, 1, keys, slots)
