"""Jobs of more operations than a GPU stream's queue holds, on a twin that refuses to block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.cuda_twin import LOAD, QUEUE_MAX, STORE, TwinCuda, batch, pinned, twin_of_cuda
from support.kv_layouts import (
    Job,
    in_one_allocation,
    model_load,
    model_store,
    one_group,
    written_mask,
)

from kvcascade.handlers.device.batched_copy import Addresses, SourceOrder
from kvcascade.handlers.device.copier import GpuBlocks
from kvcascade.handlers.device.device_cuda import CudaDeviceCopier
from kvcascade.handlers.device.host_register import HostRegistration
from kvcascade.handlers.device.number_uploads import HOST_BUFFERS, UPLOAD_OPERATIONS
from kvcascade.handlers.device.staging import STEP_OPERATIONS, StagedCopier
from kvcascade.handlers.device.stream_feed import OUTSTANDING_MAX, TURN_OPERATIONS, Work

LAYERS = 32
BLOCKS = 512
CASE = one_group(*[128] * LAYERS, num_blocks=BLOCKS, slots=BLOCKS)
STAGED_SLOTS = 4
OPERATIONS = BLOCKS // STAGED_SLOTS * (LAYERS + STAGED_SLOTS)
"""Of a job of all blocks in scattered slots, and a few more."""
ROUNDS_MAX = 10_000
MOST = OUTSTANDING_MAX + STEP_OPERATIONS + UPLOAD_OPERATIONS
"""Operations outstanding on a stream: the last step of a turn may be as much beyond."""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwinCuda]:
    assert OPERATIONS > 2 * QUEUE_MAX
    with twin_of_cuda(monkeypatch) as twin:
        yield twin


class Worker:
    """A copier, and a slow model of what its jobs should do."""

    def __init__(
        self, *, may_hold_back: bool = True, is_batched: bool = False, seed: int = 0
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.tensors, self.arena = CASE.tensors(self.rng), CASE.arena(self.rng)
        self.want = [tensor.copy() for tensor in self.tensors]
        self.want_arena = self.arena.copy()
        self.pinned: list[int] = []
        self.copier = CudaDeviceCopier(
            [torch.from_numpy(tensor) for tensor in self.tensors],
            CASE.layout,
            self.arena,
            registration=pinned(self.pinned),
            find_batch=lambda: batch if is_batched else None,
            staging_bytes=2 * STAGED_SLOTS * CASE.geometry.slot_bytes,
            may_hold_back=may_hold_back,
        )
        self.results: list[tuple[int, bool]] = []

    def job(self, count: int = BLOCKS) -> Job:
        """So many blocks and slots, scattered."""
        ids = self.rng.permutation(BLOCKS)[:count]
        slots = self.rng.permutation(BLOCKS)[:count].astype(np.int32)
        return Job(GpuBlocks.of(ids.tolist(), [count], [0]), slots)

    def submit(self, direction: int, job_id: int, job: Job) -> None:
        """To the copier and to the model."""
        if direction == STORE:
            assert self.copier.submit_store(job_id, job.blocks, job.slots)
            model_store(CASE, job, self.want, self.want_arena)
        else:
            assert self.copier.submit_load(job_id, job.blocks, job.slots)
            model_load(CASE, job, self.want, self.want_arena)

    def step(self) -> None:
        """What an engine does in every step."""
        self.results += [(each.job_id, each.success) for each in self.copier.get_finished()]

    def is_right(self) -> bool:
        return (self.arena == self.want_arena).all() and all(
            (a == b).all() for a, b in zip(self.tensors, self.want, strict=True)
        )


@pytest.mark.parametrize("direction", [STORE, LOAD], ids=["store", "load"])
def test_a_large_job_never_makes_the_thread_wait(direction: int, cuda: TwinCuda) -> None:
    worker = Worker()
    stream, pair = cuda.last(direction), cuda.streams[2 * direction : 2 * direction + 2]
    given_before = sum(each.given for each in pair)
    worker.submit(direction, 7, worker.job())
    worker.step()
    outstanding = max(each.outstanding for each in pair)
    assert OUTSTANDING_MAX - TURN_OPERATIONS < outstanding <= MOST, "it has begun"
    for _ in range(ROUNDS_MAX):
        worker.step()
        if worker.results:
            break
        stream.run(100)
    assert worker.results == [(7, True)] and worker.is_right()
    assert all(each.most_outstanding <= MOST for each in pair)
    assert not any(each.waits for each in pair)
    assert sum(each.given for each in pair) - given_before > OPERATIONS


def test_jobs_end_in_their_order_and_nothing_is_reported_early(cuda: TwinCuda) -> None:
    worker = Worker()
    stream = cuda.last(LOAD)
    for job_id, count in enumerate((BLOCKS, 1, BLOCKS, 5)):
        worker.submit(LOAD, job_id, worker.job(count))
    for _ in range(ROUNDS_MAX):
        worker.step()
        assert len(worker.results) == sum(end.query() for end in cuda.ends(LOAD))
        if len(worker.results) == 4:
            break
        stream.run(50)
    assert worker.results == [(job_id, True) for job_id in range(4)] and worker.is_right()


def test_waiting_brings_a_job_to_its_end(cuda: TwinCuda) -> None:
    worker = Worker()
    worker.submit(STORE, 1, worker.job())
    worker.submit(STORE, 2, worker.job(300))
    worker.submit(STORE, 3, worker.job())
    worker.copier.wait({2, 99})
    worker.step()
    assert worker.results == [(1, True), (2, True)]
    assert cuda.last(STORE).most_outstanding <= MOST
    worker.copier.wait({3})
    worker.step()
    assert worker.results[2:] == [(3, True)] and worker.is_right()


def test_a_job_comes_after_one_of_the_other_direction_that_is_still_held_back(
    cuda: TwinCuda,
) -> None:
    """The second reads the slots that the first writes, and the third the pages of the second."""
    worker = Worker()
    first, away = worker.job(), worker.rng.permutation(BLOCKS).tolist()
    worker.submit(STORE, 1, first)
    worker.submit(LOAD, 2, Job(GpuBlocks.of(away, [BLOCKS], [0]), first.slots))
    worker.submit(STORE, 3, worker.job(40))
    worker.copier.wait({3})
    worker.copier.wait({1, 2})
    worker.step()
    assert sorted(worker.results) == [(1, True), (2, True), (3, True)] and worker.is_right()


def test_every_part_comes_after_what_the_model_was_doing(cuda: TwinCuda) -> None:
    worker = Worker()
    pages = [torch.from_numpy(tensor) for tensor in worker.tensors]
    cuda.compute.enqueue("the model writes", lambda: [page.fill_(42) for page in pages])
    job = worker.job()
    assert worker.copier.submit_store(1, job.blocks, job.slots)
    worker.copier.wait({1})
    assert (worker.arena[written_mask(CASE, job)] == 42).all()


def test_an_error_in_a_late_part_fails_its_job_alone(
    cuda: TwinCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load, jobs = StagedCopier.load, iter((True, False))

    def fail_late(self: StagedCopier, rows: Any, order: Any) -> Work:
        is_first = next(jobs)
        for at, operations in enumerate(load(self, rows, order)):
            if is_first and at * STEP_OPERATIONS > QUEUE_MAX:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            yield operations

    monkeypatch.setattr(StagedCopier, "load", fail_late)
    worker = Worker()
    worker.submit(LOAD, 1, worker.job())
    worker.submit(LOAD, 2, worker.job(20))
    worker.copier.wait({1, 2})
    worker.step()
    assert worker.results == [(1, False), (2, True)]
    assert "copying job 1 failed" in caplog.text


def test_a_shutdown_ends_what_was_begun_and_drops_the_rest(cuda: TwinCuda) -> None:
    worker = Worker()
    worker.submit(STORE, 1, worker.job())
    worker.submit(LOAD, 2, worker.job())
    given = [stream.given for stream in cuda.streams]
    worker.copier.shutdown()
    assert {stream.outstanding for stream in cuda.streams} == {0}
    assert worker.pinned == [], "the arena may be unmapped now"
    worker.copier.wait({1, 2})
    assert worker.copier.get_finished() == []
    assert [stream.given for stream in cuda.streams] == given


def test_stores_of_an_engine_that_stops_asking_are_handed_out_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with twin_of_cuda(monkeypatch, queue_max=None) as cuda:
        worker = Worker(may_hold_back=False)
        worker.submit(STORE, 0, worker.job())
        first = worker.want_arena.copy()
        later = range(1, HOST_BUFFERS)
        for job_id in later:
            worker.submit(STORE, job_id, worker.job(STAGED_SLOTS))
        worker.submit(STORE, HOST_BUFFERS, worker.job(STAGED_SLOTS))  # into the first one's buffer
        cuda.ends(STORE)[0].finish()
        assert (worker.arena == first).all()
        cuda.last(STORE).run()
        assert worker.is_right()
        load = HOST_BUFFERS + 1
        worker.submit(LOAD, load, worker.job())
        assert cuda.last(LOAD).outstanding <= MOST
        worker.copier.wait({load})
        worker.step()
        assert worker.results == [(job_id, True) for job_id in range(load + 1)]
        assert worker.is_right()


def test_a_batched_piece_is_few_operations_however_the_slots_lie(cuda: TwinCuda) -> None:
    worker = Worker(is_batched=True)
    before = sum(stream.given for stream in cuda.streams)
    worker.submit(STORE, 1, worker.job(8 * STAGED_SLOTS))
    worker.step()
    of_a_piece = LAYERS + 1 + 4
    of_the_job = 2 + 2 + UPLOAD_OPERATIONS  # waits, start and end
    marks = 2 * -(-8 * (LAYERS + 2) // TURN_OPERATIONS)
    given = sum(stream.given for stream in cuda.streams) - before
    assert abs(given - 8 * of_a_piece - of_the_job - marks) <= 2
    worker.copier.wait({1})
    worker.step()
    assert worker.results == [(1, True)] and worker.is_right()


@pytest.mark.parametrize("direction", [STORE, LOAD], ids=["store", "load"])
def test_a_fast_job_of_any_usual_size_needs_no_later_call(direction: int, cuda: TwinCuda) -> None:
    """4,096 blocks of 32 layers in one allocation, 16 of them in a piece, as of 64 KiB a page."""
    count, of_a_piece = 4096, 16
    case = one_group(*[128] * LAYERS, num_blocks=count, slots=count)
    rng = np.random.default_rng(0)
    tensors, arena = in_one_allocation(case.tensors(rng)), case.arena(rng)
    copier = CudaDeviceCopier(
        tensors,
        case.layout,
        arena,
        registration=pinned([]),
        find_batch=lambda: batch,
        staging_bytes=2 * of_a_piece * case.geometry.slot_bytes,
    )
    slots, ids = rng.permutation(count).astype(np.int32), rng.permutation(count)
    job = Job(GpuBlocks.of(ids.tolist(), [count], [0]), slots)
    want, want_arena = [tensor.numpy().copy() for tensor in tensors], arena.copy()
    before = [stream.given for stream in cuda.streams]
    if direction == STORE:
        copier.submit_store(1, job.blocks, job.slots)
        model_store(case, job, want, want_arena)
    else:
        copier.submit_load(1, job.blocks, job.slots)
        model_load(case, job, want, want_arena)
    assert copier.get_finished() == []
    given = [stream.given - was for stream, was in zip(cuda.streams, before, strict=True)]
    pieces = count // of_a_piece
    assert max(given) < OUTSTANDING_MAX and sum(given) < 6 * pieces + 64, given
    cuda.last(direction).run()
    assert all((a.numpy() == b).all() for a, b in zip(tensors, want, strict=True))
    assert (arena == want_arena).all()
    (result,) = copier.get_finished()
    assert result.success


def test_a_load_reads_no_slot_before_an_earlier_store_has_written_it(cuda: TwinCuda) -> None:
    """A driver that may read pinned memory in any order may read it before the load's turn."""
    worker = Worker(is_batched=True)
    first, away = worker.job(40), worker.rng.permutation(BLOCKS)[:40].tolist()
    worker.submit(STORE, 1, first)
    worker.submit(LOAD, 2, Job(GpuBlocks.of(away, [40], [0]), first.slots))
    worker.copier.wait({1, 2})
    worker.step()
    assert worker.results == [(1, True), (2, True)] and worker.is_right()


