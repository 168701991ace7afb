"""The block table of a namespace: block hash to slot and checksum, in LMDB.

The table alone decides which blocks the tier holds. Only the writer of the path opens it, in one
thread, and only while it holds the lock of the path. So LMDB runs without its own lock file and
reader table (`lock=False`). No transaction is open between two calls.

| table | key | value |
| --- | --- | --- |
| `blocks` | hash of the block | entry of 16 bytes: slot u32, check u32, checksum u64 |
| `slots` | slot u32, big endian | hash of the block in it |
| `meta` | name | `format`, `identity`, `epoch`, `commit`, `changes`, `totals`, `day` |

All other numbers are little endian. The check of an entry covers hash, slot, checksum and epoch. An
entry that fails it counts as absent. So does one of before a reset, in a page that a loss of power
kept from being overwritten. `changes` lists what the last commit changed (`Journal`): number,
epoch and reset flag as u64, then counts of removed and stored blocks as u64, then 12 bytes (hash of
the key u64, slot u32) per removed and 20 bytes (hash, checksum u64, slot u32) per stored block.

A commit is atomic: after `kill -9` all of it is there, or nothing. With `is_durable` it survives a
loss of power, too. Without, the file may be damaged then; opening checks its pages first.

LMDB changes its pages in the mapping (`writemap`), which takes less than half the time of writing
each with a system call. The file has its full size on the disk from the start, so that no change of
a page can find the disk full.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import islice
from pathlib import Path

import lmdb
import numpy as np
from xxhash import xxh3_64_intdigest

from ....errors import (
    CorruptionError,
    FormatError,
    KVCascadeError,
    NoSpaceError,
    TierIOError,
    os_errors,
)
from ....logs import get_logger
from ... import endurance
from ..disk.filesystem import RealFileSystem
from ..index.clean_close import NAME, note_epoch, noted_epoch, write_mark
from ..index.index_file import check_file, damaged, from_lmdb, is_lack_of_room
from ..index.index_pages import check_pages
from ..namespace import INDEX_FILE
from .block_table import Applied, Changes, Entry, ScanBatch
from .path_messages import Committed
from .presence_table import Journal, hash_of, hashes_of

TABLE_FORMAT = 3
"""Version of the layout above."""
CHECK_SEED = 0
"""Seed of the hash of a key in the check of its entry."""
ENTRY_BYTES = 16
SCAN_BATCH = 16_384
"""Entries read in one transaction of a scan."""
LIST_BATCH = 1024
"""Fewest entries read in one transaction of a list: a table may have only damaged ones."""
MAX_EPOCH = 1 << 62
"""A larger epoch is damaged: no namespace has so many resets."""
_BLOCKS, _SLOTS, _META = b"blocks", b"slots", b"meta"
_FORMAT, _IDENTITY, _EPOCH = b"format", b"identity", b"epoch"
_COMMIT, _CHANGES, _TOTALS, _DAY = b"commit", b"changes", b"totals", b"day"
_U64 = struct.Struct("<Q")
_PAIR = struct.Struct("<QQ")
_ENTRY = struct.Struct("<IIQ")
_SLOT = struct.Struct(">I")
_HEAD = struct.Struct("<QQQQQ")
_ENTRY_ROW = np.dtype([("slot", "<u4"), ("check", "<u4"), ("checksum", "<u8")])
_REMOVED_ROW = np.dtype([("hash", "<u8"), ("slot", "<u4")])
_STORED_ROW = np.dtype([("hash", "<u8"), ("checksum", "<u8"), ("slot", "<u4")])
_log = get_logger(__name__)
_NEW_NAME = f"{INDEX_FILE}.new"
_NO_ENTRY = b"\xff" * ENTRY_BYTES
_U64_MASK = (1 << 64) - 1
_SLOT_FACTOR = 0x9E3779B97F4A7C15
_EPOCH_FACTOR = 0x165667B19E3779F9
_CHECK_FACTOR = 0xC2B2AE3D27D4EB4F
"""Odd factors: each input bit reaches the upper half of the product, which is the check."""


class LmdbBlockTable:
    """A `BlockTable` in an LMDB environment; `open_block_table` creates it."""

    def __init__(
        self,
        env: lmdb.Environment,
        path: Path,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`wall_clock` returns seconds since 1970."""
        self.path = path
        self.wall_clock = wall_clock
        self.epoch = 0
        self.commit_number = 0
        self.totals = (0, 0)
        self.is_unusable = False
        self._env = env
        with env.begin(write=True) as txn:
            self._meta = env.open_db(_META, txn=txn)
            self._blocks = env.open_db(_BLOCKS, txn=txn)
            self._slots = env.open_db(_SLOTS, txn=txn)

    def load(self, identity: bytes) -> None:
        """Check that the table belongs to `identity`, or give it to it if it is new.

        The commit of this call is synced: no mark of an earlier close is valid from here on. Raises
        `CorruptionError`, `FormatError` or `TierIOError`.
        """
        with self._damage_named(), self._env.begin(write=True, db=self._meta) as txn:
            if txn.get(_FORMAT) is None and not txn.stat(self._blocks)["entries"]:
                txn.put(_FORMAT, _U64.pack(TABLE_FORMAT))
                txn.put(_IDENTITY, identity)
            version = _number(txn.get(_FORMAT))
            if version != TABLE_FORMAT:
                raise FormatError(
                    f"{self.path} has format version {version}, this kvcascade reads "
                    f"{TABLE_FORMAT}; use the version that wrote it, or remove the directory "
                    f"{self.path.parent}"
                )
            if txn.get(_IDENTITY) != identity:
                raise CorruptionError(damaged(self.path, "it belongs to another namespace"))
            self.epoch = _number(txn.get(_EPOCH))
            if self.epoch > MAX_EPOCH:
                raise CorruptionError(damaged(self.path, f"its epoch is {self.epoch}"))
            self.commit_number = _number(txn.get(_COMMIT))
            self.totals = _pair(txn.get(_TOTALS))
            txn.put(_EPOCH, _U64.pack(self.epoch))
            if txn.stat(self._slots)["entries"] < txn.stat(self._blocks)["entries"]:
                self._name_slots(txn)
        self.sync()
        noted = noted_epoch(self.path)
        if self.epoch != noted <= MAX_EPOCH:
            self._begin_anew(noted)

    def _begin_anew(self, noted: int) -> None:
        """Empty a table of another epoch than the noted one: a reset of it was not completed, was
        lost with the power, or is of a version whose entries have no epoch in their checks."""
        _log.warning(
            "the index in %s begins empty: its epoch is %d, not %d", self.path, self.epoch, noted
        )
        if self.reset(max(self.epoch, noted) + 1).outcome is not Committed.OK:
            problem = f"the index in {self.path} of another epoch could not be emptied"
            raise TierIOError(None, f"{problem}; check the device")

    # -- looking -------------------------------------------------------------------------------

    def count(self) -> int:
        """See `BlockTable`."""
        with self._damage_named(), self._env.begin() as txn:
            return int(txn.stat(self._blocks)["entries"])

    def get_many(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """See `BlockTable`."""
        try:
            with self._env.begin(db=self._blocks) as txn:
                return [_parse_entry(key, txn.get(key), self.epoch) for key in keys]
        except lmdb.Error:
            return [None] * len(keys)

    def keys_after(self, key: bytes, limit: int) -> list[tuple[bytes, Entry]]:
        """See `BlockTable`."""
        found: list[tuple[bytes, Entry]] = []
        at_once, after = max(limit, LIST_BATCH), key
        while not found and (batch := self._batch_after(after, at_once)):  # else all are damaged
            after = batch[-1][0]
            parsed = ((k, _parse_entry(k, value, self.epoch)) for k, value in batch)
            found = list(islice(((k, entry) for k, entry in parsed if entry is not None), limit))
        self._check_follows(key, found)
        return found

    def last_changes(self) -> Journal | None:
        """See `BlockTable`."""
        try:
            with self._env.begin(db=self._meta) as txn:
                journal = _parse_journal(txn.get(_CHANGES))
        except lmdb.Error:
            return None
        return journal if journal is not None and journal.number == self.commit_number else None

    def scan(self) -> Iterator[ScanBatch]:
        """See `BlockTable`."""
        after = b""
        while batch := self._batch_after(after, SCAN_BATCH):
            after = batch[-1][0]
            keys = [key for key, _ in batch]
            values = [value for _, value in batch]
            if set(map(len, values)) - {ENTRY_BYTES}:
                values = [v if len(v) == ENTRY_BYTES else _NO_ENTRY for v in values]
            rows = np.frombuffer(b"".join(values), dtype=_ENTRY_ROW)
            mixed = hashes_of(keys, CHECK_SEED) ^ rows["checksum"]
            mixed ^= rows["slot"] * np.uint64(_SLOT_FACTOR) ^ np.uint64(_epoch_part(self.epoch))
            is_whole = mixed * np.uint64(_CHECK_FACTOR) >> np.uint64(32) == rows["check"]
            whole = rows[is_whole]
            slots = whole["slot"].astype(np.int32)
            yield ScanBatch(hashes_of(keys)[is_whole], slots, whole["checksum"])

    def day_totals(self) -> endurance.DayTotals:
        """See `BlockTable`."""
        return endurance.day_totals(self.day_record(), self.wall_clock())

    def day_record(self) -> bytes:
        """See `BlockTable`."""
        with suppress(lmdb.Error), self._env.begin(db=self._meta) as txn:
            return txn.get(_DAY, b"")
        return b""

    # -- changing ------------------------------------------------------------------------------

    def apply(self, changes: Changes) -> Applied:
        """See `BlockTable`."""
        if changes.epoch != self.epoch:
            return Applied(Committed.STALE)
        try:
            with self._env.begin(write=True, db=self._blocks) as txn:
                commit = _Commit(self, txn)
                commit.remove(changes)
                commit.put(changes.puts)
                journal = commit.journal(self.commit_number + 1, self.epoch)
                self._write_meta(txn, journal)
                totals = self._add_totals(txn, changes.written_bytes, changes.read_bytes)
        except lmdb.Error as error:
            return self._failed(error)
        self.totals = totals
        if journal is not None:
            self.commit_number = journal.number
        already, removed = frozenset(commit.already), tuple(commit.removed)
        return Applied(Committed.OK, already, removed, journal)

    def reset(self, epoch: int) -> Applied:
        """See `BlockTable`."""
        if epoch <= self.epoch:
            return Applied(Committed.STALE)
        journal = Journal(self.commit_number + 1, epoch, is_reset=True)
        try:
            note_epoch(self.path, epoch)
            with self._env.begin(write=True) as txn:
                txn.drop(self._blocks, delete=False)
                txn.drop(self._slots, delete=False)
                txn.put(_EPOCH, _U64.pack(epoch), db=self._meta)
                self._write_meta(txn, journal)
            self._env.sync(True)
        except lmdb.Error as error:
            return self._failed(error)
        except KVCascadeError as error:
            is_full = isinstance(error, NoSpaceError)
            return Applied(Committed.NO_SPACE if is_full else Committed.IO_ERROR)
        self.epoch, self.commit_number = epoch, journal.number
        return Applied(Committed.OK, journal=journal)

    # -- closing -------------------------------------------------------------------------------

    def sync(self) -> None:
        """See `BlockTable`."""
        with self._damage_named():
            self._env.sync(True)

    def close(self) -> None:
        """See `BlockTable`."""
        self.is_unusable = True
        try:
            with self._damage_named():
                self._env.sync(True)
                transaction = int(self._env.info()["last_txnid"])
            write_mark(self.path, transaction)
        finally:
            self._env.close()

    def abandon(self) -> None:
        """See `BlockTable`."""
        self.is_unusable = True
        self._env.close()

    # -- inside --------------------------------------------------------------------------------

    def _batch_after(self, key: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        """Return the entries that follow `key`. Raises `CorruptionError` if the last does not."""
        with self._damage_named(), self._env.begin(db=self._blocks) as txn:
            cursor = txn.cursor()
            is_there = cursor.set_range(key + b"\0" if key else b"")
            batch = list(islice(cursor, limit)) if is_there else []
        self._check_follows(key, batch)
        return batch

    def _check_follows(self, key: bytes, listed: Sequence[tuple[bytes, object]]) -> None:
        """Raise `CorruptionError` if the last of these keys does not follow `key`.

        A list goes on from its last key, so it would never end.
        """
        if listed and listed[-1][0] <= key:
            raise CorruptionError(damaged(self.path, "its keys are out of order"))

    def _write_meta(self, txn: lmdb.Transaction[bytes], journal: Journal | None) -> None:
        if journal is not None:
            txn.put(_COMMIT, _U64.pack(journal.number), db=self._meta)
            txn.put(_CHANGES, _pack_journal(journal), db=self._meta)

    def _name_slots(self, txn: lmdb.Transaction[bytes]) -> None:
        """Repair the table of slots: a block without a name in it could never be evicted."""
        _log.warning(
            "the index in %s does not name the blocks of all slots; it is repaired", self.path
        )
        for key, value in txn.cursor(db=self._blocks):
            entry = _parse_entry(key, value, self.epoch)
            if entry is not None:
                txn.put(_SLOT.pack(entry.slot), key, overwrite=False, db=self._slots)

    def _add_totals(self, txn: lmdb.Transaction[bytes], written: int, read: int) -> tuple[int, int]:
        if not (written or read):
            return self.totals
        totals = ((self.totals[0] + written) & _U64_MASK, (self.totals[1] + read) & _U64_MASK)
        txn.put(_TOTALS, _PAIR.pack(*totals), db=self._meta)
        record = txn.get(_DAY, b"", db=self._meta)
        txn.put(_DAY, endurance.add(record, self.wall_clock(), written, read), db=self._meta)
        return totals

    def _failed(self, error: lmdb.Error) -> Applied:
        self.is_unusable |= isinstance(error, lmdb.PanicError)
        return Applied(Committed.NO_SPACE if is_lack_of_room(error) else Committed.IO_ERROR)

    @contextmanager
    def _damage_named(self) -> Iterator[None]:
        try:
            yield
        except lmdb.Error as error:
            raise from_lmdb(error, self.path) from error


class _Commit:
    """The changes of one transaction, and their journal."""

    def __init__(self, table: LmdbBlockTable, txn: lmdb.Transaction[bytes]) -> None:
        self._txn = txn
        self._slots = table._slots
        self._epoch = table.epoch
        self.already: list[int] = []
        self.removed: list[tuple[bytes, int]] = []
        self._stored: list[tuple[int, int, int]] = []

    def remove(self, changes: Changes) -> None:
        """Remove blocks by key and by slot."""
        txn, slots = self._txn, self._slots
        for key in changes.removals:
            value = txn.pop(key)
            entry = _parse_entry(key, value, self._epoch)
            if entry is not None:
                place = _SLOT.pack(entry.slot)
                if txn.get(place, db=slots) == key:
                    txn.delete(place, db=slots)
                self.removed.append((key, entry.slot))
        for slot in changes.cleared:
            former = txn.pop(_SLOT.pack(slot), db=slots)
            if former is not None:
                self._drop_former(former, slot)

    def put(self, puts: Sequence[tuple[bytes, int, int]]) -> None:
        """Add blocks whose keys are absent, or present with a damaged entry."""
        txn, slots = self._txn, self._slots
        for position, (key, slot, checksum) in enumerate(puts):
            value = _ENTRY.pack(slot, _check(key, slot, checksum, self._epoch), checksum)
            if not txn.put(key, value, overwrite=False):
                if _parse_entry(key, txn.get(key), self._epoch) is not None:
                    self.already.append(position)
                    continue
                txn.put(key, value)
            place = _SLOT.pack(slot)
            if not txn.put(place, key, overwrite=False, db=slots):
                former = txn.get(place, key, db=slots)
                if former != key:
                    self._drop_former(former, slot)
                txn.put(place, key, db=slots)
            self._stored.append((hash_of(key), slot, checksum))

    def journal(self, number: int, epoch: int) -> Journal | None:
        """Return the changes so far; None if there are none."""
        if not (self.removed or self._stored):
            return None
        removed = tuple((hash_of(key), slot) for key, slot in self.removed)
        return Journal(number, epoch, removed, tuple(self._stored))

    def _drop_former(self, key: bytes, slot: int) -> None:
        """Remove the entry of the block that `slots` names for a slot, if it says the same."""
        value = self._txn.get(key)
        entry = _parse_entry(key, value, self._epoch)
        if entry is None or entry.slot == slot:
            self._txn.delete(key)
            self.removed.append((key, slot))


def open_block_table(
    folder: Path,
    map_bytes: int,
    identity: bytes,
    *,
    is_durable: bool,
    is_same_boot: bool = False,
    wall_clock: Callable[[], float] = time.time,
) -> LmdbBlockTable:
    """Open or create the table in an existing folder; the caller holds the lock of the path.

    `map_bytes` bounds the file (`block_table_bytes`). `identity` names the namespace. With
    `is_durable` every commit is synced. `is_same_boot` says that this boot of the machine has
    opened the table before (`presence_file.is_of_this_boot`). The pages of a large file are not
    checked then: all of them are as LMDB left them.

    Raises `CorruptionError` for damage, `FormatError` for another version, `NoSpaceError` if the
    disk has no room for the whole file, and `TierIOError` for the device.
    """
    with os_errors(f"opening the block table in {folder}"):
        if not os.path.lexists(folder / INDEX_FILE):
            _create(folder, map_bytes)
        RealFileSystem().sync_dir(folder)  # each time: a kill may have come before it
        check_file(folder, map_bytes)
        check_pages(folder, is_trusted=is_same_boot)
        former_bytes = os.path.getsize(folder / INDEX_FILE)
        env = _open_env(folder / INDEX_FILE, map_bytes, is_durable=is_durable)
        try:
            _reserve(folder / INDEX_FILE, map_bytes)
        except BaseException:
            env.close()
            with suppress(OSError):  # some file systems keep the part that they could allocate
                os.truncate(folder / INDEX_FILE, former_bytes)
            raise
    try:
        table = LmdbBlockTable(env, folder, wall_clock)
        table.load(identity)
    except lmdb.Error as error:
        env.close()
        raise from_lmdb(error, folder) from error
    except KVCascadeError:
        env.close()
        raise
    return table


def _create(folder: Path, map_bytes: int) -> None:
    """Make an empty LMDB file. It gets its name once it is whole on the disk, and no old mark is.

    Raises a `KVCascadeError` or `OSError`.
    """
    new = folder / _NEW_NAME
    for old in (new, folder / NAME):
        with suppress(FileNotFoundError):
            os.unlink(old)
    note_epoch(folder, 0)
    RealFileSystem().sync_dir(folder)
    try:
        _open_env(new, map_bytes, is_durable=True).close()
        _reserve(new, map_bytes, is_synced=True)
        os.rename(new, folder / INDEX_FILE)
    except BaseException:
        with suppress(OSError):
            os.unlink(new)
        raise


def _open_env(file: Path, map_bytes: int, *, is_durable: bool) -> lmdb.Environment:
    """Open or create an LMDB file. Raises a `KVCascadeError`."""
    try:
        return lmdb.open(
            os.fsencode(file),
            subdir=False,
            map_size=map_bytes,
            mode=0o600,
            max_dbs=3,
            sync=is_durable,
            metasync=is_durable,
            readahead=False,
            lock=False,
            writemap=True,
        )
    except lmdb.Error as error:
        raise from_lmdb(error, file.parent) from error


def _reserve(file: Path, size: int, *, is_synced: bool = False) -> None:
    """Allocate disk space for all of the file. Raises `OSError`."""
    with closing(RealFileSystem().open(file)) as opened:
        opened.preallocate(size)
        if is_synced:
            opened.sync()


def _check(key: bytes, slot: int, checksum: int, epoch: int) -> int:
    """Return the check of an entry: the upper half of a product over its parts."""
    mixed = xxh3_64_intdigest(key, CHECK_SEED) ^ checksum ^ (slot * _SLOT_FACTOR & _U64_MASK)
    return ((mixed ^ _epoch_part(epoch)) * _CHECK_FACTOR & _U64_MASK) >> 32


def _epoch_part(epoch: int) -> int:
    return epoch * _EPOCH_FACTOR & _U64_MASK


def _parse_entry(key: bytes, value: bytes | None, epoch: int) -> Entry | None:
    if value is None or len(value) != ENTRY_BYTES:
        return None
    slot, check, checksum = _ENTRY.unpack(value)
    return Entry(slot, checksum) if check == _check(key, slot, checksum, epoch) else None


def _pack_journal(journal: Journal) -> bytes:
    head = _HEAD.pack(
        journal.number,
        journal.epoch,
        journal.is_reset,
        len(journal.removed),
        len(journal.stored),
    )
    removed = np.array(list(journal.removed), dtype=_REMOVED_ROW)
    stored = [(hashed, checksum, slot) for hashed, slot, checksum in journal.stored]
    return head + removed.tobytes() + np.array(stored, dtype=_STORED_ROW).tobytes()


def _parse_journal(value: bytes | None) -> Journal | None:
    if value is None or len(value) < _HEAD.size:
        return None
    number, epoch, is_reset, removed, stored = _HEAD.unpack_from(value)
    middle = _HEAD.size + removed * _REMOVED_ROW.itemsize
    if len(value) != middle + stored * _STORED_ROW.itemsize:
        return None
    gone = np.frombuffer(value[_HEAD.size : middle], dtype=_REMOVED_ROW)
    added = np.frombuffer(value[middle:], dtype=_STORED_ROW)
    triples = zip(*(added[name].tolist() for name in ("hash", "slot", "checksum")), strict=True)
    pairs = zip(gone["hash"].tolist(), gone["slot"].tolist(), strict=True)
    return Journal(number, epoch, tuple(pairs), tuple(triples), bool(is_reset))


def _number(value: bytes | None) -> int:
    return int(_U64.unpack(value)[0]) if value is not None and len(value) == _U64.size else 0


def _pair(value: bytes | None) -> tuple[int, int]:
    if value is None or len(value) != _PAIR.size:
        return 0, 0
    written, read = _PAIR.unpack(value)
    return written, read
