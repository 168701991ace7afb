"""Device to arena and back on a GPU, beside one large pinned copy of as many bytes.

Ready for any machine with a CUDA device; without one it says so. What does not need a GPU (shapes,
the choice of blocks, turning times into figures) is plain code and tested without.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...handlers.device import DeviceCopier, GpuBlocks
from ...handlers.geometry import PageRef, TensorLayout, WorkerLayout
from ...tiers.base import SlotArray
from ...tiers.cpu import Arena, ArenaGeometry, ArenaRole
from .measurement import Case, Figures, Measurement, Setup
from .results import LIMIT, OURS, BenchError, Goal, Quantity

if TYPE_CHECKING:
    import torch

COUNTS = (1, 16, 256, 4096)
"""Blocks of a transfer."""
SPARE = 4
"""One block in so many is not part of the largest transfer, so that none is one long run."""
MEMORY_SHARE = 0.4
"""Of the GPU's free memory, and of what shared memory has left."""
BYTES_PER_TIMING = 2 << 30
"""Transfers are repeated until so much has moved."""
REPEATS_MAX = 50
CHAIN_KERNELS = 200
CHAIN_SIZE = 2048
CHAIN_BLOCKS = 256

DOWN, UP = "device to arena", "arena to device"
BESIDE = "kernels beside transfers"


@dataclass(frozen=True, slots=True)
class Shape:
    """The KV cache of a model on one GPU."""

    label: str
    layers: int
    page_bytes: int

    @property
    def block_bytes(self) -> int:
        """Of all layers."""
        return self.layers * self.page_bytes

    def layout(self, blocks: int, geometry: ArenaGeometry) -> WorkerLayout:
        """One KV group, a tensor per layer, one worker."""
        tensors = [TensorLayout(blocks, self.page_bytes, self.page_bytes)] * self.layers
        refs = [PageRef(layer, self.page_bytes) for layer in range(self.layers)]
        return WorkerLayout(tensors, [refs], 1, geometry, 0)


SHAPES = (
    Shape("Llama-3.1-8B, 32 layers × 64 KiB", 32, 64 << 10),
    Shape("MLA, 61 layers × 18 KiB", 61, 18 << 10),
)


@dataclass(frozen=True, slots=True)
class Transfer:
    """Device blocks and slots, in no order."""

    blocks: GpuBlocks
    slots: SlotArray

    @classmethod
    def scattered(cls, count: int, blocks: int, slots: int, seed: int = 0) -> Transfer:
        """`count` of each, all different."""
        source = random.Random(seed)
        ids = source.sample(range(blocks), count)
        return cls(
            GpuBlocks.of(ids, [count], [0]),
            np.array(source.sample(range(slots), count), dtype=np.int32),
        )


def counts_that_fit(shape: Shape, free_bytes: int) -> list[int]:
    """Which of `COUNTS` can be measured with so much memory on either side."""
    return [n for n in COUNTS if room_for(n) * shape.block_bytes <= free_bytes]


