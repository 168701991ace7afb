"""Namespace directories: sharing of blocks, protection against removal, and description.

A namespace is one directory per path, named after its label and the fingerprint of its fields. Any
number of processes may have it open. Each holds a shared lock on the lock file of each directory,
so that nobody removes it, and owns a part of the segments (`owners`). All functions raise a
`KVCascadeError`. Files of other users are neither followed nor changed.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from ...errors import ConfigError, CorruptionError, InUseError, os_errors
from ...logs import get_logger
from .disk.filesystem import FileLock, FileSystem
from .index.index_file import DATA_NAME
from .segments.format import FORMAT_VERSION, MAX_DESCRIPTION_BYTES, parse_description
from .writer.owners import Owners

SHORT_FINGERPRINT_DIGITS = 12
MAX_NAME_CHARS = 64
DESCRIPTION = "namespace.json"
LOCK = "lock"
OWNERS = "owners"
IN_USE = "in_use"
"""Lock file of every part but the first; held by the processes that have passed the gate."""
REMOVAL_WAIT_S = 30.0
"""Longest wait for another process that is removing a directory which is needed again."""
MAX_OPEN_TRIES = 8
"""Largest number of attempts to create and lock a directory that others keep removing."""
MAX_LEFTOVERS = 16
"""Largest number of leftovers removed in one call, as other processes wait for it."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}-[0-9a-f]{12}")
_REMOVING = ".removing-"
_LEFTOVER = re.compile(re.escape(_REMOVING) + _NAME.pattern + r"\.[0-9a-f]{16}")
_FOLDERS = ("index", "state", "segments")

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class NamespaceKey:
    """Identity of a namespace: configurations share blocks if all their fields are equal."""

    label: str
    """Readable name, such as the model's; part of the directory's name."""
    fields: Mapping[str, object] = field(default_factory=dict)
    """Everything that the bytes of a block depend on; JSON values."""
    about: Mapping[str, object] = field(default_factory=dict, compare=False)
    """Descriptive facts that are stored but are no part of the fingerprint; JSON values."""

    @property
    def digest(self) -> bytes:
        """SHA-256 over the canonical JSON of the fields."""
        text = json.dumps(self.fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).digest()

    @property
    def fingerprint(self) -> str:
        """The digest in hexadecimal."""
        return self.digest.hex()

    @property
    def directory_name(self) -> str:
        """Name of the directory, safe as a file name whatever the label is."""
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", self.label)[:MAX_NAME_CHARS].strip(".-")
        return f"{name or 'blocks'}-{self.fingerprint[:SHORT_FINGERPRINT_DIGITS]}"


@dataclass(slots=True)
class Namespace:
    """An open namespace: one directory in each path, shared with other processes."""

    folders: tuple[Path, ...]
    locks: list[FileLock]
    owners: Owners
    description: Mapping[str, object] | None
    """Parsed `namespace.json`; None while it is being created, or if it was lost."""

    @property
    def created(self) -> datetime:
        """Time of creation; the current time if unknown."""
        return _created(self.description or {})

    @property
    def slots_per_segment(self) -> int | None:
        """Slots per segment of the existing layout; None if the namespace is new."""
        return None if self.description is None else _number(self.description, "slots_per_segment")

    @property
    def index_bytes(self) -> int:
        """Address space of the index in bytes, equal for all processes; 0 if the namespace is
        new."""
        return 0 if self.description is None else _number(self.description, "index_bytes")

    @property
    def index_folder(self) -> Path:
        """Directory of the LMDB environment."""
        return self.folders[0] / "index"

    @property
    def shared_state_folder(self) -> Path:
        """Directory of the arrays that all processes map."""
        return self.folders[0] / "state"

    @property
    def state_folder(self) -> Path:
        """Directory of the arrays of this process's policy."""
        return self.shared_state_folder / str(self.owners.state)

    @property
    def segment_folders(self) -> list[Path]:
        """Directories of the segments, one per path."""
        return [folder / "segments" for folder in self.folders]

    def close(self) -> None:
        """Release locks and ownership; idempotent."""
        self.owners.close()
        for lock in self.locks:
            lock.release()
        self.locks.clear()


@dataclass(frozen=True, slots=True)
class FoundNamespace:
    """A namespace directory under a path, of any configuration."""

    path: Path
    used_bytes: int
    last_used: float
    """Time of the last use, in seconds of the wall clock."""


