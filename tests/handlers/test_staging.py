"""The CUDA path's gathering and scattering, on CPU tensors: the same code, bit for bit."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.cuda_twin import NoEvent, batch, operations
from support.drawn_layouts import cases
from support.kv_layouts import (
    NAMED_CASES,
    Case,
    in_one_allocation,
    make_job,
    may_change_mask,
    model_load,
    model_store,
    one_group,
    written_mask,
)
from support.tensor_operations import tensor_operations
from torch.utils._pytree import tree_leaves

from kvcascade.handlers.device.batched_copy import Addresses, Batch, SourceOrder
from kvcascade.handlers.device.copier import GpuBlocks
from kvcascade.handlers.device.geometry import GroupRows
from kvcascade.handlers.device.number_uploads import HOST_BUFFERS, UPLOAD_OPERATIONS
from kvcascade.handlers.device.staging import StagedCopier, torch_layouts
from kvcascade.handlers.device.staging_plan import (
    DIRECT_RUN_BYTES,
    PIECE_BLOCKS_MAX,
    UPLOAD_BLOCKS_MAX,
)

PIECE_OPERATIONS = 4
"""Of a piece beside its kernels and copies: both streams wait for an event and record one."""
AROUND = UPLOAD_OPERATIONS + PIECE_OPERATIONS
"""Of a job of one piece beside its kernels and copies."""


def round_trip(
    case: Case,
    seed: int,
    staging_bytes: int,
    direct_run_bytes: int,
    *,
    is_one_allocation: bool = False,
    batch: Batch | None = None,
) -> None:
    rng = np.random.default_rng(seed)
    tensors, arena = case.tensors(rng), case.arena(rng)
    before, model = arena.copy(), arena.copy()
    layout = case.layout
    devices = [torch.from_numpy(tensor) for tensor in tensors]
    if is_one_allocation:
        devices = in_one_allocation(tensors)
        tensors = [device.numpy() for device in devices]
    assert torch_layouts(devices) == list(layout.tensors)
    copier = StagedCopier(
        devices,
        layout,
        torch.from_numpy(arena).view(torch.int8),
        NoEvent,
        staging_bytes=staging_bytes,
        direct_run_bytes=direct_run_bytes,
        batch=batch,
    )
    job = make_job(case, rng)
    model_store(case, job, tensors, model)
    operations(copier.store(layout.rows(job.blocks, job.slots)))
    pages = written_mask(case, job)
    assert (arena[pages] == model[pages]).all()
    others = ~may_change_mask(case, job)
    assert (arena[others] == before[others]).all()

    job = make_job(case, rng)
    want = [tensor.copy() for tensor in tensors]
    model_load(case, job, want, arena)
    operations(copier.load(layout.rows(job.blocks, job.slots)))
    for tensor, expected in zip(tensors, want, strict=True):
        assert (tensor == expected).all()


@pytest.mark.parametrize("staging_bytes", [1, 10_000, 1 << 20], ids=["none", "small", "large"])
@pytest.mark.parametrize("direct_run_bytes", [1, 1 << 30], ids=["direct", "staged"])
@pytest.mark.parametrize("is_one", [False, True], ids=["apart", "one_allocation"])
@pytest.mark.parametrize("batch", [None, batch], ids=["one_by_one", "batched"])
@pytest.mark.parametrize("name", NAMED_CASES)
def test_moves_the_pages(
    name: str, batch: Batch | None, is_one: bool, staging_bytes: int, direct_run_bytes: int
) -> None:
    for seed in range(4):
        case = NAMED_CASES[name]
        round_trip(
            case, seed, staging_bytes, direct_run_bytes, is_one_allocation=is_one, batch=batch
        )


@given(
    cases(),
    st.integers(0, 2**32),
    st.sampled_from([1, 400, 6000, 1 << 20]),
    st.booleans(),
    st.sampled_from([None, batch]),
)
def test_moves_the_pages_of_any_layout(
    case: Case, seed: int, staging_bytes: int, is_one: bool, batch: Batch | None
) -> None:
    round_trip(case, seed, staging_bytes, 1 << 30, is_one_allocation=is_one, batch=batch)


@pytest.mark.parametrize("is_one", [False, True], ids=["apart", "one_allocation"])
def test_a_batch_is_one_call_a_piece_and_one_for_all_that_is_copied_directly(is_one: bool) -> None:
    case = one_group(*[128] * 32, num_blocks=40, slots=40)
    calls: list[int] = []

    def count(targets: Addresses, sources: Addresses, sizes: Addresses, order: SourceOrder) -> None:
        calls.append(len(sizes))
        batch(targets, sources, sizes, order)

    kernels = 2 if is_one else 32
    copier, _, _ = open_copier(case, is_one_allocation=is_one, batch=count)
    assert operations(copier.store(all_blocks(case, -1))) == AROUND + kernels + 1
    assert operations(copier.load(all_blocks(case, -1))) == AROUND + kernels + 1
    two = case.layout.rows(GpuBlocks.of([5, 9], [2], [0]), np.array([8, 3], dtype=np.int32))
    assert operations(copier.load(two)) == 1
    assert calls == [40, 40, 2 * 32]


def test_a_driver_that_refuses_a_batch_is_not_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls: list[int] = []

    def refuse(
        targets: Addresses, sources: Addresses, sizes: Addresses, order: SourceOrder
    ) -> None:
        calls.append(len(sizes))
        batch(targets[:1], sources[:1], sizes[:1], order)
        raise RuntimeError("error 801 at copy 1")

    round_trip(NAMED_CASES["three_groups"], 1, 1 << 20, 1 << 30, batch=refuse)
    assert len(calls) == 1
    assert "error 801" in caplog.text


@pytest.mark.parametrize("is_one", [False, True], ids=["apart", "one_allocation"])
@pytest.mark.parametrize("name", NAMED_CASES)
def test_sleep_mode_may_discard_what_the_copier_took(name: str, is_one: bool) -> None:
    """Some versions of vLLM make us in the pool of the KV cache, whose bytes sleep discards."""
    case, rng = NAMED_CASES[name], np.random.default_rng(7)
    arena, tensors = case.arena(rng), case.tensors(rng)
    devices = in_one_allocation(tensors) if is_one else [torch.from_numpy(t) for t in tensors]
    seen, ours = Memory(), {t.untyped_storage().data_ptr() for t in devices}
    ours.add(arena.ctypes.data)
    with tensor_operations(seen.watch):
        copier = StagedCopier(
            devices, case.layout, torch.from_numpy(arena).view(torch.int8), NoEvent
        )
        copier.warm_up()
    for address, size in seen.bytes_at.items():
        if address not in ours:
            ctypes.memset(address, 0xEE, size)
    want, job = [device.numpy().copy() for device in devices], make_job(case, rng)
    model_load(case, job, want, arena)
    operations(copier.load(case.layout.rows(job.blocks, job.slots)))
    assert all((a.numpy() == b).all() for a, b in zip(devices, want, strict=True))


class Memory:
    """What memory the tensors of all operations lie in, bytes by address."""

    def __init__(self) -> None:
        self.bytes_at: dict[int, int] = {}

    def watch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes():
                storage = tensor.untyped_storage()
                self.bytes_at[storage.data_ptr()] = storage.nbytes()
        return result


def open_copier(
    case: Case, *, is_one_allocation: bool = False, **options: Any
) -> tuple[StagedCopier, set[int], dict[int, int]]:
    """A copier; where the memory lies that it was given; and what it took by itself, bytes by
    address."""
    rng = np.random.default_rng(0)
    tensors = [torch.from_numpy(tensor) for tensor in case.tensors(rng)]
    if is_one_allocation:
        tensors = in_one_allocation(case.tensors(rng))
    arena = torch.from_numpy(case.arena(rng)).view(torch.int8)
    given = {tensor.untyped_storage().data_ptr() for tensor in (*tensors, arena)}
    seen = Memory()
    with tensor_operations(seen.watch):
        copier = StagedCopier(tensors, case.layout, arena, NoEvent, **options)
    return copier, given, {at: n for at, n in seen.bytes_at.items() if at not in given}


@pytest.mark.parametrize("is_one", [False, True], ids=["apart", "one_allocation"])
@pytest.mark.parametrize("name", NAMED_CASES)
def test_a_job_takes_no_memory(name: str, is_one: bool) -> None:
    case = NAMED_CASES[name]
    copier, given, taken = open_copier(case, is_one_allocation=is_one)
    used = Memory()
    with tensor_operations(used.watch):
        copier.warm_up()
        for seed in range(8):
            job = make_job(case, np.random.default_rng(seed))
            rows = case.layout.rows(job.blocks, job.slots)
            moved = [operations(copier.store(rows)), operations(copier.load(rows))]
            assert [each > 0 for each in moved] == 2 * [bool(rows)]
    assert used.bytes_at.keys() <= given | taken.keys()


def test_the_staging_buffer_and_the_numbers_are_all_the_memory() -> None:
    case = one_group(2048, 2048, num_blocks=300, slots=200)
    slot_bytes, number_bytes = case.geometry.slot_bytes, 8
    _, _, taken = open_copier(case, staging_bytes=50 * slot_bytes)
    numbers = 200 * number_bytes  # of all pieces of the largest job
    assert sorted(taken.values()) == sorted([50 * slot_bytes, numbers, HOST_BUFFERS * numbers])


def test_no_more_is_staged_than_there_are_slots_or_numbers_are_uploaded() -> None:
    few = one_group(*[64] * 8, slots=3)
    _, _, taken = open_copier(few)
    assert max(taken.values()) <= 2 * 3 * few.geometry.slot_bytes
    many = one_group(1, 1, num_blocks=5000, slots=5000)
    _, _, taken = open_copier(many)
    assert max(taken.values()) == HOST_BUFFERS * UPLOAD_BLOCKS_MAX * 8
    assert 2 * PIECE_BLOCKS_MAX * many.geometry.slot_bytes not in taken.values()


@pytest.mark.parametrize(
    "case",
    [one_group(2 * DIRECT_RUN_BYTES, slots=4, num_blocks=4), one_group(DIRECT_RUN_BYTES, slots=4)],
    ids=["packed", "large_pages"],
)
def test_where_pages_are_always_copied_directly_no_memory_is_taken(case: Case) -> None:
    copier, _, taken = open_copier(case)
    assert taken == {}
    copier.warm_up()


@pytest.mark.parametrize(("step", "copies"), [(1, 1), (-1, 40)], ids=["adjacent", "scattered"])
def test_a_piece_is_a_kernel_per_tensor_and_a_copy_per_run(step: int, copies: int) -> None:
    case = one_group(*[128] * 32, num_blocks=40, slots=40)
    copier, _, _ = open_copier(case)
    blocks = GpuBlocks.of(list(range(40)), [40], [0])
    rows = case.layout.rows(blocks, np.arange(40, dtype=np.int32)[::step])
    assert operations(copier.store(rows)) == AROUND + 32 + copies
    assert operations(copier.load(rows)) == AROUND + 32 + copies


def all_blocks(case: Case, step: int = 1) -> list[GroupRows]:
    """A job of every block into every slot, which are as many."""
    blocks = GpuBlocks.of(list(range(case.num_blocks)), [case.num_blocks], [0])
    return case.layout.rows(blocks, np.arange(case.num_blocks, dtype=np.int32)[::step])


def test_layers_of_one_allocation_are_one_kernel() -> None:
    """And one that makes its row numbers, however many layers there are."""
    case = one_group(*[128] * 32, num_blocks=40, slots=40)
    copier, _, _ = open_copier(case, is_one_allocation=True)
    assert operations(copier.store(all_blocks(case))) == AROUND + 2 + 1
    assert operations(copier.load(all_blocks(case))) == AROUND + 2 + 1


@pytest.mark.parametrize("pages", [(128, 128, 64), (40, 100)], ids=["other_page", "no_multiple"])
def test_layers_at_other_distances_have_a_kernel_each(pages: tuple[int, ...]) -> None:
    case = one_group(*pages, num_blocks=40, slots=40)
    copier, _, _ = open_copier(case, is_one_allocation=True)
    kernels_and_copies = operations(copier.store(all_blocks(case, -1))) - AROUND
    assert kernels_and_copies == len(pages) + 40


@pytest.mark.parametrize("is_one", [False, True], ids=["apart", "one_allocation"])
def test_of_a_slot_larger_than_the_buffer_a_part_is_staged(is_one: bool) -> None:
    """Ten layers of 128 bytes, four of which fit: three parts, and no page is copied by itself."""
    case = one_group(*[128] * 10, num_blocks=40, slots=40)
    copier, _, taken = open_copier(
        case, is_one_allocation=is_one, staging_bytes=2 * (4 * 128 + 100)
    )
    assert 2 * 4 * 128 in taken.values(), "the buffer"
    of_four, of_two = (1, 1) if is_one else (4, 2)
    slot_by_slot = 2 * 40 * (PIECE_OPERATIONS + of_four + 1)
    two_at_a_time = 20 * (PIECE_OPERATIONS + of_two) + 40
    uploads = 3 * (UPLOAD_OPERATIONS + is_one)
    assert operations(copier.store(all_blocks(case))) == uploads + slot_by_slot + two_at_a_time


def test_nothing_switches_staging_off_silently(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvcascade")
    open_copier(one_group(128, 128, chunk=8), staging_bytes=1000)
    assert "copied one by one" in caplog.text and "blocks_per_chunk" in caplog.text


def test_warming_up_changes_no_byte() -> None:
    case, rng = NAMED_CASES["three_groups"], np.random.default_rng(5)
    tensors, arena = case.tensors(rng), case.arena(rng)
    before = [tensor.copy() for tensor in (*tensors, arena)]
    devices = [torch.from_numpy(tensor) for tensor in tensors]
    StagedCopier(devices, case.layout, torch.from_numpy(arena).view(torch.int8), NoEvent).warm_up()
    for tensor, was in zip((*tensors, arena), before, strict=True):
        assert (tensor == was).all()


def test_warming_up_includes_a_last_piece_of_one_row() -> None:
    """Kernels that only such a piece takes are not to be loaded while serving."""
    copier, _, _ = open_copier(one_group(*[64] * 8, slots=40))
    rows: set[int] = set()

    def note(operation: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if operation is torch.ops.aten.index.Tensor_out:
            rows.add(int(options["out"].shape[0]))
        return operation(*arguments, **options)

    with tensor_operations(note):
        copier.warm_up()
    assert rows == {1, 40}
