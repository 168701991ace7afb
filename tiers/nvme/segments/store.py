"""Moves the bytes of blocks between memory and segments, for I/O threads.

Guarantees: a block enters the index only after its payload was written and, with `power`
durability, synced. Removed entries are gone from the index before their slots are rewritten. A
block that was read matches its length and checksum, or its outcome says otherwise. Device errors
are never raised; they are outcomes of blocks.

A block of another process may be overwritten while it is read. Its checksum does not match then and
its generation has changed, so it is GONE. A block that another process stored first is HELD.

Threads: several may call `write`, `read` and `remove` at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter_ns

from ....config.schema import Durability as Durability
from ....errors import ErrorKind, KVCascadeError, from_os_error
from ....logs import get_logger
from ...base import BlockHash, BlockOutcome
from ..disk.transfers import TransferLimit
from ..index.index_port import CommitOutcome, IndexPort, Removal
from .format import MAX_KEY_BYTES, IndexEntry, SlotRecord, block_checksum, parse_entry
from .segment_files import MissingSegmentError, SegmentSet

CACHED_BYTES = 512 << 10
"""Bytes that stay in a core's cache between verifying a block and copying it; smaller than most."""

_log = get_logger(__name__)

_OF_COMMIT = {
    CommitOutcome.DONE: BlockOutcome.OK,
    CommitOutcome.STALE_EPOCH: BlockOutcome.GONE,
    CommitOutcome.NO_SPACE: BlockOutcome.NO_SPACE,
    CommitOutcome.NO_PAGES: BlockOutcome.REFUSED,
    CommitOutcome.IO_ERROR: BlockOutcome.IO_ERROR,
}


@dataclass(slots=True)
class StoreCounters:
    """Work of a store since it was opened."""

    blocks_written: int = 0
    bytes_written: int = 0
    write_ns: int = 0
    blocks_read: int = 0
    bytes_read: int = 0
    read_ns: int = 0
    corrupt: int = 0
    gone: int = 0
    held: int = 0
    """Blocks that another process stored first."""
    io_errors: int = 0
    no_space: int = 0
    refused: int = 0
    """Blocks for which the index had no free page."""
    refused_keys: int = 0
    removed: int = 0
    records_repaired: int = 0


@dataclass(slots=True)
class _Write:
    """One block of a write; a write orders them by slot."""

    position: int
    key: BlockHash
    slot: int
    payload: memoryview
    entry: IndexEntry | None = None


