"""Load or recompute: decide which of two queues is expected to serve a request first.

    load       = latency of the tier + (bytes ahead of it + its own) / its read rate
    recompute  = (tokens ahead of it + its own) / prefill speed

In the first queue, blocks in flight and blocks of requests with earlier turns are ahead of the
request. In the second queue, the tokens that earlier requests still have to compute are ahead.

Each tier has a comparison of its own: the time to read its blocks, and the time to compute all that
would be missing without them. A slow tier therefore costs no block of a fast one.

A request recomputes only if loading is expected to take longer than computing by a factor, which
each tier has (`TierFacts.load_ratio_max`). An unknown rate counts in favour of loading, and both
measurements err to that side. A tier that was slow is measured again from time to time: a few
blocks are read without a waiting request. Such a read is a *probe*.

The caller passes the current time, in seconds of any monotonic clock. Used under the manager's lock
only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ...tiers.base import BlockHash

if TYPE_CHECKING:
    from ..request import Request

SAMPLE_BYTES_MIN = 8 << 20
SAMPLE_S_MIN = 0.05
"""A sample below both limits shows latency rather than rate. It counts only if it is faster than
the known rate. The same holds for one of few bytes of which the tier's latency is the most."""
SLOWER_SHARE = 0.25
FASTER_SHARE = 0.75
"""Weights of a slower and a faster sample in the rate. One stall has little effect, and a recovery
is noticed soon."""

PROBE_INTERVAL_S = 5.0
PROBE_INTERVAL_MAX_S = 40.0
"""Seconds between the first two probes of a tier, and the most between later ones. A link that
stays slow is probed less often: a probe occupies it, and slows the computing beside it."""
PROBE_FASTER = 1.5
"""The interval is short again if the rate has grown by this factor since the last probe."""
PROBE_S = 0.5
PROBE_BYTES_MAX = 16 << 20
"""Limits of probes: the expected duration and the size of one."""

PREFILL_TOKENS_MIN = 256
PREFILL_WINDOW_S = 1.0
PREFILL_SHARE = 0.25
STEPS_UNTIL_COMPUTED = 3
"""Number of steps after an offer until its blocks are certainly computed. Scheduling runs one step
ahead. Some engines end a step before their offers, others after them."""


class LinkSpeed:
    """Read rate of one tier: bytes that arrived per second while any read was in flight.

    The first read of an idle tier takes the latency longer than its bytes do.
    """

    def __init__(self, latency_s: Callable[[], float] = lambda: 0.0) -> None:
        """`latency_s` returns the measured latency of the tier; 0 if it is unknown or none."""
        self.in_flight_bytes = 0
        """Size of the reads in flight, without those that were given up."""
        self._latency_of = latency_s
        self._latency_s = 0.0
        """Part of the time since `_since_s` in which no bytes could arrive."""
        self._bytes_per_s: float | None = None
        self._since_s = 0.0
        self._arrived_bytes = 0

    def started(self, size_bytes: int, now_s: float) -> None:
        """Count a read that started."""
        if not self.in_flight_bytes:
            self._since_s, self._arrived_bytes = now_s, 0
            self._latency_s = self._latency_of()
        self.in_flight_bytes += size_bytes

    def given_up(self, size_bytes: int) -> None:
        """Count a read as in flight no more, because no request waits for it. It may never end, and
        then the time of an idle tier would count. If it does, `ended` gets a size of 0."""
        self.in_flight_bytes -= size_bytes

    def ended(self, size_bytes: int, arrived_bytes: int, now_s: float) -> None:
        """Count a read of `size_bytes` that ended, of which `arrived_bytes` arrived."""
        is_known = self._bytes_per_s is not None
        if is_known and not (size_bytes or self.in_flight_bytes):  # the tier was idle meanwhile
            return
        self.in_flight_bytes -= size_bytes
        self._arrived_bytes += arrived_bytes
        elapsed_s = now_s - self._since_s
        if not self._arrived_bytes or elapsed_s <= 0:
            return
        moving_s = max(elapsed_s - self._latency_s, elapsed_s / 2)
        sample = self._arrived_bytes / moving_s
        known = self._bytes_per_s
        is_faster = known is not None and sample > known
        is_short = moving_s < max(SAMPLE_S_MIN, self._latency_s)
        if is_short and self._arrived_bytes < SAMPLE_BYTES_MIN and not is_faster:
            return
        if known is None:
            self._bytes_per_s = sample
        else:  # mean of the logarithms: a tenth of the rate has the same effect as ten times it
            share = FASTER_SHARE if is_faster else SLOWER_SHARE
            self._bytes_per_s = known * (sample / known) ** share
        self._since_s, self._arrived_bytes, self._latency_s = now_s, 0, 0.0

    def bytes_per_s(self, now_s: float) -> float:
        """Return the rate; `inf` while it is unknown.

        While no bytes arrive, the rate is at most the bytes in flight over the time waited.
        """
        known = math.inf if self._bytes_per_s is None else self._bytes_per_s
        waited_s = now_s - self._since_s - self._latency_s
        if self.in_flight_bytes and waited_s >= SAMPLE_S_MIN:
            return min(known, (self.in_flight_bytes + self._arrived_bytes) / waited_s)
        return known

    def expected_s(self, size_bytes: int, now_s: float) -> float:
        """Return the seconds until `size_bytes` have arrived behind the bytes in flight."""
        moving_s = (self.in_flight_bytes + size_bytes) / self.bytes_per_s(now_s)
        return self._latency_of() + moving_s


