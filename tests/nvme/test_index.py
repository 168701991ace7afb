"""The index by itself."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.nvme_rig import key

from kvcascade.errors import CorruptionError, FormatError
from kvcascade.tiers.base import BlockHash
from kvcascade.tiers.nvme.format import IndexEntry
from kvcascade.tiers.nvme.index import (
    BlockIndex,
    IndexIdentity,
    Removal,
    open_index,
)
from kvcascade.tiers.nvme.index_errors import CommitOutcome

IDENTITY = IndexIdentity(b"f" * 32, 4096, 8)
CAPACITY = 64


def entry(slot: int, generation: int = 1) -> IndexEntry:
    return IndexEntry(slot, 4096, 1234, generation)


def opened(path: Path, wanted_epoch: int = 0, identity: IndexIdentity = IDENTITY) -> BlockIndex:
    index = open_index(path, CAPACITY, is_durable=False)
    try:
        index.load(identity, wanted_epoch, may_create=True)
    except BaseException:
        index.abandon()
        raise
    return index


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


def test_free_extents_come_back(tmp_path: Path) -> None:
    index = opened(tmp_path)
    assert not index.needs_scan
    index.commit(0, (), [(key(1), entry(1))])
    index.close(np.array([[2, 9]], dtype=np.int32), read_bytes=5)
    index = opened(tmp_path)
    assert index.was_clean and index.entries_at_open == 1
    assert index.saved_free_extents().tolist() == [[2, 9]]
    assert index.totals == (4096, 5)
    index.abandon()
    index = opened(tmp_path)
    assert not index.was_clean and index.needs_scan
    index.abandon()


def test_another_namespace_is_refused(tmp_path: Path) -> None:
    opened(tmp_path).abandon()
    with pytest.raises(CorruptionError, match="another namespace"):
        opened(tmp_path, identity=IndexIdentity(b"g" * 32, 4096, 8))


def test_an_unknown_version_is_refused(tmp_path: Path) -> None:
    index = opened(tmp_path)
    with index._env.begin(write=True, db=index._meta) as txn:
        txn.put(b"format", (2).to_bytes(8, "little"))
    index.abandon()
    with pytest.raises(FormatError, match="version 2"):
        opened(tmp_path)


def test_a_map_that_is_full_is_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcascade.tiers.nvme.index.MAP_FIXED_BYTES", 1 << 16)
    monkeypatch.setattr("kvcascade.tiers.nvme.index.MAP_BYTES_PER_SLOT", 0)
    index = opened(tmp_path)
    rng = random.Random(1)
    puts = [(BlockHash(rng.randbytes(36)), entry(i % CAPACITY)) for i in range(2000)]
    assert index.commit(0, (), puts) is CommitOutcome.NO_SPACE
    assert index.count() == 0
    assert index.commit(0, (), puts[:10]) is CommitOutcome.DONE
    index.abandon()
