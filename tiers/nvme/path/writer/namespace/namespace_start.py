"""Opening of one namespace by the writer of its path.

The block table says which blocks there are, and the presence table which slots they use. Blocks in
segments that no longer exist are removed. No segment is read but its header.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from ......errors import KVCascadeError, os_errors
from ......logs import get_logger
from ....disk.filesystem import FileSystem
from ....index.index_file import TornIndexError
from ....namespace import INDEX_FILE, NamespaceKey
from ...block_table import MAX_COMMIT_BLOCKS, BlockTable, Changes, block_table_bytes
from ...path_messages import Committed
from ...presence_file import OpenPresence, is_of_this_boot, open_presence
from .namespace_home import BLOCKS, NamespaceHome
from .namespace_writer import NamespaceWriter
from .prompt_log import PromptLog
from .recency import Recency
from .slot_space import SlotSpace

_log = get_logger(__name__)


class OpenTable(Protocol):
    """Opens or creates a block table: `open_block_table`, or a twin in memory."""

    def __call__(
        self,
        folder: Path,
        map_bytes: int,
        identity: bytes,
        *,
        is_durable: bool,
        is_same_boot: bool,
        wall_clock: Callable[[], float],
    ) -> BlockTable: ...


@dataclass(frozen=True, slots=True)
class StartMeans:
    """Resources of the process that the opening of a namespace uses."""

    fs: FileSystem
    wall_clock: Callable[[], float]
    """Seconds since 1970."""
    open_table: OpenTable
    boot: bytes
    """`presence_file.boot_id()`."""

    def table_of(self, home: NamespaceHome, *, is_durable: bool) -> BlockTable:
        """Open the block table of a namespace. Raises a `KVCascadeError`.

        Without `is_durable`, pages of a table that another boot of the machine had open may have
        missed the disk. A table that is damaged then begins empty.
        """
        layout = home.layout
        digest = NamespaceKey("", home.description["fields"]).digest
        identity = digest + b"%d/%d" % (layout.block_bytes, layout.slots)
        with os_errors(f"opening {home.folders[0]}"):
            self.fs.make_dir(home.folders[0] / BLOCKS)
            self.fs.sync_dir(home.folders[0])
        opened = partial(
            self.open_table,
            home.folders[0] / BLOCKS,
            block_table_bytes(home.slots),
            identity,
            is_durable=is_durable,
            is_same_boot=is_of_this_boot(self.fs, home.folders[0], self.boot),
            wall_clock=self.wall_clock,
        )
        try:
            return opened()
        except TornIndexError:
            if is_durable or not self.boot:
                raise
        _log.warning(
            "%s begins empty: a loss of power damaged its index; durability power prevents that",
            home.folders[0],
        )
        with os_errors(f"removing the index of {home.folders[0]}"):
            self.fs.unlink(home.folders[0] / BLOCKS / INDEX_FILE)
        return opened()


def open_namespace_writer(
    means: StartMeans, home: NamespaceHome, *, is_durable: bool
) -> NamespaceWriter:
    """Open a namespace for changes. Raises a `KVCascadeError`; `home` is closed then."""
    with ExitStack() as if_failed:
        if_failed.callback(home.close)
        table = means.table_of(home, is_durable=is_durable)
        if_failed.callback(table.abandon)
        with os_errors(f"opening {home.folders[0]}"):
            home.measure_index(means.fs)
        presence = open_presence(means.fs, home.folders[0], home.slots, table, means.boot)
        if_failed.callback(presence.file.close)
        used = presence.used.copy()
        there, left_out = _usable_segments(home)
        if there and not table.commit_number:
            _log.warning(
                "%s: the index names no block, so %d segments count as empty",
                home.folders[0],
                len(there),
            )
        dropped = _drop_missing(home, table, presence, used)
        space = SlotSpace(home.layout.slots, home.slots, len(home.folders))
        space.dropped_at_opening = dropped
        space.is_used[:] = used
        space.used = int(np.count_nonzero(used))
        for number in there:
            space.add_segment(number)
        space.left_out.update(left_out)
        recency = Recency(means.fs, home.state_folder, home.policy, space.is_used, means.wall_clock)
        if_failed.pop_all()
    _log.info("%s: %d blocks, presence table %s", home.name, space.used, presence.origin.value)
    prompts = PromptLog(means.fs, home.state_folder, home.slots, means.wall_clock)
    return NamespaceWriter(home, table, presence, space, recency, prompts)


def _usable_segments(home: NamespaceHome) -> tuple[list[int], list[int]]:
    """Return the numbers of the segments whose files can be opened, and those of the others.

    Damaged ones are repaired.
    """
    usable: list[int] = []
    left_out: list[int] = []
    for number in home.segments.found():
        try:
            home.segments.mend(number)
            usable.append(number)
        except KVCascadeError as error:  # its blocks stay, and it is tried again
            _log.warning("a segment is left out for now: %s", error)
            left_out.append(number)
    return usable, left_out


def _drop_missing(
    home: NamespaceHome, table: BlockTable, presence: OpenPresence, used: np.ndarray
) -> int:
    """Remove the blocks in segments that do not exist, and their marks in `used`.

    Return the number of these blocks; 0 if they stay for now.
    """
    is_there = np.zeros(home.slots // home.layout.slots, dtype=np.bool_)
    is_there[home.segments.found()] = True
    lost = np.flatnonzero(used & ~np.repeat(is_there, home.layout.slots))
    missing = len(lost)
    if table.count() > np.count_nonzero(used):
        lost = np.append(lost, _slots_beyond(table, home.slots)).astype(np.int64)
    for start in range(0, len(lost), MAX_COMMIT_BLOCKS):
        slots = lost[start : start + MAX_COMMIT_BLOCKS]
        applied = table.apply(Changes(table.epoch, cleared=slots.tolist()))
        if applied.outcome is not Committed.OK:
            _log.warning("%s: blocks of missing segments stay for now", home.name)
            return 0
        if applied.journal is not None:
            presence.table.apply(applied.journal)
        used[slots[slots < home.slots]] = False
    if len(lost):
        _log.warning("%s: removed %d blocks whose segments are gone", home.name, len(lost))
    return missing


def _slots_beyond(table: BlockTable, slots: int) -> list[int]:
    """Return the slots that the table names though the namespace has become smaller."""
    return [slot for batch in table.scan() for slot in batch.slots.tolist() if slot >= slots]
