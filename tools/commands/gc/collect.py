"""`kvcascade gc`: remove blocks by age, hash or size, or whole namespaces.

Blocks are removed from the index. A segment file without blocks is deleted, which frees disk space.
To reach a size, whole segments are removed, empty ones first, then the coldest. If an engine has
the namespace open, blocks are removed as well, but its files stay; the engine reuses the space.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.text import Text

from ....errors import ConfigError, InUseError, KVCascadeError, os_errors
from ....tiers.nvme.disk.filesystem import RealFileSystem
from ....tiers.nvme.namespace import described_layout, remove_namespace
from ....tiers.nvme.offline.maintenance import (
    DAMAGED_SUFFIX,
    Drop,
    drop_entries,
    exclusive,
    remove_segments,
    take_entries,
)
from ....tiers.nvme.offline.presence import owners
from ....tiers.nvme.offline.reader import Location, Snapshot, read_description
from ....tiers.nvme.segments.chains import head_of
from .. import show
from ..cache_access import OpenedCache, count_segments, opened, parse_hash
from ..command_line import sentence
from ..inspect.block_report import only_match

IN_USE = "in use by process {}: stop it first"
SIZE_IN_USE = "in use by process {}, whose capacity sets its size: lower the capacity, or stop it"
KEPT_INDEX = f"index{DAMAGED_SUFFIX}"
"""Name of the damaged index that a rebuild kept; any removal deletes it."""
NOT_NOTED = (
    "no engine has recorded the blocks after {}: only it is removed; select others by --hash"
)


@dataclass(frozen=True, slots=True)
class Wish:
    """Criteria for removal; a block is removed if it meets all criteria that are set."""

    older_than_s: float | None = None
    """Minimum seconds since the last use; a block whose last use is unknown stays."""
    hash_start: bytes = b""
    """Prefix of the hashes to remove."""
    prompt: str = ""
    """Start of a block's hash (hex); the block and all its successors in any prompt are removed."""
    max_bytes: int | None = None
    """Maximum size of all namespaces together on disk."""
    whole: bool = False
    """True to remove the namespaces completely."""

    @property
    def is_by_block(self) -> bool:
        """Return True if blocks are selected individually."""
        return self.older_than_s is not None or bool(self.hash_start) or bool(self.prompt)


@dataclass(slots=True)
class GcReport:
    """Blocks and bytes that were, or would be, removed from one namespace."""

    name: str
    blocks_before: int | None = None
    """Blocks before the removal; None if the index cannot be read."""
    blocks_removed: int | None = 0
    """Blocks removed; None if all blocks of an unreadable index were removed."""
    segments_removed: int = 0
    bytes_freed: int = 0
    """Bytes of disk space that were freed."""
    hottest_idle_s: float | None = None
    """Smallest time since the last use of a removed block; None if no use is known or no block is
    removed."""
    was_removed: bool = False
    """True if the whole namespace was removed."""
    skipped: str = ""
    """Parts that were skipped, and the reason: an engine has them open, or they cannot be read."""
    is_incomplete: bool = False
    """True if requested blocks may be left; `skipped` gives the reason."""

    def as_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return asdict(self)


@dataclass(slots=True)
class _Plan:
    """Blocks and files to remove from one namespace."""

    location: Location
    report: GcReport
    drops: list[Drop] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    last_use: int = 0
    """Latest use of any block to remove, in seconds of the wall clock; 0 if unknown."""
    is_live: bool = False
    """True if an engine has the namespace open, so no file may be deleted."""
    has_prompt: bool = False
    """True if this namespace has the block of `Wish.prompt`."""


@dataclass(frozen=True, slots=True)
class _SegmentUse:
    """A segment as a candidate for removal, with its remaining blocks and their warmth."""

    plan: _Plan
    snapshot: Snapshot
    number: int
    used_bytes: int
    positions: npt.NDArray[np.int64]
    """Positions in the snapshot of the blocks that would stay in the segment."""
    is_emptied: bool
    """True if all blocks of the segment are removed individually."""
    warmth: float
    """Mean time of the last use of the remaining blocks; 0 if there are none."""
    last_use: int
    """Latest use of the remaining blocks; 0 if unknown."""

    def take(self) -> None:
        """Remove the segment with all its blocks."""
        plan, snapshot = self.plan, self.snapshot
        plan.drops += [Drop(snapshot.keys[i], snapshot.raw(i)) for i in self.positions.tolist()]
        plan.segments.append(self.number)
        plan.last_use = max(plan.last_use, self.last_use)
        plan.report.segments_removed += 1
        plan.report.bytes_freed += self.used_bytes


