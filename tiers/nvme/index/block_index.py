"""The index: block hash to slot, length, checksum and generation, in an LMDB environment.

It is the only truth about what the tier holds. A commit is atomic: after `kill -9` it is there or
not. With `is_durable` it also survives a loss of power; the payload must be synced before.

Threads: the first methods of `BlockIndex`, `refresh` to `let_go`, belong to the manager's thread,
which reads through one held transaction (memory-mapped, no system call); the last, `load` to
`walk_blocks`, come before and after all others. What lies between may come from any thread. Two
environments on the same directory must not be open in one process; several processes may have it
open, and must all map the same number of bytes. A transaction that is held keeps pages from being
used again, by all processes: `release` it where a step ends.

An *epoch* numbers the resets of the namespace. The first commit of a later epoch empties the
table in the same transaction, and a commit of an earlier one is refused, so no block crosses a
reset whatever order jobs run in.
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
from .clean_mark import write_mark
from .index_environment import forget_former_self, open_environment
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
from .index_scan import lots
from .saved_slots import SavedSlots, pack_saved_slots, parse_saved_slots

GENERATIONS_PER_SESSION = 1 << 40
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MAX_BOOT_ID_BYTES = 64
NO_PAGES_TRIES = 11
NO_PAGES_PAUSE_S = 0.05
"""Between two tries of a commit that finds no page. Who reads holds pages for a part of a step, or
until its upkeep, which comes as often as this: 0.01 s mostly, 0.24 s where four engines and their
movers shared two cores."""


@dataclass(frozen=True, slots=True)
class Session:
    """One opening of an index by one process."""

    number: int
    """Over all processes: no two are equal, so the generations of a session are its own."""
    use: int
    """How often this state number was used, this time included."""
    saved: SavedSlots | None
    """None if the last process with this state number did not close cleanly, or there was none."""
    proven_from: int
    """Slot records with a smaller generation may be older than the entries: a loss of power."""


class BlockIndex:
    """An open index; see `open_index`."""

    def __init__(
        self,
        env: lmdb.Environment,
        path: Path,
        capacity: int,
        wall_clock: Callable[[], float] = time.time,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """`wall_clock` gives seconds since 1970; `pause` waits for so many."""
        self.path = path
        self.map_bytes = int(env.info()["map_size"])
        """Address space."""
        self.wall_clock = wall_clock
        self.pause = pause
        self.capacity = capacity
        self.entries_at_open = 0
        """Over the whole namespace."""
        self.needs_scan = False
        """Set if pages were missing, or a close did not get to its end: saved free extents say
        nothing then."""
        self.is_marked = True
        """False if nobody vouches for all of the file (`clean_mark`)."""
        self.dropped_by_scan = 0
        """Entries that could not be right."""
        self.reset_at_open = 0
        """Entries that went because a reset was asked for that had not been committed."""
        self.epoch = 0
        """The latest epoch that is known to be committed."""
        self.totals = (0, 0)
        """Bytes (written, read) over the life of the namespace."""
        self.taken_at_open = 0
        """Entries that were taken away (`take_away`) over the life of the namespace."""
        self.damaged_lookups = 0
        self.has_panicked = False
        """LMDB could not write its head, and takes no more changes from this process."""
        """Lookups that met a damaged entry or page; each was answered as a miss."""
        self.original_bytes: int | None = None
        """Size to restore if opening fails: the file was shorter than its meta page says."""
        self._env = env
        self._state = 0
        with self._env.begin(write=True) as txn:
            self._meta = self._env.open_db(META, txn=txn)
            self._blocks = self._env.open_db(BLOCKS, txn=txn)
        self._txn = self._env.begin(db=self._blocks)

    # -- the manager's thread ------------------------------------------------------------------

    def refresh(self) -> None:
        """See what was committed until now. Costs about half a microsecond.

        If that cannot be, everything is a miss until it can.
        """
        self._txn.abort()
        try:
            self._txn = self._env.begin(db=self._blocks)
        except lmdb.Error:
            self.damaged_lookups += 1

    def release(self) -> None:
        """Hold no pages until the next `refresh`, without which nothing may be asked."""
        self._txn.abort()

    def value_of(self, key: bytes) -> bytes | None:
        """The raw entry of a block; None if there is none."""
        try:
            return self._txn.get(key)
        except lmdb.Error:
            self.damaged_lookups += 1
            return None

    def slot_of(self, key: bytes) -> int:
        """The slot of a block, or -1."""
        value = self.value_of(key)
        return -1 if value is None else self.slot_in(key, value)

    def slot_in(self, key: bytes, value: bytes) -> int:
        """The slot that a raw entry names, or -1."""
        slot = slot_in_entry(key, value)
        if 0 <= slot < self.capacity:
            return slot
        if slot < 0:  # otherwise another process has a larger capacity
            self.damaged_lookups += 1
        return -1

    def seen_epoch(self) -> int:
        """The epoch that the held transaction sees; -1 if that cannot be read."""
        try:
            seen = number_in(self._txn.get(EPOCH, db=self._meta))
        except lmdb.Error:
            self.damaged_lookups += 1
            return -1
        self.epoch = max(self.epoch, seen)
        return seen

    def let_go(self) -> None:
        """Hold no transaction until the next `refresh`, and know the epoch of the last commit."""
        self.epoch = self.seen_epoch()
        self._txn.abort()

    # -- any thread ----------------------------------------------------------------------------

    def sync(self) -> None:
        """Make durable what was committed, by whichever process. Raises one of our errors."""
        with self._damage_named():
            self._env.sync(True)

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
        is_own: SlotTest | None = None,
        held: set[BlockHash] | None = None,
        read_bytes: int = 0,
    ) -> CommitOutcome:
        """Remove and add entries in one transaction, removals first. All or nothing.

        With `is_own`, the first of two processes wins: a block that lies in a slot that is not
        one's own is not added, but put into `held`. `read_bytes`: bytes read back since the last
        commit, for the totals.

        Waits, `NO_PAGES_TRIES - 1` pauses at most, while the map is full: others read what was
        before, and keep the pages of it that were freed since.
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
        """Remove entries that are still exactly these (key and value), whoever owns their slots.

        Returns how many there were. The owner finds the slots when they shall be evicted; those of
        a process that has closed are counted anew when it starts.
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
        """True if anybody took entries away since this process opened the index."""
        with self._damage_named(), self._env.begin(db=self._meta) as txn:
            return number_in(txn.get(TAKEN)) != self.taken_at_open

    def note_proven(self) -> None:
        """No slot record of the namespace is older than the entry that names the slot."""
        with suppress(lmdb.Error), self._env.begin(write=True, db=self._meta) as txn:
            txn.put(BOOT, pack_number(0) + _boot_id())

    def still_in(
        self, blocks: Iterable[tuple[BlockHash, int]]
    ) -> tuple[int, list[tuple[BlockHash, int]]]:
        """The committed epoch, and those of the (hash, slot) pairs that the index agrees with."""
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
        """Read every entry, drop those that cannot be right, and return the slots in use.

        Of two entries on one slot the later generation stays. The masks are flags per slot: only
        entries on slots in `is_mine` (None: all) are judged and returned, and those in `is_lost`
        are dropped, as are, `and_beyond`, damaged ones and those beyond the capacity. Raises
        `CorruptionError`.
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
        """Every block and its entry, in the order of the hashes, as committed when it is read."""
        with self._damage_named():
            for key, value in chain.from_iterable(lots(self._env, self._blocks)):
                entry = parse_entry(key, value)
                if entry is not None:
                    yield key, entry

    def slots_and_generations(
        self,
    ) -> Iterator[tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64]]]:
        """Of every entry, as committed when it is read, some at a time."""
        with self._damage_named():
            for lot in lots(self._env, self._blocks):
                whole = (value for _, value in lot if len(value) == INDEX_ENTRY_BYTES)
                table = np.frombuffer(b"".join(whole), dtype=ENTRY_TYPE)
                yield table["slot"], table["generation"]

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
                record = txn.get(DAY, b"")
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
        """Check what this index is for, and mark it in use by this state number.

        An index that was never filled in is refused unless `may_create`.

        `wanted_epoch` larger than the stored one: a reset had not been committed; it is now.
        `started_epoch`, if it is not the stored one: there were resets since then; so is another.
        """
        self._state = state
        with self._damage_named(), self._env.begin(write=True, db=self._meta) as txn:
            if may_create and txn.get(FORMAT) is None:
                txn.put(FORMAT, pack_number(FORMAT_VERSION))
                txn.put(IDENTITY, identity.pack())
            self._check(txn, identity)
            self.epoch = number_in(txn.get(EPOCH))
            if wanted_epoch > self.epoch or started_epoch not in (None, self.epoch):
                # Nobody vouches for the number that a process which is alone has found.
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
                self.needs_scan = True  # it says closed, but may not all be of that moment
        self.sync()  # from here on the mark of the last close counts no more
        self.original_bytes = None
        self.forget_dead_readers()
        self.refresh()
        return Session(number, use, saved, proven_from)

    def close(self, saved: SavedSlots | None, read_bytes: int = 0) -> None:
        """Close. With `saved`, the next open need not scan. Raises one of our errors.

        The last to close leaves the mark by which the next one need not look at every page.
        """
        self._txn.abort()  # while this waits for the disk, others need the pages
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
        """Let go without marking anything; what was committed stays."""
        self._txn.abort()
        self._env.close()
        if self.original_bytes is not None:
            os.truncate(self.path / DATA_NAME, self.original_bytes)

    def walk_blocks(self) -> None:
        """Walk every page of the table; if one does not read, let go and raise."""
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
        """One try of `commit`."""
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
        """True if a process has it open, or died and nobody has been alone since."""
        states = range(MAX_PROCESSES)
        return any(txn.get(live_key(state), db=self._meta) is not None for state in states)

    def _note_boot(self, txn: lmdb.Transaction[bytes], session: int) -> int:
        """From which generation on slot records are as new as the entries that name them.

        A write puts the record before the entry, so only a loss of power can take the record alone:
        where the machine was started since (or cannot say), nothing of earlier sessions is proven.
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
        """Positions of all entries but the latest on each slot."""
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

    `capacity` in slots. `map_bytes` of address space bound the size of the file; all processes that
    have it open name the same. Raises `CorruptionError` for damage, `TierIOError` for the device,
    `InUseError` if this process has it open, or one of its number in another PID namespace. Does
    not look at any entry: `BlockIndex.load` comes next.

    A file that is shorter than its own meta page says is extended with a hole, so that a read of
    the missing pages is an error that LMDB reports and not a bus error, and `needs_scan` is set. If
    others have it open, they have seen to that.
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
    """Open an environment that another process has open and loaded; changes nothing in it.

    What any thread may call is of use, and `abandon` at the end: no transaction is held, so no page
    is pinned. Raises `CorruptionError`, `TierIOError` or `InUseError` (see `open_index`).
    """
    with os_errors(f"attaching to the index in {path}"):
        try:
            index = _opened(path, capacity, map_bytes, is_durable)
        except lmdb.Error as error:
            raise from_lmdb(error, path) from error
    index.let_go()
    return index


def _opened(path: Path, capacity: int, map_bytes: int, is_durable: bool) -> BlockIndex:
    """Raises `lmdb.Error`, and has nothing open then."""
    env = open_environment(path, map_bytes, is_durable)
    try:
        return BlockIndex(env, path, capacity)
    except BaseException:
        env.close()
        raise


def _boot_id() -> bytes:
    """Another one whenever the machine starts; empty where the kernel does not tell."""
    try:
        return BOOT_ID.read_bytes().strip()[:MAX_BOOT_ID_BYTES]
    except OSError:
        return b""
