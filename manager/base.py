"""Contract of the manager, which decides where each block is stored and which one moves next.

The manager does no I/O and does not use torch. Names and semantics follow vLLM's
`OffloadingManager`. The scheduler's thread calls all methods, unless a method says otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from ..tiers.base import BlockHash, LoadStoreSpec


class LookupState(Enum):
    """State of a block that was looked up."""

    MISS = "miss"
    HIT = "hit"
    """The block can be loaded until the end of this step."""
    PENDING = "pending"
    """The block is in flight to the first tier; ask again. It becomes a HIT or MISS by a deadline.
    """
    RETRY = "retry"
    """The block is below, and its promotion cannot start yet; ask again. This ends by a deadline.
    """


@dataclass(frozen=True, slots=True)
class PrepareStoreOutput:
    """Blocks that a worker should store, and their slots."""

    block_hashes_to_store: list[BlockHash]
    """Hashes of the blocks to store: a subset of the offered ones, in the same order."""
    store_spec: LoadStoreSpec
    """Slots of these blocks, in the same order."""
    block_hashes_evicted: list[BlockHash]
    """Hashes of the blocks that were evicted from the first tier to make room."""


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """Blocks that were stored on a medium, or removed from it."""

    block_hashes: tuple[BlockHash, ...]
    medium: str
    removed: bool
    tier: str = ""
    """Name of the tier."""


class OffloadingManager(ABC):
    """Decide where each block is stored."""

    @abstractmethod
    def lookup(self, block_hashes: Iterable[BlockHash]) -> int | None:
        """Return the length of the longest prefix of blocks that can be loaded.

        None: blocks of this prefix are in flight; ask again.
        """

    @abstractmethod
    def prepare_load(self, block_hashes: Collection[BlockHash]) -> LoadStoreSpec:
        """Pin blocks that were hits. Return the slots that the worker reads."""

    @abstractmethod
    def complete_load(self, block_hashes: Collection[BlockHash]) -> None:
        """Undo one `prepare_load`, because the worker has read the blocks."""

    @abstractmethod
    def prepare_store(self, block_hashes: Sequence[BlockHash]) -> PrepareStoreOutput | None:
        """Take slots for the blocks that are absent, and evict others if necessary.

        None: no slot is free now, but some will be soon; offer the same list again. Of a list that
        can never fit, as many of the first blocks are taken as fit.
        """

    @abstractmethod
    def complete_store(self, block_hashes: Collection[BlockHash], success: bool = True) -> None:
        """Make blocks loadable that the worker wrote; if not `success`, remove them."""

    @abstractmethod
    def touch(self, block_hashes: Iterable[BlockHash]) -> None:
        """Count a use without a read. The blocks come in prefix order; tails are evicted first."""

    @abstractmethod
    def take_events(self) -> list[BlockEvent]:
        """Return the blocks stored or removed since the last call, in order."""
