"""State of a tier behind a node, in the scheduler's process: presence table, state, figures.

The presence table is mapped by an executor, because the scheduler's thread opens no file. A lookup
reads it in mapped memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ...errors import KVCascadeError
from ...handlers.node.path_wire import (
    CAN_READ,
    CAN_WRITE,
    NodeJoined,
    NodeNote,
    NodeState,
)
from ...logs import get_logger
from ...tiers.base import BlockHash
from ...tiers.endurance import DayTotals
from ...tiers.nvme.path.path_messages import Epoch, KeysListed, Removed, Stored, TierFigures
from ...tiers.nvme.path.presence_table import PresenceTable
from .node_events import NodeEvents
from .port import TierFacts
from .single_tier import MAX_MARKS, TierFeed

Find = Callable[[bytes], int]
"""Function that returns the slot of a block; -1 if it is absent."""
MapTable = Callable[[str, int], PresenceTable]
"""Function that maps the presence table in a folder, for a number of slots. May raise."""

MAP_AGAIN_AFTER_S = 5.0
"""Pause after a presence table could not be mapped; then it is tried again."""

RESTING = CAN_READ - CAN_WRITE
"""States of a node that a writer has served and does not serve now."""

_log = get_logger(__name__)


def find_nothing(key: bytes) -> int:
    """Return -1: no block is below."""
    return -1


@dataclass(slots=True, eq=False)
class MappedPresence:
    """The presence table of a tier, mapped by an executor."""

    name: str
    """Name of the tier."""
    _map_table: MapTable
    _executor: Executor
    _clock: Callable[[], float]
    """Returns monotonic seconds."""
    table: PresenceTable | None = None
    """The table that was mapped last; None before the first one."""
    wanted: tuple[str, int] | None = None
    """Folder and number of slots of the table to map; None if it is mapped."""
    _mapping: Future[PresenceTable] | None = None
    """Attempt to map it that is under way."""
    _again_s: float = -math.inf
    """Earliest time of the next attempt."""
    _problem: str = ""
    """Last error that was logged since a table was mapped."""

    def follow(self, folder: str, slots: int) -> None:
        """Let `proceed` map the table in a folder, in place of any other."""
        self.wanted, self._mapping, self._again_s = (folder, slots), None, -math.inf

    def proceed(self) -> PresenceTable | None:
        """Go on with mapping. Return the table once it is mapped. An attempt may fail."""
        wanted = self.wanted
        if wanted is not None and self._mapping is None and self._clock() >= self._again_s:
            self._mapping = self._executor.submit(self._map_table, *wanted)
        mapping = self._mapping
        if mapping is None or not mapping.done():
            return None
        self._mapping = None
        try:
            self.table = mapping.result()
        except (KVCascadeError, OSError) as error:
            if str(error) != self._problem:
                self._problem = str(error)
                _log.warning("tier %s: its blocks are not found: %s", self.name, error)
            self._again_s = self._clock() + MAP_AGAIN_AFTER_S
            return None
        self.wanted, self._problem = None, ""
        return self.table


class NodeFeed(TierFeed):
    """Notes of a node, and the presence table of its namespace."""

    def __init__(
        self,
        facts: TierFacts,
        map_table: MapTable,
        executor: Executor,
        clock: Callable[[], float],
        *,
        with_events: bool = True,
    ) -> None:
        """`executor` runs `map_table`; `clock` returns monotonic seconds."""
        super().__init__()
        self.find: Find = find_nothing
        """Search in the presence table."""
        self.state = NodeState.JOINING
        self.can_read = False
        """True if the node can read blocks."""
        self.misconfigured = ""
        """Sentence that says why the path refuses this engine's configuration; empty if it does
        not."""
        self.folder: Path | None = None
        """First directory of the namespace; None while the node has not joined."""
        self.figures: TierFigures | None = None
        self.blocks = 0
        """Number of blocks of the tier: the last figure, and what is known to have changed."""
        self.lost: list[BlockHash] = []
        self.events = NodeEvents(facts.name, facts.medium, is_wanted=with_events)
        self.presence = MappedPresence(facts.name, map_table, executor, clock)
        self._epoch: int | None = None
        self._is_resetting = False
        self._was_rest_logged = False
        """True if the last line of the log about the writer says that writes rest."""
        self._names_changes = True
        """False while a reset that the engine asked for is not answered."""

    @property
    def can_write(self) -> bool:
        """True if the node has a writer that answers, and its blocks are found."""
        return self.state in CAN_WRITE and self.presence.table is not None

    @property
    def is_reporter(self) -> bool:
        """True if this engine reports what concerns all engines of the tier."""
        return self.figures is not None and self.figures.is_reporter

    def day_totals(self) -> DayTotals:
        """Return the bytes that all engines wrote and read in the last day, as far as known."""
        day = None if self.figures is None else self.figures.day
        return DayTotals() if day is None else DayTotals(day[1], day[2], bool(day[0]))

    def begin_reset(self, *, is_own: bool = True) -> None:
        """Find nothing until `end_reset`, and forget what older blocks became.

        `is_own`: the engine asked for the reset, so routers know that nothing is left. Otherwise
        each block is named to them.
        """
        self._is_resetting = True
        self.find = find_nothing
        self.blocks = 0
        self.lost.clear()
        if is_own:
            self._names_changes = False
            self.events.clear()

    def end_reset(self) -> None:
        """Find blocks again; those of older epochs are gone."""
        self._is_resetting, self._names_changes = False, True
        self._look()

    @property
    def epoch(self) -> int | None:
        """Epoch of this engine's blocks; None if it is that of a reset that was not answered."""
        return None if self._is_resetting else self._epoch

    def map_on(self) -> None:
        """Go on with mapping the presence table; called while `presence.wanted` is set."""
        table = self.presence.proceed()
        if table is None:
            return
        if self._epoch is None:
            self._epoch = table.epoch
        self._look()

    def was_reset(self) -> bool:
        """Return True once after another engine reset the namespace."""
        table = self.presence.table
        if table is None or self._is_resetting or table.epoch == self._epoch:
            return False
        self._epoch = table.epoch
        self.blocks = 0
        self.lost.clear()
        return True

    def take(self, note: Any) -> None:
        match note:
            case Removed() if self._names_changes:
                self.events.changed(note.keys, removed=True)
                if not self._is_resetting:
                    self.blocks = max(0, self.blocks - len(note.keys))
                    self.lost += cast(list[BlockHash], note.keys)
            case Stored() if self._names_changes:
                self.events.changed(note.keys, removed=False)
            case KeysListed() if self._names_changes:
                self.events.listed(note)
            case TierFigures():
                self._count(note)
            case Epoch() if self._is_resetting and note.request:
                self._epoch = note.epoch
                self.events.end_list()
            case Epoch():  # of another engine; the presence table has it, too
                self.events.end_list()
                self.marks += note.marks[: MAX_MARKS - len(self.marks)]
            case NodeJoined():
                self._log_writes_go_on(note.state)
                self._enter(note.state)
                self.folder = Path(note.folder)
                self.events.joined()
                self.presence.follow(note.folder, note.slots)
            case NodeNote():
                self._log_note(note)
                self.misconfigured = note.text if note.is_misconfigured else ""
                self._enter(note.state)
            case None:
                self._enter(NodeState.JOINING)
            case _:
                """Changes of before a reset."""

    # -- inside --------------------------------------------------------------------------------

    def _count(self, figures: TierFigures) -> None:
        before = self.figures
        if before is not None and before.is_reporter:
            more = figures.evicted_blocks - before.evicted_blocks
            self.counters.evicted_blocks += max(0, more)
        self.figures = figures
        if not self._is_resetting:
            self.blocks = figures.blocks

    def _log_note(self, note: NodeNote) -> None:
        if not note.text:
            return
        _log.warning("tier %s: %s", self.presence.name, note.text)
        if note.state in RESTING:
            self._was_rest_logged = True
        elif note.state in CAN_WRITE:  # the writer answers again
            self._was_rest_logged = False

    def _log_writes_go_on(self, state: NodeState) -> None:
        """Log the writer that serves the node, once after a line that says that writes rest."""
        if not self._was_rest_logged:
            return
        self._was_rest_logged = False
        writer = "this engine" if state is NodeState.LEADING else "another engine"
        # A warning, because vLLM shows no other lines of this logger by default.
        text = "tier %s: writes go on; %s is the writer of the path"
        _log.warning(text, self.presence.name, writer)

    def _enter(self, state: NodeState) -> None:
        self.state = state
        self._look()

    def _look(self) -> None:
        """Set `find` and `can_read` by the state."""
        table = self.presence.table
        self.can_read = self.state in CAN_READ
        is_found = self.can_read and not self._is_resetting
        self.find = table.find if is_found and table is not None else find_nothing
