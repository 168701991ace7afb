"""`kvcascade import` into a path, closed or beside engines.

The command is one more node of the path: `BlockCache` stores the blocks, and engines find them at
once. The writer makes room as it does for engines. So without `--make-room` each batch has no more
blocks than there is free room for when it begins.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ....assembly.path_parts import PathParts, described, existing_names, path_parts
from ....block_cache import BlockCache, CacheOptions, PutOutcome
from ....errors import ConfigError, InUseError, KVCascadeError, TierIOError, is_folder, os_errors
from ....tiers.nvme.disk.filesystem import FileSystem, RealFileSystem
from ....tiers.nvme.namespace import DESCRIPTION, NamespaceKey
from ....tiers.nvme.path.path_messages import NamespaceSpec
from ....tiers.nvme.path.writer.namespace.namespace_home import (
    SEGMENTS,
    key_of,
    read_description,
    spec_of,
)
from ....tiers.nvme.segments.format import segment_number
from ..path_blocks import OpenPath, open_path
from ..path_folders import check_may_write, choose, folders_in
from ..progress import Advance
from .carried import CarriedHead, CarriedReader
from .import_report import (
    DEVICE_REFUSED,
    DifferentNamespaceError,
    ImportReport,
    StoredKeys,
    refuse_unless_equal,
    right_batches,
)

NO_ROOM = (
    "the tier is full; free space with `kvcascade gc`, give it a larger capacity, or evict the "
    "coldest blocks with --make-room"
)
TOO_SMALL = "the tier is smaller than that; give it a larger capacity"
LOST = "they left the tier again during the import; give it a larger capacity"
GIVEN_UP = (
    "no block was stored for a while, because the device or the writer of the path refuses or is "
    "too slow; look at the log lines above and at the disk, then import again"
)
MAX_FAILED_BATCHES = 3
"""Batches in a row without a stored block after which an import ends. Each may take the whole time
limit of `put`."""
_DEVICE_FAILURES = frozenset({PutOutcome.FAILED, PutOutcome.TIMED_OUT})
_REASONS = {
    PutOutcome.OVER_BUDGET: "the write budget of the day is spent; import the rest tomorrow",
    PutOutcome.TIMED_OUT: "the writer of the path or its device is too slow; import again",
    PutOutcome.FAILED: DEVICE_REFUSED,
}


def import_into_path(
    paths: Sequence[Path],
    namespace: str | None,
    carried: CarriedReader,
    *,
    may_create: bool,
    may_evict: bool,
    progress: Advance,
) -> ImportReport:
    """Bring the blocks of an export file into the namespace of a path that they belong to.

    Raises `DifferentNamespaceError`, `InUseError` after a reset, or another `KVCascadeError`.
    """
    fs, head = RealFileSystem(), carried.head
    roots = list(paths)
    if fs.exists(roots[0] / DESCRIPTION):
        namespace, roots[0] = roots[0].name, roots[0].parent
    _check_folders(roots)
    parts = path_parts(fs, roots, {}, "import")
    spec = _target(fs, parts, namespace, head, may_create)
    if parts.record is not None:  # else no engine has used the path
        _refuse_reset(parts.roots[0], key_of(spec).directory_name)
    with (
        _joined(fs, parts, spec) as cache,
        open_path(parts.roots[0]) as opened,
    ):
        return _import_batches(cache, opened, carried, may_evict, progress)


def _import_batches(
    cache: BlockCache,
    opened: OpenPath,
    carried: CarriedReader,
    may_evict: bool,
    progress: Advance,
) -> ImportReport:
    """Store the blocks of a file in batches, until the device refuses several whole batches."""
    report, stored = ImportReport(cache.name, carried.head.blocks), StoredKeys()
    rows_left, failures = carried.head.blocks, 0
    for rows, good in right_batches(carried, report):
        if may_evict:
            room = int(opened.facts(cache.name)["slots"]) - len(stored.imported)
        else:
            room = _free_slots(opened, cache.name)
        no_room = TOO_SMALL if may_evict else NO_ROOM
        outcomes = _store(cache, good, report, stored, room, no_room)
        progress(rows)
        rows_left -= rows
        if outcomes:
            failures = failures + 1 if _DEVICE_FAILURES.issuperset(outcomes) else 0
        if failures == MAX_FAILED_BATCHES:
            report.failed += rows_left
            report.reason, report.was_given_up = GIVEN_UP, True
            break
    _count(cache, report, stored)
    return report


def _joined(fs: FileSystem, parts: PathParts, spec: NamespaceSpec) -> BlockCache:
    """Join the path. Raises a `KVCascadeError`; that of a damaged index is no `ConfigError`."""
    try:
        return BlockCache(fs, parts.roots, spec, parts.options, CacheOptions())
    except ConfigError:
        name = key_of(spec).directory_name
        if parts.record is not None:
            with open_path(parts.roots[0]) as opened:
                if name in opened.names:
                    opened.facts(name)  # raises the reason if the namespace cannot be opened
        raise


def _check_folders(roots: Sequence[Path]) -> None:
    """Raise `TierIOError` if a folder is missing, cannot be looked at, or is another user's."""
    for root in roots:
        with os_errors(f"looking for {root}"):
            if not is_folder(root):
                raise TierIOError(
                    errno.ENOENT, f"there is no folder {root}; mount its disk, or create it"
                )
    check_may_write(roots)


