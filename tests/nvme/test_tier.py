"""Opening, closing, growing and sharing a path."""

from __future__ import annotations

import errno
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clock import ManualClock
from support.executors import SteppingExecutor
from support.keys import key, keys
from support.memory_file_system import MemoryFileSystem
from support.nvme_rig import BLOCK, SLOT_BYTES, Rig, config_for

from kvcascade.errors import ConfigError, InUseError, NoSpaceError
from kvcascade.tiers.base import BlockOutcome
from kvcascade.tiers.nvme.namespace import NamespaceKey
from kvcascade.tiers.nvme.nvme_backend import BATCHES_AHEAD
from kvcascade.tiers.nvme.segments.format import MAX_SLOTS, SegmentLayout
from kvcascade.tiers.nvme.segments.store import Durability
from kvcascade.tiers.nvme.writer.capacity import (
    BUDGET_LOCK,
    capacity_for,
    index_bytes,
    plan_capacity,
)
from kvcascade.tiers.nvme.writer.growth import RETRY_AFTER_S
from kvcascade.tiers.policies import ORDERS

SMALL_SEGMENT = 8
"""Slots."""
HEAD_BYTES = 1024
"""More than a slot's share in the header of such a segment."""


@pytest.mark.parametrize("durability", list(Durability))
@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("policy", ORDERS)
def test_blocks_and_recency_survive(
    tmp_path: Path, clean: bool, policy: str, durability: Durability
) -> None:
    config = replace(config_for([tmp_path], slots=32), durability=durability)
    rig = Rig(config, policy=policy)
    rig.store(keys(32))
    rig.policy.touch(keys(7))
    cold = [block_hash for block_hash, _ in rig.policy.coldest(10)]
    rig.close(clean)
    rig = Rig(config, policy=policy)
    assert rig.tier.report.was_clean == clean
    assert [block_hash for block_hash, _ in rig.policy.coldest(10)] == cold
    assert len(rig.policy) == 32 and all(rig.check(block_hash) for block_hash in keys(32))
    rig.check_sums()
    rig.close()


def test_a_policy_that_was_away_is_reconciled(tmp_path: Path) -> None:
    config = config_for([tmp_path], slots=16)
    rig = Rig(config, policy="lru")
    rig.store(keys(16))
    rig.close()
    rig = Rig(config, policy="arc")
    assert rig.tier.recovered
    rig.store(keys(50, 66))
    rig.close()
    rig = Rig(config, policy="lru")
    assert rig.tier.recovered
    assert {h for h, _ in rig.policy.coldest(16)} == set(keys(50, 66))
    rig.close()


def test_a_namespace_is_open_once_in_a_process(tmp_path: Path) -> None:
    rig = Rig(config_for([tmp_path]))
    with pytest.raises(InUseError, match="open in this process already"):
        Rig(config_for([tmp_path]))
    rig.close()
    Rig(config_for([tmp_path])).close()


def test_modes_are_private(tmp_path: Path) -> None:
    Rig(config_for([tmp_path])).close()
    for path in tmp_path.rglob("*"):
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


@pytest.mark.parametrize("label", ["../../etc", "a/b\\c", "", "x" * 500, "..", "ümläut\n\0"])
def test_labels_are_no_paths(tmp_path: Path, label: str) -> None:
    config = replace(config_for([tmp_path]), key=NamespaceKey(label))
    Rig(config).close()
    (folder,) = (path for path in tmp_path.iterdir() if path.name != BUDGET_LOCK)
    assert folder.parent == tmp_path and len(folder.name) <= 77


def test_reset_forgets_for_ever(tmp_path: Path) -> None:
    rig = Rig(config_for([tmp_path], slots=16))
    rig.store(keys(16))
    late = rig.policy.get(key(3))
    assert late is not None
    late.ref_cnt = 1
    busy = rig.reset()
    assert [status.block_id for status in busy] == [late.block_id]
    assert len(rig.policy) == 0 and not any(rig.check(h) for h in keys(16))
    assert rig.backend.get_num_free_blocks() == 15
    rig.store(keys(2, 6))
    rig.backend.free(busy[0])
    rig.check_sums()
    assert [rig.check(h) for h in keys(8)] == [False] * 2 + [True] * 4 + [False] * 2
    rig.close()


