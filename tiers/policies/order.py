"""The replacement half of a cache policy: an order over slot numbers, held in arrays.

All state lies in flat arrays, because an object for each of millions of slots would take too much
memory. The arrays of a persistent tier can lie in a mapped file and survive a restart
(`ArraySource`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..base import SlotMask

ArraySource = Callable[[str, int, type[np.generic]], npt.NDArray[Any]]
"""Function `source(name, length, dtype)` that returns an array. It holds zeros at first. In a
persistent tier it later holds its content from when the tier was last open."""


def heap_arrays(name: str, length: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Return a new array of zeros: the `ArraySource` of tiers in memory."""
    return np.zeros(length, dtype=dtype)


def scalars(array: npt.NDArray[Any]) -> memoryview[int]:
    """Return a view of the same memory for access to single numbers.

    Its items are plain integers, and access costs as much as with a list.
    """
    shared: Any = array
    return memoryview(shared)


FEW = 8
"""Maximum number of slots that are handled one by one: numpy takes longer for so few."""


class Column:
    """An array, and a view of its memory for access to single numbers: see `scalars`."""

    __slots__ = ("array", "of")

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array = array
        self.of = scalars(array)

    def fill(self, slots: Sequence[int], value: int) -> None:
        """Set the number of each of these slots."""
        if len(slots) > FEW:
            self.array[np.asarray(slots)] = value
            return
        for slot in slots:
            self.of[slot] = value


class EvictionOrder(ABC):
    """Order in which slots are evicted. Slots are `0 .. capacity - 1`.

    `tags` are 64-bit digests of block hashes, for orders that remember evicted blocks (ghosts). An
    order that leaves `wants_tags` False is given no tags. An order that sets `wants_chains` is
    given each request's blocks.
    """

    wants_tags: ClassVar[bool] = False
    wants_chains: ClassVar[bool] = False
    state_bytes: ClassVar[int] = 256 << 10
    """With `state_bytes_per_slot`, the most bytes of the arrays as files. The capacity of a tier on
    disk counts them."""
    state_bytes_per_slot: ClassVar[int] = 76

    def __init__(self, capacity: int, arrays: ArraySource = heap_arrays) -> None:
        self.capacity = capacity

    @property
    def expects(self) -> bool:
        """True if the order uses `expect`; for others no digests are made."""
        return self.wants_tags and type(self).expect is not EvictionOrder.expect

    def expect(self, tags: Sequence[int]) -> None:  # noqa: B027 - most orders need not know
        """Announce blocks that will be inserted, before room is made for them.

        Orders that learn from ghosts use it. It may be called more than once or not at all, and the
        blocks may never be inserted.
        """

    @abstractmethod
    def insert(self, slots: Sequence[int], tags: Sequence[int]) -> None:
        """Add slots that are not present, least recent first."""

    @abstractmethod
    def touch(self, slots: Sequence[int]) -> None:
        """Note a use of slots that are present, least recent first."""

    @abstractmethod
    def settle(self, slots: Sequence[int]) -> None:
        """Put slots that were inserted in parts into this order, least recent first; no use."""

    def chain(self, slots: Sequence[int], blocks: int) -> None:  # noqa: B027 - most need not know
        """Note the end of a request of `blocks` blocks.

        `slots` holds the slots of its blocks, first block first, up to the first missing block.
        """

    @abstractmethod
    def remove(self, slots: Sequence[int]) -> None:
        """Forget slots whose blocks are gone for other reasons than eviction; keep no ghost."""

    def evicted(self, slots: Sequence[int], tags: Sequence[int]) -> None:
        """Forget slots because their blocks were evicted; ghosts may be kept."""
        self.remove(slots)

    @abstractmethod
    def victims(
        self,
        limit: int,
        wanted: Callable[[int], bool],
        mask: SlotMask | None = None,
        window: int | None = None,
    ) -> list[int]:
        """Return up to `limit` slots that `wanted` accepts, in order of eviction; change nothing.

        Slots that are False in `mask` are skipped before `wanted` is called. `window` bounds the
        number of coldest slots that are examined.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget all slots and ghosts."""

    @abstractmethod
    def reconcile(self, present: npt.NDArray[Any]) -> None:
        """Hold exactly the slots in `present` (ascending) after a crash, in the order known."""

    @abstractmethod
    def __contains__(self, slot: object) -> bool:
        """Return True if the slot is in the order."""
