"""`kvcascade gc`: remove blocks by age, hash or size, or whole namespaces.

The writer of the path removes the blocks, so it works beside engines. A segment file that loses its
last block is deleted, which frees disk space. To reach a size, whole segments are removed, empty
ones first, then the coldest. A namespace that the writer does not know is removed by this process:
one of another version, or one that is damaged.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.text import Text

from ....config.sizes import human
from ....errors import ConfigError, InUseError, KVCascadeError, TierIOError
from ....tiers.nvme.disk.filesystem import FileSystem
from ....tiers.nvme.namespace import remove_namespace
from ....tiers.nvme.segments.chains import head_of
from .. import show
from ..block_scan import NamedBlock
from ..inspect.namespace_report import slots_in_use
from ..path_blocks import OpenPath
from ..path_folders import NamespaceFolder
from ..path_session import AnswerError
from ..prompt_chains import Successors

MAX_NAMES_IN_USE = 3
"""Most engines that are named when a namespace cannot be removed."""
NOT_NOTED = (
    "{:,} other blocks may come after {}, because no engine has recorded their order: select them "
    "by --hash, or remove the namespace"
)
UNREACHABLE = (
    "--max-size is not reached, so nothing is removed: {} would be left in indexes and in "
    "namespaces that cannot be read; give more, or remove namespaces with --remove-namespace"
)
WRITTEN_TO = "engines were writing to {} of the segments: call it again"


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
    """Maximum size of all chosen namespaces together on disk."""
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
    """True if requested blocks may be left, or more bytes than asked for; `skipped` says why."""


@dataclass(slots=True)
class _Plan:
    """Blocks and files to remove from one namespace."""

    folder: NamespaceFolder
    report: GcReport
    sizes: dict[int, int] = field(default_factory=dict)
    """Bytes on disk of each segment file."""
    drops: list[NamedBlock] = field(default_factory=list)
    emptied: list[int] = field(default_factory=list)
    """Segments that lose all their blocks by `drops`."""
    chosen: list[int] = field(default_factory=list)
    """Segments to delete with all their blocks."""
    last_use: int = 0
    """Latest use of any block to remove, in seconds since 1970; 0 if unknown."""
    has_prompt: bool = False
    """True if this namespace has the block of `Wish.prompt`."""

    def add(self, number: int, blocks: int, last_use: int) -> None:
        """Count a segment that is deleted."""
        self.count_taken([number], blocks)
        self.last_use = max(self.last_use, last_use)

    def count_taken(self, numbers: Sequence[int], blocks: int) -> None:
        """Count segments that the writer deletes with their blocks."""
        self.report.segments_removed += len(numbers)
        self.report.bytes_freed += sum(self.sizes[number] for number in numbers)
        self.report.blocks_removed = (self.report.blocks_removed or 0) + blocks


@dataclass(frozen=True, slots=True)
class _SegmentUse:
    """A segment as a candidate for removal, with the blocks that would stay in it."""

    plan: _Plan
    number: int
    blocks: int
    warmth: float
    """Mean time of the last use of these blocks; 0 if there are none."""
    last_use: int
    """Latest use of these blocks; 0 if unknown."""


class Collector:
    """Plans and carries out one call of `kvcascade gc`. One thread."""

    def __init__(
        self,
        fs: FileSystem,
        opened: OpenPath | None,
        wish: Wish,
        *,
        problem: str = "",
    ) -> None:
        """`opened` is None, with the `problem`, if only whole namespaces can be removed."""
        self._fs = fs
        self._opened = opened
        self._wish = wish
        self._problem = problem
        self._now_s = time.time()
        self.has_fault = False
        """True once the files of a whole namespace could not be removed, though it is free."""

    def collect(self, folders: Sequence[NamespaceFolder], is_dry_run: bool) -> list[GcReport]:
        """Remove blocks and files, or only report them; return a report for each namespace.

        Raises `ConfigError` before anything is removed. Either no namespace has the block of the
        prompt, or not all paths of a namespace to remove were given. Raises `InUseError` if the
        writer does not answer.
        """
        plans = [_Plan(folder, GcReport(folder.name)) for folder in folders]
        candidates = [use for plan in plans for use in self._look(plan)]
        wish = self._wish
        if wish.prompt and not any(plan.has_prompt or plan.report.is_incomplete for plan in plans):
            raise ConfigError(f"--prefix: there is no block {wish.prompt}")
        if wish.max_bytes is not None:
            freed = sum(plan.report.bytes_freed for plan in plans)
            excess = self._total_bytes(plans) - freed - wish.max_bytes
            left = _choose_segments(candidates, excess)
            if left > 0:
                _plan_nothing(plans, wish.max_bytes + left)
        for plan in plans:
            if plan.last_use:
                plan.report.hottest_idle_s = max(0.0, self._now_s - plan.last_use)
            if not is_dry_run:
                self._carry_out(plan)
        return [plan.report for plan in plans]

    # -- planning ------------------------------------------------------------------------------

    def _total_bytes(self, plans: Sequence[_Plan]) -> int:
        """Return the bytes on disk of all namespaces; one of unknown size makes its report
        incomplete."""
        total = 0
        for plan in plans:
            try:
                total += plan.folder.used_bytes(self._fs)
            except KVCascadeError as error:
                plan.report.skipped, plan.report.is_incomplete = str(error), True
        return total

    def _look(self, plan: _Plan) -> list[_SegmentUse]:
        """Select blocks, and return segments as candidates."""
        report, wish = plan.report, self._wish
        try:
            if wish.whole:
                self._look_whole(plan)
                return []
            if not plan.folder.is_readable:
                report.skipped = plan.folder.reason
                report.is_incomplete = wish.is_by_block and bool(plan.folder.problem)
                return []
            return self._look_inside(plan)
        except (ConfigError, InUseError):  # the call is wrong, or nothing can be done at all
            raise
        except KVCascadeError as error:
            if wish.whole:
                raise
            report.skipped, report.is_incomplete = str(error), wish.is_by_block
            return []

    def _look_whole(self, plan: _Plan) -> None:
        report, folder = plan.report, plan.folder
        facts = self._facts(folder)
        if facts is not None:
            report.blocks_before = facts["blocks"]
            names = facts["engines"]
            if names:
                more = " and others" if len(names) > MAX_NAMES_IN_USE else ""
                shown = ", ".join(names[:MAX_NAMES_IN_USE])
                report.skipped = f"in use by {shown}{more}: stop it first"
                return
            slots = slots_in_use(self._fs, folder.folders[0])
            plan.last_use = int(slots.use.last_use[slots.is_used].max(initial=0))
        _check_parts(self._fs, folder)
        report.blocks_removed = report.blocks_before
        report.segments_removed = len(folder.segment_files())
        report.bytes_freed = folder.used_bytes(self._fs)
        report.was_removed = True

    def _facts(self, folder: NamespaceFolder) -> dict[str, Any] | None:
        """Return what the writer says of a namespace; None if it does not know it."""
        if self._opened is None or folder.name not in self._opened.names:
            return None
        return self._opened.facts_or_problem(folder.name)[0]  # it can be removed all the same

    def _look_inside(self, plan: _Plan) -> list[_SegmentUse]:
        assert self._opened is not None, "only whole namespaces are removed without a writer"
        report, folder = plan.report, plan.folder
        report.blocks_before = self._opened.facts(folder.name)["blocks"]
        plan.sizes = folder.segment_sizes(self._fs)
        plan.drops = list(self._leaving(plan)) if self._wish.is_by_block else []
        report.blocks_removed = len(plan.drops)
        plan.last_use = max((each.used_s for each in plan.drops), default=0)
        return self._segment_uses(plan)

    def _leaving(self, plan: _Plan) -> Iterator[NamedBlock]:
        """Yield the blocks that are removed individually."""
        assert self._opened is not None
        wish = self._wish
        after: Successors | None = None
        if wish.prompt:
            after = self._successors(plan)
            if after is None:
                return
        before_s = None if wish.older_than_s is None else self._now_s - wish.older_than_s
        for block in self._opened.blocks(plan.folder.name, wish.hash_start):
            is_old = before_s is None or 0 < block.used_s < before_s
            if is_old and (after is None or after.has(head_of(block.key))):
                yield block
        unknown = 0 if after is None else after.count_unknown()
        if unknown:
            plan.report.skipped = NOT_NOTED.format(unknown, wish.prompt)
            plan.report.is_incomplete = True

    def _successors(self, plan: _Plan) -> Successors | None:
        """Return the blocks of the prompt to remove; None if this namespace lacks the first."""
        assert self._opened is not None
        name, prompt = plan.folder.name, self._wish.prompt
        plan.has_prompt = self._opened.has_block(name, prompt)
        if not plan.has_prompt:
            return None
        first = head_of(self._opened.only_block(name, prompt, "--prefix").key)
        return Successors(self._opened.state(name).chains(), first)

    def _segment_uses(self, plan: _Plan) -> list[_SegmentUse]:
        """Take the segments that lose all their blocks; return the others with their blocks."""
        folder = plan.folder
        slots = slots_in_use(self._fs, folder.folders[0])
        size = folder.layout.slots
        stays = slots.is_used.copy()
        leaving = np.array([each.slot for each in plan.drops], dtype=np.int64)
        leaving = leaving[leaving < len(stays)]
        stays[leaving] = False
        touched = set((leaving // size).tolist())
        opened_at = int(self._fs.modified_at(folder.folders[0]))
        found: list[_SegmentUse] = []
        for number in plan.sizes:
            part = slice(number * size, (number + 1) * size)
            times = slots.use.last_use[part][stays[part]]
            if not len(times) and number in touched:
                plan.emptied.append(number)
                plan.add(number, 0, 0)
                continue
            found.append(_segment_use(plan, number, times, opened_at))
        return found

    # -- doing ---------------------------------------------------------------------------------

    def _carry_out(self, plan: _Plan) -> None:
        """Do what is planned. The report has what was done if a fault ends it."""
        report = plan.report
        planned = report.blocks_removed, report.segments_removed, report.bytes_freed
        report.blocks_removed = report.segments_removed = report.bytes_freed = 0
        try:
            if report.was_removed:
                self._remove(plan)
                report.blocks_removed, report.segments_removed, report.bytes_freed = planned
            elif plan.drops or plan.chosen:
                self._remove_blocks(plan)
        except KVCascadeError as error:  # continue with the other namespaces
            report.skipped, report.is_incomplete = str(error), not report.was_removed
            if report.was_removed:
                self.has_fault |= isinstance(error, TierIOError)
            report.was_removed, report.hottest_idle_s = False, None

    def _remove_blocks(self, plan: _Plan) -> None:
        """Remove blocks and segments."""
        assert self._opened is not None
        report, name = plan.report, plan.folder.name
        for dropped in self._opened.drop_in_parts(name, plan.drops):
            report.blocks_removed = (report.blocks_removed or 0) + dropped
        for taken, _ in self._opened.take_in_parts(name, plan.emptied, is_if_empty=True):
            plan.count_taken(taken, 0)
        before = report.segments_removed
        for taken, blocks in self._opened.take_in_parts(name, plan.chosen):
            plan.count_taken(taken, blocks)
        left = len(plan.chosen) - (report.segments_removed - before)
        if left:
            report.skipped, report.is_incomplete = WRITTEN_TO.format(left), True

    def _remove(self, plan: _Plan) -> None:
        """Remove a namespace, by its writer if that knows it."""
        folder = plan.folder
        if self._opened is not None and folder.name in self._opened.names:
            if not self._opened.session.is_writer and folder.is_readable:
                # So that nobody waits for the writer while it deletes many files.
                plan.sizes = folder.segment_sizes(self._fs)
                numbers = list(plan.sizes)
                with suppress(AnswerError):  # one that cannot be opened is removed as it is
                    for part in self._opened.take_in_parts(folder.name, numbers, is_if_unused=True):
                        plan.count_taken(*part)
            if not self._opened.remove(folder.name):
                raise TierIOError(
                    errno.EIO, "its files could not be deleted; see the log of the writer"
                )
            return
        folders = [each.resolve() for each in folder.folders]
        if not all([remove_namespace(self._fs, each) for each in folders]):
            reason = f" ({self._problem})" if self._problem else ""
            raise InUseError(f"in use by an engine: stop it first{reason}")


def _segment_use(
    plan: _Plan, number: int, times: npt.NDArray[np.int64], opened_at: int
) -> _SegmentUse:
    """Return a candidate; `opened_at` replaces a last use that is unknown."""
    warmth = float(np.where(times, times, opened_at).mean()) if len(times) else 0.0
    return _SegmentUse(plan, number, len(times), warmth, int(times.max(initial=0)))


def _choose_segments(uses: Sequence[_SegmentUse], excess_bytes: int) -> int:
    """Choose the coldest segments until the excess is freed; return the rest of the excess."""
    for use in sorted(uses, key=lambda use: use.warmth):
        if excess_bytes <= 0:
            break
        use.plan.chosen.append(use.number)
        use.plan.add(use.number, use.blocks, use.last_use)
        excess_bytes -= use.plan.sizes[use.number]
    return excess_bytes


def _plan_nothing(plans: Sequence[_Plan], left_bytes: int) -> None:
    """Cancel all plans, because they would not reach the size that was asked for."""
    for plan in plans:
        report = plan.report
        plan.drops, plan.emptied, plan.chosen, plan.last_use = [], [], [], 0
        report.blocks_removed = report.segments_removed = report.bytes_freed = 0
        reasons = [report.skipped, UNREACHABLE.format(human(left_bytes))]
        report.skipped, report.is_incomplete = "; ".join(filter(None, reasons)), True


def _check_parts(fs: FileSystem, folder: NamespaceFolder) -> None:
    """Check that all parts were given; the other parts would be useless without one."""
    parts = folder.document.get("parts")
    if type(parts) is int and len(folder.folders) < parts and len(folder.parts_given(fs)) < parts:
        raise ConfigError(
            f"--remove-namespace: {folder.name} is spread over {parts} paths; give the others "
            f"with --also, or remove {folder.folders[0]} yourself if they are gone"
        )


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
