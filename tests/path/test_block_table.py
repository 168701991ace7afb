"""The block table in LMDB, its twin in memory, and that of replays: one contract; damage and full
disks for LMDB."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import struct
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import lmdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.memory_block_table import MemoryBlockDisk, MemoryBlockTable

from kvcascade.errors import CorruptionError, FormatError, KVCascadeError, NoSpaceError, TierIOError
from kvcascade.tiers.nvme.index import index_pages
from kvcascade.tiers.nvme.index.clean_close import note_epoch, noted_epoch, read_mark
from kvcascade.tiers.nvme.path import block_table, lmdb_block_table
from kvcascade.tiers.nvme.path.block_table import (
    MAX_CHURN_PAGES,
    MAX_COMMIT_BLOCKS,
    BlockTable,
    Changes,
    Entry,
    block_table_bytes,
)
from kvcascade.tiers.nvme.path.lmdb_block_table import LmdbBlockTable, open_block_table
from kvcascade.tiers.nvme.path.path_messages import Committed
from kvcascade.tiers.nvme.path.presence_table import hash_of
from kvcascade.tools.replay.memory_path import MemoryBlocks

SLOTS = 400
IDENTITY = b"namespace"
KEYS = [bytes([at]) * 36 for at in range(12)]


class Open(Protocol):
    """Opens the table again, over what the last one left."""

    def __call__(self) -> BlockTable: ...


def lmdb_at(folder: Path, **options: Any) -> LmdbBlockTable:
    folder.mkdir(exist_ok=True, parents=True)
    size = block_table_bytes(SLOTS)
    return open_block_table(folder, size, IDENTITY, **{"is_durable": False, **options})


@pytest.fixture(params=["lmdb", "memory", "replay"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    if request.param == "lmdb":
        return lambda: lmdb_at(tmp_path / "blocks", wall_clock=lambda: 1e9)
    if request.param == "replay":
        kept = MemoryBlocks(wall_clock=lambda: 1e9)
        return lambda: kept
    disk = MemoryBlockDisk()
    return lambda: MemoryBlockTable(disk, IDENTITY, wall_clock=lambda: 1e9)


def scanned(table: BlockTable) -> dict[int, Entry]:
    found: dict[int, Entry] = {}
    for batch in table.scan():
        rows = zip(batch.hashes.tolist(), batch.slots, batch.checksums, strict=True)
        found |= {hashed: Entry(int(slot), int(checksum)) for hashed, slot, checksum in rows}
    return found


def keys_at(table: BlockTable, slots: Sequence[int]) -> list[bytes]:
    """The keys that the table names for these slots, which are cleared."""
    applied = table.apply(Changes(table.epoch, cleared=slots))
    return [key for key, _ in applied.removed]


def test_what_is_put_is_found_again(reopen: Open) -> None:
    table = reopen()
    puts = [(key, slot, 1 << 63 | slot) for slot, key in enumerate(KEYS)]
    applied = table.apply(Changes(0, puts, written_bytes=120, read_bytes=3))
    assert applied.outcome is Committed.OK and not applied.already and not applied.removed
    assert applied.journal is not None and applied.journal == table.last_changes()
    assert applied.journal.stored == tuple((hash_of(key), s, c) for key, s, c in puts)
    table.abandon()
    table = reopen()
    assert table.get_many(KEYS) == [Entry(slot, 1 << 63 | slot) for slot in range(12)]
    assert table.get_many([b"absent"]) == [None] and table.get_many([]) == []
    assert scanned(table) == {hash_of(k): Entry(s, c) for k, s, c in puts}
    assert table.count() == 12 and table.commit_number == applied.journal.number == 1
    assert table.last_changes() == applied.journal
    assert table.totals == (120, 3) and table.day_totals().written == 120
    assert table.keys_after(b"", 2) == [
        (KEYS[0], Entry(0, 1 << 63)),
        (KEYS[1], Entry(1, 1 << 63 | 1)),
    ]
    assert [key for key, _ in table.keys_after(KEYS[1], 100)] == KEYS[2:]
    assert keys_at(table, [0, 11, 12]) == [KEYS[0], KEYS[11]]
    table.close()


def test_a_key_that_exists_stays(reopen: Open) -> None:
    table = reopen()
    table.apply(Changes(0, [(KEYS[0], 1, 10)]))
    applied = table.apply(Changes(0, [(KEYS[1], 2, 20), (KEYS[0], 3, 30), (KEYS[1], 4, 40)]))
    assert applied.already == {1, 2}
    assert table.get_many(KEYS[:2]) == [Entry(1, 10), Entry(2, 20)]
    again = table.apply(Changes(0, [(KEYS[0], 3, 30)]))
    assert again.already == {0} and again.journal is None and table.commit_number == 2
    assert keys_at(table, [1, 2, 3, 4]) == KEYS[:2]
    table.close()


def test_blocks_are_removed_by_key_and_by_slot(reopen: Open) -> None:
    table = reopen()
    table.apply(Changes(0, [(key, slot, slot) for slot, key in enumerate(KEYS)]))
    applied = table.apply(
        Changes(0, [(KEYS[0], 2, 9)], removals=[KEYS[0], KEYS[0], b"absent"], cleared=[1, 2, 99])
    )
    assert sorted(applied.removed) == [(KEYS[0], 0), (KEYS[1], 1), (KEYS[2], 2)]
    assert applied.journal is not None and len(applied.journal.removed) == 3
    assert table.get_many(KEYS[:4]) == [Entry(2, 9), None, None, Entry(3, 3)]
    assert keys_at(table, range(4)) == [KEYS[0], KEYS[3]]
    table.close()


def test_a_put_in_a_slot_in_use_removes_its_block(reopen: Open) -> None:
    table = reopen()
    table.apply(Changes(0, [(KEYS[0], 7, 1)]))
    applied = table.apply(Changes(0, [(KEYS[1], 7, 2)]))
    assert applied.removed == ((KEYS[0], 7),)
    assert applied.journal is not None and applied.journal.removed == ((hash_of(KEYS[0]), 7),)
    assert table.get_many(KEYS[:2]) == [None, Entry(7, 2)] and keys_at(table, [7]) == [KEYS[1]]
    table.close()


def test_a_reset_is_durable_and_refuses_the_epoch_before(reopen: Open) -> None:
    table = reopen()
    table.apply(Changes(0, [(key, slot, slot) for slot, key in enumerate(KEYS)], written_bytes=9))
    applied = table.reset(3)
    assert applied.journal is not None and applied.journal.is_reset and applied.journal.epoch == 3
    assert (table.epoch, table.count(), scanned(table)) == (3, 0, {})
    assert table.reset(3).outcome is Committed.STALE
    assert table.apply(Changes(0, [(KEYS[0], 0, 0)])).outcome is Committed.STALE
    assert table.apply(Changes(4, [(KEYS[0], 0, 0)])).outcome is Committed.STALE
    table.abandon()
    table = reopen()
    assert table.epoch == 3 and table.last_changes() == applied.journal and table.totals == (9, 0)
    assert table.apply(Changes(3, cleared=range(8))).removed == ()
    assert table.apply(Changes(3, [(KEYS[0], 0, 0)])).outcome is Committed.OK
    table.close()


keys = st.sampled_from(KEYS)
slots = st.integers(0, 7)
commits = st.lists(
    st.builds(
        Changes,
        st.just(0),
        st.lists(st.tuples(keys, slots, st.integers(0, (1 << 64) - 1)), max_size=5),
        st.lists(keys, max_size=3),
        st.lists(slots, max_size=3),
        st.integers(0, 5),
    ),
    max_size=8,
)


@given(commits)
@settings(
    max_examples=80,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_lmdb_equals_its_twin(tmp_path: Path, drawn: list[Changes]) -> None:
    folder = tmp_path / "equal"
    shutil.rmtree(folder, ignore_errors=True)
    real, twin = (
        lmdb_at(folder, wall_clock=lambda: 0.0),
        MemoryBlockTable(MemoryBlockDisk(), IDENTITY),
    )
    for changes in drawn:
        one, other = real.apply(changes), twin.apply(changes)
        assert (one.outcome, one.already) == (other.outcome, other.already)
        assert sorted(one.removed) == sorted(other.removed)
        assert (one.journal is None) is (other.journal is None)
        assert real.get_many(KEYS) == twin.get_many(KEYS)
        assert scanned(real) == scanned(twin)
        assert real.commit_number == twin.commit_number and real.totals == twin.totals
    assert keys_at(real, range(8)) == keys_at(twin, range(8))
    real.abandon()


def filled(folder: Path, count: int = 300, **options: Any) -> list[bytes]:
    """Close a table of this many blocks, the slot of each being its number."""
    table = lmdb_at(folder, **options)
    keys = [random.Random(at).randbytes(36) for at in range(count)]
    for start in range(0, count, 50):
        puts = [(key, start + at, start + at) for at, key in enumerate(keys[start : start + 50])]
        assert table.apply(Changes(0, puts)).outcome is Committed.OK
    table.close()
    return keys


def test_another_namespace_and_another_version_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    filled(folder)
    with pytest.raises(CorruptionError, match="another namespace"):
        open_block_table(folder, block_table_bytes(SLOTS), b"other", is_durable=False)
    table = lmdb_at(folder)
    with table._env.begin(write=True, db=table._meta) as txn:
        txn.put(b"format", (4).to_bytes(8, "little"))
    table.close()
    with pytest.raises(FormatError, match="format version 4"):
        lmdb_at(folder)


def test_a_page_that_the_disk_cannot_deliver_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mapped, it would end the process that touches it, and then the next one."""
    folder = tmp_path / "blocks"
    filled(folder)

    def failing(descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        index_pages.check_pages(folder, is_trusted=False)


@pytest.mark.parametrize("seed", range(60))
def test_flipped_bits_cost_blocks_or_are_refused(tmp_path: Path, seed: int) -> None:
    """A read gives the written entry or none, or the opening names the remedy."""
    folder, rng = tmp_path / "blocks", random.Random(seed)
    keys = filled(folder)
    data = folder / "data.mdb"
    used = 40 * 4096
    with data.open("r+b") as file:
        for _ in range(rng.choice((1, 1, 3))):
            offset = rng.randrange(used)
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))
    try:
        table = lmdb_at(folder)
    except (CorruptionError, FormatError) as error:
        assert "remove th" in str(error)
        return
    try:
        for slot, key in enumerate(keys):
            assert table.get_many([key])[0] in (None, Entry(slot, slot))
        assert all(entry == Entry(entry.slot, entry.slot) for entry in scanned(table).values())
        table.last_changes()
        table.apply(Changes(table.epoch, [(keys[0], 0, 0)], keys[1:5], range(5, 9)))
    except KVCascadeError as error:
        assert "remove th" in str(error)
    finally:
        table.abandon()


