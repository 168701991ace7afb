"""`kvcascade remote gc`: remove the oldest blocks of a remote tier, and those of old generations.

The objects are listed twice: to find the age from which on blocks leave, and to remove them. So
memory does not grow with the number of objects. Ages are those of the server: of the last write, or
of the last use on a Valkey or Redis server. A block of an unknown age leaves only with its
generation.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ....config.remote import OBJECT_STORE, VALKEY
from ....tiers.remote.base import RemoteEntry, RemoteOutcome
from ..progress import Advance
from .examine_object import parse_name
from .open_remote import CALL_LIMIT_S, RemoteServer
from .remote_contents import Generations, GenerationState

REMOVED_AT_A_TIME = 256
STAGED_MAX_S = 3600.0
"""Age of a file at which its writer is dead."""
AGE_STEP_S = 60
"""Blocks of one minute leave in the order in which they are listed."""


@dataclass(frozen=True, slots=True)
class RemoteWish:
    """Criteria for removal; a block is removed if it meets any of them."""

    older_than_s: float | None = None
    """Minimum seconds since the server last saw it touched."""
    max_bytes: int | None = None
    """Maximum size of all blocks together."""


@dataclass(slots=True)
class CollectedNamespace:
    """Blocks that were, or would be, removed from one namespace."""

    namespace: str
    blocks_before: int = 0
    bytes_before: int = 0
    blocks_removed: int = 0
    """Blocks that left, with those of old generations."""
    old_blocks_removed: int = 0
    """Blocks of old generations."""
    bytes_freed: int = 0


@dataclass(slots=True)
class RemoteCollected:
    """Result of one call of `kvcascade remote gc`."""

    url: str
    is_dry_run: bool
    namespaces: list[CollectedNamespace] = field(default_factory=list)
    unknown_ages: int = 0
    """Number of blocks whose age the server does not know; they leave only with a generation."""
    staged_removed: int = 0
    """Number of files in a folder that were begun by writers that died."""
    staged_bytes: int = 0
    failed: int = 0
    """Number of blocks that the server did not remove."""
    note: str = ""
    """Advice on the usual way of this kind of server."""


@dataclass(slots=True)
class _Plan:
    """Choice of the blocks that leave, by the first listing."""

    reports: dict[str, CollectedNamespace] = field(default_factory=dict)
    staying_bytes: int = 0
    """Bytes of blocks that are neither of an old generation nor too old."""
    by_minute: Counter[int] = field(default_factory=Counter)
    """Bytes of these blocks by the minute of their last use."""
    last_minute: int = -1
    """Blocks of earlier minutes leave, and of this one while `left_bytes` is positive."""
    left_bytes: int = 0

    def choose(self, max_bytes: int) -> None:
        """Find the minute at which the oldest blocks begin to fit into so many bytes."""
        excess = self.staying_bytes - max_bytes
        for minute in sorted(self.by_minute):
            if excess <= 0:
                return
            self.last_minute, self.left_bytes = minute, excess
            excess -= self.by_minute[minute]

    def takes(self, entry: RemoteEntry) -> bool:
        """Return True if a block leaves for the size alone, and count it."""
        if entry.touched_s is None or (minute := _minute(entry.touched_s)) > self.last_minute:
            return False
        if minute < self.last_minute:
            return True
        if self.left_bytes <= 0:
            return False
        self.left_bytes -= entry.size_bytes
        return True


def _minute(touched_s: float) -> int:
    return max(0, int(touched_s // AGE_STEP_S))


NOTES = {
    VALKEY: "the usual way is the server's own: maxmemory with maxmemory-policy allkeys-lru, or "
    "ttl_s",
    OBJECT_STORE: "a lifecycle rule of the bucket can remove old objects without this command",
}
FOLDER_NOTE = "nothing else removes old blocks from a folder; run this command regularly"


def collect_remote(
    tier: RemoteServer,
    namespace: str,
    wish: RemoteWish,
    advance: Advance,
    *,
    is_dry_run: bool,
    clock: Callable[[], float] = time.time,
) -> RemoteCollected:
    """Remove blocks of namespaces that begin with these digits, or only report them.

    `advance` takes a number of objects, `clock` returns seconds since 1970. Raises `CommandError`.
    """
    is_folder = tier.options.scheme == "file"
    note = FOLDER_NOTE if is_folder else NOTES.get(tier.options.engine, "")
    report = RemoteCollected(tier.options.url, is_dry_run, note=note)
    work = _Collector(tier, namespace, wish, report, clock())
    work.look(advance)
    work.carry_out(advance)
    swept = tier.engine.sweep(namespace, STAGED_MAX_S, work.is_old, is_dry_run=is_dry_run)
    report.staged_removed, report.staged_bytes = len(swept), sum(swept)
    return report


class _Collector:
    """The two passes of one call."""

    def __init__(
        self,
        tier: RemoteServer,
        namespace: str,
        wish: RemoteWish,
        report: RemoteCollected,
        now_s: float,
    ) -> None:
        self._tier = tier
        self._namespace = namespace
        self._wish = wish
        self._report = report
        self._now_s = now_s
        self._generations = Generations(tier)
        self._plan = _Plan()

    def look(self, advance: Advance) -> None:
        """Find out what leaves."""
        plan = self._plan
        for entry, report, is_old in self._blocks():
            advance(1)
            report.blocks_before += 1
            report.bytes_before += entry.size_bytes
            self._report.unknown_ages += entry.touched_s is None
            if is_old or self._is_aged(entry):
                continue
            plan.staying_bytes += entry.size_bytes
            if entry.touched_s is not None:
                plan.by_minute[_minute(entry.touched_s)] += entry.size_bytes
        if self._wish.max_bytes is not None:
            plan.choose(self._wish.max_bytes)
        self._report.namespaces = [plan.reports[name] for name in sorted(plan.reports)]

    def carry_out(self, advance: Advance) -> None:
        """Remove what leaves, and count it."""
        leaving: list[tuple[RemoteEntry, CollectedNamespace, bool]] = []
        for block in self._blocks():
            advance(1)
            entry, _, is_old = block
            if is_old or self._is_aged(entry) or self._plan.takes(entry):
                leaving.append(block)
            if len(leaving) == REMOVED_AT_A_TIME:
                self._remove(leaving)
                leaving = []
        if leaving:
            self._remove(leaving)

    def is_old(self, generation: str) -> bool:
        """Return True if no engine finds the blocks whose names begin with these two parts."""
        name = parse_name(f"{generation}/00/00")
        if name is None:
            return False
        return self._generations.state(name.namespace, name.generation) is GenerationState.OLD

    def _blocks(self) -> Iterator[tuple[RemoteEntry, CollectedNamespace, bool]]:
        """Yield all blocks, with the report of each, and whether its generation is old."""
        for entry in self._tier.entries(self._namespace):
            name = parse_name(entry.name)
            if name is None:
                continue
            reports = self._plan.reports
            if name.namespace not in reports:
                reports[name.namespace] = CollectedNamespace(name.namespace)
            state = self._generations.state(name.namespace, name.generation)
            yield entry, reports[name.namespace], state is GenerationState.OLD

    def _is_aged(self, entry: RemoteEntry) -> bool:
        limit_s = self._wish.older_than_s
        if limit_s is None or entry.touched_s is None:
            return False
        return max(0.0, self._now_s - entry.touched_s) >= limit_s

    def _remove(self, leaving: list[tuple[RemoteEntry, CollectedNamespace, bool]]) -> None:
        outcomes = [RemoteOutcome.OK] * len(leaving)
        if not self._report.is_dry_run:
            outcomes = self._tier.engine.remove([e.name for e, *_ in leaving], CALL_LIMIT_S)
            self._tier.note(outcomes)
        for (entry, report, is_old), outcome in zip(leaving, outcomes, strict=True):
            if outcome is not RemoteOutcome.OK:
                self._report.failed += 1
                continue
            report.blocks_removed += 1
            report.old_blocks_removed += is_old
            report.bytes_freed += entry.size_bytes
