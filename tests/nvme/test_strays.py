"""Blocks that somebody takes out of the index: their owner misses them, and gets the slots back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import lmdb
import pytest
from support.executors import SteppingExecutor
from support.keys import key, keys
from support.nvme_rig import Rig, config_for

from kvcascade.tiers.base import BlockHash, BlockOutcome
from kvcascade.tiers.nvme.index.index_port import CommitOutcome
from kvcascade.tiers.nvme.index_directory import REFRESH_EVERY_CHANGES

SLOTS = 32
POLICIES = ["lru", "arc", "s3fifo", "prefix"]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Full of blocks 0 to 31."""
    rig = filled(tmp_path)
    yield rig
    rig.close()


def filled(folder: Path, policy: str = "lru") -> Rig:
    rig = Rig(config_for([folder], slots=SLOTS, per_segment=8), policy=policy)
    rig.store_bit_by_bit(keys(SLOTS))
    rig.tier.directory.refresh()
    return rig


def take_away(rig: Rig, numbers: Iterable[int]) -> int:
    """As another process does."""
    index = rig.tier.index
    found = [(h, entry) for h in map(key, numbers) if (entry := index.entry(h)) is not None]
    outcome, removed = index.take_away(index.epoch, [(h, entry.pack(h)) for h, entry in found])
    assert outcome is CommitOutcome.DONE
    return removed


def held(rig: Rig, numbers: Iterable[int]) -> set[int]:
    rig.maintain()
    return {i for i in numbers if rig.check(key(i))}


@pytest.mark.parametrize("policy", POLICIES)
def test_the_slots_come_back_in_turn_and_without_a_search(tmp_path: Path, policy: str) -> None:
    rig = filled(tmp_path, policy)
    assert take_away(rig, range(0, SLOTS, 2)) == SLOTS // 2
    assert held(rig, range(SLOTS)) == set(range(1, SLOTS, 2))
    rig.check_sums()
    rig.store_bit_by_bit(keys(100, 100 + 2 * SLOTS))
    assert not rig.tier.directory.take_unknown(), "no slot is searched for"
    assert len(rig.policy) == SLOTS
    rig.tier.backend.flush_removals()
    assert rig.tier.index.count() == SLOTS
    rig.check_sums()
    rig.close()


def test_it_leaves_under_its_name_once(rig: Rig) -> None:
    take_away(rig, range(4))
    rig.maintain()
    evicted = rig.policy.evict(SLOTS, ())
    assert evicted is not None
    assert {block_hash for block_hash, _ in evicted} == set(keys(SLOTS))
    for _, status in evicted:
        rig.backend.free(status)
    assert len(rig.policy) == 0
    rig.check_sums()


def test_a_block_that_was_stored_anew_is_not_said_to_leave(rig: Rig) -> None:
    take_away(rig, [0, 1])
    rig.maintain()
    (dropped,) = rig.policy.evict(1, set(keys(2))) or []
    rig.backend.free(dropped[1])
    assert rig.store([key(0)]) == [BlockOutcome.OK]
    rig.policy.touch([key(0)])
    evicted = rig.policy.evict(2, ())
    assert evicted is not None
    names = {block_hash for block_hash, _ in evicted}
    assert key(0) not in names and key(1) in names
    for _, status in evicted:
        rig.backend.free(status)
    assert held(rig, [0, 1]) == {0}
    rig.check_sums()


def test_between_lookup_and_load_it_is_a_miss(rig: Rig) -> None:
    rig.policy.get(key(5))
    take_away(rig, [5])
    rig.maintain()
    assert rig.load(key(5)) is None
    pinned = rig.pin(key(6))
    take_away(rig, [6])
    outcome, _ = rig.read_pinned(pinned)
    assert outcome is BlockOutcome.OK, "what was found before is read before its slot is reused"
    assert rig.store([key(200)]) == [BlockOutcome.OK]
    rig.check_sums()


def test_what_was_just_stored_and_not_looked_at_since(tmp_path: Path) -> None:
    rig = Rig(config_for([tmp_path], slots=SLOTS, per_segment=8))
    rig.store(keys(4))
    take_away(rig, [0, 1])
    rig.tier.directory.refresh()
    assert held(rig, range(4)) == {2, 3}
    evicted = rig.policy.evict(4, ())
    assert evicted is not None
    for _, status in evicted:
        rig.backend.free(status)
    rig.check_sums()
    again = rig.reopened()
    assert again.tier.report.was_clean and len(again.policy) == 0
    again.close()


class TakesAway(set[BlockHash]):
    """Protected blocks; when first asked, somebody takes everything out of the index."""

    def __init__(self, rig: Rig, numbers: range) -> None:
        super().__init__()
        self._rig, self._numbers = rig, numbers

    def __contains__(self, block_hash: object) -> bool:
        take_away(self._rig, self._numbers)
        return False


