"""Transfers from CPU to NVMe, and after a restart from NVMe to the device: rates, with bytes
compared."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from ...commands.bench.bench_results import (
    DOWN,
    GIGA,
    KIB,
    LIMIT,
    MIB,
    OURS,
    TRANSFERS,
    UP,
    VLLM,
    Goal,
    Quantity,
    transfer_case,
)
from ...commands.bench.raw_disk import THREADS, RawDisk, drop_page_cache
from .measurement import Case, Figures, Measurement, MeasurementSetup

if TYPE_CHECKING:
    import torch

    from .peers.vllm_engines import Engine, OurEngine, VllmEngine

NEAR_LIMIT = Goal(0.9, LIMIT, is_least=True)
ABOVE_VLLM = Goal(4.0, VLLM, is_least=True)
ABOVE_VLLM_AT = 512 * KIB
"""Block size that the second goal applies to."""
SHARE = "larger share"
REQUEST_BYTES = 16 * MIB
WINDOW = 6
"""Number of requests that wait for their blocks concurrently."""
SPARE_BYTES = 64 * MIB
DISK_FACTOR = 1.5
"""Factor for the disk space of a tier's metadata."""
SEED = 7


def quantities(block_bytes: int, paths: int) -> tuple[Quantity, ...]:
    """Return the rows of a case."""
    goals = (NEAR_LIMIT, ABOVE_VLLM) if block_bytes == ABOVE_VLLM_AT else (NEAR_LIMIT,)
    rates = tuple(Quantity(name, "GB/s", goals, is_more_better=True) for name in (DOWN, UP))
    return (*rates, Quantity(SHARE, "%", (Goal(55.0),))) if paths > 1 else rates


class TransferBench:
    """Shared parts of the contenders of one case: sizes, folders, and the device's memory."""

    def __init__(
        self,
        setup: MeasurementSetup,
        block_bytes: int,
        total_bytes: int,
        paths: int = 1,
        pinned: int = 0,
    ) -> None:
        """Prepare the case; `pinned` is a number of additional blocks in the CPU tier."""
        self.block_bytes = block_bytes
        self.blocks = max(1, total_bytes // block_bytes)
        self.folders = [setup.folder / f"disk{number}" for number in range(paths)]
        spare = max(2, SPARE_BYTES // block_bytes)
        asked_for = min(self.blocks, WINDOW * REQUEST_BYTES // block_bytes)
        # promotions may use half of the tier
        self._cpu_blocks = max(self.blocks, 2 * asked_for) + pinned + spare
        stored = (self.blocks + 2 * pinned) * block_bytes  # each time, other blocks are pinned
        self._disk_bytes = int(stored * DISK_FACTOR) + 2 * SPARE_BYTES * paths
        self._raw_rates: dict[int, tuple[list[float], list[float]]] = {n: ([], []) for n in THREADS}

    @contextmanager
    def fresh(self) -> Iterator[None]:
        """Provide empty folders, and remove them at the end."""
        for folder in self.folders:
            folder.mkdir(parents=True)
        try:
            yield
        finally:
            for folder in self.folders:
                shutil.rmtree(folder, ignore_errors=True)

    def device(self, extra_blocks: int = 0) -> torch.Tensor:
        """Return memory that stands in for the device's KV cache, filled with the pattern."""
        import torch

        from .peers.vllm_steps import fill_pattern

        made = torch.zeros((self.blocks + extra_blocks, self.block_bytes), dtype=torch.int8)
        fill_pattern(made, SEED)
        return made

    def ours(self, device: torch.Tensor, weights: str = "bench") -> OurEngine:
        """Return our engine over this device, for weights of this name."""
        from .peers.vllm_engines import OurEngine

        return OurEngine(device, self._cpu_blocks, self.folders, self._disk_bytes, weights)

    def vllm(self, device: torch.Tensor) -> VllmEngine:
        """Return vLLM's engine over this device."""
        from .peers.vllm_engines import VllmEngine

        return VllmEngine(device, self._cpu_blocks, self.folders[0])

    def limit(self) -> Figures:
        """Measure the disk alone, with the best number of threads so far."""
        total = self.blocks * self.block_bytes
        with self.fresh(), closing(RawDisk(self.folders, self.block_bytes, total)) as raw:
            for threads in THREADS:
                for rates, rate in zip(self._raw_rates[threads], raw.rates(threads), strict=True):
                    rates.append(rate / GIGA)
        downs, ups = zip(*self._raw_rates.values(), strict=True)
        return {DOWN: max(downs, key=median)[-1], UP: max(ups, key=median)[-1]}

    def round_trip(self, opened: Callable[[torch.Tensor], Engine]) -> dict[str, float]:
        """Write, restart without page cache, and read; return both rates in GB/s. Raises if a byte
        differs."""
        from .peers.vllm_calls import frozen, random_keys
        from .peers.vllm_steps import check_pattern, idle, read_up, write_down

        keys = random_keys(self.blocks)
        figures: dict[str, float] = {}
        with self.fresh():
            device = self.device()
            with closing(opened(device)) as engine, frozen():
                figures[DOWN] = self.rate(write_down(engine, keys, idle))
                shares = engine.blocks_per_path()
            if len(shares) > 1:
                figures[SHARE] = 100 * max(shares) / sum(shares)
            del engine  # its memory stays with it, and the next one has as much
            drop_page_cache(self.folders)
            device.zero_()
            with closing(opened(device)) as engine, frozen():
                figures[UP] = self.rate(read_up(engine, keys, idle))
            check_pattern(device, SEED)
        return figures

    def rate(self, took_s: float) -> float:
        """Return the rate in GB/s of all blocks in `took_s`."""
        return self.blocks * self.block_bytes / took_s / GIGA


def cases(setup: MeasurementSetup) -> Generator[Case, None, None]:
    """Yield a case per block size, and one with two paths."""
    scale = setup.scale
    for block_bytes in scale.block_sizes:
        bench = TransferBench(setup, block_bytes, scale.transfer_bytes)
        yield Case(
            transfer_case(block_bytes),
            {
                OURS: partial(bench.round_trip, bench.ours),
                VLLM: partial(bench.round_trip, bench.vllm),
                LIMIT: bench.limit,
            },
            quantities(block_bytes, 1),
        )
    two = TransferBench(setup, scale.busy_block_size, scale.transfer_bytes, paths=2)
    yield Case(
        transfer_case(scale.busy_block_size, paths=2),
        {OURS: partial(two.round_trip, two.ours), LIMIT: two.limit},
        quantities(two.block_bytes, 2),
    )


MEASUREMENT = Measurement(
    TRANSFERS,
    "Transfers: CPU to NVMe, and after a restart NVMe to CPU to device",
    "Both specs driven step by step (an idle engine: 1 ms between steps), checksums on, every byte "
    "compared. Down: from complete_store until the disk has all (ours in write mode through). Up: "
    "a new engine, page cache dropped (fdatasync, POSIX_FADV_DONTNEED on every file; payload is "
    "read directly anyway), from the first lookup until the last copy to the device. Limit: the "
    "same bytes into preallocated files by direct preadv/pwritev, 16 MiB a call out of huge pages, "
    "1, 2 or 4 threads, whichever have the best median.",
    (),
    cases,
)
