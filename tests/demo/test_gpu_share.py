"""Engines on a machine with a GPU: each takes a share of it, and two workers want two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.engine_rig import engine_options, has_device_each

from kvcascade.tools.dev.server import GPU_OPTIONS

SIDE_BY_SIDE = 3
"""Engines that the benchmark asks in turns; tests have two at a time."""


def test_as_many_engines_as_run_side_by_side_fit() -> None:
    assert SIDE_BY_SIDE * GPU_OPTIONS["gpu_memory_utilization"] < 1


@pytest.mark.parametrize("on_cpu", [True, False])
def test_an_engine_of_a_test_takes_its_share(
    on_cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("support.engine_rig.is_on_cpu", lambda: on_cpu)
    options = engine_options(tmp_path, 80, None)
    assert (GPU_OPTIONS.items() <= options.items()) is not on_cpu


def test_workers_want_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("support.engine_rig.is_on_cpu", lambda: True)
    assert has_device_each(2)
    monkeypatch.setattr("support.engine_rig.is_on_cpu", lambda: False)
    assert has_device_each(1) and not has_device_each(2)
