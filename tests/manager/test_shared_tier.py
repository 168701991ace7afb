"""A tier that other engines use too: what they do to it, and what the manager makes of that."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
from support import node_rig
from support.cascade import Cascade
from support.inside import demoters
from support.keys import key, keys

from kvcascade.config.schema import OnReset
from kvcascade.handlers.node.path_wire import NodeJoined, NodeNote, NodeState
from kvcascade.manager.base import LookupState
from kvcascade.manager.below.chain import PASS_ON_AFTER_S
from kvcascade.manager.below.node_feed import MAP_AGAIN_AFTER_S
from kvcascade.manager.below.port import Put
from kvcascade.manager.core import MAX_EVENT_BLOCKS, ManagerOptions
from kvcascade.manager.request import Request
from kvcascade.tiers.base import BlockHash, BlockOutcome
from kvcascade.tiers.nvme.path.presence_file import map_presence
from kvcascade.tiers.nvme.path.presence_table import PresenceTable

DAY_S = 86400


@pytest.mark.parametrize("failures", [1, 3])
def test_a_presence_table_that_cannot_be_mapped_for_a_moment_is_mapped_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failures: int
) -> None:
    tries = 0

    def limited(*given: Any) -> PresenceTable:
        nonlocal tries
        tries += 1
        if tries <= failures:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return map_presence(*given)

    monkeypatch.setattr(node_rig, "map_presence", limited)
    rig = node_rig.NodesRig()
    tier = rig.add().tier
    for _ in range(10):
        tier.maintain()
        assert (tries, tier.takes_puts) == (1, False), "not at every step"
    for number in range(failures):
        rig.clock.advance(MAP_AGAIN_AFTER_S)
        tier.maintain()  # this begins
        tier.maintain()  # this takes in what came of it
        assert (tries, tier.takes_puts) == (number + 2, number + 1 == failures)
    assert tier.feed.find(key(1)) < 0 and tier.feed.epoch is not None
    assert caplog.text.count("its blocks are not found") == 1


LEADING, FOLLOWING, JOINING = NodeState.LEADING, NodeState.FOLLOWING, NodeState.JOINING
SILENT, ORPHANED = NodeState.SILENT, NodeState.ORPHANED


@pytest.mark.parametrize(
    ("notes", "state", "said"),
    [
        ([], FOLLOWING, []),
        ([NodeNote(JOINING, "nobody answers")], FOLLOWING, []),
        ([NodeNote(ORPHANED)], FOLLOWING, []),
        ([NodeNote(FOLLOWING, "other options")], FOLLOWING, []),
        ([NodeNote(ORPHANED, "is gone")], LEADING, ["this engine"]),
        ([NodeNote(ORPHANED, "is gone")], FOLLOWING, ["another engine"]),
        ([NodeNote(ORPHANED, "is gone"), NodeNote(ORPHANED, "why")], LEADING, ["this engine"]),
        ([NodeNote(SILENT, "no answer")], FOLLOWING, ["another engine"]),
        ([NodeNote(SILENT, "no answer"), NodeNote(FOLLOWING, "answers again")], FOLLOWING, []),
        ([NodeNote(ORPHANED, "is gone"), None], FOLLOWING, ["another engine"]),
    ],
)
def test_a_node_that_joins_again_ends_the_warning_that_writes_rest(
    caplog: pytest.LogCaptureFixture, notes: list[Any], state: NodeState, said: list[str]
) -> None:
    feed = node_rig.NodesRig().add().tier.feed
    assert not caplog.records, "nothing is said of the first join"
    for note in notes:
        feed.take(note)
    caplog.clear()
    for _ in range(2):  # the second time without a warning in between
        feed.take(NodeJoined(state, "/tier/folder", 16, 0))
    texts = [f"tier nvme: writes go on; {writer} is the writer of the path" for writer in said]
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", text) for text in texts
    ]


def reset_by_another(cascade: Cascade) -> None:
    cascade.backends[1].is_overtaken = True
    cascade.manager.end_step()


def test_a_block_that_another_engine_stored_first_is_settled() -> None:
    cascade = Cascade((4, 16))
    cascade.store(keys(0, 4))
    cascade.down[0].fate = lambda source, target: BlockOutcome.HELD
    assert cascade.manager.flush_dirty(cascade.now_s + 1), "nothing dirty is left"
    counters = cascade.manager.counters.links[0]
    assert (counters.demote_held_blocks, counters.demote_failed_blocks) == (4, 0)
    assert cascade.backends[1].get_num_free_blocks() == 16, "its slots were given back"
    assert cascade.store(keys(4, 8)) == keys(4, 8)
    assert cascade.manager.counters.dropped_dirty_blocks == 0


def test_each_reset_leaves_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvcascade")
    kept = Cascade((8, 16), ManagerOptions(on_reset=OnReset.KEEP))
    kept.manager.reset_cache()
    cascade = Cascade((8, 16))
    cascade.manager.reset_cache()
    cascade.manager.end_step()
    assert len(caplog.messages) == len(set(caplog.messages)) == 2
    reset_by_another(cascade)
    cascade.manager.end_step()
    assert len(set(caplog.messages)) == len(caplog.messages) == 3


def test_a_reset_by_another_engine_is_for_everything_above_it_too() -> None:
    cascade = Cascade((8, 16))
    cascade.store(keys(0, 4))
    assert cascade.manager.flush_dirty(cascade.now_s + 1)
    cascade.store(keys(4, 6))
    reset_by_another(cascade)
    assert cascade.manager.counters.resets_by_others == 1
    assert cascade.manager.lookup(keys(0, 6)) == cascade.manager.lookup(keys(4, 6)) == 0
    cascade.now_s += DAY_S
    assert cascade.manager.flush_dirty(cascade.now_s + 1)
    assert len(cascade.policies[0]) == len(cascade.policies[1]) == 0
    assert cascade.store(keys(0, 8)) == keys(0, 8), "their slots can be had at once"
    assert cascade.manager.flush_dirty(cascade.now_s + 1)
    assert len(cascade.policies[1]) == 8, "what came later goes down as ever"


def test_a_block_whose_write_was_under_way_at_the_reset_is_written_anew() -> None:
    cascade = Cascade((8, 16))
    cascade.store(keys(0, 4))
    demoters(cascade.manager)[0].demote_coldest(4)
    reset_by_another(cascade)
    assert cascade.store(keys(0, 4)) == keys(0, 4)
    demoters(cascade.manager)[0].demote_coldest(4)
    (older, _), below = cascade.down[0].queued, cascade.manager._core.below
    cascade.down[0].step(older)
    cascade.manager.maintain()
    assert [*below.put(99, keys(0, 4), range(4))] == [Put.ALREADY] * 4, "their write goes on"
    assert cascade.manager.flush_dirty(cascade.now_s + 1)
    assert len(cascade.policies[1]) == 4


def test_hits_of_a_step_outlive_a_reset_that_is_seen_in_the_middle_of_it() -> None:
    cascade = Cascade((8, 16))
    cascade.store(keys(0, 3))
    request = Request()
    assert cascade.manager.lookup(keys(0, 3), request) == 3
    cascade.backends[1].is_overtaken = True
    cascade.manager.maintain()
    cascade.manager.prepare_load(keys(0, 3), request)
    cascade.manager.end_step()
    assert cascade.manager.lookup(keys(0, 3)) == 0


def test_what_workers_are_at_ends_as_the_engine_reports_it() -> None:
    """The engine knows of no reset: it reports all of it, and nothing is a hit meanwhile."""
    cascade = Cascade((8, 16))
    manager = cascade.manager
    cascade.store(keys(0, 2))
    for _ in range(2):  # two requests read the same blocks
        manager.prepare_load(keys(0, 2), Request())
    assert (stored := manager.prepare_store(keys(2, 5))) is not None
    reset_by_another(cascade)
    assert manager.lookup(keys(0, 1)) == manager.lookup(keys(2, 3)) == 0
    again = manager.prepare_store(keys(0, 6))
    assert again is not None and again.block_hashes_to_store == keys(5, 6)
    assert cascade.backends[0].get_num_free_blocks() == 2
    manager.complete_load(set(keys(0, 2)))
    manager.complete_store(set(stored.block_hashes_to_store))
    assert manager.lookup(keys(2, 5)) == 0 and cascade.backends[0].get_num_free_blocks() == 5
    manager.complete_load(set(keys(0, 2)))
    assert cascade.backends[0].get_num_free_blocks() == 7
    manager.complete_store(set(keys(5, 6)))
    assert cascade.store(keys(0, 5)) == keys(0, 5), "their names are free again"
    assert manager.lookup(keys(0, 6)) == 6


def test_its_own_reset_after_another_engines() -> None:
    """Now nothing will be reported: the slots come back when the workers were flushed."""
    cascade = Cascade((8, 16))
    cascade.store(keys(0, 2))
    cascade.manager.prepare_load(keys(0, 2), Request())
    cascade.manager.prepare_store(keys(2, 5))
    reset_by_another(cascade)
    reset_by_another(cascade)
    cascade.manager.reset_cache()
    cascade.manager.end_step()
    assert cascade.backends[0].get_num_free_blocks() == 3
    cascade.manager.on_reset_flushed()
    assert cascade.backends[0].get_num_free_blocks() == 8
    assert cascade.store(keys(0, 8)) == keys(0, 8)


def test_a_tier_in_between_that_only_this_engine_uses_is_emptied_too() -> None:
    cascade = Cascade((4, 6, 16))
    cascade.store(keys(0, 4))
    demoters(cascade.manager)[0].demote_coldest(4)
    cascade.run_transfers()
    assert len(cascade.policies[1]) == 4
    cascade.backends[2].is_overtaken = True
    cascade.manager.end_step()
    assert cascade.manager.lookup(keys(0, 4)) == 0, "not even where blocks are"
    cascade.now_s += PASS_ON_AFTER_S
    cascade.manager.end_step()
    assert [len(policy) for policy in cascade.policies] == [0, 0, 0]
    assert cascade.manager.counters.resets_by_others == 1


def test_what_another_engine_took_is_told_in_batches() -> None:
    """First what was in memory, which nobody can name later; blocks that are back are left out."""
    cascade = Cascade((2 * MAX_EVENT_BLOCKS, 8), is_immediate=True)
    cascade.store(keys(0, MAX_EVENT_BLOCKS + 5))
    cascade.manager.take_events()
    reset_by_another(cascade)
    removed: set[BlockHash] = set()
    for _ in range(3):
        for event in cascade.manager.take_events():
            assert event.removed and len(event.block_hashes) <= MAX_EVENT_BLOCKS
            assert removed.isdisjoint(event.block_hashes)
            removed |= set(event.block_hashes)
    assert removed == set(keys(0, MAX_EVENT_BLOCKS + 5))
    assert cascade.manager.take_events() == []


def test_what_is_back_was_not_lost() -> None:
    cascade = Cascade((8, 16))
    cascade.store(keys(0, 3))
    cascade.manager.take_events()
    reset_by_another(cascade)
    cascade.store(keys(1, 2))
    events = cascade.manager.take_events()
    assert {h for e in events if e.removed for h in e.block_hashes} == {key(0), key(2)}


def test_stores_under_way_end_without_a_trace() -> None:
    cascade = Cascade((8, 16))
    cascade.store(keys(0, 3))
    demoters(cascade.manager)[0].demote_coldest(3)
    assert cascade.down[0].queued
    reset_by_another(cascade)
    cascade.down[0].fate = lambda source, target: BlockOutcome.GONE
    cascade.run_transfers()
    assert len(cascade.policies[1]) == 0
    assert cascade.backends[1].get_num_free_blocks() == 16
    cascade.down[0].fate = lambda source, target: BlockOutcome.OK
    cascade.now_s += DAY_S
    assert cascade.manager.flush_dirty(cascade.now_s + 1)
    assert len(cascade.policies[0]) == len(cascade.policies[1]) == 0


def test_loads_under_way_end_and_every_slot_can_be_had_again() -> None:
    cascade = Cascade((8, 16))
    cascade.store(keys(0, 3))
    assert cascade.manager.flush_dirty(cascade.now_s + 1)
    for _, status in cascade.policies[0].evict(3, ()) or ():
        cascade.backends[0].free(status)
    request = Request()
    asked = [cascade.manager.lookups.lookup_block(block_hash, request) for block_hash in keys(0, 3)]
    assert asked == [LookupState.PENDING] * 3
    cascade.manager.end_step()
    reset_by_another(cascade)
    cascade.up[0].fate = lambda source, target: BlockOutcome.GONE
    cascade.run_transfers()
    asked = [cascade.manager.lookups.lookup_block(block_hash, request) for block_hash in keys(0, 3)]
    assert asked == [LookupState.MISS] * 3
    assert cascade.backends[0].get_num_free_blocks() == 8
    assert cascade.backends[1].get_num_free_blocks() == 16
