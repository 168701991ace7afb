"""The CUDA copier's bookkeeping on a twin of torch.cuda: what waits for what, what is reported."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.cuda_twin import LOAD, STORE, TwinCuda, TwinEvent, TwinStream, pinned, twin_of_cuda
from support.kv_layouts import (
    NAMED_CASES,
    make_job,
    model_load,
    model_store,
    one_group,
    written_mask,
)

from kvcascade.errors import ConfigError
from kvcascade.handlers.device.batched_copy import SourceOrder
from kvcascade.handlers.device.copier import GpuBlocks
from kvcascade.handlers.device.device_cuda import CudaDeviceCopier
from kvcascade.handlers.device.geometry import GroupRows
from kvcascade.handlers.device.staging import StagedCopier
from kvcascade.handlers.device.stream_feed import Operations, StreamFeed, Work
from kvcascade.tiers.cpu.cpu_backend import collector_paused


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwinCuda]:
    with twin_of_cuda(monkeypatch) as twin:
        yield twin


CASE = one_group(16)


def simple_copier() -> CudaDeviceCopier:
    rng = np.random.default_rng(0)
    tensors = [torch.from_numpy(tensor) for tensor in CASE.tensors(rng)]
    return CudaDeviceCopier(tensors, CASE.layout, CASE.arena(rng), registration=pinned([]))


def blocks_of(*ids: int) -> GpuBlocks:
    return GpuBlocks.of(ids, [len(ids)], [0])


def slots_of(*slots: int) -> np.typing.NDArray[np.int32]:
    return np.array(slots, dtype=np.int32)


@pytest.mark.parametrize("name", NAMED_CASES)
def test_bytes_arrive_both_ways(name: str, cuda: TwinCuda) -> None:
    case, rng = NAMED_CASES[name], np.random.default_rng(3)
    tensors, arena = case.tensors(rng), case.arena(rng)
    want, model = [tensor.copy() for tensor in tensors], arena.copy()
    addresses: list[int] = []
    copier = CudaDeviceCopier(
        [torch.from_numpy(tensor) for tensor in tensors],
        case.layout,
        arena,
        registration=pinned(addresses),
    )
    assert addresses == [arena.ctypes.data]
    store, load = make_job(case, rng), make_job(case, rng)
    assert copier.submit_store(1, store.blocks, store.slots)
    copier.wait({1})
    model_store(case, store, want, model)
    mask = written_mask(case, store)
    assert (arena[mask] == model[mask]).all()
    model_load(case, load, want, arena)
    assert copier.submit_load(2, load.blocks, load.slots)
    copier.wait({2})
    assert all((a == b).all() for a, b in zip(tensors, want, strict=True))
    results = {result.job_id: result for result in copier.get_finished()}
    assert results[1].size_bytes == int(mask.sum())
    assert all(result.success and result.time_s == 0.25 for result in results.values())
    copier.shutdown()
    copier.shutdown()
    assert addresses == []


def test_every_job_waits_for_the_compute_stream_and_never_the_other_way(cuda: TwinCuda) -> None:
    copier = simple_copier()
    for stream in cuda.streams:
        assert stream.log[0] is cuda.compute, "the buffers were made there"
        assert stream.outstanding == 0
    for kernels in (cuda.streams[0], cuda.streams[2]):
        assert torch.ops.aten.index_put_.default in kernels.log, "tried"
    for stream in cuda.streams:
        stream.log.clear()
    copier.submit_store(1, blocks_of(0), slots_of(0))
    copier.submit_load(2, blocks_of(1), slots_of(1))
    assert copier.get_finished() == []
    for direction, ready in zip((STORE, LOAD), cuda.compute.log, strict=True):
        for stream in cuda.streams[2 * direction : 2 * direction + 2]:
            assert stream.log[0] == ("after", ready)
        stream = cuda.last(direction)
        start, copy, end, mark = stream.log[1:]
        assert [type(each) for each in (start, end, mark)] == [TwinEvent] * 3
        assert copy is torch.ops.aten.copy_.default


def test_a_job_comes_after_what_the_compute_stream_was_given_before_it_and_no_more(
    cuda: TwinCuda,
) -> None:
    case, rng = CASE, np.random.default_rng(0)
    pages, arena = torch.from_numpy(case.tensors(rng)[0]), case.arena(rng)
    copier = CudaDeviceCopier([pages], case.layout, arena, registration=pinned([]))
    later: list[str] = []
    cuda.compute.enqueue("the model writes", lambda: pages[3].fill_(42))
    copier.submit_store(1, blocks_of(3), slots_of(5))
    cuda.compute.enqueue("the model goes on", lambda: later.append("done"))
    copier.wait({1})
    assert (arena[5, :16] == 42).all() and later == []


def test_a_store_is_launched_after_the_forward_or_before_one_that_may_overwrite_its_blocks(
    cuda: TwinCuda,
) -> None:
    """The engine submits stores, waits for those whose blocks it hands out again, launches the
    forward pass, and asks what ended."""
    case, rng = CASE, np.random.default_rng(0)
    pages, arena = torch.from_numpy(case.tensors(rng)[0]), case.arena(rng)
    want = pages.clone().numpy().view(np.uint8)
    copier = CudaDeviceCopier([pages], case.layout, arena, registration=pinned([]))
    before = [stream.given for stream in cuda.streams]
    for job_id in (0, 1):
        copier.submit_store(job_id, blocks_of(job_id), slots_of(job_id))
    assert [stream.given for stream in cuda.streams] == before, "no launch delays the forward"
    copier.wait({1})
    for job_id in (2, 3):
        copier.submit_store(job_id, blocks_of(job_id), slots_of(job_id))
    cuda.compute.enqueue("the forward overwrites", lambda: pages[:2].fill_(42))
    cuda.compute.run()
    launched = len(cuda.ends(STORE))
    assert [result.job_id for result in copier.get_finished()] == [0, 1]
    assert (launched, len(cuda.ends(STORE))) == (2, 4)
    copier.wait({2, 3})
    assert (arena[:4, :16] == want[:4]).all()


@pytest.mark.parametrize("direction", [STORE, LOAD], ids=["store", "load"])
def test_no_launch_delays_the_forward(direction: int, cuda: TwinCuda) -> None:
    """Some versions of vLLM submit loads before the pass, too."""
    copier = simple_copier()
    before = [stream.given for stream in cuda.streams]
    submit = copier.submit_store if direction == STORE else copier.submit_load
    assert submit(1, blocks_of(1), slots_of(1))
    assert [stream.given for stream in cuda.streams] == before
    assert copier.get_finished() == [] and len(cuda.ends(direction)) == 1


@pytest.mark.parametrize(("block", "slot"), [(0, 5), (5, 0)])
def test_a_job_waits_for_one_of_the_other_direction_that_shares_memory(
    block: int, slot: int, cuda: TwinCuda
) -> None:
    copier = simple_copier()
    copier.submit_store(1, blocks_of(9), slots_of(9))
    copier.submit_store(2, blocks_of(0), slots_of(0))
    copier.submit_store(3, blocks_of(8), slots_of(8))
    copier.submit_load(4, blocks_of(block), slots_of(slot))
    assert copier.get_finished() == []
    assert ("after", cuda.ends(STORE)[1]) in cuda.last(LOAD).log


def test_finished_jobs_are_reported_once_and_in_order(cuda: TwinCuda) -> None:
    copier = simple_copier()
    for job_id in (1, 2, 3):
        copier.submit_store(job_id, blocks_of(job_id), slots_of(job_id))
    assert copier.get_finished() == []
    cuda.ends(STORE)[1].finish()
    assert [result.job_id for result in copier.get_finished()] == [1, 2]
    copier.wait({99})
    assert copier.get_finished() == []
    copier.wait({3})
    assert [result.job_id for result in copier.get_finished()] == [3]


def test_a_lost_device_is_a_failed_job_not_an_exception(cuda: TwinCuda) -> None:
    copier = simple_copier()
    copier.submit_load(1, blocks_of(1), slots_of(1))
    assert copier.get_finished() == []
    cuda.ends(LOAD)[0].is_lost = True
    (result,) = copier.get_finished()
    assert (result.job_id, result.success) == (1, False)


def test_a_copy_that_cannot_be_enqueued_is_a_failed_job(
    cuda: TwinCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: StagedCopier, *given: object) -> Work:
        yield Operations(1, 0)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(StagedCopier, "store", fail)
    copier = simple_copier()
    assert copier.submit_store(1, blocks_of(1), slots_of(1))
    copier.wait({1})
    (result,) = copier.get_finished()
    assert not result.success and "copying job 1 failed" in caplog.text


def test_a_job_that_an_interrupt_cuts_off_fails_when_its_copies_have_ended(
    cuda: TwinCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, jobs = StagedCopier.store, iter([False, True])

    def interrupted(self: StagedCopier, rows: list[GroupRows], order: SourceOrder) -> Work:
        yield from original(self, rows, order)
        if next(jobs):
            raise KeyboardInterrupt

    monkeypatch.setattr(StagedCopier, "store", interrupted)
    copier = simple_copier()
    for job in (1, 2):
        assert copier.submit_store(job, blocks_of(job), slots_of(job))
    with pytest.raises(KeyboardInterrupt):
        copier.get_finished()
    assert copier.get_finished() == [], "their slots are not free before"
    copier.wait({1, 2})
    assert [each.success for each in copier.get_finished()] == [True, False]


def test_a_job_whose_end_an_interrupt_cuts_off_is_a_failed_job(
    cuda: TwinCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[TwinEvent] = []

    class Event(TwinEvent):
        def __init__(self, enable_timing: bool = False) -> None:
            super().__init__(enable_timing)
            made.extend([self] * enable_timing)

        def record(self, stream: TwinStream | None = None) -> None:
            if self in made[1:]:  # the end of the job
                raise KeyboardInterrupt
            super().record(stream)

    copier = simple_copier()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert copier.submit_store(1, blocks_of(1), slots_of(1))
    with pytest.raises(KeyboardInterrupt):
        copier.wait({1})
    copier.wait({1})
    assert [each.success for each in copier.get_finished()] == [False]


def test_nobody_waits_for_a_job_that_an_interrupt_kept_out(
    cuda: TwinCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(feed: StreamFeed, work: Work) -> None:
        raise KeyboardInterrupt

    copier = simple_copier()
    with monkeypatch.context() as patch:
        patch.setattr(StreamFeed, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            copier.submit_store(1, blocks_of(1), slots_of(1))
    assert copier.submit_store(2, blocks_of(2), slots_of(2))
    copier.wait({1, 2})
    assert [each.job_id for each in copier.get_finished()] == [2]


@pytest.mark.parametrize("refused", ["wait_event", "enqueue"])
def test_a_job_whose_events_were_never_recorded_is_a_failed_job(
    refused: str, cuda: TwinCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch raises `ValueError` where the time between such events is asked for."""

    def fail(*given: object) -> None:
        raise RuntimeError("CUDA error: the device is lost")

    copier = simple_copier()
    monkeypatch.setattr(cuda.last(STORE), refused, fail)
    assert copier.submit_store(1, blocks_of(1), slots_of(1))
    copier.wait({1})
    (result,) = copier.get_finished()
    assert (result.job_id, result.success) == (1, False)


