"""`.kvcascade/path.json` in the first path: the list of paths, and the options in force.

The options are those of the engine whose node became writer last. Of the durabilities of all nodes
the strongest holds.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Mapping, Sequence
from math import isclose
from pathlib import Path
from typing import Annotated, Any

import msgspec

from .....config.sizes import MAX_BYTES, MAX_RECORD_BYTES, human
from .....errors import ConfigError, CorruptionError, NoSpaceError, os_errors
from ....policies import order_class
from ...disk.filesystem import FileSystem
from ..path_messages import PathOptions
from .namespace.namespace_home import homes_under
from .path_capacity import BUDGET_LOCK

PATH_FOLDER = ".kvcascade"
"""Folder in the first path that belongs to the path and to no namespace."""
PATH_FILE = "path.json"
PATH_RECORD_VERSION = 1
POWER = "power"
DURABILITIES = ("process", POWER)
DRIFTING = ("capacity_bytes", "min_free_bytes")
"""Options that may be shares of the disk."""
SAME_SIZE_SHARE = 0.01
NOT_A_RECORD = (msgspec.MsgspecError, ValueError, TypeError, RecursionError)
"""Errors of a document that is damaged."""
Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]
"""Number that a message to a node can carry."""


class PathRecord(msgspec.Struct):
    """Facts that are recorded with a path. A document of another shape is damaged."""

    paths: tuple[str, ...]
    """All paths of the tier in order."""
    options: PathOptions
    min_shares: dict[str, Number] = {}
    """By name of a namespace: bytes that other namespaces may not take from it."""
    epochs: dict[str, Number] = {}
    """By name of a namespace: epoch in which an engine last started alone. Another number than the
    current epoch stands for blocks of updated weights."""
    removed_day: bytes = b""
    """Record of the bytes written in the last day to namespaces that were removed (`endurance`)."""


def was_reset(record: PathRecord | None, name: str, epoch: int) -> bool:
    """Return True if a namespace was reset since an engine last started alone.

    `epoch` is its current one. Blocks that were stored since the reset may have weights that were
    updated in place. Those are not the weights of the fingerprint.
    """
    return epoch != (0 if record is None else record.epochs.get(name, 0))


def load_record(fs: FileSystem, root: Path) -> PathRecord | None:
    """Return what is recorded with a path; None if nothing is. Raises `CorruptionError`."""
    path = root / PATH_FOLDER / PATH_FILE
    with os_errors(f"reading {path}"):
        if not fs.exists(path):
            return None
        data = fs.read(path, MAX_RECORD_BYTES)
    try:
        # People edit the file: `json` also reads a byte order mark and UTF-16.
        found = msgspec.convert(json.loads(data), dict[str, Any])
        json.dumps(found, ensure_ascii=False).encode()  # no message can carry a lone surrogate
        day = b64decode(found.get("removed_day", ""))
        record = msgspec.convert({**found, "removed_day": day}, PathRecord)
        msgspec.convert(msgspec.to_builtins(record.options), dict[str, Number | str | None])
        if found.get("version") != PATH_RECORD_VERSION:
            raise ValueError
        return record
    except NOT_A_RECORD:
        raise CorruptionError(
            f"{path} is damaged or of another version; remove it, and the options of the next "
            "engine are recorded"
        ) from None


def save_record(fs: FileSystem, root: Path, record: PathRecord) -> None:
    """Record options and paths durably. Raises a `KVCascadeError`."""
    document = {"version": PATH_RECORD_VERSION, **msgspec.to_builtins(record)}
    path = root / PATH_FOLDER / PATH_FILE
    with os_errors(f"writing {path}"):
        fs.make_dir(root / PATH_FOLDER)
        fs.replace(path, json.dumps(document, indent=2).encode() + b"\n")


def record_in_force(
    fs: FileSystem, roots: Sequence[Path], options: PathOptions | None
) -> PathRecord:
    """Return paths and options in force, and record them if options are given.

    On a full disk other options than the recorded ones hold without a record, such as a smaller
    capacity. A stronger durability does not. Raises a `KVCascadeError`, such as `ConfigError` if
    the tier has other paths, or one of them is not mounted.
    """
    found = load_record(fs, roots[0])
    if options is None:  # a tool may reach the paths by other names
        if found is None or len(found.paths) != len(roots):
            raise ConfigError(
                f"{roots[0]} has no record of {len(roots)} paths; give all paths of a tier that an "
                "engine has used"
            )
        _check_parts(fs, roots)
        check_mounted(fs, roots)
        return found
    check_options(options)
    # First: a record in a bare mount point would look like the tier's.
    check_roots(fs, roots, found)
    record = PathRecord(tuple(map(str, roots)), options)
    if found is not None:
        record = msgspec.structs.replace(found, options=options)
    if options.durability == POWER and (found is None or found.options.durability != POWER):
        sync_blocks(fs, roots)
    if record != found:
        try:
            save_record(fs, roots[0], record)
        except NoSpaceError:
            if found is None:
                raise
            if is_stronger(options, found.options):
                durability = found.options.durability
                record.options = msgspec.structs.replace(options, durability=durability)
    return record


def check_roots(fs: FileSystem, roots: Sequence[Path], record: PathRecord | None) -> None:
    """Raise `ConfigError` if these are not the folders of the tier that is there.

    `record`: facts that are recorded with it. Raises another `KVCascadeError` if it cannot be read.
    """
    if record is not None:
        check_paths(record.paths, [str(root) for root in roots])
    _check_parts(fs, roots)
    check_mounted(fs, roots)


def check_paths(found: Sequence[str], given: Sequence[str]) -> None:
    """Raise `ConfigError` with both lists if other paths are given than the tier has.

    The only path of a tier may have another name: it is mounted elsewhere, or was moved. Of several
    paths, each has to be known, because a segment lies in the one that its number says.
    """
    is_only = len(found) == len(given) == 1
    if list(found) != list(given) and not is_only:
        raise ConfigError(
            f"path: this tier has the paths {', '.join(found)}, not {', '.join(given)}; give the "
            "same list in the same order, or, if its folders have moved, stop all engines and "
            f"write their new names into `paths` of {PATH_FOLDER}/{PATH_FILE} in the first one"
        )


def check_mounted(fs: FileSystem, roots: Sequence[Path]) -> None:
    """Raise `ConfigError` if the disk of one of several paths is not mounted.

    Its blocks would count as lost, and others would be written to the disk of the mount point.
    Raises `TierIOError` if a path cannot be listed.
    """
    if len(roots) == 1:
        return
    first, *others = [_homes(fs, root) for root in roots]
    is_bare = not first and not fs.exists(roots[0] / PATH_FOLDER / PATH_FILE)
    for root, here in zip(roots[1:], others, strict=True):
        if is_bare and here:
            raise ConfigError(
                f"path: {roots[0]} has nothing of this tier, but {root / min(here)} is a part "
                "of it; mount its disk, or remove that directory if the disk is lost"
            )
        if not first:
            continue
        with os_errors(f"listing {root}"):
            names = fs.list_dir(root) if fs.exists(root) else []
        is_there = not {BUDGET_LOCK, *first}.isdisjoint(names)
        if not is_there:
            raise ConfigError(
                f"path: {root} has nothing of this tier; mount its disk, or create the folder "
                f"{root / min(first)} if the disk is lost"
            )


def _check_parts(fs: FileSystem, roots: Sequence[Path]) -> None:
    """Raise `ConfigError` if a folder is another part of the tier than its place says.

    Of a tier with a record, directories that only a later path has are no part. A damaged
    description says nothing: `open_home` refuses its namespace alone.
    """
    is_recorded = fs.exists(roots[0] / PATH_FOLDER / PATH_FILE)
    by_part = [_homes(fs, root) for root in roots]
    for part, (root, homes) in enumerate(zip(roots, by_part, strict=True)):
        for name, document in homes.items():
            found = document.get("part"), document.get("parts")
            is_part = not document or found == (part, len(roots))
            if not is_part and (name in by_part[0] or not is_recorded):
                raise ConfigError(
                    f"path: {root / name} was made as part {found[0]} of {found[1]}, counted from "
                    f"0, and is given as part {part} of {len(roots)}; give the same list of paths "
                    "as before, or remove that directory"
                )


def _homes(fs: FileSystem, root: Path) -> dict[str, Mapping[str, Any]]:
    return homes_under(fs, root) if fs.exists(root) else {}


def sync_blocks(fs: FileSystem, roots: Sequence[Path]) -> None:
    """Sync all blocks of a tier, also those of namespaces that nobody has open.

    Raises `TierIOError`.
    """
    for root in roots:
        if _homes(fs, root):
            with os_errors(f"syncing the disk of {root}"):
                fs.sync_all(root)


def check_options(options: PathOptions) -> None:
    """Raise `ConfigError` for options that no writer can keep."""
    if options.durability not in DURABILITIES:
        raise ConfigError(
            f"durability {options.durability!r} is unknown; use one of {', '.join(DURABILITIES)}"
        )
    order_class(options.policy)


def is_stronger(asked: PathOptions, in_force: PathOptions) -> bool:
    """Return True if a node asks for a stronger durability than the one in force."""
    return asked.durability == POWER and in_force.durability != POWER


def differences(asked: PathOptions, in_force: PathOptions) -> list[str]:
    """Return one sentence with every option that was not adopted; nothing if all are equal.

    Sizes that differ by less than `SAME_SIZE_SHARE` are equal: shares of one disk drift with its
    free space.
    """
    parts: list[str] = []
    for name in PathOptions.__struct_fields__:
        has, wants = getattr(in_force, name), getattr(asked, name)
        if has != wants and not (name in DRIFTING and isclose(has, wants, rel_tol=SAME_SIZE_SHARE)):
            parts.append(
                f"{name.removesuffix('_bytes')} {_shown(name, has)} instead of "
                f"{_shown(name, wants)}"
            )
    if not parts:
        return []
    return [f"options of the path that are in force, of the engine that writes: {', '.join(parts)}"]


def _shown(name: str, value: object) -> str:
    if value is None:
        return "none"
    return human(value) if name.endswith("_bytes") and isinstance(value, int) else str(value)
