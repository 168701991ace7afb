"""Namespace directories: who may share blocks, who owns a directory, what others take up.

A namespace is one directory per path, named after its label and the fingerprint of its fields. Any
number of processes may have it open: each holds the lock file of each directory, shared, so that
nobody removes it meanwhile, and its part of the segments (`owners`). All methods raise one of our
errors; nothing that belongs to anybody else is followed or touched.
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
"""Lock file of a part that is not the first: held by the processes that are through the gate."""
REMOVAL_WAIT_S = 30.0
"""For another process that is just removing a directory which is wanted again."""
MAX_OPEN_TRIES = 8
MAX_LEFTOVERS = 16
"""Removed at a time: others wait for it."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}-[0-9a-f]{12}")
_REMOVING = ".removing-"
_LEFTOVER = re.compile(re.escape(_REMOVING) + _NAME.pattern + r"\.[0-9a-f]{16}")
_FOLDERS = ("index", "state", "segments")

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class NamespaceKey:
    """What makes two configurations share blocks: every field equal."""

    label: str
    """For people, such as the model's name; part of the directory's name."""
    fields: Mapping[str, object] = field(default_factory=dict)
    """Everything that the bytes of a block depend on; JSON values."""
    about: Mapping[str, object] = field(default_factory=dict, compare=False)
    """Facts for people, written down but no part of the fingerprint; JSON values."""

    @property
    def digest(self) -> bytes:
        """SHA-256 over the canonical JSON of the fields."""
        text = json.dumps(self.fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).digest()

    @property
    def fingerprint(self) -> str:
        """The digest in hex."""
        return self.digest.hex()

    @property
    def directory_name(self) -> str:
        """Safe as a file name, whatever the label."""
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", self.label)[:MAX_NAME_CHARS].strip(".-")
        return f"{name or 'blocks'}-{self.fingerprint[:SHORT_FINGERPRINT_DIGITS]}"


@dataclass(slots=True)
class Namespace:
    """An open namespace: one directory in each path, held by this process among others."""

    folders: tuple[Path, ...]
    locks: list[FileLock]
    owners: Owners
    description: Mapping[str, object] | None
    """None while it is being created, or if its description was lost."""

    @property
    def created(self) -> datetime:
        """When it was made; now, if that is not known."""
        return _created(self.description or {})

    @property
    def slots_per_segment(self) -> int | None:
        """What it is laid out with; None if it is new."""
        return None if self.description is None else _number(self.description, "slots_per_segment")

    @property
    def index_bytes(self) -> int:
        """Address space of its index, which all processes must map alike; 0 if it is new."""
        return 0 if self.description is None else _number(self.description, "index_bytes")

    @property
    def index_folder(self) -> Path:
        """The LMDB environment."""
        return self.folders[0] / "index"

    @property
    def shared_state_folder(self) -> Path:
        """Arrays that all processes map."""
        return self.folders[0] / "state"

    @property
    def state_folder(self) -> Path:
        """Arrays of this process's policy."""
        return self.shared_state_folder / str(self.owners.state)

    @property
    def segment_folders(self) -> list[Path]:
        """Where segments lie, one folder per path."""
        return [folder / "segments" for folder in self.folders]

    def close(self) -> None:
        """Let go of it; idempotent."""
        self.owners.close()
        for lock in self.locks:
            lock.release()
        self.locks.clear()


@dataclass(frozen=True, slots=True)
class FoundNamespace:
    """A namespace directory of anybody's under a path."""

    path: Path
    used_bytes: int
    last_used: float
    """Seconds of the wall clock."""


