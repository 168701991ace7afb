"""Directories of a namespace as the writer of a path uses them: locks, description, segments.

`lock` in each directory is held shared while the writer lives, so that an older version neither
opens nor removes the namespace. Its time of change is the last use. All functions raise a
`KVCascadeError`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ......errors import (
    FINAL_ERRORS,
    ConfigError,
    CorruptionError,
    InUseError,
    KVCascadeError,
    os_errors,
)
from ......logs import get_logger
from ....disk.filesystem import FileLock, FileSystem
from ....namespace import (
    DESCRIPTION,
    INDEX_FILE,
    LOCK,
    MAX_OPEN_TRIES,
    NamespaceKey,
    differing,
    is_namespace_name,
    remove_namespace,
)
from ....segments.format import (
    FORMAT_VERSION,
    MAX_DESCRIPTION_BYTES,
    PAGE_BYTES,
    SegmentLayout,
    parse_description,
    read_json,
)
from ....segments.segment_files import SegmentFiles
from ...block_table import block_table_bytes
from ...path_messages import NamespaceSpec, PathOptions, sendable
from ..path_plan import SegmentPlan, fixed_bytes, plan_namespace, plan_segments

BLOCKS, STATE, SEGMENTS = "blocks", "state", "segments"
LOCK_WAIT_S = 5.0
"""Longest wait for another process that is removing the directory."""
NOTE_USE_EVERY_S = 60.0
"""Interval at which the use of an open namespace is noted, and what was read of it, in seconds.

