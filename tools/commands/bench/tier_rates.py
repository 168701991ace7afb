"""Rates of the CPU and NVMe tiers on this machine, by block size, beside those of the raw disk.

Arena, copier, node and NVMe tier are those of an engine; neither vLLM nor torch is needed. The node
is a process, which also writes the path. Ordinary memory stands in for the device. Each repetition
uses new files and compares every byte that it reads back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from shutil import disk_usage
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ....assembly.node_parts import SlotMemory
from ....config.sizes import human
from ....errors import is_folder, os_errors
from ....handlers.device.copier import GpuBlocks
from ....handlers.device.device_cpu import CpuDeviceCopier, cpu_layouts
from ....handlers.device.geometry import PageRef, WorkerLayout
from ....threads import started_pool
from ....tiers.base import BlockHash, SlotArray
from ....tiers.cpu.arena import Arena, ArenaRole
from ....tiers.cpu.header import ArenaGeometry
from ....tiers.nvme.namespace import NamespaceKey
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
    size_label,
    transfer_block_bytes,
    transfer_case,
)
from .bench_tier import move_blocks, new_keys, node_cpu_s, open_bench_tier, reset_tier
from .machine_facts import headline, run_facts
from .raw_disk import THREADS, RawDisk, drop_page_cache

COPY_THREADS = 2
METADATA_FACTOR = 1.25
SPARE_BYTES = 256 * MIB
"""Capacity of the tier beyond its blocks, for index and records."""
TRANSFER_LIMIT_S = 60.0
GOOD_SHARE = 0.9
"""Share of the best rate, in both directions, from which a block size is recommended."""

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
    "Down: CPU tier to NVMe tier, in place of other blocks. Up: NVMe tier to CPU tier, page cache "
    "dropped. Checksums on, every byte compared. CPU time: of this process and the node, per GB. "
    "Device: ordinary memory, copied by two threads; a GPU has its own rates. Limit: the same "
    "bytes by direct I/O without a tier, 1, 2 or 4 threads, whichever have the best median."
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
        return int(self.total_bytes * METADATA_FACTOR) + SPARE_BYTES

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
        facts = run_facts("kvcascade bench PATH", Path(made), scale.repeats, is_quick=False)
        reporter.print(f"kvcascade bench: {headline(facts)}")
        with reporter.measuring(TRANSFERS):
            table = rates_table(Path(made), scale, reporter.progress)
    facts["seconds"] = round(time.monotonic() - began, 1)
    facts["recommended_block_bytes"] = recommended = recommended_block_bytes(table)
    reporter.table(table)
    reporter.print(
        f"Recommended: blocks of {size_label(recommended)} or more. The key block_size sets the "
        "tokens of a block, and `kvcascade check --model MODEL` prints its bytes."
    )
    return document([table], facts)


def recommended_block_bytes(table: Table) -> int:
    """Return the smallest block size with nearly the best rates in both directions.

    If there is none, return the one whose worse direction is nearest to its best rate.
    """
    rates: dict[str, dict[int, float]] = {DOWN: {}, UP: {}}
    for row in table.rows:
        size, rate = transfer_block_bytes(row.case), row.median()
        if row.quantity.name in rates and size is not None and rate is not None:
            rates[row.quantity.name][size] = rate
    shares = {
        size: min(found[size] / max(found.values()) for found in rates.values())
        for size in sorted(rates[DOWN])
    }
    good = [size for size, share in shares.items() if share >= GOOD_SHARE]
    return good[0] if good else max(shares, key=shares.__getitem__)


def _check_folder(path: Path, needed_bytes: int) -> None:
    with os_errors(f"looking at {path}"):
        if not is_folder(path):
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
            with TemporaryDirectory(dir=folder) as place:
                _add_tier_rates(ours, Path(place), block_bytes, scale)
            with TemporaryDirectory(dir=folder) as place:
                _add_raw_rates(raw, Path(place), block_bytes, scale.total_bytes)
        downs, ups = zip(*raw.values(), strict=True)
        limits = {DOWN: max(downs, key=median), UP: max(ups, key=median)}
        for quantity in QUANTITIES:
            samples = {OURS: ours[quantity.name]}
            if quantity.name in limits:
                samples[LIMIT] = limits[quantity.name]
            rows.append(Row(case, quantity, samples))
    return Table(TRANSFERS, "Rates of the tiers, by block size", NOTE, rows)


def _add_raw_rates(
    raw: dict[int, tuple[list[float], list[float]]], folder: Path, block_bytes: int, total: int
) -> None:
    with closing(RawDisk([folder], block_bytes, total, is_overwritten=True)) as disk:
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
        self, folder: Path, blocks: int, block_bytes: int, tier_bytes: int, undo: ExitStack
    ) -> None:
        """Create both tiers; `undo` closes everything in reverse order."""
        self._folder = folder
        self._gigabytes = blocks * block_bytes / GIGA
        self._job_ids = count(1)
        geometry = ArenaGeometry(blocks, block_bytes, 1)
        role = ArenaRole.scheduler(expect_workers=False)
        self._arena = Arena.open(geometry, f"bench-{os.getpid()}", role)
        undo.callback(self._arena.close)
        key = NamespaceKey("bench", {"block_bytes": block_bytes})
        self._tier = open_bench_tier(folder, tier_bytes, key, SlotMemory.of(self._arena))
        undo.callback(self._tier.close)
        random = np.random.default_rng()
        self._device = random.integers(-128, 128, (blocks, block_bytes), np.int8)
        layouts = cpu_layouts([self._device])
        layout = WorkerLayout(layouts, [[PageRef(0, block_bytes)]], 1, geometry, 0)
        copies = undo.enter_context(started_pool(COPY_THREADS, "kvcascade-bench"))
        self._copier = CpuDeviceCopier([self._device], layout, self._arena.slots, copies)
        undo.callback(self._copier.shutdown)

    def figures(self) -> dict[str, float]:
        """Move all blocks to the disk and back once; return figures by quantity. Raises
        `BenchError`."""
        blocks = len(self._device)
        slots: SlotArray = np.arange(blocks, dtype=np.int32)
        expected = self._device.copy()
        self._copy(self._copier.submit_store, slots)  # the first access to the memory is not timed
        found = {MEMORY_DOWN: self._gigabytes / self._copy(self._copier.submit_store, slots)}
        self._move(new_keys(blocks), is_put=True)  # makes the files
        reset_tier(self._tier, TRANSFER_LIMIT_S)
        keys = new_keys(blocks)
        found |= self._rates(keys, DOWN, CPU_DOWN, is_put=True)
        drop_page_cache([self._folder])
        self._arena.slots[:] = 0
        found |= self._rates(keys, UP, CPU_UP, is_put=False)
        self._device[:] = 0
        found[MEMORY_UP] = self._gigabytes / self._copy(self._copier.submit_load, slots)
        if not np.array_equal(self._device, expected):
            raise BenchError("bytes that came back from the disk differ from those stored")
        return found

    def _rates(self, keys: Sequence[BlockHash], *names: str, is_put: bool) -> dict[str, float]:
        """Run one transfer; return its rate and the CPU time of this process and the node."""
        began, cpu_began = time.perf_counter(), self._cpu_s()
        self._move(keys, is_put=is_put)
        took_s, cpu_s = time.perf_counter() - began, self._cpu_s() - cpu_began
        return dict(zip(names, (self._gigabytes / took_s, cpu_s / self._gigabytes), strict=True))

    def _move(self, keys: Sequence[BlockHash], *, is_put: bool) -> None:
        """Move all blocks in one job."""
        move_blocks(self._tier, keys, len(keys), TRANSFER_LIMIT_S, is_put=is_put)

    def _cpu_s(self) -> float:
        """Return the CPU time of all threads of this process and the node."""
        return time.process_time() + node_cpu_s(self._tier)

    def _copy(self, submit: Callable[[int, GpuBlocks, SlotArray], bool], slots: SlotArray) -> float:
        job_id = next(self._job_ids)
        began = time.perf_counter()
        submit(job_id, GpuBlocks.of(list(range(len(slots))), [len(slots)], [0]), slots)
        self._copier.wait({job_id})
        took_s = time.perf_counter() - began
        if [result.success for result in self._copier.get_finished()] != [True]:
            raise BenchError("a copy between device and CPU tier failed; see the log")
        return took_s
