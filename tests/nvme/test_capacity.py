"""What an index has room for, and engines that plan with different capacities."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.keys import keys
from support.memory_file_system import MemoryFileSystem
from support.nvme_peer import Peer
from support.nvme_rig import BLOCK, Rig, config_for, key

from kvcascade.assembly.nvme_parts import chain_notes
from kvcascade.errors import CorruptionError
from kvcascade.tiers.base import BlockHash, BlockOutcome
from kvcascade.tiers.nvme.segments.format import MAX_SLOTS, PAGE_BYTES
from kvcascade.tiers.nvme.writer.capacity import Plan, index_bytes, slots_in_index

SLOTS, PER_SEGMENT = 64, 8
RESERVE_BYTES = 1 << 20


@given(st.integers(0, MAX_SLOTS))
def test_an_index_has_room_for_what_it_was_made_for(slots: int) -> None:
    most = slots_in_index(index_bytes(slots))
    assert slots <= most and index_bytes(most) == index_bytes(slots)
    assert index_bytes(most + 1) > index_bytes(slots)


@given(st.integers(1, 1 << 40))
def test_an_index_never_has_to_hold_more_than_it_has_room_for(map_bytes: int) -> None:
    most = slots_in_index(map_bytes)
    whole_pages = map_bytes // PAGE_BYTES * PAGE_BYTES
    assert most == 0 or index_bytes(slots_in_index(whole_pages)) <= map_bytes


@given(st.integers(1, 1 << 14), st.integers(1, 1 << 14), st.integers(1, 1 << 30))
def test_a_plan_is_cut_to_whole_segments(size: int, segments: int, map_bytes: int) -> None:
    plan = Plan(size, segments, 0)
    within = plan.within(map_bytes)
    assert 1 <= within.segments <= segments and within.slots_per_segment == size
    assert plan.within(plan.index_bytes) == plan


def test_a_larger_capacity_waits_until_all_have_stopped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = config_for([tmp_path], slots=SLOTS, per_segment=PER_SEGMENT)
    large = config_for([tmp_path], slots=16 * SLOTS, per_segment=PER_SEGMENT)
    with Peer(small) as first:
        first.store(range(8))
        with Peer(large), caplog.at_level(logging.WARNING):
            first.ask("close")  # a rolling restart: never is nobody there
            rig = Rig(large)
        assert rig.backend.capacity == SLOTS
        (line,) = [each for each in caplog.messages if "larger capacity" in each]
        assert f"{SLOTS} of {16 * SLOTS} blocks" in line and "must be stopped once" in line
        batch: list[BlockHash] = []
        for start in range(1000, 1000 + 32 * SLOTS, 8):
            batch = [key(i) for i in range(start, start + 8)]
            assert set(rig.store(batch)) == {BlockOutcome.OK}
        assert all(rig.check(block_hash) for block_hash in batch)
        rig.close()
    caplog.clear()
    rig = Rig(large)
    assert rig.backend.capacity == 16 * SLOTS and "larger capacity" not in caplog.text
    rig.close()


def test_a_description_that_was_lost_beside_others_is_not_made_up(tmp_path: Path) -> None:
    config = config_for([tmp_path], slots=SLOTS, per_segment=PER_SEGMENT)
    with Peer(config) as first:
        first.store(range(8))
        description = tmp_path / config.key.directory_name / "namespace.json"
        text = description.read_text()
        description.unlink()
        with pytest.raises(CorruptionError, match="was lost while other processes use it"):
            Rig(config)
        assert first.hits(range(8)) == 8 and not description.exists()
        description.write_text(text)
        rig = Rig(config)
        assert all(rig.check(key(i)) for i in range(8))
        rig.close()


def fill_but_for_the_reserve(fs: MemoryFileSystem, path: Path) -> None:
    """Somebody else's data."""
    fs.size_bytes -= fs.free_bytes(path) - RESERVE_BYTES


def test_what_a_segment_lost_is_not_taken_out_of_the_reserve(tmp_path: Path) -> None:
    fs = MemoryFileSystem()
    config = replace(config_for([tmp_path], slots=32), min_free_bytes=RESERVE_BYTES)
    rig = Rig(config, fs=fs)
    rig.store(keys(32))
    rig.close()
    fs.open(rig.tier.segments.path_of(1)).truncate(PER_SEGMENT // 2 * BLOCK)
    fill_but_for_the_reserve(fs, tmp_path)
    rig = Rig(config, fs=fs)
    assert fs.free_bytes(tmp_path) >= RESERVE_BYTES
    assert sum(rig.check(block_hash) for block_hash in keys(32)) == 32 - PER_SEGMENT
    rig.check_sums()
    rig.close()


def test_the_log_of_prompts_is_not_made_out_of_the_reserve(tmp_path: Path) -> None:
    fs = MemoryFileSystem()
    rig = Rig(replace(config_for([tmp_path]), min_free_bytes=RESERVE_BYTES), fs=fs)
    fill_but_for_the_reserve(fs, tmp_path)
    notes = chain_notes(rig.tier)
    assert notes is not None and fs.free_bytes(tmp_path) >= RESERVE_BYTES
    notes.close()
    rig.close()
