"""`kvcascade verify`: check each payload against its checksum, and the index against the segments.

Reading takes no lock. A live namespace changes while it is read, so a mismatch is looked up again
before it counts as damage. Damaged entries are dropped even if engines have the namespace open.
Only a process with exclusive access repairs files or rebuilds an index.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ....errors import InUseError
from ....tiers.nvme.disk.transfers import Throttle
from ....tiers.nvme.offline.maintenance import (
    Drop,
    drop_entries,
    exclusive,
    make_segments_whole,
    take_entries,
    write_records,
)
from ....tiers.nvme.offline.reader import Description, Snapshot
from ....tiers.nvme.offline.scan import Verdict, Wanted, scan
from ....tiers.nvme.segments.format import IndexEntry, SlotRecord, parse_record
from ..cache_access import OpenedCache
from .verify_report import BlockProblem, Problem, Progress, VerifyReport


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