@pytest.mark.parametrize("clean", [True, False])
def test_what_is_stored_after_a_reset_is_not_for_the_next_engine(
    tmp_path: Path, clean: bool
) -> None:
    """It may be of weights that were updated in place: the next one loads those of the disk."""
    rig = Rig(config_for([tmp_path], slots=16))
    rig.store(keys(16))
    for _ in range(2):
        rig.reset()
        rig.store(keys(4), version=1)
    rig = rig.reopened(clean=clean)
    assert len(rig.policy) == 0 and not any(rig.check(h) for h in keys(16))
    assert rig.backend.get_num_free_blocks() == 16
    rig.store(keys(4))
    for clean_again in (clean, not clean):
        rig = rig.reopened(clean=clean_again)
        assert all(rig.check(h) for h in keys(4)), "an engine that was not reset leaves its blocks"
    rig.close()


@pytest.mark.parametrize("policy", ORDERS)
def test_an_order_knows_nothing_of_what_a_reset_made_worthless(tmp_path: Path, policy: str) -> None:
    """Its arrays name slots that are free again: to take one of them anew would tear it apart."""
    rig = Rig(config_for([tmp_path], slots=64), policy=policy)
    rig.reset()
    rig.store(keys(40))
    rig.policy.touch(keys(20))
    rig.close()
    again = Rig(rig.config, policy=policy)
    assert again.tier.report.was_clean and not len(again.policy)
    for start in range(100, 400, 10):
        again.store(keys(start, start + 10))
    again.check_sums()
    again.close()


def test_a_reset_that_the_disk_forgot_counts(tmp_path: Path) -> None:
    """Power is lost: what was committed after a reset is there, the reset's own number is not."""
    rig = Rig(config_for([tmp_path], slots=16))
    rig.store(keys(2))
    epochs = tmp_path.glob("*/state/epoch.arr")
    (path,) = epochs
    before = path.read_bytes()
    rig.reset()
    rig.store(keys(4), version=1)
    rig.close(clean=False)
    path.write_bytes(before)
    rig = Rig(config_for([tmp_path], slots=16))
    assert len(rig.policy) == 0
    rig.close()


def test_a_reset_that_was_never_committed_counts(tmp_path: Path) -> None:
    executor = SteppingExecutor()
    rig = Rig(config_for([tmp_path], slots=16), executor=executor)
    rig.store(keys(16))
    rig.reset()
    rig = rig.reopened(clean=False)
    assert len(rig.policy) == 0 and not any(rig.check(h) for h in keys(16))
    assert rig.backend.get_num_free_blocks() == 16
    rig.close()


def test_a_job_from_before_a_reset_stores_nothing(tmp_path: Path) -> None:
    rig = Rig(config_for([tmp_path], slots=16))
    statuses = rig.begin_store(keys(2))
    spec = rig.backend.get_load_store_spec(keys(2), statuses)
    busy = rig.reset()
    payloads = [memoryview(bytearray(BLOCK))] * 2
    outcomes = rig.tier.store.write(spec.hashes, spec.slots.tolist(), payloads, spec.epoch)
    assert outcomes == [BlockOutcome.GONE] * 2
    for status in busy:
        rig.backend.free(status)
    assert rig.tier.index.count() == 0 and rig.backend.get_num_free_blocks() == 16
    rig.close()


@pytest.mark.parametrize("slots", [8, 64])
def test_capacity_may_change(tmp_path: Path, slots: int) -> None:
    rig = Rig(config_for([tmp_path], slots=32))
    rig.store(keys(32))
    capacity = config_for([tmp_path], slots=slots).capacity_bytes
    rig = rig.reopened(capacity_bytes=capacity)
    assert rig.backend.capacity == slots
    assert len(rig.policy) == min(slots, 32)
    assert sum(rig.check(block_hash) for block_hash in keys(32)) == min(slots, 32)
    rig.check_sums()
    rig.store(keys(100, 100 + slots))
    assert all(rig.check(block_hash) for block_hash in keys(100, 100 + slots))
    rig = rig.reopened()
    assert all(rig.check(block_hash) for block_hash in keys(100, 100 + slots))
    rig.close()