def test_while_they_are_being_evicted(tmp_path: Path) -> None:
    slots = 2 * REFRESH_EVERY_CHANGES
    rig = Rig(config_for([tmp_path], slots=slots, per_segment=16))
    rig.store_bit_by_bit(keys(slots))
    rig.tier.directory.refresh()
    evicted = rig.policy.evict(slots, TakesAway(rig, range(slots)))
    assert evicted is not None and len(rig.policy) == 0
    for _, status in evicted:
        rig.backend.free(status)
    rig.check_sums()
    assert set(rig.store(keys(slots))) == {BlockOutcome.OK}
    rig.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_close_counts_what_is_there(tmp_path: Path, policy: str) -> None:
    """What the policy still lists is put right when it opens again."""
    rig = filled(tmp_path, policy)
    take_away(rig, range(10))
    rig.close()
    again = Rig(rig.config, policy=policy)
    assert again.tier.report.was_clean and len(again.policy) == SLOTS - 10
    assert again.backend.get_num_free_blocks() == 10
    assert held(again, range(SLOTS)) == set(range(10, SLOTS))
    assert set(again.store_bit_by_bit(keys(100, 100 + 2 * SLOTS))) == {BlockOutcome.OK}
    again.check_sums()
    again.close()
    last = Rig(rig.config, policy=policy)
    assert last.tier.report.was_clean
    last.close()


def test_what_is_taken_from_who_has_closed(rig: Rig) -> None:
    """The list that it left is no longer right, and goes."""
    config = rig.config
    rig.close()
    env = lmdb.open(str(rig.tier.index.path), max_dbs=4)
    assert env.begin(db=env.open_db(b"meta")).get(b"state0")
    env.close()
    again = Rig(config)
    take_away(again, [3])
    again.close(clean=False)
    last = Rig(config)
    assert not last.tier.report.was_clean and last.backend.get_num_free_blocks() == 1
    last.close()


def test_not_of_another_epoch_and_not_another_one(rig: Rig) -> None:
    index = rig.tier.index
    entry = index.entry(key(0))
    assert entry is not None
    raw = entry.pack(key(0))
    assert index.take_away(index.epoch + 1, [(key(0), raw)]) == (CommitOutcome.STALE_EPOCH, 0)
    assert index.take_away(index.epoch, [(key(0), raw[:-1] + b"x")]) == (CommitOutcome.DONE, 0)
    assert held(rig, range(SLOTS)) == set(range(SLOTS))


def another_boot(rig: Rig) -> None:
    """The machine was started since somebody had it open."""
    env = lmdb.open(str(rig.tier.index.path), max_dbs=4)
    with env.begin(write=True, db=env.open_db(b"meta")) as txn:
        txn.put(b"boot", bytes(8) + b"another")
    env.close()


@pytest.mark.parametrize("is_asked", [False, True])
@pytest.mark.parametrize("is_clean", [False, True])
@pytest.mark.parametrize("is_power_lost", [False, True])
def test_after_a_loss_of_power_a_record_proves_nothing(
    tmp_path: Path, is_power_lost: bool, is_clean: bool, is_asked: bool
) -> None:
    """A record may be older than its entry: it is mended, in the background or when it matters."""
    rig = filled(tmp_path)
    rig.close(is_clean)
    if is_power_lost:
        another_boot(rig)
    executor = SteppingExecutor()
    rig = Rig(rig.config, executor)
    older = rig.tier.segments.record(1)
    assert older is not None
    rig.tier.segments.write_records(0, [older.pack()])  # slot 0 has lost its own
    take_away(rig, [2])
    rig.maintain()
    assert len(rig.policy.coldest(SLOTS)) == (SLOTS - 2 if is_power_lost else SLOTS)
    if is_power_lost:
        if is_asked:
            rig.backend.get_num_free_blocks()
            executor.step(-1)
        else:
            rig.tier.directory.take_unknown()
            executor.run_all()
        rig.maintain()
        assert len(rig.policy.coldest(SLOTS)) == SLOTS
        record = rig.tier.segments.record(0)
        assert record is not None and record.key == key(0)
        assert held(rig, range(SLOTS)) == set(range(SLOTS)) - {2}
        rig.check_sums()
        executor.run_all()
        assert set(rig.store(keys(100, 108))) == {BlockOutcome.OK}
    rig.close(clean=False)
    executor = SteppingExecutor()
    again = Rig(rig.config, executor)
    assert len(executor) == 1, "the index is read ahead; records are compared once per boot"
    again.close()
