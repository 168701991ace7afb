"""Reading a namespace without owning it: description, index and segments.

Guarantees: nothing is written or created, no lock of the owner is taken, and running engines are
not delayed. The index is read in LMDB read transactions, segments through read-only descriptors. A
live namespace changes during the reading. A caller that compares two parts, such as an entry and
its payload, must read again before it reports damage.

Bytes on disk may come from anybody. Data that does not parse is None, a `problem`, or a
`KVCascadeError`.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import numpy.typing as npt

from ....errors import CorruptionError, TierIOError, os_errors
from ...endurance import DayTotals, day_totals
from ..disk.filesystem import RealFile, open_read_only, read_and_close
from ..disk.transfers import read_all
from ..index.clean_close import parse_saved_slots, runs_within
from ..index.index_errors import from_lmdb
from ..index.index_file import DATA_NAME, LOCK_NAME, damaged, missing_bytes, stored_map_bytes
from ..index.index_keys import (
    BLOCKS,
    DAY,
    ENTRY_TYPE,
    EPOCH,
    IDENTITY,
    MAX_TABLES,
    META,
    NO_ENTRY,
    SESSION,
    TOTALS,
    live_key,
    number_in,
    slots_per_segment_in,
    state_key,
    totals_in,
)
from ..namespace import DESCRIPTION, LOCK, OWNERS, is_namespace_name
from ..segments.format import (
    INDEX_ENTRY_BYTES,
    MAX_DESCRIPTION_BYTES,
    SLOT_RECORD_BYTES,
    IndexEntry,
    SegmentLayout,
    parse_description,
    parse_entry,
    segment_number,
)
from ..writer.owners import MAX_PROCESSES, noted_segments

MAX_OWNERS_BYTES = 1 << 20
MAX_PARTS = 4096
"""Largest number of paths of a tier, whatever its description says."""
_MIN_MAP_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Location:
    """The directories of one namespace, below several paths."""

    name: str
    folders: tuple[Path, ...]
    """Directories in the order given; not necessarily all of the namespace."""


@dataclass(frozen=True, slots=True)
class Description:
    """Contents of `namespace.json`, and the directory of each part."""

    name: str
    label: str
    fingerprint: str
    fields: Mapping[str, Any]
    about: Mapping[str, Any]
    """Descriptive facts that are no part of the fingerprint; empty where none were recorded."""
    block_bytes: int
    slots_per_segment: int
    parts: int
    created: str
    """Time of creation in ISO 8601, as written."""
    folders: Mapping[int, Path]
    """Directory by part, for the parts that were given."""

    @property
    def layout(self) -> SegmentLayout:
        """The shape of every segment."""
        return SegmentLayout(self.block_bytes, self.slots_per_segment, self.fingerprint)

    @property
    def home(self) -> Path:
        """The directory that holds index and state."""
        return self.folders[0]

    @property
    def missing_parts(self) -> list[int]:
        """Parts whose path was not given."""
        return [part for part in range(self.parts) if part not in self.folders]


@dataclass(frozen=True, slots=True)
class IndexMeta:
    """Metadata that the index holds about the namespace."""

    entries: int
    epoch: int
    session: int
    """Number of the latest session, which counts the openings of the namespace."""
    is_clean: bool
    """True after a clean close, False while in use and after a crash."""
    written_bytes: int
    """Bytes written over the life of the namespace."""
    read_bytes: int
    """Bytes read over the life of the namespace, as of the last commit of totals."""
    day: DayTotals
    """Bytes of the last 24 hours, by every process of the namespace."""
    free: npt.NDArray[np.int64]
    """Free extents of the last clean closes, shape `(n, 2)`: first slot, slots."""
    counted: frozenset[int]
    """Segments whose free slots are included in `free`: those of processes that closed cleanly."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Every entry of the index at one moment, in the order of the hashes."""

    keys: list[bytes]
    slots: npt.NDArray[np.int64]
    """Slot of each entry; -1 where the value has not the size of an entry."""
    generations: npt.NDArray[np.uint64]
    values: npt.NDArray[np.void]
    """Raw entries, `INDEX_ENTRY_BYTES` each; their checks have not been verified."""

    def __len__(self) -> int:
        return len(self.keys)

    def raw(self, position: int) -> bytes:
        """Return the raw entry at a position."""
        return bytes(self.values[position].tobytes())

    def entry(self, position: int) -> IndexEntry | None:
        """Return the entry at a position; None if it is damaged."""
        return parse_entry(self.keys[position], self.raw(position))


