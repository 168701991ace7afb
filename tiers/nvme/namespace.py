"""Namespace directories: identity, name, size, and protection against removal.

A namespace is one directory per path, named after its label and the fingerprint of its fields. A
process that has it open holds a shared lock on the lock file of each directory, which prevents the
removal. All functions raise a `KVCascadeError`. Files of other users are neither followed nor
changed.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import InUseError, os_errors
from ...logs import get_logger
from .disk.filesystem import FileLock, FileSystem

SHORT_FINGERPRINT_DIGITS = 12
MAX_NAME_CHARS = 64
DESCRIPTION = "namespace.json"
LOCK = "lock"
INDEX_FILE = "data.mdb"
"""LMDB's name for its file."""
MAX_OPEN_TRIES = 8
"""Largest number of attempts to create and lock a directory that others keep removing."""
MAX_LEFTOVERS = 16
"""Largest number of leftovers removed in one call, as other processes wait for it."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}-[0-9a-f]{12}")
_REMOVING = ".removing-"
_LEFTOVER = re.compile(re.escape(_REMOVING) + _NAME.pattern + r"\.[0-9a-f]{16}")

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

    def name_among(self, existing: Collection[str]) -> str:
        """Return the name of the directory to use: one of `existing` with this fingerprint, if any.

        The label may be the path of the model, which differs between engines that share blocks.
        """
        name = self.directory_name
        end = name[-SHORT_FINGERPRINT_DIGITS - 1 :]
        same = [one for one in existing if one.endswith(end)]
        return name if name in same else min(same, default=name)


def differing(
    one: Mapping[str, object], other: Mapping[str, object]
) -> dict[str, tuple[object, object]]:
    """Return the fields of fingerprints that differ, with both values; None if a side lacks one."""
    names = [*one, *(name for name in other if name not in one)]
    pairs = {name: (one.get(name), other.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@dataclass(frozen=True, slots=True)
class FoundNamespace:
    """A namespace directory under a path, of any configuration."""

    path: Path
    used_bytes: int
    last_used: float
    """Time of the last use, in seconds of the wall clock."""


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
            except OSError:  # just removed, owned by another user, or a link
                continue
            with suppress(FileNotFoundError, PermissionError):
                last_used = fs.modified_at(path / LOCK)
                found.append(FoundNamespace(path, fs.used_bytes(path), last_used))
    return sorted(found, key=lambda one: one.last_used)


def lock_namespace(fs: FileSystem, path: Path) -> FileLock | None:
    """Lock a namespace directory exclusively; None if a process has it open."""
    with os_errors(f"locking {path}"):
        try:
            return fs.lock(path / LOCK)
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
