"""`kvcascade inspect`: contents of a cache, its use, and its wear of the drive."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ....errors import KVCascadeError, os_errors
from ....tiers.endurance import DAY_S
from ....tiers.nvme.disk.filesystem import RealFileSystem
from ....tiers.nvme.offline.presence import owners
from ....tiers.nvme.offline.reader import Location, Snapshot, read_description
from ....tiers.nvme.offline.state_reader import Usage
from ..cache_access import OpenedCache, count_segments, opened
from ..command_line import ARENA_DIR, sentence
from ..shm.kept_arenas import kept_blocks

AGE_BOUNDS_S = (60, 600, 3600, 6 * 3600, DAY_S, 7 * DAY_S, 30 * DAY_S)
AGE_NAMES = ("< 1 min", "< 10 min", "< 1 h", "< 6 h", "< 1 d", "< 7 d", "< 30 d", "older")
REUSE_BOUNDS = (1, 2, 3, 5, 9, 17, 33)
REUSE_NAMES = ("never", "once", "2", "3-4", "5-8", "9-16", "17-32", "more")
UNKNOWN = "not known"
UNREADABLE = "unreadable"
RATE_AFTER_S = 3600.0
"""Age of a namespace from which its writes are reported per day."""
GROUP_BYTES = 4
"""Length of the group number at the end of a block hash."""
_GROUP_FIELD = re.compile(r"group(\d+)")
_TOKENS = re.compile(r"(\d+) tokens")


@dataclass(frozen=True, slots=True)
class GroupReport:
    """Blocks of one KV group of the model."""

    group: int
    blocks: int
    tokens: int | None
    """Tokens per block of this group; None if the fingerprint does not say."""


@dataclass(frozen=True, slots=True)
class NamespaceReport:
    """Report on one namespace, as in the JSON document; sizes in bytes, times in seconds, None if
    unknown."""

    name: str
    paths: list[str]
    state: str
    """State of the namespace: "live", "closed", "closed (not clean)" or "unreadable"."""
    owners: list[int]
    """Ids of the processes that own the namespace."""
    problem: str | None = None
    """Reason why the namespace cannot be opened, with a remedy."""
    label: str = ""
    fingerprint: str = ""
    created: str = ""
    age_s: float | None = None
    block_bytes: int | None = None
    blocks: int | None = None
    slots: int | None = None
    """Number of slots of the existing segments."""
    capacity_slots: int | None = None
    """Number of slots in the capacity of the last owner."""
    payload_bytes: int | None = None
    disk_bytes: int | None = None
    index_bytes: int | None = None
    segments: int | None = None
    segments_damaged: list[int] = field(default_factory=list)
    parts: int | None = None
    parts_missing: list[int] = field(default_factory=list)
    epoch: int | None = None
    sessions: int | None = None
    dirty_share: float | None = None
    """Share of the CPU tier's slots whose block is not in this tier; from a kept arena or an
    engine's metrics, else unknown."""
    written_bytes: int | None = None
    read_bytes: int | None = None
    written_bytes_last_day: int | None = None
    read_bytes_last_day: int | None = None
    written_bytes_per_day: float | None = None
    """Mean bytes written per day since the namespace was created; None in its first
    `RATE_AFTER_S`."""
    drive_writes_per_day: float | None = None
    """Drive writes per day of the device that holds the first path."""
    groups: list[GroupReport] = field(default_factory=list)
    age: dict[str, int] = field(default_factory=dict)
    """Number of blocks by the time since they were written."""
    idle: dict[str, int] = field(default_factory=dict)
    """Number of blocks by the time since their last use."""
    reuse: dict[str, int] = field(default_factory=dict)
    """Number of blocks by how often they were used after they were written."""
    policies: list[dict[str, Any]] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return asdict(self)

    @property
    def room(self) -> int:
        """Return the slots of the capacity, or of the files so far if no engine recorded a
        capacity."""
        return self.capacity_slots or self.slots or 0

    @property
    def used_share(self) -> float:
        """Return the share of the slots that hold blocks."""
        return (self.blocks or 0) / self.room if self.room else 0.0


def report(
    location: Location, now_s: float | None = None, arena_dir: Path = ARENA_DIR
) -> NamespaceReport:
    """Report on one namespace; if it cannot be opened, the report says so and nothing is raised.

    `arena_dir` is the directory in which engines keep their CPU tiers.
    """
    paths = [str(folder) for folder in location.folders]
    now_s = time.time() if now_s is None else now_s
    try:
        with opened(location) as cache:
            return _report(cache, paths, now_s, arena_dir)
    except KVCascadeError as error:
        held = owners(location.folders)
        return _unreadable(location, paths, held, sentence(error), now_s)


def occupancy(cache: OpenedCache, snapshot: Snapshot) -> dict[int, npt.NDArray[np.bool_]]:
    """Return a mask of the used slots of every segment."""
    size = cache.description.slots_per_segment
    used = np.zeros(max(1, cache.slots), dtype=np.bool_)
    slots = snapshot.slots[(snapshot.slots >= 0) & (snapshot.slots < cache.slots)]
    used[slots] = True
    return {n: used[n * size : (n + 1) * size] for n in sorted(cache.segments.found)}


def histogram(
    values: npt.NDArray[np.int64],
    bounds: Sequence[int],
    names: Sequence[str],
    known: npt.NDArray[np.bool_] | None = None,
) -> dict[str, int]:
    """Return counts by range; `known` is False for values to leave out."""
    known = np.ones(len(values), dtype=np.bool_) if known is None else known
    places = np.searchsorted(np.asarray(bounds), values[known], side="right")
    counts = np.bincount(places, minlength=len(names)).tolist()
    counted = dict(zip(names, counts, strict=True))
    unknown = int(np.count_nonzero(~known))
    return {**counted, UNKNOWN: unknown} if unknown else counted


