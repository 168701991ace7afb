"""Rates of several engines that share a path, beside those of the raw disk.

Each engine is a process with an arena and a node of its own, and moves an equal share of the bytes.
All belong to one namespace. They write at the same time, then read, and compare what they read.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from ....assembly.node_parts import OpenTier, SlotMemory
from ....handlers.node.path_wire import NodeState
from ....manager.core import batch_blocks
from ....tiers.cpu.arena import Arena, ArenaRole
from ....tiers.cpu.header import ArenaGeometry
from ....tiers.nvme.namespace import NamespaceKey
from ...commands.bench.bench_results import (
    DOWN,
    GIGA,
    KIB,
    LIMIT,
    MIB,
    OURS,
    UP,
    BenchError,
    Quantity,
)
from ...commands.bench.bench_tier import (
    move_blocks,
    new_keys,
    node_cpu_s,
    open_bench_tier,
    reset_tier,
)
from ...commands.bench.raw_disk import THREADS, RawDisk, drop_page_cache
from .measurement import Case, Figures, Measurement, MeasurementSetup

SHAPES = ((1, 512 * KIB), (2, 512 * KIB), (4, 512 * KIB), (8, 64 * KIB))
"""Engines, and bytes of a block."""
CAPACITY_FACTOR = 1.5
SPARE_BYTES = 256 * MIB
PHASE_LIMIT_S = 120.0
CLOSE_LIMIT_S = 5.0
NUMBER_BYTES = 8
ENGINES_CPU, WRITER_CPU = "CPU time of all nodes, down", "CPU time of the writer's node, down"
SLOWEST = "slowest engine / median engine, down"
FILL, RESET, WRITE, CLEAR, READ = "fill", "reset", "write", "clear", "read"
QUANTITIES = (
    Quantity(DOWN, "GB/s", is_more_better=True),
    Quantity(UP, "GB/s", is_more_better=True),
    Quantity(SLOWEST, "×"),
    Quantity(ENGINES_CPU, "s/GB"),
    Quantity(WRITER_CPU, "s/GB"),
)


@dataclass(frozen=True, slots=True)
class EngineShare:
    """The blocks that one engine moves."""

    folder: Path
    blocks: int
    block_bytes: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class PhaseEnd:
    """Report of one engine at the end of a phase."""

    began_s: float
    ended_s: float
    """Times on the clock of the machine."""
    node_cpu_s: float
    is_writer: bool

    @property
    def time_s(self) -> float:
        """Duration in seconds."""
        return self.ended_s - self.began_s


def span_s(ends: Sequence[PhaseEnd]) -> float:
    """Return the seconds from the begin of the first engine to the end of the last one."""
    return max(end.ended_s for end in ends) - min(end.began_s for end in ends)


class _Mover:
    """One engine that writes and reads its blocks."""

    def __init__(self, tier: OpenTier, arena: memoryview, share: EngineShare) -> None:
        self._tier, self._arena, self._share = tier, arena, share
        arena[:] = os.urandom(MIB) * (len(arena) // MIB) + bytes(len(arena) % MIB)
        for block in range(share.blocks):  # so that no two are equal
            start = block * share.block_bytes
            arena[start : start + NUMBER_BYTES] = block.to_bytes(NUMBER_BYTES, "little")
        self._expected = bytes(arena)
        self._keys = new_keys(share.blocks)

    def run(self, phase: str) -> PhaseEnd:
        """Run one phase to its end. Raises `BenchError`."""
        began_s, began_cpu_s = time.monotonic(), node_cpu_s(self._tier)
        if phase == RESET:
            reset_tier(self._tier, PHASE_LIMIT_S)
        elif phase == CLEAR:
            self._arena[:] = bytes(len(self._arena))
        elif phase == READ:
            self._move(is_put=False)
        else:
            self._keys = new_keys(self._share.blocks)
            self._move(is_put=True)
        ended_s, cpu_s = time.monotonic(), node_cpu_s(self._tier) - began_cpu_s
        if phase == READ and self._arena != self._expected:
            raise BenchError("bytes that came back from the disk differ from those stored")
        is_writer = self._tier.port.feed.state is NodeState.LEADING
        return PhaseEnd(began_s, ended_s, cpu_s, is_writer)

    def _move(self, *, is_put: bool) -> None:
        """Move each block once, in jobs of an engine's size."""
        per_job = batch_blocks(self._share.block_bytes)
        move_blocks(self._tier, self._keys, per_job, PHASE_LIMIT_S, is_put=is_put)


