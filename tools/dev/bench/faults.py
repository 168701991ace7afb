"""Faults on disk between two runs of an engine: blocks served with wrong bytes, and blocks lost.

The places of blocks are found by their contents, whatever files an engine writes. Each engine is
opened anew after a fault, asks for every block, and compares what it gets.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...commands.bench.bench_results import (
    KIB,
    LMCACHE,
    OURS,
    VLLM,
    BenchError,
    Goal,
    Quantity,
)
from .measurement import Case, Figures, Measurement, MeasurementSetup
from .peers.lmcache_peer import LMCacheTiers, is_measured
from .transfer_bench import SEED, TransferBench

if TYPE_CHECKING:
    import torch

    from .peers.vllm_calls import Key
    from .peers.vllm_steps import EngineCache

BLOCKS = 64
BLOCK_BYTES = 64 * KIB
DAMAGED = 8
"""Number of blocks that a fault hits, if it hits single blocks."""
SAME, OTHER = "bench", "other weights"

WRONG = "wrong blocks served"
FOUND = "blocks found"
AGAIN = "blocks found after they were stored again"

QUANTITIES = (
    Quantity(WRONG, "blocks", (Goal(0.0),)),
    Quantity(FOUND, "blocks", is_more_better=True),
    Quantity(AGAIN, "blocks", is_more_better=True),
)


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a block's bytes in a file."""

    path: Path
    offset: int


Fault = Callable[[Sequence[Place]], None]
"""Function that damages the files of these blocks."""


def places(folders: Sequence[Path], device: torch.Tensor) -> list[Place]:
    """Return the place of each block of the device. Raises `BenchError` if one is nowhere."""
    rows = [row.numpy().tobytes() for row in device]
    found: dict[int, Place] = {}
    paths = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    for path in sorted(paths):
        data = path.read_bytes()
        for number, row in enumerate(rows):
            at = data.find(row) if number not in found else -1
            if at >= 0:
                found[number] = Place(path, at)
    if len(found) < len(rows):
        raise BenchError(f"{len(rows) - len(found)} blocks are in no file")
    return [found[number] for number in range(len(rows))]


def flip(hit: Sequence[Place]) -> None:
    """Invert one byte in the middle of each block."""
    for place in hit:
        with place.path.open("r+b") as file:
            file.seek(place.offset + BLOCK_BYTES // 2)
            old = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([old ^ 0xFF]))


def swap(hit: Sequence[Place]) -> None:
    """Exchange the contents of each block and the next one."""
    for one, other in zip(hit[::2], hit[1::2], strict=True):
        first, second = _read(one), _read(other)
        _write(one, second)
        _write(other, first)