def test_a_job_that_the_compute_stream_does_not_order_copies_nothing(
    cuda: TwinCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Waiting for an event that was never recorded is waiting for nothing."""
    copier = simple_copier()
    before = [stream.given for stream in cuda.streams]

    def lost(what: object, operation: object) -> None:
        raise RuntimeError("CUDA error: the device is lost")

    with monkeypatch.context() as patch:
        patch.setattr(cuda.compute, "enqueue", lost)
        assert copier.submit_store(1, blocks_of(1), slots_of(1))
    copier.wait({1})
    (result,) = copier.get_finished()
    assert (result.job_id, result.success) == (1, False)
    assert "submitting job 1 failed" in caplog.text
    given = [stream.given - was for stream, was in zip(cuda.streams, before, strict=True)]
    assert sum(given) <= 3, "an end, and a mark"


def test_an_arena_is_let_go_whatever_goes_wrong(
    cuda: TwinCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: StagedCopier) -> None:
        raise ValueError("an error of our own")

    monkeypatch.setattr(StagedCopier, "warm_up", fail)
    rng, addresses = np.random.default_rng(0), list[int]()
    tensors = [torch.from_numpy(tensor) for tensor in CASE.tensors(rng)]
    with pytest.raises(ValueError, match="our own"):
        CudaDeviceCopier(tensors, CASE.layout, CASE.arena(rng), registration=pinned(addresses))
    assert addresses == []


def test_a_gpu_that_cannot_copy_is_one_sentence_before_anything_is_pinned(
    cuda: TwinCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: StagedCopier) -> None:
        raise RuntimeError("CUDA error: out of memory\nCompile with a flag for more.")

    monkeypatch.setattr(StagedCopier, "warm_up", fail)
    rng = np.random.default_rng(0)
    tensors = [torch.from_numpy(tensor) for tensor in CASE.tensors(rng)]
    addresses: list[int] = []
    with pytest.raises(ConfigError, match=r"out of memory\); if .* gpu_memory_utilization$"):
        CudaDeviceCopier(tensors, CASE.layout, CASE.arena(rng), registration=pinned(addresses))
    assert addresses == []


def test_nothing_is_taken_after_shutdown(cuda: TwinCuda) -> None:
    copier = simple_copier()
    copier.submit_store(1, blocks_of(1), slots_of(1))
    assert copier.get_finished() == []
    copier.shutdown()
    assert cuda.ends(STORE)[0].query()
    assert not copier.submit_store(2, blocks_of(1), slots_of(1))


def test_who_drops_a_shut_copier_frees_the_arena_at_once(cuda: TwinCuda) -> None:
    """The next arena may come before the collector does."""
    rng = np.random.default_rng(0)
    tensors, arena = [torch.from_numpy(tensor) for tensor in CASE.tensors(rng)], CASE.arena(rng)
    memory = weakref.ref(arena)
    with collector_paused():
        copier = CudaDeviceCopier(tensors, CASE.layout, arena, registration=pinned([]))
        copier.submit_store(1, blocks_of(1), slots_of(1))
        copier.get_finished()
        copier.submit_load(2, blocks_of(2), slots_of(2))  # is given to no stream
        copier.shutdown()
        assert copier.get_finished() == []
        del copier, arena
        assert memory() is None


def test_tensors_and_layout_must_agree(cuda: TwinCuda) -> None:
    rng = np.random.default_rng(0)
    arena = CASE.arena(rng)
    other = [torch.from_numpy(tensor) for tensor in one_group(8).tensors(rng)]
    with pytest.raises(ConfigError, match="differ"):
        CudaDeviceCopier(other, CASE.layout, arena)
    floats = [torch.zeros(24, 16, dtype=torch.float32)]
    with pytest.raises(ConfigError, match="int8"):
        CudaDeviceCopier(floats, CASE.layout, arena)
    right = [torch.from_numpy(tensor) for tensor in CASE.tensors(rng)]
    with pytest.raises(ConfigError, match="arena"):
        CudaDeviceCopier(right, CASE.layout, arena[:3])
