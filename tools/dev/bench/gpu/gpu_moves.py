"""Measurements of any copier between a device and CPU memory: rates, duration of calls, and effect
on kernels.

This module does not know CUDA. A contender is a `DeviceCopier`, driven by the calls of an engine's
worker: submit, then poll for finished transfers, step after step.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import numpy as np

from .....handlers.device.copier import DeviceCopier, Direction, GpuBlocks, TransferResult
from .....tiers.base import SlotArray
from ....commands.bench.bench_results import GIGA, BenchError
from ..measurement import Figures

if TYPE_CHECKING:
    import torch

BYTES_PER_TIMING = 2 << 30
"""Bytes to move for one timing; transfers are repeated until then."""
REPEATS_MAX = 50
TRANSFER_TIMEOUT_S = 60.0
"""Time after which a transfer counts as hung."""
STEP_S = 0.005
"""Duration of a short decoding step; an engine polls at most this often."""
AHEAD_BYTES = 1 << 30
"""Bytes in flight beside kernels: more than any PCIe link moves in a step."""
AHEAD_JOBS_MAX = 32
ALONE_CHAINS = 3
COVERED_LEAST = 0.75
"""Least share of a chain of kernels during which transfers must run, for a valid result. Transfers
that began before the chain, and the last ones, count only partly."""

RATE = {Direction.STORE: "device to arena", Direction.LOAD: "arena to device"}
SUBMIT = {way: f"{name}: submit, median" for way, name in RATE.items()}
SUBMIT_LONGEST = {way: f"{name}: submit, longest" for way, name in RATE.items()}
HEAR_LONGEST = {way: f"{name}: get_finished, longest" for way, name in RATE.items()}


class Kernels(StrEnum):
    """Kernels beside which transfers run, named after the engine's step that they imitate."""

    PREFILL = "prefill"
    """Products of large matrices."""
    DECODE = "decode"
    """Products that read large weights for few rows."""


_NOUN = {Direction.STORE: "stores", Direction.LOAD: "loads"}
BESIDE = {(way, each): f"{each} beside {_NOUN[way]}" for way in Direction for each in Kernels}
"""Names of the rates of kernels beside transfers, relative to their rate alone."""
MEANWHILE = {(way, each): f"{_NOUN[way]} beside {each}" for way in Direction for each in Kernels}
"""Names of the rates of transfers beside kernels."""
PACED_S = (0.02, 0.15)
"""Intervals between an engine's calls: a decoding step, and a prefill step."""
PACED_BYTES = 4 << 30
PACED_JOBS_MAX = 64
PACED = {
    (way, step_s): f"{name}, {step_s * 1e3:g} ms between calls, beside kernels"
    for way, name in ((Direction.STORE, "stores"), (Direction.LOAD, "loads"))
    for step_s in PACED_S
}
PACED_SUBMIT = {key: f"{name}: submit, longest" for key, name in PACED.items()}
PACED_HEAR = {key: f"{name}: get_finished, longest" for key, name in PACED.items()}

Clock = Callable[[], float]
"""Clock that returns seconds."""


@dataclass(frozen=True, slots=True)
class GpuTransfer:
    """Device blocks and slots of one transfer, in random order."""

    blocks: GpuBlocks
    slots: SlotArray

    @classmethod
    def scattered(cls, count: int, blocks: int, slots: int) -> GpuTransfer:
        """Return a transfer of `count` different blocks and slots."""
        source = random.Random(0)
        ids = source.sample(range(blocks), count)
        return cls(
            GpuBlocks.of(ids, [count], [0]),
            np.array(source.sample(range(slots), count), dtype=np.int32),
        )


class MoveChain(Protocol):
    """Kernels that were launched on the compute stream."""

    def has_ended(self) -> bool:
        """Return True if the last kernel has ended."""
        ...

    def seconds(self) -> float:
        """Return the time from the first kernel's start to the last kernel's end; waits for
        that."""
        ...


class DeviceMover:
    """Transfers through a copier, with a count of those in flight."""

    def __init__(self, copier: DeviceCopier) -> None:
        self.under_way = 0
        """Number of transfers that were submitted and not yet reported as finished."""
        self._copier = copier
        self._jobs = 0

    def submit(self, way: Direction, transfer: GpuTransfer) -> None:
        """Start a transfer."""
        self._jobs += 1
        if not self._copier.submit(way, self._jobs, transfer.blocks, transfer.slots):
            raise BenchError("a transfer between device and arena was refused")
        self.under_way += 1

    def hear(self) -> list[TransferResult]:
        """Return the transfers that have finished since the last call."""
        results = self._copier.get_finished()
        if not all(result.success for result in results):
            raise BenchError("a transfer between device and arena failed; see the log")
        self.under_way -= len(results)
        return results

    def finish(self) -> None:
        """Wait for all transfers in flight."""
        self._copier.wait(set(range(1, self._jobs + 1)))
        self.hear()


@dataclass(frozen=True, slots=True)
class Transit:
    """Durations of one transfer, in seconds."""

    total_s: float
    submit_s: float
    """Duration of the call that submitted it."""
    hear_s: float
    """Duration of the longest call that polled for finished transfers."""


