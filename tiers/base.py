"""The contracts of a tier: its slots (`Backend`) and its order of eviction (`CachePolicy`).

Names and semantics follow vLLM's offloading framework (`vllm.v1.kv_offload`), so a reader of one
knows the terms of the other. Nothing here imports vLLM or torch.

Threads: a `Backend` and a `CachePolicy` belong to the thread (or lock) of the manager that owns
them. None of their methods may block on a file. `kvcascade.handlers` moves the bytes.
"""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Sequence
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


class CachePolicy(ABC):
    """The blocks of a tier and their order of eviction.

    Both are one class, because a policy may keep ghosts of evicted blocks.
    """

    wants_chains: bool = False
    """Whether the policy uses `note_chain`; it need not be called otherwise."""

    expects: bool = False
    """Whether the policy uses `expect`; it need not be called otherwise."""

    ref_counts: RefCounts | None = None
    """View of the backend's slots, if it has one; set by the owner of both."""

    @abstractmethod
    def get(self, block_hash: BlockHash) -> BlockStatus | None:
        """Return the block's status, or None. Does not change recency."""

    def get_many(self, block_hashes: Sequence[BlockHash]) -> list[BlockStatus | None]:
        """Return the status of each block, or None; fastest in prefix order."""
        return list(map(self.get, block_hashes))

    @abstractmethod
    def insert(self, block_hash: BlockHash, status: BlockStatus) -> None:
        """Add a block that is absent; it becomes the most recent one."""

    @abstractmethod
    def remove(self, block_hash: BlockHash) -> BlockStatus | None:
        """Remove a block in any state and return its status, or None if it was absent."""

    @abstractmethod
    def touch(self, block_hashes: Iterable[BlockHash]) -> None:
        """Note a use of blocks, given in prefix order; unknown ones are ignored.

        The first block becomes the most recent one, so the tail of a prefix leaves before its head.
        """

    @abstractmethod
    def evict(
        self, n: int, protected: Container[BlockHash], mask: SlotMask | None = None
    ) -> Pairs | None:
        """Remove exactly `n` idle, unprotected blocks and return them, coldest first.

        Return None, and change nothing, if there are not that many. Blocks with `ref_cnt != 0` are
        never evicted, nor are blocks whose slot is False in `mask`. The slots stay allocated; the
        caller frees them.
        """

    @abstractmethod
    def coldest(
        self,
        n: int,
        protected: Container[BlockHash] = (),
        mask: SlotMask | None = None,
        window: int | None = None,
    ) -> Pairs:
        """Return up to `n` blocks that `evict` would remove, in that order; change nothing.

        `window` bounds the search to about that many of the blocks that would leave next.
        """

    @abstractmethod
    def clear(self) -> None:
        """Remove every block and every ghost. Slots stay allocated."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of blocks present."""

    ready_at: list[BlockHash]
    """Hash of the ready block in each slot (`mark_ready`); empty for any other slot.

    The last item is an empty hash. If `mark_ready` is ignored, it is the only one."""

    def mark_ready(  # noqa: B027 - may be ignored
        self, block_hashes: Sequence[BlockHash], slots: Sequence[int]
    ) -> None:
        """Mark blocks as complete; they stay complete until they are removed."""

    def expect(self, block_hashes: Iterable[BlockHash]) -> None:  # noqa: B027 - may be ignored
        """Announce missing blocks that will be inserted; the policy can learn before `evict`.

        It may be called more than once or not at all, and the blocks may never be inserted.
        """

    @abstractmethod
    def settle(self, block_hashes: Iterable[BlockHash]) -> None:
        """Put blocks that one request inserted in parts into the order of its prompt.

        This is not a use. Among blocks that were not used since, the last one leaves first.
        """

    def note_chain(self, block_hashes: Sequence[BlockHash]) -> None:  # noqa: B027 - may be ignored
        """Note the blocks of an ended request in prefix order, instead of `settle` and `touch`.

        It counts as a use of the blocks that are present. The absent ones tell the length of the
        request. The first blocks may be absent if the engine had them itself.
        """

    def insert_many(
        self, block_hashes: Sequence[BlockHash], statuses: Sequence[BlockStatus]
    ) -> None:
        """Insert blocks in prefix order; the first is the most recent afterwards."""
        for block_hash, status in zip(reversed(block_hashes), reversed(statuses), strict=True):
            self.insert(block_hash, status)


RESET_TICKS_PER_S = 1_000_000
"""Units of a reset's mark per second."""


def new_reset_mark() -> int:
    """Return a number that names a reset for all tiers and engines; later ones are greater.

    It is the wall-clock time.
    """
    return time.time_ns() * RESET_TICKS_PER_S // 1_000_000_000
