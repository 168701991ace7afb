"""The steps of opening an NVMe tier: namespace, index, segments, store, backend and directory.

A process takes back the segments that it owned last. After a clean close no index entry is read;
otherwise every entry is read once. Other processes may have the namespace open. Their segments are
not touched, and they are not notified. If a step fails, the opening raises a `KVCascadeError` and
leaves the data unchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Executor
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt

from ...errors import CorruptionError, KVCascadeError, is_for_want_of_resources, os_errors
from ...logs import get_logger
from .disk.filesystem import FileSystem
from .index.block_index import (
    GENERATIONS_PER_SESSION,
    BlockIndex,
    Session,
    open_index,
)
from .index.index_file import DATA_NAME, damaged
from .index.index_keys import IndexIdentity
from .index.index_port import Removal
from .index_directory import IndexDirectory
from .namespace import Namespace, describe_namespace
from .nvme_backend import Background, NvmeBackend, StatusTable, free_pools
from .opened import NvmeTier, NvmeTierConfig, StartReport
from .segments.arrays import MappedArrays
from .segments.format import SegmentLayout
from .segments.segment_files import SegmentSet
from .segments.store import BlockStore, Durability
from .writer.capacity import Plan, SpaceBudget
from .writer.failing_devices import OnEnd
from .writer.growth import SegmentGrowth
from .writer.owners import MAX_PROCESSES

_log = get_logger(__name__)


class Opening:
    """The steps of `open_nvme_tier`; `undo` releases everything if one fails."""

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
        self._owners = namespace.owners
        self._executor = executor
        self._clock = clock
        self._epoch_arrays = MappedArrays(fs, namespace.shared_state_folder, session=None)
        self._budget = SpaceBudget(
            fs,
            namespace.folders,
            config.capacity_bytes + config.others_bytes,
            config.min_free_bytes,
            config.may_remove_namespaces,
        )
        layout = SegmentLayout(config.block_bytes, plan.slots_per_segment, config.key.fingerprint)
        self._segments = SegmentSet(fs, namespace.segment_folders, layout, self._budget.claim)
        self._index: BlockIndex | None = None

    def run(self) -> NvmeTier:
        """Run all steps in order."""
        resets, started = self._open_resets()
        if not self._owners.is_alone and not self._owners.has_engines:
            self._begin_beside_guests(resets, started)
        index, session = self._open_index(int(resets.sum()), int(started[0]))
        if self._owners.is_alone:
            resets[:] = 0
            resets[self._owners.state] = started[0] = index.epoch
        was_clean = self._open_segments(index, session)
        table = StatusTable(self._plan.slots)
        was_clean = self._find_used(index, session, table, was_clean)
        directory = IndexDirectory(
            index,
            self._segments,
            table.at,
            table.owned,
            table.used,
            int(np.count_nonzero(table.is_used)),
            resets,
            self._owners.state,
            session.proven_from,
        )
        store = BlockStore(
            index,
            self._segments,
            self._config.durability,
            session.number * GENERATIONS_PER_SESSION,
        )
        growth = SegmentGrowth(
            self._segments,
            self._owners,
            index,
            self._budget,
            self._plan.segments,
            self._paths,
            self._executor,
            self._clock,
        )
        backend = self._make_backend(table, directory, growth, store)
        self._describe()
        self._prepare(growth)
        backend.take_arrived()
        folder = self._namespace.state_folder
        with os_errors(f"making {folder}"):
            self._fs.make_dir(folder)
        arrays = MappedArrays(self._fs, folder, session.use, self._claim_state)
        self._owners.leave_gate()
        self._executor.submit(index.warm)
        if session.proven_from and len(directory):
            self._executor.submit(
                prove_records, index, self._segments, store, directory, session.proven_from
            )
        return NvmeTier(
            backend,
            directory,
            store,
            arrays,
            self._report(index, session, was_clean),
            index,
            self._segments,
            growth,
            self._namespace,
            table,
            self._epoch_arrays,
        )

    def undo(self) -> None:
        """Release everything that the steps so far hold."""
        if self._index is not None:
            self._index.abandon()
        self._segments.close()
        self._epoch_arrays.close()
        self._namespace.close()

    @property
    def _paths(self) -> int:
        return len(self._config.paths)

    @property
    def _is_new(self) -> bool:
        return self._namespace.description is None

    def _claim_state(self, growth: int) -> AbstractContextManager[None]:
        return self._budget.claim(0, growth)

    def _open_resets(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Return the resets per process, and a cell with the epoch when a process last began
        alone."""
        shape = ("epoch", MAX_PROCESSES + 1, np.uint64)
        if not self._owners.is_alone and not self._epoch_arrays.has(*shape):
            folder = self._namespace.folders[0]
            raise CorruptionError(
                f"{folder}/state/epoch.arr was lost while other processes use it; stop them all, "
                "then start again"
            )
        epochs = self._epoch_arrays(*shape)
        return epochs[:MAX_PROCESSES], epochs[MAX_PROCESSES:]

    def _begin_beside_guests(
        self, resets: npt.NDArray[np.uint64], started: npt.NDArray[np.uint64]
    ) -> None:
        """Do the work of a lone start by a reset of its own, as guests have the index open."""
        if started[0] != resets.sum():
            resets[self._owners.state] += np.uint64(1)
            started[0] = resets.sum()

    def _open_index(self, epoch: int, started_epoch: int) -> tuple[BlockIndex, Session]:
        """Open and load the index. `started_epoch` is the epoch when a process last began alone.

        Blocks stored after a later reset are valid only for the engines that were reset. Their
        weights may have been updated in place, and may differ from those that the namespace is
        named after.
        """
        folder = self._namespace.index_folder
        if not self._is_new and not (folder / DATA_NAME).exists():
            raise CorruptionError(damaged(folder, "it is missing"))
        if self._is_new:
            for part in range(self._paths):
                with self._budget.claim(part, 0):  # fails if there is not even room to begin
                    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # LMDB needs the real file system
        index = self._index = open_index(
            folder,
            self._plan.slots,
            self._index_bytes,
            is_durable=self._config.durability is Durability.POWER,
            is_alone=self._owners.is_alone,
        )
        identity = IndexIdentity(
            self._config.key.digest, self._config.block_bytes, self._plan.slots_per_segment
        )
        session = index.load(
            identity,
            epoch,
            may_create=self._is_new,
            state=self._owners.state,
            is_alone=self._owners.is_alone,
            started_epoch=started_epoch if self._owners.is_alone else None,
        )
        if index.reset_at_open:
            _log.warning(
                "%d blocks are forgotten: the engines were reset, and what they stored after it "
                "may be of weights that were updated in place",
                index.reset_at_open,
            )
        if epoch != started_epoch and not self._owners.is_alone:
            _log.warning(
                "other engines of this namespace were reset since they started; if their weights "
                "were updated in place, update and reset this one before it serves"
            )
        return index, session

    @property
    def _index_bytes(self) -> int:
        """Address space of the index: the plan's, or the one that other processes map already.

        It is never reduced, because dropping blocks needs free pages, too.
        """
        described = self._namespace.index_bytes
        return max(self._plan.index_bytes, described) if self._owners.is_alone else described

    def _open_segments(self, index: BlockIndex, session: Session) -> bool:
        """Take back this process's segments. Return True if all are there as they were left."""
        total, is_right = self._plan.segments, not index.needs_scan
        there = self._segments.found()
        for number in self._owners.last_owned(total):
            if not self._owners.try_own(number):
                is_right = False
                continue
            try:
                if number in there:
                    self._segments.open(number)
                    continue
            except KVCascadeError as error:
                if is_for_want_of_resources(error):  # its blocks are intact: keep their entries
                    raise
                _log.warning("a segment is left out: %s", error)
            self._owners.disown(number)
            is_right = False
        for number in there:
            if number >= total and self._owners.try_own(number):  # the capacity was larger before
                self._segments.remove(number)
                self._owners.disown(number)
                is_right = False
        return is_right and (session.saved is not None or not self._segments.numbers)

    def _find_used(
        self, index: BlockIndex, session: Session, table: StatusTable, was_clean: bool
    ) -> bool:
        """Mark the owned slots that hold blocks. Return True if no entry had to be read for
        that."""
        self._mark(table.is_owned, self._segments.numbers)
        there = self._segments.found()
        knows_all = set(there) == set(self._segments.numbers)
        if was_clean and session.saved is not None:
            is_free = self._saved_free(index, session, table.is_owned, knows_all)
            if is_free is not None:
                table.is_used[:] = table.is_owned & ~is_free
                return True
        elif was_clean and (there or index.entries_at_open == 0):
            return True  # this process owned nothing
        lost = self._lost(there)
        live = index.scan(table.is_owned, lost, and_beyond=self._owners.is_alone)
        table.is_used[live] = True
        if index.dropped_by_scan:
            _log.warning("%d blocks are not there any more", index.dropped_by_scan)
        return False

    def _lost(self, there: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Return the slots that nobody owns and whose file is missing or unusable."""
        is_lost = np.ones(self._plan.slots, dtype=np.bool_)
        taken = [n for n in range(self._plan.segments) if self._owners.is_taken(n)]
        self._mark(is_lost, set(there) - self._segments.unusable, value=False)
        self._mark(is_lost, taken, value=False)
        return is_lost

    def _saved_free(
        self,
        index: BlockIndex,
        session: Session,
        is_owned: npt.NDArray[np.bool_],
        knows_all: bool,
    ) -> npt.NDArray[np.bool_] | None:
        """Return the free slots as of the last close; None if the counts disagree."""
        saved = session.saved
        assert saved is not None
        if saved.epoch != index.epoch:  # after a reset nobody has written here
            is_sane = not knows_all or index.entries_at_open == 0
            return np.ones(len(is_owned), dtype=np.bool_) if is_sane else None
        extents = saved.free.astype(np.int64)
        starts, lengths = extents[:, 0], extents[:, 1]
        ends = starts + lengths
        is_sane = (
            bool((lengths > 0).all())
            and bool((starts >= 0).all())
            and bool((ends <= len(is_owned)).all())
            and bool((starts[1:] >= ends[:-1]).all())
        )
        if not is_sane:
            return None
        change = np.zeros(len(is_owned) + 1, dtype=np.int8)
        np.add.at(change, starts, 1)
        np.add.at(change, ends, -1)
        is_free: npt.NDArray[np.bool_] = np.cumsum(change[:-1], dtype=np.int8) > 0
        if (is_free & ~is_owned).any():  # another process has taken some of its segments
            return None
        used = int(np.count_nonzero(is_owned)) - int(lengths.sum())
        is_exact = used == saved.used and (not knows_all or used == index.entries_at_open)
        return is_free if is_exact else None

    def _mark(
        self, mask: npt.NDArray[np.bool_], numbers: Sequence[int] | Set[int], value: bool = True
    ) -> None:
        """Set the flags of all slots in some segments."""
        size = self._plan.slots_per_segment
        for number in numbers:
            mask[number * size : (number + 1) * size] = value

    def _make_backend(
        self,
        table: StatusTable,
        directory: IndexDirectory,
        growth: SegmentGrowth,
        store: BlockStore,
    ) -> NvmeBackend:
        size = self._plan.slots_per_segment
        return NvmeBackend(
            self._config.block_bytes,
            table,
            directory,
            free_pools(table.is_used, table.is_owned, size, self._paths),
            growth,
            size,
            _ExecutorBackground(store, self._executor),
        )

    def _describe(self) -> None:
        describe_namespace(
            self._fs,
            self._namespace,
            self._config.key,
            self._config.block_bytes,
            self._plan.slots_per_segment,
            self._index_bytes,
        )

    def _prepare(self, growth: SegmentGrowth) -> None:
        """Create some segments before the first store."""
        per_path = max(1, self._config.ready_bytes // self._segments.layout.file_bytes)
        growth.make(per_path * self._paths - len(self._segments.numbers))

    def _report(self, index: BlockIndex, session: Session, was_clean: bool) -> StartReport:
        return StartReport(
            folder=self._namespace.folders[0],
            blocks=index.count(),
            block_bytes=self._config.block_bytes,
            capacity_blocks=self._plan.slots,
            created=self._namespace.created,
            was_clean=was_clean,
            was_reset=session.saved is not None and session.saved.epoch != index.epoch,
            is_alone=self._owners.is_alone,
            bytes_written=index.totals[0],
        )


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


class _ExecutorBackground(Background):
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
        with contextlib.suppress(RuntimeError):  # shutting down
            self._executor.submit(self._repair_records, slots, on_end)

    def _repair_records(self, slots: Set[int], on_end: OnEnd) -> None:
        on_end(self._store.repair_records(slots))

    def take_orphans(self) -> list[int]:
        return self._store.take_orphans()
