"""`kvcascade gc`: clearing out by age, hash, size, or whole namespaces.

Blocks leave the index; a segment file that holds none any more is deleted, since that is what gives
back disk. For a size, whole segments leave, coldest first. While engines have a namespace open,
blocks leave as well, but files are theirs: the room is used again for what they store.
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

from ...errors import ConfigError, InUseError, KVCascadeError, os_errors
from ...tiers.nvme.chains import head_of
from ...tiers.nvme.filesystem import RealFileSystem
from ...tiers.nvme.maintenance import (
    DAMAGED_SUFFIX,
    Drop,
    drop_entries,
    exclusive,
    remove_segments,
    take_entries,
)
from ...tiers.nvme.namespace import described_layout, remove_namespace
from ...tiers.nvme.presence import owners
from ...tiers.nvme.reader import Location, Snapshot, read_description
from .block import only_match
from .opened import OpenedCache, opened, parse_hash

IN_USE = "in use by process {}: stop it first"
SIZE_IN_USE = "in use by process {}, whose capacity says how large it is: lower that, or stop it"
NOT_NOTED = "no engine has noted what comes after {}: it leaves alone; choose the rest by --hash"


@dataclass(frozen=True, slots=True)
class Wish:
    """What shall go; everything that is set must hold for a block to leave."""

    older_than_s: float | None = None
    """Not used for so long; a block whose last use is not known stays."""
    hash_start: bytes = b""
    """The hash begins with this."""
    prompt: str = ""
    """A block (the start of its hash, in hex) and every block that comes after it in any prompt."""
    max_bytes: int | None = None
    """What the namespaces may take on disk together."""
    whole: bool = False
    """Remove the namespaces altogether."""

    @property
    def is_by_block(self) -> bool:
        """True if blocks are chosen one by one."""
        return self.older_than_s is not None or bool(self.hash_start) or bool(self.prompt)


@dataclass(slots=True)
class GcReport:
    """What was, or would be, removed from one namespace; sizes in bytes."""

    name: str
    blocks_before: int = 0
    blocks_removed: int = 0
    segments_removed: int = 0
    bytes_freed: int = 0
    """On disk."""
    was_removed: bool = False
    """The whole namespace."""
    skipped: str = ""
    """What was not done, and why: an engine has it open, or it cannot be read."""
    is_incomplete: bool = False
    """Blocks that were asked for may be left: `skipped` says why."""

    def as_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


@dataclass(slots=True)
class _Plan:
    """What leaves one namespace."""

    location: Location
    report: GcReport
    drops: list[Drop] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    is_live: bool = False
    """An engine has it open: no file may go."""
    has_prompt: bool = False
    """The block of `Wish.prompt` is here."""


@dataclass(frozen=True, slots=True)
class _SegmentUse:
    """A segment as a candidate: what stays in it and how warm that is."""

    plan: _Plan
    snapshot: Snapshot
    number: int
    used_bytes: int
    positions: npt.NDArray[np.int64]
    """In the snapshot, of the blocks that would stay."""
    warmth: float
    """Mean time of the last use of these blocks; 0 where there are none."""

    def take(self) -> None:
        """The segment leaves, with everything in it."""
        report, snapshot = self.plan.report, self.snapshot
        self.plan.drops += [
            Drop(snapshot.keys[i], snapshot.raw(i)) for i in self.positions.tolist()
        ]
        self.plan.segments.append(self.number)
        report.blocks_removed += len(self.positions)
        report.segments_removed += 1
        report.bytes_freed += self.used_bytes


def collect(
    locations: Sequence[Location], wish: Wish, is_dry_run: bool, now_s: float | None = None
) -> list[GcReport]:
    """Clear out; with `is_dry_run` only say what would go. One report per namespace.

    Files and whole namespaces that an engine has open are skipped and said so. Raises
    `ConfigError`, and nothing is removed, if the prompt is no block of any, or a namespace is to
    leave of which not all paths were given.
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
        if held and not wish.is_by_block:
            continue
        if wish.whole:
            _check_parts(location)
            plan.report.bytes_freed = sum(map(RealFileSystem().used_bytes, location.folders))
            plan.report.was_removed = True
        else:
            candidates += _look(plan, wish, now_s)
    if wish.prompt and not any(plan.has_prompt or plan.report.is_incomplete for plan in plans):
        raise ConfigError(f"--prefix: there is no block {wish.prompt}")
    if wish.max_bytes is not None:
        total = sum(_held_bytes(each) for each in locations)
        _choose_segments(candidates, total - wish.max_bytes)
    if not is_dry_run:
        for plan in plans:
            _carry_out(plan)
    return [plan.report for plan in plans]


