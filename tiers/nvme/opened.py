"""An NVMe tier: what it is opened with, what an open one consists of, and how it is closed.

Any number of processes may have one open (`owners`). `tier` opens one.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...errors import KVCascadeError
from ...logs import get_logger
from .index.block_index import BlockIndex
from .index.saved_slots import SavedSlots
from .index_directory import IndexDirectory
from .namespace import Namespace, NamespaceKey
from .nvme_backend import NvmeBackend, StatusTable
from .segments.arrays import MappedArrays
from .segments.segment_files import SegmentSet
from .segments.store import BlockStore, Durability
from .writer.capacity import SEGMENT_BYTES
from .writer.growth import SegmentGrowth

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
    others_bytes: int = 0
    """What other namespaces may take beside the capacity, for a visitor that removes none."""
    may_remove_namespaces: bool = True
    """Whether namespaces that nobody has open leave if there is no room beside them."""
    is_guest: bool = False
    """A command, not an engine: what it stores was computed elsewhere."""
    ready_bytes: int = SEGMENT_BYTES
    """Room that is there once the tier is open, per path, if there is that much."""


@dataclass(frozen=True, slots=True)
class StartReport:
    """What was found, for one line in the log."""

    folder: Path
    blocks: int
    """That can be found: those of all processes."""
    block_bytes: int
    capacity_blocks: int
    """Over all processes."""
    created: datetime
    was_clean: bool
    """True if nothing had to be found out about the segments that this process had last."""
    was_reset: bool
    """True if what it had last is worth nothing since."""
    is_alone: bool
    """True if no other process had it open."""
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
        report = self.report
        return not report.was_clean or report.was_reset or self.arrays.was_replaced

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
        directory = self.directory
        is_settled = self.store.remove(directory.take_removals(), directory.epoch)
        saved: SavedSlots | None = None
        was_taken_from = False
        if is_settled and directory.is_committed:
            with suppress(OSError, KVCascadeError):  # files may be gone, or a device broken
                was_taken_from = self.index.was_taken_from()
                saved = self._slots_to_save(was_taken_from)
        directory.release()  # others go on, and what follows waits for the disk
        try:
            if not was_taken_from:  # unsealed, the policy's arrays are compared with the slots
                self.arrays.sync()
            self.epoch_arrays.sync()
        except KVCascadeError as error:
            _log.warning("recency may be lost: %s", error)
        try:
            self.index.close(saved, self.store.take_read_bytes())
        except KVCascadeError as error:
            _log.warning("the next start has to look through the index: %s", error)

    def _slots_to_save(self, was_taken_from: bool) -> SavedSlots | None:
        """What lies in its own segments, and what is free there; None if that does not add up."""
        index, directory, backend = self.index, self.directory, self.backend
        if was_taken_from:  # slots that lost their blocks are in use until they are evicted
            used_slots = index.scan(self.table.is_owned, and_beyond=False)
            return SavedSlots(directory.epoch, len(used_slots), backend.free_beside(used_slots))
        free = backend.free_extents()
        used = backend.available - int(free[:, 1].sum())
        has_all = self.segments.numbers == self.segments.found()
        is_exact = used == (index.count() if has_all else len(directory))
        return SavedSlots(directory.epoch, used, free) if is_exact else None