@pytest.mark.parametrize("is_behind", [False, True], ids=["alone", "behind_a_store"])
def test_pinned_memory_is_read_in_any_order_unless_a_store_writes_it(
    is_behind: bool, cuda: TwinCuda
) -> None:
    orders: list[SourceOrder] = []
    tensors = [torch.from_numpy(tensor) for tensor in CASE.tensors(np.random.default_rng(0))]
    arena = CASE.arena(np.random.default_rng(0))

    def note(targets: Addresses, sources: Addresses, sizes: Addresses, order: SourceOrder) -> None:
        orders.append(order)

    copier = CudaDeviceCopier(
        tensors, CASE.layout, arena, registration=pinned([]), find_batch=lambda: note
    )
    orders.clear()  # each direction has tried a copy
    ids, slots = GpuBlocks.of([1], [1], [0]), np.array([2], dtype=np.int32)
    if is_behind:
        copier.submit_store(1, GpuBlocks.of([3], [1], [0]), slots)
    copier.submit_load(2, ids, slots)
    copier.wait({1, 2})
    assert orders == ([SourceOrder.STREAM] * 2 if is_behind else [SourceOrder.ANY])


def test_the_next_piece_is_gathered_while_one_crosses(cuda: TwinCuda) -> None:
    worker = Worker()
    kernels, copies = cuda.streams[:2]
    worker.submit(STORE, 1, worker.job(2 * STAGED_SLOTS))
    worker.step()
    waiting = copies.outstanding
    kernels.run()
    assert kernels.outstanding == 0 and copies.outstanding == waiting
    worker.submit(STORE, 2, worker.job(STAGED_SLOTS))
    worker.step()
    kernels.run()
    assert copies.outstanding > 0, "the first piece's copies alone made room for the third"
    worker.copier.wait({2})
    worker.step()
    assert worker.results == [(1, True), (2, True)] and worker.is_right()