def _look(plan: _Plan, wish: Wish, now_s: float) -> list[_SegmentUse]:
    """Choose blocks, and offer segments."""
    try:
        with opened(plan.location) as cache:
            snapshot = cache.index.snapshot()
            plan.report.blocks_before = len(snapshot)
            leaving = _leaving(plan, cache, snapshot, wish, now_s)
            plan.drops = [Drop(snapshot.keys[i], snapshot.raw(i)) for i in np.flatnonzero(leaving)]
            plan.report.blocks_removed = len(plan.drops)
            if plan.is_live:
                return []
            uses = _segment_uses(plan, cache, snapshot, leaving)
    except ConfigError:  # a wrong call, not a namespace that cannot be read
        raise
    except KVCascadeError as error:
        plan.report.skipped = str(error)
        plan.report.is_incomplete = wish.is_by_block
        return []
    for use in uses if wish.is_by_block else ():
        if not len(use.positions):
            use.take()
    return uses


def _check_parts(location: Location) -> None:
    """All of it or nothing: one part without the others is of no use to anybody."""
    layouts = [described_layout(RealFileSystem(), folder) for folder in location.folders]
    described = [layout for layout in layouts if layout is not None]
    parts = max((layout.parts for layout in described), default=1)
    if len({layout.part for layout in described}) < parts and len(layouts) < parts:
        raise ConfigError(
            f"--remove-namespace: {location.name} lies in {parts} paths; give the others with "
            f"--also, or remove {location.folders[0]} yourself if they are gone"
        )


def _leaving(
    plan: _Plan, cache: OpenedCache, snapshot: Snapshot, wish: Wish, now_s: float
) -> npt.NDArray[np.bool_]:
    """Which entries leave by themselves."""
    leaving = np.full(len(snapshot), wish.is_by_block, dtype=np.bool_)
    if wish.hash_start:
        start = wish.hash_start
        leaving &= np.array([key.startswith(start) for key in snapshot.keys], dtype=np.bool_)
    if wish.prompt:
        heads = _heads_from(plan, cache, wish.prompt)
        leaving &= np.array([head_of(key) in heads for key in snapshot.keys], dtype=np.bool_)
    if wish.older_than_s is not None:
        last = cache.state.usage(cache.slots).last_use
        known = (snapshot.slots >= 0) & (snapshot.slots < len(last))
        last_use = np.where(known, last[np.where(known, snapshot.slots, 0)], 0)
        leaving &= (last_use > 0) & (last_use < now_s - wish.older_than_s)
    return leaving


def _heads_from(plan: _Plan, cache: OpenedCache, prompt: str) -> set[int]:
    """A block and what comes after it; none if it is not in this namespace."""
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
    plan: _Plan, cache: OpenedCache, snapshot: Snapshot, leaving: npt.NDArray[np.bool_]
) -> list[_SegmentUse]:
    """Every segment and what stays in it."""
    last = cache.state.usage(cache.slots).last_use
    opened_at = cache.description.home.stat().st_mtime  # stands for a use that is not known
    numbers = np.where(leaving, -1, snapshot.slots // cache.description.slots_per_segment)
    found: list[_SegmentUse] = []
    for number, segment in sorted(cache.segments.found.items()):
        positions = np.flatnonzero(numbers == number)
        times = last[snapshot.slots[positions]]
        warmth = float(np.where(times > 0, times, opened_at).mean()) if len(positions) else 0.0
        found.append(_SegmentUse(plan, snapshot, number, segment.used_bytes, positions, warmth))
    return found


def _choose_segments(uses: Sequence[_SegmentUse], excess_bytes: int) -> None:
    """Take the coldest segments until so much is freed."""
    plans = {id(use.plan): use.plan for use in uses}.values()
    excess_bytes -= sum(plan.report.bytes_freed for plan in plans)
    for use in sorted(uses, key=lambda use: use.warmth):
        if excess_bytes <= 0:
            return
        if use.number not in use.plan.segments:
            use.take()
            excess_bytes -= use.used_bytes


def _carry_out(plan: _Plan) -> None:
    """Do it; files and whole namespaces only if no engine came meanwhile."""
    report = plan.report
    try:
        if report.was_removed:
            fs, folders = RealFileSystem(), [each.resolve() for each in plan.location.folders]
            if not all([remove_namespace(fs, folder) for folder in folders]):
                raise InUseError("an engine has it now")
        elif plan.is_live:
            if plan.drops:
                description = read_description(plan.location)
                report.blocks_removed = take_entries(description, plan.drops)
        elif plan.drops or plan.segments:
            description = read_description(plan.location)
            with exclusive(description):
                drop_entries(description, plan.drops)
                remove_segments(description, plan.segments)
                _remove_kept_index(description.home)
    except KVCascadeError as error:  # the other namespaces have their turn all the same
        report.skipped, report.is_incomplete = str(error), not report.was_removed
        report.blocks_removed = report.segments_removed = report.bytes_freed = 0
        report.was_removed = False


def _remove_kept_index(home: Path) -> None:
    """The damaged index that a rebuild left."""
    with os_errors(f"removing {home / ('index' + DAMAGED_SUFFIX)}"):
        shutil.rmtree(home / ("index" + DAMAGED_SUFFIX), ignore_errors=True)


def _held_bytes(location: Location) -> int:
    return sum(map(RealFileSystem().used_bytes, location.folders))
