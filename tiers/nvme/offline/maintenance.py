"""Changing a namespace from outside: dropping entries, making the index anew.

Of a namespace that engines have open only entries can be taken away (`take_entries`), by the commit
with which engines take away a block of each other's that they find damaged. Everything else needs
the namespace for itself (`exclusive`), since engines count their slots in memory: every change is
one index transaction that also marks the namespace as not cleanly closed, so that the next start
reads all entries once and counts the free slots itself.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import lmdb

from ....errors import CorruptionError, os_errors
from ..disk.filesystem import RealFileSystem
from ..index.block_index import (
    GENERATIONS_PER_SESSION,
    BlockIndex,
    attach_index,
)
from ..index.index_errors import from_lmdb, from_outcome
from ..index.index_file import DATA_NAME
from ..index.index_keys import (
    BLOCKS,
    EPOCH,
    FORMAT,
    IDENTITY,
    IS_LIVE,
    MAX_TABLES,
    META,
    SESSION,
    TOTALS,
    IndexIdentity,
    live_key,
    pack_number,
    pack_totals,
    state_key,
)
from ..index.index_port import CommitOutcome
from ..namespace import LOCK, OWNERS, REMOVAL_WAIT_S, described_layout
from ..segments.format import FORMAT_VERSION, IndexEntry, SlotRecord, segment_name
from ..segments.segment_files import SegmentSet
from ..writer.capacity import index_bytes
from ..writer.owners import MAX_PROCESSES, Owners
from .reader import Description

KEYS_PER_TRANSACTION = 65536
KEYS_BESIDE_ENGINES = 256
"""Per transaction while engines run: their commits wait for it."""
SPARE_BYTES = 64 << 20
"""Of address space: what a large transaction takes beyond what stays."""
DAMAGED_SUFFIX = ".damaged"


@contextmanager
def exclusive(description: Description) -> Iterator[None]:
    """Own a namespace. Raises `InUseError` with the owner's pid, or `TierIOError`."""
    fs = RealFileSystem()
    with ExitStack() as held:
        with os_errors(f"locking {description.home}"):
            for _, folder in sorted(description.folders.items()):
                held.callback(fs.lock(folder / LOCK).release)
        yield


@dataclass(frozen=True, slots=True)
class Drop:
    """An entry that shall go, if it still is exactly this one."""

    key: bytes
    value: bytes


def drop_entries(description: Description, drops: Sequence[Drop]) -> int:
    """Remove entries; returns how many were still there. Needs `exclusive`."""
    path = description.home / "index"
    removed = 0
    with _writable(path, _map_bytes(description)) as env:
        meta, blocks = env.open_db(META), env.open_db(BLOCKS)
        for start in range(0, max(1, len(drops)), KEYS_PER_TRANSACTION):
            with env.begin(write=True, db=blocks) as txn:
                for drop in drops[start : start + KEYS_PER_TRANSACTION]:
                    if txn.get(drop.key) == drop.value:
                        txn.delete(drop.key)
                        removed += 1
                for state in range(MAX_PROCESSES):
                    txn.delete(state_key(state), db=meta)
                txn.put(live_key(0), IS_LIVE, db=meta)
    return removed


def take_entries(description: Description, drops: Sequence[Drop]) -> int:
    """Remove entries of a namespace that engines may have open; returns how many were still there.

    The engines reuse the slots when their turn to leave comes. Each commit survives a loss of
    power, as theirs may have to, and so that no clean mark outlives it. What a killed process has
    not removed is there as before. Raises one of our errors; a reset meanwhile has removed all.
    """
    removed = 0
    with _beside_engines(description) as index:
        for start in range(0, len(drops), KEYS_BESIDE_ENGINES):
            batch = drops[start : start + KEYS_BESIDE_ENGINES]
            outcome, count = index.take_away(index.epoch, [(d.key, d.value) for d in batch])
            removed += count
            if outcome is CommitOutcome.STALE_EPOCH:
                break
            if outcome is not CommitOutcome.DONE:
                raise from_outcome(outcome, index.path)
    return removed


def write_records(description: Description, records: Sequence[tuple[int, SlotRecord]]) -> None:
    """Write slot records anew: (slot, record). Needs `exclusive`."""
    layout = description.layout
    for slot, record in records:
        number, index = divmod(slot, layout.slots)
        path = segment_path(description, number)
        with os_errors(f"writing {path}"):
            file = RealFileSystem(direct=False).open(path)
            try:
                packed = record.pack()
                file.pwritev([memoryview(packed)], layout.records_offset + index * len(packed))
            finally:
                file.close()


def make_segments_whole(description: Description, numbers: Sequence[int]) -> int:
    """Put header and size of segment files right; returns how many. Needs `exclusive`."""
    if not numbers:
        return 0
    folders = [description.folders[part] / "segments" for part in range(description.parts)]
    segments = SegmentSet(RealFileSystem(), folders, description.layout)
    try:
        for number in numbers:
            segments.open(number)
    finally:
        segments.close()
    return segments.repaired