@pytest.mark.parametrize("epoch", [(1 << 63) - 1, (1 << 64) - 1])
def test_an_epoch_that_no_record_can_hold_is_damaged(tmp_path: Path, epoch: int) -> None:
    table = lmdb_at(tmp_path / "blocks")
    with table._env.begin(write=True, db=table._meta) as txn:
        txn.put(b"epoch", epoch.to_bytes(8, "little"))
    table.close()
    with pytest.raises(CorruptionError, match=f"{epoch}.*remove the directory"):
        lmdb_at(tmp_path / "blocks")


def damage_entry(table: LmdbBlockTable, key: bytes) -> None:
    with table._env.begin(write=True, db=table._blocks) as txn:
        value = bytearray(txn.get(key, b""))
        value[0] ^= 1
        txn.put(key, bytes(value))


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
def test_a_list_of_blocks_goes_on_after_damaged_entries(tmp_path: Path, limit: int) -> None:
    table = lmdb_at(tmp_path / "blocks")
    table.apply(Changes(0, [(key, slot, slot) for slot, key in enumerate(KEYS)]))
    for at in (0, 2, 3, 4, 9, 11):
        damage_entry(table, KEYS[at])
    found: list[bytes] = []
    while batch := table.keys_after(found[-1] if found else b"", limit):
        found += [key for key, _ in batch]
    assert found == [KEYS[at] for at in (1, 5, 6, 7, 8, 10)]
    table.close()


