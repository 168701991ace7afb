"""`kvcascade inspect`: contents of a cache, its use, and its wear of the drive.

Numbers of blocks, uses and ages come from files that every process may read. Totals and engines
come from the writer. If it does not answer, the report has what the files say.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ....config.machine import Machine
from ....errors import KVCascadeError, os_errors
from ....tiers.base import SlotMask
from ....tiers.endurance import DAY_S
from ....tiers.nvme.disk.filesystem import FileSystem
from ....tiers.nvme.namespace import DESCRIPTION
from ....tiers.nvme.path.presence_file import PRESENCE
from ....tiers.nvme.path.presence_table import PresenceTable
from ....tiers.nvme.path.writer.namespace.namespace_home import BLOCKS, STATE
from ..command_line import ARENA_DIR
from ..path_blocks import OpenPath
from ..path_files import is_on_read_only_disk, read_presence
from ..path_folders import NamespaceFolder
from ..saved_state import SavedState, SlotUse
from ..shm.kept_arenas import kept_blocks
from ..verify.verify_path import damaged_segments

AGE_BOUNDS_S = (60, 600, 3600, 6 * 3600, DAY_S, 7 * DAY_S, 30 * DAY_S)
AGE_NAMES = ("< 1 min", "< 10 min", "< 1 h", "< 6 h", "< 1 d", "< 7 d", "< 30 d", "older")
REUSE_BOUNDS = (1, 2, 3, 5, 9, 17, 33)
REUSE_NAMES = ("never", "once", "2", "3-4", "5-8", "9-16", "17-32", "more")
UNKNOWN = "not known"
UNREADABLE = "unreadable"
LIVE, CLOSED, NOT_CLEAN = "live", "closed", "closed (not clean)"
RATE_AFTER_S = 3600.0
"""Age of a namespace from which its writes are reported per day."""
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
    """State of the namespace: "live", "closed", "closed (not clean)", "unreadable", "not known" if
    its writer does not answer or its disk is read-only, or "version N" of another version."""
    engines: list[str] = field(default_factory=list)
    """Names of the engines, or other nodes, that have the namespace open."""
    granted_slots: int | None = None
    """Number of slots that engines are writing to."""
    format_version: object = None
    problem: str | None = None
    """Reason why not everything is known, with a remedy."""
    label: str = ""
    fingerprint: str = ""
    created: str = ""
    age_s: float | None = None
    block_bytes: int | None = None
    blocks: int | None = None
    slots: int | None = None
    """Number of slots of the existing segments."""
    capacity_slots: int | None = None
    """Number of slots that the capacity of the path has room for."""
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
    """Drive writes per day of the devices that hold the paths, together; None if a path is
    missing."""
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

    @property
    def room(self) -> int:
        """Return the slots of the capacity, or of the files so far if no engine recorded a
        capacity."""
        return self.capacity_slots or self.slots or 0

    @property
    def used_share(self) -> float:
        """Return the share of the slots that hold blocks."""
        return (self.blocks or 0) / self.room if self.room else 0.0


@dataclass(frozen=True, slots=True)
class SlotsInUse:
    """Slots of a namespace as its presence table names them."""

    table: PresenceTable
    is_used: SlotMask
    use: SlotUse
    is_clean: bool
    """True if the namespace was closed cleanly and not opened since."""

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return int(np.count_nonzero(self.is_used))

    def by_segment(self, slots_per_segment: int, numbers: Sequence[int]) -> dict[int, SlotMask]:
        """Return a mask of the used slots of every segment in `numbers`."""
        size, used = slots_per_segment, self.is_used
        return {n: used[n * size : (n + 1) * size] for n in numbers if (n + 1) * size <= len(used)}


def slots_in_use(fs: FileSystem, folder: Path) -> SlotsInUse:
    """Read the presence table and the uses of the namespace in a directory.

    Raises `FormatError` if the table is damaged, or another `KVCascadeError`.
    """
    table, is_clean = read_presence(fs, folder)
    use = SavedState(folder / STATE).use(table.slots)
    return SlotsInUse(table, table.used_slots(), use, is_clean)


class Inspector:
    """Makes reports of namespaces. One thread."""

    def __init__(
        self,
        fs: FileSystem,
        opened: OpenPath | None,
        problem: str | None = None,
        *,
        now_s: float | None = None,
        arena_dir: Path = ARENA_DIR,
        machine: Machine | None = None,
    ) -> None:
        """`opened` is the open path; None if it cannot be opened, with the reason in `problem`.

        `now_s` is in seconds since 1970. `arena_dir` is the directory in which engines keep their
        CPU tiers. `machine` tells the sizes of the disks.
        """
        self._fs = fs
        self._opened = opened
        self._problem = problem
        self._now_s = time.time() if now_s is None else now_s
        self._arena_dir = arena_dir
        self._machine = machine or Machine()

    def report(self, one: NamespaceFolder) -> NamespaceReport:
        """Report on one namespace; if it cannot be opened, the report says so.

        Raises `InUseError` if the writer does not answer, or `TierIOError`.
        """
        paths = [str(folder) for folder in one.folders]
        if not one.is_readable:
            state = UNREADABLE if one.problem else f"version {one.version}"
            found = NamespaceReport(one.name, paths, state, problem=one.problem or None)
            with suppress(KVCascadeError):  # this user may not enter it
                found = replace(found, **_on_disk(self._fs, one))
            return replace(found, **_described(self._fs, one, self._now_s))
        session = SavedState(one.folders[0] / STATE).sessions()  # before the writer opens it
        before = self._slots(one)
        damaged = [number for number, _ in damaged_segments(one.segment_files(), one.layout)]
        opened = self._opened
        facts, problem = opened.facts_or_problem(one.name) if opened else (None, self._problem)
        slots = before if facts is None else self._slots(one)
        found = NamespaceReport(
            one.name,
            paths,
            self._state(one, facts, before, slots),
            problem=problem,
            sessions=session,
            segments_damaged=damaged,
            policies=[asdict(each) for each in SavedState(one.folders[0] / STATE).policies()],
        )
        found = replace(found, **_on_disk(self._fs, one), **_described(self._fs, one, self._now_s))
        if slots is not None:
            found = self._with_slots(found, one, slots, facts is not None)
        return found if facts is None else self._with_facts(found, one, facts)

    def _slots(self, one: NamespaceFolder) -> SlotsInUse | None:
        try:
            return slots_in_use(self._fs, one.folders[0])
        except KVCascadeError:
            return None

    def _state(
        self,
        one: NamespaceFolder,
        facts: dict[str, Any] | None,
        before: SlotsInUse | None,
        now: SlotsInUse | None,
    ) -> str:
        if facts is None:
            is_read = self._opened is None and now is not None
            # On a read-only disk no writer can open it, however sound it is.
            is_shut = is_on_read_only_disk(one.folders[0] / DESCRIPTION)
            return UNKNOWN if is_read or is_shut else UNREADABLE
        if facts["engines"]:
            return LIVE
        assert self._opened is not None, "it has just answered"
        was_opened_here = self._opened.session.is_writer
        return CLOSED if before is None or before.is_clean or not was_opened_here else NOT_CLEAN

    def _with_slots(
        self, found: NamespaceReport, one: NamespaceFolder, slots: SlotsInUse, is_open: bool
    ) -> NamespaceReport:
        ages, idles, reuses = _use_histograms(slots, self._now_s)
        return replace(
            found,
            blocks=slots.blocks,
            capacity_slots=slots.table.slots,
            payload_bytes=slots.blocks * one.block_bytes,
            epoch=slots.table.epoch,
            dirty_share=_dirty_share(found.fingerprint, slots.table, self._arena_dir),
            groups=self._groups(one, slots.blocks, is_open),
            age=ages,
            idle=idles,
            reuse=reuses,
        )

    def _with_facts(
        self, found: NamespaceReport, one: NamespaceFolder, facts: dict[str, Any]
    ) -> NamespaceReport:
        age_s, written = found.age_s, int(facts["written_bytes"])
        per_day = written / (age_s / DAY_S) if age_s and age_s >= RATE_AFTER_S else None
        with os_errors(f"asking for the disks of {one.name}"):
            disks = {disk.device: disk.total for disk in map(self._machine.disk, one.folders)}
        wear = None
        if per_day is not None and not found.parts_missing:
            wear = per_day / sum(disks.values())
        return replace(
            found,
            engines=facts["engines"],
            granted_slots=facts["granted_slots"],
            blocks=facts["blocks"],
            payload_bytes=facts["blocks"] * one.block_bytes,
            capacity_slots=facts["slots"],
            epoch=facts["epoch"],
            written_bytes=written,
            read_bytes=facts["read_bytes"],
            written_bytes_last_day=facts["day"]["written_bytes"],
            read_bytes_last_day=facts["day"]["read_bytes"],
            written_bytes_per_day=per_day,
            drive_writes_per_day=wear,
        )

    def _groups(self, one: NamespaceFolder, blocks: int, is_open: bool) -> list[GroupReport]:
        """Count by group; blocks of hashes that are not an engine's cannot be told apart."""
        fields = dict(one.fields)
        named = {int(m[1]) for name in fields if (m := _GROUP_FIELD.fullmatch(name))}
        counts = {min(named): blocks} if len(named) == 1 else {}
        if len(named) > 1 and is_open and self._opened is not None:
            counts = self._opened.groups(one.name)
        reports: list[GroupReport] = []
        for group in sorted(counts) if counts.keys() <= named else ():
            per_block = tokens_per_block(fields, group)
            tokens = None if per_block is None else per_block * counts[group]
            reports.append(GroupReport(group, counts[group], tokens))
        return reports


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


