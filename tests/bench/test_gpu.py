"""The GPU benchmark without a GPU: choices, figures on twins in virtual time, and all of its cases
on a device that is ordinary memory."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.bench_scale import SMOKE
from support.clock import ManualClock
from support.executors import InlineExecutor
from support.gpu_twin import FREE_BYTES, POOL_STREAMS, FakeCuda, Kernels, Link, MemoryDevice

from kvcascade.handlers.device.copier import Direction, GpuBlocks
from kvcascade.handlers.device.device_cpu import CpuDeviceCopier
from kvcascade.handlers.device.staging_plan import DIRECT_RUN_BYTES
from kvcascade.tiers.base import SlotArray
from kvcascade.tiers.cpu.header import ArenaGeometry
from kvcascade.tools.commands.bench.bench_results import (
    LIMIT,
    LMCACHE,
    OURS,
    PAGES,
    VLLM,
    BenchError,
    Row,
)
from kvcascade.tools.dev.bench.gpu import gpu, gpu_moves
from kvcascade.tools.dev.bench.gpu.gpu import GpuShape
from kvcascade.tools.dev.bench.gpu.gpu_device import Contender, CudaDevice, DeviceRoom
from kvcascade.tools.dev.bench.gpu.gpu_moves import (
    BESIDE,
    HEAR_LONGEST,
    MEANWHILE,
    PACED,
    PACED_HEAR,
    PACED_SUBMIT,
    RATE,
    SUBMIT,
    SUBMIT_LONGEST,
    DeviceMover,
    GpuTransfer,
    beside,
    check,
    costs,
    paced,
)
from kvcascade.tools.dev.bench.measurement import Figures, MeasurementSetup, run

SMALL = GpuShape("small", 3, 64)
TRANSFER = GpuTransfer.scattered(4, 8, 8)
GIB = 1 << 30
ENDLESS = DeviceRoom(1 << 50, 1 << 50, 1 << 50)
ROWS_OF_PAGES = 2 + 8
"""Number of rows of the shape that has no other cases."""
CHAIN_S = 0.1
DECODE = gpu_moves.Kernels.DECODE
both_ways = pytest.mark.parametrize("way", Direction)


def test_blocks_and_slots_are_scattered_and_different() -> None:
    transfer = GpuTransfer.scattered(16, 20, 24)
    ids, slots = transfer.blocks.block_ids.tolist(), transfer.slots.tolist()
    assert len(set(ids)) == len(set(slots)) == 16
    assert max(ids) < 20 and max(slots) < 24
    assert sorted(ids) != ids and transfer.blocks.group_sizes == (16,)
    assert GpuTransfer.scattered(16, 20, 24).slots.tolist() == slots, "the same in every run"


def test_shapes_are_those_of_models() -> None:
    models = [shape for shape in gpu.SHAPES if shape.is_model]
    llama, mla, split, joined = models
    assert llama.block_bytes == joined.block_bytes == 2 << 20
    assert split.block_bytes == 80 * 8 << 10
    assert [shape.share for shape in models] == [0.90, 0.85, 0.75, 0.90]
    assert joined.layers == 1 and mla.block_bytes == 61 * 18 << 10


def test_pages_between_staged_and_direct_ones_are_measured() -> None:
    """From them the limit is chosen."""
    pages = [shape for shape in gpu.SHAPES if not shape.is_model]
    assert [shape.page_bytes for shape in pages] == [128 << 10, 256 << 10, DIRECT_RUN_BYTES]
    assert {shape.block_bytes for shape in pages} == {2 << 20}
    assert all(shape.counts == gpu.PAGE_COUNTS for shape in pages)


def test_what_does_not_fit_is_told_by_its_place() -> None:
    llama = gpu.SHAPES[0]
    assert gpu.need(llama, 4096, 2) == DeviceRoom(18 * GIB, 20 * GIB, 36 * GIB)
    assert gpu.need(llama, 4096, 3) == DeviceRoom(18 * GIB, 30 * GIB, 46 * GIB)
    lacking = partial(gpu.lacking, llama, 4096, 2)
    assert lacking(ENDLESS) == lacking(DeviceRoom(23 * GIB, 25 * GIB, 45 * GIB)) == ""
    assert "of GPU memory are" in lacking(replace(ENDLESS, device=22 * GIB))
    assert "20.0 GiB of /dev/shm are" in lacking(replace(ENDLESS, shared=24 * GIB))
    assert "of memory are" in lacking(replace(ENDLESS, memory=44 * GIB))


def test_a_rate_is_that_of_the_repeated_transfer() -> None:
    seconds, runs = count(0.0, 2.0), []
    assert gpu_moves.rate(lambda: runs.append(1), 1 << 30, lambda: next(seconds)) == (1 << 31) / 2e9
    assert len(runs) == 1 + gpu_moves.repeats_for(1 << 30) == 3
    assert gpu_moves.repeats_for(1) == gpu_moves.REPEATS_MAX
    assert gpu_moves.repeats_for(1 << 40) == 1


@both_ways
def test_what_transfers_cost(way: Direction) -> None:
    """The first one, which takes a second to submit, does not count."""
    clock = ManualClock()
    link = Link(clock, job_s=0.01, submit_s=(1.0, 0.001, 0.003, 0.002), hear_s=0.004)
    size = gpu_moves.BYTES_PER_TIMING // 3
    found = costs(DeviceMover(link), way, TRANSFER, size, clock)
    assert [each for each, _ in link.submitted] == [way] * 4
    assert found == pytest.approx(
        {
            RATE[way]: 3 * size / (0.006 + 3 * 0.012) / 1e9,
            SUBMIT[way]: 2.0,
            SUBMIT_LONGEST[way]: 3.0,
            HEAR_LONGEST[way]: 4.0,
        }
    )


def test_a_transfer_that_fails_or_never_ends_is_no_figure() -> None:
    clock = ManualClock()
    link = Link(clock)
    link.is_failing = True
    with pytest.raises(BenchError, match="failed"):
        costs(DeviceMover(link), Direction.STORE, TRANSFER, 1, clock)
    endless = DeviceMover(Link(clock, job_s=1e9, hear_s=1.0))
    with pytest.raises(BenchError, match="did not end"):
        costs(endless, Direction.STORE, TRANSFER, 1, clock)


def beside_link(way: Direction, link: Link, clock: ManualClock, during_s: float) -> Figures:
    """Kernels that take `CHAIN_S` alone, and `during_s` when transfers were submitted before."""

    def start_chain() -> Kernels:
        took_s = during_s if link.submitted else CHAIN_S
        return Kernels(clock, took_s, clock() + took_s)

    size = gpu_moves.AHEAD_BYTES // 8
    return beside(DeviceMover(link), way, DECODE, TRANSFER, size, start_chain, clock.advance)


@both_ways
def test_kernels_beside_transfers_that_never_pause(way: Direction) -> None:
    clock = ManualClock()
    link = Link(clock, job_s=0.002, hear_s=1e-6)
    found = beside_link(way, link, clock, during_s=0.125)
    assert found[BESIDE[way, DECODE]] == pytest.approx(0.8)
    rate = gpu_moves.AHEAD_BYTES / 8 / 0.002 / 1e9
    assert found[MEANWHILE[way, DECODE]] == pytest.approx(rate, rel=0.1)
    assert {each for each, _ in link.submitted} == {way}
    assert link.free_at_s <= clock(), "nothing is left to run beside what is measured next"


@both_ways
@pytest.mark.parametrize("job_s", [0.0, 0.0003, 1.0], ids=["ended", "brief", "late"])
def test_kernels_beside_nothing_are_not_measured(way: Direction, job_s: float) -> None:
    """Transfers that have ended when the first kernel starts, or soon after each submission, or
    that do not end before the last kernel does."""
    clock = ManualClock()
    found = beside_link(way, Link(clock, job_s, hear_s=0.001), clock, during_s=CHAIN_S)
    assert found[BESIDE[way, DECODE]] is None


def test_kernels_beside_transfers_that_keep_the_caller() -> None:
    """Submitting takes longer than moving, so there never is a second one under way."""
    clock = ManualClock()
    link = Link(clock, job_s=0.0029, submit_s=(0.003,), hear_s=1e-6)
    found = beside_link(Direction.LOAD, link, clock, during_s=CHAIN_S)
    assert found[BESIDE[Direction.LOAD, DECODE]] == pytest.approx(1.0)


def test_what_ended_before_the_first_kernel_does_not_count() -> None:
    """Eight transfers are submitted slowly; the next one's submission outlasts the kernels."""
    clock = ManualClock()
    link = Link(clock, job_s=0.02, submit_s=(*[0.05] * 8, 0.2), hear_s=1e-6)
    found = beside_link(Direction.STORE, link, clock, during_s=CHAIN_S)
    assert found == {BESIDE[Direction.STORE, DECODE]: None, MEANWHILE[Direction.STORE, DECODE]: 0.0}