def test_keys_out_of_order_are_damage_and_no_endless_list(tmp_path: Path) -> None:
    table = lmdb_at(tmp_path / "blocks")
    table.apply(Changes(0, [(key, slot, slot) for slot, key in enumerate(KEYS)]))
    for key in KEYS:
        damage_entry(table, key)
    assert table.keys_after(b"", 1) == []
    table.close()
    data = tmp_path / "blocks" / "data.mdb"
    data.write_bytes(data.read_bytes().replace(KEYS[-1], KEYS[0][1:] + b"\1"))
    table = lmdb_at(tmp_path / "blocks")
    with pytest.raises(CorruptionError, match="out of order"):
        table.keys_after(b"", 3)
    with pytest.raises(CorruptionError, match="out of order"):
        scanned(table)
    table.abandon()


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
def test_a_list_with_one_damaged_key_ends(tmp_path: Path, limit: int) -> None:
    """A list goes on from the last key of a part, which may be the damaged one."""
    table = lmdb_at(tmp_path / "blocks")
    table.apply(Changes(0, [(key, slot, slot) for slot, key in enumerate(KEYS)]))
    table.close()
    data = tmp_path / "blocks" / "data.mdb"
    data.write_bytes(data.read_bytes().replace(KEYS[5], b"\xff" + KEYS[5][1:]))
    table = lmdb_at(tmp_path / "blocks")
    lasts = [b""]
    with suppress(CorruptionError):
        while batch := table.keys_after(lasts[-1], limit):
            lasts.append(batch[-1][0])
            assert lasts[-1] > lasts[-2]
    assert lasts[1:]
    table.abandon()


