"""All tiers without an engine: store, write to NVMe, restart, promote, load, compare every byte.

Runs with and without a GPU or vLLM. `drive` calls both halves of an engine directly.
"""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Generator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import psutil

from .....config.sizes import human
from .....tiers.base import BlockHash
from .....tiers.cpu.arena import DEFAULT_ARENA_DIR
from .....tiers.cpu.header import ArenaGeometry
from ....commands.bench.bench_results import GIGA, MIB, OURS, BenchError, Quantity
from ....commands.bench.raw_disk import drop_page_cache
from ..gpu.gpu import MEMORY_SHARE, GpuShape
from ..measurement import Case, Figures, Measurement, MeasurementSetup

if TYPE_CHECKING:
    import torch

    from .drive import DrivenEngine, RequestPart

SHAPE = GpuShape("Llama-3.1-8B, 32 layers × 64 KiB", 32, 64 << 10)
REQUEST_BYTES = 16 * MIB
BLOCKS_MIN = 4
DISK_FACTOR = 4
"""Bytes on the disk per byte of blocks: segments are created in advance, and only whole."""
METADATA_FACTOR = 1.25
"""Factor for the disk space of a tier's metadata."""
SPARE_BYTES = 256 * MIB
WINDOW = 6
"""Number of requests that wait for their blocks concurrently."""
NEEDED = ("lmdb", "msgspec")
"""Modules of the NVMe tier, which other measurements on a GPU do without."""
CPU, CUDA = "cpu", "cuda"

STORED, WRITTEN = "device to CPU tier", "CPU tier to NVMe"
OPENED = "opening everything again"
BROUGHT_UP, LOADED = "NVMe to device, after the restart", "CPU tier to device"