def collect(
    locations: Sequence[Location], wish: Wish, is_dry_run: bool, now_s: float | None = None
) -> list[GcReport]:
    """Remove blocks and files, or only report them if `is_dry_run`; return a report per namespace.

    Files and whole namespaces that an engine has open are skipped, and the report says so.

    Raises `ConfigError`, before anything is removed, if no namespace has the block of the prompt.
    Also raises it if not all paths of a namespace to remove were given.
    """
    now_s = time.time() if now_s is None else now_s
    plans: list[_Plan] = []
    candidates: list[_SegmentUse] = []
    for location in locations:
        plan = _Plan(location, GcReport(location.name))
        plans.append(plan)
        held = owners(location.folders)
        plan.is_live = bool(held)
        if held and (wish.whole or wish.max_bytes is not None):
            reason = IN_USE if wish.whole else SIZE_IN_USE
            plan.report.skipped = reason.format(held[0] or "unknown")
        candidates += _look(plan, wish, now_s)
        if wish.whole and not held:
            _check_parts(location)
            plan.report.bytes_freed = _held_bytes(location)
            plan.report.segments_removed = count_segments(location)
            plan.report.blocks_removed = plan.report.blocks_before
            plan.report.was_removed = True
    if wish.prompt and not any(plan.has_prompt or plan.report.is_incomplete for plan in plans):
        raise ConfigError(f"--prefix: there is no block {wish.prompt}")
    if wish.max_bytes is not None:
        total = sum(_held_bytes(each) for each in locations)
        _choose_segments(candidates, total - wish.max_bytes)
    for plan in plans:
        if not wish.whole:
            plan.report.blocks_removed = len(plan.drops)
        if plan.last_use:
            plan.report.hottest_idle_s = max(0.0, now_s - plan.last_use)
        if not plan.is_live and (plan.drops or plan.segments):
            kept = filter(Path.is_dir, (folder / KEPT_INDEX for folder in plan.location.folders))
            plan.report.bytes_freed += sum(map(RealFileSystem().used_bytes, kept))
        if not is_dry_run:
            _carry_out(plan)
    return [plan.report for plan in plans]


def _look(plan: _Plan, wish: Wish, now_s: float) -> list[_SegmentUse]:
    """Select blocks, and return segments as candidates."""
    try:
        with opened(plan.location) as cache:
            snapshot = cache.index.snapshot()
            plan.report.blocks_before = len(snapshot)
            last_use = _last_use(cache, snapshot)
            if wish.whole:
                plan.last_use = 0 if plan.is_live else int(last_use.max(initial=0))
                return []
            leaving = _leaving(plan, cache, snapshot, wish, last_use, now_s)
            plan.drops = [Drop(snapshot.keys[i], snapshot.raw(i)) for i in np.flatnonzero(leaving)]
            plan.last_use = int(last_use[leaving].max(initial=0))
            if plan.is_live:
                return []
            uses = _segment_uses(plan, cache, snapshot, leaving, last_use)
    except ConfigError:  # the call is wrong, the namespace is readable
        raise
    except KVCascadeError as error:
        if not wish.whole:  # a namespace can be removed even if it is unreadable
            plan.report.skipped = sentence(error)
            plan.report.is_incomplete = wish.is_by_block
        return []
    for use in uses:
        if use.is_emptied:
            use.take()
    return uses


def _last_use(cache: OpenedCache, snapshot: Snapshot) -> npt.NDArray[np.int64]:
    """Return the last use of every entry, in seconds of the wall clock; 0 if unknown."""
    last = cache.state.usage(cache.slots).last_use
    known = (snapshot.slots >= 0) & (snapshot.slots < len(last))
    found = np.zeros(len(snapshot), dtype=np.int64)
    found[known] = last[snapshot.slots[known]]
    return found


def _check_parts(location: Location) -> None:
    """Check that all parts of the namespace were given; the other parts would be useless without
    one."""
    layouts = [described_layout(RealFileSystem(), folder) for folder in location.folders]
    described = [layout for layout in layouts if layout is not None]
    parts = max((layout.parts for layout in described), default=1)
    if len({layout.part for layout in described}) < parts and len(layouts) < parts:
        raise ConfigError(
            f"--remove-namespace: {location.name} is spread over {parts} paths; give the others "
            f"with --also, or remove {location.folders[0]} yourself if they are gone"
        )


def _leaving(
    plan: _Plan,
    cache: OpenedCache,
    snapshot: Snapshot,
    wish: Wish,
    last_use: npt.NDArray[np.int64],
    now_s: float,
) -> npt.NDArray[np.bool_]:
    """Return a mask of the entries that are removed individually."""
    leaving = np.full(len(snapshot), wish.is_by_block, dtype=np.bool_)
    if wish.hash_start:
        start = wish.hash_start
        leaving &= np.array([key.startswith(start) for key in snapshot.keys], dtype=np.bool_)
    if wish.prompt:
        heads = _heads_from(plan, cache, wish.prompt)
        leaving &= np.array([head_of(key) in heads for key in snapshot.keys], dtype=np.bool_)
    if wish.older_than_s is not None:
        leaving &= (last_use > 0) & (last_use < now_s - wish.older_than_s)
    return leaving


