"""Answers of the manager: the state of a block, the slots of a store, and events.

Names follow vLLM's `OffloadingManager`.
"""

from __future__ import annotations

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


MISS, HIT = LookupState.MISS, LookupState.HIT
PENDING, RETRY = LookupState.PENDING, LookupState.RETRY
"""The members, for lookups: an attribute of an enum costs 75 ns with Python 3.11."""


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
