"""The contract of moving KV pages between a worker's device tensors and its part of the arena.

One object serves both directions of one worker. All calls come from the worker's main thread. What
the engine guarantees: a source page of a store is not written before the store was reported or
waited for; a destination page of a load is neither read nor written until the load is reported; it
asks what ended in every step, and does not discard pages, as for sleep, before every store was
reported or made void by a reset (vLLM 0.16 to 0.19 may, see `v0_16`). So a job may go on in
such calls alone.
What the manager guarantees: a slot is loaded from only after its store was reported by all ranks,
and stored to only while nobody reads it. What an implementation must do: run the jobs of one
direction in submission order, keep jobs apart that touch the same slot or page (see `hazards`), and
never raise or fail for a job it has accepted: the engine does not survive that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...tiers.base import SlotArray
from ..base import TransferResult


@dataclass(frozen=True, slots=True)
class GpuBlocks:
    """Device blocks of one job, group after group."""

    block_ids: npt.NDArray[np.int32]
    """Device block numbers of all KV groups, shape `(n,)`."""
    group_sizes: tuple[int, ...]
    """Number of device blocks per KV group; they add up to n."""
    block_indices: tuple[int, ...]
    """Per group, place of its first block in the request, counted in device blocks. Modulo
    `blocks_per_chunk` it says where in the first slot the group starts."""

    @classmethod
    def of(
        cls, block_ids: Sequence[int], group_sizes: Sequence[int], block_indices: Sequence[int]
    ) -> GpuBlocks:
        """From plain lists."""
        ids = np.asarray(block_ids, dtype=np.int32)
        return cls(ids, tuple(group_sizes), tuple(block_indices))


class DeviceCopier(ABC):
    """Moves pages between device and arena, asynchronously."""

    @abstractmethod
    def submit_store(self, job_id: int, blocks: GpuBlocks, slots: SlotArray) -> bool:
        """Start device -> arena; returns at once. `slots` are in the order of the blocks' chunks.

        False, and nothing is done, only after `shutdown`.
        """

    @abstractmethod
    def submit_load(self, job_id: int, blocks: GpuBlocks, slots: SlotArray) -> bool:
        """Start arena -> device; like `submit_store`."""

    @abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """Jobs that ended since the last call, each exactly once. Never blocks."""

    @abstractmethod
    def wait(self, job_ids: Set[int]) -> None:
        """Block until these jobs ended; unknown and finished ids are ignored."""

    @abstractmethod
    def shutdown(self, deadline_s: float = 5.0) -> None:
        """Let what is under way finish, at most `deadline_s` seconds; idempotent.

        What has not finished is dropped, and never reported. The arena may be closed afterwards.
        """