def _heads_from(plan: _Plan, cache: OpenedCache, prompt: str) -> set[int]:
    """Return the hash heads of a block and its successors; empty if this namespace lacks the
    block."""
    if not cache.index.keys_from(parse_hash(prompt), 1):
        return set()
    plan.has_prompt = True
    first = head_of(only_match(cache, prompt, "--prefix"))
    chains = cache.state.chains()
    heads = chains.from_on(first)
    if len(heads) == 1 and chains.end_of(first) is None:
        plan.report.skipped, plan.report.is_incomplete = NOT_NOTED.format(prompt), True
    return heads


def _segment_uses(
    plan: _Plan,
    cache: OpenedCache,
    snapshot: Snapshot,
    leaving: npt.NDArray[np.bool_],
    last_use: npt.NDArray[np.int64],
) -> list[_SegmentUse]:
    """Return every segment with its remaining blocks."""
    opened_at = cache.description.home.stat().st_mtime  # replaces an unknown last use
    numbers = snapshot.slots // cache.description.slots_per_segment
    left = set(numbers[leaving].tolist())
    numbers[leaving] = -1
    found: list[_SegmentUse] = []
    for number, segment in sorted(cache.segments.found.items()):
        positions = np.flatnonzero(numbers == number)
        times = last_use[positions]
        found.append(
            _SegmentUse(
                plan,
                snapshot,
                number,
                segment.used_bytes,
                positions,
                is_emptied=not len(positions) and number in left,
                warmth=float(np.where(times, times, opened_at).mean()) if len(times) else 0.0,
                last_use=int(times.max(initial=0)),
            )
        )
    return found


def _choose_segments(uses: Sequence[_SegmentUse], excess_bytes: int) -> None:
    """Take the coldest segments until the excess is freed."""
    plans = {id(use.plan): use.plan for use in uses}.values()
    excess_bytes -= sum(plan.report.bytes_freed for plan in plans)
    for use in sorted(uses, key=lambda use: use.warmth):
        if excess_bytes <= 0:
            return
        if use.number not in use.plan.segments:
            use.take()
            excess_bytes -= use.used_bytes


def _carry_out(plan: _Plan) -> None:
    """Execute the plan; delete files and whole namespaces only if no engine has opened them
    meanwhile."""
    report, dropped = plan.report, 0
    try:
        if report.was_removed:
            fs, folders = RealFileSystem(), [each.resolve() for each in plan.location.folders]
            if not all([remove_namespace(fs, folder) for folder in folders]):
                raise InUseError("an engine has opened it meanwhile")
        elif plan.is_live:
            if plan.drops:
                description = read_description(plan.location)
                report.blocks_removed = take_entries(description, plan.drops)
        elif plan.drops or plan.segments:
            description = read_description(plan.location)
            with exclusive(description):
                report.blocks_removed = dropped = drop_entries(description, plan.drops)
                remove_segments(description, plan.segments)
                _remove_kept_index(description.home)
    except KVCascadeError as error:  # continue with the other namespaces
        report.skipped, report.is_incomplete = sentence(error), not report.was_removed
        report.blocks_removed, report.hottest_idle_s = dropped, None
        report.segments_removed = report.bytes_freed = 0
        report.was_removed = False


def _remove_kept_index(home: Path) -> None:
    """Delete the damaged index that a rebuild kept."""
    with os_errors(f"removing {home / KEPT_INDEX}"):
        shutil.rmtree(home / KEPT_INDEX, ignore_errors=True)


def _held_bytes(location: Location) -> int:
    return sum(map(RealFileSystem().used_bytes, location.folders))


def print_collected(reports: Sequence[GcReport], is_dry_run: bool) -> None:
    """Print the blocks and bytes that were, or would be, removed."""
    title = "Would be removed" if is_dry_run else "Removed"
    names = ["blocks", "of", "segments", "freed", "time since last use"]
    table = show.columns(title, "namespace", *names, "", right=names)
    for report in reports:
        note = "the whole namespace" if report.was_removed else report.skipped
        cells = (report.blocks_removed, report.blocks_before, report.segments_removed)
        shown = [show.UNKNOWN if cell is None else f"{cell:,}" for cell in cells]
        hottest = show.duration(report.hottest_idle_s)
        table.add_row(report.name, *shown, show.size(report.bytes_freed), hottest, Text(note))
    show.console().print(table)