@both_ways
@pytest.mark.parametrize("step_s", gpu_moves.PACED_S)
def test_transfers_that_are_seldom_asked_after(way: Direction, step_s: float) -> None:
    """Four of 110 ms each: the last one is heard of at the first call after its end."""
    clock = ManualClock()
    link = Link(clock, job_s=0.11, submit_s=(0.001, 0.004, 0.0), hear_s=0.002)
    chains: list[float] = []

    def start_chain() -> Kernels:
        chains.append(clock())
        return Kernels(clock, CHAIN_S, clock() + CHAIN_S)

    size = gpu_moves.PACED_BYTES // 4
    found = paced(DeviceMover(link), way, TRANSFER, size, step_s, start_chain, clock, clock.advance)
    key = (way, step_s)
    steps = math.ceil((0.001 + 4 * 0.11 - 0.005) / (step_s + 0.002))
    took_s = 0.005 + steps * (step_s + 0.002)
    assert found[PACED[key]] == pytest.approx(4 * size / took_s / 1e9)
    assert found[PACED_SUBMIT[key]] == pytest.approx(4.0)
    assert found[PACED_HEAR[key]] == pytest.approx(2.0)
    assert len(chains) > 1, "kernels run all the time"


class Forgetful(CpuDeviceCopier):
    """Brings back one byte of another value."""

    def wait(self, job_ids: Set[int]) -> None:
        super().wait(job_ids)
        for pages in self._tensors:
            pages[TRANSFER.blocks.block_ids[0], 5] = 1


