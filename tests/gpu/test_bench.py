"""The GPU benchmark on a GPU, at a small size: every contender copies and brings the bytes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.bench_scale import SMOKE

from kvcascade.tools.commands.bench.bench_results import LIMIT, OURS, PAGES, VLLM
from kvcascade.tools.dev.bench.gpu import gpu, gpu_moves
from kvcascade.tools.dev.bench.gpu.gpu import GpuShape
from kvcascade.tools.dev.bench.gpu.gpu_moves import BESIDE, MEANWHILE, RATE
from kvcascade.tools.dev.bench.measurement import MeasurementSetup, run
from kvcascade.tools.dev.bench.round_trip import NEEDED, RoundTrip

pytestmark = pytest.mark.gpu
needed = pytest.mark.skipif(
    not all(map(find_spec, NEEDED)), reason=f"needs {' and '.join(NEEDED)}; install them"
)


def test_every_contender_has_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, want_shared: Callable[[int], None]
) -> None:
    want_shared(256 << 20)
    shapes = [replace(shape, layers=min(shape.layers, 4)) for shape in gpu.SHAPES]
    monkeypatch.setattr(gpu, "SHAPES", shapes)
    monkeypatch.setattr(gpu, "COUNTS", (1, 16))
    monkeypatch.setattr(gpu, "PAGE_COUNTS", (16,))
    monkeypatch.setattr(gpu_moves, "PACED_BYTES", 1 << 30)
    notes: list[str] = []
    setup = MeasurementSetup(tmp_path, SMOKE, lambda line: None, note=notes.append)
    rows = run(gpu.MEASUREMENT, setup).rows
    both = {*rows[0].samples}
    assert OURS in both and (both == {OURS, VLLM, PAGES} or notes), "what does not run is said"
    assert len(rows) == 4 * (2 + 8 * 2 + 2 * 4 + 2 * 6) + 3 * (2 + 8)
    for row in rows:
        name, contenders = row.quantity.name, set(row.samples)
        if name in BESIDE.values():
            assert contenders <= both, "transfers may be too short here"
        elif name == gpu.BATCHED:
            assert row.samples == {OURS: [100.0 * (PAGES in both)]}, "by the driver's age"
        else:
            rates = (*RATE.values(), *MEANWHILE.values())
            assert contenders == {*both, *([LIMIT] if name in rates else [])}, row
        if name == gpu.PINNED:
            assert row.samples == {each: [100.0] for each in both}


@needed
def test_all_tiers_without_an_engine(tmp_path: Path, want_shared: Callable[[int], None]) -> None:
    want_shared(256 << 20)
    shape = GpuShape("small", 8, 64 << 10)
    found = RoundTrip(tmp_path / "tier", "cuda", shape, 64)()
    print({name: round(figure or 0, 3) for name, figure in found.items()})
    assert all(figure and figure > 0 for figure in found.values())
