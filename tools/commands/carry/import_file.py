"""`kvcascade import`: bring the blocks of an export file into a namespace, and verify each one.

The command joins the namespace as a further process (`Visitor`). A running engine continues, and
finds the blocks as soon as the index has them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ....errors import ConfigError, os_errors
from ....tiers.base import BlockHash, BlockOutcome
from ....tiers.nvme.disk.filesystem import RealFileSystem
from ....tiers.nvme.namespace import NamespaceKey
from ....tiers.nvme.offline.reader import Description, Location, locate, read_description
from ....tiers.nvme.segments.format import SegmentLayout
from ....tiers.nvme.writer.capacity import plan_capacity
from ..cache_access import choose
from ..verify.verify_report import Progress
from .carried import CarriedHead, CarriedReader
from .import_report import (
    DEVICE_REFUSED,
    DifferentNamespaceError,
    ImportReport,
    refuse_unless_equal,
    right_batches,
)
from .visitor import Visitor, WantedNamespace


def import_file(
    roots: Sequence[Path],
    namespace: str | None,
    carried: CarriedReader,
    *,
    may_create: bool = False,
    may_evict: bool = False,
    pause: Callable[[float], object] = time.sleep,
    progress: Progress | None = None,
) -> ImportReport:
    """Bring the blocks of an export file into the namespace that they belong to.

    With `may_evict`, the coldest blocks are evicted if there is no room. Blocks that find no room
    are counted in the report. `pause` sleeps, in seconds, while an engine may hand a segment over.

    Raises `DifferentNamespaceError`, `InUseError` after a reset, or another `KVCascadeError`.
    """
    head = carried.head
    location = _target(roots, namespace, head, may_create)
    if location is not None:
        roots = _roots_of(location)
    visitor = Visitor(roots, *_wanted(location, head, roots), may_evict=may_evict, pause=pause)
    report = ImportReport(visitor.name, head.blocks)
    try:
        _import(visitor, carried, report, progress)
    finally:
        visitor.close()
    return report


def _target(
    roots: Sequence[Path], namespace: str | None, head: CarriedHead, may_create: bool
) -> Location | None:
    """Return the namespace that the blocks belong to, or None if it must be created."""
    found = locate(roots)
    if namespace is not None or (len(found) == 1 and found[0].folders[0] == roots[0]):
        location = choose(found, namespace)
        _refuse_unless_equal(location, head)
        return location
    name = NamespaceKey(head.label, head.fields).directory_name
    same = [each for each in found if read_description(each).fingerprint == head.fingerprint]
    if same:
        return same[0]
    if may_create:
        return None
    if len(found) == 1:
        _refuse_unless_equal(found[0], head)
    raise DifferentNamespaceError(
        f"these blocks belong to the namespace {name}, which does not exist; start its engine, "
        "or give --create"
    )


def _refuse_unless_equal(location: Location, head: CarriedHead) -> None:
    description = read_description(location)
    refuse_unless_equal(location.name, description.fields, description.block_bytes, head)


def _roots_of(location: Location) -> list[Path]:
    """Return the paths of the tier, in order. Raises `ConfigError` if one was not given."""
    description = read_description(location)
    if description.missing_parts:
        raise ConfigError(
            f"{location.name} is spread over {description.parts} paths; give all with --also"
        )
    return [description.folders[part].parent for part in range(description.parts)]


def _wanted(
    location: Location | None, head: CarriedHead, roots: Sequence[Path]
) -> tuple[Description | None, WantedNamespace]:
    """Return the description of the namespace, if it exists, and the size it needs.

    Each slot takes memory, and the file may claim any number because it may have holes. Slots, per
    segment and in total, are therefore limited to those of an engine with the whole disk.
    """
    with os_errors(f"asking for the size of {roots[0]}"):
        disk_bytes = RealFileSystem().total_bytes(roots[0])
    blocks = min(head.blocks, len(roots) * disk_bytes // head.block_bytes)
    label, description = head.label, None
    if location is None:
        most = plan_capacity(disk_bytes, head.block_bytes, 1).slots_per_segment
        slots = min(head.slots_per_segment, most)
        layout = SegmentLayout(head.block_bytes, slots, head.fingerprint)
    else:
        description = read_description(location)
        layout, label = description.layout, description.label
    return description, WantedNamespace(
        NamespaceKey(label, head.fields, head.about), layout, blocks
    )


def _import(
    visitor: Visitor, carried: CarriedReader, report: ImportReport, progress: Progress | None
) -> None:
    for rows, blocks in right_batches(carried, report):
        good = {BlockHash(k): view for k, view in blocks.items() if not visitor.holds(BlockHash(k))}
        report.already_there += len(blocks) - len(good)
        _note(visitor, visitor.store(good), report)
        if progress is not None:
            progress(rows)


def _note(visitor: Visitor, outcomes: Sequence[BlockOutcome | None], report: ImportReport) -> None:
    for outcome in outcomes:
        if outcome is BlockOutcome.OK:
            report.imported += 1
        elif outcome is BlockOutcome.HELD:
            report.already_there += 1
        else:
            report.failed += 1
            report.reason = visitor.why_no_room() if outcome is None else DEVICE_REFUSED
