"""The contract of the manager: what is where, and what moves next. No I/O, no torch.

Names and semantics follow vLLM's `OffloadingManager`. All methods are called by one thread, the
scheduler's, unless a method says otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from ..tiers.base import BlockHash, LoadStoreSpec


class LookupState(Enum):
    """The answer to "is this block there?"."""

    MISS = "miss"
    HIT = "hit"
    """Loadable now, and until the end of this step."""
    PENDING = "pending"
    """Known and on its way; ask again. Ends as HIT or MISS by a deadline."""
    RETRY = "retry"
    """Known, but its way up is not free yet; ask again. Ends by a deadline."""


@dataclass(frozen=True, slots=True)
class PrepareStoreOutput:
    """What a worker shall store, and where."""

    block_hashes_to_store: list[BlockHash]
    """A subset of what was offered, in its order."""
    store_spec: LoadStoreSpec
    """Where they go, in the same order."""
    block_hashes_evicted: list[BlockHash]
    """What left the first tier to make room."""


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """Blocks that came to, or left, a medium."""

    block_hashes: tuple[BlockHash, ...]
    medium: str
    removed: bool
    tier: str = ""
    """Name of the tier."""


class OffloadingManager(ABC):
    """Decides where blocks live."""

    @abstractmethod
    def lookup(self, block_hashes: Iterable[BlockHash]) -> int | None:
        """Length of the longest run of consecutive blocks, from the first, that can be loaded.

        None: blocks of the run are on their way, ask again.
        """

    @abstractmethod
    def prepare_load(self, block_hashes: Collection[BlockHash]) -> LoadStoreSpec:
        """Pin blocks that were answered as hits; returns where the worker finds them."""

    @abstractmethod
    def complete_load(self, block_hashes: Collection[BlockHash]) -> None:
        """The worker has read them: undo one `prepare_load`."""

    @abstractmethod
    def prepare_store(self, block_hashes: Sequence[BlockHash]) -> PrepareStoreOutput | None:
        """Take slots for the blocks that are not present, evicting if need be.

        None: slots are busy and waiting a little helps; offer the same list again. A list that
        can never fit is taken as far as it fits, from its start.
        """

    @abstractmethod
    def complete_store(self, block_hashes: Collection[BlockHash], success: bool = True) -> None:
        """The worker wrote them: they become loadable; if not `success`, they are removed."""

    @abstractmethod
    def touch(self, block_hashes: Iterable[BlockHash]) -> None:
        """A use without a read, in prefix order; heads outlive tails."""

    @abstractmethod
    def take_events(self) -> list[BlockEvent]:
        """Everything that was stored or removed since the last call, in order."""
