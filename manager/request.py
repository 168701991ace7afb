"""State of one request between its first lookup and its end, and the changes at its end."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from ..tiers.base import BlockHash, BlockStatus

if TYPE_CHECKING:
    from .core import ManagerCore
    from .demotion import Aging
    from .promotion.claim_queue import ClaimQueue
    from .promotion.claims import Claim
    from .promotion.worth import Worth


@dataclass(slots=True, eq=False)
class Request:
    """State of one request. The adapter creates it and passes it to every call for this request."""

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
    touched: dict[BlockHash, None] = field(default_factory=dict)
    """Blocks that the engine touched, in the order of the prompt. vLLM up to 0.30 touches all of
    them, before they are stored. A block that the request does not store is reused."""
    missed: set[BlockHash] = field(default_factory=set)
    """Blocks whose promotion failed or was late. They stay misses for this request."""
    too_slow: frozenset[int] = frozenset()
    """Numbers of the tiers that were expected to take longer than computing. No block is promoted
    from them for the request."""
    has_run: bool = False
    """True if it stored or loaded since its last lookups, so it was preempted if there are more."""
    awaits_answers: bool = True
    """True if the answers of tiers elsewhere may help it. Otherwise it does not ask any more."""

    first: BlockHash | None = None
    """First block of its lookups of this step, or of the last step with any."""
    awaited: BlockHash | None = None
    """First block about which the answer of a tier elsewhere is awaited; None if none is."""
    claim: Claim | None = None
    """Claim on the blocks that the request waits for; None while it does not wait."""
    holds: dict[BlockHash, BlockStatus] = field(default_factory=dict)
    """Ready blocks of the first tier that are pinned until the request loads them."""
    pending: set[BlockHash] = field(default_factory=set)
    """Blocks in promotion that the request waits for."""
    storing_since_s: float | None = None
    """Time of the first lookup of a block that a worker is still storing; None: there was none."""

    sources: dict[BlockHash, str] = field(default_factory=dict)
    """Medium of the tier from which each block of the last load was read, if it is not the first
    tier."""

    missed_at: BlockHash | None = None
    """First block that missed in the last lookup. The request computes from this block on."""
    counted_misses: int = 0
    """Number of misses that were counted since the request began, or last loaded or stored."""
    is_computing: bool = False
    """True once computed blocks of the request were stored."""
    counted_blocks: int = 0
    """Number of blocks counted as computed in a deferred store. The engine offers them again."""
    deferrals: int = 0
    """Number of consecutive stores of this request that were deferred."""
    deferred: dict[BlockHash, None] = field(default_factory=dict)
    """Blocks of deferred stores that were not offered again, in the order of their offers. They are
    lost if the request ends."""

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

    def end_wait(self) -> None:
        """End the wait: the request is served, has ended, or gave up."""
        self.claim = self.awaited = None
        self.storing_since_s = None
        self.pending.clear()

    def note_deferred(self, block_hashes: Sequence[BlockHash]) -> None:
        """Record a deferred store. The engine should offer its blocks again.

        It never does so for blocks that its sliding window has passed since.
        """
        self.deferrals += 1
        self.deferred.update(dict.fromkeys(block_hashes))

    def note_stored(self, offered: Sequence[BlockHash], new: Sequence[BlockHash]) -> None:
        """Record an accepted store, of which the `new` blocks are being stored.

        It repeats the deferred ones if it shares a block with them.

        A known block keeps its entry. An offer of a block that the request stored before is not a
        use. A block that the request reused stays reused, even if it is stored again after an
        eviction.
        """
        if self.deferred and not self.deferred.keys().isdisjoint(offered):
            self.deferrals = 0
            for block_hash in offered:
                self.deferred.pop(block_hash, None)
        noted, keys = dict.fromkeys(offered, False) | dict.fromkeys(new, True), self.keys
        if keys:
            noted |= {block_hash: keys[block_hash] for block_hash in noted.keys() & keys.keys()}
        keys.update(noted)


@dataclass(frozen=True, slots=True, eq=False)
class RequestEnds:
    """Changes at the end of a request: claim, pins and recency. Used under the manager's lock."""

    _core: ManagerCore
    _claims: ClaimQueue
    _worth: Worth | None
    _aging: Aging | None

    def end(self, request: Request) -> None:
        """Drop the request's claim and pins, and set the recency of its blocks.

        Recency is set once per request and in the order of its prompt. Tails are thus evicted
        before heads, whatever the number of lookups and the order of stores and transfers.
        """
        if request.claim is not None or request.holds:
            self._claims.release(request)
        if self._worth is not None:
            self._worth.backlog.end(request)
        request.missed_at = None  # it computes no more, also if its step has not ended
        self._core.counters.store_lost_blocks += len(request.deferred)
        request.deferred.clear()
        used, request.keys = request.keys, {}
        if request.touched:
            used = dict.fromkeys(request.touched, False) | used
            request.touched.clear()
        if not used:
            return
        in_order = request.in_prompt_order(used)
        # The chain is reported to the first tier only: demotion brings its blocks to a tier below
        # much later, which an eviction policy there would count as a reuse.
        policy = self._core.top.policy
        if policy.wants_chains:
            policy.note_chain(in_order)
        else:
            for is_new, run in groupby(reversed(in_order), used.__getitem__):  # tails before heads
                (policy.settle if is_new else policy.touch)([*run][::-1])
        if not self._core.is_single and not all(used.values()):
            self._note_reuse(used)

    def _note_reuse(self, used: dict[BlockHash, bool]) -> None:
        """Count the uses of reused blocks. Mark those dirty that a tier below may take now.

        If tier 1 lacks a settled block, admission refused it, and may accept it now.
        """
        top, below = self._core.top, self._core.below
        get, settled, may_refuse = top.policy.get, top.dirt.settled, top.uses.past is not None
        found: list[BlockStatus] = []
        wanted: list[BlockHash] = []
        slots: list[int] = []
        for block_hash, is_new in used.items():
            status = None if is_new else get(block_hash)
            if status is None or status.ref_cnt < 0:
                continue
            found.append(status)
            if not settled[status.block_id]:
                continue
            if (may_refuse and below.may_hold(block_hash) != 1) or below.wants_again(block_hash):
                wanted.append(block_hash)
                slots.append(status.block_id)
        top.uses.note_reuse(found)
        if wanted:
            top.dirt.set_dirty(slots)
            if self._aging is not None:
                self._aging.note(wanted)
