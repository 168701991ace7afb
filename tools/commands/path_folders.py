"""Namespaces in the folders of a path, found without a writer: names, labels and versions.

A path may have namespaces of other versions beside those that this version reads. Commands show
and remove them, and nothing more.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError, FormatError, KVCascadeError, TierIOError, os_errors
from ...tiers.nvme.disk.filesystem import FileSystem
from ...tiers.nvme.namespace import (
    DESCRIPTION,
    LOCK,
    SHORT_FINGERPRINT_DIGITS,
    is_namespace_name,
)
from ...tiers.nvme.path.writer.namespace.namespace_home import SEGMENTS, read_descriptions
from ...tiers.nvme.path.writer.path_options import PATH_FILE, PATH_FOLDER, load_record
from ...tiers.nvme.segments.format import (
    FORMAT_VERSION,
    MAX_DESCRIPTION_BYTES,
    SegmentLayout,
    read_json,
    segment_number,
)
from .path_files import load_note, named

MAX_NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class NamespaceFolder:
    """A namespace directory, with its parts in the other paths of the tier."""

    name: str
    folders: tuple[Path, ...]
    document: Mapping[str, Any]
    """Contents of `namespace.json`; empty if it cannot be read. Nothing in it is checked unless
    `is_readable`."""
    is_readable: bool
    """True if it is of the version that this version reads."""
    problem: str
    """Reason why it is not readable, with the remedy; empty for one of another version."""

    @property
    def version(self) -> object:
        """Format version as the description says."""
        return self.document.get("format_version")

    @property
    def reason(self) -> str:
        """Sentence that says why it is not readable, and what to do."""
        if self.problem:
            return self.problem
        return (
            f"{self.name} has format version {self.version}, which this kvcascade does not read; "
            f"`{self.removal}` clears it"
        )

    @property
    def removal(self) -> str:
        """Command that removes it."""
        return f"kvcascade gc {self.folders[0].parent} -n {self.name} --remove-namespace"

    @property
    def words(self) -> list[str]:
        """Texts by which a user may name it."""
        known = (self.document.get("fingerprint"), self.document.get("label"))
        return [self.name, *(text for text in known if isinstance(text, str))]

    @property
    def fields(self) -> Mapping[str, Any]:
        """Fields of the fingerprint."""
        found = self.document.get("fields")
        return found if isinstance(found, Mapping) else {}

    def used_bytes(self, fs: FileSystem) -> int:
        """Return the bytes on disk in the given paths. Raises `TierIOError`."""
        with os_errors(f"looking at {self.name}"):
            for folder in self.folders:
                fs.list_dir(folder)  # `used_bytes` counts nothing below a locked folder
            return sum(map(fs.used_bytes, self.folders))

    @property
    def layout(self) -> SegmentLayout:
        """Shape of a segment; only if `is_readable`."""
        slots, fingerprint = self.document["slots_per_segment"], self.document["fingerprint"]
        return SegmentLayout(self.block_bytes, slots, fingerprint)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block; only if `is_readable`."""
        return int(self.document["block_bytes"])

    def parts_given(self, fs: FileSystem) -> set[int]:
        """Return the numbers of the parts whose folders were given."""
        found = (_document(fs, folder).get("part") for folder in self.folders)
        return {part for part in found if type(part) is int}

    def segment_files(self) -> dict[int, Path]:
        """Return the segment files by number, ascending. Raises `TierIOError`."""
        with os_errors(f"listing {self.folders[0]}"):
            paths = [file for folder in self.folders for file in (folder / SEGMENTS).glob("*")]
        numbered = ((segment_number(path.name), path) for path in paths)
        return dict(sorted((n, path) for n, path in numbered if n is not None))

    def segment_sizes(self, fs: FileSystem) -> dict[int, int]:
        """Return the bytes on disk of each segment file."""
        sizes: dict[int, int] = {}
        for number, file in self.segment_files().items():
            with suppress(OSError):  # it was just deleted
                sizes[number] = fs.used_bytes(file)
        return sizes


