"""The contract of a tier's slots (`Backend`), and the terms that all tiers share.

Names and semantics follow vLLM's offloading framework (`vllm.v1.kv_offload`), so a reader of one
knows the terms of the other. Nothing here imports vLLM or torch.

Threads: a `Backend` and a `CachePolicy` belong to the thread (or lock) of the manager that owns
them. None of their methods may block on a file. `kvcascade.handlers` moves the bytes.
"""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import NewType

import numpy as np
import numpy.typing as npt

BlockHash = NewType("BlockHash", bytes)
"""Chained prefix hash that identifies a block: opaque bytes, at most 255."""

GROUP_BYTES = 4
"""Length of the KV group's number, with which vLLM's hashes of blocks end."""

SlotArray = npt.NDArray[np.int32]
"""Slot numbers: int32 array of shape `(n,)`."""

RefCounts = npt.NDArray[np.int32]
"""Live view of the `ref_cnt` of every slot, shape `(capacity,)`; 0 for free slots."""

NOT_READY = -1
"""Value of `BlockStatus.ref_cnt` for a block whose bytes have not arrived yet."""


class BlockStatus(ctypes.Structure):
    """The place of one block in a tier.

    `ref_cnt` is -1 until the bytes have arrived, 0 for an idle block, and n > 0 while n transfers
    read it. `block_id` is the slot. A status is a live view: every holder sees a change of
    `ref_cnt`.
    """

    _fields_ = [("ref_cnt", ctypes.c_int32), ("block_id", ctypes.c_int32)]

    ref_cnt: int
    block_id: int


slot_of = attrgetter("block_id")
"""Returns the slot of a `BlockStatus`."""

Pairs = list[tuple[BlockHash, BlockStatus]]
"""Blocks of a tier, with their places."""


class BlockOutcome(Enum):
    """Outcome of one block of a transfer."""

    OK = "ok"
    GONE = "gone"  # the source no longer holds this block (evicted, replaced, reset)
    CORRUPT = "corrupt"  # bytes arrived but length or checksum do not match
    IO_ERROR = "io_error"  # the device failed; the block may still exist
    NO_SPACE = "no_space"  # the destination is full
    CANCELLED = "cancelled"  # the transfer never started
    HELD = "held"  # not written: another process stored the same block there first
    REFUSED = "refused"  # over the write budget, or dropped by a remote tier before its turn


@dataclass(frozen=True, slots=True)
class LoadStoreSpec:
    """Places of a list of blocks in one medium."""

    slots: SlotArray
    """Slot numbers in the order of the blocks."""


class Backend(ABC):
    """Slots of one medium. It knows no recency and does no I/O on the caller's thread."""

    def __init__(self, block_size: int, medium: str, capacity: int) -> None:
        """Make a backend of `capacity` slots with `block_size` bytes each."""
        self.block_size = block_size
        self.medium = medium
        self.capacity = capacity

    @property
    def ref_counts(self) -> RefCounts | None:
        """Reference counts, which make searches among pinned blocks fast; None if there is no
        view."""
        return None

    @abstractmethod
    def get_num_free_blocks(self) -> int:
        """Number of slots that `allocate_blocks` could return now."""

    @abstractmethod
    def allocate_blocks(self, block_hashes: Sequence[BlockHash]) -> list[BlockStatus]:
        """Allocate one slot per hash, adjacent where possible; each status has `ref_cnt == -1`.

        Raises `NoSpaceError`, and allocates nothing, if fewer slots are free.
        """

    @abstractmethod
    def free(self, status: BlockStatus) -> None:
        """Free a slot, exactly once per allocation. Sets its `ref_cnt` to 0."""

    def free_many(self, statuses: Sequence[BlockStatus]) -> None:
        """Free many slots."""
        for status in statuses:
            self.free(status)

    @abstractmethod
    def reset(self) -> list[BlockStatus]:
        """Free every idle slot at once, and return the busy ones (`ref_cnt != 0`).

        Busy slots stay allocated until `free`. The caller clears the policy.
        """


SlotMask = npt.NDArray[np.bool_]
"""One flag for each slot of a tier, shape `(capacity,)`."""

RESET_TICKS_PER_S = 1_000_000
"""Units of a reset's mark per second."""


def new_reset_mark() -> int:
    """Return a number that names a reset for all tiers and engines; later ones are greater.

    It is the wall-clock time.
    """
    return time.time_ns() * RESET_TICKS_PER_S // 1_000_000_000
