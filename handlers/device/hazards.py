"""Find the earlier job of the other direction that a job must wait for.

The engine and the manager keep stores and loads of one page or slot apart (see `copier`). This is a
second check, because their rules differ between versions and a race would give wrong bytes. For
each device block and slot the board keeps the number of the last job of each direction that touches
it. A job must wait for every earlier job of the other direction that touches one of its blocks or
slots. Jobs of one direction run in order anyway. The check is vectorised and takes a few
microseconds per job.

Threads: only the thread that submits may use the board.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .copier import Direction
from .geometry import GroupRows


class HazardBoard:
    """Numbers the jobs of each direction from 1, and keeps the last job of each block and slot."""

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        """`num_blocks` and `num_slots` are the numbers of device blocks and of slots."""
        self._blocks: npt.NDArray[np.int64] = np.zeros((2, num_blocks), dtype=np.int64)
        self._slots: npt.NDArray[np.int64] = np.zeros((2, num_slots), dtype=np.int64)
        self._last = [0, 0]

    def admit(self, direction: Direction, rows: Sequence[GroupRows]) -> tuple[int, int]:
        """Number a job and find the job that it must wait for.

        Return the number of this job in its direction. Also return the number of the newest job of
        the other direction that must end before this one starts, or 0 for none.
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