def test_two_paths_share_the_work(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    rig = Rig(config_for(paths, slots=64))
    rig.store(keys(32))
    size = rig.tier.segments.layout.slots
    statuses = [rig.policy.get(block_hash) for block_hash in keys(32)]
    on_first = sum(s is not None and s.block_id // size % 2 == 0 for s in statuses)
    assert on_first == 16
    rig.store(keys(100, 164))
    rig = rig.reopened()
    assert all(rig.check(block_hash) for block_hash in keys(100, 164))
    rig.check_sums()
    rig.close()
    with pytest.raises(ConfigError, match="was part 1 of 2"):
        Rig(replace(rig.config, paths=(paths[1], paths[0])))


def test_growth_is_ahead_of_need_and_off_the_thread(tmp_path: Path) -> None:
    executor = SteppingExecutor()
    rig = Rig(replace(config_for([tmp_path], slots=32), ready_bytes=1), executor=executor)
    executor.run_all()
    assert rig.backend.get_num_free_blocks() == 8
    rig.store(keys(1))
    executor.run_all()
    assert rig.backend.get_num_free_blocks() == 7, "who stores little takes no second segment"
    assert rig.backend.get_num_possible_blocks() == 31, "all that can still be made"
    for i in range(1, 5):
        rig.store(keys(i, i + 1))
    assert rig.backend.get_num_free_blocks() == 3
    assert len(rig.tier.segments.numbers) == 1, "nothing was made on the caller's thread"
    executor.run_all()
    assert rig.backend.get_num_free_blocks() == 11
    rig.close()


@pytest.mark.parametrize("paths", [1, 2])
def test_nothing_leaves_for_a_burst_while_the_tier_can_grow(tmp_path: Path, paths: int) -> None:
    """Segments are small, and as many batches as the manager starts at once come in one step."""
    batch, executor = 2 * SMALL_SEGMENT, SteppingExecutor()
    folders = [tmp_path / str(i) for i in range(paths)]
    for folder in folders:
        folder.mkdir()
    config = config_for(folders, slots=160, per_segment=SMALL_SEGMENT)
    ready_bytes = (SLOT_BYTES + HEAD_BYTES) * BATCHES_AHEAD * batch // paths
    rig = Rig(replace(config, ready_bytes=ready_bytes), executor=executor)
    for start in range(0, 160, BATCHES_AHEAD * batch):
        executor.run_all()
        for first in range(start, min(160, start + BATCHES_AHEAD * batch), batch):
            rig.store(keys(first, first + batch))
        executor.run_all()
    assert len(rig.policy) == 160 and all(rig.check(block_hash) for block_hash in keys(160))
    rig.close()


def test_what_an_earlier_process_left_is_told_at_once(tmp_path: Path) -> None:
    rig = Rig(config_for([tmp_path], slots=32))
    rig.store(keys(6))
    rig.drop(keys(6)[2])
    rig = rig.reopened()
    found: list[int] = []
    rig.backend.tell_found(lambda slots: found.extend(slots.tolist()))
    assert found == rig.tier.live_slots().tolist() and len(found) == 5
    rig.close()


def test_a_full_disk_lowers_what_there_is(tmp_path: Path) -> None:
    fs, clock = MemoryFileSystem(), ManualClock()
    config = replace(config_for([tmp_path], slots=32), ready_bytes=1)
    rig = Rig(config, fs=fs, clock=clock)
    fs.fail("preallocate", errno.ENOSPC)
    assert set(rig.store(keys(6))) == {BlockOutcome.OK}
    assert rig.backend.get_num_free_blocks() == 2 and rig.tier.growth.failures == 1
    assert rig.backend.get_num_possible_blocks() == 2, "it is known that no more can be made"
    assert set(rig.store(keys(10, 16))) == {BlockOutcome.OK}, "it evicts instead"
    clock.advance(RETRY_AFTER_S)
    assert rig.backend.get_num_free_blocks() == 24, "it grows again by itself"
    assert rig.backend.get_num_possible_blocks() == 24
    rig.close()


def test_old_namespaces_leave_first(tmp_path: Path) -> None:
    config = config_for([tmp_path], slots=32)
    old = replace(config, key=NamespaceKey("old", {"n": 1}))
    other = replace(config, key=NamespaceKey("other", {"n": 2}))
    Rig(old).close()
    rig = Rig(config)
    assert not (tmp_path / old.key.directory_name).exists(), "there was room only without it"
    rig.store(keys(8))
    with pytest.raises(NoSpaceError, match="over all namespaces"):
        Rig(other)
    assert rig.check(key(0)), "the namespace that is open stays"
    rig.close()
    Rig(other).close()
    assert not (tmp_path / config.key.directory_name).exists()


def test_nothing_is_removed_in_vain(tmp_path: Path) -> None:
    """Somebody else's data fills the disk: our old namespaces would not make enough room."""
    fs = MemoryFileSystem(size_bytes=4 << 20)
    config = config_for([tmp_path], slots=32)
    old = replace(config, key=NamespaceKey("old", {"n": 1}))
    Rig(old, fs=fs).close()
    roomy = replace(config, capacity_bytes=4 * config.capacity_bytes)
    rig = Rig(replace(roomy, min_free_bytes=5 << 20), fs=fs)
    assert rig.backend.available == 0
    assert rig.tier.growth.failures == 1 and fs.exists(tmp_path / old.key.directory_name)
    rig.close()


@pytest.mark.parametrize("policy", ["lru", "arc", "lirs"])
@pytest.mark.parametrize("slots", [16, 256, 4096])
def test_capacity_is_never_exceeded(tmp_path: Path, slots: int, policy: str) -> None:
    config = config_for([tmp_path], slots=slots, per_segment=slots // 8)
    rig = Rig(config, policy=policy)
    batch = min(128, slots // 4)
    for start in range(0, 3 * slots, batch):
        rig.store(keys(start, start + batch))
        used = sum(p.stat().st_blocks * 512 for p in tmp_path.rglob("*") if p.is_file())
        assert used <= config.capacity_bytes
    assert rig.backend.available == slots and not rig.tier.store.counters.no_space
    rig.close()
    assert len(list((tmp_path / config.key.directory_name / "state" / "0").iterdir())) > 1


def test_min_free_is_kept(tmp_path: Path) -> None:
    fs = MemoryFileSystem(size_bytes=5 << 19)
    config = replace(config_for([tmp_path], slots=200), min_free_bytes=1 << 20)
    rig = Rig(config, fs=fs)
    assert 0 < rig.backend.available < 200
    assert fs.free_bytes(tmp_path) >= (1 << 20) + index_bytes(0), "what the index may yet take"
    rig.close()


@given(
    st.integers(1, 1 << 44),
    st.integers(1, 4096).map(lambda pages: pages * 4096),
    st.integers(1, 4),
)
def test_plans_never_exceed_the_capacity(capacity: int, block_bytes: int, paths: int) -> None:
    try:
        plan = plan_capacity(capacity, block_bytes, paths)
    except ConfigError:
        assert capacity < capacity_for(1, 1, block_bytes, paths) + 2 * paths * BLOCK
        return
    layout = SegmentLayout(block_bytes, plan.slots_per_segment, "0" * 64)
    per_path = -(-plan.segments // paths)
    assert per_path * layout.file_bytes + plan.metadata_bytes <= capacity // paths
    if capacity // paths > (128 << 20) + 64 * block_bytes * paths:
        most = MAX_SLOTS - plan.slots_per_segment  # numbers of slots are 31 bits
        assert plan.slots >= min(capacity * 0.5 / block_bytes, most)
    assert per_path <= 160


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_bytes": 1000}, "multiple of 4096"),
        ({"block_bytes": 0}, "multiple of 4096"),
        ({"capacity_bytes": 100}, "at least"),
        ({"paths": (Path("/nonexistent/folder"),)}, "does not exist"),
    ],
)
def test_bad_configurations(tmp_path: Path, change: dict[str, object], message: str) -> None:
    config = replace(config_for([tmp_path]), **change)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        Rig(config)


def test_the_overlay_and_the_tombstones_drain(tmp_path: Path) -> None:
    rig = Rig(config_for([tmp_path], slots=256, per_segment=32))
    for start in range(0, 4096, 128):
        rig.store(keys(start, start + 128))
    for _ in range(20):
        rig.tier.directory.refresh()
    assert not rig.tier.directory._overlay and not rig.tier.directory._tombstones
    assert len(rig.policy) == 256
    rig.close()


def test_arrays_keep_what_they_hold(tmp_path: Path) -> None:
    rig = Rig(config_for([tmp_path]))
    array = rig.tier.arrays("mine", 10, np.int64)
    array[:] = np.arange(10)
    del array
    rig = rig.reopened()
    assert rig.tier.arrays("mine", 10, np.int64).tolist() == list(range(10))
    assert not rig.tier.recovered
    rig = rig.reopened()
    assert rig.tier.arrays("mine", 12, np.int64).tolist() == [*range(10), 0, 0]
    assert rig.tier.recovered
    rig.close()