def _target(
    fs: FileSystem, parts: PathParts, text: str | None, head: CarriedHead, may_create: bool
) -> NamespaceSpec:
    """Return the namespace that the blocks belong to."""
    root = parts.roots[0]
    is_named = text is not None
    names = [choose(folders_in(fs, root), text).name] if is_named else existing_names(fs, root)
    found = {}
    for name in names:
        try:
            found[name] = read_description(fs, root / name)
        except KVCascadeError:
            if text is not None:
                raise
    same = [name for name, each in found.items() if each["fingerprint"] == head.fingerprint]
    if same or text is not None or (len(found) == 1 and not may_create):
        name = same[0] if same else next(iter(found))
        refuse_unless_equal(name, found[name]["fields"], found[name]["block_bytes"], head)
        spec = described(fs, parts, name, head.block_bytes)
        assert spec is not None, "its description was just read"
        return spec
    key = NamespaceKey(head.label, head.fields, head.about)
    if not may_create:
        raise DifferentNamespaceError(
            f"these blocks belong to the namespace {key.directory_name}, which does not exist; "
            "start its engine, or give --create"
        )
    return spec_of(key, head.block_bytes)


def _refuse_reset(root: Path, name: str) -> None:
    """Raise `InUseError` if running engines were reset."""
    with open_path(root) as opened:
        if opened.is_live(name) and opened.was_reset(name):
            raise InUseError(
                f"the engines of {name} were reset: their weights may differ from those of its "
                "fingerprint and of the blocks; stop the engines first"
            )


def _free_slots(opened: OpenPath, name: str) -> int:
    """Return the number of blocks that a namespace can take without any eviction."""
    fs, namespace = RealFileSystem(), opened.namespace(name)
    facts, stat = opened.facts(name), opened.session.ask("stat")
    layout, reserve = namespace.layout, int(stat["options"]["min_free_bytes"])
    paths, more = len(opened.roots), 0
    with os_errors(f"listing {name}"):
        files = [file for folder in namespace.folders for file in fs.list_dir(folder / SEGMENTS)]
        disk = [fs.free_bytes(root) - reserve for root in opened.roots]
    made = [number for number in map(segment_number, files) if number is not None]
    for path, left in enumerate(_left_bytes(stat, paths)):
        lacking = len(range(path, int(facts["slots"]) // layout.slots, paths))
        lacking -= sum(number % paths == path for number in made)
        more += max(0, min(lacking, min(left, disk[path]) // layout.file_bytes))
    free = (len(made) + more) * layout.slots - int(facts["blocks"]) - int(facts["granted_slots"])
    # If less than half a segment would be left, the writer takes one of a colder namespace.
    return free if len(opened.names) == 1 else free - layout.slots // 2


def _left_bytes(stat: Mapping[str, Any], paths: int) -> list[int]:
    """Return what is left of the capacity of each path; at least so much for an older writer."""
    capacity = int(stat["options"]["capacity_bytes"])
    least = capacity - int(stat["bytes"]) - (paths - 1) * (capacity // paths)
    return list(map(int, stat.get("left_bytes", [least] * paths)))


def _store(
    cache: BlockCache,
    blocks: dict[bytes, memoryview],
    report: ImportReport,
    stored: StoredKeys,
    room: int,
    no_room: str,
) -> list[PutOutcome]:
    """Store blocks that are not in the cache, at most `room`; return their outcomes."""
    held = [key for key, is_there in zip(blocks, cache.exists(blocks), strict=True) if is_there]
    cache.touch(held)  # none of them is evicted for another one
    stored.already_there.extend(held)
    new = [key for key in blocks if key not in set(held)]
    keys = new[: max(0, room)]
    if len(keys) < len(new):
        report.failed += len(new) - len(keys)
        report.reason = no_room
    outcomes = cache.put(keys, [blocks[key] for key in keys])
    if PutOutcome.RESET in outcomes:
        raise InUseError(
            f"{cache.name} was reset meanwhile: its weights may have changed, and all older "
            "blocks are gone; import again only if the blocks belong to the new weights"
        )
    for key, outcome in zip(keys, outcomes, strict=True):
        if outcome is PutOutcome.STORED:
            stored.imported.append(key)
        elif outcome is PutOutcome.HELD:
            stored.already_there.append(key)
        else:
            report.failed += 1
            report.reason = no_room if outcome is PutOutcome.FULL else _REASONS[outcome]
    return outcomes


def _count(cache: BlockCache, report: ImportReport, stored: StoredKeys) -> None:
    """Count the blocks that are there, and as failed those that left the tier again."""
    report.imported = cache.exists(stored.imported).count(True)
    report.already_there = cache.exists(stored.already_there).count(True)
    had = len(stored.imported) + len(stored.already_there)
    lost = had - report.imported - report.already_there
    if lost:
        report.failed += lost
        report.reason = report.reason or LOST
