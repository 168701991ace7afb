"""Opening and closing an NVMe tier: namespace, index, segments, store, backend and directory.

Opening after a clean close reads no index entry; after anything else it reads every entry once.
Whatever fails while opening raises one of our errors and leaves the data as it was.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...errors import CorruptionError, KVCascadeError
from ...logs import get_logger
from .arrays import MappedArrays
from .backend import Background, NvmeBackend, StatusTable, free_pools
from .capacity import SEGMENT_BYTES, Plan, SpaceBudget, plan_capacity
from .directory import IndexDirectory
from .filesystem import FileSystem, RealFileSystem
from .format import SegmentLayout
from .growth import SegmentGrowth
from .index import GENERATIONS_PER_SESSION, BlockIndex, IndexIdentity, Removal, open_index
from .index_file import DATA_NAME, damaged
from .namespace import (
    Namespace,
    NamespaceKey,
    describe_namespace,
    open_namespace,
    stored_slots_per_segment,
)
from .segments import SegmentSet
from .store import BlockStore, Durability

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class NvmeTierConfig:
    """What a tier is opened with; sizes in bytes."""

    paths: tuple[Path, ...]
    """One per device; they exist already."""
    capacity_bytes: int
    """Over all paths, and over all namespaces in them."""
    block_bytes: int
    """One slot; a multiple of 4096."""
    key: NamespaceKey
    durability: Durability = Durability.PROCESS
    min_free_bytes: int = 0
    """Disk space that is never used."""
    slots_per_segment: int | None = None
    """For a new namespace; by default about 1 GiB, less for small tiers."""
    may_remove_namespaces: bool = True
    """Whether namespaces that nobody owns leave if there is no room beside them."""


@dataclass(frozen=True, slots=True)
class StartReport:
    """What was found, for one line in the log."""

    folder: Path
    blocks: int
    block_bytes: int
    capacity_blocks: int
    created: datetime
    was_clean: bool
    repaired_segments: int
    bytes_written: int
    """Over the life of the namespace."""


@dataclass(slots=True)
class NvmeTier:
    """An open tier. Give `directory` and `arrays` to a policy, `store` to the handlers."""

    backend: NvmeBackend
    directory: IndexDirectory
    store: BlockStore
    arrays: MappedArrays
    report: StartReport
    index: BlockIndex
    segments: SegmentSet
    growth: SegmentGrowth
    namespace: Namespace
    table: StatusTable
    epoch_arrays: MappedArrays
    is_closed: bool = False

    @property
    def recovered(self) -> bool:
        """True if the policy's arrays may not match the index: reconcile with `live_slots`.

        Ask after the policy was made: an array that was not there also counts.
        """
        return not self.report.was_clean or self.arrays.was_replaced

    def live_slots(self) -> npt.NDArray[np.int64]:
        """Slots that hold a block or are on their way to, ascending."""
        return np.flatnonzero(self.table.is_used).astype(np.int64)

    def close(self, clean: bool = True) -> None:
        """Commit what waits, save the free extents, let go of everything; idempotent.

        Transfers and the executor must have ended. `clean=False` only lets go.
        """
        if self.is_closed:
            return
        self.is_closed = True
        try:
            if clean:
                self._save()
            else:
                self.index.abandon()
        finally:
            self.backend.close()
            self.segments.close()
            self.arrays.close()
            self.epoch_arrays.close()
            self.namespace.close()

    def _save(self) -> None:
        is_settled = self.store.remove(self.directory.take_removals(), self.directory.epoch)
        free = self.backend.free_extents()
        is_exact = int(free[:, 1].sum()) + self.index.count() == self.backend.available
        try:
            self.arrays.sync()
            self.epoch_arrays.sync()
        except KVCascadeError as error:
            _log.warning("recency may be lost: %s", error)
        self.index.close(free if is_settled and is_exact else None, self.store.take_read_bytes())


def open_nvme_tier(
    config: NvmeTierConfig,
    executor: Executor,
    fs: FileSystem | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> NvmeTier:
    """Open or create a tier; `executor` runs index commits and segment creation.

    Raises `ConfigError`, `InUseError`, `CorruptionError`, `FormatError`, `NoSpaceError` or
    `TierIOError`; nothing is held afterwards.
    """
    fs = RealFileSystem() if fs is None else fs
    slots = stored_slots_per_segment(fs, config.paths[0], config.key) or config.slots_per_segment
    plan = plan_capacity(config.capacity_bytes, config.block_bytes, len(config.paths), slots)
    namespace = open_namespace(fs, config.paths, config.key)
    opening = _Opening(config, plan, fs, namespace, executor, clock)
    try:
        return opening.run()
    except BaseException:
        opening.undo()
        raise


class _Opening:
    """The steps of `open_nvme_tier`, and what to let go of if one fails."""

    def __init__(
        self,
        config: NvmeTierConfig,
        plan: Plan,
        fs: FileSystem,
        namespace: Namespace,
        executor: Executor,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._plan = plan
        self._fs = fs
        self._namespace = namespace
        self._executor = executor
        self._clock = clock
        layout = SegmentLayout(config.block_bytes, plan.slots_per_segment, config.key.fingerprint)
        self._segments = SegmentSet(fs, namespace.segment_folders, layout)
        self._epoch_arrays = MappedArrays(fs, namespace.state_folder, session=None)
        self._index: BlockIndex | None = None

    def run(self) -> NvmeTier:
        """All steps in order."""
        epoch_word = self._epoch_arrays("epoch", 1, np.uint64)
        index, session = self._open_index(int(epoch_word[0]))
        epoch_word[0] = index.epoch
        self._open_segments(index)
        table = StatusTable(self._plan.slots)
        self._find_used(index, table)
        directory = IndexDirectory(index, self._segments, table.at, epoch_word)
        store = BlockStore(
            index, self._segments, self._config.durability, session * GENERATIONS_PER_SESSION
        )
        growth = self._make_growth()
        backend = NvmeBackend(
            self._config.block_bytes,
            table,
            directory,
            free_pools(table.is_used, self._exists(), self._plan.slots_per_segment, self._paths),
            growth,
            self._plan.slots_per_segment,
            _ExecutorBackground(store, self._executor),
        )
        slots, block_bytes = self._plan.slots_per_segment, self._config.block_bytes
        describe_namespace(self._fs, self._namespace, self._config.key, block_bytes, slots)
        self._prepare(growth)
        arrays = MappedArrays(self._fs, self._namespace.state_folder, session)
        self._executor.submit(index.warm)
        return NvmeTier(
            backend,
            directory,
            store,
            arrays,
            self._report(index),
            index,
            self._segments,
            growth,
            self._namespace,
            table,
            self._epoch_arrays,
        )

    def undo(self) -> None:
        """Let go of what the steps so far hold."""
        if self._index is not None:
            self._index.abandon()
        self._segments.close()
        self._epoch_arrays.close()
        self._namespace.close()

    @property
    def _paths(self) -> int:
        return len(self._config.paths)

    def _open_index(self, wanted_epoch: int) -> tuple[BlockIndex, int]:
        folder = self._namespace.index_folder
        is_described = self._namespace.was_described
        if is_described and not (folder / DATA_NAME).exists():
            raise CorruptionError(damaged(folder, "it is missing"))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # LMDB is on no other file system
        is_durable = self._config.durability is Durability.POWER
        index = self._index = open_index(folder, self._plan.slots, is_durable=is_durable)
        identity = IndexIdentity(
            self._config.key.digest, self._config.block_bytes, self._plan.slots_per_segment
        )
        session = index.load(identity, wanted_epoch, may_create=not is_described)
        if index.reset_at_open:
            _log.warning("a reset came to its end: %d blocks are forgotten", index.reset_at_open)
        return index, session

    def _open_segments(self, index: BlockIndex) -> None:
        """Open what is there; the index forgets what lies in files that are not."""
        there = self._segments.found()
        for number in there:
            if number >= self._plan.segments:
                continue
            try:
                self._segments.open(number)
            except KVCascadeError as error:
                _log.warning("a segment is left out: %s", error)
        for number in there:
            if number >= self._plan.segments:  # the capacity is smaller than it was
                index.needs_scan = True
                self._segments.remove(number)

    def _find_used(self, index: BlockIndex, table: StatusTable) -> None:
        exists = self._exists()
        if not index.needs_scan:
            is_free = self._saved_free(index, exists)
            if is_free is not None:
                table.is_used[:] = exists & ~is_free
                return
            index.needs_scan = True
        live = index.scan()
        table.is_used[live] = True
        lost = table.is_used & ~exists
        if lost.any():
            dropped = index.drop_slots(lost)
            _log.warning("%d blocks were in segments that are not there any more", dropped)
            table.is_used &= exists
        index.entries_at_open = int(np.count_nonzero(table.is_used))

    def _saved_free(
        self, index: BlockIndex, exists: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.bool_] | None:
        """The free slots as the last close left them; None if that does not add up."""
        extents = index.saved_free_extents().astype(np.int64)
        starts, lengths = extents[:, 0], extents[:, 1]
        ends = starts + lengths
        is_sane = (
            bool((lengths > 0).all())
            and bool((starts >= 0).all())
            and bool((ends <= len(exists)).all())
            and bool((starts[1:] >= ends[:-1]).all())
        )
        if not is_sane:
            return None
        change = np.zeros(len(exists) + 1, dtype=np.int8)
        np.add.at(change, starts, 1)
        np.add.at(change, ends, -1)
        is_free: npt.NDArray[np.bool_] = np.cumsum(change[:-1], dtype=np.int8) > 0
        is_exact = not (is_free & ~exists).any()
        used = int(np.count_nonzero(exists)) - int(lengths.sum())
        return is_free if is_exact and used == index.entries_at_open else None

    def _exists(self) -> npt.NDArray[np.bool_]:
        exists = np.zeros(self._plan.slots, dtype=np.bool_)
        size = self._plan.slots_per_segment
        for number in self._segments.numbers:
            exists[number * size : (number + 1) * size] = True
        return exists

    def _make_growth(self) -> SegmentGrowth:
        budget = SpaceBudget(
            self._fs,
            self._namespace.folders,
            self._config.capacity_bytes,
            self._config.min_free_bytes,
            self._plan,
            self._config.may_remove_namespaces,
        )
        return SegmentGrowth(
            self._segments, budget, self._plan.segments, self._paths, self._executor, self._clock
        )

    def _prepare(self, growth: SegmentGrowth) -> None:
        """Have some room before the first store: about one large segment per path."""
        per_path = max(1, SEGMENT_BYTES // self._segments.layout.file_bytes)
        growth.make(per_path * self._paths - len(self._segments.numbers))

    def _report(self, index: BlockIndex) -> StartReport:
        return StartReport(
            folder=self._namespace.folders[0],
            blocks=index.entries_at_open,
            block_bytes=self._config.block_bytes,
            capacity_blocks=self._plan.slots,
            created=self._namespace.created,
            was_clean=not index.needs_scan,
            repaired_segments=self._segments.repaired,
            bytes_written=index.totals[0],
        )


class _ExecutorBackground(Background):
    """Hands work to the executor; no removal is lost if it takes no more."""

    def __init__(self, store: BlockStore, executor: Executor) -> None:
        self._store = store
        self._executor = executor

    def commit(self, removals: Sequence[Removal], epoch: int) -> None:
        try:
            self._executor.submit(self._store.remove, removals, epoch)
        except RuntimeError:  # shutting down: the commit at close takes them along
            self._store.owe(removals, epoch)

    def repair_records(self, slots: Set[int]) -> None:
        with contextlib.suppress(RuntimeError):  # shutting down
            self._executor.submit(self._store.repair_records, slots)