def serve(share: EngineShare, orders: Connection) -> None:
    """Run phases as they are ordered, in a process of its own, until the end of orders."""
    geometry = ArenaGeometry(share.blocks, share.block_bytes, 1)
    role = ArenaRole.scheduler(expect_workers=False)
    key = NamespaceKey("bench", {"bench": 1})
    with closing(Arena.open(geometry, f"bench-{os.getpid()}", role)) as arena:
        memory = SlotMemory.of(arena)
        with closing(open_bench_tier(share.folder, share.capacity_bytes, key, memory)) as tier:
            mover = _Mover(tier, memory.view, share)
            orders.send(None)
            while phase := orders.recv():
                orders.send(mover.run(phase))
            tier.port.shutdown(time.monotonic() + CLOSE_LIMIT_S)


class _Engines:
    """Processes of all engines."""

    def __init__(self, shares: Sequence[EngineShare], undo: ExitStack) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        for share in shares:
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(share, there))
            process.start()
            there.close()
            undo.callback(process.join, PHASE_LIMIT_S)
            undo.callback(here.send, "")
            self._pipes.append(here)
        self._ends()

    def run(self, phase: str, most: int | None = None) -> list[PhaseEnd]:
        """Run a phase in all engines, or in the first ones. Raises `BenchError`."""
        pipes = self._pipes[:most]
        for pipe in pipes:
            pipe.send(phase)
        return self._ends(most)

    def _ends(self, most: int | None = None) -> list[PhaseEnd]:
        found: list[PhaseEnd] = []
        for pipe in self._pipes[:most]:
            if not pipe.poll(PHASE_LIMIT_S):
                raise BenchError(f"an engine did not answer within {PHASE_LIMIT_S:.0f} s")
            try:
                found.append(pipe.recv())
            except EOFError:
                raise BenchError("an engine ended; see the log") from None
        return found


def ours(folder: Path, engines: int, block_bytes: int, total_bytes: int) -> Figures:
    """Write and read once with several engines. Each slot was written before, as in a full tier."""
    blocks = max(1, total_bytes // engines // block_bytes)
    gigabytes = engines * blocks * block_bytes / GIGA
    with TemporaryDirectory(dir=folder) as made, ExitStack() as undo:
        capacity = int(CAPACITY_FACTOR * engines * blocks * block_bytes) + SPARE_BYTES
        share = EngineShare(Path(made), blocks, block_bytes, capacity)
        running = _Engines([share] * engines, undo)
        running.run(FILL)
        running.run(RESET, 1)
        writes = running.run(WRITE)
        running.run(CLEAR)
        drop_page_cache([share.folder])
        reads = running.run(READ)
    times_s = [end.time_s for end in writes]
    return {
        DOWN: gigabytes / span_s(writes),
        UP: gigabytes / span_s(reads),
        SLOWEST: max(times_s) / median(times_s),
        ENGINES_CPU: sum(end.node_cpu_s for end in writes) / gigabytes,
        WRITER_CPU: sum(end.node_cpu_s for end in writes if end.is_writer) / gigabytes,
    }


def limit(folder: Path, block_bytes: int, total_bytes: int) -> Figures:
    """Write and read the same bytes without a tier, with the best number of threads."""
    with (
        TemporaryDirectory(dir=folder) as made,
        closing(RawDisk([Path(made)], block_bytes, total_bytes, is_overwritten=True)) as disk,
    ):
        rates = [disk.rates(threads) for threads in THREADS]
    return {DOWN: max(w for w, _ in rates) / GIGA, UP: max(r for _, r in rates) / GIGA}


def cases(setup: MeasurementSetup) -> Generator[Case, None, None]:
    """Yield a case for each number of engines."""
    for engines, block_bytes in SHAPES:
        total = max(setup.scale.transfer_bytes, engines * block_bytes)
        yield Case(
            f"{engines} engines, blocks of {block_bytes // KIB} KiB",
            {
                OURS: partial(ours, setup.folder, engines, block_bytes, total),
                LIMIT: partial(limit, setup.folder, block_bytes, total),
            },
        )


MEASUREMENT = Measurement(
    "shared",
    "Several engines on one path",
    "Engines are processes, each with an arena and a node, that write new blocks of one namespace "
    "at the same time, and read their own back. Page cache dropped before reads, checksums on, "
    "every byte compared. The rate is that of all bytes from the first begin to the last end. "
    "Limit: the same bytes by direct I/O without a tier, 1, 2 or 4 threads, whichever was fastest.",
    QUANTITIES,
    cases,
)
"""Rates of several engines."""
