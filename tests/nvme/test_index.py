"""The index by itself."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import lmdb
import numpy as np
import pytest
from support.nvme_rig import key

from kvcascade.errors import CorruptionError, FormatError
from kvcascade.tiers.base import BlockHash
from kvcascade.tiers.nvme.index import index_environment
from kvcascade.tiers.nvme.index.block_index import (
    NO_PAGES_PAUSE_S,
    NO_PAGES_TRIES,
    BlockIndex,
    Session,
    attach_index,
    open_index,
)
from kvcascade.tiers.nvme.index.clean_close import SavedSlots
from kvcascade.tiers.nvme.index.index_environment import open_environment
from kvcascade.tiers.nvme.index.index_file import DATA_NAME
from kvcascade.tiers.nvme.index.index_keys import IndexIdentity
from kvcascade.tiers.nvme.index.index_port import CommitOutcome, Removal
from kvcascade.tiers.nvme.segments.format import IndexEntry
from kvcascade.tiers.nvme.writer.capacity import index_bytes

IDENTITY = IndexIdentity(b"f" * 32, 4096, 8)
CAPACITY = 64
MAP_BYTES = 1 << 24


def entry(slot: int, generation: int = 1) -> IndexEntry:
    return IndexEntry(slot, 4096, 1234, generation)


class Headless:
    """An environment that could not write its head once: it takes no changes any more."""

    def __init__(self, env: lmdb.Environment) -> None:
        self.env = env
        self.has_failed = False

    def begin(self, *databases: Any, **options: Any) -> Any:
        if self.has_failed and options.get("write"):
            raise lmdb.PanicError("the environment is in a fatal state")
        return self.env.begin(*databases, **options)

    def __getattr__(self, name: str) -> object:
        return getattr(self.env, name)


def opened(
    path: Path,
    wanted_epoch: int = 0,
    identity: IndexIdentity = IDENTITY,
    map_bytes: int = MAP_BYTES,
) -> BlockIndex:
    return begun(path, wanted_epoch, identity, map_bytes)[0]


def begun(
    path: Path,
    wanted_epoch: int = 0,
    identity: IndexIdentity = IDENTITY,
    map_bytes: int = MAP_BYTES,
    state: int = 0,
    is_alone: bool = True,
) -> tuple[BlockIndex, Session]:
    index = open_index(path, CAPACITY, map_bytes, is_durable=False)
    try:
        session = index.load(
            identity, wanted_epoch, may_create=True, state=state, is_alone=is_alone
        )
    except BaseException:
        index.abandon()
        raise
    return index, session


@pytest.fixture
def index(tmp_path: Path) -> Iterator[BlockIndex]:
    index = opened(tmp_path)
    yield index
    index.abandon()


def test_a_commit_is_seen_after_refresh(index: BlockIndex) -> None:
    assert index.commit(0, (), [(key(1), entry(5))]) is CommitOutcome.DONE
    assert index.slot_of(key(1)) == -1
    index.refresh()
    assert index.slot_of(key(1)) == 5
    assert index.entry(key(1)) == entry(5)
    assert index.value_of(key(1)) == entry(5).pack(key(1))


def test_a_removal_names_what_it_means(index: BlockIndex) -> None:
    index.commit(0, (), [(key(1), entry(5, generation=7))])
    index.commit(0, [Removal(key(1), 5, 6), Removal(key(1), 4, 7), Removal(key(2), 5, 7)])
    assert index.entry(key(1)) is not None
    index.commit(0, [Removal(key(1), 5, 7)])
    assert index.entry(key(1)) is None


def test_keys_that_cannot_be_looked_up_are_misses(index: BlockIndex) -> None:
    for odd in (b"", b"x" * 600):
        assert index.slot_of(BlockHash(odd)) == -1
        assert index.entry(BlockHash(odd)) is None


def test_a_later_epoch_empties_the_table_and_an_earlier_one_is_refused(index: BlockIndex) -> None:
    index.commit(0, (), [(key(1), entry(1))])
    assert index.commit(2, (), [(key(2), entry(2))]) is CommitOutcome.DONE
    assert index.entry(key(1)) is None and index.entry(key(2)) is not None
    assert index.commit(1, (), [(key(3), entry(3))]) is CommitOutcome.STALE_EPOCH
    assert index.entry(key(3)) is None
    index.refresh()
    assert index.seen_epoch() == 2


def test_an_epoch_that_was_wanted_but_not_committed_counts(tmp_path: Path) -> None:
    index = opened(tmp_path)
    index.commit(0, (), [(key(1), entry(1))])
    index.abandon()
    index = opened(tmp_path, wanted_epoch=2**60)
    assert index.epoch == 1 and index.entries_at_open == 0
    index.abandon()


def test_scan_keeps_the_later_of_two_entries_on_a_slot(index: BlockIndex) -> None:
    index.commit(0, (), [(key(1), entry(5, 10)), (key(2), entry(5, 11)), (key(3), entry(6, 1))])
    index.commit(0, (), [(key(4), entry(CAPACITY, 99)), (key(5), entry(5, 2))])
    assert index.scan().tolist() == [5, 6]
    assert {k for k, _ in index.keys()} == {key(2), key(3)}


def test_an_epoch_that_others_use_is_taken_as_it_is(tmp_path: Path) -> None:
    index, _ = begun(tmp_path, wanted_epoch=7, is_alone=False)
    assert index.epoch == 7
    index.abandon()


def test_what_a_process_saved_comes_back_once(tmp_path: Path) -> None:
    index, session = begun(tmp_path)
    assert (session.number, session.use, session.saved) == (1, 1, None)
    index.commit(0, (), [(key(1), entry(1))])
    index.close(SavedSlots(3, 1, np.array([[2, 9]], dtype=np.int32)), read_bytes=5)
    index, session = begun(tmp_path, state=1)
    assert (session.number, session.use, session.saved) == (2, 1, None)
    index.close(SavedSlots(3, 0, np.zeros((0, 2), dtype=np.int32)))
    index, session = begun(tmp_path)
    assert (session.number, session.use) == (3, 2) and index.entries_at_open == 1
    assert session.saved is not None and (session.saved.epoch, session.saved.used) == (3, 1)
    assert session.saved.free.tolist() == [[2, 9]]
    assert index.totals == (4096, 5)
    index.abandon()
    index, session = begun(tmp_path)
    assert session.saved is None
    index.abandon()


def test_the_first_of_two_processes_wins(index: BlockIndex) -> None:
    index.commit(0, (), [(key(1), entry(5)), (key(2), entry(6)), (key(3), entry(7))])
    held: set[BlockHash] = set()
    puts = [(key(i), entry(10 + i, 9)) for i in range(5)]
    outcome = index.commit(0, [Removal(key(1), 5, 1)], puts, lambda slot: slot == 6, held)
    assert outcome is CommitOutcome.DONE and held == {key(3)}
    assert [e.slot for i in range(5) if (e := index.entry(key(i)))] == [10, 11, 12, 7, 14]


def test_nothing_is_seen_without_a_hold_and_all_with_the_next(index: BlockIndex) -> None:
    index.commit(0, (), [(key(1), entry(5))])
    index.release()
    index.release()
    assert index.slot_of(key(1)) == -1 and index.seen_epoch() == -1
    index.refresh()
    assert index.slot_of(key(1)) == 5


def test_only_what_is_judged_is_dropped(index: BlockIndex) -> None:
    puts = [(key(1), entry(5, 10)), (key(2), entry(5, 11)), (key(3), entry(9, 1))]
    puts += [(key(4), entry(9, 2)), (key(5), entry(20)), (key(6), entry(CAPACITY))]
    index.commit(0, (), puts)
    mine, lost = np.zeros(CAPACITY, np.bool_), np.zeros(CAPACITY, np.bool_)
    mine[:8], lost[16:24] = True, True
    assert index.scan(mine, lost, and_beyond=False).tolist() == [5]
    assert {k for k, _ in index.keys()} == {key(2), key(3), key(4), key(6)}


def test_another_namespace_is_refused(tmp_path: Path) -> None:
    opened(tmp_path).abandon()
    with pytest.raises(CorruptionError, match="another namespace"):
        opened(tmp_path, identity=IndexIdentity(b"g" * 32, 4096, 8))


def test_an_unknown_version_is_refused(tmp_path: Path) -> None:
    index = opened(tmp_path)
    with index._env.begin(write=True, db=index._meta) as txn:
        txn.put(b"format", (99).to_bytes(8, "little"))
    index.abandon()
    with pytest.raises(FormatError, match="version 99"):
        opened(tmp_path)


def test_a_map_that_is_full_has_no_pages(tmp_path: Path) -> None:
    index = opened(tmp_path, map_bytes=1 << 16)
    pauses: list[float] = []
    index.pause = pauses.append
    rng = random.Random(1)
    puts = [(BlockHash(rng.randbytes(36)), entry(i % CAPACITY)) for i in range(2000)]
    assert index.commit(0, (), puts) is CommitOutcome.NO_PAGES
    assert pauses == [NO_PAGES_PAUSE_S] * (NO_PAGES_TRIES - 1)
    assert index.count() == 0
    assert index.commit(0, (), puts[:10]) is CommitOutcome.DONE
    index.abandon()


def test_a_commit_waits_for_pages_until_nobody_reads_them(tmp_path: Path) -> None:
    """Within its capacity, and beside somebody who is in a step for many commits."""
    index = opened(tmp_path, map_bytes=index_bytes(CAPACITY))
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) % 2 == 0:
            index.refresh()

    index.pause = pause
    for turn in range(1000):
        puts = [(key(i), entry(i, turn + 1)) for i in range(CAPACITY)]
        assert index.commit(0, (), puts) is CommitOutcome.DONE
    assert pauses and index.count() == CAPACITY
    index.abandon()


def test_who_looks_through_all_of_it_keeps_nobodys_pages(tmp_path: Path) -> None:
    """A search for slots takes seconds where there are millions, and commits wait half of one."""
    index = opened(tmp_path, map_bytes=index_bytes(CAPACITY))
    index.pause = lambda seconds: pytest.fail("a commit found no page")
    puts = [(key(i), entry(i)) for i in range(CAPACITY)]
    assert index.commit(0, (), puts) is CommitOutcome.DONE
    index.release()
    for found in index.keys():
        assert found in puts and index.commit(0, (), puts) is CommitOutcome.DONE
    for slots, generations in index.slots_and_generations():
        assert set(slots.tolist()) == set(range(CAPACITY)) and set(generations.tolist()) == {1}
        for _ in range(CAPACITY):
            assert index.commit(0, (), puts) is CommitOutcome.DONE
    index.abandon()


def test_who_closes_keeps_nobodys_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the disk, while others may have much to commit."""
    index = opened(tmp_path, map_bytes=index_bytes(CAPACITY))
    index.pause = lambda seconds: pytest.fail("a commit found no page")
    puts = [(key(i), entry(i)) for i in range(CAPACITY)]
    assert index.commit(0, (), puts) is CommitOutcome.DONE
    index.refresh()
    outcomes: set[CommitOutcome] = set()

    def sync() -> None:
        outcomes.update(index.commit(0, (), puts) for _ in range(CAPACITY))

    monkeypatch.setattr(index, "sync", sync)
    index.close(None)
    assert outcomes == {CommitOutcome.DONE}


