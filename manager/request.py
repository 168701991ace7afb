"""What the manager remembers of one request between its first lookup and its end."""

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
    """Neighbours that are alike new or reused, the last ones of the prompt first.

    If recency is set run by run, tails leave before heads.
    """
    return [(new, list(run)) for new, run in groupby(in_order, is_new)][::-1]


@dataclass(slots=True, eq=False)
class Request:
    """State of one request; made by the adapter, handed to every call that concerns it."""

    request_id: str = ""
    allowed_media: frozenset[str] | None = None
    """Media this request may read from; None means all."""
    arrived_s: float = 0.0
    """When the request came, on the adapter's clock; for recordings."""
    positions: dict[BlockHash, int] = field(default_factory=dict)
    """Last token of each block of the prompt, as far as the engine tells; vLLM does from 0.31 on.
    The engine owns it, and adds to it while the request lives."""
    keys: dict[BlockHash, bool] = field(default_factory=dict)
    """Blocks that the request used, in the order named. True: the request stored the block; False:
    it loaded or reused it. Their recency is set once, when the request ends."""
    missed: set[BlockHash] = field(default_factory=set)
    """Blocks that could not be brought up in time: misses for this request from now on."""
    recomputes: bool = False
    """True once computing was judged faster than reading: nothing is brought up for it any more."""

    claim: Claim | None = None
    """The blocks that it waits for; None while it does not wait."""
    holds: dict[BlockHash, BlockStatus] = field(default_factory=dict)
    """Ready blocks of the first tier that are pinned for it until it loads them."""
    pending: set[BlockHash] = field(default_factory=set)
    """Blocks on their way up to the first tier that it waits for."""
    storing_since_s: float | None = None
    """When it first asked for a block that a worker is still storing; None: it did not."""

    sources: dict[BlockHash, str] = field(default_factory=dict)
    """Medium that a loaded block came from, where it is not the first tier's."""

    missed_at: BlockHash | None = None
    """The first block that it missed when it last asked: it computes from here on."""
    is_computing: bool = False
    """True once blocks that it computed were taken."""
    counted_blocks: int = 0
    """Blocks that were counted as computed when their offer was put off: it comes again."""
    put_offs: int = 0
    """How often an offer of its blocks was put off since one was last taken."""
    put_off: set[BlockHash] = field(default_factory=set)
    """Blocks that were put off and not offered since. They are lost if the request ends now."""

    is_plain: bool = True
    """True while a ready block is a hit and nothing else need be considered."""

    def __post_init__(self) -> None:
        self.is_plain = self.allowed_media is None

    def in_prompt_order(self, block_hashes: Collection[BlockHash]) -> list[BlockHash]:
        """Blocks of the request, the head of its prompt first.

        An engine may offer a later block first. A block without a position follows the one before
        it in the order given.
        """
        positions = self.positions
        if not positions:
            return list(block_hashes)
        if not all(map(positions.__contains__, block_hashes)):
            last = 0
            positions = {h: (last := self.positions.get(h, last)) for h in block_hashes}
        return sorted(block_hashes, key=positions.__getitem__)

    def may_read(self, medium: str) -> bool:
        """True if it may read from this medium."""
        return self.allowed_media is None or medium in self.allowed_media

    def begin_wait(self, claim: Claim) -> None:
        """Some of its blocks must be waited for."""
        self.claim = claim
        self.is_plain = False

    def end_wait(self) -> None:
        """It is served, over, or gave up."""
        self.claim = None
        self.storing_since_s = None
        self.pending.clear()
        self.is_plain = self.allowed_media is None

    def note_stored(self, offered: Sequence[BlockHash], new: Sequence[BlockHash]) -> None:
        """It offered blocks, and `new` ones of them are being stored.

        What is known of a block stays: to offer again what it stored is no use, and a block that
        it reused, and stores again since it left, was used.
        """
        noted, keys = dict.fromkeys(offered, False) | dict.fromkeys(new, True), self.keys
        if keys:
            noted |= {block_hash: keys[block_hash] for block_hash in noted.keys() & keys.keys()}
        keys.update(noted)

    def note_put_off(self, block_hashes: Sequence[BlockHash]) -> None:
        """These blocks shall be offered again.

        An engine never offers those again that its sliding window has passed meanwhile.
        """
        self.put_offs += 1
        self.put_off.update(block_hashes)

    def note_taken(self, offered: Sequence[BlockHash]) -> None:
        """An offer was taken. It counts as the repeated one if it shares a block with it."""
        if self.put_off and not self.put_off.isdisjoint(offered):
            self.put_offs = 0
            self.put_off.difference_update(offered)
