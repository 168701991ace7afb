"""Which earlier job of the other direction a job must wait for, so that the two never race.

The engine and the manager keep stores and loads of one page or slot apart (see `device`). This is
the second line: their rules differ between versions, and a race would be wrong bytes. Per device
block and per slot the board keeps the number of the last job of each direction that touches it;
a job must come after every earlier job of the other direction with which it shares one. Jobs of
one direction run in order anyway. Vectorised; a few microseconds per job.

Belongs to the thread that submits.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from .geometry import GroupRows


class Direction(IntEnum):
    """Which way a job copies."""

    STORE = 0
    LOAD = 1

    @property
    def other(self) -> Direction:
        """The opposite direction."""
        return Direction(1 - self)


class HazardBoard:
    """Counts jobs per direction, from 1, and remembers who touched what last."""

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        """Numbers of device blocks and of slots."""
        self._blocks: npt.NDArray[np.int64] = np.zeros((2, num_blocks), dtype=np.int64)
        self._slots: npt.NDArray[np.int64] = np.zeros((2, num_slots), dtype=np.int64)
        self._last = [0, 0]

    def admit(self, direction: Direction, rows: Sequence[GroupRows]) -> tuple[int, int]:
        """Number a job and say which job it comes after.

        Returns (number of this job in its direction, number of the newest job of the other
        direction that must have ended before this one starts; 0 for none).
        """
        self._last[direction] += 1
        number = self._last[direction]
        after = 0
        for each in rows:
            after = max(
                after,
                int(self._blocks[direction.other, each.blocks].max()),
                int(self._slots[direction.other, each.slots].max()),
            )
            self._blocks[direction, each.blocks] = number
            self._slots[direction, each.slots] = number
        return number, after
