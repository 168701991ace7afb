"""`kvcascade verify`: check each payload against its checksum, and the index against the segments.

Reading takes no lock. A live namespace changes while it is read, so a mismatch is looked up again
before it counts as damage. Damaged entries are dropped even if engines have the namespace open.
Only a process with exclusive access repairs files or rebuilds an index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from ....errors import InUseError
from ....tiers.nvme.offline.maintenance import (
    Drop,
    drop_entries,
    exclusive,
    make_segments_whole,
    take_entries,
    write_records,
)
from ....tiers.nvme.offline.reader import Description, Snapshot
from ....tiers.nvme.offline.scan import Throttle, Verdict, Wanted, scan
from ....tiers.nvme.segments.format import IndexEntry, SlotRecord, parse_record
from ..cache_access import OpenedCache


class Problem(StrEnum):
    """Kind of damage of a block or a file."""

    CORRUPT = "corrupt"
    """The payload does not match its checksum."""
    UNREADABLE = "unreadable"
    """The device cannot read the payload."""
    NO_SEGMENT = "no_segment"
    """The segment file of the block is missing or damaged."""
    ENTRY = "entry"
    """The index entry is damaged, or names an invalid slot."""
    SHARED_SLOT = "shared_slot"
    """Two entries name one slot; the later entry is correct."""
    RECORD = "record"
    """The payload is correct, but the slot's record differs. `--repair` rewrites the record, or
    leaves that to the engine that owns the slot. Blocks with any other problem are dropped."""


@dataclass(frozen=True, slots=True)
class BlockProblem:
    """One block with a problem."""

    hash: str
    slot: int
    problem: Problem


@dataclass(slots=True)
class VerifyReport:
    """Result of verifying one namespace; sizes in bytes."""

    name: str
    is_live: bool
    problem: str | None = None
    """Reason why the namespace cannot be read or repaired, with a remedy."""
    blocks: int = 0
    ok: int = 0
    changed: int = 0
    """Number of blocks that were removed or replaced while they were read (live namespaces
    only)."""
    bytes_read: int = 0
    seconds: float = 0.0
    problems: list[BlockProblem] = field(default_factory=list)
    segments_damaged: dict[str, str] = field(default_factory=dict)
    """Mapping of damaged segment files to a description of the damage."""
    space: str = ""
    """Result of the check of free space, in words."""
    space_adds_up: bool | None = None
    """True if free space adds up; None if unknown, since only a clean close writes a list of free
    slots."""
    parts_missing: list[int] = field(default_factory=list)
    dropped: int = 0
    """Number of entries that `--repair` removed."""
    records_written: int = 0
    """Number of slot records that `--repair` rewrote."""
    segments_to_repair: list[int] = field(default_factory=list)
    segments_repaired: int = 0
    """Number of segment files whose header or size `--repair` corrected."""

    @property
    def is_clean(self) -> bool:
        """Return True if no problem was found."""
        is_space_wrong = self.space_adds_up is False
        is_damaged = bool(self.problems or self.segments_damaged or is_space_wrong)
        return self.problem is None and not (is_damaged or self.parts_missing)

    def as_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {**asdict(self), "is_clean": self.is_clean}


Progress = Callable[[int], None]
"""Callback with the number of blocks read since the last call."""


def verify(
    cache: OpenedCache, throttle: Throttle | None = None, progress: Progress | None = None
) -> tuple[VerifyReport, list[Drop], list[tuple[int, SlotRecord]]]:
    """Read all blocks; return the report, the entries to drop and the records to write for
    `repair`."""
    snapshot = cache.index.snapshot()
    cache.segments.refresh()  # a live namespace may have grown
    report = VerifyReport(cache.description.name, bool(cache.owners), blocks=len(snapshot))
    report.parts_missing = cache.description.missing_parts
    for each in cache.segments.found.values():
        if each.problem:
            report.segments_damaged[str(each.path)] = each.problem
            report.segments_to_repair.append(each.number)
    doubtful, wanted = _sort_out(cache, snapshot)
    found = [*doubtful, *_scan(cache, wanted, report, throttle, progress)]
    drops: list[Drop] = []
    for position, problem in found:
        key = snapshot.keys[position]
        now = cache.index.raw(key)
        is_odd = snapshot.slots[position] < 0
        if now is None or (now != snapshot.raw(position) and not is_odd):
            report.changed += 1
            continue
        report.problems.append(BlockProblem(key.hex(), int(snapshot.slots[position]), problem))
        drops.append(Drop(key, now))
    records = _wrong_records(cache, snapshot, {position for position, _ in found}, report)
    report.ok = report.blocks - report.changed - len(report.problems)
    _check_space(cache, snapshot, report)
    return report, drops, records


def repair(
    description: Description,
    report: VerifyReport,
    drops: Sequence[Drop],
    records: Sequence[tuple[int, SlotRecord]],
) -> None:
    """Drop the damaged entries, unless they were rewritten meanwhile. Raises a `KVCascadeError`.

    If engines have the namespace open, files are left unchanged.
    """
    try:
        with exclusive(description):
            if drops or report.space_adds_up is False:
                report.dropped = drop_entries(description, drops)
            report.segments_repaired = make_segments_whole(description, report.segments_to_repair)
            write_records(description, records)
            report.records_written = len(records)
    except InUseError:
        report.dropped = take_entries(description, drops)


def _sort_out(
    cache: OpenedCache, snapshot: Snapshot
) -> tuple[list[tuple[int, Problem]], list[tuple[int, Wanted]]]:
    """Return invalid entries, and the entries whose payload must be read."""
    doubtful: list[tuple[int, Problem]] = []
    by_slot: dict[int, tuple[int, IndexEntry]] = {}
    slots_per_segment = cache.description.slots_per_segment
    for position in range(len(snapshot)):
        entry = snapshot.entry(position)
        if entry is None:
            doubtful.append((position, Problem.ENTRY))
            continue
        number = entry.slot // slots_per_segment
        if number not in cache.segments.found:
            if number % cache.description.parts in cache.description.folders:
                doubtful.append((position, Problem.NO_SEGMENT))
            continue
        other = by_slot.get(entry.slot)
        if other is not None and other[1].generation >= entry.generation:
            doubtful.append((position, Problem.SHARED_SLOT))
            continue
        if other is not None:
            doubtful.append((other[0], Problem.SHARED_SLOT))
        by_slot[entry.slot] = (position, entry)
    wanted = [
        (position, Wanted(slot, snapshot.keys[position], entry.checksum, entry.length))
        for slot, (position, entry) in by_slot.items()
    ]
    return doubtful, wanted


def _scan(
    cache: OpenedCache,
    wanted: Sequence[tuple[int, Wanted]],
    report: VerifyReport,
    throttle: Throttle | None,
    progress: Progress | None,
) -> Iterator[tuple[int, Problem]]:
    """Read payloads, and yield the blocks with a problem."""
    position_at = {each.slot: position for position, each in wanted}
    todo = [each for _, each in wanted]
    problems = {
        Verdict.CORRUPT: Problem.CORRUPT,
        Verdict.UNREADABLE: Problem.UNREADABLE,
        Verdict.NO_SEGMENT: Problem.NO_SEGMENT,
    }
    for batch in scan(cache.segments, todo, throttle):
        report.bytes_read += len(batch) * cache.description.block_bytes
        for scanned in batch:
            if scanned.verdict is not Verdict.OK:
                yield position_at[scanned.wanted.slot], problems[scanned.verdict]
        if progress is not None:
            progress(len(batch))


def _wrong_records(
    cache: OpenedCache, snapshot: Snapshot, known_bad: set[int], report: VerifyReport
) -> list[tuple[int, SlotRecord]]:
    """Return slots with a correct payload and a wrong record, each with the correct record."""
    wrong: list[tuple[int, SlotRecord]] = []
    epoch = cache.index.meta().epoch
    cache.segments.refresh()
    readable = set(cache.segments.readable)
    for position in np.argsort(snapshot.slots, kind="stable").tolist():
        entry = snapshot.entry(position)
        if entry is None or position in known_bad:
            continue
        if entry.slot // cache.description.slots_per_segment not in readable:
            continue
        raw = cache.segments.record(entry.slot)
        key = snapshot.keys[position]
        right = SlotRecord(key, entry.generation, entry.checksum, entry.length, epoch)
        if parse_record(raw) == right:
            continue
        if cache.index.raw(key) != snapshot.raw(position):
            report.changed += 1
            continue
        report.problems.append(BlockProblem(key.hex(), entry.slot, Problem.RECORD))
        wrong.append((entry.slot, right))
    return wrong


def _check_space(cache: OpenedCache, snapshot: Snapshot, report: VerifyReport) -> None:
    """Check after a clean close that every slot is either free or holds a block."""
    meta = cache.index.meta()
    is_counted = bool(meta.counted) or not cache.segments.found
    if report.is_live or not meta.is_clean or not is_counted or report.parts_missing:
        report.space = "unknown: only a clean close stores a list of free slots"
        return
    size = cache.description.slots_per_segment
    exists = np.zeros(max(1, cache.slots), dtype=np.bool_)
    for number in meta.counted.intersection(cache.segments.found):
        exists[number * size : (number + 1) * size] = True
    uses = np.zeros(len(exists), dtype=np.int64)
    inside = snapshot.slots[(snapshot.slots >= 0) & (snapshot.slots < len(uses))]
    np.add.at(uses, inside, 1)
    outside = 0
    for start, length in meta.free.tolist():
        if start < 0 or length <= 0 or start + length > len(uses):
            outside += 1
            continue
        uses[start : start + length] += 1
    twice, never = int(np.count_nonzero(uses > 1)), int(np.count_nonzero((uses == 0) & exists))
    report.space_adds_up = not (twice or never or outside)
    report.space = (
        f"{len(snapshot)} blocks and {int(meta.free[:, 1].sum())} free slots cover all slots"
        if report.space_adds_up
        else f"{twice} slots are counted twice, {never} never, {outside} free runs are outside"
    )
    left_out = len(cache.segments.found.keys() - meta.counted)
    if left_out:
        report.space += f"; {left_out} segments of processes without such a list are not counted"
