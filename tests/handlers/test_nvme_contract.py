"""What both ways to move blocks to and from NVMe must do: threads here, or a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.keys import key, keys
from support.mover_rig import LIMIT_S, MoverRig
from support.nvme_rig import BLOCK

from kvcascade.handlers.node.nvme_jobs import QueueOptions
from kvcascade.tiers.base import BlockOutcome

OK, GONE, CORRUPT = BlockOutcome.OK, BlockOutcome.GONE, BlockOutcome.CORRUPT


@pytest.fixture(params=[False, True], ids=["threads", "process"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MoverRig]:
    rig = MoverRig(tmp_path, has_process=request.param, queue=QueueOptions(max_jobs=4))
    yield rig
    rig.close()


def test_there_and_back(rig: MoverRig) -> None:
    result = rig.store(1, keys(10))
    assert (result.success, result.size_bytes, result.outcomes) == (True, 10 * BLOCK, ())
    assert rig.load(2, keys(10)) == [True] * 10
    counters = rig.rig.tier.store.counters
    assert (counters.blocks_written, counters.blocks_read) == (10, 10)
    assert counters.write_ns > 0 and counters.read_ns > 0
    assert rig.down.get_finished() == [] and rig.up.get_finished() == []


def test_an_empty_job_ends(rig: MoverRig) -> None:
    assert rig.begin_store(1, [])
    assert rig.end(rig.down, 1).success
    assert rig.begin_load(2, [])
    assert rig.end(rig.up, 2).success


def test_eviction_takes_entries_out_of_the_index(rig: MoverRig) -> None:
    capacity = rig.rig.backend.capacity
    for start in range(0, 2 * capacity, 16):
        assert rig.store(start, keys(start, start + 16)).success
    rig.rig.check_sums()
    index = rig.rig.tier.index
    assert index.count() - len(rig.rig.policy) == rig.rig.tier.directory.pending_removals
    late = keys(2 * capacity - 16, 2 * capacity)
    assert rig.load(999, late) == [True] * 16
    assert rig.rig.policy.get(key(0)) is None


def test_segments_that_are_made_later_are_used(rig: MoverRig) -> None:
    before = len(rig.rig.tier.segments.numbers)
    rig.rig.tier.growth.make(1)
    rig.rig.backend.get_num_free_blocks()
    assert rig.store(1, keys(32)).success
    assert rig.load(2, keys(32)) == [True] * 32
    assert len(rig.rig.tier.segments.numbers) >= before


def test_damage_is_an_outcome(rig: MoverRig) -> None:
    rig.store(1, keys(4))
    status = rig.rig.policy.get(key(2))
    assert status is not None
    segments = rig.rig.tier.segments
    number, place = divmod(status.block_id, segments.layout.slots)
    with segments.path_of(number).open("r+b") as file:
        file.seek(segments.layout.header_bytes + place * BLOCK + 7)
        file.write(b"\x55" * 100)
    assert rig.load(2, keys(4)) == [True, True, False, True]
    assert rig.rig.tier.store.counters.corrupt == 1
    assert rig.rig.policy.get(key(2)) is None


def test_nothing_crosses_a_reset(rig: MoverRig) -> None:
    rig.store(1, keys(4))
    statuses = rig.rig.begin_store(keys(10, 14))
    spec = rig.rig.backend.get_load_store_spec(keys(10, 14), statuses)
    busy = rig.rig.reset()
    assert {status.block_id for status in busy} == {status.block_id for status in statuses}
    for status in busy:
        rig.rig.backend.free(status)
    assert rig.store(2, keys(20, 24)).success
    outcomes = rig.rig.tier.store.write(
        spec.hashes, spec.slots.tolist(), [rig.view(i) for i in range(4)], spec.epoch
    )
    assert set(outcomes) == {GONE}, "what was begun before the reset comes too late"
    assert rig.load(3, keys(20, 24)) == [True] * 4
    assert rig.rig.tier.index.count() == 4


def test_the_queue_is_bounded_and_refused_removals_are_kept(rig: MoverRig) -> None:
    rig.store(0, keys(32))
    rig.store(1, keys(32, 64))
    pairs = {job: keys(100 + 2 * job, 102 + 2 * job) for job in range(2, 16)}
    taken = [rig.begin_store(job, pair, 2 * job) for job, pair in pairs.items()]
    assert True in taken
    rig.down.wait(set(range(2, 16)), LIMIT_S)
    ended = {result.job_id: result for result in rig.down.get_finished()}
    assert sorted(ended) == [job for job, was_taken in enumerate(taken, 2) if was_taken]
    for job, result in ended.items():
        rig.land(pairs[job], result)
    assert rig.store(99, keys(500, 502)).success
    rig.rig.check_sums()


def test_after_shutdown_nothing_is_taken(rig: MoverRig) -> None:
    rig.store(1, keys(4))
    assert rig.down.shutdown() and rig.up.shutdown()
    assert rig.down.shutdown(), "idempotent"
    assert not rig.begin_store(2, keys(50, 54))
    assert not rig.begin_load(3, keys(4))
    for block_hash in keys(4):
        status = rig.rig.policy.get(block_hash)
        assert status is not None
        status.ref_cnt -= 1


def test_a_clean_close_saves_what_the_next_open_needs(rig: MoverRig, tmp_path: Path) -> None:
    for start in range(0, 96, 16):
        rig.store(start, keys(start, start + 16))
    held = len(rig.rig.policy)
    read = rig.rig.tier.index.totals[1]
    rig.load(999, keys(80, 88))
    rig.close()
    again = MoverRig(tmp_path, has_process=False)
    assert again.rig.tier.report.was_clean and again.rig.tier.report.blocks == held
    assert again.rig.tier.index.totals[1] == read + 8 * BLOCK
    assert again.rig.tier.index.totals[0] == 96 * BLOCK
    again.close()


def test_every_byte_that_is_read_is_counted_once(rig: MoverRig, tmp_path: Path) -> None:
    """This process commits, too, where another tier lies below: what comes up is written here."""
    rig.store(1, keys(8))
    rig.load(2, keys(8))
    assert rig.rig.check(keys(1)[0])
    rig.rig.store(keys(20, 24))
    rig.store(3, keys(30, 34))
    rig.rig.store(keys(40, 44))
    rig.load(4, keys(3))
    rig.close()
    again = MoverRig(tmp_path, has_process=False)
    assert again.rig.tier.index.totals[1] == (8 + 1 + 3) * BLOCK
    again.close()
