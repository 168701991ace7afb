"""The CUDA path's gathering and scattering, on CPU tensors: the same code, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.kv_layouts import (
    NAMED_CASES,
    Case,
    cases,
    make_job,
    may_change_mask,
    model_load,
    model_store,
    written_mask,
)

from kvcascade.handlers.staging import StagedCopier, torch_layouts


def round_trip(case: Case, seed: int, staging_bytes: int, direct_run_bytes: int) -> None:
    rng = np.random.default_rng(seed)
    tensors, arena = case.tensors(rng), case.arena(rng)
    before, model = arena.copy(), arena.copy()
    layout = case.layout
    devices = [torch.from_numpy(tensor) for tensor in tensors]
    assert torch_layouts(devices) == list(layout.tensors)
    copier = StagedCopier(
        devices,
        layout,
        torch.from_numpy(arena).view(torch.int8),
        staging_bytes=staging_bytes,
        direct_run_bytes=direct_run_bytes,
    )
    job = make_job(case, rng)
    model_store(case, job, tensors, model)
    copier.store(layout.rows(job.blocks, job.slots))
    pages = written_mask(case, job)
    assert (arena[pages] == model[pages]).all()
    others = ~may_change_mask(case, job)
    assert (arena[others] == before[others]).all()

    job = make_job(case, rng)
    want = [tensor.copy() for tensor in tensors]
    model_load(case, job, want, arena)
    copier.load(layout.rows(job.blocks, job.slots))
    for tensor, expected in zip(tensors, want, strict=True):
        assert (tensor == expected).all()


@pytest.mark.parametrize("staging_bytes", [1, 10_000, 1 << 20], ids=["none", "small", "large"])
@pytest.mark.parametrize("direct_run_bytes", [1, 1 << 30], ids=["direct", "staged"])
@pytest.mark.parametrize("name", NAMED_CASES)
def test_moves_the_pages(name: str, staging_bytes: int, direct_run_bytes: int) -> None:
    for seed in range(4):
        round_trip(NAMED_CASES[name], seed, staging_bytes, direct_run_bytes)


@given(cases(), st.integers(0, 2**32), st.sampled_from([1, 3000, 1 << 20]))
def test_moves_the_pages_of_any_layout(case: Case, seed: int, staging_bytes: int) -> None:
    round_trip(case, seed, staging_bytes, 1 << 30)