After a kill, the next writer orders namespaces by their last use. Namespaces that were used in the
last day count in the write budget.
"""

_log = get_logger(__name__)


@dataclass(slots=True)
class NamespaceHome:
    """The directories of one namespace, locked against removal."""

    name: str
    """Name of the directory below each path."""
    folders: tuple[Path, ...]
    description: Mapping[str, Any]
    slots: int
    """Final number of slots."""
    segments: SegmentFiles
    policy: str
    """Eviction policy."""
    locks: list[FileLock] = field(default_factory=list)
    news: str = ""
    """Sentence for the log of the node that begins the namespace, if it changed some option."""
    is_kept: bool = False
    """True if it stays without segments: a tool opened it so, and nobody took its room."""
    unplanned_bytes: int = 0
    """Bytes of the index beyond its plan, once `measure_index` was called."""

    @property
    def layout(self) -> SegmentLayout:
        """Shape of a segment."""
        return self.segments.layout

    @property
    def block_bytes(self) -> int:
        """Bytes of a slot."""
        return self.layout.block_bytes

    @property
    def state_folder(self) -> Path:
        """Directory of the arrays of the eviction order."""
        return self.folders[0] / STATE

    @property
    def is_in_place(self) -> bool:
        """True unless another program removed or replaced the first directory, or its segments.

        The disk of a later one may be unmounted. False after `close`.
        """
        first = self.locks[:1]
        return bool(first) and first[0].is_in_place() and self.segments.has_folder

    def bytes_beside_segments(self, path: int) -> int:
        """Return the most bytes in a path beside the segments."""
        planned = fixed_bytes(self.slots, path, self.policy)
        return planned + (self.unplanned_bytes if path == 0 else 0)

    def most_bytes(self, path: int) -> int:
        """Return the bytes in a path that count while the namespace is open.

        Raises `TierIOError`.
        """
        numbers = (n for n in self.segments.found() if n % len(self.folders) == path)
        return sum(self.layout.file_bytes for _ in numbers) + self.bytes_beside_segments(path)

    def slots_within(self, share_bytes: int) -> int:
        """Return the slots that fit into paths of this capacity each: those of a segment at least.

        It is less than `slots` after the capacity was lowered, because the tables keep their size.
        """
        rooms = (share_bytes - self.bytes_beside_segments(p) for p in range(len(self.folders)))
        segments = sum(max(0, room) // self.layout.file_bytes for room in rooms)
        return min(self.slots, max(1, segments) * self.layout.slots)

    def measure_index(self, fs: FileSystem) -> None:
        """Measure the open index. One that was larger once may keep pages at the end of its file.

        Raises an `OSError`.
        """
        file = self.folders[0] / BLOCKS / INDEX_FILE
        used = fs.used_bytes(file) if fs.exists(file) else 0
        self.unplanned_bytes = max(0, used - block_table_bytes(self.slots))

    def note_use(self, fs: FileSystem) -> None:
        """Set the time of the last use to now. A failure is ignored: the time is a hint."""
        for folder in self.folders:
            with suppress(OSError):
                fs.touch(folder / LOCK)

    def close(self) -> None:
        """Release the locks; idempotent."""
        for lock in self.locks:
            lock.release()
        self.locks.clear()


def key_of(spec: NamespaceSpec) -> NamespaceKey:
    """Return the identity that a node names. Raises `ConfigError`."""
    try:
        fields, about = read_json(spec.fields), read_json(spec.about or b"{}")
    except (ValueError, RecursionError):
        fields = about = None
    if not isinstance(fields, dict) or not isinstance(about, dict):
        raise ConfigError("the namespace's fields are no JSON object; use equal versions")
    return NamespaceKey(spec.label, fields, about)


def spec_of(key: NamespaceKey, block_bytes: int, min_share_bytes: int = 0) -> NamespaceSpec:
    """Return the identity as a node names it."""
    label, fields = sendable(key.label), json.dumps(dict(key.fields)).encode()
    about = json.dumps(dict(key.about)).encode()
    return NamespaceSpec(label, fields, about, block_bytes, min_share_bytes)


def check_size(key: NamespaceKey) -> None:
    """Raise `ConfigError` if no file of a namespace can hold its description."""
    size = len(json.dumps([key.label, dict(key.fields), dict(key.about)], indent=2))
    most = MAX_DESCRIPTION_BYTES - PAGE_BYTES
    if size > most:
        raise ConfigError(
            f"the name and the fields of this namespace take {size} bytes, and {most} are allowed; "
            "give a shorter name or label"
        )


def check_home(
    fs: FileSystem, roots: Sequence[Path], name: str, spec: NamespaceSpec, options: PathOptions
) -> None:
    """Raise what `make_home` would because of what is there; nothing is made or locked."""
    key = key_of(spec)
    home = open_home(fs, roots, name, options, is_locked=False)
    if home is None:
        check_size(key)
    else:
        check_same(home, key, spec.block_bytes)


def make_home(
    fs: FileSystem,
    roots: Sequence[Path],
    name: str,
    spec: NamespaceSpec,
    options: PathOptions,
) -> NamespaceHome:
    """Open the namespace of a node in the directory `name`; create it if it does not exist.

    Raises `ConfigError`, `FormatError`, `CorruptionError`, `InUseError` or `TierIOError`.
    """
    key = key_of(spec)
    home = open_home(fs, roots, name, options)
    if home is not None:
        try:
            check_same(home, key, spec.block_bytes)
        except CorruptionError:
            home.close()
            raise
        return home
    check_size(key)
    plan = plan_namespace(options, spec.block_bytes, len(roots))
    folders = tuple(root / name for root in roots)
    with _locked(fs, roots, folders) as locks:
        document = _describe(fs, folders, key, spec.block_bytes, plan)
        home = _home(fs, name, folders, document, plan, options.policy, locks)
        home.news = _news_of(name, key, homes_under(fs, roots[0]))
    return home


def _news_of(name: str, key: NamespaceKey, there: Mapping[str, Mapping[str, Any]]) -> str:
    """Name the fields in which a new namespace differs from the most alike one of its label.

    The label is the model by default. Nothing otherwise says why its cache is empty.
    """
    found = {
        other: differing(each["fields"], key.fields)
        for other, each in there.items()
        if other != name and each.get("label") == key.label
    }
    if not found:
        return ""
    alike = min(found, key=lambda other: (len(found[other]), other))
    names = sendable(", ".join(found[alike]))
    return f"{name} begins empty: it differs from {alike} in {names}"


def check_same(home: NamespaceHome, key: NamespaceKey, block_bytes: int) -> None:
    """Raise `CorruptionError` if the directories describe other blocks than a node has."""
    if home.description["fields"] == dict(key.fields) and home.block_bytes == block_bytes:
        return
    raise CorruptionError(
        f"{home.folders[0]} describes other blocks than its name says; remove that directory to "
        "start empty"
    )


def open_home(
    fs: FileSystem,
    roots: Sequence[Path],
    name: str,
    options: PathOptions,
    *,
    is_locked: bool = True,
) -> NamespaceHome | None:
    """Open an existing namespace by the name of its directory; None if there is none.

    Without `is_locked` it serves to count the namespace: another program may remove it.

    Raises `FormatError` if one of its directories has another version, and as `make_home`
    otherwise.
    """
    folders = tuple(root / name for root in roots)
    if not fs.exists(folders[0] / DESCRIPTION):
        return None
    document = read_descriptions(fs, folders)
    size, capacity = document["slots_per_segment"], options.capacity_bytes
    try:
        plan = plan_segments(capacity, document["block_bytes"], len(roots), size, options.policy)
    except ConfigError as error:
        raise ConfigError(f"{error}, or remove the directory {folders[0]}") from None
    if not is_locked:
        return _home(fs, name, folders, document, plan, options.policy, [])
    with _locked(fs, roots, folders) as locks:
        with os_errors(f"opening {folders[0]}"):
            for folder in folders:
                fs.make_dir(folder / SEGMENTS)
        return _home(fs, name, folders, document, plan, options.policy, locks)


def read_description(fs: FileSystem, folder: Path) -> Mapping[str, Any]:
    """Return the checked description of a directory of this version.

    Raises `FormatError` with the remedy for other versions, or `CorruptionError`.
    """
    with os_errors(f"reading {folder}"):
        data = fs.read(folder / DESCRIPTION, MAX_DESCRIPTION_BYTES)
    return parse_description(data, str(folder))


def read_descriptions(fs: FileSystem, folders: Sequence[Path]) -> Mapping[str, Any]:
    """Return the description in the first directory of a namespace; check those of all.

    Raises as `read_description`. A later directory may have none: its disk was lost.
    """
    document = read_description(fs, folders[0])
    for folder in folders[1:]:
        if fs.exists(folder / DESCRIPTION):
            read_description(fs, folder)
    return document


def homes_under(fs: FileSystem, root: Path) -> dict[str, Mapping[str, Any]]:
    """Return the namespaces of this version in a path: names, and checked descriptions.

    A description that cannot be read for now, such as for want of descriptors, is returned empty.
    """
    found: dict[str, Mapping[str, Any]] = {}
    with os_errors(f"listing {root}"):
        names = [name for name in fs.list_dir(root) if is_namespace_name(name)]
    for name in names:
        if not fs.exists(root / name / DESCRIPTION):
            continue
        try:
            found[name] = read_description(fs, root / name)
        except FINAL_ERRORS:
            continue
        except KVCascadeError:
            found[name] = {}
    return found


def remove_home(fs: FileSystem, roots: Sequence[Path], name: str) -> bool:
    """Delete all directories of a namespace. Return False if another process has one open."""
    # The index goes last: it says what the others hold.
    return all([remove_namespace(fs, root / name) for root in reversed(roots)])


def _home(
    fs: FileSystem,
    name: str,
    folders: tuple[Path, ...],
    document: Mapping[str, Any],
    plan: SegmentPlan,
    policy: str,
    locks: list[FileLock],
) -> NamespaceHome:
    fingerprint = NamespaceKey("", document["fields"]).fingerprint
    layout = SegmentLayout(document["block_bytes"], document["slots_per_segment"], fingerprint)
    segments = SegmentFiles(fs, [folder / SEGMENTS for folder in folders], layout)
    highest = max(segments.found(), default=-1)
    slots = max(plan.segments, highest + 1) * plan.slots_per_segment
    return NamespaceHome(name, folders, document, slots, segments, policy, locks)


@contextmanager
def _locked(
    fs: FileSystem, roots: Sequence[Path], folders: Sequence[Path]
) -> Iterator[list[FileLock]]:
    """Create missing directories, and lock all of them against removal.

    They stay locked, unless the context ends with an exception.
    """
    locks: list[FileLock] = []
    try:
        for root, folder in zip(roots, folders, strict=True):
            if not fs.exists(root):
                raise ConfigError(f"path {str(root)!r} does not exist; create it")
            with os_errors(f"opening the namespace {folder}"):
                locks.append(_lock_folder(fs, folder))
        yield locks
    except BaseException:
        for lock in locks:
            lock.release()
        raise


def _lock_folder(fs: FileSystem, folder: Path) -> FileLock:
    for _ in range(MAX_OPEN_TRIES):
        fs.make_dir(folder)
        try:
            return fs.lock(folder / LOCK, shared=True, wait_s=LOCK_WAIT_S)
        except FileNotFoundError:  # removed in the meantime
            continue
    raise InUseError(f"{folder} is being removed over and over; stop what does that")


def _describe(
    fs: FileSystem,
    folders: Sequence[Path],
    key: NamespaceKey,
    block_bytes: int,
    plan: SegmentPlan,
) -> Mapping[str, Any]:
    """Create a namespace. Its first directory is described last: it is complete from then on."""
    documents: list[Mapping[str, Any]] = []
    for part, folder in reversed(list(enumerate(folders))):
        document = {
            "format": "kvcascade-namespace",
            "format_version": FORMAT_VERSION,
            "label": key.label,
            "fingerprint": key.fingerprint,
            "fields": dict(key.fields),
            "block_bytes": block_bytes,
            "slots_per_segment": plan.slots_per_segment,
            "index_bytes": block_table_bytes(plan.slots),
            "part": part,
            "parts": len(folders),
            "created": datetime.now(UTC).isoformat(),
            **({"about": dict(key.about)} if key.about else {}),
        }
        with os_errors(f"creating the namespace {folder}"):
            _remove_segments(fs, folder)
            for name in (BLOCKS, STATE, SEGMENTS) if part == 0 else (SEGMENTS,):
                fs.make_dir(folder / name)
            data = json.dumps(document, indent=2).encode() + b"\n"
            fs.sync_dir(folder.parent)
            fs.replace(folder / DESCRIPTION, data)
        documents.append(document)
    return documents[-1]


def _remove_segments(fs: FileSystem, folder: Path) -> None:
    """Remove segments that no table names: those of a directory without its first part."""
    if not fs.exists(folder / SEGMENTS):
        return
    left = fs.list_dir(folder / SEGMENTS)
    for name in left:
        fs.unlink(folder / SEGMENTS / name)
    if left:
        _log.warning("removed %d segments in %s: their index is gone", len(left), folder)