def test_an_arena_that_is_not_pinned_is_copied_one_by_one(cuda: TwinCuda) -> None:
    refused = HostRegistration(lambda address, length: "the test", lambda address: None)
    tensors = [torch.from_numpy(tensor) for tensor in CASE.tensors(np.random.default_rng(0))]
    arena = CASE.arena(np.random.default_rng(0))
    asked: list[None] = []
    copier = CudaDeviceCopier(
        tensors, CASE.layout, arena, registration=refused, find_batch=lambda: asked.append(None)
    )
    assert not asked and not copier.is_batched
    copier.shutdown()


@pytest.mark.parametrize("taken", [0, 2], ids=["at_start", "later"])
def test_a_copier_says_whether_the_driver_takes_its_batches(taken: int, cuda: TwinCuda) -> None:
    calls: list[object] = []

    def refuse(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) > taken:
            raise RuntimeError("error 801 at copy 0")

    tensors = [torch.from_numpy(tensor) for tensor in CASE.tensors(np.random.default_rng(0))]
    arena = CASE.arena(np.random.default_rng(0))
    copier = CudaDeviceCopier(
        tensors, CASE.layout, arena, registration=pinned([]), find_batch=lambda: refuse
    )
    assert copier.is_batched == bool(taken)
    copier.submit_store(1, GpuBlocks.of([1], [1], [0]), np.array([2], dtype=np.int32))
    copier.wait({1})
    assert not copier.is_batched


@pytest.mark.parametrize("is_batched", [False, True], ids=["one_by_one", "batched"])
@pytest.mark.parametrize("seed", range(6))
def test_any_jobs_in_any_order(seed: int, is_batched: bool, cuda: TwinCuda) -> None:
    worker = Worker(seed=seed, is_batched=is_batched)
    chance = np.random.default_rng(seed)
    for job_id in range(12):
        direction = int(chance.integers(2))
        worker.submit(direction, job_id, worker.job(int(chance.choice([1, 2, 3, 50, 250]))))
        for stream in cuda.streams:
            stream.run(int(chance.integers(0, 400)))
        worker.step()
        if chance.random() < 0.2:
            worker.copier.wait({int(chance.integers(job_id + 1))})
    worker.copier.wait(set(range(12)))
    worker.step()
    assert sorted(worker.results) == [(job_id, True) for job_id in range(12)]
    assert worker.is_right()
    assert max(stream.most_outstanding for stream in cuda.streams) <= MOST
