"""The CUDA copier's bookkeeping on a twin of torch.cuda: what waits for what, what is reported.

The twin's streams run at once on CPU tensors; its events end when the test says so.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest
import torch
from support.kv_layouts import (
    NAMED_CASES,
    make_job,
    model_load,
    model_store,
    one_group,
    written_mask,
)

from kvcascade.errors import ConfigError
from kvcascade.handlers.device import GpuBlocks
from kvcascade.handlers.device_cuda import CudaDeviceCopier
from kvcascade.handlers.host_register import HostRegistration


class FakeEvent:
    """An event that has ended once the test, or a wait, says so."""

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing, "elapsed time is asked for"
        self.has_ended = False
        self.is_lost = False

    def record(self, stream: FakeStream) -> None:
        stream.log.append(self)

    def query(self) -> bool:
        if self.is_lost:
            raise RuntimeError("CUDA error: the device is lost")
        return self.has_ended

    def synchronize(self) -> None:
        self.has_ended = True

    def elapsed_time(self, end: FakeEvent) -> float:
        if end.is_lost:
            raise RuntimeError("CUDA error: the device is lost")
        return 250.0


class FakeStream:
    """A stream that remembers what it was told."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.log: list[object] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(other)

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append(("after", event))


class FakeCuda:
    """The part of torch.cuda that is used."""

    def __init__(self) -> None:
        self.compute = FakeStream()
        self.streams: list[FakeStream] = []

    def make_stream(self, device: torch.device) -> FakeStream:
        self.streams.append(FakeStream(device))
        return self.streams[-1]

    def stream(self, stream: FakeStream) -> AbstractContextManager[None]:
        return nullcontext()

    def device(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()

    def ends(self, direction: int) -> list[FakeEvent]:
        """End events of a direction's jobs, in order."""
        return [entry for entry in self.streams[direction].log if isinstance(entry, FakeEvent)][
            1::2
        ]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "Stream", fake.make_stream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: fake.compute)
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    monkeypatch.setattr(torch.cuda, "device", fake.device)
    return fake


CASE = one_group(16)
STORE, LOAD = 0, 1


def pinned(addresses: list[int]) -> HostRegistration:
    return HostRegistration(lambda address, length: addresses.append(address), addresses.remove)


def simple_copier() -> CudaDeviceCopier:
    rng = np.random.default_rng(0)
    tensors = [torch.from_numpy(tensor) for tensor in CASE.tensors(rng)]
    return CudaDeviceCopier(tensors, CASE.layout, CASE.arena(rng), registration=pinned([]))


def blocks_of(*ids: int) -> GpuBlocks:
    return GpuBlocks.of(ids, [len(ids)], [0])


def slots_of(*slots: int) -> np.typing.NDArray[np.int32]:
    return np.array(slots, dtype=np.int32)


@pytest.mark.parametrize("name", NAMED_CASES)
def test_bytes_arrive_both_ways(name: str, cuda: FakeCuda) -> None:
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
    model_store(case, store, want, model)
    mask = written_mask(case, store)
    assert (arena[mask] == model[mask]).all()
    model_load(case, load, want, arena)
    assert copier.submit_load(2, load.blocks, load.slots)
    assert all((a == b).all() for a, b in zip(tensors, want, strict=True))
    copier.wait({1, 2})
    results = {result.job_id: result for result in copier.get_finished()}
    assert results[1].size_bytes == int(mask.sum())
    assert all(result.success and result.time_s == 0.25 for result in results.values())
    copier.shutdown()
    copier.shutdown()
    assert addresses == []


def test_every_job_waits_for_the_compute_stream_and_never_the_other_way(cuda: FakeCuda) -> None:
    copier = simple_copier()
    copier.submit_store(1, blocks_of(0), slots_of(0))
    copier.submit_load(2, blocks_of(1), slots_of(1))
    for stream in cuda.streams:
        assert stream.log[0] is cuda.compute, "the buffers were made there"
        assert stream.log[1] is cuda.compute
        assert [type(entry) for entry in stream.log[2:]] == [FakeEvent, FakeEvent]
    assert cuda.compute.log == []


@pytest.mark.parametrize(("block", "slot"), [(0, 5), (5, 0)])
def test_a_job_waits_for_one_of_the_other_direction_that_shares_memory(
    block: int, slot: int, cuda: FakeCuda
) -> None:
    copier = simple_copier()
    copier.submit_store(1, blocks_of(9), slots_of(9))
    copier.submit_store(2, blocks_of(0), slots_of(0))
    copier.submit_store(3, blocks_of(8), slots_of(8))
    copier.submit_load(4, blocks_of(block), slots_of(slot))
    assert ("after", cuda.ends(STORE)[1]) in cuda.streams[LOAD].log


def test_finished_jobs_are_reported_once_and_in_order(cuda: FakeCuda) -> None:
    copier = simple_copier()
    for job_id in (1, 2, 3):
        copier.submit_store(job_id, blocks_of(job_id), slots_of(job_id))
    assert copier.get_finished() == []
    cuda.ends(STORE)[1].has_ended = True
    assert copier.get_finished() == [], "the first has not ended"
    cuda.ends(STORE)[0].has_ended = True
    assert [result.job_id for result in copier.get_finished()] == [1, 2]
    copier.wait({99})
    assert copier.get_finished() == []
    copier.wait({3})
    assert [result.job_id for result in copier.get_finished()] == [3]


def test_a_lost_device_is_a_failed_job_not_an_exception(cuda: FakeCuda) -> None:
    copier = simple_copier()
    copier.submit_load(1, blocks_of(1), slots_of(1))
    cuda.ends(LOAD)[0].is_lost = True
    (result,) = copier.get_finished()
    assert (result.job_id, result.success) == (1, False)


def test_a_copy_that_cannot_be_enqueued_is_a_failed_job(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kvcascade.handlers.staging import StagedCopier

    def fail(self: StagedCopier, rows: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(StagedCopier, "store", fail)
    copier = simple_copier()
    assert copier.submit_store(1, blocks_of(1), slots_of(1))
    copier.wait({1})
    (result,) = copier.get_finished()
    assert not result.success and "copying job 1 failed" in caplog.text


def test_nothing_is_taken_after_shutdown(cuda: FakeCuda) -> None:
    copier = simple_copier()
    copier.submit_store(1, blocks_of(1), slots_of(1))
    copier.shutdown()
    assert cuda.ends(STORE)[0].has_ended
    assert not copier.submit_store(2, blocks_of(1), slots_of(1))


def test_tensors_and_layout_must_agree(cuda: FakeCuda) -> None:
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
