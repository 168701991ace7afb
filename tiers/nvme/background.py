"""Work of an NVMe tier on an I/O thread: commits, repairs and the proof of slot records."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from concurrent.futures import Executor
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from ...errors import KVCascadeError
from ...logs import get_logger
from .index.index_port import Removal
from .index_directory import IndexDirectory
from .segments.segment_files import SegmentSet
from .segments.store import BlockStore
from .writer.failing_devices import OnEnd

if TYPE_CHECKING:  # the block store runs without LMDB
    from .index.block_index import BlockIndex

_log = get_logger(__name__)


class Background(ABC):
    """Work that the backend hands to an I/O thread; no method waits."""

    @abstractmethod
    def commit(self, removals: Sequence[Removal], epoch: int) -> None:
        """Queue an index commit."""

    @abstractmethod
    def repair_records(self, slots: Set[int], on_end: OnEnd) -> None:
        """Queue rewriting the records of these slots from the index."""

    @abstractmethod
    def take_orphans(self) -> list[int]:
        """Return slots for which `repair_records` found no entry."""


class ExecutorBackground(Background):
    """Hands work to the executor; removals are kept if it takes no more."""

    def __init__(self, store: BlockStore, executor: Executor) -> None:
        self._store = store
        self._executor = executor

    def commit(self, removals: Sequence[Removal], epoch: int) -> None:
        try:
            self._executor.submit(self._store.remove, removals, epoch)
        except RuntimeError:  # shutting down: the commit at close includes them
            self._store.defer_removals(removals, epoch)

    def repair_records(self, slots: Set[int], on_end: OnEnd) -> None:
        with suppress(RuntimeError):  # shutting down
            self._executor.submit(self._repair_records, slots, on_end)

    def _repair_records(self, slots: Set[int], on_end: OnEnd) -> None:
        on_end(self._store.repair_records(slots))

    def take_orphans(self) -> list[int]:
        return self._store.take_orphans()


def prove_records(
    index: BlockIndex,
    segments: SegmentSet,
    store: BlockStore,
    directory: IndexDirectory,
    proven_from: int,
) -> None:
    """Compare slot records of open segments with older entries; rewrite those that differ.

    Runs on an I/O thread after a boot of the machine. Blocks stored meanwhile have both right.
    """
    size = segments.layout.slots
    said = np.zeros(index.capacity, dtype=np.uint64)
    is_open = np.zeros(index.capacity, dtype=np.bool_)
    for number in segments.numbers:
        records = segments.generations(number)
        if records is not None:
            said[number * size : (number + 1) * size] = records
            is_open[number * size : (number + 1) * size] = True
    stale: set[int] = set()
    try:
        for slots, generations in index.slots_and_generations():
            mine = np.flatnonzero((slots < len(said)) & (generations < proven_from))
            slots, generations = slots[mine], generations[mine]
            stale.update(slots[is_open[slots] & (said[slots] != generations)].tolist())
        has_all = segments.numbers == segments.found()
    except (OSError, KVCascadeError) as error:
        _log.warning("slot records could not be compared with the index: %s", error)
        return
    if stale:
        store.repair_records(stale)
    directory.trust_records()
    if has_all:
        index.note_proven()