class BlockStore:
    """Reads and writes blocks by slot."""

    def __init__(
        self,
        index: IndexPort,
        segments: SegmentSet,
        durability: Durability,
        first_generation: int,
    ) -> None:
        self.block_bytes = segments.layout.block_bytes
        self.counters = StoreCounters()
        self._index = index
        self._segments = segments
        self._durability = durability
        self._next_generation = first_generation
        self._lock = threading.Lock()
        self._deferred: list[Removal] = []
        """Removals that no job has committed yet; the next job does."""
        self._orphans: list[int] = []
        """Slots in use that no index entry names, until `take_orphans`."""
        self._deferred_epoch = 0
        self._reported_bytes = 0
        self._absorbed_bytes = 0
        """Bytes read by another process for this store, as part of `bytes_read`."""
        self._left_bytes = 0
        """Part of these bytes that the other process has not added to the index's totals."""
        self._writing: AbstractContextManager[None] = nullcontext()
        self._reading: AbstractContextManager[None] = nullcontext()

    def limit_transfers(self, n: int) -> None:
        """Let at most `n` threads write payload, and `n` read it, at a time.

        Call this before the first transfer. It is useful with more than `n` threads (see
        `concurrency`).
        """
        self._writing, self._reading = TransferLimit(n), TransferLimit(n)

    def write(
        self,
        keys: Sequence[BlockHash],
        slots: Sequence[int],
        buffers: Sequence[memoryview],
        epoch: int,
        removals: Sequence[Removal] = (),
    ) -> list[BlockOutcome]:
        """Write blocks into slots reserved for them; return one outcome per block, in the given
        order.

        `removals` are committed first, together with those that failed jobs left.
        """
        outcomes = [BlockOutcome.CANCELLED] * len(keys)
        started = perf_counter_ns()
        failure = self._commit_removals(removals, epoch)
        if failure is not None:
            return self._count_write([failure] * len(keys), started)
        writes = [
            _Write(i, key, slot, buffer)
            for i, (key, slot, buffer) in enumerate(zip(keys, slots, buffers, strict=True))
            if 0 < len(key) <= MAX_KEY_BYTES
        ]
        self._count(refused_keys=len(keys) - len(writes))
        writes.sort(key=lambda write: write.slot)
        first = self.reserve_generations(len(writes))
        for generation, write in enumerate(writes, first):
            write.entry = self._entry_for(write, generation)
        runs = [
            writes[i:j] for i, j in self._segments.layout.runs([write.slot for write in writes])
        ]
        with self._writing:
            for run in runs:
                _note(outcomes, run, self._write_payload(run))
        for run in runs:
            if outcomes[run[0].position] is BlockOutcome.OK:
                _note(outcomes, run, self._write_records(run, epoch))
        written = [w for w in writes if outcomes[w.position] is BlockOutcome.OK]
        if self._durability is Durability.POWER:
            written = self._sync(written, outcomes)
        puts = [(w.key, w.entry) for w in written if w.entry is not None]
        if puts:
            self._commit(written, outcomes, puts, epoch)
        return self._count_write(outcomes, started)

    def take_read_bytes(self) -> int:
        """Return the bytes read that are in no totals yet; the caller adds them to the index's.

        Bytes that an attached process read are included. It must have ended, or it reports them
        too.
        """
        with self._lock:
            left, self._left_bytes = self._left_bytes, 0
        return left + self._take_own_read_bytes()

    def read(
        self,
        keys: Sequence[BlockHash],
        slots: Sequence[int],
        buffers: Sequence[memoryview],
        values: Sequence[bytes | None] | None = None,
        on_right: Callable[[list[int]], None] | None = None,
    ) -> list[BlockOutcome]:
        """Read blocks into buffers of `block_bytes`; return one outcome per block, in the given
        order.

        `values` are the raw index entries if the caller has looked them up and holds a pin.
        `on_right` receives the positions of verified blocks, a few at a time, while the processor's
        cache still holds them.
        """
        started = perf_counter_ns()
        outcomes = [BlockOutcome.GONE] * len(keys)
        entries = self._entries(keys, values)
        order: list[int] = []
        for i in sorted(range(len(keys)), key=slots.__getitem__):
            entry = entries[i]
            if entry is not None and entry.slot == slots[i]:
                outcomes[i] = BlockOutcome.OK
                order.append(i)
        with self._reading:
            for begin, end in self._segments.layout.runs([slots[i] for i in order]):
                run = order[begin:end]
                outcome = self._read_run(slots[run[0]], [buffers[i] for i in run])
                for i in run:
                    outcomes[i] = outcome
        few = max(1, CACHED_BYTES // self.block_bytes)
        for start in range(0, len(order), few):
            some = order[start : start + few]
            for i in some:
                entry = entries[i]
                if outcomes[i] is BlockOutcome.CORRUPT:
                    self._drop_foreign(keys[i], entry)
                elif outcomes[i] is BlockOutcome.OK and entry is not None:
                    outcomes[i] = self._verify(keys[i], entry, buffers[i])
            if on_right is not None:
                on_right([i for i in some if outcomes[i] is BlockOutcome.OK])
        return self._count_read(outcomes, started)

    def remove(self, removals: Sequence[Removal], epoch: int) -> bool:
        """Commit removals, and the epoch if it is new. Return False if they must be retried."""
        failure = self._commit_removals(removals, epoch)
        return failure is None or failure is BlockOutcome.GONE

    def repair_records(self, slots: Set[int]) -> int:
        """Rewrite the records of these slots from the index; return how many were rewritten.

        A slot without a record cannot be chosen for eviction. `take_orphans` returns the slots that
        no index entry names.
        """
        repaired: set[int] = set()
        failed: set[int] = set()
        try:
            self._repair_records(slots, repaired, failed)
            self.note_orphans(slots - repaired - failed)
        except (OSError, KVCascadeError) as error:
            _log.warning("slot records could not be repaired: %s", error)
        self._count(records_repaired=len(repaired))
        return len(repaired)

    def note_orphans(self, slots: Iterable[int]) -> None:
        """Queue slots in use that no entry names, for `take_orphans`."""
        with self._lock:
            self._orphans.extend(slots)

    def take_orphans(self) -> list[int]:
        """Return slots that no entry names, each once; they may receive blocks meanwhile."""
        if not self._orphans:
            return []
        with self._lock:
            taken, self._orphans = self._orphans, []
        return taken

    def defer_removals(self, removals: Iterable[Removal], epoch: int) -> None:
        """Queue removals of a job that never ran; the next job commits them."""
        with self._lock:
            self._deferred.extend(removals)
            self._deferred_epoch = max(self._deferred_epoch, epoch)

    # -- for a process that moves blocks in place of this one (see `attach`) --------------------

    @property
    def durability(self) -> Durability:
        """Failures that a stored block survives."""
        return self._durability

    @property
    def has_lost_index(self) -> bool:
        """True if this process cannot change the index until it reopens it."""
        return self._index.has_panicked

    def take_deferred(self) -> list[Removal]:
        """Return the removals queued by `defer_removals` and failed commits, each once, for another
        process."""
        with self._lock:
            taken, self._deferred = self._deferred, []
        return taken

    def reserve_generations(self, n: int) -> int:
        """Return the first of `n` consecutive generations that nobody else gets."""
        with self._lock:
            first = self._next_generation
            self._next_generation += n
        return first

    @property
    def reported_bytes(self) -> int:
        """Bytes that this process read and added to the index's totals."""
        return self._reported_bytes

    def absorb(self, counts: Mapping[str, int], reported_bytes: int) -> None:
        """Add the work of an attached process to the counters.

        That process adds the bytes it reads to the index's totals itself, so far `reported_bytes`.
        The rest is left to `take_read_bytes`.
        """
        read_bytes = counts.get("bytes_read", 0)
        with self._lock:
            self._add(counts)
            self._absorbed_bytes += read_bytes
            self._left_bytes += read_bytes - reported_bytes

    # -- inside --------------------------------------------------------------------------------

    def _commit(
        self,
        written: Sequence[_Write],
        outcomes: list[BlockOutcome],
        puts: Sequence[tuple[BlockHash, IndexEntry]],
        epoch: int,
    ) -> None:
        held: set[BlockHash] = set()
        read_bytes = self._take_own_read_bytes()
        outcome = self._index.commit(epoch, (), puts, self._segments.is_own, held, read_bytes)
        _note(outcomes, written, _OF_COMMIT[outcome])
        if held:
            _note(outcomes, [write for write in written if write.key in held], BlockOutcome.HELD)
            self._count(held=len(held))

    def _take_own_read_bytes(self) -> int:
        """Return the bytes that this process read since the last call."""
        with self._lock:
            now = self.counters.bytes_read - self._absorbed_bytes
            grown, self._reported_bytes = now - self._reported_bytes, now
        return grown

    def _commit_removals(self, removals: Sequence[Removal], epoch: int) -> BlockOutcome | None:
        """Commit removals; return the outcome that stops the write, or None."""
        with self._lock:
            due, self._deferred = [*self._deferred, *removals], []
        if not due and epoch == self._index.epoch:
            return None
        outcome = self._index.commit(epoch, due)
        if outcome is CommitOutcome.DONE:
            self._count(removed=len(due))
            return None
        if outcome is not CommitOutcome.STALE_EPOCH:  # after a reset there is nothing to remove
            self.defer_removals(due, epoch)
        return _OF_COMMIT[outcome]

    def _entry_for(self, write: _Write, generation: int) -> IndexEntry:
        checksum = block_checksum(write.key, write.payload)
        return IndexEntry(write.slot, len(write.payload), checksum, generation)

    def _repair_records(self, slots: Set[int], repaired: set[int], failed: set[int]) -> None:
        bad_pages: set[tuple[int, int]] = set()
        for key, entry in self._index.keys():
            slot = entry.slot
            if slot not in slots:
                continue
            page = self._segments.page_of(slot)
            if page in bad_pages:
                failed.add(slot)
                continue
            record = SlotRecord(
                key, entry.generation, entry.checksum, entry.length, self._index.epoch
            )
            try:
                self._segments.write_records(slot, [record.pack()])
                repaired.add(slot)
            except (OSError, KVCascadeError) as error:
                if not bad_pages:
                    _log.warning("some slot records could not be repaired: %s", error)
                bad_pages.add(page)
                failed.add(slot)

    def _write_payload(self, run: Sequence[_Write]) -> BlockOutcome:
        assert all(len(write.payload) == self.block_bytes for write in run)
        try:
            self._segments.write_run(run[0].slot, [write.payload for write in run])
        except OSError as error:
            return self._failed(error, "writing blocks")
        return BlockOutcome.OK

    def _write_records(self, run: Sequence[_Write], epoch: int) -> BlockOutcome:
        records: list[bytes] = []
        for write in run:
            entry = write.entry
            assert entry is not None
            record = SlotRecord(write.key, entry.generation, entry.checksum, entry.length, epoch)
            records.append(record.pack())
        try:
            self._segments.write_records(run[0].slot, records)
        except OSError as error:
            return self._failed(error, "writing what slots hold")
        return BlockOutcome.OK

    def _sync(self, written: Sequence[_Write], outcomes: list[BlockOutcome]) -> list[_Write]:
        slots_per_segment = self._segments.layout.slots
        durable: list[_Write] = []
        for number in sorted({write.slot // slots_per_segment for write in written}):
            part = [write for write in written if write.slot // slots_per_segment == number]
            try:
                self._segments.sync(number)
                durable.extend(part)
            except OSError as error:
                _note(outcomes, part, self._failed(error, "syncing blocks"))
        return durable

    def _entries(
        self, keys: Sequence[BlockHash], values: Sequence[bytes | None] | None
    ) -> list[IndexEntry | None]:
        if values is None:
            return [self._index.entry(key) for key in keys]
        return [
            None if value is None else parse_entry(key, value)
            for key, value in zip(keys, values, strict=True)
        ]

    def _read_run(self, first_slot: int, buffers: Sequence[memoryview]) -> BlockOutcome:
        try:
            self._segments.read_run(first_slot, buffers)
        except MissingSegmentError:
            return BlockOutcome.CORRUPT
        except OSError as error:
            return self._failed(error, "reading blocks")
        return BlockOutcome.OK

    def _verify(self, key: BlockHash, entry: IndexEntry, payload: memoryview) -> BlockOutcome:
        if entry.length == len(payload) and entry.checksum == block_checksum(key, payload):
            return BlockOutcome.OK
        now = self._index.entry(key)
        if now is None or now.generation != entry.generation:
            return BlockOutcome.GONE
        self._drop_foreign(key, entry)
        return BlockOutcome.CORRUPT

    def _drop_foreign(self, key: BlockHash, entry: IndexEntry | None) -> None:
        """Remove a damaged block of another process from the index, so that it can be stored again.

        Its slot stays in use. The owner finds it without an entry when it chooses the slot for
        eviction.
        """
        if entry is not None and not self._segments.is_own(entry.slot):
            self._segments.reopen_at_next_read(entry.slot)
            self._index.take_away(self._index.epoch, [(key, entry.pack(key))])

    def _failed(self, error: OSError, doing: str) -> BlockOutcome:
        mapped = from_os_error(error, doing)
        is_full = mapped.kind is ErrorKind.NO_SPACE
        seen = self.counters.no_space if is_full else self.counters.io_errors
        if seen == 0:
            _log.warning("%s", mapped)
        return BlockOutcome.NO_SPACE if is_full else BlockOutcome.IO_ERROR

    def _count_write(self, outcomes: list[BlockOutcome], started: int) -> list[BlockOutcome]:
        done = outcomes.count(BlockOutcome.OK)
        self._count(
            blocks_written=done,
            bytes_written=done * self.block_bytes,
            write_ns=perf_counter_ns() - started,
            **_failures(outcomes),
        )
        return outcomes

    def _count_read(self, outcomes: list[BlockOutcome], started: int) -> list[BlockOutcome]:
        done = outcomes.count(BlockOutcome.OK)
        corrupt = outcomes.count(BlockOutcome.CORRUPT)
        if corrupt:
            _log.warning("%d blocks did not match their checksums; they count as misses", corrupt)
        self._count(
            blocks_read=done,
            bytes_read=done * self.block_bytes,
            read_ns=perf_counter_ns() - started,
            **_failures(outcomes),
        )
        return outcomes

    def _count(self, **more: int) -> None:
        with self._lock:
            self._add(more)

    def _add(self, more: Mapping[str, int]) -> None:
        """Add to the counters; the caller holds the lock."""
        for name, value in more.items():
            setattr(self.counters, name, getattr(self.counters, name) + value)


def _note(outcomes: list[BlockOutcome], writes: Sequence[_Write], outcome: BlockOutcome) -> None:
    for write in writes:
        outcomes[write.position] = outcome


def _failures(outcomes: Sequence[BlockOutcome]) -> dict[str, int]:
    return {
        "corrupt": outcomes.count(BlockOutcome.CORRUPT),
        "gone": outcomes.count(BlockOutcome.GONE),
        "io_errors": outcomes.count(BlockOutcome.IO_ERROR),
        "no_space": outcomes.count(BlockOutcome.NO_SPACE),
        "refused": outcomes.count(BlockOutcome.REFUSED),
    }