def room_for(count: int) -> int:
    """Blocks of a cache out of which so many are taken."""
    return count + max(1, count // SPARE)


def repeats_for(size_bytes: int) -> int:
    """How often a transfer is repeated for one figure."""
    return max(1, min(REPEATS_MAX, BYTES_PER_TIMING // size_bytes))


def rate(run: Callable[[], None], size_bytes: int, clock: Callable[[], float]) -> float:
    """GB/s of something that moves `size_bytes` each time; the first time is not counted."""
    run()
    repeats = repeats_for(size_bytes)
    began = clock()
    for _ in range(repeats):
        run()
    return repeats * size_bytes / (clock() - began) / 1e9


class Mover:
    """Transfers through a copier, each waited for."""

    def __init__(self, copier: DeviceCopier) -> None:
        self._copier = copier
        self._jobs = 0

    def down(self, transfer: Transfer) -> None:
        """Device to arena."""
        self._jobs += 1
        self._copier.submit_store(self._jobs, transfer.blocks, transfer.slots)
        self._finish()

    def up(self, transfer: Transfer) -> None:
        """Arena to device."""
        self._jobs += 1
        self._copier.submit_load(self._jobs, transfer.blocks, transfer.slots)
        self._finish()

    def _finish(self) -> None:
        self._copier.wait({self._jobs})
        if not all(result.success for result in self._copier.get_finished()):
            raise BenchError("a transfer between device and arena failed; see the log")


class Bench:
    """One shape on the GPU: device tensors, arena and copier, made for the largest transfer."""

    def __init__(self, shape: Shape, largest: int, folder: Path, undo: ExitStack) -> None:
        import torch

        from ...handlers.device_cuda import CudaDeviceCopier

        self.shape = shape
        self.room = room_for(largest)
        geometry = ArenaGeometry(self.room, shape.block_bytes, 1)
        role = ArenaRole.scheduler(expect_workers=False)
        arena = Arena.open(geometry, f"bench-{folder.name}", role)
        undo.callback(arena.close)
        page = (self.room, shape.page_bytes)
        tensors = [torch.zeros(page, dtype=torch.int8, device="cuda") for _ in range(shape.layers)]
        layout = shape.layout(self.room, geometry)
        copier = CudaDeviceCopier(tensors, layout, arena.slots)
        undo.callback(copier.shutdown)
        self._copier = copier
        self.mover = Mover(copier)

    def ours(self, count: int) -> Figures:
        """Scattered transfers in both directions."""
        transfer = Transfer.scattered(count, self.room, self.room)
        size = count * self.shape.block_bytes
        return {
            DOWN: rate(partial(self.mover.down, transfer), size, time.perf_counter),
            UP: rate(partial(self.mover.up, transfer), size, time.perf_counter),
        }

    def limit(self, count: int) -> Figures:
        """One copy of as many bytes between the device and pinned memory."""
        import torch

        size = count * self.shape.block_bytes
        device = torch.zeros(size, dtype=torch.int8, device="cuda")
        host = torch.zeros(size, dtype=torch.int8, pin_memory=True)

        def copy(target: torch.Tensor, source: torch.Tensor) -> None:
            target.copy_(source, non_blocking=True)
            _cuda().synchronize()

        return {
            DOWN: rate(partial(copy, host, device), size, time.perf_counter),
            UP: rate(partial(copy, device, host), size, time.perf_counter),
        }

    def beside(self) -> Figures:
        """Rate of a chain of kernels on the compute stream, with transfers over without."""
        transfer = Transfer.scattered(min(CHAIN_BLOCKS, self.room // 2), self.room, self.room)
        chain_ms()
        alone = chain_ms()
        for number in range(4):
            self._copier.submit_store(-1 - number, transfer.blocks, transfer.slots)
        during = chain_ms()
        self._copier.wait({-1, -2, -3, -4})
        self._copier.get_finished()
        return {BESIDE: alone / during}


def chain_ms() -> float:
    """Milliseconds that a chain of kernels takes on the current stream."""
    import torch

    cuda = _cuda()
    matrix = torch.eye(CHAIN_SIZE, device="cuda", dtype=torch.float16)
    start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    product = matrix
    start.record()
    for _ in range(CHAIN_KERNELS):
        product = product @ matrix
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def cases(setup: Setup) -> Generator[Case, None, None]:
    """Every shape, from one block to as many as fit; then the compute stream."""
    free_bytes = usable_bytes()
    for shape in SHAPES:
        counts = counts_that_fit(shape, free_bytes)
        if not counts:
            raise BenchError(f"{free_bytes >> 20} MiB of memory hold no block of {shape.label}")
        setup.say(f"{shape.label}: pinning memory")
        with ExitStack() as undo:
            bench = Bench(shape, counts[-1], setup.folder, undo)
            for count in counts:
                contenders = {OURS: partial(bench.ours, count), LIMIT: partial(bench.limit, count)}
                yield Case(f"{shape.label}: {count:,} blocks", contenders)
            yield Case(shape.label, {OURS: bench.beside})


def usable_bytes() -> int:
    """Memory that device tensors, and an arena, may take. Raises `BenchError` without a GPU."""
    import psutil
    import torch

    if not torch.cuda.is_available():
        raise BenchError(
            "no CUDA device answers; run `make bench-gpu` on a machine with an NVIDIA GPU and a "
            "torch that was built for CUDA"
        )
    free_device, _ = _cuda().mem_get_info()
    free_shared = psutil.disk_usage("/dev/shm").free
    return int(MEMORY_SHARE * min(free_device, free_shared, psutil.virtual_memory().available))


def _cuda() -> Any:
    import torch

    return torch.cuda


def quantities() -> Sequence[Quantity]:
    """The rows."""
    goals = (Goal(0.85, LIMIT, is_least=True),)
    return (
        Quantity(DOWN, "GB/s", goals, is_more_better=True),
        Quantity(UP, "GB/s", goals, is_more_better=True),
        Quantity(BESIDE, "×", (Goal(0.9, is_least=True),), is_more_better=True),
    )


MEASUREMENT = Measurement(
    "gpu",
    "GPU: scattered blocks between the device and the arena",
    "Blocks and slots drawn at random, every transfer waited for; limit: one copy of as many bytes "
    "between the device and pinned memory. Kernels beside transfers: the rate of a chain of "
    "matrix products on the compute stream while stores run, over its rate alone.",
    tuple(quantities()),
    cases,
)