def locate(paths: Sequence[Path]) -> list[Location]:
    """Return the namespaces in these paths by name; a path may be a namespace directory itself.

    Raises `TierIOError` if a path cannot be read, or if all directories belong to another user.
    """
    found: dict[str, list[Path]] = {}
    closed: TierIOError | None = None
    for path in paths:
        with os_errors(f"listing {path}"):
            folders = [path] if _is_namespace(path) else sorted(path.iterdir())
        for folder in folders:
            try:
                with os_errors(f"looking into {folder}"):
                    is_namespace = _is_namespace(folder)
            except TierIOError as error:
                closed = closed or error
                continue
            if is_namespace:
                found.setdefault(folder.resolve().name, []).append(folder)
    if closed and not found:
        raise closed
    return [Location(name, tuple(folders)) for name, folders in sorted(found.items())]


def _is_namespace(folder: Path) -> bool:
    is_named = is_namespace_name(folder.resolve().name)
    return is_named and any(_is_there(folder / name) for name in (LOCK, DESCRIPTION))


def _is_there(path: Path) -> bool:
    """Return True if the path exists. Raises `OSError` if that cannot be determined."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def read_description(location: Location) -> Description:
    """Read `namespace.json` of every part.

    Raises `CorruptionError`, `FormatError` or `TierIOError`; the first part must be among them.
    """
    documents: dict[int, dict[str, Any]] = {}
    folders: dict[int, Path] = {}
    for folder in location.folders:
        with os_errors(f"reading {folder / DESCRIPTION}"):
            data = _read_file(folder / DESCRIPTION, MAX_DESCRIPTION_BYTES)
        document = parse_description(data, str(folder))
        part = document.get("part")
        if type(part) is not int or part < 0 or part in folders:
            raise CorruptionError(f"{folder} has no valid part number; restore its namespace.json")
        documents[part], folders[part] = document, folder
    if 0 not in folders:
        raise CorruptionError(
            f"{location.folders[0]} is not the first part of its tier; give the first path too"
        )
    document = documents[0]
    parts = document.get("parts")
    about = document.get("about")
    return Description(
        name=location.name,
        label=str(document.get("label", "")),
        fingerprint=str(document.get("fingerprint", "")),
        fields=dict(document["fields"]),
        about=dict(about) if isinstance(about, Mapping) else {},
        block_bytes=document["block_bytes"],
        slots_per_segment=document["slots_per_segment"],
        parts=parts if type(parts) is int and 0 < parts <= MAX_PARTS else 1,
        created=str(document.get("created", "")),
        folders=folders,
    )


class IndexReader:
    """An index opened for reading only. One thread.

    LMDB allows no other open environment of the same directory in this process.
    """

    def __init__(self, path: Path) -> None:
        """Open the LMDB directory `path`. Raises `CorruptionError` or `TierIOError`."""
        self.path = path
        data = path / DATA_NAME
        with os_errors(f"opening the index in {path}"):
            if not data.is_file():
                raise CorruptionError(damaged(path, "it is missing"))
            missing = missing_bytes(path)
            if missing and missing > 0:
                raise CorruptionError(damaged(path, f"it is cut short by {missing} bytes"))
            map_bytes, is_locking = index_options(path)
        self.file_bytes = data.stat().st_size
        with self._named():
            self._env = lmdb.open(
                str(path),
                map_size=map_bytes,
                readonly=True,
                create=False,
                max_dbs=MAX_TABLES,
                readahead=False,
                lock=is_locking,
            )
        try:
            with self._named():
                self._env.reader_check()  # readers that were killed would pin pages
                self._meta = self._env.open_db(META, create=False)
                self._blocks = self._env.open_db(BLOCKS, create=False)
        except BaseException:
            self._env.close()
            raise

    def close(self) -> None:
        """Close the environment; idempotent."""
        self._env.close()

    def __enter__(self) -> IndexReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def meta(self) -> IndexMeta:
        """Return counts and totals as committed now."""
        with self._named(), self._env.begin(db=self._meta) as txn:
            written_bytes, read_bytes = totals_in(txn.get(TOTALS))
            is_live = any(txn.get(live_key(state)) for state in range(MAX_PROCESSES))
            free, counted = self._saved_free(txn)
            return IndexMeta(
                entries=int(txn.stat(self._blocks)["entries"]),
                epoch=number_in(txn.get(EPOCH)),
                session=number_in(txn.get(SESSION)),
                is_clean=not is_live and free is not None,
                counted=counted,
                written_bytes=written_bytes,
                read_bytes=read_bytes,
                day=day_totals(txn.get(DAY, b""), time.time()),
                free=np.zeros((0, 2), dtype=np.int64) if free is None else free,
            )

    def _saved_free(
        self, txn: lmdb.Transaction[bytes]
    ) -> tuple[npt.NDArray[np.int64] | None, frozenset[int]]:
        """Return the free runs that processes saved in their segments, and those segments'
        numbers."""
        per_segment = slots_per_segment_in(txn.get(IDENTITY, b""))
        if per_segment == 0:
            return None, frozenset()
        try:
            notes = _read_file(self.path.parent / OWNERS, MAX_OWNERS_BYTES)
        except OSError:
            return None, frozenset()
        found: list[tuple[int, int]] = []
        counted: set[int] = set()
        for state in range(MAX_PROCESSES):
            saved = parse_saved_slots(txn.get(state_key(state)))
            if saved is None or saved.epoch != number_in(txn.get(EPOCH)):
                continue
            own = noted_segments(notes, state)
            counted |= own
            found += runs_within(saved.free.tolist(), sorted(own), per_segment)
        return np.array(sorted(found), dtype=np.int64).reshape(-1, 2), frozenset(counted)

    def raw(self, key: bytes) -> bytes | None:
        """Return the raw entry of a block as committed now."""
        with self._named(), self._env.begin(db=self._blocks) as txn:
            return txn.get(key)

    def entry(self, key: bytes) -> IndexEntry | None:
        """Return the entry of a block as committed now; None if missing or damaged."""
        value = self.raw(key)
        return None if value is None else parse_entry(key, value)

    def keys_from(self, prefix: bytes, limit: int) -> list[bytes]:
        """Return up to `limit` block hashes that begin with `prefix`."""
        found: list[bytes] = []
        with self._named(), self._env.begin(db=self._blocks) as txn:
            cursor = txn.cursor()
            if cursor.set_range(prefix):
                for key in cursor.iternext(keys=True, values=False):
                    if not key.startswith(prefix) or len(found) >= limit:
                        break
                    found.append(bytes(key))
        return found

    def snapshot(self) -> Snapshot:
        """Return every entry, read in one transaction. Takes about 130 bytes of memory an entry."""
        keys: list[bytes] = []
        values = bytearray()
        odd: list[int] = []
        with self._named(), self._env.begin(db=self._blocks) as txn:
            for key, value in txn.cursor():
                if len(value) != INDEX_ENTRY_BYTES:
                    odd.append(len(keys))
                    value = NO_ENTRY
                keys.append(key)
                values += value
        table = np.frombuffer(bytes(values), dtype=ENTRY_TYPE)
        slots = table["slot"].astype(np.int64)
        slots[odd] = -1
        return Snapshot(keys, slots, table["generation"].astype(np.uint64), table)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except lmdb.Error as error:
            raise from_lmdb(error, self.path) from error


def index_options(path: Path) -> tuple[int, bool]:
    """Return the bytes to map of an LMDB directory, and whether to register as a reader.

    A directory without a reader table has no writer, and no table is created for it. Raises
    `OSError`.
    """
    size = (path / DATA_NAME).stat().st_size
    map_bytes = max(_MIN_MAP_BYTES, stored_map_bytes(path), 2 * size)
    return map_bytes, (path / LOCK_NAME).exists()


@dataclass(frozen=True, slots=True)
class FoundSegment:
    """A segment file as found on disk."""

    number: int
    path: Path
    used_bytes: int
    """Bytes used on disk."""
    problem: str
    """Damage of the file, empty if none; its blocks may be readable all the same."""


class SegmentReader:
    """The segments of a namespace, read only. Several threads may call `read_run`."""

    def __init__(self, description: Description) -> None:
        """Inspect every segment file and open those that can be opened."""
        self.layout = description.layout
        self.found: dict[int, FoundSegment] = {}
        self._description = description
        self._payload: dict[int, RealFile] = {}
        self._records: dict[int, bytes] = {}
        self._header_bytes = self.layout.header_bytes
        self.refresh()

    def refresh(self) -> None:
        """Open segments created since, and forget the records that were read."""
        self._records.clear()
        parts = self._description.parts
        for part, folder in sorted(self._description.folders.items()):
            for number, path in _segment_files(folder / "segments"):
                if number % parts == part and number not in self._payload:
                    self.found[number] = self._look(number, path)

    @property
    def readable(self) -> list[int]:
        """Numbers of the segments that could be opened, ascending."""
        return sorted(self._payload)

    def close(self) -> None:
        """Close every file; idempotent."""
        for file in self._payload.values():
            file.close()
        self._payload.clear()

    def read_run(self, first_slot: int, buffers: Sequence[memoryview]) -> None:
        """Read adjacent whole slots of one segment into buffers. Raises `OSError`."""
        number, index = divmod(first_slot, self.layout.slots)
        assert index + len(buffers) <= self.layout.slots, "a run may not cross a segment"
        file = self._payload.get(number)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, "the segment cannot be read", str(number))
        offset = self._header_bytes + index * self.layout.block_bytes
        read_all(file, buffers, offset)

    def record(self, slot: int) -> bytes:
        """Return the raw record of a slot; empty if its segment cannot be read.

        Records are read once per segment and kept until `refresh`.
        """
        number, index = divmod(slot, self.layout.slots)
        if number not in self._records:
            self._records[number] = self._read_records(number)
        start = index * SLOT_RECORD_BYTES
        return self._records[number][start : start + SLOT_RECORD_BYTES]

    def _look(self, number: int, path: Path) -> FoundSegment:
        """Open a segment. The offsets of slots do not depend on its header."""
        try:
            file = open_read_only(path)
        except OSError as error:
            return FoundSegment(number, path, 0, error.strerror or str(error))
        try:
            used = os.stat(path).st_blocks * 512
            expected = self.layout.header(number)
            head = bytearray(len(expected))
            got = file.preadv([memoryview(head)], 0)
            size = file.size()
            self._payload[number] = open_read_only(path, direct=True)
        except OSError as error:
            return FoundSegment(number, path, 0, error.strerror or str(error))
        finally:
            file.close()
        problem = "" if bytes(head[:got]) == expected else "its header is damaged"
        if size != self.layout.file_bytes:
            problem = f"it has {size} bytes in place of {self.layout.file_bytes}"
        return FoundSegment(number, path, used, problem)

    def _read_records(self, number: int) -> bytes:
        if number not in self._payload:
            return b""
        data = bytearray(self.layout.slots * SLOT_RECORD_BYTES)
        file = open_read_only(self.found[number].path)
        try:
            done = file.preadv([memoryview(data)], self.layout.records_offset)
        finally:
            file.close()
        return bytes(data[:done])


def _segment_files(folder: Path) -> Iterator[tuple[int, Path]]:
    with os_errors(f"listing {folder}"):
        names = sorted(os.listdir(folder)) if folder.is_dir() else []
    for name in names:
        number = segment_number(name)
        if number is not None:
            yield number, folder / name


def _read_file(path: Path, limit: int) -> bytes:
    return read_and_close(open_read_only(path), path, limit)
