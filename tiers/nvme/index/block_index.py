"""The index: block hash to slot, length, checksum and generation, in an LMDB environment.

The index alone decides which blocks the tier holds. A commit is atomic: after `kill -9` all of it
is there, or nothing. With `is_durable` a commit also survives a loss of power; the payload must be
synced before.

Threads: the first group of methods, `refresh` to `let_go`, belongs to the manager's thread. It
reads through one held transaction (memory-mapped, no system call). The second group, `sync` to
`warm`, may be called by any thread. The third group, `load` to `walk_blocks`, runs before or after
all others.

Processes: several may have the index open, and all must map the same number of bytes. One process
must not open the same directory twice. A held transaction keeps all processes from reusing freed
pages, so `release` it at the end of a step.

An *epoch* numbers the resets of the namespace. The first commit of a later epoch empties the table
in the same transaction. A commit of an earlier epoch is refused. No block survives a reset, in
whatever order jobs run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import lmdb
import numpy as np
import numpy.typing as npt

from ....errors import (
    CorruptionError,
    FormatError,
    InUseError,
    KVCascadeError,
    os_errors,
)
from ... import endurance
from ...base import BlockHash
from ..segments.format import (
    FORMAT_VERSION,
    INDEX_ENTRY_BYTES,
    IndexEntry,
    parse_entry,
    slot_in_entry,
)
from ..writer.owners import MAX_PROCESSES
from .clean_close import SavedSlots, pack_saved_slots, parse_saved_slots, write_mark
from .index_environment import batches, forget_former_self, open_environment
from .index_errors import from_lmdb, outcome_of_lmdb
from .index_file import DATA_NAME, check_file, damaged
from .index_keys import (
    BLOCKS,
    BOOT,
    DAY,
    ENTRY_TYPE,
    EPOCH,
    FORMAT,
    IDENTITY,
    IS_LIVE,
    MAX_EPOCH,
    MAX_SESSION,
    META,
    NO_ENTRY,
    SESSION,
    TAKEN,
    TOTALS,
    IndexIdentity,
    live_key,
    number_in,
    pack_number,
    pack_totals,
    state_key,
    totals_in,
    uses_key,
)
from .index_pages import check_pages
from .index_port import CommitOutcome, Removal, SlotTest

GENERATIONS_PER_SESSION = 1 << 40
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MAX_BOOT_ID_BYTES = 64
NO_PAGES_TRIES = 11
NO_PAGES_PAUSE_S = 0.05
"""Pause between two tries of a commit that finds no free page, in seconds. A reader holds pages for
part of a step, or until its next upkeep, which runs about as often as this pause. Readers held
pages for 0.01 s mostly, and for 0.24 s with four engines and their movers on two cores."""


@dataclass(frozen=True, slots=True)
class Session:
    """One opening of an index by one process."""

    number: int
    """Session number, unique over all processes, so its generations belong to this session only."""
    use: int
    """Number of times this state number has been used, including this one."""
    saved: SavedSlots | None
    """Slots saved by the last process with this state number; None if it did not close cleanly, or
    if there was none."""
    proven_from: int
    """First generation whose slot records are known to match the index. After a loss of power,
    older records may lag behind their entries."""


class BlockIndex:
    """An open index; `open_index` and `attach_index` create it."""

    def __init__(
        self,
        env: lmdb.Environment,
        path: Path,
        capacity: int,
        wall_clock: Callable[[], float] = time.time,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """`wall_clock` returns seconds since 1970; `pause` waits for that many seconds."""
        self.path = path
        self.map_bytes = int(env.info()["map_size"])
        """Address space of the index, in bytes."""
        self.wall_clock = wall_clock
        self.pause = pause
        self.capacity = capacity
        self.entries_at_open = 0
        """Number of entries in the whole namespace when the index was loaded."""
        self.needs_scan = False
        """True if pages are missing or a close did not complete: saved extents are invalid."""
        self.is_marked = True
        """False if no clean mark covers the whole file (see `clean_close`)."""
        self.dropped_by_scan = 0
        """Number of invalid entries that `scan` removed."""
        self.reset_at_open = 0
        """Number of entries dropped at opening, because of a reset that had not been committed."""
        self.epoch = 0
        """Latest epoch known to be committed."""
        self.totals = (0, 0)
        """Bytes (written, read) over the life of the namespace."""
        self.taken_at_open = 0
        """Entries removed by `take_away` over the life of the namespace, as of the opening."""
        self.damaged_lookups = 0
        """Number of lookups that found a damaged entry or page; each was answered as a miss."""
        self.has_panicked = False
        """True if LMDB could not write its meta page; this process can change nothing then."""
        self.original_bytes: int | None = None
        """File size to restore if opening fails, where the file was shorter than it claims."""
        self._env = env
        self._state = 0
        with self._env.begin(write=True) as txn:
            self._meta = self._env.open_db(META, txn=txn)
            self._blocks = self._env.open_db(BLOCKS, txn=txn)
        self._txn = self._env.begin(db=self._blocks)

    # -- the manager's thread ------------------------------------------------------------------

    def refresh(self) -> None:
        """Renew the held transaction to see all commits so far. Costs about half a microsecond.

        If that fails, every lookup is a miss until it succeeds.
        """
        self._txn.abort()
        try:
            self._txn = self._env.begin(db=self._blocks)
        except lmdb.Error:
            self.damaged_lookups += 1

    def release(self) -> None:
        """Hold no pages until the next `refresh`; no lookup is allowed in between."""
        self._txn.abort()

    def value_of(self, key: bytes) -> bytes | None:
        """Return the raw entry of a block, or None."""
        try:
            return self._txn.get(key)
        except lmdb.Error:
            self.damaged_lookups += 1
            return None

    def slot_of(self, key: bytes) -> int:
        """Return the slot of a block, or -1."""
        value = self.value_of(key)
        return -1 if value is None else self.slot_in(key, value)

    def slot_in(self, key: bytes, value: bytes) -> int:
        """Return the slot that a raw entry names, or -1."""
        slot = slot_in_entry(key, value)
        if 0 <= slot < self.capacity:
            return slot
        if slot < 0:  # a slot beyond the capacity belongs to a process with a larger one
            self.damaged_lookups += 1
        return -1

    def seen_epoch(self) -> int:
        """Return the epoch that the held transaction sees; -1 if it cannot be read."""
        try:
            seen = number_in(self._txn.get(EPOCH, db=self._meta))
        except lmdb.Error:
            self.damaged_lookups += 1
            return -1
        self.epoch = max(self.epoch, seen)
        return seen

    def let_go(self) -> None:
        """End the held transaction until the next `refresh`, and record the committed epoch."""
        self.epoch = self.seen_epoch()
        self._txn.abort()

    # -- any thread ----------------------------------------------------------------------------

    def sync(self) -> None:
        """Make the commits of all processes durable. Raises a `KVCascadeError`."""
        with self._damage_named():
            self._env.sync(True)

    def forget_dead_readers(self) -> None:
        """Remove dead processes from LMDB's reader table, where they pin old pages."""
        with suppress(lmdb.Error):
            self._env.reader_check()

    def entry(self, key: bytes) -> IndexEntry | None:
        """Return the entry of a block as committed now; None if missing or damaged."""
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
        is_own: SlotTest | None = None,
        held: set[BlockHash] | None = None,
        read_bytes: int = 0,
    ) -> CommitOutcome:
        """Remove and add entries in one transaction, removals first. All or nothing.

        With `is_own`, the first of two processes wins. A block that is stored in another process's
        slot is not added, but its hash is put into `held`. `read_bytes` are bytes read back since
        the last commit, for the totals.

        While the map is full, the commit waits for at most `NO_PAGES_TRIES - 1` pauses. The map
        stays full as long as readers of older states keep the freed pages.
        """
        for _ in range(NO_PAGES_TRIES - 1):
            outcome = self._commit(epoch, removals, puts, is_own, held, read_bytes)
            if outcome is not CommitOutcome.NO_PAGES:
                return outcome
            self.forget_dead_readers()
            self.pause(NO_PAGES_PAUSE_S)
        return self._commit(epoch, removals, puts, is_own, held, read_bytes)

    def take_away(
        self, epoch: int, entries: Sequence[tuple[bytes, bytes]]
    ) -> tuple[CommitOutcome, int]:
        """Remove entries that still have exactly this key and value, whoever owns their slots.

        Returns the outcome and the number of entries removed. The owner of a slot notices when it
        evicts that slot. A process that has closed recounts its slots when it starts.
        """
        removed = 0
        try:
            with self._env.begin(write=True, db=self._blocks) as txn:
                if number_in(txn.get(EPOCH, db=self._meta)) != epoch:
                    return CommitOutcome.STALE_EPOCH, 0
                for key, value in entries:
                    if txn.get(key) == value:
                        txn.delete(key)
                        removed += 1
                if removed:
                    taken = number_in(txn.get(TAKEN, db=self._meta)) + removed
                    txn.put(TAKEN, pack_number(taken), db=self._meta)
                    for state in range(MAX_PROCESSES):
                        txn.delete(state_key(state), db=self._meta)
        except lmdb.Error as error:
            return outcome_of_lmdb(error), 0
        return CommitOutcome.DONE, removed

    def was_taken_from(self) -> bool:
        """Return True if any process removed entries since this process loaded the index."""
        with self._damage_named(), self._env.begin(db=self._meta) as txn:
            return number_in(txn.get(TAKEN)) != self.taken_at_open

    def note_proven(self) -> None:
        """Record that no slot record of the namespace is older than the entry that names the
        slot."""
        with suppress(lmdb.Error), self._env.begin(write=True, db=self._meta) as txn:
            txn.put(BOOT, pack_number(0) + _boot_id())

    def still_in(
        self, blocks: Iterable[tuple[BlockHash, int]]
    ) -> tuple[int, list[tuple[BlockHash, int]]]:
        """Return the committed epoch, and the (hash, slot) pairs that the index confirms."""
        with self._damage_named(), self._env.begin(db=self._blocks) as txn:
            epoch = number_in(txn.get(EPOCH, db=self._meta))
            found = [
                (key, slot)
                for key, slot in blocks
                if (value := txn.get(key)) is not None and slot_in_entry(key, value) == slot
            ]
        return epoch, found

    def scan(
        self,
        is_mine: npt.NDArray[np.bool_] | None = None,
        is_lost: npt.NDArray[np.bool_] | None = None,
        and_beyond: bool = True,
    ) -> npt.NDArray[np.int64]:
        """Read every entry, drop the invalid ones, and return the slots in use, ascending.

        If two entries name one slot, the later generation stays. The masks are flags per slot. Only
        entries on slots in `is_mine` (None: all) are judged and returned. Entries on slots in
        `is_lost` are dropped. With `and_beyond`, damaged entries and those beyond the capacity are
        dropped too. Raises `CorruptionError`.
        """
        with self._damage_named(), self._env.begin(db=self._blocks) as txn:
            values = list(txn.cursor().iternext(keys=False, values=True))
            if set(map(len, values)) - {INDEX_ENTRY_BYTES}:
                values = [v if len(v) == INDEX_ENTRY_BYTES else NO_ENTRY for v in values]
            table = np.frombuffer(b"".join(values), dtype=ENTRY_TYPE)
            del values
            slots = table["slot"].astype(np.int64)
            is_within = slots < self.capacity
            mine = np.flatnonzero(is_within)
            lost = mine[:0] if is_lost is None else mine[is_lost[slots[mine]]]
            if is_mine is not None:
                mine = mine[is_mine[slots[mine]]]
            doomed = mine[self._superseded(slots[mine], table["generation"][mine])]
            kept = np.setdiff1d(mine, doomed, assume_unique=True)
            beyond = np.flatnonzero(~is_within) if and_beyond else mine[:0]
            all_doomed = np.concatenate((doomed, lost, beyond))
            doomed_keys: list[bytes] = []
            if len(all_doomed):
                keys = list(txn.cursor().iternext(keys=True, values=False))
                doomed_keys = [keys[i] for i in all_doomed.tolist()]
        self._delete(doomed_keys)
        self.dropped_by_scan = len(doomed_keys)
        return np.sort(slots[kept])

    def keys(self) -> Iterator[tuple[bytes, IndexEntry]]:
        """Yield every block and its entry in the order of the hashes, as committed when it is
        read."""
        with self._damage_named():
            for key, value in chain.from_iterable(batches(self._env, self._blocks)):
                entry = parse_entry(key, value)
                if entry is not None:
                    yield key, entry

    def slots_and_generations(
        self,
    ) -> Iterator[tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64]]]:
        """Yield slots and generations of every entry in batches, as committed when it is read."""
        with self._damage_named():
            for batch in batches(self._env, self._blocks):
                whole = (value for _, value in batch if len(value) == INDEX_ENTRY_BYTES)
                table = np.frombuffer(b"".join(whole), dtype=ENTRY_TYPE)
                yield table["slot"], table["generation"]

    def keys_after(self, key: bytes, limit: int) -> list[BlockHash]:
        """Return up to `limit` keys that follow `key`, as committed now; b"" starts at the first.

        Each call uses its own short transaction, as an open one keeps every freed page from reuse.
        """
        with self._damage_named(), self._env.begin(db=self._blocks) as txn:
            cursor = txn.cursor()
            if cursor.set_range(key + b"\0" if key else b""):
                found = islice(cursor.iternext(keys=True, values=False), limit)
                return [BlockHash(bytes(k)) for k in found]
        return []

    def day_totals(self) -> endurance.DayTotals:
        """Return the bytes committed and read back in the last day by all processes of the
        namespace."""
        try:
            with self._env.begin(db=self._meta) as txn:
                record = txn.get(DAY, b"")
        except lmdb.Error:
            record = b""
        return endurance.day_totals(record, self.wall_clock())

    def count(self) -> int:
        """Return the number of entries committed now."""
        with self._env.begin() as txn:
            return int(txn.stat(self._blocks)["entries"])

    def warm(self) -> None:
        """Ask the kernel to read the file ahead, so that lookups cause no page faults."""
        descriptor = os.open(self.path / DATA_NAME, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)

    # -- opening and closing -------------------------------------------------------------------

    def load(
        self,
        identity: IndexIdentity,
        wanted_epoch: int,
        *,
        may_create: bool,
        state: int = 0,
        is_alone: bool = True,
        started_epoch: int | None = None,
    ) -> Session:
        """Check that this index belongs to `identity`, and mark it as in use by this state number.

        An index without contents is refused unless `may_create`. If `wanted_epoch` is larger than
        the stored epoch, a reset was not committed; it is committed now. If `started_epoch` is
        given and differs from the stored epoch, there were resets since then. One more reset is
        committed in that case.
        """
        self._state = state
        with self._damage_named(), self._env.begin(write=True, db=self._meta) as txn:
            if may_create and txn.get(FORMAT) is None:
                txn.put(FORMAT, pack_number(FORMAT_VERSION))
                txn.put(IDENTITY, identity.pack())
            self._check(txn, identity)
            self.epoch = number_in(txn.get(EPOCH))
            if wanted_epoch > self.epoch or started_epoch not in (None, self.epoch):
                # A process that is alone cannot trust the number it found.
                self.epoch = self.epoch + 1 if is_alone else wanted_epoch
                self.reset_at_open = int(txn.stat(self._blocks)["entries"])
                txn.drop(self._blocks, delete=False)
                txn.put(EPOCH, pack_number(self.epoch))
            number = number_in(txn.get(SESSION)) + 1
            use = number_in(txn.get(uses_key(state))) + 1
            if self.epoch > MAX_EPOCH or max(number, use) > MAX_SESSION:
                raise CorruptionError(damaged(self.path, "nothing happened that often"))
            txn.put(SESSION, pack_number(number))
            txn.put(uses_key(state), pack_number(use))
            saved = parse_saved_slots(txn.pop(state_key(state)))
            proven_from = self._note_boot(txn, number)
            self.taken_at_open = number_in(txn.get(TAKEN))
            was_live = self._any_live(txn)
            if is_alone:
                for other in range(MAX_PROCESSES):
                    txn.delete(live_key(other))
            txn.put(live_key(state), IS_LIVE)
            self.totals = totals_in(txn.get(TOTALS))
            self.entries_at_open = int(txn.stat(self._blocks)["entries"])
            if is_alone and not self.is_marked and not was_live and self.entries_at_open:
                self.needs_scan = True  # closed cleanly, but pages may be older than the close
        self.sync()  # the mark of the last close is invalid from here on
        self.original_bytes = None
        self.forget_dead_readers()
        self.refresh()
        return Session(number, use, saved, proven_from)

    def close(self, saved: SavedSlots | None, read_bytes: int = 0) -> None:
        """Close the index. With `saved`, the next opening need not scan. Raises a `KVCascadeError`.

        The last process to close writes the clean mark, which spares the next one a check of every
        page.
        """
        self._txn.abort()  # other processes need the pages while this one waits for the disk
        try:
            with self._damage_named():
                with self._env.begin(write=True, db=self._meta) as txn:
                    self._add_totals(txn, 0, read_bytes)
                    if saved is not None:
                        txn.delete(live_key(self._state))
                        txn.put(state_key(self._state), pack_saved_slots(saved))
                    is_last, transaction = not self._any_live(txn), int(txn.id())
            self.sync()
            if is_last:
                write_mark(self.path, transaction)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close without marking anything; all commits stay."""
        self._txn.abort()
        self._env.close()
        if self.original_bytes is not None:
            os.truncate(self.path / DATA_NAME, self.original_bytes)

    def walk_blocks(self) -> None:
        """Read every page of the table; if one cannot be read, abandon the index and raise."""
        try:
            with self._damage_named(), self._env.begin(db=self._blocks) as txn:
                for _ in txn.cursor().iternext(keys=False):
                    pass
        except KVCascadeError:
            self.abandon()
            raise

    # -- inside --------------------------------------------------------------------------------

    def _commit(
        self,
        epoch: int,
        removals: Sequence[Removal],
        puts: Sequence[tuple[BlockHash, IndexEntry]],
        is_own: SlotTest | None,
        held: set[BlockHash] | None,
        read_bytes: int,
    ) -> CommitOutcome:
        """Try `commit` once."""
        written = 0
        rivals: set[BlockHash] = set()
        try:
            with self._env.begin(write=True, db=self._blocks) as txn:
                if not self._enter_epoch(txn, epoch):
                    return CommitOutcome.STALE_EPOCH
                for removal in removals:
                    self._remove(txn, removal)
                for key, entry in puts:
                    if is_own is not None and self._is_taken(txn, key, is_own):
                        rivals.add(key)
                        continue
                    txn.put(key, entry.pack(key))
                    written += entry.length
                if puts:
                    self._add_totals(txn, written, read_bytes)
            self.epoch = max(self.epoch, epoch)
        except lmdb.Error as error:
            self.has_panicked = isinstance(error, lmdb.PanicError)
            return outcome_of_lmdb(error)
        if held is not None:
            held |= rivals
        return CommitOutcome.DONE

    def _check(self, txn: lmdb.Transaction[bytes], identity: IndexIdentity) -> None:
        version = number_in(txn.get(FORMAT))
        if version == 0:
            raise CorruptionError(damaged(self.path, "it has no format version"))
        if version != FORMAT_VERSION:
            raise FormatError(
                f"{self.path} has format version {version}, this kvcascade reads "
                f"{FORMAT_VERSION}; use the version that wrote it, or remove the directory "
                f"{self.path.parent}"
            )
        if txn.get(IDENTITY) != identity.pack():
            raise CorruptionError(damaged(self.path, "it belongs to another namespace"))

    def _any_live(self, txn: lmdb.Transaction[bytes]) -> bool:
        """Return True if a process has the index open, or died and no process was alone since."""
        states = range(MAX_PROCESSES)
        return any(txn.get(live_key(state), db=self._meta) is not None for state in states)

    def _note_boot(self, txn: lmdb.Transaction[bytes], session: int) -> int:
        """Return the first generation whose slot records are as new as the entries that name them.

        A write puts the record before the entry, so only a loss of power can lose the record alone.
        If the machine has booted since, or its boot id is unknown, no record of an earlier session
        is proven.
        """
        boot, before = _boot_id(), txn.get(BOOT, b"", db=self._meta)
        proven_from = number_in(before[:8])
        if not boot or before[8:] != boot:
            is_empty = not txn.stat(self._blocks)["entries"]
            proven_from = 0 if is_empty else session * GENERATIONS_PER_SESSION
        txn.put(BOOT, pack_number(proven_from) + boot, db=self._meta)
        return proven_from

    def _enter_epoch(self, txn: lmdb.Transaction[bytes], epoch: int) -> bool:
        current = number_in(txn.get(EPOCH, db=self._meta))
        if epoch < current:
            return False
        if epoch > current:
            txn.drop(self._blocks, delete=False)
            txn.put(EPOCH, pack_number(epoch), db=self._meta)
        return True

    @staticmethod
    def _remove(txn: lmdb.Transaction[bytes], removal: Removal) -> None:
        value = txn.get(removal.key)
        entry = None if value is None else parse_entry(removal.key, value)
        if entry is not None:
            if (entry.slot, entry.generation) == (removal.slot, removal.generation):
                txn.delete(removal.key)

    @staticmethod
    def _is_taken(txn: lmdb.Transaction[bytes], key: bytes, is_own: SlotTest) -> bool:
        value = txn.get(key)
        slot = -1 if value is None else slot_in_entry(key, value)
        return slot >= 0 and not is_own(slot)

    def _add_totals(self, txn: lmdb.Transaction[bytes], written: int, read: int) -> None:
        before = totals_in(txn.get(TOTALS, db=self._meta))
        self.totals = (before[0] + written, before[1] + read)
        txn.put(TOTALS, pack_totals(*self.totals), db=self._meta)
        record = txn.get(DAY, b"", db=self._meta)
        day = endurance.add(record, self.wall_clock(), written, read)
        txn.put(DAY, day, db=self._meta)

    def _superseded(
        self, slots: npt.NDArray[np.int64], generations: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.int64]:
        """Return the positions of all entries but the latest on each slot."""
        uses = np.bincount(slots, minlength=self.capacity)
        if uses.max(initial=0) <= 1:
            return slots[:0]
        shared = np.flatnonzero(uses[slots] > 1)
        order = shared[np.lexsort((generations[shared], slots[shared]))]
        is_earlier: npt.NDArray[np.bool_] = slots[order[:-1]] == slots[order[1:]]
        return np.asarray(order[:-1][is_earlier], dtype=np.int64)

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


def open_index(
    path: Path, capacity: int, map_bytes: int, *, is_durable: bool, is_alone: bool = True
) -> BlockIndex:
    """Open or create the environment in the directory `path`, which must exist.

    `capacity` counts slots. `map_bytes` is the address space, and bounds the size of the file; all
    processes must pass the same number. No entry is read: `BlockIndex.load` comes next.

    Raises `CorruptionError` for damage and `TierIOError` for the device. Raises `InUseError` if
    this process has the index open, or if a process with the same pid in another PID namespace has.

    A file shorter than its own meta page says is extended with a hole, and `needs_scan` is set.
    LMDB then reports missing pages as errors, where it would crash with a bus error. If other
    processes have the index open, they have done this already.
    """
    with os_errors(f"opening the index in {path}"):
        return _open(path, capacity, map_bytes, is_durable, is_alone)


def _open(
    path: Path, capacity: int, map_bytes: int, is_durable: bool, is_alone: bool
) -> BlockIndex:
    original = check_file(path) if is_alone else None
    try:
        is_marked = check_pages(path) if is_alone else True
        forget_former_self(path, map_bytes)
        index = _opened(path, capacity, map_bytes, is_durable)
    except BaseException as error:
        if original is not None:
            os.truncate(path / DATA_NAME, original)
        if isinstance(error, lmdb.Error):
            if "already open in this process" in str(error):
                raise InUseError(
                    f"{path.parent} is open in this process already; close it first, or choose "
                    "another path or label"
                ) from None
            raise from_lmdb(error, path) from error
        raise
    index.is_marked = is_marked
    if original is not None:
        index.original_bytes = original
        index.needs_scan = True
        index.walk_blocks()
    return index


def attach_index(path: Path, capacity: int, map_bytes: int, *, is_durable: bool) -> BlockIndex:
    """Open an environment that another process has opened and loaded; nothing in it changes.

    Only the methods for any thread may be used, and `abandon` at the end. No transaction is held,
    so no page is pinned. Raises `CorruptionError`, `TierIOError` or `InUseError` (see
    `open_index`).
    """
    with os_errors(f"attaching to the index in {path}"):
        try:
            index = _opened(path, capacity, map_bytes, is_durable)
        except lmdb.Error as error:
            raise from_lmdb(error, path) from error
    index.let_go()
    return index


def _opened(path: Path, capacity: int, map_bytes: int, is_durable: bool) -> BlockIndex:
    """Open the environment. Raises `lmdb.Error`, with nothing left open."""
    env = open_environment(path, map_bytes, is_durable)
    try:
        return BlockIndex(env, path, capacity)
    except BaseException:
        env.close()
        raise


def _boot_id() -> bytes:
    """Return an id that changes at every boot; empty if the kernel does not provide it."""
    try:
        return BOOT_ID.read_bytes().strip()[:MAX_BOOT_ID_BYTES]
    except OSError:
        return b""
