"""A tier between two others: what it held before this engine goes on like what it was given."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.nvme_peer import Peer
from support.nvme_rig import key
from support.three_tiers import MIDDLE_SLOTS, TOP_SLOTS, middle_config, three_tiers

from kvcascade.manager import flow
from kvcascade.manager.below import tier_chain
from kvcascade.manager.cascading import ManagerOptions, WriteMode
from kvcascade.tiers.nvme.writer.growth import RECHECK_S

THROUGH = ManagerOptions(write_mode=WriteMode.THROUGH)
NEW = 1000
"""Number of the first block of the second engine."""


def test_after_a_restart_a_full_tier_takes_new_blocks(tmp_path: Path) -> None:
    with three_tiers(tmp_path, THROUGH) as engine:
        engine.store(0, 2 * MIDDLE_SLOTS)
        assert len(engine.middle.policy) == MIDDLE_SLOTS
    with three_tiers(tmp_path, THROUGH) as engine:
        assert engine.dirty() == MIDDLE_SLOTS, "nothing is known of the tier below"
        engine.store(NEW, NEW + 2 * MIDDLE_SLOTS)
        assert engine.manager.counters.dropped_dirty_blocks == 0
        assert engine.on_disk(0, 2 * MIDDLE_SLOTS) == 2 * MIDDLE_SLOTS
        assert engine.on_disk(NEW, NEW + 2 * MIDDLE_SLOTS) == 2 * MIDDLE_SLOTS
        assert engine.middle.check(key(NEW + 2 * MIDDLE_SLOTS - 1)), "the newest is in the middle"


def test_what_is_below_is_not_written_again(tmp_path: Path) -> None:
    with three_tiers(tmp_path, THROUGH) as engine:
        engine.store(0, 2 * MIDDLE_SLOTS)
    below = engine.written[1] - MIDDLE_SLOTS  # as many have left the middle
    with three_tiers(tmp_path, THROUGH) as engine:
        engine.step(8)
        assert engine.written == [0, 0]
        assert engine.dirty() == MIDDLE_SLOTS - below


def test_adopted_blocks_leave_and_go_down_like_others(tmp_path: Path) -> None:
    with Peer(middle_config(tmp_path)) as other:
        other.store(range(MIDDLE_SLOTS // 2))
        with three_tiers(tmp_path, THROUGH) as engine:
            engine.store(NEW, NEW + TOP_SLOTS)
            other.kill()
            engine.store(NEW + TOP_SLOTS, NEW + 2 * MIDDLE_SLOTS, seconds=RECHECK_S)
            assert engine.middle.backend.available == MIDDLE_SLOTS
            assert engine.manager.counters.dropped_dirty_blocks == 0
            assert engine.on_disk(NEW, NEW + 2 * MIDDLE_SLOTS) == 2 * MIDDLE_SLOTS
            assert engine.on_disk(0, MIDDLE_SLOTS // 2) == MIDDLE_SLOTS // 2
            assert not any(engine.middle.check(key(i)) for i in range(MIDDLE_SLOTS // 2))


def test_only_so_much_of_a_large_tier_is_looked_at_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with three_tiers(tmp_path, THROUGH) as engine:
        engine.store(0, 2 * MIDDLE_SLOTS)
    monkeypatch.setattr(tier_chain, "MAX_AHEAD_BLOCKS", MIDDLE_SLOTS // 4)
    with three_tiers(tmp_path, THROUGH) as engine:
        engine.step(8)
        assert engine.dirty() == MIDDLE_SLOTS - MIDDLE_SLOTS // 8


def test_nothing_is_written_below_while_there_is_room(tmp_path: Path) -> None:
    """Most of its segments are not made yet: they are as good as free slots."""
    with three_tiers(tmp_path, THROUGH) as engine:
        engine.store(0, MIDDLE_SLOTS // 2)
        assert engine.middle.backend.available < MIDDLE_SLOTS
        assert engine.written == [MIDDLE_SLOTS // 2, 0]
        engine.store(MIDDLE_SLOTS // 2, MIDDLE_SLOTS)
        assert engine.written[1] > 0


def test_a_shutdown_leaves_what_lasts_where_it_is(tmp_path: Path) -> None:
    with three_tiers(tmp_path) as engine:
        engine.store(0, MIDDLE_SLOTS)
        written = engine.written[1]
        assert engine.dirty()
    assert engine.written[1] - written <= TOP_SLOTS, "room for what lay in memory"
    assert engine.dirty()


@pytest.mark.parametrize("is_below", [False, True])
def test_a_full_tier_makes_room_for_all_that_a_shutdown_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_below: bool
) -> None:
    """By writing its own blocks down one by one, or by finding that they are below already."""
    monkeypatch.setattr(tier_chain, "MAX_AHEAD_BLOCKS", 1)
    monkeypatch.setattr(flow, "MAX_BATCH_BLOCKS", 1)
    with three_tiers(tmp_path) as engine:
        engine.store(0, MIDDLE_SLOTS)
        if is_below:
            assert engine.manager.flush_dirty(engine.clock() + 1.0)
            engine.write_middle_down()
    with three_tiers(tmp_path) as engine:
        for number in range(TOP_SLOTS):
            engine.offer([key(NEW + number)])
        assert engine.manager.flush_dirty(engine.clock() + 1.0)
        assert engine.written == [TOP_SLOTS, 0 if is_below else TOP_SLOTS]
        assert engine.on_disk(NEW, NEW + TOP_SLOTS) == TOP_SLOTS
        assert engine.on_disk(0, MIDDLE_SLOTS) == MIDDLE_SLOTS
