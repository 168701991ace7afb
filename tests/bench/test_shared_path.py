"""Rates of several engines on one path: each moves its share, and one of them writes the path."""

from __future__ import annotations

from pathlib import Path

from kvcascade.tools.dev.bench import shared_path

BLOCK = 64 << 10


def test_two_engines_move_their_shares_and_one_of_them_writes(tmp_path: Path) -> None:
    figures = shared_path.ours(tmp_path, 2, BLOCK, 8 * BLOCK)
    assert set(figures) == {quantity.name for quantity in shared_path.QUANTITIES}
    assert all(figure is not None and figure > 0 for figure in figures.values())
    all_nodes, writer = figures[shared_path.ENGINES_CPU], figures[shared_path.WRITER_CPU]
    assert all_nodes is not None and writer is not None and writer < all_nodes
    assert not list(tmp_path.iterdir())
