"""Records of slots that the device cannot deliver: no signal, no endless repair, no wrong byte."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.clock import ManualClock
from support.executors import SteppingExecutor
from support.keys import key, keys
from support.memory_file_system import MemoryFileSystem
from support.nvme_rig import Rig, config_for

from kvcascade.tiers.base import BlockOutcome
from kvcascade.tiers.nvme.disk.filesystem import File, RealFileSystem
from kvcascade.tiers.nvme.writer.failing_devices import RETRY_AFTER_S

PAGE = 4096
SLOTS = 32
PER_SEGMENT = 8
POLICIES = ["lru", "arc", "s3fifo", "prefix"]


def filled(rig: Rig) -> Rig:
    rig.store_bit_by_bit(keys(SLOTS))
    rig.tier.directory.refresh()
    rig.maintain()
    return rig


def in_memory(folder: Path, policy: str = "lru") -> tuple[Rig, MemoryFileSystem]:
    fs = MemoryFileSystem()
    config = config_for([folder], slots=SLOTS, per_segment=PER_SEGMENT)
    return filled(Rig(config, fs=fs, policy=policy)), fs


def spoil(rig: Rig, fs: MemoryFileSystem, segment: int) -> None:
    """The device gives up the page with the records of a segment, and nothing else."""
    segments = rig.tier.segments
    fs.spoil(segments.path_of(segment), segments.layout.records_offset, PAGE)
    rig.maintain()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[File]:
    file = RealFileSystem().open(tmp_path / "file", create=True)
    file.preallocate(4 * PAGE)
    file.pwritev([memoryview(b"first" * 1000)], PAGE)
    yield file
    file.close()


def test_a_view_shows_the_file_as_it_is(file: File) -> None:
    view = file.view(PAGE, 2 * PAGE)
    assert view(0, 5) == b"first" and view(PAGE - 1, 2) == (b"first" * 1000)[PAGE - 1 : PAGE + 1]
    file.pwritev([memoryview(b"other")], PAGE)
    assert view(0, 10) == b"otherfirst"


def test_a_file_that_was_cut_under_a_view_is_no_signal(file: File) -> None:
    view = file.view(PAGE, 2 * PAGE)
    file.truncate(2 * PAGE)
    assert view(0, 5) == b"first"
    with pytest.raises(OSError) as caught:
        view(PAGE, 5)
    assert caught.value.errno == errno.EFAULT
    file.truncate(4 * PAGE)
    assert view(PAGE, 5) == bytes(5), "and what comes back is read again"


@pytest.mark.parametrize("policy", POLICIES)
def test_files_that_were_cut_under_a_tier(tmp_path: Path, policy: str) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    rig = filled(Rig(config_for(paths, slots=SLOTS, per_segment=PER_SEGMENT), policy=policy))
    for path in paths[1].glob("*/segments/*"):
        os.truncate(path, PAGE)
    assert sum(rig.check(h) for h in keys(SLOTS)) == SLOTS // 2
    for first in range(100, 100 + 2 * SLOTS, 4):
        assert rig.store(keys(first, first + 4)) == [BlockOutcome.OK] * 4
        rig.maintain()
    assert all(rig.tier.segments.record(slot) is not None for slot in range(SLOTS))
    rig.check_sums()
    rig.close()


def test_all_ways_to_read_records_pass_a_bad_page_over(tmp_path: Path) -> None:
    rig, fs = in_memory(tmp_path)
    segments = rig.tier.segments
    before = segments.generations(1)
    spoil(rig, fs, 0)
    assert segments.record(0) is None and segments.record(PER_SEGMENT) is not None
    assert list(segments.records(0)) == [] and len(list(segments.records(1))) == PER_SEGMENT
    bad, good = segments.generations(0), segments.generations(1)
    assert bad is not None and good is not None and before is not None
    assert not bad.any() and good.tolist() == before.tolist()
    rig.close()


def test_a_bad_page_is_not_read_again_and_again(tmp_path: Path) -> None:
    rig, fs = in_memory(tmp_path)
    spoil(rig, fs, 0)
    before = fs.calls["view"]
    for _ in range(5):
        assert all(rig.tier.segments.record(slot) is None for slot in range(PER_SEGMENT))
    assert fs.calls["view"] == before + 1
    rig.tier.segments.look_again()
    assert rig.tier.segments.record(0) is None
    assert fs.calls["view"] == before + 2
    rig.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_slots_that_cannot_be_repaired_are_set_aside(tmp_path: Path, policy: str) -> None:
    rig, fs = in_memory(tmp_path, policy)
    spoil(rig, fs, 0)
    bad = {i for i in range(SLOTS) if rig.tier.directory.slots_of([key(i)])[0] < PER_SEGMENT}
    for first in range(100, 100 + 2 * SLOTS, 4):
        rig.store(keys(first, first + 4))
        rig.maintain()
    assert rig.backend.set_aside_blocks == len(bad) == PER_SEGMENT
    assert {i for i in range(SLOTS) if rig.check(key(i))} == bad, "their blocks stay"
    reads = fs.calls["view"]
    submitted = rig.tier.store.counters.records_repaired
    for first in range(200, 200 + SLOTS, 4):
        assert rig.store(keys(first, first + 4)) == [BlockOutcome.OK] * 4
        assert not rig.tier.directory.take_unknown(), "no eviction asks for them again"
    assert rig.tier.store.counters.records_repaired == submitted
    assert fs.calls["view"] - reads <= 2 * SLOTS
    rig.check_sums()
    rig.reset()
    rig.check_sums()
    assert rig.backend.get_num_free_blocks() == SLOTS - PER_SEGMENT
    rig.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_they_come_back_with_the_device(tmp_path: Path, policy: str) -> None:
    rig, fs = in_memory(tmp_path, policy)
    clock = rig.clock
    assert isinstance(clock, ManualClock)
    for segment in range(SLOTS // PER_SEGMENT - 1):
        spoil(rig, fs, segment)
    for first in range(100, 100 + SLOTS, 4):
        rig.store(keys(first, first + 4))
        rig.maintain()
    aside = rig.backend.set_aside_blocks
    assert aside == SLOTS - PER_SEGMENT
    clock.advance(RETRY_AFTER_S)
    rig.backend.get_num_free_blocks()
    rig.maintain()
    assert rig.backend.set_aside_blocks == aside, "not yet"
    fs.heal()
    clock.advance(RETRY_AFTER_S)
    rig.backend.get_num_free_blocks()
    rig.maintain()
    assert rig.backend.set_aside_blocks == 0
    rig.check_sums()
    assert rig.backend.available == SLOTS
    evicted = rig.policy.evict(SLOTS, ())
    assert evicted is not None
    for _, status in evicted:
        rig.backend.free(status)
    rig.check_sums()
    rig.close()


def with_slots_set_aside(tmp_path: Path) -> tuple[Rig, MemoryFileSystem]:
    """A tier that stored so much that every slot was asked for, those of a spoilt segment too."""
    rig, fs = in_memory(tmp_path)
    spoil(rig, fs, 0)
    for first in range(100, 100 + SLOTS, 4):
        rig.store(keys(first, first + 4))
        rig.maintain()
    return rig, fs


def test_they_are_there_after_the_next_start(tmp_path: Path) -> None:
    rig, fs = with_slots_set_aside(tmp_path)
    aside = {i for i in range(SLOTS) if rig.check(key(i))}
    assert len(aside) == PER_SEGMENT
    rig.close()
    again = Rig(rig.config, fs=fs)
    assert {i for i in range(SLOTS) if again.check(key(i))} == aside
    again.check_sums()
    again.close()


def test_a_damaged_block_in_such_a_slot_leaves_the_index(tmp_path: Path) -> None:
    rig, fs = with_slots_set_aside(tmp_path)
    victim = next(h for h in keys(SLOTS) if rig.check(h))
    (slot,) = rig.tier.directory.slots_of([victim])
    segments = rig.tier.segments
    offset = segments.layout.header_bytes + slot * segments.layout.block_bytes
    fs.damage(segments.path_of(0), offset, b"damaged")
    assert not rig.check(victim)
    rig.backend.flush_removals()
    rig.maintain()
    assert rig.policy.get(victim) is None
    assert rig.store([victim]) == [BlockOutcome.OK], "it finds another place"
    assert rig.check(victim)
    rig.check_sums()
    rig.close()


def test_records_are_remembered_until_the_index_is_seen_anew(tmp_path: Path) -> None:
    """And no longer, or until they are said to be right."""
    rig, _ = in_memory(tmp_path)
    segments, directory = rig.tier.segments, rig.tier.directory
    forget = [directory.trust_records, directory.refresh, directory.look_again]
    for number, act in enumerate(forget, 1):
        assert directory.at_slot(1) is not None  # the first one of a page is not remembered
        before, record = directory.at_slot(0), segments.record(0)
        assert before is not None and record is not None
        segments.write_records(0, [replace(record, key=key(500 + number)).pack()])
        now = directory.at_slot(0)
        assert now is not None and now[0] == before[0]
        act()
        now = directory.at_slot(0)
        assert now is not None and now[0] == key(500 + number), "a stray, by that name"
    rig.close()


def test_one_repair_at_a_time(tmp_path: Path) -> None:
    """However often slots are asked for meanwhile; and what it mends is not given up."""
    executor = SteppingExecutor()
    fs = MemoryFileSystem()
    config = config_for([tmp_path], slots=SLOTS, per_segment=PER_SEGMENT)
    rig = Rig(config, executor, fs)
    executor.run_all()
    for first in range(0, SLOTS, 4):
        rig.store(keys(first, first + 4))
        executor.run_all()
    rig.tier.directory.refresh()
    rig.maintain()
    executor.run_all()
    segments = rig.tier.segments
    fs.damage(segments.path_of(0), segments.layout.records_offset, bytes(PER_SEGMENT * 128))
    for _ in range(10):
        rig.policy.coldest(4)
        rig.backend.get_num_free_blocks()
        rig.tier.directory.release()
    assert len(executor) == 1, "one lot"
    executor.run_all()
    rig.policy.coldest(SLOTS)
    rig.backend.get_num_free_blocks()
    rig.maintain()
    assert rig.backend.set_aside_blocks == 0
    assert len(rig.policy.coldest(SLOTS)) == SLOTS
    executor.run_all()
    rig.close()