def open_namespace(
    fs: FileSystem, roots: Sequence[Path], key: NamespaceKey, *, is_guest: bool = False
) -> Namespace:
    """Create or open the directories of `key` under the roots, and pass the gate.

    The caller leaves the gate (`Namespace.owners`) once everything is open. It describes a new
    namespace with `describe_namespace` before that. If the first part was removed, the contents of
    the other parts are removed too. Each root is cleared separately, and without the index nothing
    knows their blocks.

    Raises `InUseError` if the namespace is being removed, or if another process hangs while opening
    it. Raises `ConfigError` if a root is unusable, and `CorruptionError` or `FormatError` if
    existing files are.
    """
    folders = tuple(root / key.directory_name for root in roots)
    locks: list[FileLock] = []
    owners: Owners | None = None
    try:
        for root, folder in zip(roots, folders, strict=True):
            if not fs.exists(root):
                raise ConfigError(f"path {str(root)!r} does not exist; create it")
            with os_errors(f"opening the namespace {folder}"):
                locks.append(_hold(fs, folder))
        with os_errors(f"opening the namespace {folders[0]}"):
            owners = Owners(fs.byte_locks(folders[0] / OWNERS), str(folders[0]))
            owners.enter(is_guest=is_guest)
        description = _open_parts(fs, folders, key)
        for folder in folders[1:]:
            with os_errors(f"opening the namespace {folder}"):
                locks.append(fs.lock(folder / IN_USE, shared=True, wait_s=REMOVAL_WAIT_S))
    except BaseException:
        if owners is not None:
            owners.close()
        for lock in locks:
            lock.release()
        raise
    return Namespace(folders, locks, owners, description)


def _open_parts(
    fs: FileSystem, folders: Sequence[Path], key: NamespaceKey
) -> Mapping[str, object] | None:
    """Return the description found in the parts, inside the gate; None if the namespace is new."""
    documents: list[Mapping[str, object] | None] = []
    for part, folder in enumerate(folders):
        with os_errors(f"opening the namespace {folder}"):
            for name in _FOLDERS if part == 0 else ("segments",):
                fs.make_dir(folder / name)
            document = _read_description(fs, folder)
        if document is not None:
            _check_description(document, key, folder, part, len(folders))
        documents.append(document)
    if documents[0] is None and not fs.exists(folders[0] / "index" / DATA_NAME):
        _remove_unknown(fs, folders[0])
        for folder in folders[1:]:
            with _unused(fs, folder):
                _remove_unknown(fs, folder)
        return None
    return next((document for document in documents if document is not None), None)


