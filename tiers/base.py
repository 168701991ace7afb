"""The contracts of a tier: where blocks live (`Backend`) and who leaves next (`CachePolicy`).

Names and semantics follow vLLM's offloading framework (`vllm.v1.kv_offload`), so that a reader of
one finds the way in the other. Nothing here imports vLLM or torch.

Threads: a `Backend` and a `CachePolicy` belong to the thread (or lock) of the manager that owns
them; none of their methods may block on a file. Moving bytes is the job of `kvcascade.handlers`.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType

import numpy as np
import numpy.typing as npt

BlockHash = NewType("BlockHash", bytes)
"""The chained prefix hash that identifies a block; opaque, of any length up to 255 bytes."""

SlotArray = npt.NDArray[np.int32]
"""Slot numbers, shape `(n,)`."""

NOT_READY = -1
"""`BlockStatus.ref_cnt` of a block whose bytes have not arrived yet."""


class BlockStatus(ctypes.Structure):
    """One block's place in a tier.

    `ref_cnt`: -1 the bytes have not arrived, 0 idle, n > 0: n transfers read it now.
    `block_id`: the slot. A status is a live view: writing `ref_cnt` takes effect for every holder.
    """

    _fields_ = [("ref_cnt", ctypes.c_int32), ("block_id", ctypes.c_int32)]

    ref_cnt: int
    block_id: int

    @property
    def is_ready(self) -> bool:
        """True if the block's bytes are complete and may be read."""
        return self.ref_cnt >= 0


class BlockOutcome(Enum):
    """What became of one block of a transfer."""

    OK = "ok"
    GONE = "gone"  # the source no longer holds this block (evicted, replaced, reset)
    CORRUPT = "corrupt"  # bytes arrived but length or checksum do not match
    IO_ERROR = "io_error"  # the device failed; the block may still be there
    NO_SPACE = "no_space"  # the destination is full
    CANCELLED = "cancelled"  # never started
    HELD = "held"  # not written: another process stored the same block there first
    REFUSED = "refused"  # not written: no room for a moment, though nothing failed nor is full


class LoadStoreSpec(ABC):
    """Where a list of blocks lies in one medium; picklable, travels to the workers."""

    @staticmethod
    @abstractmethod
    def medium() -> str:
        """Name of the medium, such as `"CPU"`."""


@dataclass(frozen=True, slots=True)
class SlotSpec(LoadStoreSpec):
    """Slots of a medium that is addressed by slot number alone."""

    slots: SlotArray
    """Slot numbers in the order of the blocks."""

    @staticmethod
    def medium() -> str:
        return "CPU"


@dataclass(frozen=True, slots=True)
class Moved:
    """Blocks that came to a tier or left it without the manager's doing."""

    block_hashes: list[BlockHash]
    """Some may be named although they came back or left again meanwhile."""
    removed: bool


class Backend(ABC):
    """Slots that hold bytes. Knows nothing of recency; does no I/O on the caller's thread."""

    is_lasting: bool = False
    """True if the medium keeps the blocks: a shutdown need not write them anywhere else."""

    def __init__(self, block_size: int, medium: str, capacity: int) -> None:
        """`block_size` in bytes, `capacity` in slots."""
        self.block_size = block_size
        self.medium = medium
        self.capacity = capacity

    @abstractmethod
    def get_num_free_blocks(self) -> int:
        """Slots that `allocate_blocks` could give now."""

    def get_num_possible_blocks(self) -> int:
        """Slots that could be given without evicting, if asked for bit by bit: the free ones, and
        those that are made when they are needed, as far as it is known that they can be."""
        return self.get_num_free_blocks()

    @abstractmethod
    def allocate_blocks(self, block_hashes: Sequence[BlockHash]) -> list[BlockStatus]:
        """Take one slot per hash, adjacent where possible; each status has `ref_cnt == -1`.

        Raises `NoSpaceError`, and takes nothing, if fewer slots are free.
        """

    @abstractmethod
    def free(self, status: BlockStatus) -> None:
        """Give a slot back, exactly once per allocation. Sets its `ref_cnt` to 0."""

    def free_many(self, statuses: Sequence[BlockStatus]) -> None:
        """`free` for many."""
        for status in statuses:
            self.free(status)

    def avoid(self, slots: Sequence[int]) -> bool:
        """Blocks could not be written there: where there is a choice, give out others for a while.

        Until then those that become free there do not count as free. False if there are no others.
        """
        return False

    @abstractmethod
    def get_load_store_spec(
        self, block_hashes: Sequence[BlockHash], statuses: Sequence[BlockStatus]
    ) -> LoadStoreSpec:
        """Where these blocks lie, in this order."""

    @abstractmethod
    def reset(self) -> list[BlockStatus]:
        """Free every idle slot at once; returns the busy ones (`ref_cnt != 0`).

        Those stay allocated until `free`. The policy is cleared by the caller.
        """

    def maintain(self, policy: CachePolicy) -> bool:
        """Upkeep at the end of a step, and about every 50 ms in an idle engine; must not wait.

        `policy` is told which blocks came to this tier or went without the manager's doing, and
        `tell_found` who asked for that. True if another process reset the tier: the caller must
        clear the policy and `reset` this.
        """
        return False

    def tell_found(self, told: Callable[[SlotArray], None]) -> None:  # noqa: B027 - may have none
        """Call `told` with the slots whose blocks another process put there.

        At once with those that an earlier one left, all of them, and from now on in `maintain`
        with those of slots that are taken over. A tier that ends with its process has none.
        """

    def take_moved(self) -> Moved | None:
        """Blocks that came or went in `maintain`, to be told to others: a batch of bounded size.

        Asked at every step by who wants to know; nothing is noted before the first time.
        """
        return None

    def close(self) -> None:  # noqa: B027 - optional for implementers
        """Release everything; idempotent. No other method may be called afterwards."""


