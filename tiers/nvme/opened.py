"""An open NVMe tier: its configuration, its parts, and how it is closed.

Any number of processes may have the same tier open (`owners`). `tier` opens one.
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
from .index.clean_close import SavedSlots
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
    """Configuration of a tier; sizes in bytes."""

    paths: tuple[Path, ...]
    """One directory per device; each must exist."""
    capacity_bytes: int
    """Capacity over all paths, and over all namespaces in them."""
    block_bytes: int
    """Size of a slot; a multiple of 4096."""
    key: NamespaceKey
    durability: Durability = Durability.PROCESS
    min_free_bytes: int = 0
    """Disk space that is never used."""
    slots_per_segment: int | None = None
    """Slots per segment of a new namespace; by default about 1 GiB, less for small tiers."""
    others_bytes: int = 0
    """Space that other namespaces may use beyond the capacity; for a command that removes none."""
    may_remove_namespaces: bool = True
    """Whether unused namespaces are removed if there is no room beside them."""
    is_guest: bool = False
    """True for a command instead of an engine; the blocks it stores were computed elsewhere."""
    ready_bytes: int = SEGMENT_BYTES
    """Space per path that is prepared before the opening returns, as far as available."""


@dataclass(frozen=True, slots=True)
class StartReport:
    """Result of an opening, for one line in the log."""

    folder: Path
    blocks: int
    """Number of blocks that can be found, over all processes."""
    block_bytes: int
    capacity_blocks: int
    """Capacity in blocks over all processes."""
    created: datetime
    was_clean: bool
    """True if this process's own segments did not have to be scanned."""
    was_reset: bool
    """True if a reset has invalidated the blocks that this process had stored last."""
    is_alone: bool
    """True if no other process had the namespace open."""
    bytes_written: int
    """Bytes written over the life of the namespace."""


@dataclass(slots=True)
class NvmeTier:
    """An open tier. Pass `directory` and `arrays` to a policy, `store` to the handlers."""

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

        Read it after the policy was made, because an array that was missing counts too.
        """
        report = self.report
        return not report.was_clean or report.was_reset or self.arrays.was_replaced

    def live_slots(self) -> npt.NDArray[np.int64]:
        """Return the slots that hold a block or are being written, ascending."""
        return np.flatnonzero(self.table.is_used).astype(np.int64)

    def close(self, clean: bool = True) -> None:
        """Commit pending removals, save the free extents and release everything; idempotent.

        Transfers and the executor must have ended. `clean=False` only releases.
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
            with suppress(OSError, KVCascadeError):  # files may be gone, or the device broken
                was_taken_from = self.index.was_taken_from()
                saved = self._slots_to_save(was_taken_from)
        directory.release()  # others need the pages while the next steps wait for the disk
        try:
            if not was_taken_from:  # unsealed arrays are compared with the slots at the start
                self.arrays.sync()
            self.epoch_arrays.sync()
        except KVCascadeError as error:
            _log.warning("recency may be lost: %s", error)
        try:
            self.index.close(saved, self.store.take_read_bytes())
        except KVCascadeError as error:
            _log.warning("the next start has to look through the index: %s", error)

    def _slots_to_save(self, was_taken_from: bool) -> SavedSlots | None:
        """Return the used and free slots of its own segments; None if the counts disagree."""
        index, directory, backend = self.index, self.directory, self.backend
        if was_taken_from:  # slots that lost their blocks stay in use until they are evicted
            used_slots = index.scan(self.table.is_owned, and_beyond=False)
            return SavedSlots(directory.epoch, len(used_slots), backend.free_beside(used_slots))
        free = backend.free_extents()
        used = backend.available - int(free[:, 1].sum())
        has_all = self.segments.numbers == self.segments.found()
        is_exact = used == (index.count() if has_all else len(directory))
        return SavedSlots(directory.epoch, used, free) if is_exact else None