def folders_in(
    fs: FileSystem, path: Path, also: Sequence[Path] | None = None
) -> list[NamespaceFolder]:
    """Return the namespaces in a path, or the one that `path` is, by name.

    Those that this user may not enter are among them, as not readable. Raises `TierIOError` if
    there is none, if none may be entered, or if a path cannot be read. Raises `ConfigError` for a
    copy of a path of several folders without `also`.
    """
    is_one = _is_namespace(fs, path)
    roots = _roots(fs, path.parent if is_one else path, also or ())
    found: dict[str, list[Path]] = {}
    denied: dict[Path, TierIOError] = {}
    for number, root in enumerate(roots):
        with os_errors(f"listing {root}"):
            try:
                names = sorted(fs.list_dir(root))
            except FileNotFoundError:
                if number:
                    raise missing_folder(root) from None
                raise
        if is_one:
            names = [name for name in names if name == path.name]
        for folder in (root / name for name in names if is_namespace_name(name)):
            try:
                if _is_namespace(fs, folder) and (not number or folder.name in found or also):
                    found.setdefault(folder.name, []).append(folder)
            except TierIOError as error:
                if not number or also:
                    denied[folder] = error
    if denied and not found:
        raise next(iter(denied.values()))
    if not found:
        shown = ", ".join(map(str, roots))
        why = _unused_yet(fs, roots[0]) or "; give the path of an NVMe tier"
        raise TierIOError(errno.ENOENT, f"no namespace in {shown}{why}")
    closed = [
        NamespaceFolder(folder.name, (folder,), {}, False, str(error))
        for folder, error in denied.items()
        if folder.name not in found
    ]
    seen = [_look(fs, name, tuple(folders)) for name, folders in found.items()]
    return sorted(closed + seen, key=lambda each: each.name)


def choose(found: Sequence[NamespaceFolder], text: str | None) -> NamespaceFolder:
    """Return the namespace whose name, label or fingerprint contains a text.

    Without a text, return the only namespace. Raises `ConfigError` if none or several match.
    """
    matches = list(found) if text is None else _fitting(found, text)
    if len(matches) == 1:
        return matches[0]
    shown = ", ".join(each.name for each in (matches or found)[:MAX_NAMES_SHOWN])
    if not matches:
        raise ConfigError(f"--namespace: there is no {text!r}; there are {shown}")
    raise ConfigError(f"--namespace: {len(matches)} namespaces match; give one of {shown}")


def chosen_of(found: Sequence[NamespaceFolder], text: str | None) -> Sequence[NamespaceFolder]:
    """Return the namespace that fits a text, or all without a text. Raises `ConfigError`."""
    return found if text is None else [choose(found, text)]


def choose_for_good(found: Sequence[NamespaceFolder], text: str) -> NamespaceFolder:
    """Return the namespace for an action that cannot be undone.

    The name must be complete, or have at least 12 digits of the fingerprint. Raises `ConfigError`.
    """
    wanted = _last_part(text)
    matches = [each for each in found if each.name == wanted] or [
        each
        for each in found
        if len(wanted) >= SHORT_FINGERPRINT_DIGITS and wanted in _digits_of(each)
    ]
    if len(matches) == 1:
        return matches[0]
    shown = ", ".join(each.name for each in (matches or found)[:MAX_NAMES_SHOWN])
    if not _fitting(found, text):
        raise ConfigError(f"--namespace: there is no namespace {text!r}; there are {shown}")
    raise ConfigError(
        f"--namespace: {text!r} does not identify the namespace to remove; give its whole name, or "
        f"at least {SHORT_FINGERPRINT_DIGITS} digits of its fingerprint; there are {shown}"
    )


def parse_hash(text: str) -> bytes:
    """Return a block hash, or its beginning, from hexadecimal digits. Raises `ConfigError`."""
    digits = text.removeprefix("0x")
    with suppress(ValueError):
        if digits.strip():
            return bytes.fromhex(digits)
    raise ConfigError(f"{text!r} is not a block hash; give an even number of hexadecimal digits")


def other_folders(fs: FileSystem, root: Path) -> list[Path]:
    """Return the other folders of a path as they are recorded with its first one.

    Raises `ConfigError` if `root` is not the first recorded folder: in a copy of a path, the record
    names the folders of the original. Raises `CorruptionError` or `TierIOError` for the record.
    """
    record = load_record(fs, root)
    names = () if record is None else record.paths
    if len(names) > 1 and not fs.is_same(root, Path(names[0])):
        raise ConfigError(
            f"this tier has the paths {', '.join(names)}, and {root} is not the first of them; if "
            "it is a copy, or was moved, give its other folders with --also in that order"
        )
    return list(map(Path, names[1:]))


