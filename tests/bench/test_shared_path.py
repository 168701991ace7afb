"""Rates of several engines on one path: each moves its share, and one of them writes the path."""

from __future__ import annotations

from pathlib import Path

from kvcascade.tools.dev.bench import shared_path
from kvcascade.tools.dev.bench.shared_path import PhaseEnd, span_s

BLOCK = 64 << 10


def test_two_engines_move_their_shares_and_one_of_them_writes(tmp_path: Path) -> None:
    figures = shared_path.ours(tmp_path, 2, BLOCK, 8 * BLOCK)
    assert set(figures) == {quantity.name for quantity in shared_path.QUANTITIES}
    assert all(figure is not None and figure > 0 for figure in figures.values())
    all_nodes, writer = figures[shared_path.ENGINES_CPU], figures[shared_path.WRITER_CPU]
    assert all_nodes is not None and writer is not None and writer < all_nodes
    assert not list(tmp_path.iterdir())


def test_the_time_of_a_phase_is_from_the_first_begin_to_the_last_end() -> None:
    ends = [PhaseEnd(10.0, 12.0, 0.0, True), PhaseEnd(11.5, 14.0, 0.0, False)]
    assert span_s(ends) == 4.0 and [end.time_s for end in ends] == [2.0, 2.5]
