"""Rates of the CPU and NVMe tiers on this machine, by block size, beside those of the raw disk.

Arena, copier, NVMe tier and handlers are those of an engine; neither vLLM nor torch is needed.
Ordinary memory stands in for the device. Each repetition uses new files and compares every byte
that it reads back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from shutil import disk_usage
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ....config.sizes import human
from ....errors import os_errors
from ....handlers.device.copier import GpuBlocks
from ....handlers.device.device_cpu import CpuDeviceCopier, cpu_layouts
from ....handlers.device.geometry import PageRef, WorkerLayout
from ....tiers.base import BlockHash, SlotArray
from ....tiers.cpu.arena import Arena, ArenaRole
from ....tiers.cpu.header import ArenaGeometry
from ..command_line import CommandError, ExitCode
from .bench_report import Reporter
from .bench_results import (
    DOWN,
    GIGA,
    KIB,
    LIMIT,
    MIB,
    OURS,
    TRANSFERS,
    UP,
    BenchError,
    Quantity,
    Row,
    Table,
    document,
    transfer_case,
)
from .disk_tier import SPARE_BYTES, DiskMoves, open_disk_tier, tier_bytes
from .machine_facts import headline, machine_facts, version_facts
from .raw_disk import THREADS, RawDisk, drop_page_cache

COPY_THREADS = 2
HASH_BYTES = 32

CPU_DOWN, CPU_UP = "CPU time down", "CPU time up"
MEMORY_DOWN, MEMORY_UP = "device to CPU tier", "CPU tier to device"
QUANTITIES = (
    Quantity(DOWN, "GB/s", is_more_better=True),
    Quantity(UP, "GB/s", is_more_better=True),
    Quantity(CPU_DOWN, "s/GB"),
    Quantity(CPU_UP, "s/GB"),
    Quantity(MEMORY_DOWN, "GB/s", is_more_better=True),
    Quantity(MEMORY_UP, "GB/s", is_more_better=True),
)
NOTE = (
    "Down: CPU tier to NVMe tier. Up: NVMe tier to CPU tier, page cache dropped. Checksums on, "
    "every byte compared. CPU time: of all threads, per GB. Device: ordinary memory, copied by two "
    "threads; a GPU has its own rates. Limit: the same bytes by direct I/O without a tier, 1, 2 or "
    "4 threads, whichever have the best median."
)

Samples = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class RatesScale:
    """Sizes of the measurement."""

    block_sizes: tuple[int, ...] = (64 * KIB, 512 * KIB, 2 * MIB)
    total_bytes: int = 256 * MIB
    """Bytes of one transfer, in each direction."""
    repeats: int = 3

    @property
    def tier_bytes(self) -> int:
        """Capacity of the NVMe tier."""
        return tier_bytes(self.total_bytes)

    @property
    def disk_bytes(self) -> int:
        """Free space that the measurement needs."""
        return self.tier_bytes + SPARE_BYTES


def measure_path(path: Path, scale: RatesScale | None = None) -> dict[str, Any]:
    """Measure, print the table, remove all files, and return the JSON document.

    Raises `CommandError` or a `KVCascadeError`.
    """
    scale = scale or RatesScale()
    _check_folder(path, scale.disk_bytes)
    reporter, began = Reporter(), time.monotonic()
    with (
        os_errors(f"measuring the disk of {path}"),
        TemporaryDirectory(prefix="kvcascade-bench-", dir=path) as made,
    ):
        facts: dict[str, Any] = {
            "date": datetime.now(UTC).date().isoformat(),
            "command": "kvcascade bench PATH",
            "machine": machine_facts(Path(made)),
            "versions": version_facts(),
            "is_quick": False,
            "repeats": scale.repeats,
            "nvme": {},
            "notes": [],
        }
        reporter.print(f"kvcascade bench: {headline(facts)}")
        try:
            with reporter.measuring(TRANSFERS):
                table = rates_table(Path(made), scale, reporter.progress)
        except BenchError as error:
            raise CommandError(str(error), ExitCode.PROBLEMS) from None
    facts["seconds"] = round(time.monotonic() - began, 1)
    reporter.table(table)
    return document([table], facts)


def _check_folder(path: Path, needed_bytes: int) -> None:
    with os_errors(f"looking at {path}"):
        if not path.is_dir():
            problem = f"there is no folder {path}; give one on the disk to measure"
            raise CommandError(problem, ExitCode.CANNOT_OPEN)
        if not os.access(path, os.W_OK | os.X_OK):
            problem = f"{path} cannot be written by this user; give another folder"
            raise CommandError(problem, ExitCode.CANNOT_OPEN)
        free = disk_usage(path).free
    if free < needed_bytes:
        room = f"{human(free)} free of the {human(needed_bytes)} that the measurement needs"
        raise CommandError(f"{path} has {room}; make room or give another", ExitCode.NO_SPACE)


def rates_table(folder: Path, scale: RatesScale, say: Callable[[str], None]) -> Table:
    """Measure every block size in an empty folder."""
    rows: list[Row] = []
    for block_bytes in scale.block_sizes:
        case = transfer_case(block_bytes)
        ours: Samples = {quantity.name: [] for quantity in QUANTITIES}
        raw: dict[int, tuple[list[float], list[float]]] = {n: ([], []) for n in THREADS}
        for repeat in range(scale.repeats):
            say(f"{case}, {repeat + 1} of {scale.repeats}")
            with _fresh(folder / "tier") as place:
                _add_tier_rates(ours, place, block_bytes, scale)
            with _fresh(folder / "raw") as place:
                _add_raw_rates(raw, place, block_bytes, scale.total_bytes)
        downs, ups = zip(*raw.values(), strict=True)
        limits = {DOWN: max(downs, key=median), UP: max(ups, key=median)}
        for quantity in QUANTITIES:
            samples = {OURS: ours[quantity.name]}
            if quantity.name in limits:
                samples[LIMIT] = limits[quantity.name]
            rows.append(Row(case, quantity, samples))
    return Table(TRANSFERS, "Rates of the tiers, by block size", NOTE, rows)


@contextmanager
def _fresh(folder: Path) -> Iterator[Path]:
    """Yield an empty folder, and remove it at the end."""
    with TemporaryDirectory(prefix=f"{folder.name}-", dir=folder.parent) as made:
        yield Path(made)


def _add_raw_rates(
    raw: dict[int, tuple[list[float], list[float]]], folder: Path, block_bytes: int, total: int
) -> None:
    with closing(RawDisk([folder], block_bytes, total)) as disk:
        for threads, rates in raw.items():
            for samples, rate in zip(rates, disk.rates(threads), strict=True):
                samples.append(rate / GIGA)


def _add_tier_rates(ours: Samples, folder: Path, block_bytes: int, scale: RatesScale) -> None:
    blocks = max(1, scale.total_bytes // block_bytes)
    with ExitStack() as undo:
        tiers = _TiersUnderTest(folder, blocks, block_bytes, scale.tier_bytes, undo)
        for name, figure in tiers.figures().items():
            ours[name].append(figure)


class _TiersUnderTest:
    """An arena above an NVMe tier, with ordinary memory in place of the device. One thread."""

    def __init__(
        self, folder: Path, blocks: int, block_bytes: int, capacity_bytes: int, undo: ExitStack
    ) -> None:
        """Create both tiers; `undo` closes everything in reverse order."""
        self._folder = folder
        self._gigabytes = blocks * block_bytes / GIGA
        self._job_ids = count(1)
        geometry = ArenaGeometry(blocks, block_bytes, 1)
        role = ArenaRole.scheduler(expect_workers=False)
        self._arena = Arena.open(geometry, f"bench-{os.getpid()}", role)
        undo.callback(self._arena.close)
        random = np.random.default_rng()
        self._device = random.integers(-128, 128, (blocks, block_bytes), np.int8)
        layouts = cpu_layouts([self._device])
        layout = WorkerLayout(layouts, [[PageRef(0, block_bytes)]], 1, geometry, 0)
        copies = _executor(COPY_THREADS, undo)
        self._copier = CpuDeviceCopier([self._device], layout, self._arena.slots, copies)
        undo.callback(self._copier.shutdown)
        tier = open_disk_tier(folder, self._arena, capacity_bytes)
        undo.callback(tier.close)
        self._moves = DiskMoves(tier)

    def figures(self) -> dict[str, float]:
        """Move all blocks to the disk and back once; return figures by quantity. Raises
        `BenchError`."""
        blocks = len(self._device)
        slots: SlotArray = np.arange(blocks, dtype=np.int32)
        expected = self._device.copy()
        self._copy(self._copier.submit_store, slots)  # the first access to the memory is not timed
        found = {MEMORY_DOWN: self._gigabytes / self._copy(self._copier.submit_store, slots)}
        keys = [BlockHash(os.urandom(HASH_BYTES)) for _ in range(blocks)]
        found |= self._store(keys, slots)
        drop_page_cache([self._folder])
        self._arena.slots[:] = 0
        found |= self._load(keys, slots)
        self._device[:] = 0
        found[MEMORY_UP] = self._gigabytes / self._copy(self._copier.submit_load, slots)
        if not np.array_equal(self._device, expected):
            raise BenchError("bytes that came back from the disk differ from those stored")
        return found

    def _store(self, keys: Sequence[BlockHash], slots: SlotArray) -> dict[str, float]:
        self._moves.put([BlockHash(key[::-1]) for key in keys], slots.tolist())  # makes the files
        self._moves.forget()
        took_s, cpu_s = self._timed(self._moves.put, keys, slots)
        return {DOWN: self._gigabytes / took_s, CPU_DOWN: cpu_s / self._gigabytes}

    def _load(self, keys: Sequence[BlockHash], slots: SlotArray) -> dict[str, float]:
        took_s, cpu_s = self._timed(self._moves.get, keys, slots)
        return {UP: self._gigabytes / took_s, CPU_UP: cpu_s / self._gigabytes}

    def _timed(
        self,
        move: Callable[[Sequence[BlockHash], Sequence[int]], None],
        keys: Sequence[BlockHash],
        slots: SlotArray,
    ) -> tuple[float, float]:
        """Run one transfer; return its seconds and the CPU time of all threads."""
        places = slots.tolist()
        began, cpu_began = time.perf_counter(), self._moves.cpu_s()
        move(keys, places)
        return time.perf_counter() - began, self._moves.cpu_s() - cpu_began

    def _copy(self, submit: Callable[[int, GpuBlocks, SlotArray], bool], slots: SlotArray) -> float:
        job_id = next(self._job_ids)
        began = time.perf_counter()
        submit(job_id, GpuBlocks.of(list(range(len(slots))), [len(slots)], [0]), slots)
        self._copier.wait({job_id})
        took_s = time.perf_counter() - began
        if [result.success for result in self._copier.get_finished()] != [True]:
            raise BenchError("a copy between device and CPU tier failed; see the log")
        return took_s


def _executor(threads: int, undo: ExitStack) -> Executor:
    return undo.enter_context(ThreadPoolExecutor(threads))