@contextmanager
def _unused(fs: FileSystem, part: Path) -> Iterator[None]:
    """Raise `ConfigError` if engines use this part together with a different first part."""
    try:
        with os_errors(f"locking {part / IN_USE}"):
            lock = fs.lock(part / IN_USE)
    except InUseError:
        raise ConfigError(
            f"path: {part} belongs to a namespace that is open and whose first path is another; "
            "give the paths as its engines have them, or stop those"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _remove_unknown(fs: FileSystem, folder: Path) -> None:
    """Remove blocks that no index names: a later rebuild could restore blocks that were reset."""
    with os_errors(f"removing what is left in {folder}"):
        left = fs.list_dir(folder / "segments")
        if fs.exists(folder / DESCRIPTION):
            fs.unlink(folder / DESCRIPTION)
        for name in left:
            fs.unlink(folder / "segments" / name)
    if left:
        _log.warning(
            "removed %d segments in %s: the first part of the namespace, with its index, is gone",
            len(left),
            folder,
        )


def _hold(fs: FileSystem, folder: Path) -> FileLock:
    """Create the directory if needed, and lock it against removal."""
    for _ in range(MAX_OPEN_TRIES):
        fs.make_dir(folder)
        try:
            return fs.lock(folder / LOCK, shared=True, wait_s=REMOVAL_WAIT_S)
        except FileNotFoundError:  # removed in the meantime
            continue
    raise InUseError(f"{folder} is being removed over and over; stop what does that")


def is_namespace_name(name: str) -> bool:
    """Return True if `NamespaceKey.directory_name` may yield this name."""
    return _NAME.fullmatch(name) is not None


def namespaces_under(fs: FileSystem, root: Path) -> list[FoundNamespace]:
    """Return every namespace directory in a path, least recently used first."""
    found: list[FoundNamespace] = []
    with os_errors(f"listing {root}"):
        for name in fs.list_dir(root):
            path = root / name
            if not _NAME.fullmatch(name) or not fs.exists(path / LOCK):
                continue
            try:
                fs.check_dir(path)
                last_used = fs.modified_at(path / LOCK)
                found.append(FoundNamespace(path, fs.used_bytes(path), last_used))
            except (FileNotFoundError, PermissionError):  # just removed, or owned by another user
                continue
    return sorted(found, key=lambda one: one.last_used)


@dataclass(frozen=True, slots=True)
class DescribedLayout:
    """Layout of a namespace according to one of its directories."""

    part: int
    """Index of this directory among the paths."""
    parts: int
    """Number of paths of the namespace."""
    index_bytes: int
    """Largest size of the index, which lies in part 0."""


def described_layout(fs: FileSystem, folder: Path) -> DescribedLayout | None:
    """Return the layout in a directory's description; None if there is no description yet."""
    with os_errors(f"reading {folder}"):
        document = _read_description(fs, folder)
    if document is None:
        return None
    part, parts = document.get("part"), document.get("parts")
    if type(part) is not int or type(parts) is not int or not 0 <= part < parts:
        raise CorruptionError(f"{folder} does not say which of how many paths it is; remove it")
    return DescribedLayout(part, parts, _number(document, "index_bytes"))


def lock_namespace(fs: FileSystem, path: Path) -> FileLock | None:
    """Lock a namespace directory exclusively; None if a process has it open."""
    with os_errors(f"locking {path}"):
        try:
            return fs.lock(path / LOCK, is_noted=False)  # the time of change records the last use
        except (InUseError, FileNotFoundError):  # another process may have just removed it
            return None


def remove_namespace(fs: FileSystem, path: Path) -> bool:
    """Delete a namespace directory unless a process has it open. Return True if it is gone."""
    lock = lock_namespace(fs, path)
    if lock is None:
        return not fs.exists(path)
    try:
        remove_locked_namespace(fs, path)
    finally:
        lock.release()
    return True


def remove_locked_namespace(fs: FileSystem, path: Path) -> None:
    """Delete a namespace directory that `lock_namespace` locked.

    The directory is renamed first. If the process dies halfway, no damaged namespace remains. A
    process that waits for the lock cannot create files in a directory that is being emptied.
    """
    doomed = path.with_name(f"{_REMOVING}{path.name}.{secrets.token_hex(8)}")
    with os_errors(f"removing {path}"):
        fs.rename(path, doomed)
        fs.remove_tree(doomed)


def remove_leftovers(fs: FileSystem, root: Path) -> int:
    """Delete namespaces in a path whose removal was interrupted.

    Returns the bytes of those that remain, for example because the device refuses to delete them.
    """
    left_bytes = 0
    with os_errors(f"clearing {root}"):
        names = [name for name in fs.list_dir(root) if _LEFTOVER.fullmatch(name)]
        for number, path in enumerate(root / name for name in names):
            try:
                fs.check_dir(path)
            except OSError:  # just removed, a link, or owned by another user
                continue
            try:
                if number < MAX_LEFTOVERS:
                    fs.remove_tree(path)
                    continue
            except OSError as error:
                _log.warning("%s, left of a removed namespace, cannot be deleted: %s", path, error)
            with suppress(FileNotFoundError):
                left_bytes += fs.used_bytes(path)
    return left_bytes


def _read_description(fs: FileSystem, folder: Path) -> Mapping[str, object] | None:
    path = folder / DESCRIPTION
    if not fs.exists(path):
        return None
    return parse_description(fs.read(path, MAX_DESCRIPTION_BYTES), str(folder))


def _check_description(
    document: Mapping[str, object], key: NamespaceKey, folder: Path, part: int, parts: int
) -> None:
    if document["fields"] != json.loads(json.dumps(key.fields)):
        raise CorruptionError(
            f"{folder} describes other blocks than its name says; remove that directory to "
            "start empty"
        )
    if (document.get("part"), document.get("parts")) != (part, parts):
        raise ConfigError(
            f"path: {folder} was part {document.get('part')} of {document.get('parts')} paths, "
            f"not {part} of {parts}; give the paths as before or remove that directory"
        )


def describe_namespace(
    fs: FileSystem,
    namespace: Namespace,
    key: NamespaceKey,
    block_bytes: int,
    slots_per_segment: int,
    index_bytes: int,
) -> None:
    """Write `namespace.json` where it is missing; the namespace must be complete from then on.

    It is rewritten if the size of the index changes, which requires a process that is alone.
    """
    is_right = namespace.index_bytes == index_bytes
    created = namespace.created
    for part, folder in enumerate(namespace.folders):
        if is_right and fs.exists(folder / DESCRIPTION):
            continue
        document = {
            "format": "kvcascade-namespace",
            "format_version": FORMAT_VERSION,
            "label": key.label,
            "fingerprint": key.fingerprint,
            "fields": dict(key.fields),
            "block_bytes": block_bytes,
            "slots_per_segment": slots_per_segment,
            "index_bytes": index_bytes,
            "part": part,
            "parts": len(namespace.folders),
            "created": created.isoformat(),
            **({"about": dict(key.about)} if key.about else {}),
        }
        with os_errors(f"writing {folder / DESCRIPTION}"):
            fs.replace(folder / DESCRIPTION, json.dumps(document, indent=2).encode() + b"\n")


def stored_slots_per_segment(fs: FileSystem, root: Path, key: NamespaceKey) -> int | None:
    """Return the slots per segment of an existing namespace; None if it does not exist."""
    folder = root / key.directory_name
    with os_errors(f"reading {folder}"):
        if not fs.exists(folder):
            return None
        fs.check_dir(folder)
        document = _read_description(fs, folder)
    return None if document is None else _number(document, "slots_per_segment")


def _number(document: Mapping[str, object], name: str) -> int:
    found = document[name]
    assert isinstance(found, int), "descriptions are checked when they are read"
    return found


def _created(document: Mapping[str, object]) -> datetime:
    try:
        created = datetime.fromisoformat(str(document.get("created")))
    except ValueError:
        return datetime.now(UTC)
    return created if created.tzinfo else created.replace(tzinfo=UTC)