class PrefillSpeed:
    """Prefill speed in tokens per second, measured from offers of blocks and ends of steps.

    A scheduler offers blocks when it schedules their tokens. A sample begins with the first offer.
    It ends `STEPS_UNTIL_COMPUTED` steps after the last offer, or when all blocks are stored, since
    an idle engine makes no steps. Both include a little more than the computation, so the measured
    speed is slightly too low. A longer sample ends with the first offer after `PREFILL_WINDOW_S`,
    without the tokens of that offer: the engine has not computed them yet.
    """

    def __init__(self, given_tokens_per_s: float | None = None) -> None:
        """`given_tokens_per_s`: speed from the configuration, which disables the measurement."""
        self._is_given = given_tokens_per_s is not None
        self.tokens_per_s = given_tokens_per_s
        """Prefill speed; None while it is unknown."""
        self._since_s: float | None = None
        self._tokens = 0.0
        self._steps_left = 0
        self._has_deferred = False
        """True if a store of this sample was deferred. The end of all stores then does not end the
        sample."""

    def offered(self, tokens: float, now_s: float, is_taken: bool = True) -> None:
        """Count the tokens of blocks that the engine is computing and offers for the first time."""
        if self._is_given:
            return
        if self._since_s is not None and now_s - self._since_s >= PREFILL_WINDOW_S:
            self._end_sample(now_s)
        if self._since_s is None:
            self._since_s, self._tokens, self._has_deferred = now_s, 0.0, False
        self._tokens += tokens
        self._has_deferred |= not is_taken
        self._steps_left = STEPS_UNTIL_COMPUTED

    def end_step(self, now_s: float) -> None:
        """End a step of the scheduler."""
        self._steps_left -= 1
        if self._steps_left <= 0:
            self._end_sample(now_s)

    def all_stored(self, now_s: float) -> None:
        """End the sample, because all accepted blocks are stored and therefore computed."""
        if not self._has_deferred:
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
    """Known number of tokens that requests still have to compute.

    Misses of a request increase it, and offers of its blocks decrease it. If the engine does not
    report the length of a prompt, only its blocks in the tiers below are known.
    """

    def __init__(self) -> None:
        self.tokens = 0.0
        self._left: dict[Request, float] = {}
        """Tokens that each request still has to compute."""
        self._blocks: dict[BlockHash, Request] = {}
        """Blocks that a tier below holds and a request nevertheless computes, with that request."""
        self._named: dict[Request, list[BlockHash]] = {}
        """Keys of `_blocks` by request, so that the end of a request does not look at all."""

    def ahead_of(self, request: Request | None) -> float:
        """Return the tokens that other requests compute; of all requests if None is given."""
        return self.tokens - (0.0 if request is None else self._left.get(request, 0.0))

    def named(self, request: Request) -> int:
        """Return how many blocks that a tier below holds the request computes nevertheless."""
        return len(self._named.get(request, ()))

    def expect(self, request: Request, tokens: float, blocks: Sequence[BlockHash] = ()) -> None:
        """Set the number of tokens that the request still has to compute.

        `blocks` are those of them that a tier below holds.
        """
        left = self._left.get(request, 0.0)
        if tokens == left and not blocks:
            return
        self.tokens += tokens - left
        self._left[request] = tokens
        self._blocks.update(dict.fromkeys(blocks, request))
        self._named.setdefault(request, []).extend(blocks)

    def computed(self, request: Request, tokens: float) -> None:
        """Subtract tokens that the request has computed."""
        left = self._left.get(request)
        if left is not None:
            self._left[request] = max(0.0, left - tokens)
            self.tokens -= min(left, tokens)

    def end(self, request: Request) -> None:
        """Remove a request that computes no more."""
        left = self._left.pop(request, None)
        if left is not None:
            self.tokens -= left
        for block_hash in self._named.pop(request, ()):
            if self._blocks.get(block_hash) is request:
                del self._blocks[block_hash]

    def __contains__(self, block_hash: BlockHash) -> bool:
        """Return True if a tier below holds the block and a request nevertheless computes it."""
        return block_hash in self._blocks

    def shared(self, blocks: Sequence[BlockHash]) -> int:
        """Return how many of these blocks another request computes already."""
        return sum(h in self._blocks for h in blocks) if self._blocks else 0