def open_namespace(
    fs: FileSystem, roots: Sequence[Path], key: NamespaceKey, *, is_guest: bool = False
) -> Namespace:
    """Create or open the directories of `key` under the roots, and pass the gate.

    The caller leaves the gate (`Namespace.owners`) once everything is open. What is new is
    described by `describe_namespace` before that. Where the first part left (each root is cleared
    by itself), the others go too: nothing knows what is in them.

    Raises `InUseError` if it is being removed, or opened by somebody who hangs, `ConfigError` if a
    root is not usable, `CorruptionError` or `FormatError` if what is there is not ours to use.
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
    """Inside the gate: what the parts say of themselves; None if the namespace is new."""
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
    """Raises `ConfigError` if engines use this part behind another first part than ours."""
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
    """Blocks that no index names: a later rebuild could bring back what was reset meanwhile."""
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
    """Make the directory if need be, and see to it that nobody removes it."""
    for _ in range(MAX_OPEN_TRIES):
        fs.make_dir(folder)
        try:
            return fs.lock(folder / LOCK, shared=True, wait_s=REMOVAL_WAIT_S)
        except FileNotFoundError:  # removed in between
            continue
    raise InUseError(f"{folder} is being removed over and over; stop what does that")


def is_namespace_name(name: str) -> bool:
    """True for what `NamespaceKey.directory_name` may be."""
    return _NAME.fullmatch(name) is not None


def namespaces_under(fs: FileSystem, root: Path) -> list[FoundNamespace]:
    """Every namespace directory in a path, the one that was used longest ago first."""
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
            except (FileNotFoundError, PermissionError):  # just removed, or not ours
                continue
    return sorted(found, key=lambda one: one.last_used)


@dataclass(frozen=True, slots=True)
class DescribedLayout:
    """What a directory says about its share of a namespace."""

    part: int
    parts: int
    """Paths that it lies in."""
    index_bytes: int
    """What the index, which lies in part 0, may come to."""


def described_layout(fs: FileSystem, folder: Path) -> DescribedLayout | None:
    """The layout in a directory's description; None if there is none yet."""
    with os_errors(f"reading {folder}"):
        document = _read_description(fs, folder)
    if document is None:
        return None
    part, parts = document.get("part"), document.get("parts")
    if type(part) is not int or type(parts) is not int or not 0 <= part < parts:
        raise CorruptionError(f"{folder} does not say which of how many paths it is; remove it")
    return DescribedLayout(part, parts, _number(document, "index_bytes"))


def lock_namespace(fs: FileSystem, path: Path) -> FileLock | None:
    """Take a namespace directory away from everybody; None if a process has it open."""
    with os_errors(f"locking {path}"):
        try:
            return fs.lock(path / LOCK, is_noted=False)  # the time of change is its last use
        except (InUseError, FileNotFoundError):  # or somebody else has just removed it
            return None


def remove_namespace(fs: FileSystem, path: Path) -> bool:
    """Delete a namespace directory unless a process has it open; True if it is gone."""
    lock = lock_namespace(fs, path)
    if lock is None:
        return not fs.exists(path)
    try:
        remove_locked_namespace(fs, path)
    finally:
        lock.release()
    return True


def remove_locked_namespace(fs: FileSystem, path: Path) -> None:
    """Delete a namespace directory that `lock_namespace` took.

    It gets another name first. So who dies halfway leaves no damaged namespace, and who waits for
    the lock cannot make files in a directory that is being emptied.
    """
    doomed = path.with_name(f"{_REMOVING}{path.name}.{secrets.token_hex(8)}")
    with os_errors(f"removing {path}"):
        fs.rename(path, doomed)
        fs.remove_tree(doomed)


def remove_leftovers(fs: FileSystem, root: Path) -> int:
    """Delete namespaces in a path whose removal did not come to its end.

    Returns the bytes of those that are still there, for a device that does not let go of them.
    """
    left_bytes = 0
    with os_errors(f"clearing {root}"):
        names = [name for name in fs.list_dir(root) if _LEFTOVER.fullmatch(name)]
        for number, path in enumerate(root / name for name in names):
            try:
                fs.check_dir(path)
            except OSError:  # just removed, a link, or not ours
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
    """Write `namespace.json` where it is missing: from now on the namespace must be complete.

    It is also written again if the size of the index changes, which is for a process that is alone.
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
    """What an existing namespace was laid out with; None if there is none yet."""
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
