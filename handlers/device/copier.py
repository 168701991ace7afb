"""The contract of copiers, which move KV pages between a worker's device tensors and the arena.

One object serves both directions of one worker. All calls come from the worker's main thread.

The engine guarantees:

- It does not write to a source page of a store before the store was reported or waited for.
- It neither reads nor writes a destination page of a load before the load was reported.
- It calls `get_finished` in every step, so a job may advance in these calls only.
- It discards pages, as for sleep, only after every store was reported or made void by a reset.
  vLLM 0.16 to 0.19 may discard them earlier (see `v0_16`).

The manager guarantees that a slot is loaded only after all ranks have reported its store. It also
guarantees that a slot is stored only while no transfer reads it.

An implementation must run the jobs of one direction in submission order. It must keep jobs apart
that touch the same slot or page (see `hazards`). It must never raise or fail for an accepted job,
because that ends the engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from ...tiers.base import SlotArray


class Direction(IntEnum):
    """Direction of a job between device and arena."""

    STORE = 0
    LOAD = 1

    @property
    def other(self) -> Direction:
        """The opposite direction."""
        return Direction(1 - self)


@dataclass(frozen=True, slots=True)
class GpuBlocks:
    """Device blocks of one job, ordered by KV group."""

    block_ids: npt.NDArray[np.int32]
    """Numbers of the device blocks of all KV groups, shape `(n,)`."""
    group_sizes: tuple[int, ...]
    """Number of device blocks in each KV group; the sum is n."""
    block_indices: tuple[int, ...]
    """Position of each group's first block in its request, in device blocks. Its remainder modulo
    `blocks_per_chunk` is the position in the group's first slot."""

    @classmethod
    def of(
        cls, block_ids: Sequence[int], group_sizes: Sequence[int], block_indices: Sequence[int]
    ) -> GpuBlocks:
        """Build it from plain lists."""
        ids = np.asarray(block_ids, dtype=np.int32)
        return cls(ids, tuple(group_sizes), tuple(block_indices))


@dataclass(frozen=True, slots=True)
class TransferResult:
    """Result of a finished job."""

    job_id: int
    success: bool
    """True if every block arrived."""
    size_bytes: int = 0
    """Bytes that the job moved."""
    time_s: float = 0.0
    """Seconds from the start of the copy to its end, without the time in a queue."""


class DeviceCopier(ABC):
    """Moves pages between device and arena asynchronously."""

    @abstractmethod
    def submit(
        self, direction: Direction, job_id: int, blocks: GpuBlocks, slots: SlotArray
    ) -> bool:
        """Start a copy between device and arena, and return at once.

        `slots` are in the order of the blocks' chunks. Return False, with nothing done, only after
        `shutdown`.
        """

    def submit_store(self, job_id: int, blocks: GpuBlocks, slots: SlotArray) -> bool:
        """Start a copy from device to arena: see `submit`."""
        return self.submit(Direction.STORE, job_id, blocks, slots)

    def submit_load(self, job_id: int, blocks: GpuBlocks, slots: SlotArray) -> bool:
        """Start a copy from arena to device: see `submit`."""
        return self.submit(Direction.LOAD, job_id, blocks, slots)

    @abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that ended since the last call, each exactly once. Never blocks."""

    @abstractmethod
    def wait(self, job_ids: Set[int]) -> None:
        """Block until these jobs have ended. Unknown and finished ids are ignored."""

    @abstractmethod
    def shutdown(self, deadline_s: float = 5.0) -> None:
        """Wait at most `deadline_s` seconds for jobs in flight. Idempotent.

        Jobs that have not finished are dropped and never reported. The arena may be closed
        afterwards.
        """
