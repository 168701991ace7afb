"""State of one request between its first lookup and its end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

from ..tiers.base import BlockHash, BlockStatus

if TYPE_CHECKING:
    from .claims import Claim


Hash = TypeVar("Hash", bound=bytes)


def runs_from_the_end(
    in_order: Iterable[Hash], is_new: Callable[[Hash], bool]
) -> list[tuple[bool, list[Hash]]]:
    """Split blocks in prompt order into runs of new or reused blocks. Return the last run first.

    Each entry is the pair of `is_new` and the blocks of the run. If the caller sets recency run by
    run, tails are evicted before heads.
    """
    return [(new, list(run)) for new, run in groupby(in_order, is_new)][::-1]


@dataclass(slots=True, eq=False)
class Request:
    """State of one request. The adapter creates it and passes it to every call for this request."""

    request_id: str = ""
    allowed_media: frozenset[str] | None = None
    """Media that this request may read from; None means all."""
    arrived_s: float = 0.0
    """Arrival time of the request on the adapter's clock, for recordings."""
    positions: dict[BlockHash, int] = field(default_factory=dict)
    """Position of the last token of each block of the prompt, as far as the engine reports it (vLLM
    from 0.31 on). The engine owns the dictionary and adds to it during the request."""
    keys: dict[BlockHash, bool] = field(default_factory=dict)
    """Blocks that the request used, in order of use. True: the request stored the block; False: it
    loaded or reused it. Their recency is set once, at the end of the request."""
    missed: set[BlockHash] = field(default_factory=set)
    """Blocks whose promotion failed or was late. They stay misses for this request."""
    recomputes: bool = False
    """True once computing was expected to be faster. No block is promoted for the request then."""

    asked: BlockHash | None = None
    """First block about which a tier elsewhere has to be asked; None while there is none."""
    claim: Claim | None = None
    """Claim on the blocks that the request waits for; None while it does not wait."""
    holds: dict[BlockHash, BlockStatus] = field(default_factory=dict)
    """Ready blocks of the first tier that are pinned until the request loads them."""
    pending: set[BlockHash] = field(default_factory=set)
    """Blocks in promotion that the request waits for."""
    storing_since_s: float | None = None
    """Time of the first lookup of a block that a worker is still storing; None: there was none."""

    sources: dict[BlockHash, str] = field(default_factory=dict)
    """Medium of the tier from which a loaded block was read, if it is not the first tier."""

    missed_at: BlockHash | None = None
    """First block that missed in the last lookup. The request computes from this block on."""
    is_computing: bool = False
    """True once computed blocks of the request were stored."""
    counted_blocks: int = 0
    """Number of blocks counted as computed in a deferred store. The engine offers them again."""
    deferrals: int = 0
    """Number of consecutive stores of this request that were deferred."""
    deferred: set[BlockHash] = field(default_factory=set)
    """Blocks of deferred stores that were not offered again. They are lost if the request ends."""

    is_plain: bool = True
    """True while every ready block is a hit without further checks."""

    def __post_init__(self) -> None:
        self.is_plain = self.allowed_media is None

    def in_prompt_order(self, block_hashes: Collection[BlockHash]) -> list[BlockHash]:
        """Return the blocks in the order of the prompt.

        An engine may offer a later block first. A block without a position stays behind its
        predecessor in `block_hashes`.
        """
        positions = self.positions
        if not positions:
            return list(block_hashes)
        if not all(map(positions.__contains__, block_hashes)):
            last = 0
            positions = {h: (last := self.positions.get(h, last)) for h in block_hashes}
        return sorted(block_hashes, key=positions.__getitem__)

    def may_read(self, medium: str) -> bool:
        """Return True if the request may read from this medium."""
        return self.allowed_media is None or medium in self.allowed_media

    def begin_wait(self, claim: Claim) -> None:
        """Start to wait for the blocks of a claim."""
        self.claim = claim
        self.is_plain = False

    def end_wait(self) -> None:
        """End the wait: the request is served, has ended, or gave up."""
        self.claim = None
        self.storing_since_s = None
        self.pending.clear()
        self.is_plain = self.allowed_media is None

    def note_stored(self, offered: Sequence[BlockHash], new: Sequence[BlockHash]) -> None:
        """Record an offer of blocks, of which the `new` ones are being stored.

        A known block keeps its entry. An offer of a block that the request stored before is not a
        use. A block that the request reused stays reused, even if it is stored again after an
        eviction.
        """
        noted, keys = dict.fromkeys(offered, False) | dict.fromkeys(new, True), self.keys
        if keys:
            noted |= {block_hash: keys[block_hash] for block_hash in noted.keys() & keys.keys()}
        keys.update(noted)

    def note_deferred(self, block_hashes: Sequence[BlockHash]) -> None:
        """Record a deferred store. The engine should offer its blocks again.

        It never does so for blocks that its sliding window has passed since.
        """
        self.deferrals += 1
        self.deferred.update(block_hashes)

    def note_taken(self, offered: Sequence[BlockHash]) -> None:
        """Record an accepted store. It repeats the deferred ones if it shares a block with them."""
        if self.deferred and not self.deferred.isdisjoint(offered):
            self.deferrals = 0
            self.deferred.difference_update(offered)
