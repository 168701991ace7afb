"""Lookups of blocks, for the requests that a scheduler considers in a step.

A hit in the first tier takes no lock. While a request is asking, only the scheduler's own calls
remove blocks from that tier. Asking begins under the lock. Blocks missing there are searched below,
and claimed for the request (`ClaimQueue`).

While a request waits, no new search starts, and its answers come from memory.

The scheduler's thread calls these methods. The manager's lock is held where state changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from ..tiers.base import BlockHash, BlockStatus
from .base import HIT, MISS, PENDING, RETRY, LookupState
from .below.port import ASKING
from .core import ManagerCore
from .counters import Reason
from .promotion.claim_queue import ClaimQueue
from .promotion.promoter import Promoter
from .promotion.worth import Worth
from .request import Request
from .workers import WorkerTransfers

MAX_LOOKS_PER_STEP = 4096
"""Number of blocks that one step searches below, at 3 to 11 µs for each block found. Requests that
ask for more are asked again in the next step. Many simultaneous requests therefore do not stall the
others."""


class Answers:
    """Hits and misses of the lookups of one step, and the slot in which the next hit is likely.

    A prefix is stored into adjacent slots, in order. After a hit, the next block is therefore
    expected in the next slot. Comparing its hash with that slot's is cheaper than a search of the
    dictionary, and its cost does not grow with the tier. The hits of such a run are recorded by its
    two ends only.

    The scheduler's thread writes these objects. A background thread may call `hits` under the
    manager's lock while no request is asking, when there are none.

    The adapter of vLLM inlines the hit in a run: if `ready_at[at]` equals the hash, the block is a
    hit, and `at` grows by one.
    """

    __slots__ = (
        "_hits",
        "_mark",
        "_nowhere",
        "_hit_set",
        "_hits_in_set",
        "_start",
        "at",
        "misses",
        "ready_at",
    )

    def __init__(self, ready_at: list[BlockHash]) -> None:
        self.ready_at = ready_at
        """Hash of the ready block in each slot. An empty hash means no block; the last entry is
        always empty."""
        self._nowhere = len(self.ready_at) - 1
        self.at = self._nowhere
        """Slot after the slot of the last hit."""
        self.misses = 0
        """Number of misses of the request that is asking, since the counters took them in."""
        self._start = self._nowhere
        self._hits: list[BlockHash] = []
        self._mark = 0
        self._hit_set: set[BlockHash] = set()
        self._hits_in_set = 0
        """Number of hits that are in `_hit_set`."""

    def begin(self) -> None:
        """Start the lookups of another request."""
        self._end_run()
        self._mark = len(self._hits)

    def hit(self, block_hash: BlockHash, slot: int | None = None) -> None:
        """Record a hit found by a search. If its slot is given, a run begins behind it."""
        self._end_run()
        self._hits.append(block_hash)
        if slot is not None:
            self.at = self._start = min(slot + 1, self._nowhere)

    def _end_run(self) -> None:
        if self.at > self._start:
            self._hits += self.ready_at[self._start : self.at]
        self.at = self._start = self._nowhere

    def hits(self) -> Set[BlockHash]:
        """Return all hits of this step, and end the run. These blocks must stay until it ends.

        Each hit is added to the set once, however many stores ask.
        """
        self._end_run()
        self._hit_set.update(self._hits[self._hits_in_set :])
        self._hits_in_set = len(self._hits)
        return self._hit_set

    def of_request(self) -> list[BlockHash]:
        """Return the hits since `begin`, and end the run: the next block is searched."""
        self._end_run()
        return self._hits[self._mark :]

    def clear(self) -> None:
        """End the step: forget its hits."""
        self.at = self._start = self._nowhere
        self._hits.clear()
        self._mark = self._hits_in_set = 0
        self._hit_set.clear()


@dataclass(eq=False)
class Lookups:
    """Lookups of one step."""

    _lock: AbstractContextManager[Any]
    _core: ManagerCore
    _promoter: Promoter
    _claims: ClaimQueue
    _workers: WorkerTransfers
    _worth: Worth | None
    """Receives the misses of requests, because the requests compute these blocks."""
    answers: Answers
    _collect: Callable[[], object]
    """Takes in what ended below."""
    top_get: Callable[[BlockHash], BlockStatus | None] = field(init=False)
    """Function that returns the status of a block in the first tier. Adapters use it to inline the
    plain hit."""
    asking: Request | None = None
    """Request of the last lookup in this step. While there is one, blocks must stay in the first
    tier."""
    _is_waiting: bool = False
    """True if the request that is asking waits for an earlier lookup."""
    _has_collected: bool = False
    """True if this step has taken in what ended below, for the requests that wait. The end of the
    step would do it too late: its requests would see them one step of the model later."""
    _looks: int = 0
    """Number of blocks searched below in this step."""
    _missing: list[Request] = field(default_factory=list)
    """Requests that missed a block in this step and need not wait for others."""

    def __post_init__(self) -> None:
        self.top_get = self._core.top.policy.get

    @property
    def is_single(self) -> bool:
        """True if every block outside the first tier is a miss."""
        return self._core.is_single

    def lookup(self, block_hashes: Iterable[BlockHash], request: Request) -> int | None:
        """Return the length of the longest prefix of hits; None: ask again."""
        hits, is_waiting = 0, False
        for block_hash in block_hashes:
            state = self.lookup_block(block_hash, request)
            if self._is_waiting:
                return None
            if state is MISS:
                break
            if state is HIT:
                hits += 1
            else:
                is_waiting = True
        return None if is_waiting else hits

    def lookup_block(self, block_hash: BlockHash, request: Request) -> LookupState:
        """Return the state of one block. A hit lasts until the end of the step, or its
        `prepare_load`.

        The call is lock-free if the block is ready in the first tier, or in flight for this
        request.
        """
        if request is not self.asking:
            self.begin_asking(request, block_hash)
        status = self.top_get(block_hash)
        if status is not None and status.ref_cnt >= 0:
            if request.claim is None and request.allowed_media is None:  # no further checks
                self.answers.hit(block_hash, status.block_id)
                return HIT
            if block_hash in request.holds:
                self.answers.hit(block_hash)
                return HIT
        elif block_hash in request.pending:
            return PENDING
        return self.look_below(block_hash, status, request)

    def begin_asking(self, request: Request, first: BlockHash) -> bool:
        """Start the lookups of this request, which last until the end of the step.

        `first` is the first block. Return True if the request still waits for blocks of an earlier
        step, or for the answer of a tier elsewhere. Every answer then makes the engine ask again.
        """
        with self._lock:  # from here on, the background removes no block of the first tier
            self._count_misses()
            self.asking = request
            if request.awaited is not None and not self._claims.choice.may_read_elsewhere(request):
                # The answer is of use all the same: blocks that are there need no upload.
                request.awaited, request.awaits_answers = None, False
            is_waiting = bool(request.pending) or request.awaited is not None
            if is_waiting and not self._has_collected:
                self._has_collected = True
                self._collect()
            request.missed_at, request.first = None, first
            self.answers.begin()
            if request.claim is not None:
                self._is_waiting = self._claims.must_wait(request.claim, first)
            else:
                self._is_waiting = request.awaited is not None and self._is_awaited(request)
        return self._is_waiting

    def look_below(
        self, block_hash: BlockHash, status: BlockStatus | None, request: Request
    ) -> LookupState:
        """Look up a block that is no plain hit; `status` is the result of `top_get`.

        RETRY means that the whole request waits; it need not be looked up again in this step.
        """
        if status is None and self._core.is_single:
            self.answers.misses += 1
            return MISS
        with self._lock:
            state = self._state_below(block_hash, status, request)
            if state is MISS:
                self._note_miss(block_hash, request)
            return state

    def end_step(self) -> None:
        """End a step with lookups, also after a reset: its hits are no longer protected."""
        if self._worth is not None:
            for request in self._missing:
                self._worth.expect_computing(request)
        self._missing.clear()
        self._count_misses()
        self.answers.clear()
        self.asking = None
        self._has_collected = False
        self._looks = 0

    def note_progress(self, request: Request | None) -> None:
        """End the wait of a request that loads, or that computes its prefix and stores it.

        Its later misses count again.
        """
        if request is not None:
            self._count_misses()
            request.counted_misses = 0
            if request.claim is not None:
                self._claims.release(request)

    def _count_misses(self) -> None:
        """Count the misses of the lookups that end, without those that the request had before.

        A request that waits for blocks of the device asks again in every step.
        """
        request = self.asking
        new = self.answers.misses - (0 if request is None else request.counted_misses)
        self.answers.misses = 0
        if new > 0:
            self._core.counters.lookup_misses += new
            if request is not None:
                request.counted_misses += new

    def _note_miss(self, block_hash: BlockHash, request: Request) -> None:
        is_first = request.missed_at is None
        if is_first:
            request.missed_at = block_hash
        claim = request.claim
        if claim is None or (claim.is_admitted and not request.pending):  # else it asks again
            self.answers.misses += 1
            if is_first and not request.is_computing:
                self._missing.append(request)

    def _is_awaited(self, request: Request) -> bool:
        """Return True if the answer about a block of an earlier step is still awaited."""
        assert request.awaited is not None
        below, media = self._core.below, request.allowed_media
        if below.may_hold(request.awaited, media, request) == ASKING:
            return True
        request.awaited = None
        return False

    def _state_below(
        self, block_hash: BlockHash, status: BlockStatus | None, request: Request
    ) -> LookupState:
        if status is not None and not request.may_read(self._core.top.medium):
            status = None
        if status is not None and status.ref_cnt >= 0:
            self.answers.hit(block_hash)
            claim = request.claim
            if claim is not None and not claim.is_admitted:  # it was made in this step
                claim.wanted[block_hash] = 0
            return HIT
        if self._is_waiting:
            return self._state_while_waiting(block_hash, request)
        if block_hash in request.missed or block_hash in self._workers.outdated:
            return MISS
        pending = self._promoter.pending.get(block_hash)
        if pending is not None:
            medium = self._core.below.tiers[pending.tier - 1].medium
            if pending.is_late or not request.may_read(medium):
                return MISS
            return self._claims.want(block_hash, 0, request)
        if status is not None:
            return self._wait_for_store(block_hash, request)
        if self._looks >= MAX_LOOKS_PER_STEP and request.claim is None:
            return RETRY
        self._looks += 1
        owner = request if request.awaits_answers else None
        tier = self._core.below.may_hold(block_hash, request.allowed_media, owner)
        if tier > 0:
            return self._claims.want(block_hash, tier, request)
        if tier != ASKING:
            return MISS
        if request.awaited is None:
            request.awaited = block_hash
        return PENDING

    def _state_while_waiting(self, block_hash: BlockHash, request: Request) -> LookupState:
        if block_hash in request.pending:
            return PENDING
        claim = request.claim
        if claim is None:  # it waits for an answer
            return RETRY
        is_wanted = not claim.is_admitted and block_hash in claim.wanted
        return RETRY if is_wanted else MISS

    def _wait_for_store(self, block_hash: BlockHash, request: Request) -> LookupState:
        """Treat a block that a worker is storing as pending until the request's deadline."""
        options = self._core.options
        if not options.waits_for_stores:
            return MISS
        now_s = self._core.clock()
        if request.storing_since_s is None:
            request.storing_since_s = now_s
        if now_s < request.storing_since_s + options.promotion_deadline_s:
            return self._claims.want(block_hash, 0, request)
        request.missed.add(block_hash)
        self._core.counters.recomputed_blocks[Reason.DEADLINE] += 1
        return MISS