def remove_segments(description: Description, numbers: Sequence[int]) -> None:
    """Delete segment files that hold no block. Needs `exclusive`."""
    if numbers:
        drop_entries(description, ())  # the saved free extents are history: say so first
    for number in numbers:
        path = segment_path(description, number)
        with os_errors(f"removing {path}"):
            os.unlink(path)


@dataclass(frozen=True, slots=True)
class Totals:
    """Bytes over the life of a namespace."""

    written: int = 0
    read: int = 0


def replace_index(
    description: Description,
    entries: Sequence[tuple[bytes, IndexEntry]],
    epoch: int,
    session: int,
    totals: Totals,
) -> Path | None:
    """Make an index of these entries in place of the one that is there. Needs `exclusive`.

    Returns where the old one went; None if there was none. Every generation must be below
    `session * GENERATIONS_PER_SESSION`, so that later writes are newer.
    """
    index = description.home / "index"
    fresh = index.with_name("index.new")
    limit = (session + 1) * GENERATIONS_PER_SESSION
    assert all(entry.generation < limit for _, entry in entries)
    with os_errors(f"making {fresh}"):
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
    identity = IndexIdentity(
        bytes.fromhex(description.fingerprint),
        description.block_bytes,
        description.slots_per_segment,
    )
    with _writable(fresh, _map_bytes(description)) as env:
        with env.begin(write=True) as txn:
            meta, blocks = env.open_db(META, txn=txn), env.open_db(BLOCKS, txn=txn)
            for key, entry in entries:
                txn.put(key, entry.pack(key), db=blocks)
            for name, value in (
                (FORMAT, pack_number(FORMAT_VERSION)),
                (IDENTITY, identity.pack()),
                (EPOCH, pack_number(epoch)),
                (SESSION, pack_number(session)),
                (live_key(0), IS_LIVE),
                (TOTALS, pack_totals(totals.written, totals.read)),
            ):
                txn.put(name, value, db=meta)
        env.sync(True)
    return _swap(index, fresh)


@contextmanager
def _beside_engines(description: Description) -> Iterator[BlockIndex]:
    """Be one more process of a namespace, without segments or state, that only takes away."""
    fs, home = RealFileSystem(), description.home
    with ExitStack() as held:
        with os_errors(f"joining {home}"):
            for _, folder in sorted(description.folders.items()):
                lock = fs.lock(folder / LOCK, shared=True, wait_s=REMOVAL_WAIT_S, is_noted=False)
                held.callback(lock.release)
            owners = Owners(fs.byte_locks(home / OWNERS), str(home))
            held.callback(owners.close)
            owners.enter(is_guest=True, leaves_state=False)
            layout = described_layout(fs, home)  # inside the gate: it changes with who is alone
            if layout is None:
                raise CorruptionError(f"{home} has lost its namespace.json; start its engine first")
            # As the engines map it, whatever the file says of itself: a command that had it alone
            # may have mapped more, and what grows beyond their maps is lost to all of them.
            index = attach_index(home / "index", 0, layout.index_bytes, is_durable=True)
            held.callback(index.abandon)
        owners.leave_gate()
        index.sync()  # what engines left unsynced, while none of them waits for a commit
        yield index


def segment_path(description: Description, number: int) -> Path:
    """Where a segment lies. Raises `CorruptionError` if its path was not given."""
    folder = description.folders.get(number % description.parts)
    if folder is None:
        raise CorruptionError(f"segment {number} lies in a path that was not given; give all paths")
    return folder / "segments" / segment_name(number)


def _swap(index: Path, fresh: Path) -> Path | None:
    """Put the new directory in the old one's place; the old one is kept beside it."""
    kept = index.with_name(index.name + DAMAGED_SUFFIX)
    with os_errors(f"replacing {index}"):
        had_one = index.exists()
        if had_one:
            shutil.rmtree(kept, ignore_errors=True)
            os.rename(index, kept)
        os.rename(fresh, index)
        RealFileSystem().sync_dir(index.parent)
    return kept if had_one else None


def _map_bytes(description: Description) -> int:
    folders = [folder / "segments" for folder in description.folders.values()]
    segments = sum(len(os.listdir(folder)) for folder in folders if folder.is_dir())
    slots = segments * description.slots_per_segment
    index = description.home / "index" / DATA_NAME
    return SPARE_BYTES + index_bytes(slots) + (index.stat().st_size if index.exists() else 0)


@contextmanager
def _writable(path: Path, map_bytes: int) -> Iterator[lmdb.Environment]:
    """An LMDB environment whose commits survive a loss of power."""
    try:
        env = lmdb.open(
            str(path), map_size=map_bytes, mode=0o600, max_dbs=MAX_TABLES, readahead=False
        )
        try:
            yield env
        finally:
            env.close()
    except lmdb.Error as error:
        raise from_lmdb(error, path) from error