class _Probes:
    """Times of the probes of one tier. `bytes_per_s` is its rate as it is known."""

    def __init__(self) -> None:
        self._began_s = -math.inf
        """Time of the last probe."""
        self._bytes_per_s = math.inf
        """Rate that was known then."""
        self._interval_s = PROBE_INTERVAL_S

    def is_due(self, bytes_per_s: float, now_s: float) -> bool:
        """Return True if it is time for a probe."""
        interval_s = PROBE_INTERVAL_S if self._is_faster(bytes_per_s) else self._interval_s
        return now_s >= self._began_s + interval_s

    def begin(self, bytes_per_s: float, now_s: float) -> None:
        """Note a probe that begins now."""
        is_faster = self._is_faster(bytes_per_s)
        has_paused = now_s >= self._began_s + 2 * PROBE_INTERVAL_MAX_S  # idle, or fast meanwhile
        longer_s = min(2 * self._interval_s, PROBE_INTERVAL_MAX_S)
        self._interval_s = PROBE_INTERVAL_S if is_faster or has_paused else longer_s
        self._began_s, self._bytes_per_s = now_s, bytes_per_s

    def _is_faster(self, bytes_per_s: float) -> bool:
        """Return True if the rate has grown much since the last probe."""
        return bytes_per_s >= PROBE_FASTER * self._bytes_per_s


