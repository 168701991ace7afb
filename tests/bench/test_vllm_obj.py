"""The comparison with vLLM's `obj` tier: ratios of rates; no server is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.bench_scale import SMOKE

pytest.importorskip("vllm", reason="vllm not found")

from kvcascade.tools.commands.bench.bench_results import OURS, VLLM
from kvcascade.tools.dev.bench.measurement import Case, Figures, MeasurementSetup, run_case
from kvcascade.tools.dev.bench.peers.vllm_obj import rates
from kvcascade.tools.dev.bench.remote_obj import GOALS, MEASUREMENT


def test_a_ratio_above_one_is_in_our_favour(tmp_path: Path) -> None:
    def contender(looked_s: float, read_s: float) -> Figures:
        times_s = iter([0.0, looked_s, looked_s + read_s])
        return rates(10, lambda: 10, lambda: None, times_s.__next__)

    case = Case("both", {OURS: lambda: contender(0.25, 2.0), VLLM: lambda: contender(2.5, 2.0)})
    rows = run_case(
        case, MEASUREMENT.quantities, MeasurementSetup(tmp_path, SMOKE, lambda line: None)
    )
    ratios = {row.quantity.name: row.ratio(VLLM) for row in rows}
    assert ratios == pytest.approx({"lookup": 10.0, "load": 1.0, "lookup and load": 2.0})
    assert ratios.keys() == GOALS.keys()
    assert all(is_met for row in rows for _, _, is_met in row.verdicts())
