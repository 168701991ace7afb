"""Transfers from device to arena and back on a GPU, beside vLLM's worker and one large pinned copy.

Runs on any machine with a CUDA device; without one it reports that. `gpu_device` has the calls to
the device, `gpu_moves` the measurements.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from .....config.sizes import human
from .....handlers.device.copier import DeviceCopier, Direction
from .....handlers.device.geometry import PageRef, TensorLayout, WorkerLayout
from .....tiers.cpu.arena import Arena, ArenaRole
from .....tiers.cpu.header import ArenaGeometry
from ....commands.bench.bench_report import TITLES
from ....commands.bench.bench_results import GIB, LIMIT, OURS, Goal, Quantity
from ..measurement import Case, Figures, Measurement, MeasurementSetup, Say
from .gpu_device import Contender, CudaDevice, Device, DeviceRoom
from .gpu_moves import (
    BESIDE,
    COVERED_LEAST,
    HEAR_LONGEST,
    MEANWHILE,
    PACED,
    PACED_HEAR,
    PACED_S,
    PACED_SUBMIT,
    RATE,
    STEP_S,
    SUBMIT,
    SUBMIT_LONGEST,
    DeviceMover,
    GpuTransfer,
    Kernels,
    beside,
    check,
    costs,
    paced,
    rate,
)

COUNTS = (1, 16, 256, 4096)
"""Numbers of blocks per transfer."""
PAGE_COUNTS = (16, 256)
"""Numbers of blocks per transfer for shapes that compare page sizes."""
SPARE = 4
"""Divisor for blocks outside the largest transfer, so that no transfer is one contiguous run."""
MEMORY_SHARE = 0.8
"""Largest share of the free memory to use, for each kind of memory."""
BESIDE_BLOCKS = 64
"""Blocks of the transfers that run beside kernels, and of the transfer whose bytes are compared."""

DECODE_LEAST = 0.97
"""Goal: rate of decode-size kernels beside transfers, relative to their rate alone."""
PREFILL_SHARE = 0.7
"""Goal: rate of transfers beside prefill-size kernels, relative to the rate of one large copy."""
CALL = (Goal(1.0),)
"""Goal for the longest call, in ms."""

REPEATS_MAX = 3
"""Maximum repetitions of a case, so that the time suffices for all shapes."""

PINNED = "CPU memory is pinned"
BATCHED = "the driver copies in batches"


@dataclass(frozen=True, slots=True)
class GpuShape:
    """KV cache of a model on one GPU."""

    label: str
    layers: int
    page_bytes: int
    share: float = 0.85
    """Goal for the rates, as a share of one large copy's rate."""
    is_model: bool = True
    """True if everything is measured. False if only the rates of `PAGE_COUNTS` are, in order to
    compare page sizes."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the numbers of blocks per transfer."""
        return COUNTS if self.is_model else PAGE_COUNTS

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a block over all layers."""
        return self.layers * self.page_bytes

    def layout(self, blocks: int, geometry: ArenaGeometry) -> WorkerLayout:
        """Return the layout with one KV group, a tensor per layer, and one worker."""
        tensors = [TensorLayout(blocks, self.page_bytes, self.page_bytes)] * self.layers
        refs = [PageRef(layer, self.page_bytes) for layer in range(self.layers)]
        return WorkerLayout(tensors, [refs], 1, geometry, 0)


SHAPES = (
    GpuShape("Llama-3.1-8B, 32 layers × 64 KiB", 32, 64 << 10, share=0.90),
    *(
        GpuShape(f"{2048 // kib} layers × {kib} KiB", 2048 // kib, kib << 10, 0.90, is_model=False)
        for kib in (128, 256, 512)
    ),
    GpuShape("MLA, 61 layers × 18 KiB", 61, 18 << 10),
    GpuShape("70B with TP 8, 80 layers × 8 KiB", 80, 8 << 10, share=0.75),
    GpuShape("Llama-3.1-8B, all layers in one tensor, 2 MiB", 1, 2 << 20, share=0.90),
)
"""Shapes to measure. The last one is the layout across layers of vLLM 0.24 to 0.28. Those without a
model have blocks of the first one's size, in larger pages."""