SlotMask = npt.NDArray[np.bool_]
"""One flag per slot of a tier, shape `(capacity,)`."""


class CachePolicy(ABC):
    """Which blocks a tier holds, and which leave next.

    Organisation and replacement belong together: a policy may keep ghosts of what left.
    """

    wants_chains: bool = False
    """True if the policy makes use of `note_chain`; others need not be told."""

    @abstractmethod
    def get(self, block_hash: BlockHash) -> BlockStatus | None:
        """The block's status, or None. Does not change recency."""

    def get_many(self, block_hashes: Sequence[BlockHash]) -> list[BlockStatus | None]:
        """`get` for many, best in prefix order."""
        return list(map(self.get, block_hashes))

    def owns(self, block_hash: BlockHash) -> bool:
        """True if the block is here and is not another process's."""
        return self.get(block_hash) is not None

    @abstractmethod
    def insert(self, block_hash: BlockHash, status: BlockStatus) -> None:
        """Add a block that is not present; it becomes the most recent one."""

    @abstractmethod
    def remove(self, block_hash: BlockHash) -> BlockStatus | None:
        """Forget a block, whatever its state; returns its status, None if it was not there."""

    @abstractmethod
    def touch(self, block_hashes: Iterable[BlockHash]) -> None:
        """A use of these blocks, given in prefix order; unknown ones are ignored.

        The first of them is the most recent afterwards, so that tails leave before heads.
        """

    @abstractmethod
    def evict(
        self, n: int, protected: Container[BlockHash], mask: SlotMask | None = None
    ) -> list[tuple[BlockHash, BlockStatus]] | None:
        """Remove exactly `n` idle, unprotected blocks and return them, coldest first.

        Returns None, with no change of any state, if there are not that many. Blocks with
        `ref_cnt != 0` never leave, nor do those whose slot is False in `mask`. The slots stay
        allocated: the caller frees them.
        """

    @abstractmethod
    def coldest(
        self,
        n: int,
        protected: Container[BlockHash] = (),
        mask: SlotMask | None = None,
        window: int | None = None,
    ) -> list[tuple[BlockHash, BlockStatus]]:
        """Up to `n` blocks that `evict` would take, in that order; changes nothing.

        `window` bounds the search to about that many of the blocks that would leave next.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget every block and every ghost. Slots stay allocated."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of blocks present."""

    ready_at: list[BlockHash] | None = None
    """By slot, the blocks that `mark_ready` named and that are still here, else an empty hash; one
    more of those at the end. A policy need not offer it: it only makes hits faster to find."""

    def mark_ready(  # noqa: B027 - may be ignored
        self, block_hashes: Sequence[BlockHash], slots: Sequence[int]
    ) -> None:
        """The bytes of these blocks are complete, and stay so until they are removed."""

    def expect(self, block_hashes: Iterable[BlockHash]) -> None:  # noqa: B027 - may be ignored
        """These blocks are missing and will be inserted: a chance to learn before `evict`.

        It may be called more than once or not at all, and the blocks may never come.
        """

    @abstractmethod
    def settle(self, block_hashes: Iterable[BlockHash]) -> None:
        """Blocks that one request inserted bit by bit, in the order of its prompt.

        Not a use: among blocks that were never used since, the last one leaves first afterwards.
        """

    @abstractmethod
    def adopt(self, block_hashes: Sequence[BlockHash], slots: Sequence[int]) -> None:
        """These blocks are in the tier already, put there by another process: the coldest ones."""

    @abstractmethod
    def disown(self, slots: Sequence[int]) -> None:
        """Forget what lies in these slots, and that it was here; another process has them now."""

    def note_chain(self, block_hashes: Sequence[BlockHash]) -> None:  # noqa: B027 - may be ignored
        """The blocks of one request in prefix order, told when it ends, not `settle` and `touch`.

        A use of those that are present; the others tell how long the request was. The first ones
        may be missing, if the engine had them itself.
        """

    def insert_many(
        self, block_hashes: Sequence[BlockHash], statuses: Sequence[BlockStatus]
    ) -> None:
        """`insert` for a list in prefix order: the first is the most recent afterwards."""
        for block_hash, status in zip(reversed(block_hashes), reversed(statuses), strict=True):
            self.insert(block_hash, status)
