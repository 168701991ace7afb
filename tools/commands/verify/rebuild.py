"""`kvcascade verify --rebuild-index`: build an index from segments alone.

A block is restored only if its slot record is intact and has the current epoch, and the payload
matches the record's checksum. If a block has two copies, the later one is used. If the current
epoch is unknown, no block can be restored, because a reset may have removed it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ....errors import CorruptionError, KVCascadeError
from ....tiers.nvme.disk.transfers import Throttle
from ....tiers.nvme.index.block_index import GENERATIONS_PER_SESSION
from ....tiers.nvme.index.index_keys import MAX_EPOCH, MAX_SESSION
from ....tiers.nvme.offline.maintenance import Totals, exclusive, replace_index
from ....tiers.nvme.offline.reader import Description, SegmentReader
from ....tiers.nvme.offline.scan import Verdict, Wanted, scan
from ....tiers.nvme.offline.state_reader import StateReader
from ....tiers.nvme.segments.format import IndexEntry, SlotRecord, parse_record
from ..cache_access import check_index_can_be_walked, open_index
from .verify_report import Progress


@dataclass(slots=True)
class RebuildReport:
    """Outcomes of the slots, as counts."""

    name: str
    slots: int = 0
    recovered: int = 0
    no_record: int = 0
    """Number of slots that were never written, or have a damaged record."""
    other_epoch: int = 0
    """Number of slots written before a reset."""
    superseded: int = 0
    """Number of older copies of a block."""
    corrupt: int = 0
    """Number of slots whose payload does not match the checksum."""
    segments_damaged: int = 0
    epoch: int = 0
    old_index: str | None = None
    """Path to which the previous index was moved."""
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Known:
    """Facts that the old index still provides."""

    epoch: int | None = None
    session: int = 0
    totals: Totals = Totals()


def rebuild(
    description: Description,
    throttle: Throttle | None = None,
    progress: Progress | None = None,
) -> RebuildReport:
    """Build a new index.

    Raises `InUseError` if an engine owns the namespace, `CorruptionError` if no block can be proved
    valid.
    """
    if description.missing_parts:
        raise CorruptionError(f"{description.home} has parts that were not given; use --also")
    with exclusive(description):
        report = RebuildReport(description.name)
        segments = SegmentReader(description)
        try:
            return _rebuild(description, segments, report, throttle, progress)
        finally:
            segments.close()


def _rebuild(
    description: Description,
    segments: SegmentReader,
    report: RebuildReport,
    throttle: Throttle | None,
    progress: Progress | None,
) -> RebuildReport:
    known = _ask_old_index(description)
    report.segments_damaged = sum(1 for each in segments.found.values() if each.problem)
    records = list(_records(segments, report))
    report.epoch = _epoch(description.home, known, records)
    current = _latest(records, report)
    proved: list[tuple[bytes, IndexEntry]] = []
    wanted = [
        Wanted(slot, record.key, record.checksum, record.length)
        for slot, record in current.values()
    ]
    for batch in scan(segments, wanted, throttle):
        for scanned in batch:
            if scanned.verdict is not Verdict.OK:
                report.corrupt += 1
                continue
            slot, record = current[scanned.wanted.key]
            entry = IndexEntry(slot, record.length, record.checksum, record.generation)
            proved.append((record.key, entry))
        if progress is not None:
            progress(len(batch))
    newest = max((record.generation for _, record in records), default=0)
    session = max(known.session, newest // GENERATIONS_PER_SESSION)
    old = replace_index(description, proved, report.epoch, session, known.totals)
    report.recovered = len(proved)
    report.old_index = None if old is None else str(old)
    return report


def _records(segments: SegmentReader, report: RebuildReport) -> Iterator[tuple[int, SlotRecord]]:
    """Yield all intact slot records."""
    size = segments.layout.slots
    for number in segments.readable:
        report.slots += size
        for slot in range(number * size, (number + 1) * size):
            record = parse_record(segments.record(slot))
            if record is None:
                report.no_record += 1
            else:
                yield slot, record


def _latest(
    records: list[tuple[int, SlotRecord]], report: RebuildReport
) -> dict[bytes, tuple[int, SlotRecord]]:
    """Return the latest copy of each block in the current epoch: key to slot and record."""
    latest: dict[bytes, tuple[int, SlotRecord]] = {}
    for slot, record in records:
        if record.epoch != report.epoch:
            report.other_epoch += 1
            continue
        before = latest.get(record.key)
        report.superseded += before is not None
        if before is None or before[1].generation < record.generation:
            latest[record.key] = (slot, record)
    return latest


def _epoch(home: Path, known: _Known, records: list[tuple[int, SlotRecord]]) -> int:
    """Return the current epoch, determined as the store itself does."""
    both = (known.epoch, StateReader(home).epoch())
    said = [epoch for epoch in both if epoch is not None and epoch <= MAX_EPOCH]
    if not said:
        raise CorruptionError(
            f"neither the index nor state/epoch.arr of {home} has its number of resets, so no "
            "block can be proved current; remove that directory to start empty"
        )
    return max([*said, *(record.epoch for _, record in records)])


def _ask_old_index(description: Description) -> _Known:
    """Return epoch, session and totals, if the old index can be read."""
    try:
        check_index_can_be_walked(description.home)
        with open_index(description) as index:
            meta = index.meta()
    except (KVCascadeError, OSError):
        return _Known()
    session = meta.session if meta.session <= MAX_SESSION else 0
    return _Known(meta.epoch, session, Totals(meta.written_bytes, meta.read_bytes))