def _roots(fs: FileSystem, root: Path, also: Sequence[Path]) -> list[Path]:
    """Return the given paths, or those that are recorded with the first one and exist."""
    if also:
        return [root, *also]
    try:
        others = other_folders(fs, root)
    except ConfigError:
        raise
    except KVCascadeError:
        return [root]  # the record is damaged, or of another user
    return [root, *filter(fs.exists, others)]


def _unused_yet(fs: FileSystem, root: Path) -> str:
    """Return what is known of a path without namespaces; empty if nobody has opened it as one."""
    try:
        if load_record(fs, root) is None:
            return ""
    except KVCascadeError:
        return ""  # the record is damaged, or of another user
    note = load_note(fs, root)
    writer = "" if note is None else f", last written by {named(note)}"
    return f" yet: it is the path of a tier{writer}; an engine makes its namespace when it starts"


def _is_namespace(fs: FileSystem, folder: Path) -> bool:
    if not is_namespace_name(folder.name):
        return False
    with os_errors(f"looking into {folder}"):
        try:
            names = fs.list_dir(folder)
        except (FileNotFoundError, NotADirectoryError):
            return False
    return not {LOCK, DESCRIPTION}.isdisjoint(names)


def _look(fs: FileSystem, name: str, folders: tuple[Path, ...]) -> NamespaceFolder:
    document = _document(fs, folders[0])
    try:
        return NamespaceFolder(name, folders, read_descriptions(fs, folders), True, "")
    except FormatError:
        documents = (_document(fs, folder) for folder in folders)
        versions = ((each.get("format_version", FORMAT_VERSION), each) for each in documents)
        others = (each for version, each in versions if version != FORMAT_VERSION)
        return NamespaceFolder(name, folders, next(others, document), False, "")
    except KVCascadeError as error:
        return NamespaceFolder(name, folders, document, False, str(error))


def _document(fs: FileSystem, folder: Path) -> Mapping[str, Any]:
    """Return the contents of `namespace.json`, whatever they are; empty without an object."""
    with suppress(OSError, ValueError, RecursionError):
        found = read_json(fs.read(folder / DESCRIPTION, MAX_DESCRIPTION_BYTES))
        return found if isinstance(found, dict) else {}
    return {}


def _fitting(found: Sequence[NamespaceFolder], text: str) -> list[NamespaceFolder]:
    """Return the namespaces with exactly this text; if there are none, those that contain it."""
    fits: Callable[[str, str], bool]
    for wanted in (text, _last_part(text)):  # the text may be a path or a label
        for fits in (str.__eq__, str.__contains__):
            matches = [each for each in found if any(fits(word, wanted) for word in each.words)]
            if matches:
                return matches
    return []


def _last_part(text: str) -> str:
    return text.rstrip("/").rpartition("/")[2]


def _digits_of(one: NamespaceFolder) -> str:
    known = one.document.get("fingerprint")
    return known if isinstance(known, str) else one.name[-SHORT_FINGERPRINT_DIGITS:]


def missing_folder(folder: Path) -> TierIOError:
    """Return the error for a folder of a tier, not the first one, that is missing."""
    link = " (it is a link to nothing)" if folder.is_symlink() else ""
    problem = f"{folder} is a folder of this tier and is not there{link}"
    remedy = "mount its disk, or, if folders are elsewhere, give all but the first with --also in"
    return TierIOError(errno.ENOENT, f"{problem}; {remedy} their order")


def check_may_write(roots: Sequence[Path]) -> None:
    """Raise `TierIOError` if this user may not write the folders of a path that exist."""
    for root in roots:
        with os_errors(f"opening {root}"), suppress(FileNotFoundError, NotADirectoryError):
            os.stat(root)
            if not os.access(root, os.W_OK | os.X_OK, effective_ids=True):
                is_read_only = os.statvfs(root).f_flag & os.ST_RDONLY
                code = errno.EROFS if is_read_only else errno.EACCES
                raise OSError(code, os.strerror(code))
            os.stat(root / PATH_FOLDER / PATH_FILE)  # its folder is for its user alone
