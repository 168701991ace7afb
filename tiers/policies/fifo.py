"""First in, first out."""

from __future__ import annotations

from collections.abc import Sequence

from .lru import LruOrder


class FifoOrder(LruOrder):
    """FIFO: evicts the slot that was filled longest ago; uses change nothing. 20 bytes a slot."""

    _name = "fifo"

    def touch(self, slots: Sequence[int]) -> None:
        pass
