"""Load or recompute: which of two queues is expected to serve a request first?

    load       = (bytes ahead of it + its own) / read rate of the tier
    recompute  = (tokens ahead of it + its own) / prefill speed

Ahead of it are, in one queue, blocks on their way and those of requests whose turn comes first; in
the other one, what earlier requests still have to compute. If everybody computes, everybody waits.

A request recomputes only if loading is expected to take `CONSERVATIVE` times as long: what is not
known (nothing was read or computed yet) speaks for loading, and both measurements err to that side.
A device that was slow once is not avoided for ever: now and then a few blocks are read all the
same, for which nobody waits. That is a *probe*.

Nothing here takes a time: "now" is passed in, in seconds of any monotonic clock. Used under the
manager's lock only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..tiers.base import BlockHash

if TYPE_CHECKING:
    from .request import Request

CONSERVATIVE = 2.0
"""Loading must be expected to take this many times as long as recomputing before it is refused."""

SAMPLE_BYTES_MIN = 8 << 20
SAMPLE_S_MIN = 0.05
"""A read that is both smaller and shorter than these says more of latency than of rate; it only
counts where it was faster than what was known."""
SLOWER_SHARE = 0.25
FASTER_SHARE = 0.5
"""Weight of a new sample in the rate: one stall shall not decide, a recovery shall be seen soon."""

PROBE_INTERVAL_S = 5.0
PROBE_S = 0.5
PROBE_BYTES_MAX = 16 << 20
"""At most one probe in this interval, of what should be read in this time, and at most this."""

PREFILL_TOKENS_MIN = 256
PREFILL_WINDOW_S = 1.0
PREFILL_SHARE = 0.25
STEPS_UNTIL_COMPUTED = 3
"""End of a step after which what was offered before it is computed: scheduling runs ahead by one,
and some engines end a step after they offered, others before."""


class LinkSpeed:
    """How fast bytes come up one link: what arrived while it was busy, jobs side by side."""

    def __init__(self) -> None:
        self.in_flight_bytes = 0
        """Sent, not landed."""
        self._bytes_per_s: float | None = None
        self._since_s = 0.0
        self._arrived_bytes = 0

    def sent(self, size_bytes: int, now_s: float) -> None:
        """A job was started."""
        if not self.in_flight_bytes:
            self._since_s, self._arrived_bytes = now_s, 0
        self.in_flight_bytes += size_bytes

    def landed(self, size_bytes: int, arrived_bytes: int, now_s: float) -> None:
        """A job of `size_bytes` ended; `arrived_bytes` of it are there."""
        self.in_flight_bytes -= size_bytes
        self._arrived_bytes += arrived_bytes
        elapsed_s = now_s - self._since_s
        if not self._arrived_bytes or elapsed_s <= 0:
            return
        sample = self._arrived_bytes / elapsed_s
        known = self._bytes_per_s
        is_faster = known is not None and sample > known
        if elapsed_s < SAMPLE_S_MIN and self._arrived_bytes < SAMPLE_BYTES_MIN and not is_faster:
            return
        if known is None:
            self._bytes_per_s = sample
        else:  # a mean of logarithms: ten times slower weighs as much as ten times faster
            share = FASTER_SHARE if is_faster else SLOWER_SHARE
            self._bytes_per_s = known * (sample / known) ** share
        self._since_s, self._arrived_bytes = now_s, 0

    def bytes_per_s(self, now_s: float) -> float:
        """The rate, `inf` while it is unknown.

        While nothing arrives it cannot be higher than what is on its way over the time so far.
        """
        known = math.inf if self._bytes_per_s is None else self._bytes_per_s
        waited_s = now_s - self._since_s
        if self.in_flight_bytes and waited_s >= SAMPLE_S_MIN:
            return min(known, (self.in_flight_bytes + self._arrived_bytes) / waited_s)
        return known

    def expected_s(self, size_bytes: int, now_s: float) -> float:
        """Seconds until this much more has arrived, behind what is on its way."""
        return (self.in_flight_bytes + size_bytes) / self.bytes_per_s(now_s)


class PrefillSpeed:
    """Tokens computed per second, from what a scheduler shows: blocks offered, and steps.

    A scheduler offers blocks when it schedules their tokens, and ends later steps when these are
    computed. The time from the first offer to `STEPS_UNTIL_COMPUTED` steps after the last one
    covers the computation and a little more, so the figure errs to the low side. So does the time
    until all of them are stored; an engine that goes idle then takes no more steps.
    """

    def __init__(self, given_tokens_per_s: float | None = None) -> None:
        """A speed that is given is not measured."""
        self._is_given = given_tokens_per_s is not None
        self.tokens_per_s = given_tokens_per_s
        """None while it is unknown."""
        self._since_s: float | None = None
        self._tokens = 0.0
        self._steps_left = 0
        self._has_put_off = False
        """Some of what was offered was not taken: that all is stored says nothing of it."""

    def offered(self, tokens: float, now_s: float, is_taken: bool = True) -> None:
        """Blocks of so many tokens, being computed now, were offered for the first time."""
        if self._is_given:
            return
        if self._since_s is None:
            self._since_s, self._tokens, self._has_put_off = now_s, 0.0, False
        self._tokens += tokens
        self._has_put_off |= not is_taken
        self._steps_left = STEPS_UNTIL_COMPUTED

    def end_step(self, now_s: float) -> None:
        """A step of the scheduler ended."""
        self._steps_left -= 1
        if self._since_s is not None:
            if self._steps_left <= 0 or now_s - self._since_s >= PREFILL_WINDOW_S:
                self._end_sample(now_s)

    def all_stored(self, now_s: float) -> None:
        """Everything that was taken is stored, and so it was computed."""
        if not self._has_put_off:
            self._end_sample(now_s)

    def _end_sample(self, now_s: float) -> None:
        if self._since_s is None:
            return
        elapsed_s = now_s - self._since_s
        if self._tokens >= PREFILL_TOKENS_MIN and elapsed_s > 0:
            sample, known = self._tokens / elapsed_s, self.tokens_per_s
            self.tokens_per_s = (
                sample if known is None else known + PREFILL_SHARE * (sample - known)
            )
        self._since_s = None


class Backlog:
    """Tokens that requests have yet to compute, as far as they are known.

    A request adds what it misses when it is answered, and takes away what it offers to be stored.
    Of a prompt whose length the engine does not tell, what lies below is known at least.
    """

    def __init__(self) -> None:
        self.tokens = 0.0
        self._left: dict[Request, float] = {}
        self._blocks: dict[BlockHash, Request] = {}
        """Blocks that lie below and are computed all the same, and who computes them."""

    def expect(self, request: Request, tokens: float, blocks: Sequence[BlockHash] = ()) -> None:
        """The request computes so many tokens from now on, these blocks of a lower tier included.

        Replaces the tokens that were expected of it.
        """
        left = self._left.get(request, 0.0)
        if tokens == left and not blocks:
            return
        self.tokens += tokens - left
        self._left[request] = tokens
        self._blocks.update(dict.fromkeys(blocks, request))

    def computed(self, request: Request, tokens: float) -> None:
        """The request has computed so many of them."""
        left = self._left.get(request)
        if left is not None:
            self._left[request] = max(0.0, left - tokens)
            self.tokens -= min(left, tokens)

    def end(self, request: Request) -> None:
        """The request computes no more."""
        left = self._left.pop(request, None)
        if left is not None:
            self.tokens -= left
            self._blocks = {h: r for h, r in self._blocks.items() if r is not request}

    def __contains__(self, block_hash: BlockHash) -> bool:
        """True if the block lies below, and a request computes it all the same."""
        return block_hash in self._blocks

    def shared(self, blocks: Sequence[BlockHash]) -> int:
        """How many of these blocks a request computes already."""
        return sum(h in self._blocks for h in blocks) if self._blocks else 0


class Worth:
    """Compares the two queues for one request. `links[i]` are reads from tier `i + 1` below."""

    def __init__(
        self,
        links: int,
        block_bytes: int,
        tokens_per_block: float,
        prefill: PrefillSpeed,
        served_end: bytes = b"",
    ) -> None:
        """`tokens_per_block`: of a block whose hash has this end; others stand for none."""
        self.links = [LinkSpeed() for _ in range(links)]
        self.prefill = prefill
        self.backlog = Backlog()
        self.tokens_per_block = tokens_per_block
        self._block_bytes = block_bytes
        self._served_end = served_end
        self._probe_due_s = -math.inf

    def note_offer(
        self, offered: Sequence[BlockHash], request: Request, is_taken: bool, now_s: float
    ) -> None:
        """Blocks of a request were offered to be stored.

        An offer begins with blocks that the device held already; those that the request missed were
        computed. An offer that is put off comes again, and longer: each block counts when it is
        first offered, which is when it is computed. (When an offer is taken at last says how fast
        the tier below is.) An offer that shares nothing with one that was put off stands beside it.
        """
        if request.put_off and request.put_off.isdisjoint(offered):
            return
        if self._served_end:
            offered = [h for h in offered if h.endswith(self._served_end)]
        computed = len(offered)
        if not request.is_computing:
            if request.missed_at is None or request.missed_at not in offered:
                return
            computed -= offered.index(request.missed_at)
        new = computed - request.counted_blocks
        request.is_computing |= is_taken
        request.counted_blocks = 0 if is_taken else computed
        if new > 0:
            self.prefill.offered(new * self.tokens_per_block, now_s, is_taken)
            self.backlog.computed(request, new * self.tokens_per_block)

    def expect_computing(self, request: Request, below: Sequence[BlockHash] = ()) -> None:
        """The request computes from its first miss to its prompt's end, or at least `below`.

        What another request computes already is not computed again.
        """
        served = [h for h in below if h.endswith(self._served_end) and h not in self.backlog]
        positions = request.positions
        tokens = len(served) * self.tokens_per_block
        start = positions.get(request.missed_at) if request.missed_at is not None else None
        if start is not None:
            end = positions[next(reversed(positions))]
            tokens = max(tokens, end - start + self.tokens_per_block)
        if tokens:
            self.backlog.expect(request, tokens, served)

    def is_hopeless(self, level: int, now_s: float) -> bool:
        """True if blocks of this level come up slower, each, than they are recomputed.

        Then no number of them is worth it, and there is no need to wait for the number.
        """
        link = self.links[level - 1]
        return self._block_bytes / link.bytes_per_s(now_s) > self._patience_s(1)

    def saved_blocks(self, wanted: Sequence[BlockHash], chain: Sequence[BlockHash]) -> int:
        """How many blocks need not be computed if those in `wanted` are loaded, of all in `chain`.

        A window or a state is of use together with all that is before it, and the other way round.
        """
        end, saved = self._served_end, len(wanted)
        if end:
            saved = sum(h.endswith(end) for h in wanted)
            if saved < len(wanted):
                saved = sum(h.endswith(end) for h in chain)
        return saved or len(wanted)

    def is_worth(
        self,
        blocks: Sequence[int],
        queued: Sequence[int],
        now_s: float,
        saved: int | None = None,
    ) -> bool:
        """True if so many blocks of each level should be loaded.

        `blocks[i]` lie in level `i`; `queued[i]` of others wait in level `i` to be sent; `saved`
        blocks need not be computed then, or as many as are loaded.
        """
        longest_s = 0.0
        for level, link in enumerate(self.links, start=1):
            if blocks[level]:
                size_bytes = (blocks[level] + queued[level]) * self._block_bytes
                longest_s = max(longest_s, link.expected_s(size_bytes, now_s))
        return longest_s <= self._patience_s(sum(blocks) if saved is None else saved)

    def may_probe(self, level: int, now_s: float) -> bool:
        """True if the last probe was long ago and nothing is on its way from this level."""
        return not self.links[level - 1].in_flight_bytes and now_s >= self._probe_due_s

    def probe_blocks(self, level: int, now_s: float) -> int:
        """Begin a probe; returns how many blocks to read for it."""
        self._probe_due_s = now_s + PROBE_INTERVAL_S
        bytes_per_s = self.links[level - 1].bytes_per_s(now_s)
        return max(1, int(min(PROBE_BYTES_MAX, bytes_per_s * PROBE_S)) // self._block_bytes)

    def _patience_s(self, blocks: int) -> float:
        """How long loading so many blocks may take to be the better choice."""
        speed = self.prefill.tokens_per_s
        if speed is None:
            return math.inf
        return CONSERVATIVE * (self.backlog.tokens + blocks * self.tokens_per_block) / speed