@pytest.mark.parametrize("at_a_time", [1, CAPACITY // 2 - 1, CAPACITY // 2, CAPACITY, CAPACITY + 1])
def test_nothing_is_passed_over_or_seen_twice(
    index: BlockIndex, monkeypatch: pytest.MonkeyPatch, at_a_time: int
) -> None:
    monkeypatch.setattr(index_environment, "BATCH_ENTRIES", at_a_time)
    assert not list(index.keys()) and not list(index.slots_and_generations())
    index.commit(0, (), [(key(i), entry(i)) for i in range(CAPACITY)])
    assert [k for k, _ in index.keys()] == sorted(key(i) for i in range(CAPACITY))
    slots = [slot for slots, _ in index.slots_and_generations() for slot in slots.tolist()]
    assert sorted(slots) == list(range(CAPACITY))


def test_a_head_that_could_not_be_written_is_remembered(tmp_path: Path) -> None:
    headless = Headless(open_environment(tmp_path, MAP_BYTES, is_durable=False))
    index = BlockIndex(cast(lmdb.Environment, headless), tmp_path, CAPACITY)
    index.load(IDENTITY, 0, may_create=True)
    assert index.commit(0, (), [(key(1), entry(1))]) is CommitOutcome.DONE
    assert not index.has_panicked
    headless.has_failed = True
    assert index.commit(0, (), [(key(2), entry(2))]) is CommitOutcome.IO_ERROR
    assert index.has_panicked
    assert index.entry(key(1)) == entry(1), "what is there is still found"
    index.abandon()


def test_what_cannot_be_attached_to_is_not_left_open(tmp_path: Path) -> None:
    opened(tmp_path).close(None)
    data = tmp_path / DATA_NAME
    whole = data.read_bytes()
    data.write_bytes(whole[:8192] + bytes(len(whole) - 8192))  # the two meta pages are right
    with pytest.raises(CorruptionError) as _:  # which holds on to all that the attempt made
        attach_index(tmp_path, CAPACITY, MAP_BYTES, is_durable=False)
    data.write_bytes(whole)
    attach_index(tmp_path, CAPACITY, MAP_BYTES, is_durable=False).abandon()
