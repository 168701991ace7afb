"""Changing a namespace from outside its engines: removing entries, replacing the index.

While engines have the namespace open, entries can only be removed (`take_entries`). That uses the
commit with which engines remove each other's damaged blocks. Every other change needs the namespace
exclusively (`exclusive`), because engines count their slots in memory. Such a change is one index
transaction that also marks the namespace as not cleanly closed. The next start then reads all
entries once and counts the free slots itself.
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
"""Entries removed in one transaction while no engine runs."""
KEYS_BESIDE_ENGINES = 256
"""Entries removed in one transaction while engines run, as their commits wait for it."""
SPARE_BYTES = 64 << 20
"""Address space that a large transaction needs beyond its final size."""
DAMAGED_SUFFIX = ".damaged"


@contextmanager
def exclusive(description: Description) -> Iterator[None]:
    """Own a namespace exclusively. Raises `InUseError` with the owner's pid, or `TierIOError`."""
    fs = RealFileSystem()
    with ExitStack() as held:
        with os_errors(f"locking {description.home}"):
            for _, folder in sorted(description.folders.items()):
                held.callback(fs.lock(folder / LOCK).release)
        yield


@dataclass(frozen=True, slots=True)
class Drop:
    """An entry to remove if it still has exactly this key and value."""

    key: bytes
    value: bytes


def drop_entries(description: Description, drops: Sequence[Drop]) -> int:
    """Remove entries; return how many still existed. Needs `exclusive`."""
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
    """Remove entries while engines may have the namespace open; return how many still existed.

    Engines reuse the slots once they choose them for eviction. Each commit survives a loss of
    power, so that no clean mark outlives it. If the process is killed, the remaining entries stay.
    If the namespace is reset meanwhile, all entries are gone. Raises a `KVCascadeError`.
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
    """Rewrite slot records, given as (slot, record). Needs `exclusive`."""
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
    """Repair header and size of segment files; return how many were repaired. Needs `exclusive`."""
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
        drop_entries(description, ())  # invalidate the saved free extents first
    for number in numbers:
        path = segment_path(description, number)
        with os_errors(f"removing {path}"):
            os.unlink(path)


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals over the life of a namespace, in bytes."""

    written: int = 0
    read: int = 0


def replace_index(
    description: Description,
    entries: Sequence[tuple[bytes, IndexEntry]],
    epoch: int,
    session: int,
    totals: Totals,
) -> Path | None:
    """Replace the index by one with these entries. Needs `exclusive`.

    Returns the path to which the old index was moved; None if there was none. Every generation must
    be below `(session + 1) * GENERATIONS_PER_SESSION`, so that later writes are newer.
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
    """Join a namespace beside its engines, without segments or state, to remove entries."""
    fs, home = RealFileSystem(), description.home
    with ExitStack() as held:
        with os_errors(f"joining {home}"):
            for _, folder in sorted(description.folders.items()):
                lock = fs.lock(folder / LOCK, shared=True, wait_s=REMOVAL_WAIT_S, is_noted=False)
                held.callback(lock.release)
            owners = Owners(fs.byte_locks(home / OWNERS), str(home))
            held.callback(owners.close)
            owners.enter(is_guest=True, leaves_state=False)
            layout = described_layout(fs, home)  # inside the gate: a process alone may change it
            if layout is None:
                raise CorruptionError(f"{home} has lost its namespace.json; start its engine first")
            # Map as many bytes as the engines do, whatever the file says. A command that had the
            # index exclusively may have mapped more. An index that grows beyond the maps of the
            # engines is lost to all of them.
            index = attach_index(home / "index", 0, layout.index_bytes, is_durable=True)
            held.callback(index.abandon)
        owners.leave_gate()
        index.sync()  # commits that engines left unsynced, before they wait for ours
        yield index


def segment_path(description: Description, number: int) -> Path:
    """Return the path of a segment. Raises `CorruptionError` if its folder was not given."""
    folder = description.folders.get(number % description.parts)
    if folder is None:
        raise CorruptionError(f"segment {number} lies in a path that was not given; give all paths")
    return folder / "segments" / segment_name(number)


def _swap(index: Path, fresh: Path) -> Path | None:
    """Put the new directory in place of the old one, which is kept beside it."""
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
    """Yield an LMDB environment whose commits survive a loss of power."""
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