class RoundTrip:
    """Round trip of blocks from a device to NVMe and back after a restart."""

    def __init__(self, folder: Path, device: str, shape: GpuShape, blocks: int) -> None:
        """Prepare the trip; `device` is `"cuda"` or `"cpu"`."""
        self._folder, self._device, self._shape = folder, device, shape
        self._blocks = blocks
        self._geometry = ArenaGeometry(_slots_for(shape, blocks), shape.block_bytes, 1)

    def __call__(self) -> Figures:
        """Make the round trip once. Raises `BenchError` if a byte differs or a block is missing."""
        self._folder.mkdir(parents=True)
        tensors = self._tensors()
        before = [tensor.clone() for tensor in tensors]
        parts, back = self._parts("away"), self._parts("back")
        size = self._blocks * self._shape.block_bytes
        seconds: dict[str, float] = {}
        engine = self._open(tensors)
        try:
            seconds[STORED] = engine.store(parts)
            seconds[WRITTEN] = engine.write_down()
            if engine.written_blocks != self._blocks:
                written = f"{engine.written_blocks} of {self._blocks} blocks"
                raise BenchError(f"{written} reached the disk")
        finally:
            engine.close()
        del engine  # its arena stays mapped with it, and the next one may not fit beside that
        drop_page_cache([self._folder])
        began = perf_counter()
        engine = self._open(tensors)
        opened_s = perf_counter() - began
        try:
            for name in (BROUGHT_UP, LOADED):
                for tensor in tensors:
                    tensor.zero_()
                seconds[name] = engine.load(back)
                _compare(tensors, before, parts, back)
        finally:
            engine.close()
        rates = {name: size / took_s / GIGA for name, took_s in seconds.items()}
        return {**rates, OPENED: opened_s}

    def _open(self, tensors: Sequence[torch.Tensor]) -> DrivenEngine:
        from .drive import DrivenEngine

        layout = self._shape.layout(self._blocks, self._geometry)
        disk_bytes = int(self._blocks * self._geometry.slot_bytes * METADATA_FACTOR) + SPARE_BYTES
        return DrivenEngine(tensors, layout, self._geometry, self._folder, disk_bytes)

    def _tensors(self) -> list[torch.Tensor]:
        import torch

        shape = (self._shape.layers * self._blocks, self._shape.page_bytes)
        cache = torch.randint(-128, 128, shape, dtype=torch.int8, device=self._device)
        # Layers in one allocation, as in vLLM 0.32.
        return list(cache.view(self._shape.layers, self._blocks, -1).unbind())

    def _parts(self, order: str) -> list[RequestPart]:
        """Return the blocks as requests; `order` determines their device blocks."""
        from .drive import RequestPart

        keys = [_key(number) for number in range(self._blocks)]
        places = random.Random(order).sample(range(self._blocks), self._blocks)
        size = max(1, REQUEST_BYTES // self._shape.block_bytes)
        starts = range(0, self._blocks, size)
        return [RequestPart(keys[at : at + size], places[at : at + size]) for at in starts]


def _slots_for(shape: GpuShape, blocks: int) -> int:
    """Return the slots of the CPU tier, of which promotions may use half."""
    asked_for = WINDOW * max(1, REQUEST_BYTES // shape.block_bytes)
    return 2 * blocks + min(blocks, asked_for)


def _fitting(setup: MeasurementSetup, wanted: int) -> int:
    """Return the number of blocks that fit, and note it if there are fewer than wanted."""
    shared = psutil.disk_usage(DEFAULT_ARENA_DIR).free
    disk = psutil.disk_usage(str(setup.folder.parent)).free
    blocks = wanted
    while blocks >= BLOCKS_MIN:
        arena = _slots_for(SHAPE, blocks) * SHAPE.block_bytes
        on_disk = DISK_FACTOR * blocks * SHAPE.block_bytes
        if arena <= MEMORY_SHARE * shared and on_disk <= MEMORY_SHARE * disk:
            break
        blocks //= 2
    if blocks < wanted:
        setup.note(
            f"{wanted:,} blocks have no room for a round trip: {human(shared)} of "
            f"{DEFAULT_ARENA_DIR} and {human(disk)} of the disk are free; give a container a "
            "larger --shm-size, or another --path"
        )
    return blocks if blocks >= BLOCKS_MIN else 0


def _key(number: int) -> BlockHash:
    return BlockHash(hashlib.sha256(f"round trip {number}".encode()).digest())


def _compare(
    after: Sequence[torch.Tensor],
    before: Sequence[torch.Tensor],
    parts: Sequence[RequestPart],
    back: Sequence[RequestPart],
) -> None:
    import torch

    was, now = (
        torch.tensor([at for part in each for at in part.device_blocks], device=after[0].device)
        for each in (parts, back)
    )
    if not all(torch.equal(a[now], b[was]) for a, b in zip(after, before, strict=True)):
        raise BenchError("blocks came back to the device with other bytes than they left with")


def cases(setup: MeasurementSetup, device: str = "") -> Generator[Case, None, None]:
    """Yield the only case, on the GPU if torch sees one, else in ordinary memory."""
    import torch

    device = device or (CUDA if torch.cuda.is_available() else CPU)
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        setup.note(f"the NVMe tier needs {', '.join(missing)}: pip install {' '.join(missing)}")
        return
    if device == CPU:
        setup.note("no CUDA device answers: the device's blocks lie in ordinary memory")
    blocks = _fitting(setup, max(BLOCKS_MIN, setup.scale.transfer_bytes // SHAPE.block_bytes))
    if not blocks:
        return
    trip = RoundTrip(setup.folder / "tier", device, SHAPE, blocks)
    label = f"{blocks:,} blocks of {SHAPE.block_bytes // MIB} MiB; device: {device}"
    yield Case(label, {OURS: partial(_in_fresh_folder, trip, setup.folder / "tier")}, QUANTITIES)


def _in_fresh_folder(trip: RoundTrip, folder: Path) -> Figures:
    try:
        return trip()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


QUANTITIES = (
    *(
        Quantity(name, "GB/s", is_more_better=True)
        for name in (STORED, WRITTEN, BROUGHT_UP, LOADED)
    ),
    Quantity(OPENED, "s"),
)

MEASUREMENT = Measurement(
    "round_trip",
    "Round trip without an engine: device, CPU tier, NVMe, restart, and back",
    "Manager, worker's part and copier driven by their own contracts. Stores: until the copier "
    "has reported the last one. To NVMe: until no block is dirty nor on its way. Then everything "
    "is closed, the page cache dropped, and everything opened again over an empty CPU tier. Every "
    "byte is compared after the blocks came up from NVMe, and after they came from the CPU tier.",
    QUANTITIES,
    cases,
)
