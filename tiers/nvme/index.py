"""The index: block hash to slot, length, checksum and generation, in an LMDB environment.

It is the only truth about what the tier holds. A commit is atomic: after `kill -9` it is there or
not. With `is_durable` it also survives a loss of power; the payload must be synced before.

Threads: `slot_of`, `value_of` and `refresh` belong to the manager's thread, which reads through one
held transaction (memory-mapped, no system call). `commit` may come from any thread. Two
environments on the same directory must not be open in one process.

An *epoch* numbers the resets of the namespace. The first commit of a later epoch empties the
table in the same transaction, and a commit of an earlier one is refused, so no block crosses a
reset whatever order jobs run in.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import lmdb
import numpy as np
import numpy.typing as npt

from ...errors import (
    CorruptionError,
    FormatError,
    KVCascadeError,
    os_errors,
)
from .. import endurance
from ..base import BlockHash
from .format import FORMAT_VERSION, INDEX_ENTRY_BYTES, IndexEntry, parse_entry, slot_in_entry
from .index_errors import CommitOutcome, from_lmdb, outcome_of_lmdb
from .index_file import DATA_NAME, check_file, damaged
from .index_pages import check_pages

MAP_FIXED_BYTES = 64 << 20
MAP_BYTES_PER_SLOT = 1024
"""Address space, not disk: the file grows with what is in it (about 130 bytes an entry)."""
MAX_READERS = 126
GENERATIONS_PER_SESSION = 1 << 40


_U64 = struct.Struct("<Q")
_IDENTITY = struct.Struct("<32sII")
_TOTALS = struct.Struct("<QQ")

_ENTRY_TYPE = np.dtype(
    [("slot", "<u4"), ("length", "<u4"), ("checksum", "<u8"), ("generation", "<u8"), ("x", "<u8")]
)
assert _ENTRY_TYPE.itemsize == INDEX_ENTRY_BYTES


@dataclass(frozen=True, slots=True)
class Removal:
    """An entry that shall go, if it is still the one that was meant."""

    key: BlockHash
    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class IndexIdentity:
    """What must be equal for an index to be opened."""

    fingerprint: bytes
    """SHA-256 of the namespace's fields."""
    block_bytes: int
    slots_per_segment: int

    def pack(self) -> bytes:
        """As it lies in the index."""
        return _IDENTITY.pack(self.fingerprint, self.block_bytes, self.slots_per_segment)


