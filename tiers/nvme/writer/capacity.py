"""How many slots fit a capacity, and whether a path has room for more.

The capacity is one figure per path over all namespaces in it: segments, index and state together.
`SpaceBudget` holds a lock file per path while it decides and while the granted file is made, so
processes cannot overrun it together. Only the index grows without asking. The full size of its map
is reserved from the start, both in the capacity and above the reserve of free disk space. Without a
reserve the disk itself is the limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ....errors import ConfigError, InUseError, KVCascadeError, NoSpaceError, os_errors
from ....logs import get_logger
from ..disk.filesystem import FileSystem
from ..index.index_file import DATA_NAME
from ..namespace import (
    FoundNamespace,
    described_layout,
    lock_namespace,
    namespaces_under,
    remove_leftovers,
    remove_locked_namespace,
)
from ..segments.format import (
    MAX_BLOCK_BYTES,
    MAX_SLOTS,
    PAGE_BYTES,
    SLOT_RECORD_BYTES,
    SegmentLayout,
)

SEGMENT_BYTES = 1 << 30
MIN_SEGMENTS_PER_PATH = 8
MAX_SEGMENTS_PER_PATH = 128
"""Most segments per path; larger tiers have larger segments, as a segment costs three
descriptors."""
INDEX_FIXED_BYTES = 512 << 10
INDEX_BYTES_PER_SLOT = 256
"""Index bytes reserved per slot; an entry takes 80 to 160 bytes, depending on how full the pages
are."""
INDEX_CHURN_BYTES_PER_SLOT = 3072
INDEX_CHURN_BYTES_MAX = 24 << 20
"""Room in the index for pages that commits replaced, which are reused once no process reads the
older state. A commit into a small index replaces nearly all of it, 140 bytes a slot. The room
covers 22 such commits, of all processes, while one of them is in a step. A commit of 8 MiB of
blocks into a large index replaces about 0.6 MiB at most. Faster commits wait
(`BlockIndex.commit`)."""
STATE_FIXED_BYTES = 128 << 10
STATE_BYTES_PER_SLOT = 200
"""Room for the arrays of two processes; those of further ones stay in memory if there is no
room."""
SMALL_FILES_BYTES = 64 << 10
"""Room per namespace and path for small files that are created without asking."""
BUDGET_LOCK = ".kvcascade.lock"
BUDGET_WAIT_S = 30.0
"""Longest wait for other processes that create a segment in the same path."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Plan:
    """The shape of a tier."""

    slots_per_segment: int
    segments: int
    """Number of segments over all paths."""
    metadata_bytes: int
    """Bytes reserved for index and state in each path."""

    @property
    def slots(self) -> int:
        """Capacity in blocks."""
        return self.slots_per_segment * self.segments

    @property
    def index_bytes(self) -> int:
        """Largest size of the index of a full tier, in bytes."""
        return index_bytes(self.slots)

    def within(self, map_bytes: int) -> Plan:
        """Return the largest part of the plan that an index of that size can name; at least one
        segment."""
        most = max(1, slots_in_index(map_bytes) // self.slots_per_segment)
        if self.segments <= most:
            return self
        return Plan(self.slots_per_segment, most, metadata_bytes(most * self.slots_per_segment))


def index_bytes(slots: int) -> int:
    """Return the largest size on disk of the index of so many slots."""
    churn = min(INDEX_CHURN_BYTES_MAX, INDEX_CHURN_BYTES_PER_SLOT * slots)
    whole = INDEX_FIXED_BYTES + INDEX_BYTES_PER_SLOT * slots + churn
    return -(-whole // PAGE_BYTES) * PAGE_BYTES


def slots_in_index(map_bytes: int) -> int:
    """Return the most slots whose index fits into `map_bytes`: the inverse of `index_bytes`."""
    spare = map_bytes - INDEX_FIXED_BYTES
    small = spare // (INDEX_BYTES_PER_SLOT + INDEX_CHURN_BYTES_PER_SLOT)
    large = (spare - INDEX_CHURN_BYTES_MAX) // INDEX_BYTES_PER_SLOT
    return max(0, small, large)


def metadata_bytes(slots: int) -> int:
    """Return the largest size of index and state of so many slots."""
    state = STATE_FIXED_BYTES + STATE_BYTES_PER_SLOT * slots
    return index_bytes(slots) + state + SMALL_FILES_BYTES


def capacity_for(segments: int, slots_per_segment: int, block_bytes: int, paths: int = 1) -> int:
    """Return the least capacity that holds so many segments."""
    layout = SegmentLayout(block_bytes, slots_per_segment, "0" * 64)
    per_path = -(-segments // paths)
    return paths * (
        per_path * layout.file_bytes + metadata_bytes(per_path * paths * slots_per_segment)
    )


def plan_capacity(
    capacity_bytes: int, block_bytes: int, paths: int, slots_per_segment: int | None = None
) -> Plan:
    """Lay out `capacity_bytes` over `paths` so that it is never exceeded.

    `slots_per_segment` is given for an existing namespace. Raises `ConfigError`.
    """
    if block_bytes <= 0 or block_bytes % PAGE_BYTES or block_bytes > MAX_BLOCK_BYTES:
        raise ConfigError(
            f"a block of {block_bytes} bytes cannot be stored; it must be a positive multiple "
            f"of {PAGE_BYTES} and at most {MAX_BLOCK_BYTES}"
        )
    share = capacity_bytes // paths
    slot_bytes = block_bytes + SLOT_RECORD_BYTES
    if slots_per_segment is None:
        usable = _units(share, slot_bytes, paths) * slot_bytes
        largest = max(SEGMENT_BYTES, usable // MAX_SEGMENTS_PER_PATH)
        small = usable // MIN_SEGMENTS_PER_PATH - PAGE_BYTES
        slots_per_segment = max(1, min(largest, small) // slot_bytes)
    file_bytes = SegmentLayout(block_bytes, slots_per_segment, "0" * 64).file_bytes
    per_path = _units(share, file_bytes, paths * slots_per_segment)
    segments = min(per_path * paths, MAX_SLOTS // slots_per_segment)
    if segments < 1:
        needed = capacity_for(1, slots_per_segment, block_bytes, paths)
        raise ConfigError(
            f"capacity {capacity_bytes} holds no segment of {slots_per_segment} blocks of "
            f"{block_bytes} bytes; give at least {needed} bytes"
        )
    return Plan(slots_per_segment, segments, metadata_bytes(segments * slots_per_segment))


def _units(share: int, unit_bytes: int, slots: int) -> int:
    """Return how many units of so many bytes and slots fit into a path with their metadata."""
    spare = share - metadata_bytes(0) - PAGE_BYTES
    per_slot = INDEX_BYTES_PER_SLOT + STATE_BYTES_PER_SLOT
    small = spare // (unit_bytes + slots * (per_slot + INDEX_CHURN_BYTES_PER_SLOT))
    large = (spare - INDEX_CHURN_BYTES_MAX) // (unit_bytes + slots * per_slot)
    return max(0, small, large)


class SpaceBudget:
    """Decides whether a path may take more, and makes room by removing unused namespaces."""

    def __init__(
        self,
        fs: FileSystem,
        folders: Sequence[Path],
        capacity_bytes: int,
        min_free_bytes: int,
        may_remove: bool = True,
    ) -> None:
        """`folders` holds the namespace's own directory in each path.

        `may_remove` tells whether other namespaces may be removed for this one.
        """
        self._fs = fs
        self._folders = tuple(folders)
        self._share = capacity_bytes // len(self._folders)
        self._min_free_bytes = min_free_bytes
        self._may_remove = may_remove

    @contextmanager
    def claim(self, part: int, growth: int) -> Iterator[None]:
        """Create a file of `growth` bytes in a path inside this context.

        If space is needed, the least recently used namespaces are removed that no process has open.
        Nothing is removed if that would not suffice. Raises `NoSpaceError` with the reason then.
        Any thread but the manager's, as it may wait for `BUDGET_WAIT_S`.
        """
        root = self._folders[part].parent
        try:
            with os_errors(f"locking {root}"):
                lock = self._fs.lock(root / BUDGET_LOCK, wait_s=BUDGET_WAIT_S)
        except InUseError:
            raise NoSpaceError(f"another process is making room in {root}; try again") from None
        try:
            self._make_room(root, growth)
            yield
        finally:
            lock.release()

    def _make_room(self, root: Path, growth: int) -> None:
        taken = remove_leftovers(self._fs, root)
        found = namespaces_under(self._fs, root)
        with ExitStack() as locks:
            idle: list[FoundNamespace] = []
            ahead = 0
            for one in found:
                is_own = one.path in self._folders
                lock = None if is_own else lock_namespace(self._fs, one.path)
                if lock is None:
                    ahead += self.set_aside(one.path)
                else:
                    locks.callback(lock.release)
                    if self._may_remove:
                        idle.append(one)
                taken += one.used_bytes
            with os_errors(f"asking for the free space of {root}"):
                free = self._fs.free_bytes(root)
            over = taken + ahead + growth - self._share
            reserve = self._min_free_bytes + ahead if self._min_free_bytes else 0
            short = growth + reserve - free if growth else 0
            self._remove_oldest(root, idle, max(over, short), over)

    def _remove_oldest(
        self, root: Path, idle: Sequence[FoundNamespace], missing: int, over: int
    ) -> None:
        """Remove enough of these to free `missing` bytes; none if all are not enough."""
        chosen: list[FoundNamespace] = []
        for one in idle:
            if sum(other.used_bytes for other in chosen) >= missing:
                break
            chosen.append(one)
        if sum(one.used_bytes for one in chosen) < missing:
            if over > 0:
                raise NoSpaceError(
                    f"{over} bytes would be missing in the capacity in {root}, which is over all "
                    "namespaces there; remove some or raise the capacity"
                )
            raise NoSpaceError(
                f"less than {self._min_free_bytes} bytes would be left on the disk of {root}; "
                "free some"
            )
        for one in chosen:
            remove_locked_namespace(self._fs, one.path)
            _log.warning("removed %s, the namespace used longest ago, for room", one.path)

    def set_aside(self, path: Path) -> int:
        """Return the bytes by which an open namespace's directory may still grow without asking.

        An index may grow to the size of its map, however few blocks it names. That happens if a
        reader is delayed for long enough.
        """
        try:
            layout = described_layout(self._fs, path)
            index = path / "index" / DATA_NAME
            now = self._fs.used_bytes(index) if self._fs.exists(index) else 0
        except (OSError, KVCascadeError):  # not described yet, or not any more
            layout, now = None, 0
        if layout is None:
            return SMALL_FILES_BYTES + index_bytes(0)
        if layout.part > 0:
            return SMALL_FILES_BYTES
        return SMALL_FILES_BYTES + max(0, layout.index_bytes - now)
