"""Random nodes, and a writer that dies anywhere: no slot with two owners, nothing lost or wrong."""

from __future__ import annotations

import pytest
from support.path_model import PathModel

SEEDS = 8
TURNS = 150


@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_was_acknowledged_stays_and_nothing_else_appears(seed: int, durability: str) -> None:
    model = PathModel(seed, durability)
    for _ in range(TURNS):
        model.turn()
    assert sum(oracle.stored_blocks for oracle in model.oracles.values()) > 50
    assert sum(oracle.removed_blocks for oracle in model.oracles.values()) > 0
    assert model.late_commits > 0, "grants from before a reset were committed"


@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_namespaces_are_opened_while_others_are_served(seed: int, durability: str) -> None:
    model = PathModel(seed, durability, is_late=True)
    for _ in range(2 * TURNS):
        model.turn()
    assert sum(oracle.stored_blocks for oracle in model.oracles.values()) > 50
    assert model.waited > TURNS // 10, "nodes waited for their namespace"
