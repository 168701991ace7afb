"""The comparison with vLLM's `obj` tier: turns, and ratios of rates; no server is started."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vllm not found")

from kvcascade.tools.dev.bench.peers.vllm_obj import GOALS, VLLM, measure  # noqa: E402
from kvcascade.tools.dev.bench.remote_rates import OURS  # noqa: E402 - only where vLLM is installed


def test_both_take_turns_and_a_ratio_above_one_is_in_our_favour() -> None:
    order: list[str] = []

    def contender(name: str, looked_s: float, read_s: float) -> tuple[float, float]:
        order.append(name)
        return looked_s, read_s

    contenders = {
        OURS: lambda: contender(OURS, 0.25, 2.0),
        VLLM: lambda: contender(VLLM, 2.5, 2.0),
    }
    rows = measure(contenders, repeats=2)
    assert order in ([OURS, VLLM, VLLM, OURS], [VLLM, OURS, OURS, VLLM])
    ratios = {row.case: row.figures()["ratio"][VLLM] for row in rows}
    assert ratios == pytest.approx({"lookup": 10.0, "load": 1.0, "lookup and load": 2.0})
    assert ratios.keys() == GOALS.keys()