class BlockIndex:
    """An open index; see `open_index`."""

    def __init__(
        self,
        env: lmdb.Environment,
        path: Path,
        capacity: int,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`wall_clock` gives seconds since 1970."""
        self.path = path
        self.wall_clock = wall_clock
        self.capacity = capacity
        self.entries_at_open = 0
        self.was_clean = False
        self.needs_scan = False
        self.reset_at_open = 0
        """Entries that went because a reset was asked for that had not been committed."""
        """Set when the free extents of the last close cannot be used."""
        self.epoch = 0
        """Epoch of the last commit."""
        self.totals = (0, 0)
        """Bytes (written, read) over the life of the namespace."""
        self.damaged_lookups = 0
        """Lookups that met a damaged entry or page; each was answered as a miss."""
        self.original_bytes: int | None = None
        """Size to restore if opening fails: the file was shorter than its meta page says."""
        self._env = env
        with self._env.begin(write=True) as txn:
            self._meta = self._env.open_db(b"meta", txn=txn)
            self._blocks = self._env.open_db(b"blocks", txn=txn)
        self._txn = self._env.begin(db=self._blocks)

    # -- the manager's thread ------------------------------------------------------------------

    def refresh(self) -> None:
        """See what was committed until now. Costs about a quarter of a microsecond."""
        self._txn.abort()
        self._txn = self._env.begin(db=self._blocks)

    def value_of(self, key: bytes) -> bytes | None:
        """The raw entry of a block; None if there is none."""
        try:
            return self._txn.get(key)
        except lmdb.Error:
            self.damaged_lookups += 1
            return None

    def slot_of(self, key: bytes) -> int:
        """The slot of a block, or -1."""
        try:
            value = self._txn.get(key)
        except lmdb.Error:
            self.damaged_lookups += 1
            return -1
        if value is None:
            return -1
        slot = slot_in_entry(key, value)
        if not 0 <= slot < self.capacity:
            self.damaged_lookups += 1
            return -1
        return slot

    def seen_epoch(self) -> int:
        """The epoch that the held transaction sees."""
        return _number(self._txn.get(b"epoch", db=self._meta))

    # -- any thread ----------------------------------------------------------------------------

    def let_go(self) -> None:
        """Hold no transaction until the next `refresh`, and know the epoch of the last commit."""
        self.epoch = self.seen_epoch()
        self._txn.abort()

    def forget_dead_readers(self) -> None:
        """Clear what processes that died left in the lock table, which pins old pages."""
        with suppress(lmdb.Error):
            self._env.reader_check()

    def entry(self, key: bytes) -> IndexEntry | None:
        """The entry of a block as committed now."""
        try:
            with self._env.begin(db=self._blocks) as txn:
                value = txn.get(key)
        except lmdb.Error:
            return None
        return None if value is None else parse_entry(key, value)

    def commit(
        self,
        epoch: int,
        removals: Sequence[Removal],
        puts: Sequence[tuple[BlockHash, IndexEntry]] = (),
        read_bytes: int = 0,
    ) -> CommitOutcome:
        """Remove and add entries in one transaction, removals first. All or nothing.

        `read_bytes`: bytes read back since the last commit, for the totals.
        """
        try:
            with self._env.begin(write=True, db=self._blocks) as txn:
                if not self._enter_epoch(txn, epoch):
                    return CommitOutcome.STALE_EPOCH
                for removal in removals:
                    self._remove(txn, removal)
                for key, entry in puts:
                    txn.put(key, entry.pack(key))
                if puts:
                    written = sum(entry.length for _, entry in puts)
                    self._add_totals(txn, written, read_bytes)
            self.epoch = max(self.epoch, epoch)
        except lmdb.Error as error:
            return outcome_of_lmdb(error)
        return CommitOutcome.DONE

    def scan(self) -> npt.NDArray[np.int64]:
        """Read every entry, drop those that cannot be right, and return the slots in use.

        Of two entries on one slot the later generation stays. Raises `CorruptionError`.
        """
        with self._damage_named(), self._env.begin(db=self._blocks) as txn:
            values = list(txn.cursor().iternext(keys=False, values=True))
            bad_sizes = [i for i, value in enumerate(values) if len(value) != INDEX_ENTRY_BYTES]
            for i in bad_sizes:
                values[i] = b"\xff" * INDEX_ENTRY_BYTES
            table = np.frombuffer(b"".join(values), dtype=_ENTRY_TYPE)
            doomed = self._doomed(table)
            doomed_keys: list[bytes] = []
            if len(doomed):
                keys = list(txn.cursor().iternext(keys=True, values=False))
                doomed_keys = [keys[i] for i in doomed.tolist()]
        self._delete(doomed_keys)
        kept = np.delete(table["slot"], doomed)
        return np.sort(kept).astype(np.int64)

    def drop_slots(self, is_dropped: npt.NDArray[np.bool_]) -> int:
        """Delete the entries of these slots (a flag per slot); returns how many there were."""
        with self._damage_named(), self._env.begin(db=self._blocks) as txn:
            doomed = [
                key
                for key, value in txn.cursor()
                if 0 <= (slot := slot_in_entry(key, value)) < len(is_dropped) and is_dropped[slot]
            ]
        self._delete(doomed)
        return len(doomed)

    def keys(self) -> Iterator[tuple[bytes, IndexEntry]]:
        """Every block and its entry, in the order of the hashes, from one snapshot."""
        with self._damage_named(), self._env.begin(db=self._blocks) as txn:
            for key, value in txn.cursor():
                entry = parse_entry(key, value)
                if entry is not None:
                    yield key, entry

    def keys_after(self, key: bytes, limit: int) -> list[BlockHash]:
        """Up to `limit` keys that follow `key` (b"": from the start), as committed now.

        A short transaction each time: one that stays open keeps every freed page from reuse.
        """
        with self._damage_named(), self._env.begin(db=self._blocks) as txn:
            cursor = txn.cursor()
            if cursor.set_range(key + b"\0" if key else b""):
                found = islice(cursor.iternext(keys=True, values=False), limit)
                return [BlockHash(bytes(k)) for k in found]
        return []

    def day_totals(self) -> endurance.DayTotals:
        """Bytes committed and read back in the last day, by every process of the namespace."""
        try:
            with self._env.begin(db=self._meta) as txn:
                record = txn.get(b"day", b"")
        except lmdb.Error:
            record = b""
        return endurance.day_totals(record, self.wall_clock())

    def count(self) -> int:
        """Number of entries committed now."""
        with self._env.begin() as txn:
            return int(txn.stat(self._blocks)["entries"])

    def warm(self) -> None:
        """Ask the system to read the file ahead, so that lookups meet no page faults."""
        descriptor = os.open(self.path / DATA_NAME, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)

    # -- opening and closing -------------------------------------------------------------------

    def load(self, identity: IndexIdentity, wanted_epoch: int, *, may_create: bool) -> int:
        """Check what this index is for, mark it in use; returns the number of this session.

        An index that was never filled in is refused unless `may_create`.

        `wanted_epoch` larger than the stored one: a reset had not been committed; it is now.
        """
        with self._damage_named(), self._env.begin(write=True, db=self._meta) as txn:
            if may_create and txn.get(b"format") is None:
                txn.put(b"format", _U64.pack(FORMAT_VERSION))
                txn.put(b"identity", identity.pack())
                txn.put(b"clean", b"\1")
            self._check(txn, identity)
            self.was_clean = txn.get(b"clean") == b"\1"
            self.needs_scan |= not self.was_clean
            self.epoch = _number(txn.get(b"epoch"))
            if wanted_epoch > self.epoch:
                self.epoch += 1
                self.reset_at_open = int(txn.stat(self._blocks)["entries"])
                txn.drop(self._blocks, delete=False)
                txn.put(b"epoch", _U64.pack(self.epoch))
                self.needs_scan = True
            session = _number(txn.get(b"session")) + 1
            txn.put(b"session", _U64.pack(session))
            txn.put(b"clean", b"\0")
            totals = txn.get(b"totals", b"")
            self.totals = _TOTALS.unpack(totals) if len(totals) == _TOTALS.size else (0, 0)
            self.entries_at_open = int(txn.stat(self._blocks)["entries"])
        with self._damage_named():
            self._env.sync(True)
        self.original_bytes = None
        self.refresh()
        return session

    def saved_free_extents(self) -> npt.NDArray[np.int32]:
        """The free extents of the last clean close, shape `(n, 2)`."""
        with self._env.begin(db=self._meta) as txn:
            blob = txn.get(b"free", b"")
        return np.frombuffer(blob[: len(blob) // 8 * 8], dtype="<i4").reshape(-1, 2)

    def close(self, free: npt.NDArray[np.int32] | None, read_bytes: int = 0) -> None:
        """Close. With the free extents, the next open need not scan. Raises one of our errors."""
        try:
            with self._damage_named():
                with self._env.begin(write=True, db=self._meta) as txn:
                    self._add_totals(txn, 0, read_bytes)
                    if free is not None:
                        txn.put(b"free", free.astype("<i4").tobytes())
                        txn.put(b"clean", b"\1")
                self._env.sync(True)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Let go without marking anything; what was committed stays."""
        self._txn.abort()
        self._env.close()
        if self.original_bytes is not None:
            os.truncate(self.path / DATA_NAME, self.original_bytes)

    def check_pages(self) -> None:
        """Walk every page of the table; if one does not read, let go and raise."""
        try:
            with self._damage_named(), self._env.begin(db=self._blocks) as txn:
                for _ in txn.cursor().iternext(keys=False):
                    pass
        except KVCascadeError:
            self.abandon()
            raise

    # -- inside --------------------------------------------------------------------------------

    def _check(self, txn: lmdb.Transaction[bytes], identity: IndexIdentity) -> None:
        version = _number(txn.get(b"format"))
        if version == 0:
            raise CorruptionError(damaged(self.path, "it has no format version"))
        if version != FORMAT_VERSION:
            raise FormatError(
                f"{self.path} has format version {version}, this kvcascade reads "
                f"{FORMAT_VERSION}; use the version that wrote it, or remove the directory "
                f"{self.path.parent}"
            )
        if txn.get(b"identity") != identity.pack():
            raise CorruptionError(damaged(self.path, "it belongs to another namespace"))

    def _enter_epoch(self, txn: lmdb.Transaction[bytes], epoch: int) -> bool:
        current = _number(txn.get(b"epoch", db=self._meta))
        if epoch < current:
            return False
        if epoch > current:
            txn.drop(self._blocks, delete=False)
            txn.put(b"epoch", _U64.pack(epoch), db=self._meta)
        return True

    @staticmethod
    def _remove(txn: lmdb.Transaction[bytes], removal: Removal) -> None:
        value = txn.get(removal.key)
        entry = None if value is None else parse_entry(removal.key, value)
        if entry is not None:
            if (entry.slot, entry.generation) == (removal.slot, removal.generation):
                txn.delete(removal.key)

    def _add_totals(self, txn: lmdb.Transaction[bytes], written: int, read: int) -> None:
        stored = txn.get(b"totals", b"", db=self._meta)
        before = _TOTALS.unpack(stored) if len(stored) == _TOTALS.size else (0, 0)
        self.totals = (before[0] + written, before[1] + read)
        txn.put(b"totals", _TOTALS.pack(*self.totals), db=self._meta)
        record = txn.get(b"day", b"", db=self._meta)
        day = endurance.add(record, self.wall_clock(), written, read)
        txn.put(b"day", day, db=self._meta)

    def _doomed(self, table: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
        """Positions of entries out of range, and of all but the latest on each slot."""
        slots = table["slot"].astype(np.int64)
        is_doomed = slots >= self.capacity
        uses = np.bincount(slots[~is_doomed], minlength=self.capacity)
        if uses.max(initial=0) > 1:
            shared = np.flatnonzero(~is_doomed & (uses[np.minimum(slots, self.capacity - 1)] > 1))
            order = shared[np.lexsort((table["generation"][shared], slots[shared]))]
            is_doomed[order[:-1]] = slots[order[:-1]] == slots[order[1:]]
        return np.flatnonzero(is_doomed)

    def _delete(self, keys: Sequence[bytes]) -> None:
        if keys:
            with self._damage_named(), self._env.begin(write=True, db=self._blocks) as txn:
                for key in keys:
                    txn.delete(key)
            self.refresh()

    @contextmanager
    def _damage_named(self) -> Iterator[None]:
        try:
            yield
        except lmdb.Error as error:
            raise from_lmdb(error, self.path) from error


def open_index(path: Path, capacity: int, *, is_durable: bool) -> BlockIndex:
    """Open or create the environment in the directory `path`, which must exist.

    `capacity` in slots. Raises `CorruptionError` for damage, `TierIOError` for the device. Does
    not look at any entry: `BlockIndex.load` comes next. A file that is shorter than its own meta
    page says is extended with a hole, so that a read of the missing pages is an error that LMDB
    reports and not a bus error, and `needs_scan` is set. No other process may have it open.
    """
    with os_errors(f"opening the index in {path}"):
        return _open(path, capacity, is_durable)


def _open(path: Path, capacity: int, is_durable: bool) -> BlockIndex:
    original = check_file(path)
    try:
        check_pages(path)
        env = _environment(path, capacity, is_durable)
        try:
            index = BlockIndex(env, path, capacity)
        except BaseException:
            env.close()
            raise
    except BaseException as error:
        if original is not None:
            os.truncate(path / DATA_NAME, original)
        if isinstance(error, lmdb.Error):
            raise from_lmdb(error, path) from error
        raise
    if original is not None:
        index.original_bytes = original
        index.needs_scan = True
        index.check_pages()
    return index


def attach_index(path: Path, capacity: int, *, is_durable: bool) -> BlockIndex:
    """Open an environment that another process has open and loaded; changes nothing in it.

    Only `commit` and `entry` may be used: no transaction is held, so no page is pinned. Raises
    `CorruptionError` or `TierIOError`.
    """
    with os_errors(f"attaching to the index in {path}"):
        try:
            index = BlockIndex(_environment(path, capacity, is_durable), path, capacity)
            index.let_go()
        except lmdb.Error as error:
            raise from_lmdb(error, path) from error
    return index


def _environment(path: Path, capacity: int, is_durable: bool) -> lmdb.Environment:
    return lmdb.open(
        str(path),
        map_size=MAP_FIXED_BYTES + MAP_BYTES_PER_SLOT * capacity,
        mode=0o600,
        max_dbs=4,
        max_readers=MAX_READERS,
        max_spare_txns=4,
        sync=is_durable,
        metasync=is_durable,
        readahead=False,
    )


def _number(value: bytes | None) -> int:
    return _U64.unpack(value)[0] if value is not None and len(value) == _U64.size else 0
