"""How many slots fit a capacity, and whether the next segment may be made.

The capacity is one figure per path over all namespaces in it: segments, index and state together.
`SpaceBudget` is used by one I/O thread at a time and holds a lock file per path while it decides,
so that several processes cannot overrun it together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigError, InUseError, NoSpaceError, os_errors
from ...logs import get_logger
from .filesystem import FileSystem
from .format import MAX_BLOCK_BYTES, MAX_SLOTS, PAGE_BYTES, SLOT_RECORD_BYTES, SegmentLayout
from .namespace import namespaces_under, remove_namespace

SEGMENT_BYTES = 1 << 30
MIN_SEGMENTS_PER_PATH = 8
MAX_SEGMENTS_PER_PATH = 128
"""A segment costs three descriptors; larger tiers have larger segments."""
METADATA_FIXED_BYTES = 1 << 20
METADATA_BYTES_PER_SLOT = 256
MAX_METADATA_SHARE = 16
BUDGET_LOCK = ".kvcascade.lock"

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Plan:
    """The shape of a tier."""

    slots_per_segment: int
    segments: int
    """Over all paths."""
    metadata_bytes: int
    """Kept for index and state in each path."""

    @property
    def slots(self) -> int:
        """Capacity in blocks."""
        return self.slots_per_segment * self.segments


def plan_capacity(
    capacity_bytes: int, block_bytes: int, paths: int, slots_per_segment: int | None = None
) -> Plan:
    """Lay out `capacity_bytes` over `paths` so that it is never exceeded.

    `slots_per_segment` is given for a namespace that exists. Raises `ConfigError`.
    """
    if block_bytes <= 0 or block_bytes % PAGE_BYTES or block_bytes > MAX_BLOCK_BYTES:
        raise ConfigError(
            f"a block of {block_bytes} bytes cannot be stored; it must be a positive multiple "
            f"of {PAGE_BYTES} and at most {MAX_BLOCK_BYTES}"
        )
    share = capacity_bytes // paths
    wanted_metadata = METADATA_FIXED_BYTES + share // block_bytes * METADATA_BYTES_PER_SLOT
    metadata = min(share // MAX_METADATA_SHARE, wanted_metadata)
    usable = share - metadata
    slot_bytes = block_bytes + SLOT_RECORD_BYTES
    if slots_per_segment is None:
        largest = max(SEGMENT_BYTES, usable // MAX_SEGMENTS_PER_PATH)
        small = usable // MIN_SEGMENTS_PER_PATH - PAGE_BYTES
        slots_per_segment = max(1, min(largest, small) // slot_bytes)
    file_bytes = SegmentLayout(block_bytes, slots_per_segment, "0" * 64).file_bytes
    segments = min(usable // file_bytes * paths, MAX_SLOTS // slots_per_segment)
    if segments < 1:
        needed = (file_bytes + slot_bytes) * paths * MAX_METADATA_SHARE // (MAX_METADATA_SHARE - 1)
        raise ConfigError(
            f"capacity {capacity_bytes} holds no segment of {slots_per_segment} blocks of "
            f"{block_bytes} bytes; give at least {needed} bytes"
        )
    return Plan(slots_per_segment, segments, metadata)


class SpaceBudget:
    """Decides whether a path may grow by one segment, and makes room by old namespaces."""

    def __init__(
        self,
        fs: FileSystem,
        folders: Sequence[Path],
        capacity_bytes: int,
        min_free_bytes: int,
        plan: Plan,
        may_remove: bool = True,
    ) -> None:
        """`folders`: the namespace's own directory in each path.

        `may_remove`: whether other namespaces leave for this one.
        """
        self._fs = fs
        self._folders = tuple(folders)
        self._share = capacity_bytes // len(self._folders)
        self._min_free_bytes = min_free_bytes
        self._metadata_bytes = plan.metadata_bytes
        self._may_remove = may_remove
        self.removed_namespaces = 0

    def claim(self, part: int, own_bytes: int, growth: int) -> None:
        """Return if the path may grow by `growth` bytes beyond `own_bytes` of segments.

        Removes the namespaces that were used longest ago, unless a process owns them, if that is
        needed. Raises `NoSpaceError` with the reason otherwise.
        """
        folder = self._folders[part]
        root = folder.parent
        try:
            with os_errors(f"locking {root}"):
                lock = self._fs.lock(root / BUDGET_LOCK)
        except InUseError:
            raise NoSpaceError(f"another process is making room in {root}; try again") from None
        try:
            self._claim(root, folder, own_bytes, growth)
        finally:
            lock.release()

    def _claim(self, root: Path, folder: Path, own_bytes: int, growth: int) -> None:
        others = [found for found in namespaces_under(self._fs, root) if found.path != folder]
        wanted = own_bytes + self._metadata_bytes + growth
        taken = sum(found.used_bytes for found in others)
        for found in others:
            if taken + wanted <= self._share and self._is_disk_free(root, growth):
                return
            if self._may_remove and remove_namespace(self._fs, found.path):
                _log.warning("removed %s, the namespace used longest ago, for room", found.path)
                self.removed_namespaces += 1
                taken -= found.used_bytes
        if taken + wanted > self._share:
            raise NoSpaceError(
                f"other namespaces take {taken} bytes of the capacity in {root}; remove some or "
                "raise the capacity"
            )
        if not self._is_disk_free(root, growth):
            raise NoSpaceError(
                f"less than {self._min_free_bytes} bytes would be left on the disk of {root}; "
                "free some"
            )

    def _is_disk_free(self, root: Path, growth: int) -> bool:
        with os_errors(f"asking for the free space of {root}"):
            return self._fs.free_bytes(root) - growth >= self._min_free_bytes