def cut(hit: Sequence[Place]) -> None:
    """Cut each file in the middle of the first of these blocks that it holds."""
    firsts: dict[Path, int] = {}
    for place in hit:
        firsts[place.path] = min(place.offset, firsts.get(place.path, place.offset))
    for path, offset in firsts.items():
        os.truncate(path, offset + BLOCK_BYTES // 2)


def empty(hit: Sequence[Place]) -> None:
    """Make the files of these blocks empty."""
    for path in {place.path for place in hit}:
        os.truncate(path, 0)


def remove(hit: Sequence[Place]) -> None:
    """Remove the files of these blocks."""
    for path in {place.path for place in hit}:
        path.unlink()


def nothing(hit: Sequence[Place]) -> None:
    """Damage nothing."""


FAULTS: dict[str, tuple[Fault, str]] = {
    "restart": (nothing, SAME),
    f"one byte flipped in {DAMAGED} blocks": (flip, SAME),
    f"contents of {DAMAGED} blocks swapped": (swap, SAME),
    f"files of {DAMAGED} blocks cut": (cut, SAME),
    f"files of {DAMAGED} blocks emptied": (empty, SAME),
    f"files of {DAMAGED} blocks removed": (remove, SAME),
    "other weights under the same model name": (nothing, OTHER),
}
"""Each fault, and the weights of the engine that is opened after it."""


Opened = Callable[["torch.Tensor", str], "EngineCache | LMCacheTiers"]
"""Function that opens a contender's cache over a device, with weights of this name."""


class FaultBench(TransferBench):
    """One fault, for each contender in empty folders."""

    def __init__(self, setup: MeasurementSetup, fault: Fault, weights: str) -> None:
        super().__init__(setup, BLOCK_BYTES, BLOCKS * BLOCK_BYTES)
        self._fault, self._weights = fault, weights
        self._lmcache_python = setup.lmcache_python

    def ours_with(self, device: torch.Tensor, weights: str) -> EngineCache:
        """Return our cache, which is told its weights."""
        from .peers.vllm_steps import EngineCache

        return EngineCache(self.ours(device, weights))

    def vllm_with(self, device: torch.Tensor, weights: str) -> EngineCache:
        """Return vLLM's cache; its files do not depend on the weights."""
        from .peers.vllm_steps import EngineCache

        return EngineCache(self.vllm(device))

    def lmcache_with(self, device: torch.Tensor, weights: str) -> LMCacheTiers:
        """Return LMCache's tiers; their files do not depend on the weights."""
        assert self._lmcache_python is not None
        return LMCacheTiers(self._lmcache_python, device, self.folders[0])

    def run(self, opened: Opened) -> Figures:
        """Store, damage, read; then store again, and read again."""
        from .peers.vllm_calls import random_keys
        from .peers.vllm_steps import fill_pattern

        keys = random_keys(self.blocks)
        with self.fresh():
            device = self.device()
            with closing(opened(device, SAME)) as cache:
                cache.store(keys)
            self._fault(places(self.folders, device)[:DAMAGED])
            right = device.clone()
            if self._weights != SAME:
                fill_pattern(right, SEED + 1)
            wrong, found = self._read(opened, device, keys, right)
            device.copy_(right)
            with closing(opened(device, self._weights)) as cache:
                cache.offer(keys)
            more_wrong, again = self._read(opened, device, keys, right)
        return {WRONG: wrong + more_wrong, FOUND: found, AGAIN: again}

    def _read(
        self, opened: Opened, device: torch.Tensor, keys: list[Key], right: torch.Tensor
    ) -> tuple[int, int]:
        """Return how many blocks came with wrong bytes, and how many with right ones."""
        import torch

        device.zero_()
        with closing(opened(device, self._weights)) as cache:
            came = cache.ask(keys)
        is_right = [torch.equal(device[number], right[number]) for number in came]
        return is_right.count(False), is_right.count(True)


def _read(place: Place) -> bytes:
    with place.path.open("rb") as file:
        file.seek(place.offset)
        return file.read(BLOCK_BYTES)


def _write(place: Place, data: bytes) -> None:
    with place.path.open("r+b") as file:
        file.seek(place.offset)
        file.write(data)


def cases(setup: MeasurementSetup) -> Generator[Case, None, None]:
    """Yield a case per fault."""
    has_lmcache = is_measured(setup)
    for label, (fault, weights) in FAULTS.items():
        bench = FaultBench(setup, fault, weights)
        contenders = {
            OURS: partial(bench.run, bench.ours_with),
            VLLM: partial(bench.run, bench.vllm_with),
        }
        if has_lmcache:
            contenders[LMCACHE] = partial(bench.run, bench.lmcache_with)
        yield Case(label, contenders, QUANTITIES, repeats=1)


MEASUREMENT = Measurement(
    "faults",
    "Faults on disk: what is served afterwards",
    f"{BLOCKS} blocks of {BLOCK_BYTES // KIB} KiB are stored, the engine is closed, and a fault is "
    "made in its files; a new engine asks for every block. Then all blocks are offered again, and "
    "a third engine asks. A wrong block is one whose bytes differ from those that were stored. Of "
    "other weights, kvcascade is told by `weights_id`; the others are told nothing.",
    QUANTITIES,
    cases,
)
