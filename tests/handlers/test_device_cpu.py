"""The CPU platform's copier: bytes, order, waiting, shutting down."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from threading import Event, Thread
from typing import ParamSpec, TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.drawn_layouts import cases
from support.kv_layouts import (
    NAMED_CASES,
    Case,
    make_job,
    model_load,
    model_store,
    one_group,
)

from kvcascade.errors import ConfigError
from kvcascade.handlers.device import memcopy
from kvcascade.handlers.device.copier import Direction, GpuBlocks
from kvcascade.handlers.device.device_cpu import JOBS_AT_ONCE, CpuDeviceCopier
from kvcascade.handlers.device.switch_interval import SHORT_S, SwitchInterval

P = ParamSpec("P")
T = TypeVar("T")


class ManualExecutor(Executor):
    """Runs tasks when the test says so."""

    def __init__(self) -> None:
        self.tasks: list[Callable[[], object]] = []

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        self.tasks.append(lambda: fn(*args, **kwargs))
        return Future()

    def run_next(self) -> None:
        self.tasks.pop(0)()

    def run_all(self) -> None:
        while self.tasks:
            self.run_next()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


def round_trip(case: Case, seed: int, executor: Executor) -> None:
    rng = np.random.default_rng(seed)
    tensors, arena = case.tensors(rng), case.arena(rng)
    want_tensors, want_arena = [tensor.copy() for tensor in tensors], arena.copy()
    copier = CpuDeviceCopier(tensors, case.layout, arena, executor)
    for job_id in range(4):
        job = make_job(case, rng)
        is_store = bool(rng.integers(0, 2))
        submit = copier.submit_store if is_store else copier.submit_load
        assert submit(job_id, job.blocks, job.slots)
        (model_store if is_store else model_load)(case, job, want_tensors, want_arena)
    copier.wait({0, 1, 2, 3})
    results = copier.get_finished()
    assert sorted(result.job_id for result in results) == [0, 1, 2, 3]
    assert all(result.success for result in results)
    assert (arena == want_arena).all()
    for tensor, want in zip(tensors, want_tensors, strict=True):
        assert (tensor == want).all()


@pytest.mark.parametrize("is_refused", [False, True])
@pytest.mark.parametrize("name", NAMED_CASES)
def test_moves_exactly_the_pages(
    name: str, is_refused: bool, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_refused:
        monkeypatch.setattr(memcopy, "_writev", lambda *given: -1)
    for seed in range(6):
        round_trip(NAMED_CASES[name], seed, pool)


@given(cases(), st.integers(0, 2**32))
def test_moves_exactly_the_pages_of_any_layout(case: Case, seed: int) -> None:
    with ThreadPoolExecutor(2) as executor:
        round_trip(case, seed, executor)


CASE = one_group(16)


def simple_copier(executor: Executor) -> CpuDeviceCopier:
    rng = np.random.default_rng(0)
    return CpuDeviceCopier(CASE.tensors(rng), CASE.layout, CASE.arena(rng), executor)


def blocks_of(*ids: int) -> GpuBlocks:
    return GpuBlocks.of(ids, [len(ids)], [0])


def slots_of(*slots: int) -> np.typing.NDArray[np.int32]:
    return np.array(slots, dtype=np.int32)


def finished_ids(copier: CpuDeviceCopier) -> list[int]:
    return [result.job_id for result in copier.get_finished()]


def test_submit_returns_before_anything_is_copied() -> None:
    executor = ManualExecutor()
    copier = simple_copier(executor)
    assert copier.submit_store(7, blocks_of(0), slots_of(0))
    assert copier.get_finished() == []
    executor.run_all()
    (result,) = copier.get_finished()
    assert (result.job_id, result.success, result.size_bytes) == (7, True, 16)
    assert copier.get_finished() == []


def test_jobs_of_a_direction_end_in_the_order_of_submission(pool: ThreadPoolExecutor) -> None:
    copier = simple_copier(pool)
    for job_id in range(50):
        copier.submit_store(job_id, blocks_of(job_id % 24), slots_of(job_id % 16))
    copier.wait(set(range(50)))
    assert finished_ids(copier) == list(range(50))


def test_jobs_that_wait_together_are_copied_together() -> None:
    executor, rng = ManualExecutor(), np.random.default_rng(0)
    tensors, arena = CASE.tensors(rng), CASE.arena(rng)
    ticks = iter(range(0, 1000, 8))
    copier = CpuDeviceCopier(
        tensors,
        CASE.layout,
        arena,
        executor,
        clock=lambda: float(next(ticks)),
    )
    jobs = JOBS_AT_ONCE + 2
    for job_id in range(jobs - 1):
        assert copier.submit_store(job_id, blocks_of(job_id), slots_of(3))
    assert copier.submit_store(jobs - 1, blocks_of(0, 1), slots_of(4, 5))
    executor.run_all()
    results = copier.get_finished()
    assert [result.job_id for result in results] == list(range(jobs))
    assert all(result.success for result in results)
    times = [result.time_s for result in results]
    assert times[:JOBS_AT_ONCE] == [8 / JOBS_AT_ONCE] * JOBS_AT_ONCE, "shared by bytes"
    assert times[JOBS_AT_ONCE:] == pytest.approx([8 / 3, 16 / 3])
    assert next(ticks) == 32, "two copies were timed"
    again = CpuDeviceCopier(tensors, CASE.layout, arena, executor)
    again.submit_load(0, blocks_of(20), slots_of(3))
    executor.run_all()
    last = jobs - 2
    assert all((tensor[20] == tensor[last]).all() for tensor in tensors), "the last one wins"


def test_directions_run_side_by_side() -> None:
    executor = ManualExecutor()
    copier = simple_copier(executor)
    copier.submit_store(1, blocks_of(0), slots_of(0))
    copier.submit_load(2, blocks_of(1), slots_of(1))
    executor.tasks.reverse()
    executor.run_next()
    assert finished_ids(copier) == [2]


@pytest.mark.parametrize(
    ("block", "slot"), [(0, 5), (5, 0)], ids=["same device block", "same slot"]
)
@pytest.mark.parametrize("first_is_store", [True, False])
def test_a_job_does_not_overtake_one_it_shares_memory_with(
    block: int, slot: int, first_is_store: bool
) -> None:
    executor = ManualExecutor()
    copier = simple_copier(executor)
    first, second = copier.submit_store, copier.submit_load
    if not first_is_store:
        first, second = second, first
    first(1, blocks_of(0), slots_of(0))
    second(2, blocks_of(block), slots_of(slot))
    assert len(executor.tasks) == 1, "the second has no thread yet"
    executor.run_all()
    assert finished_ids(copier) == [1, 2]


def test_one_thread_is_enough_for_jobs_that_wait_for_each_other() -> None:
    with ThreadPoolExecutor(1) as executor:
        copier = simple_copier(executor)
        for job_id in range(40):
            submit = copier.submit_store if job_id % 2 else copier.submit_load
            submit(job_id, blocks_of(0), slots_of(0))
        copier.wait(set(range(40)))
    assert finished_ids(copier) == list(range(40))


def test_turns_are_brief_while_anything_is_under_way() -> None:
    usual_s = sys.getswitchinterval()
    executor, case = ManualExecutor(), one_group(64)
    rng = np.random.default_rng(0)
    copier = CpuDeviceCopier(
        case.tensors(rng), case.layout, case.arena(rng), executor, switch_interval=SwitchInterval()
    )
    for job_id, submit in enumerate((copier.submit_store, copier.submit_load)):
        job = make_job(case, rng)
        assert submit(job_id, job.blocks, job.slots)
    assert sys.getswitchinterval() == pytest.approx(SHORT_S)
    executor.run_all()
    assert len(copier.get_finished()) == 2
    assert sys.getswitchinterval() == pytest.approx(usual_s)


def test_wait_ignores_ids_that_are_unknown_or_finished() -> None:
    executor = ManualExecutor()
    copier = simple_copier(executor)
    copier.submit_load(1, blocks_of(0), slots_of(0))
    executor.run_all()
    copier.wait({1, 99})
    copier.wait(set())
    assert finished_ids(copier) == [1]


def test_wait_is_for_the_named_jobs_alone() -> None:
    executor = ManualExecutor()
    copier = simple_copier(executor)
    copier.submit_load(1, blocks_of(0), slots_of(0))
    executor.run_all()
    copier.submit_store(2, blocks_of(1), slots_of(1))
    copier.wait({1})  # would never return if it waited for 2
    assert finished_ids(copier) == [1]
    executor.run_all()
    assert finished_ids(copier) == [2]


def test_wait_returns_when_the_job_ends() -> None:
    executor = ManualExecutor()
    copier = simple_copier(executor)
    copier.submit_load(1, blocks_of(0), slots_of(0))
    came_back = Event()

    def wait() -> None:
        copier.wait({1})
        came_back.set()

    waiter = Thread(target=wait)
    waiter.start()
    assert not came_back.is_set()
    executor.run_all()
    waiter.join(60)
    assert came_back.is_set()


def test_shutdown_lets_accepted_jobs_finish(pool: ThreadPoolExecutor) -> None:
    copier = simple_copier(pool)
    for job_id in range(10):
        copier.submit_store(job_id, blocks_of(job_id), slots_of(job_id))
    copier.shutdown(60)
    assert finished_ids(copier) == list(range(10))
    assert not copier.submit_store(11, blocks_of(0), slots_of(0))
    copier.shutdown()


def test_shutdown_drops_what_does_not_start_in_time(caplog: pytest.LogCaptureFixture) -> None:
    executor = ManualExecutor()
    copier = simple_copier(executor)
    copier.submit_store(1, blocks_of(0), slots_of(0))
    copier.shutdown(0)
    assert "dropped" in caplog.text
    executor.run_all()
    copier.wait({1})
    assert finished_ids(copier) == []


def test_an_accepted_job_is_done_even_if_the_executor_is_gone() -> None:
    executor = ThreadPoolExecutor(1)
    copier = simple_copier(executor)
    executor.shutdown()
    assert copier.submit_store(1, blocks_of(0), slots_of(0))
    assert finished_ids(copier) == [1]


def test_a_task_that_was_queued_although_no_thread_could_be_started_runs_once() -> None:
    """`ThreadPoolExecutor.submit` queues a task before it starts a thread for it."""

    class Refusing(ManualExecutor):
        def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
            super().submit(fn, *args, **kwargs)
            raise RuntimeError("can't start new thread")

    executor = Refusing()
    copier = simple_copier(executor)
    assert copier.submit_store(1, blocks_of(1), slots_of(1))
    assert finished_ids(copier) == [1], "it is done at once"
    executor.run_all()
    assert not finished_ids(copier) and not copier._lanes[Direction.STORE].is_running


def test_tensors_and_layout_must_agree() -> None:
    rng = np.random.default_rng(0)
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(ConfigError, match="differ"):
            other = one_group(16, 16).tensors(rng)
            CpuDeviceCopier(other, CASE.layout, CASE.arena(rng), pool)
        with pytest.raises(ConfigError, match="arena"):
            small = CASE.arena(rng)[:3]
            CpuDeviceCopier(CASE.tensors(rng), CASE.layout, small, pool)