def one_transfer(
    mover: DeviceMover, way: Direction, transfer: GpuTransfer, clock: Clock
) -> Transit:
    """Submit one transfer, and poll until it has finished."""
    began = clock()
    mover.submit(way, transfer)
    now = submitted = clock()
    hear_s = 0.0
    while mover.under_way:
        if now - began > TRANSFER_TIMEOUT_S:
            raise BenchError(f"a transfer did not end within {TRANSFER_TIMEOUT_S:.0f} s")
        asked = now
        mover.hear()
        now = clock()
        hear_s = max(hear_s, now - asked)
    return Transit(now - began, submitted - began, hear_s)


def costs(
    mover: DeviceMover, way: Direction, transfer: GpuTransfer, size: int, clock: Clock
) -> Figures:
    """Measure transfers of `size` bytes, one after another; the first one is not counted."""
    one_transfer(mover, way, transfer, clock)
    transits = [one_transfer(mover, way, transfer, clock) for _ in range(repeats_for(size))]
    submits_ms = [transit.submit_s * 1e3 for transit in transits]
    return {
        RATE[way]: len(transits) * size / sum(transit.total_s for transit in transits) / GIGA,
        SUBMIT[way]: statistics.median(submits_ms),
        SUBMIT_LONGEST[way]: max(submits_ms),
        HEAR_LONGEST[way]: max(transit.hear_s for transit in transits) * 1e3,
    }


def rate(run: Callable[[], None], size: int, clock: Clock) -> float:
    """Return the rate of a function that moves `size` bytes, in GB/s; the first call is not
    counted."""
    run()
    repeats = repeats_for(size)
    began = clock()
    for _ in range(repeats):
        run()
    return repeats * size / (clock() - began) / GIGA


def repeats_for(size: int) -> int:
    """Return the number of repetitions of a transfer for one figure."""
    return max(1, min(REPEATS_MAX, BYTES_PER_TIMING // size))


def beside(
    mover: DeviceMover,
    way: Direction,
    kernels: Kernels,
    transfer: GpuTransfer,
    size: int,
    start_chain: Callable[[], MoveChain],
    pause: Callable[[float], None],
) -> Figures:
    """Measure a chain of kernels beside transfers, relative to its rate alone.

    Transfers start before the chain and end after it. Figures are None if the transfers that
    finished meanwhile covered too small a part of the chain.
    """
    alone_s = statistics.median(start_chain().seconds() for _ in range(ALONE_CHAINS))
    ahead = max(1, min(AHEAD_JOBS_MAX, AHEAD_BYTES // size))
    for _ in range(ahead):
        mover.submit(way, transfer)
    mover.hear()  # ignore transfers that end before the first kernel
    chain = start_chain()
    ended: list[TransferResult] = []
    while not chain.has_ended():
        ended += mover.hear()
        if mover.under_way < ahead:
            mover.submit(way, transfer)
        else:
            pause(STEP_S)
    during_s = chain.seconds()
    mover.finish()
    covered = sum(result.time_s for result in ended) / during_s
    return {
        BESIDE[way, kernels]: alone_s / during_s if covered >= COVERED_LEAST else None,
        MEANWHILE[way, kernels]: len(ended) * size / during_s / GIGA,
    }


def paced(
    mover: DeviceMover,
    way: Direction,
    transfer: GpuTransfer,
    size: int,
    step_s: float,
    start_chain: Callable[[], MoveChain],
    clock: Clock,
    pause: Callable[[float], None],
) -> Figures:
    """Measure transfers that are submitted together and polled every `step_s`, beside kernels.

    The time is rounded up to whole steps, because a finished transfer is reported at the next poll.
    """
    count = max(1, min(PACED_JOBS_MAX, PACED_BYTES // size))
    chain = start_chain()
    began, submit_s, hear_s = clock(), 0.0, 0.0
    for _ in range(count):
        asked = clock()
        mover.submit(way, transfer)
        submit_s = max(submit_s, clock() - asked)
    while mover.under_way:
        pause(step_s)
        if chain.has_ended():
            chain = start_chain()
        asked = clock()
        mover.hear()
        hear_s = max(hear_s, clock() - asked)
        if asked - began > TRANSFER_TIMEOUT_S:
            raise BenchError(f"transfers did not end within {TRANSFER_TIMEOUT_S:.0f} s")
    took_s = clock() - began
    chain.seconds()
    key = (way, step_s)
    return {
        PACED[key]: count * size / took_s / GIGA,
        PACED_SUBMIT[key]: submit_s * 1e3,
        PACED_HEAR[key]: hear_s * 1e3,
    }


def check(mover: DeviceMover, tensors: Sequence[torch.Tensor], transfer: GpuTransfer) -> None:
    """Raise `BenchError` unless blocks return from CPU memory with the same bytes."""
    import torch

    ids = torch.from_numpy(transfer.blocks.block_ids.astype(np.int64)).to(tensors[0].device)
    before = [tensor[ids] for tensor in tensors]
    mover.submit(Direction.STORE, transfer)
    mover.finish()
    for tensor in tensors:
        tensor[ids] = 0
    mover.submit(Direction.LOAD, transfer)
    mover.finish()
    if not all(torch.equal(tensor[ids], was) for tensor, was in zip(tensors, before, strict=True)):
        raise BenchError("blocks that came back from CPU memory had other bytes than before")