def _use_histograms(
    slots: SlotsInUse, now_s: float
) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Return histograms (age, idle, reuse) of the blocks."""
    used, use, now = slots.is_used, slots.use, int(now_s)
    written, last, times = use.written_at[used], use.last_use[used], use.times[used]
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


def _dirty_share(fingerprint: str, table: PresenceTable, arena_dir: Path) -> float | None:
    kept = kept_blocks(arena_dir, fingerprint)
    if kept is None:
        return None
    blocks, slots = kept
    return int(np.count_nonzero(table.find_many(list(blocks)) < 0)) / slots


def _described(fs: FileSystem, one: NamespaceFolder, now_s: float) -> dict[str, Any]:
    """Return the fields of a report that the description has."""
    about, facts = one.document, one.document.get("about")
    if not one.is_readable:
        return {"format_version": one.version}
    parts = about["parts"]
    return {
        "format_version": one.version,
        "label": str(about.get("label", "")),
        "fingerprint": about["fingerprint"],
        "created": str(about.get("created", "")),
        "age_s": _age(str(about.get("created", "")), now_s),
        "block_bytes": about["block_bytes"],
        "parts": parts,
        "parts_missing": sorted(set(range(parts)) - one.parts_given(fs)),
        "fields": dict(one.fields),
        "about": dict(facts) if isinstance(facts, Mapping) else {},
    }


def _on_disk(fs: FileSystem, one: NamespaceFolder) -> dict[str, Any]:
    """Return the fields of a report that the file system has."""
    indexes = [one.folders[0] / name for name in (BLOCKS, PRESENCE, "index")]
    with os_errors(f"looking at {one.name}"):
        segments = len(one.segment_files())
        found: dict[str, Any] = {
            "disk_bytes": one.used_bytes(fs),
            "index_bytes": sum(fs.used_bytes(path) for path in indexes if fs.exists(path)),
            "segments": segments,
        }
    if one.is_readable:
        found["slots"] = segments * one.document["slots_per_segment"]
    return found


def _age(created: str, now_s: float) -> float | None:
    try:
        moment = datetime.fromisoformat(created)
    except ValueError:
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return max(0.0, now_s - moment.timestamp())
