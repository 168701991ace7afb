"""The replacement half of a cache policy: an order over slot numbers, held in arrays.

State is flat arrays, so that millions of slots cost bytes instead of objects and the arrays of a
persistent tier can lie in a mapped file and survive a restart (`ArraySource`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..base import SlotMask

ArraySource = Callable[[str, int, type[np.generic]], npt.NDArray[Any]]
"""`source(name, length, dtype)` gives an array: zeros the first time, afterwards (for a persistent
tier) what it held when the tier was last open."""


def heap_arrays(name: str, length: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """The `ArraySource` of tiers that live in memory."""
    return np.zeros(length, dtype=dtype)


def scalars(array: npt.NDArray[Any]) -> memoryview[int]:
    """The same memory for code that reads and writes one number at a time.

    Indexing it gives and takes plain integers, at the cost of a list.
    """
    shared: Any = array
    return memoryview(shared)


class EvictionOrder(ABC):
    """Which of the slots in use leaves next. Slots are `0 .. capacity - 1`.

    `tags` are 64-bit digests of block hashes, for orders that remember what left (ghosts); others
    leave `wants_tags` False and are given none. Those that go by what requests have in common set
    `wants_chains` and are told of each request's blocks.
    """

    wants_tags: ClassVar[bool] = False
    wants_chains: ClassVar[bool] = False

    def __init__(self, capacity: int, arrays: ArraySource = heap_arrays) -> None:
        self.capacity = capacity

    def expect(self, tags: Sequence[int]) -> None:  # noqa: B027 - most orders need not know
        """Blocks with these tags will be inserted; told before room is made for them.

        Only orders that learn from ghosts can use it. It may be called more than once or not at
        all, and the blocks may never come.
        """

    @abstractmethod
    def insert(self, slots: Sequence[int], tags: Sequence[int]) -> None:
        """Add slots that are not present, least recent first."""

    def insert_cold(self, slots: Sequence[int], tags: Sequence[int]) -> None:
        """Add slots that are not present and of whose use nothing is known: first to leave.

        In the order given. An order that cannot put them there takes them as new ones.
        """
        self.insert(slots, tags)

    @abstractmethod
    def touch(self, slots: Sequence[int]) -> None:
        """A use of slots that are present, least recent first."""

    @abstractmethod
    def settle(self, slots: Sequence[int]) -> None:
        """These were inserted bit by bit and belong in this order, least recent first; no use."""

    def chain(self, slots: Sequence[int], blocks: int) -> None:  # noqa: B027 - most need not know
        """A request of `blocks` blocks ended; `slots`, first block first, are of those still here.

        Only as far as none is missing: what lies behind a gap cannot be used.
        """

    @abstractmethod
    def remove(self, slots: Sequence[int]) -> None:
        """Forget slots without a ghost (their blocks are gone for other reasons)."""

    @abstractmethod
    def evicted(self, slots: Sequence[int], tags: Sequence[int]) -> None:
        """Forget slots because their blocks were evicted; ghosts may be kept."""

    @abstractmethod
    def victims(
        self,
        limit: int,
        wanted: Callable[[int], bool],
        mask: SlotMask | None = None,
        window: int | None = None,
    ) -> list[int]:
        """Up to `limit` slots that `wanted` accepts, in the order they would leave; no change.

        Slots that are False in `mask` are passed over before `wanted` is asked. `window` bounds
        how many of the coldest slots are looked at.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget all slots and ghosts."""

    @abstractmethod
    def reconcile(self, present: npt.NDArray[Any]) -> None:
        """After a crash: hold exactly the slots in `present` (ascending), order kept as known."""

    @abstractmethod
    def __contains__(self, slot: object) -> bool:
        """True if the slot is in the order."""
