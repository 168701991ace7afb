"""The GPU benchmark on a GPU, at a small size: every contender copies and brings the bytes back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvcascade.tools.bench import gpu
from kvcascade.tools.bench.gpu_moves import BESIDE, RATE
from kvcascade.tools.bench.measurement import Setup, run
from kvcascade.tools.bench.results import LIMIT, OURS, VLLM
from kvcascade.tools.bench.scale import SMOKE

pytestmark = pytest.mark.gpu


def test_every_contender_has_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [replace(shape, layers=min(shape.layers, 4)) for shape in gpu.SHAPES]
    monkeypatch.setattr(gpu, "SHAPES", shapes)
    monkeypatch.setattr(gpu, "COUNTS", (1, 16))
    rows = run(gpu.MEASUREMENT, Setup(tmp_path, SMOKE, lambda line: None)).rows
    assert len(rows) == len(shapes) * (1 + 8 * 2 + 4)
    for row in rows:
        name, contenders = row.quantity.name, set(row.samples)
        if name in BESIDE.values():
            assert contenders <= {OURS, VLLM}, "transfers may be too short here"
        else:
            assert contenders == {OURS, VLLM, *([LIMIT] if name in RATE.values() else [])}, row
        if name == gpu.PINNED:
            assert row.samples == {OURS: [100.0], VLLM: [100.0]}