def use_histograms(
    slots: npt.NDArray[np.int64], usage: Usage, now_s: float
) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Return histograms (age, idle, reuse) of the blocks in these slots."""
    slots = slots[(slots >= 0) & (slots < len(usage.times))]
    written, last, times = usage.written_at[slots], usage.last_use[slots], usage.times[slots]
    now = int(now_s)
    return (
        histogram(np.maximum(0, now - written), AGE_BOUNDS_S, AGE_NAMES, written > 0),
        histogram(np.maximum(0, now - last), AGE_BOUNDS_S, AGE_NAMES, last > 0),
        histogram(times, REUSE_BOUNDS, REUSE_NAMES, written > 0),
    )


def tokens_per_block(fields: dict[str, Any], group: int) -> int | None:
    """Return the tokens per block of a KV group from the fingerprint, or None if it does not
    say."""
    match = _TOKENS.match(str(fields.get(f"group{group}", "")))
    chunk = str(fields.get("blocks_per_chunk", "1"))
    return int(match[1]) * int(chunk) if match and chunk.isdigit() else None


def _report(cache: OpenedCache, paths: list[str], now_s: float, arena_dir: Path) -> NamespaceReport:
    description, meta, snapshot = cache.description, cache.index.meta(), cache.index.snapshot()
    age_s = _age(description.created, now_s)
    per_day = meta.written_bytes / (age_s / DAY_S) if age_s and age_s >= RATE_AFTER_S else None
    ages, idles, reuses = use_histograms(snapshot.slots, cache.state.usage(cache.slots), now_s)
    folders = list(description.folders.values())
    with os_errors(f"asking for the disk of {description.home}"):
        figures = os.statvfs(description.home)
    device_bytes = figures.f_blocks * figures.f_frsize
    found = cache.segments.found.values()
    closed = "closed" if meta.is_clean else "closed (not clean)"
    return NamespaceReport(
        name=description.name,
        paths=paths,
        state="live" if cache.owners else closed,
        owners=cache.owners,
        label=description.label,
        fingerprint=description.fingerprint,
        created=description.created,
        age_s=age_s,
        block_bytes=description.block_bytes,
        blocks=len(snapshot),
        slots=len(cache.segments.found) * description.slots_per_segment,
        capacity_slots=cache.state.capacity(),
        payload_bytes=len(snapshot) * description.block_bytes,
        disk_bytes=sum(map(RealFileSystem().used_bytes, folders)),
        index_bytes=cache.index.file_bytes,
        segments=len(cache.segments.found),
        segments_damaged=[each.number for each in found if each.problem],
        parts=description.parts,
        parts_missing=description.missing_parts,
        epoch=meta.epoch,
        sessions=meta.session,
        dirty_share=_dirty_share(description.fingerprint, snapshot, arena_dir),
        written_bytes=meta.written_bytes,
        read_bytes=meta.read_bytes,
        written_bytes_last_day=meta.day.written,
        read_bytes_last_day=meta.day.read,
        written_bytes_per_day=per_day,
        drive_writes_per_day=None if per_day is None else per_day / device_bytes,
        groups=_groups(snapshot, dict(description.fields)),
        age=ages,
        idle=idles,
        reuse=reuses,
        policies=[asdict(policy) for policy in cache.state.policies()],
        fields=dict(description.fields),
        about=dict(description.about),
    )


def _dirty_share(fingerprint: str, snapshot: Snapshot, arena_dir: Path) -> float | None:
    kept = kept_blocks(arena_dir, fingerprint)
    if kept is None:
        return None
    blocks, slots = kept
    return len(blocks.difference(snapshot.keys)) / slots


def _unreadable(
    location: Location, paths: list[str], held: list[int], problem: str, now_s: float
) -> NamespaceReport:
    """Report on a namespace whose index or description cannot be opened."""
    found = _on_disk(location, NamespaceReport(location.name, paths, UNREADABLE, held, problem))
    try:
        description = read_description(location)
    except KVCascadeError:
        return found
    return replace(
        found,
        label=description.label,
        fingerprint=description.fingerprint,
        created=description.created,
        age_s=_age(description.created, now_s),
        block_bytes=description.block_bytes,
        parts=description.parts,
        fields=dict(description.fields),
        about=dict(description.about),
    )


def _on_disk(location: Location, found: NamespaceReport) -> NamespaceReport:
    """Add the facts of the file system, if they can be read."""
    fs, folders = RealFileSystem(), location.folders
    indexes = filter(Path.is_dir, [folder / "index" for folder in folders])
    try:
        return replace(
            found,
            disk_bytes=sum(map(fs.used_bytes, folders)),
            index_bytes=sum(map(fs.used_bytes, indexes)),
            segments=count_segments(location),
        )
    except OSError:
        return found


def _groups(snapshot: Snapshot, fields: dict[str, Any]) -> list[GroupReport]:
    counts: dict[int, int] = {}
    for key in snapshot.keys:
        group = int.from_bytes(key[-GROUP_BYTES:], "big")
        counts[group] = counts.get(group, 0) + 1
    named = {int(m[1]) for name in fields if (m := _GROUP_FIELD.fullmatch(name))}
    if not counts.keys() <= (named or {0}):  # a different kind of hash: groups cannot be told apart
        return []
    reports: list[GroupReport] = []
    for group in sorted(counts):
        per_block = tokens_per_block(fields, group)
        tokens = None if per_block is None else per_block * counts[group]
        reports.append(GroupReport(group, counts[group], tokens))
    return reports


def _age(created: str, now_s: float) -> float | None:
    try:
        moment = datetime.fromisoformat(created)
    except ValueError:
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return max(0.0, now_s - moment.timestamp())