class Worth:
    """Comparison of the two queues for one request. `links[i]` is the read rate of tier `i + 1`."""

    def __init__(
        self,
        load_ratios_max: Sequence[float],
        block_bytes: int,
        tokens_per_block: float,
        prefill: PrefillSpeed,
        served_end: bytes = b"",
        latency_s: Callable[[int], float] = lambda tier: 0.0,
    ) -> None:
        """`load_ratios_max`: `TierFacts.load_ratio_max` of each tier below. `tokens_per_block`:
        tokens of a block whose hash ends with `served_end`. All other blocks count 0 tokens.
        `latency_s`: see `Below.latency_s`."""
        tiers = range(1, len(load_ratios_max) + 1)
        self.links = [LinkSpeed(partial(latency_s, tier)) for tier in tiers]
        self._load_ratios_max = load_ratios_max
        self.prefill = prefill
        self.backlog = Backlog()
        self.tokens_per_block = tokens_per_block
        self._block_bytes = block_bytes
        self._served_end = served_end
        self._probes = [_Probes() for _ in self.links]

    def note_offer(
        self, offered: Sequence[BlockHash], request: Request, is_taken: bool, now_s: float
    ) -> None:
        """Count the computed blocks of a store that a request offers.

        An offer begins with blocks that the device held already. The request computed the blocks
        from its first miss on. The engine repeats a deferred offer, with more blocks. Each block
        counts at its first offer, which is the time of its computation. The time at which an offer
        is accepted depends on the tier below instead. An offer that shares no block with the
        deferred one is not counted.
        """
        if request.deferred and request.deferred.keys().isdisjoint(offered):
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
        """Add the tokens from the request's first miss to the end of its prompt to the backlog.

        If the length of the prompt is unknown, the blocks in `below` count. Blocks that another
        request computes already do not count.
        """
        served = [h for h in below if h.endswith(self._served_end) and h not in self.backlog]
        positions = request.positions
        tokens = (self.backlog.named(request) + len(served)) * self.tokens_per_block
        start = positions.get(request.missed_at) if request.missed_at is not None else None
        if start is not None:
            end = positions[next(reversed(positions))]
            tokens = max(tokens, end - start + self.tokens_per_block)
        if tokens:
            self.backlog.expect(request, tokens, served)

    def is_hopeless(self, tier: int, now_s: float) -> bool:
        """Return True if reading one block of this tier takes longer than recomputing it.

        Then loading any number of blocks is not worth it. Latency does not count: it is the same
        for any number.
        """
        block_s = self._block_bytes / self.links[tier - 1].bytes_per_s(now_s)
        return block_s > self._load_ratios_max[tier - 1] * self._computing_s(1)

    def saved_blocks(self, wanted: Sequence[BlockHash], chain: Sequence[BlockHash]) -> int:
        """Return how many blocks of `chain` need not be computed if `wanted` are loaded.

        Both are in prefix order, and `chain` has all of `wanted`. Blocks behind a missing one are
        useless. A window or a state is useful only with all blocks before it, and the reverse.
        Blocks that another request computes already do not count.
        """
        end = self._served_end
        if not end or all(h.endswith(end) for h in wanted):
            chain = chain[chain.index(wanted[0]) :]
        needed = [h for h in chain if h.endswith(end)] if end else chain
        return len(needed or wanted) - self.backlog.shared(needed or wanted)

    def is_worth(
        self,
        tier: int,
        blocks: int,
        queued: int,
        saved: int,
        now_s: float,
        request: Request | None = None,
    ) -> bool:
        """Return True if a request should load its blocks of one tier instead of computing them.

        `tier`: number of the tier. `blocks`: number of its blocks there. `queued`: number of those
        of other requests that are queued there. `saved`: see `saved_blocks`. What `request` itself
        computes anyway is not ahead of these blocks.
        """
        size_bytes = (blocks + queued) * self._block_bytes
        longest_s = self._load_ratios_max[tier - 1] * self._computing_s(saved, request)
        return self.links[tier - 1].expected_s(size_bytes, now_s) <= longest_s

    def patience_s(self, tier: int, blocks: int, request: Request) -> float:
        """Return how long a request waits for `blocks` while nothing arrives from their tier.

        `inf` while no speed is known.
        """
        return self._load_ratios_max[tier - 1] * self._computing_s(blocks, request)

    def may_probe(self, tier: int, now_s: float) -> bool:
        """Return True if a probe is due and no read from this tier is in flight."""
        link = self.links[tier - 1]
        if link.in_flight_bytes:
            return False
        return self._probes[tier - 1].is_due(link.bytes_per_s(now_s), now_s)

    def probe_blocks(self, tier: int, now_s: float) -> int:
        """Begin a probe. Return the number of blocks to read for it."""
        bytes_per_s = self.links[tier - 1].bytes_per_s(now_s)
        self._probes[tier - 1].begin(bytes_per_s, now_s)
        return max(1, int(min(PROBE_BYTES_MAX, bytes_per_s * PROBE_S)) // self._block_bytes)

    def _computing_s(self, blocks: int, request: Request | None = None) -> float:
        """Return the seconds until so many blocks are computed; `inf` while no speed is known."""
        speed = self.prefill.tokens_per_s
        if speed is None:
            return math.inf
        return (self.backlog.ahead_of(request) + blocks * self.tokens_per_block) / speed
