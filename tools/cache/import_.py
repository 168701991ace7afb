"""`kvcascade import`: blocks of an export file into a namespace, every one verified.

The namespace is opened as an engine opens it, so everything that holds for an engine's writes holds
here: reserve, order of payload and index, free slots. As long as a namespace belongs to one process
at a time, that process must not be a running engine.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError, InUseError, NoSpaceError
from ...tiers.base import BlockHash, BlockOutcome
from ...tiers.nvme.capacity import capacity_for
from ...tiers.nvme.filesystem import RealFileSystem
from ...tiers.nvme.format import PAGE_BYTES, SegmentLayout, SlotRecord
from ...tiers.nvme.namespace import NamespaceKey, namespaces_under
from ...tiers.nvme.reader import Location, SegmentReader, locate, read_description
from ...tiers.nvme.scan import payload_checksum
from ...tiers.nvme.tier import NvmeTier, NvmeTierConfig, open_nvme_tier
from .carried import CarriedHead, CarriedReader
from .opened import choose
from .verify import Progress

BATCH_BYTES = 16 << 20
MAX_BATCH_BLOCKS = 1024
MIN_FREE_SHARE = 20
"""One in so many bytes of the disk stays free, as with an engine's default `min_free`."""


class DifferentNamespaceError(ConfigError):
    """The file's blocks belong to another namespace."""


@dataclass(slots=True)
class ImportReport:
    """What became of every block of the file."""

    namespace: str
    blocks: int
    imported: int = 0
    already_there: int = 0
    damaged: int = 0
    """Payload and record do not match."""
    failed: int = 0
    """The device refused them, or there is no room."""

    def as_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def import_file(
    roots: Sequence[Path],
    namespace: str | None,
    carried: CarriedReader,
    *,
    may_create: bool = False,
    progress: Progress | None = None,
) -> ImportReport:
    """Bring the blocks of an export file into the namespace that they belong to.

    Raises `DifferentNamespaceError`, `InUseError` if an engine owns it, `NoSpaceError` if nothing
    fits, or another of our errors.
    """
    head = carried.head
    location = _target(roots, namespace, head, may_create)
    tier = _open(roots if location is None else _roots_of(location), location, head)
    report = ImportReport(tier.namespace.folders[0].name, head.blocks)
    try:
        _import(tier, carried, report, progress)
    finally:
        tier.close()
    if report.failed and not (report.imported or report.already_there):
        raise NoSpaceError("no block found room; free some disk, or clear out with `kvcascade gc`")
    return report


def _target(
    roots: Sequence[Path], namespace: str | None, head: CarriedHead, may_create: bool
) -> Location | None:
    """The namespace that the blocks belong to; None: it is to be made."""
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
        f"these blocks belong to the namespace {name}, which is not there; start the engine once, "
        "or give --create"
    )


def _refuse_unless_equal(location: Location, head: CarriedHead) -> None:
    description = read_description(location)
    names = {*description.fields, *head.fields}
    differing = sorted(
        name for name in names if description.fields.get(name) != head.fields.get(name)
    )
    if differing or description.block_bytes != head.block_bytes:
        shown = ", ".join(differing) or "block_bytes"
        raise DifferentNamespaceError(
            f"these blocks do not belong to {location.name}: {shown} differ; import them where "
            "every field of the fingerprint is equal"
        )


def _roots_of(location: Location) -> list[Path]:
    """The tier's paths, in order. Raises `ConfigError` if one was not given."""
    description = read_description(location)
    if description.missing_parts:
        raise ConfigError(
            f"{location.name} lies in {description.parts} paths; give all with --also"
        )
    return [description.folders[part].parent for part in range(description.parts)]


def _open(roots: Sequence[Path], location: Location | None, head: CarriedHead) -> NvmeTier:
    """Open the tier with room for all blocks; no other namespace is ever removed for it."""
    fs = RealFileSystem()
    layout = SegmentLayout(head.block_bytes, head.slots_per_segment, head.fingerprint)
    existing = 0
    label = head.label
    if location is not None:
        description = read_description(location)
        layout, label = description.layout, description.label
        segments = SegmentReader(description)
        existing = max(segments.found, default=-1) + 1
        segments.close()
    per_path = -(-(existing + -(-head.blocks // layout.slots) + 1) // len(roots))
    others = max(sum(found.used_bytes for found in namespaces_under(fs, root)) for root in roots)
    segments_wanted = per_path * len(roots)
    own = capacity_for(segments_wanted, layout.slots, layout.block_bytes, len(roots))
    config = NvmeTierConfig(
        paths=tuple(roots),
        capacity_bytes=own + (others + PAGE_BYTES) * len(roots),
        block_bytes=head.block_bytes,
        key=NamespaceKey(label, head.fields, head.about),
        min_free_bytes=fs.total_bytes(roots[0]) // MIN_FREE_SHARE,
        slots_per_segment=layout.slots,
        may_remove_namespaces=False,
    )
    executor = ThreadPoolExecutor(1, thread_name_prefix="kvcascade-import")
    try:
        tier = open_nvme_tier(config, executor)
    finally:
        executor.shutdown()
    if not tier.report.is_alone:  # an engine keeps to its own capacity, which may be less
        tier.close()
        raise InUseError(
            f"{tier.report.folder} is in use; blocks are imported while no engine runs: stop it"
        )
    return tier


def _import(
    tier: NvmeTier, carried: CarriedReader, report: ImportReport, progress: Progress | None
) -> None:
    head = carried.head
    step = max(1, min(MAX_BATCH_BLOCKS, BATCH_BYTES // head.block_bytes))
    room = memoryview(mmap.mmap(-1, step * head.block_bytes))
    for first in range(0, head.blocks, step):
        count = min(step, head.blocks - first)
        size = head.block_bytes
        views = [room[i * size : (i + 1) * size] for i in range(count)]
        carried.read(first, views)
        good: list[tuple[BlockHash, memoryview]] = []
        for record, view in zip(carried.records(first, count), views, strict=True):
            if not _is_right(record, view):
                report.damaged += 1
            elif record is not None and tier.index.entry(record.key) is not None:
                report.already_there += 1
            elif record is not None:
                good.append((BlockHash(record.key), view))
        _store(tier, dict(good), report)
        if progress is not None:
            progress(count)


def _is_right(record: SlotRecord | None, payload: memoryview) -> bool:
    if record is None or record.length != len(payload):
        return False
    return record.checksum == payload_checksum(record.key, payload)


def _store(tier: NvmeTier, blocks: dict[BlockHash, memoryview], report: ImportReport) -> None:
    """Write blocks into free slots; nothing that is there leaves for them."""
    backend = tier.backend
    missing = len(blocks) - backend.get_num_free_blocks()
    if missing > 0:
        tier.growth.make(-(-missing // tier.segments.layout.slots))
    keys = list(blocks)[: backend.get_num_free_blocks()]
    report.failed += len(blocks) - len(keys)
    if not keys:
        return
    statuses = backend.allocate_blocks(keys)
    spec = backend.get_load_store_spec(keys, statuses)
    payloads = [blocks[key] for key in keys]
    outcomes = tier.store.write(keys, spec.slots.tolist(), payloads, spec.epoch, spec.removals)
    for status, outcome in zip(statuses, outcomes, strict=True):
        if outcome is BlockOutcome.OK:
            status.ref_cnt = 0
            report.imported += 1
        else:
            backend.free(status)
            report.failed += 1