def room_for(count: int) -> int:
    """Return the number of blocks in a cache for transfers of `count` blocks."""
    return count + max(1, count // SPARE)


def need(shape: GpuShape, count: int, contenders: int) -> DeviceRoom:
    """Return the memory that transfers of `count` blocks need.

    This is a cache on the device, one in shared memory for each contender, and one copy on either
    side for the limit. For the copy, torch rounds pinned memory up to the next power of two.
    """
    cache, copy = room_for(count) * shape.block_bytes, count * shape.block_bytes
    shared = contenders * cache
    return DeviceRoom(device=cache + copy, shared=shared, memory=shared + 2 * copy)


def lacking(shape: GpuShape, count: int, contenders: int, free: DeviceRoom) -> str:
    """Return the memory that is too small for transfers of `count` blocks; empty if all suffice."""
    wanted = need(shape, count, contenders)
    larger = human(-(-int(wanted.shared / MEMORY_SHARE) // GIB) * GIB)
    for place, needed, there, remedy in (
        ("GPU memory", wanted.device, free.device, "end what uses the GPU"),
        (
            "/dev/shm",
            wanted.shared,
            free.shared,
            f"give a container --shm-size of {larger}, or remount it with that size",
        ),
        ("memory", wanted.memory, free.memory, "end what uses memory"),
    ):
        if needed > MEMORY_SHARE * there:
            return f"{human(needed)} of {place} are too much of {human(there)}; {remedy}"
    return ""


class GpuBench:
    """One shape: device tensors, and each contender's CPU memory, for the largest transfer.

    Raises `BenchError` if kvcascade returns bytes that differ from those it stored. If another
    contender fails, a note says so, and the contender has no more figures for this shape.
    """

    def __init__(
        self, device: Device, shape: GpuShape, largest: int, undo: ExitStack, note: Say
    ) -> None:
        self._device, self._shape, self._note = device, shape, note
        self._room, self._beside = room_for(largest), min(largest, BESIDE_BLOCKS)
        self._movers: dict[str, DeviceMover] = {}
        self._contenders: dict[str, Contender] = {}
        undo.callback(self._let_go)
        geometry = ArenaGeometry(self._room, shape.block_bytes, 1)
        role = ArenaRole.scheduler(expect_workers=False)
        arena = Arena.open(geometry, f"bench-{os.getpid()}", role)
        undo.callback(arena.close)
        cache = device.pages(shape.layers * self._room, shape.page_bytes)
        tensors = cache.view(shape.layers, self._room, -1).unbind()  # as in vLLM 0.32
        layout = shape.layout(self._room, geometry)
        some = self._transfer(self._beside)
        makers: dict[str, Callable[[], Contender]] = {
            OURS: partial(device.ours, tensors, layout, arena.slots),
            **{name: partial(make, tensors, self._room) for name, make in device.others().items()},
        }
        for name, make in makers.items():
            with self._excused(name):
                contender = make()
                undo.callback(self._shut_down, name, contender.copier)
                self._movers[name] = DeviceMover(contender.copier)
                self._contenders[name] = contender
                check(self._movers[name], tensors, some)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the contenders, with kvcascade first."""
        return tuple(self._movers)

    def ways(self, name: str) -> Figures:
        """Return whether a contender's CPU memory is pinned, and whether its copies are batched.

        The copies whose bytes were compared have shown whether the driver refuses a batch.
        """
        contender = self._contenders[name]
        found = {PINNED: 100.0 * contender.is_pinned}
        if contender.is_batched is not None:
            found[BATCHED] = 100.0 * contender.is_batched()
        return found

    def costs(self, name: str, count: int) -> Figures:
        """Measure scattered transfers in both directions."""
        transfer, size = self._transfer(count), count * self._shape.block_bytes
        return self._both_ways(
            name, lambda mover, way: costs(mover, way, transfer, size, time.perf_counter)
        )

    def limit(self, count: int) -> Figures:
        """Measure one copy of as many bytes between the device and pinned memory."""
        size = count * self._shape.block_bytes
        copies = self._device.plain_copies(size)
        return {RATE[way]: rate(copies[way], size, time.perf_counter) for way in Direction}

    def beside(self, name: str, kernels: Kernels) -> Figures:
        """Measure kernels on the compute stream, with and without transfers."""
        transfer, size = self._transfer(self._beside), self._beside * self._shape.block_bytes
        start = partial(self._device.start_chain, kernels)
        return self._both_ways(
            name, lambda mover, way: beside(mover, way, kernels, transfer, size, start, time.sleep)
        )

    def limit_beside(self, kernels: Kernels) -> Figures:
        """Measure the reference for transfers beside kernels: one copy of as many bytes, without
        kernels."""
        alone = self.limit(self._beside)
        return {MEANWHILE[way, kernels]: alone[RATE[way]] for way in Direction}

    def paced(self, name: str, step_s: float) -> Figures:
        """Measure many transfers in both directions, polled at the interval of an engine."""
        transfer, size = self._transfer(self._beside), self._beside * self._shape.block_bytes
        start = partial(self._device.start_chain, Kernels.PREFILL)
        clock, pause = time.perf_counter, time.sleep
        return self._both_ways(
            name,
            lambda mover, way: paced(mover, way, transfer, size, step_s, start, clock, pause),
        )

    def _transfer(self, count: int) -> GpuTransfer:
        return GpuTransfer.scattered(count, self._room, self._room)

    def _both_ways(
        self, name: str, figures: Callable[[DeviceMover, Direction], Figures]
    ) -> Figures:
        """Measure both directions; return no figures if the contender fails or has failed."""
        mover = self._movers.get(name)
        with self._excused(name):
            if mover is not None:
                found = [figures(mover, way) for way in Direction]
                return {key: figure for each in found for key, figure in each.items()}
        return {}

    @contextmanager
    def _excused(self, name: str) -> Iterator[None]:
        """Drop a contender that raises, and note the reason. Errors of kvcascade pass."""
        try:
            yield
        except Exception as error:
            if name == OURS:
                raise
            self._movers.pop(name, None)
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            self._note(f"{self._shape.label}: {TITLES[name]} failed and is left out: {reason}")

    def _shut_down(self, name: str, copier: DeviceCopier) -> None:
        with self._excused(name):
            copier.shutdown()

    def _let_go(self) -> None:
        """Release all memory; the last case still refers to this object."""
        self._movers.clear()
        self._contenders.clear()
        self._device.release()


def cases(setup: MeasurementSetup, device: Device | None = None) -> Generator[Case, None, None]:
    """Yield the cases of every shape, from one block to as many as fit; the rest is reported."""
    device = device or CudaDevice()
    contenders = 1 + len(device.others())
    for note in device.notes():
        setup.note(note)
    for shape in SHAPES:
        free = device.room()
        lacks = {count: lacking(shape, count, contenders, free) for count in shape.counts}
        fitting = [count for count in shape.counts if not lacks[count]]
        if fitting:
            setup.say(f"{shape.label}: pinning memory")
            with ExitStack() as undo:
                bench = GpuBench(device, shape, fitting[-1], undo, setup.note)
                yield from _measured(bench, shape, fitting, setup.scale.repeats)
        for count in shape.counts[len(fitting) :]:
            setup.note(f"{shape.label}: {count:,} blocks are not measured: {lacks[count]}")
            label = f"{shape.label}: {count:,} blocks, not measured: {lacks[count]}"
            yield Case(label, {OURS: lambda: dict.fromkeys(RATE.values())}, repeats=1)


def _measured(
    bench: GpuBench, shape: GpuShape, counts: Sequence[int], most: int
) -> Generator[Case, None, None]:
    """Yield all cases of a shape, each with at most `most` repetitions."""
    names, rows, repeats = bench.names, quantities(shape.share), min(REPEATS_MAX, most)
    yield Case(shape.label, {name: partial(bench.ways, name) for name in names}, repeats=1)
    for count in counts:
        contenders = {name: partial(bench.costs, name, count) for name in names}
        yield Case(
            f"{shape.label}: {count:,} blocks",
            {**contenders, LIMIT: partial(bench.limit, count)},
            rows,
            repeats,
        )
    if not shape.is_model:
        return
    for kernels in Kernels:
        contenders = {name: partial(bench.beside, name, kernels) for name in names}
        yield Case(
            f"{shape.label}: beside kernels of {kernels} size",
            {**contenders, LIMIT: partial(bench.limit_beside, kernels)},
            repeats=repeats,
        )
    for step_s in PACED_S:
        yield Case(
            f"{shape.label}: {step_s * 1e3:g} ms between calls",
            {name: partial(bench.paced, name, step_s) for name in names},
            repeats=repeats,
        )


def quantities(share: float) -> tuple[Quantity, ...]:
    """Return the rows; `share` is the goal for the rates."""
    whole = (Goal(100, is_least=True),)
    found = [Quantity(name, "%", whole, is_more_better=True) for name in (PINNED, BATCHED)]
    for way in Direction:
        goals = (Goal(share, LIMIT, is_least=True),)
        found.append(Quantity(RATE[way], "GB/s", goals, is_more_better=True))
        found.append(Quantity(SUBMIT[way], "ms"))
        found += [Quantity(each[way], "ms", CALL) for each in (SUBMIT_LONGEST, HEAR_LONGEST)]
    for beside_key, name in BESIDE.items():
        is_decode = beside_key[1] is Kernels.DECODE
        kept = (Goal(DECODE_LEAST, is_least=True),) if is_decode else ()
        moved = () if is_decode else (Goal(PREFILL_SHARE, LIMIT, is_least=True),)
        found += [
            Quantity(name, "×", kept, is_more_better=True),
            Quantity(MEANWHILE[beside_key], "GB/s", moved, is_more_better=True),
        ]
    for key, name in PACED.items():
        found.append(Quantity(name, "GB/s", is_more_better=True))
        found += [Quantity(each[key], "ms", CALL) for each in (PACED_SUBMIT, PACED_HEAR)]
    return tuple(found)


MEASUREMENT = Measurement(
    "gpu",
    "GPU: scattered blocks between the device and CPU memory",
    "Blocks and slots drawn at random, one transfer after another, each asked after until it has "
    "ended; vLLM: its CPUOffloadingWorker, same tensors, same blocks; per page: this worker's "
    "batched copy of single pages, without vLLM; limit: one copy of as many "
    "bytes between the device and pinned memory. Few blocks take as long as the calls about them. "
    "submit, get_finished: how long a call keeps the worker's thread, which launches the model's "
    "kernels, too. Beside kernels: the rate of a chain of matrix products on a stream of its own, "
    "large ones as of a prefill, and ones of few rows as of decoding, "
    f"over its rate alone, while transfers of {BESIDE_BLOCKS} blocks are asked after and submitted "
    f"anew every {STEP_S * 1e3:g} ms, and what these move; – where they ran during less than "
    f"{COVERED_LEAST} of the chain's time, so that its rate says nothing. Between calls: transfers "
    f"of {BESIDE_BLOCKS} blocks that are submitted together and asked after as seldom as in an "
    "engine's step, until the last one is heard of.",
    quantities(0.85),
    cases,
)
