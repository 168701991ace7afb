"""What the manager remembers of one request between its first lookup and its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..tiers.base import BlockHash, BlockStatus
from .worth import Decision


@dataclass(slots=True, eq=False)
class Request:
    """State of one request; made by the adapter, handed to every call that concerns it."""

    request_id: str = ""
    allowed_media: frozenset[str] | None = None
    """Media this request may read from; None means all."""
    arrived_s: float = 0.0
    """When it came, on the adapter's clock; for recordings."""
    keys: dict[BlockHash, bool] = field(default_factory=dict)
    """Blocks it used, in prefix order, and whether it brought them itself (or reused them): their
    recency is set once, when it ends."""
    missed: set[BlockHash] = field(default_factory=set)
    """Blocks whose way up failed or took too long: a miss from now on."""
    holds: dict[BlockHash, BlockStatus] = field(default_factory=dict)
    """Ready blocks of the first tier that are pinned while others of its prefix are on the way."""
    pending: set[BlockHash] = field(default_factory=set)
    """Blocks on their way up, while it waits: asked again, nothing new can be said of them."""
    pending_until_s: float = math.inf
    """The first of their deadlines."""
    retry_misses: set[BlockHash] = field(default_factory=set)
    """What was nowhere when it was first told to ask again, while it waits for that."""
    waiting_since_s: float | None = None
    """When a lookup was first answered "ask again"; None while it does not wait."""

    sources: dict[BlockHash, str] = field(default_factory=dict)
    """Medium that a loaded block came from, where it is not the first tier's."""
    has_promotions: bool = False
    """True once a block was promoted for it while it waits."""

    decision: Decision = Decision.OPEN
    """Whether blocks are brought up for it, or computed again."""
    missed_at: BlockHash | None = None
    """The first block that it missed when it last asked: from here on it computes."""
    is_computing: bool = False
    """True once blocks that it computed were taken."""
    counted_blocks: int = 0
    """Computed blocks of an offer that was put off: it comes again, and they were counted."""
    put_offs: int = 0
    """Times that an offer of its blocks was put off, since one was last taken."""
    put_off: set[BlockHash] = field(default_factory=set)
    """Blocks that were put off, and no later offer with them taken; when it ends, they are lost."""

    is_plain: bool = True
    """True while a ready block is a hit and nothing else need be thought of."""

    def __post_init__(self) -> None:
        self.is_plain = self.allowed_media is None

    def may_read(self, medium: str) -> bool:
        """True if it may read from this medium."""
        return self.allowed_media is None or medium in self.allowed_media

    def begin_wait(self, now_s: float) -> None:
        """Parts of its prefix are on their way from now on."""
        self.waiting_since_s = now_s
        self.is_plain = False

    def end_wait(self) -> None:
        """It is served, over, or waited too long."""
        self.waiting_since_s = None
        self.has_promotions = False
        self.retry_misses.clear()
        self.forget_pending()
        self.is_plain = self.allowed_media is None

    def note_put_off(self, block_hashes: Sequence[BlockHash]) -> None:
        """These blocks shall be offered again. Of those that the engine leaves out then, as their
        window moved on, nothing is heard any more."""
        self.put_offs += 1
        self.put_off.update(block_hashes)

    def note_taken(self, offered: Sequence[BlockHash]) -> None:
        """An offer was taken: what was put off, if it is the one that comes again."""
        if self.put_off and not self.put_off.isdisjoint(offered):
            self.put_offs = 0
            self.put_off.difference_update(offered)

    def note_pending(self, block_hash: BlockHash, deadline_s: float) -> None:
        """The block is on its way, and this request waits for it."""
        self.pending.add(block_hash)
        if deadline_s < self.pending_until_s:
            self.pending_until_s = deadline_s

    def forget_pending(self) -> None:
        """Every block is looked at anew when it is asked for."""
        self.pending.clear()
        self.pending_until_s = math.inf

    @property
    def is_waiting(self) -> bool:
        """True while parts of its prefix are on their way."""
        return self.waiting_since_s is not None