def test_a_list_reads_many_damaged_entries_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = lmdb_at(tmp_path / "blocks")
    keys = [at.to_bytes(36, "big") for at in range(SLOTS)]
    table.apply(Changes(0, [(key, slot, slot) for slot, key in enumerate(keys)]))
    for key in keys[:-1]:
        damage_entry(table, key)
    limits: list[int] = []
    batch_after = table._batch_after

    def counted(key: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        limits.append(limit)
        return batch_after(key, limit)

    monkeypatch.setattr(table, "_batch_after", counted)
    assert table.keys_after(b"", 1) == [(keys[-1], Entry(SLOTS - 1, SLOTS - 1))]
    assert len(limits) == 1
    table.close()


def test_a_damaged_entry_is_absent_and_may_be_put_again(tmp_path: Path) -> None:
    table = lmdb_at(tmp_path / "blocks")
    table.apply(Changes(0, [(key, slot, slot) for slot, key in enumerate(KEYS)]))
    damage_entry(table, KEYS[4])
    assert table.get_many([KEYS[4]]) == [None]
    assert len(scanned(table)) == 11
    assert [key for key, _ in table.keys_after(KEYS[3], 1)] == [KEYS[5]]
    applied = table.apply(Changes(0, [(KEYS[4], 50, 5)]))
    assert not applied.already and table.get_many([KEYS[4]]) == [Entry(50, 5)]
    damage_entry(table, KEYS[5])
    applied = table.apply(Changes(0, cleared=[5, 4]))
    # The slot of the first has its key still, and that key's entry names another slot.
    assert applied.removed == ((KEYS[5], 5),) and table.get_many([KEYS[4]]) == [Entry(50, 5)]
    table.close()


def test_a_full_map_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    folder.mkdir()
    table = open_block_table(folder, 96 << 10, IDENTITY, is_durable=False)
    table.apply(Changes(0, [(KEYS[0], 0, 0)]))
    many = [(at.to_bytes(36, "big"), at, at) for at in range(1, 5000)]
    applied = table.apply(Changes(0, many, removals=[KEYS[0]]))
    assert applied.outcome is Committed.NO_SPACE and applied.journal is None
    assert table.get_many(KEYS[:2]) == [Entry(0, 0), None]
    assert table.count() == 1 and table.commit_number == 1
    assert table.apply(Changes(0, [(KEYS[1], 1, 1)])).outcome is Committed.OK
    table.close()


@pytest.mark.parametrize("batch", [16, 512])
def test_the_map_holds_every_slot_under_churn_and_a_reset(tmp_path: Path, batch: int) -> None:
    slots = 5000
    table = open_block_table(tmp_path, block_table_bytes(slots), IDENTITY, is_durable=False)
    rng = random.Random(1)
    for epoch in range(2):
        for start in (*range(0, slots, batch), *range(0, slots, batch)):
            part = range(start, min(start + batch, slots))
            puts = [(rng.randbytes(36), slot, slot) for slot in part]
            applied = table.apply(Changes(epoch, puts, cleared=part))
            assert applied.outcome is Committed.OK
        assert table.count() == slots
        assert table.reset(epoch + 1).outcome is Committed.OK
    table.close()


def made_with_pages(folder: Path, page_bytes: int) -> None:
    """Make an empty table as a machine whose system has pages of this size makes it."""
    lmdb_block_table._create(folder, 1 << 20)
    with (folder / "data.mdb").open("r+b") as file:
        heads = [bytearray(file.read(4096)) for _ in range(2)]
        file.truncate(0)
        for page, head in enumerate(heads):
            struct.pack_into("<I", head, 40, page_bytes)
            file.seek(page * page_bytes)
            file.write(head.ljust(page_bytes, b"\0"))


@pytest.mark.parametrize("page_bytes", [4096, 16384, 32768])
def test_pages_of_any_size_have_room_for_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page_bytes: int
) -> None:
    """A sixteenth of the largest commit, and a table in proportion. The next machine may have
    smaller pages."""
    slots, batch = 32_000, MAX_COMMIT_BLOCKS // 16
    monkeypatch.setattr(block_table, "MAX_CHURN_PAGES", MAX_CHURN_PAGES // 16)
    size, rng = block_table_bytes(slots, page_bytes), random.Random(1)
    made_with_pages(tmp_path, page_bytes)
    table = open_block_table(tmp_path, size, IDENTITY, is_durable=False)
    for commit in range(slots // batch + 10):
        is_full = commit >= slots // batch
        cleared = rng.sample(range(slots), batch) if is_full else ()
        puts = [
            (rng.randbytes(36), slot, 1)
            for slot in cleared or range(commit * batch, (commit + 1) * batch)
        ]
        assert table.apply(Changes(0, puts, cleared=cleared)).outcome is Committed.OK
    table.abandon()
    table = open_block_table(tmp_path, size, IDENTITY, is_durable=False)
    assert table.count() == slots
    table.close()


def test_larger_pages_than_lmdb_makes_are_refused(tmp_path: Path) -> None:
    made_with_pages(tmp_path, 65536)
    with pytest.raises(CorruptionError, match="remove the directory"):
        open_block_table(tmp_path, 1 << 20, IDENTITY, is_durable=False)


@pytest.mark.parametrize(
    ("slots", "size"), [(SLOTS, 2 << 20), (5000, 8 << 20), (500_000, 188 << 20)]
)
def test_pages_of_4_kib_take_what_they_took(slots: int, size: int) -> None:
    assert block_table_bytes(slots, 4096) == size


def test_a_full_tier_is_opened_after_any_end(tmp_path: Path) -> None:
    """Large commits free many pages. The list of these lies in pages that had other uses, of which
    LMDB leaves two bytes in their heads."""
    slots, batch = 20_000, 1024
    size, commits = block_table_bytes(slots + batch), 3 * slots // batch
    table = open_block_table(tmp_path, size, IDENTITY, is_durable=False)
    for commit in range(commits):
        numbers = range(commit * batch, (commit + 1) * batch)
        puts = [(random.Random(number).randbytes(36), number % slots, number) for number in numbers]
        cleared = [slot for _, slot, _ in puts] if numbers.stop > slots else []
        applied = table.apply(Changes(0, puts, cleared=cleared, written_bytes=1))
        assert applied.outcome is Committed.OK
        if commit % 10 == 9:
            table.abandon()
            table = open_block_table(tmp_path, size, IDENTITY, is_durable=False, is_same_boot=False)
    assert table.count() == slots
    table.close()


def test_an_entry_of_before_a_reset_is_absent(tmp_path: Path) -> None:
    """A loss of power can leave a page as it was before the reset."""
    table = lmdb_at(tmp_path / "blocks")
    assert table.apply(Changes(0, [(KEYS[0], 7, 70)])).outcome is Committed.OK
    with table._env.begin(db=table._blocks) as txn:
        former = bytes(txn.get(KEYS[0], b""))
    assert table.reset(1).outcome is Committed.OK
    assert table.apply(Changes(1, [(KEYS[1], 8, 80)])).outcome is Committed.OK
    with table._env.begin(write=True, db=table._blocks) as txn:
        txn.put(KEYS[0], former)
    assert table.get_many(KEYS[:2]) == [None, Entry(8, 80)]
    assert scanned(table) == {hash_of(KEYS[1]): Entry(8, 80)}
    table.close()


@pytest.mark.parametrize("is_noted", [True, False])
def test_an_index_of_another_epoch_than_the_noted_one_begins_anew(
    tmp_path: Path, is_noted: bool
) -> None:
    """A loss of power left pages of before a reset, or a development version noted no epoch."""
    folder = tmp_path / "blocks"
    filled(folder)
    former = (folder / "data.mdb").read_bytes()
    table = lmdb_at(folder)
    assert table.reset(1).outcome is Committed.OK
    assert table.apply(Changes(1, [(KEYS[0], 7, 70)])).outcome is Committed.OK
    table.close()
    if is_noted:
        (folder / "data.mdb").write_bytes(former)
    else:
        (folder / "epoch").unlink()
    for _ in range(2):
        table = lmdb_at(folder)
        assert (table.epoch, table.count()) == (2, 0)
        table.close()


def test_a_reset_that_was_only_noted_is_carried_out(tmp_path: Path) -> None:
    filled(tmp_path / "blocks")
    note_epoch(tmp_path / "blocks", 1)
    table = lmdb_at(tmp_path / "blocks")
    assert (table.epoch, table.count()) == (2, 0)
    table.close()


def test_an_epoch_that_cannot_be_noted_is_no_reset(tmp_path: Path) -> None:
    keys = filled(tmp_path / "blocks")
    table = lmdb_at(tmp_path / "blocks")
    (tmp_path / "blocks" / "epoch").unlink()
    (tmp_path / "blocks" / "epoch").mkdir()
    assert table.reset(1).outcome is Committed.IO_ERROR
    assert (table.epoch, table.count()) == (0, len(keys))
    table.close()
    with pytest.raises(KVCascadeError, match="epoch"):
        lmdb_at(tmp_path / "blocks")


def test_a_new_index_has_no_marks_of_a_former_one(tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    table = lmdb_at(folder)
    assert table.reset(1).outcome is Committed.OK
    table.close()
    (folder / "data.mdb").unlink()
    table = lmdb_at(folder)
    assert (table.epoch, noted_epoch(folder), read_mark(folder)) == (0, 0, None)
    table.close()


def test_a_file_system_that_maps_no_files_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A FUSE mount without a page cache, such as mergerfs with `cache.files=off`."""

    def refuse(*_: object, **__: object) -> None:
        error = lmdb.Error("data.mdb.new: No such device")
        vars(error).update(code=errno.ENODEV)
        raise error

    monkeypatch.setattr(lmdb, "open", refuse)
    with pytest.raises(TierIOError, match="maps no files into memory"):
        lmdb_at(tmp_path / "blocks")


def full(descriptor: int, offset: int, size: int, code: int = errno.ENOSPC) -> None:
    """Allocate nothing, as XFS does if disk or quota has less room than the range takes."""
    raise OSError(code, os.strerror(code))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("has_hole", [False, True])
def test_an_index_that_has_all_its_blocks_needs_no_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_hole: bool, code: int
) -> None:
    folder = tmp_path / "blocks"
    keys = filled(folder)
    if has_hole:
        size = (folder / "data.mdb").stat().st_size
        os.truncate(folder / "data.mdb", size // 2)
        os.truncate(folder / "data.mdb", size)
    monkeypatch.setattr(os, "posix_fallocate", partial(full, code=code))
    if has_hole:
        with pytest.raises(NoSpaceError):
            lmdb_at(folder)
    else:
        table = lmdb_at(folder)
        assert table.get_many(keys) == [Entry(slot, slot) for slot in range(len(keys))]
        table.close()


def test_a_disk_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(NoSpaceError):
            lmdb_at(tmp_path / "blocks")
    filled(tmp_path / "blocks")


def test_a_file_that_could_not_be_made_is_made_later(tmp_path: Path) -> None:
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for written in (0, 4096, 65536):  # LMDB begins with two pages; the third limit is behind them
        resource.setrlimit(resource.RLIMIT_FSIZE, (written, hard))
        try:
            with pytest.raises(NoSpaceError):
                lmdb_at(tmp_path / "blocks")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (tmp_path / "blocks" / "data.mdb.new").write_bytes(b"of a process that was killed")
    filled(tmp_path / "blocks")


def test_the_file_has_its_full_size_on_the_disk(tmp_path: Path) -> None:
    lmdb_at(tmp_path / "blocks").close()
    found = (tmp_path / "blocks" / "data.mdb").stat()
    assert found.st_blocks * 512 >= block_table_bytes(SLOTS) == found.st_size
    assert not (tmp_path / "blocks" / "lock.mdb").exists()


def test_a_larger_map_is_opened(tmp_path: Path) -> None:
    keys = filled(tmp_path / "blocks")
    table = open_block_table(
        tmp_path / "blocks", block_table_bytes(100_000), IDENTITY, is_durable=True
    )
    assert table.get_many(keys) == [Entry(slot, slot) for slot in range(len(keys))]
    table.close()


def test_a_larger_map_that_finds_no_room_takes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may keep the blocks that it allocated before it found no more."""
    keys, allocate = filled(tmp_path / "blocks"), os.posix_fallocate
    before = (tmp_path / "blocks" / "data.mdb").stat()

    def partly(descriptor: int, offset: int, size: int) -> None:
        allocate(descriptor, offset, size // 2)
        full(descriptor, offset, size)

    with monkeypatch.context() as patched, pytest.raises(NoSpaceError):
        patched.setattr(os, "posix_fallocate", partly)
        open_block_table(tmp_path / "blocks", block_table_bytes(100_000), IDENTITY, is_durable=True)
    after = (tmp_path / "blocks" / "data.mdb").stat()
    assert (after.st_size, after.st_blocks) == (before.st_size, before.st_blocks)
    table = lmdb_at(tmp_path / "blocks")
    assert table.get_many(keys) == [Entry(slot, slot) for slot in range(len(keys))]
    table.close()


@pytest.mark.parametrize("outcome", [Committed.NO_SPACE, Committed.IO_ERROR])
def test_the_twin_fails_on_command(outcome: Committed) -> None:
    disk = MemoryBlockDisk()
    table = MemoryBlockTable(disk)
    disk.failures = [outcome] * 2
    assert table.apply(Changes(0, [(KEYS[0], 0, 0)])).outcome is outcome
    assert table.reset(1).outcome is outcome and table.epoch == 0
    assert table.apply(Changes(0, [(KEYS[0], 0, 0)])).outcome is Committed.OK


def test_the_twin_loses_what_was_not_durable() -> None:
    lost: set[int] = set()
    for seed in range(30):
        disk = MemoryBlockDisk()
        table = MemoryBlockTable(disk)
        table.apply(Changes(0, [(KEYS[0], 0, 0)]))
        table.sync()
        for slot in (1, 2):
            table.apply(Changes(0, [(KEYS[slot], slot, slot)]))
        disk.lose_power(random.Random(seed))
        table = MemoryBlockTable(disk)
        lost.add(3 - table.count())
        assert table.get_many(KEYS[:1]) == [Entry(0, 0)]
    assert lost == {0, 1, 2}