@pytest.mark.parametrize("copier", [CpuDeviceCopier, Forgetful])
def test_bytes_are_compared(copier: type[CpuDeviceCopier]) -> None:
    geometry = ArenaGeometry(8, SMALL.block_bytes, 1)
    slots = np.zeros((8, geometry.slot_bytes), dtype=np.uint8)
    tensors = [torch.randint(2, 128, (8, 64), dtype=torch.int8) for _ in range(SMALL.layers)]
    pages = [tensor.numpy() for tensor in tensors]
    mover = DeviceMover(copier(pages, SMALL.layout(8, geometry), slots, InlineExecutor()))
    if copier is CpuDeviceCopier:
        check(mover, tensors, TRANSFER)
        assert slots.any(), "they were there"
    else:
        tensors[0][TRANSFER.blocks.block_ids[0], 5] = 7
        with pytest.raises(BenchError, match="other bytes"):
            check(mover, tensors, TRANSFER)


def measure(
    device: MemoryDevice,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    note: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """All rows of small shapes."""
    pages = GpuShape("pages", 2, 128, is_model=False)
    monkeypatch.setattr(gpu, "SHAPES", (SMALL, pages, GpuShape("joined", 1, 4096)))
    monkeypatch.setattr(gpu, "COUNTS", (1, 16, 256))
    monkeypatch.setattr(gpu, "PAGE_COUNTS", (16,))
    monkeypatch.setattr(gpu_moves, "BYTES_PER_TIMING", 1)
    monkeypatch.setattr(gpu, "PACED_S", gpu_moves.PACED_S[:1])
    monkeypatch.setattr(gpu_moves, "PACED_JOBS_MAX", 2)
    monkeypatch.setattr(gc, "collect", lambda: 0)  # no time is taken here that it could disturb
    measurement = replace(gpu.MEASUREMENT, cases=partial(gpu.cases, device=device))
    setup = MeasurementSetup(folder, SMOKE, lambda line: None, note=note)
    return list(run(measurement, setup).rows)


def test_every_row_has_its_contenders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = MemoryDevice(ENDLESS)
    rows = measure(device, tmp_path, monkeypatch)
    assert len(rows) == 2 * (2 + 8 * len(gpu.COUNTS) + 2 * 4 + 6) + ROWS_OF_PAGES
    for row in rows:
        contenders = set(row.samples)
        if row.quantity.name in RATE.values():
            assert contenders == {OURS, VLLM, LIMIT} and len(row.verdicts()) == 1, row
        elif row.quantity.name in BESIDE.values():
            assert not contenders, "the twin's kernels end at once"
        elif row.quantity.name in MEANWHILE.values():
            assert contenders == {OURS, VLLM, LIMIT}, row
        elif row.quantity.name == gpu.BATCHED:
            assert row.samples == {OURS: [0.0]} and row.verdicts(), "it has fallen back"
        else:
            assert contenders == {OURS, VLLM}, row
    pinned = [row.samples for row in rows if row.quantity.name == gpu.PINNED]
    assert pinned == [{OURS: [100.0], VLLM: [0.0]}] * 3
    assert device.released == 3, "memory of a shape goes before the next one's comes"


def not_there(tensors: Sequence[torch.Tensor], slots: int) -> Contender:
    """Fail like the import of an installed vLLM of another version."""
    raise ModuleNotFoundError("No module named 'vllm.v1.kv_offload.cpu.common'")


class Refused(Link):
    """Its calls fail like a driver's: from a submission on, and at the end."""

    def __init__(self, submissions: int) -> None:
        super().__init__(ManualClock())
        self._left = submissions

    def submit(
        self, direction: Direction, job_id: int, blocks: GpuBlocks, slots: SlotArray
    ) -> bool:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("cuMemcpyBatchAsync failed: error 1 at copy 0\nand a trace")
        return super().submit(direction, job_id, blocks, slots)

    def shutdown(self, deadline_s: float = 5.0) -> None:
        raise RuntimeError("error 700")


@pytest.mark.parametrize("submissions", [0, 9], ids=["first", "later"])
def test_a_contender_that_fails_is_a_note(
    submissions: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our rows and the other contender's stay as they are without it."""
    device, notes = MemoryDevice(ENDLESS), list[str]()
    refused = Contender(Refused(submissions), is_pinned=True)
    device.more = {LMCACHE: not_there, PAGES: lambda tensors, slots: refused}
    monkeypatch.setattr(gpu, "check", lambda mover, *_: mover.submit(Direction.STORE, TRANSFER))
    rows = measure(device, tmp_path, monkeypatch, notes.append)
    assert len(rows) == 2 * (2 + 8 * len(gpu.COUNTS) + 2 * 4 + 6) + ROWS_OF_PAGES
    for row in rows:
        if row.quantity.name not in (*BESIDE.values(), gpu.BATCHED):
            assert {OURS, VLLM} <= set(row.samples), row
        assert LMCACHE not in row.samples
    assert any(PAGES in row.samples for row in rows) is bool(submissions)
    failed = [f"{shape.label}: {{}} failed and is left out: {{}}" for shape in gpu.SHAPES]
    reason = "ModuleNotFoundError: No module named 'vllm.v1.kv_offload.cpu.common'"
    assert [line for line in notes if "LMCache" in line] == [
        line.format("LMCache", reason) for line in failed
    ]
    reason = "RuntimeError: cuMemcpyBatchAsync failed: error 1 at copy 0"
    assert failed[0].format("per page", reason) in notes
    assert failed[0].format("per page", "RuntimeError: error 700") in notes


def test_ours_does_not_fail_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = MemoryDevice(ENDLESS)
    monkeypatch.setattr(device, "ours", lambda *_: Contender(Refused(0), is_pinned=True))
    with pytest.raises(RuntimeError):
        measure(device, tmp_path, monkeypatch)


def test_what_does_not_fit_has_rows_without_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = MemoryDevice(replace(ENDLESS, shared=2 * gpu.need(SMALL, 256, 2).shared))
    rows = measure(device, tmp_path, monkeypatch)
    without = [row for row in rows if "not measured" in row.case]
    (case,) = {row.case for row in without}
    assert case.startswith("joined: 256 blocks, not measured: 2.5 MiB of /dev/shm")
    assert [row.quantity.name for row in without] == list(RATE.values())
    assert not any(row.samples or row.verdicts() for row in without)
    assert len(rows) == 2 * (2 + 2 * 4 + 6) + 8 * (3 + 2) + 2 + ROWS_OF_PAGES
    device.said = ("vLLM is not here",)
    notes: list[str] = []
    for _ in gpu.cases(
        MeasurementSetup(tmp_path, SMOKE, lambda line: None, note=notes.append), device
    ):
        pass
    assert notes[0] == "vLLM is not here"
    assert "256 blocks are not measured" in notes[1] and "--shm-size" in notes[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do(tmp_path: Path) -> None:
    setup = MeasurementSetup(tmp_path, SMOKE, lambda line: None)
    with pytest.raises(BenchError, match="make bench-gpu"):
        next(gpu.cases(setup))


@pytest.mark.parametrize(("kernel_ms", "kernels"), [(0.5, 200), (0.01, 800), (50.0, 20)])
def test_kernels_are_as_many_as_take_long_enough(
    kernel_ms: float, kernels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device itself, over a twin of torch.cuda."""
    cuda = FakeCuda(kernel_ms)
    cuda.take_over(monkeypatch)
    device = CudaDevice()
    chain = device.start_chain(DECODE)
    assert not chain.has_ended()
    assert chain.seconds() == pytest.approx(kernels * kernel_ms / 1e3) and chain.has_ended()
    assert device.room().device == FREE_BYTES and device.room().shared > 0
    assert device.pages(4, 64).shape == (4, 64)
    for copy in device.plain_copies(64).values():
        copy()
    device.release()


def test_no_transfer_gets_the_stream_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's worker takes a stream for each transfer in flight, and torch has only so many."""
    cuda = FakeCuda(0.5)
    cuda.take_over(monkeypatch)
    torchs: Any = torch.cuda
    CudaDevice().start_chain(DECODE)
    streams: set[object] = {torchs.Stream() for _ in range(2 * POOL_STREAMS)}
    assert len(streams) == POOL_STREAMS and cuda.current not in streams
