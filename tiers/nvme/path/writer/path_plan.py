"""Number of slots that fit a capacity, and room of a namespace beside its segments."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from .....errors import ConfigError
from ....policies import order_class
from ....policies.order import EvictionOrder
from ...segments.format import (
    MAX_BLOCK_BYTES,
    MAX_SEGMENTS,
    MAX_SLOTS,
    PAGE_BYTES,
    SegmentLayout,
)
from ..block_table import block_table_bytes
from ..path_messages import PathOptions
from ..presence_table import presence_bytes

SEGMENT_BYTES = 1 << 30
MIN_SEGMENTS_PER_PATH = 8
MAX_SEGMENTS_PER_PATH = 128
"""Most segments per path; larger tiers have larger segments, as each may take a descriptor in every
node."""
SMALL_FILES_BYTES = 64 << 10
"""Room per namespace and path for small files."""
STATE_BYTES_PER_SLOT = 34
"""Arrays beside the eviction order: last uses (10), the log of prompts (16), and the uses that are
noted beside an order of another package (8)."""


@cache
def _order_of(policy: str) -> type[EvictionOrder]:
    """Return the class of a policy, or the base class where its package is not installed."""
    try:
        return order_class(policy)
    except ConfigError:
        return EvictionOrder


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """The shape of a namespace that has a whole capacity to itself."""

    slots_per_segment: int
    segments: int
    """Number of segments over all paths."""

    @property
    def slots(self) -> int:
        """Final number of slots."""
        return self.slots_per_segment * self.segments


def state_bytes(slots: int, policy: str) -> int:
    """Return the most bytes of the arrays in the state folder of a namespace.

    What finds no room on the disk lives in memory.
    """
    order = _order_of(policy)
    return order.state_bytes + (order.state_bytes_per_slot + STATE_BYTES_PER_SLOT) * slots


def fixed_bytes(slots: int, path: int, policy: str) -> int:
    """Return the most bytes of a namespace in a path beside its segments."""
    if path > 0:
        return SMALL_FILES_BYTES
    tables = block_table_bytes(slots) + presence_bytes(slots)
    return SMALL_FILES_BYTES + tables + state_bytes(slots, policy)


def capacity_of(
    segments: int, slots_per_segment: int, block_bytes: int, paths: int = 1, policy: str = "lru"
) -> int:
    """Return the least capacity with which a namespace may have so many segments."""
    file_bytes = SegmentLayout(block_bytes, slots_per_segment, "0" * 64).file_bytes
    per_path = -(-segments // paths)
    slots = per_path * paths * slots_per_segment
    return paths * (per_path * file_bytes + fixed_bytes(slots, 0, policy))


def plan_namespace(options: PathOptions, block_bytes: int, paths: int) -> SegmentPlan:
    """Lay out a new namespace with the options of its path. Raises `ConfigError`."""
    capacity, policy = options.capacity_bytes, options.policy
    if options.segment_bytes is None:
        return plan_segments(capacity, block_bytes, paths, policy=policy)
    slots = max(1, options.segment_bytes // max(1, block_bytes))
    try:
        return plan_segments(capacity, block_bytes, paths, slots, policy)
    except ConfigError as error:
        if slots == 1:
            raise
        raise ConfigError(f"{error}, or a smaller segment_size") from None


def plan_segments(
    capacity_bytes: int,
    block_bytes: int,
    paths: int,
    slots_per_segment: int | None = None,
    policy: str = "lru",
) -> SegmentPlan:
    """Lay out a capacity over `paths`; no namespace may have more segments than that.

    `slots_per_segment` is given unless it is chosen here. Raises `ConfigError`.
    """
    if block_bytes <= 0 or block_bytes % PAGE_BYTES or block_bytes > MAX_BLOCK_BYTES:
        raise ConfigError(
            f"a block of {block_bytes} bytes cannot be stored; it must be a positive multiple "
            f"of {PAGE_BYTES} and at most {MAX_BLOCK_BYTES}"
        )

    def needed(per_path: int, slots: int) -> int:
        return capacity_of(per_path * paths, slots, block_bytes, paths, policy)

    if slots_per_segment is None:
        usable = capacity_bytes // paths - fixed_bytes(0, 0, policy)
        largest = max(SEGMENT_BYTES, usable // MAX_SEGMENTS_PER_PATH)
        small = usable // MIN_SEGMENTS_PER_PATH - PAGE_BYTES
        slots_per_segment = max(1, min(largest, small) // block_bytes)
        while slots_per_segment > 1 and needed(1, slots_per_segment) > capacity_bytes:
            slots_per_segment //= 2  # the index of small blocks takes more than was left for it
    low, high = 0, min(MAX_SEGMENTS, MAX_SLOTS // slots_per_segment) // paths
    while low < high:  # segments per path
        middle = (low + high + 1) // 2
        if needed(middle, slots_per_segment) <= capacity_bytes:
            low = middle
        else:
            high = middle - 1
    if low < 1:
        raise ConfigError(
            f"capacity {capacity_bytes} holds no segment of {slots_per_segment} blocks of "
            f"{block_bytes} bytes; give at least {needed(1, slots_per_segment)} bytes"
        )
    return SegmentPlan(slots_per_segment, low * paths)
