"""Simulation of a trace with the real manager, in virtual time.

Each request looks its blocks up, waits for promotions, loads, and stores the other blocks. Stored
blocks are available at once; computing takes no time on the clock. Requests wait concurrently, and
their reads queue behind one another. The device's own prefix cache is not simulated, so the first
tier sees every block of every prompt.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...assembly.named import admission_rule
from ...config.schema import WriteMode
from ...errors import ConfigError
from ...manager.below.chain import BelowChain, ChainedTier
from ...manager.below.node_tier import NodeTier
from ...manager.below.port import Below, NoTierBelow
from ...manager.cascading import CascadingOffloadingManager
from ...manager.core import ManagerOptions
from ...manager.first_tier import Tier
from ...manager.request import Request
from ...tiers.base import BlockHash
from ...tiers.endurance import DAY_S
from ...tiers.nvme.path.writer.path_writer import FIGURES_EVERY_S
from ...tiers.nvme.segments.format import PAGE_BYTES
from ...tiers.policies import create
from .replay_report import BreakEven, Quantiles, ReplayedTier, ReplayReport
from .tier_options import ReplayOptions, TierOptions
from .traces import Ids, Trace, TraceRequest
from .virtual import SlotBackend, VirtualClock
from .virtual_node import VirtualPath, VirtualTierOptions, open_virtual_tier

RETRY_S = 0.25
"""Time after which a request that waits for room looks up again, if no event comes first."""
STORE_PATIENCE_S = 5.0
"""Time for which a request offers its blocks while all slots are busy: about the duration of an
answer. Remaining blocks are not stored."""
SEEN_BLOCK_BYTES_MAX = 1 << 20
"""Largest block size that the manager sees. It makes batches of 32 MiB, and a trace's blocks may be
larger than an engine's (512 tokens in Mooncake's). The limit keeps the manager batching."""
MAX_ROUNDS = 100_000
"""Limit of steps between two events of the trace; more indicate a request that never ends."""
_SPREAD = np.uint64(0x9E3779B97F4A7C15)

Progress = Callable[[int], None]
"""Callback with the number of requests that have begun since the last call."""


def hashes_of(ids: Ids) -> list[BlockHash]:
    """Return block hashes with well-distributed bits, like real ones; equal ids give equal
    hashes."""
    spread = np.zeros((len(ids), 2), np.uint64)
    np.multiply(ids, _SPREAD, out=spread[:, 0])
    data = spread.tobytes()
    return [BlockHash(data[i : i + 16]) for i in range(0, len(data), 16)]


@dataclass(slots=True, eq=False)
class Active:
    """A request that has begun and has not finished."""

    arrived_s: float
    input_tokens: int
    hashes: list[BlockHash]
    request: Request
    hits: int = 0
    """Number of blocks that the request loaded."""
    give_up_s: float = 0.0
    """Time at which the request stops offering its other blocks."""


@dataclass(slots=True)
class Tally:
    """Sums that the manager's own counters do not have."""

    hit_tokens: list[int] = field(default_factory=list)
    """Cached prompt tokens by tier."""
    unstored_blocks: int = 0
    waits_s: list[float] = field(default_factory=list)
    """Time of each request from its arrival until its blocks are in the first tier and on the
    device."""
    computed_tokens: list[int] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)


class Simulation:
    """One run over one trace."""

    def __init__(self, trace: Trace, options: ReplayOptions) -> None:
        """Create manager and tiers.

        Raises `ConfigError` if a tier cannot hold a block, or if two tiers have one name.
        """
        self._level_of = {tier.name: i for i, tier in enumerate(options.tiers)}
        if len(self._level_of) < len(options.tiers):
            names = ", ".join(tier.name for tier in options.tiers)
            raise ConfigError(f"--tier: two of {names} have one name; give each its own.")
        self._trace = trace
        self._options = options
        self.block_bytes = max(1, round(options.kv_bytes_per_token * trace.block_tokens))
        self._clock = VirtualClock()
        self._paths: list[VirtualPath] = []
        """The paths of the tiers below; their transfers end at times of their own."""
        self._node_tiers: list[NodeTier] = []
        """The tiers below whose blocks a node moves."""
        self.manager = self._make_manager(options.tiers)
        self._asking: list[Active] = []
        self._storing: deque[Active] = deque()
        self._is_full = False
        """True if the first request in the queue was refused in this step."""
        self._asked = 0
        """Number of lookups by requests."""
        self._tally = Tally(hit_tokens=[0] * len(options.tiers))

    def run(self, progress: Progress = lambda requests: None) -> ReplayReport:
        """Run the whole trace, and return the report."""
        first_s = self._trace.requests[0].arrived_s
        for arrival in self._trace.requests:
            now_s = (arrival.arrived_s - first_s) / self._options.speed_up
            self._pass_until(now_s)
            self._begin(arrival)
            progress(1)
        self._pass_until(None)
        self._write_what_is_due()
        self._clock.now_s += FIGURES_EVERY_S
        self._step()  # the last figures of the tiers
        return self._report()

    # ---- time ----------------------------------------------------------------------------

    def _pass_until(self, until_s: float | None) -> None:
        """Process all events before a time; with None, until no event is left."""
        for _ in range(MAX_ROUNDS):
            due_s = min((each.next_end_s for each in self._paths), default=float("inf"))
            if self._asking or self._storing:
                due_s = min(due_s, self._clock.now_s + RETRY_S)
            if due_s == float("inf") or (until_s is not None and due_s > until_s):
                break
            self._clock.now_s = max(self._clock.now_s, due_s)
            self._step()
        else:
            raise AssertionError("a request never ends")
        if until_s is not None:
            idle_s = until_s - self._clock.now_s
            self._clock.now_s = max(self._clock.now_s, until_s)
            for tier in self._node_tiers if idle_s >= FIGURES_EVERY_S else ():
                tier.maintain()  # an engine gets the figures while it is idle

    def _write_what_is_due(self) -> None:
        """Write the blocks that are due after the last request, as an idle engine does."""
        if self._options.write_mode is WriteMode.DEMOTE or not self._node_tiers:
            return
        for _ in range(MAX_ROUNDS):
            before = self.manager.counters.links[0].demoted_blocks
            self._clock.now_s += self.manager.options.dirty_age_s
            self._step()
            self._pass_until(None)
            if self.manager.counters.links[0].demoted_blocks == before:
                return

    def _step(self) -> None:
        self._is_full = False
        self.manager.end_step()
        if self._retry_waiting():
            self.manager.end_step()

    def _retry_waiting(self) -> bool:
        """Look up again for waiting requests, then store in order while there is room.

        Returns True if a request looked up or stored.
        """
        asked = self._asked
        if self._asking:
            self._asking = [active for active in self._asking if not self._has_asked(active)]
        has_stores = bool(self._storing)
        self._store_in_turn()
        return has_stores or self._asked > asked

    def _store_in_turn(self) -> None:
        """Store in order; after a refusal, wait for a step that makes room."""
        while self._storing and not self._is_full:
            if self._has_stored(self._storing[0]):
                self._storing.popleft()
            else:
                self._is_full = True

    def _begin(self, arrival: TraceRequest) -> None:
        hashes = hashes_of(arrival.ids)
        active = Active(self._clock.now_s, arrival.input_tokens, hashes, Request())
        if not self._has_asked(active):
            self._asking.append(active)
        self._store_in_turn()
        self.manager.end_step()

    # ---- one request ---------------------------------------------------------------------

    def _has_asked(self, active: Active) -> bool:
        """Look up; return True if the request need not wait, and has loaded all hits."""
        self._asked += 1
        hits = self.manager.lookup(active.hashes, active.request)
        if hits is None:
            return False
        self._load(active, hits)
        active.hits, active.give_up_s = hits, self._clock.now_s + STORE_PATIENCE_S
        self._storing.append(active)
        return True

    def _has_stored(self, active: Active) -> bool:
        """Offer the computed blocks; return True if they are stored or given up."""
        rest = active.hashes[active.hits :]
        if rest and self._clock.now_s < active.give_up_s:
            output = self.manager.prepare_store(rest, active.request)
            if output is None:
                return False
            self.manager.complete_store(output.block_hashes_to_store)
        else:
            self._tally.unstored_blocks += len(rest)
        self.manager.finish_request(active.request)
        return True

    def _load(self, active: Active, hits: int) -> None:
        tally, tokens = self._tally, self._trace.block_tokens
        hit_tokens = min(round(hits * tokens), active.input_tokens)
        wait_s = self._clock.now_s - active.arrived_s
        if hits:
            loaded = active.hashes[:hits]
            self.manager.prepare_load(loaded, active.request)
            self.manager.complete_load(loaded)
            wait_s += self._options.tiers[0].read.time_s(hits * self.block_bytes)
        blocks = below = 0
        for medium, count in Counter(active.request.sources.values()).items():
            blocks += count
            upto = min(round(blocks * tokens), hit_tokens)
            tally.hit_tokens[self._level_of[medium]] += upto - below
            below = upto
        tally.hit_tokens[0] += hit_tokens - below
        tally.waits_s.append(wait_s)
        tally.computed_tokens.append(active.input_tokens - hit_tokens)
        tally.prompts.append(active.input_tokens)

    # ---- before and after ----------------------------------------------------------------

    def _make_manager(self, tiers: Sequence[TierOptions]) -> CascadingOffloadingManager:
        given = self._options
        options = ManagerOptions(
            write_mode=given.write_mode,
            load_or_recompute=given.load_or_recompute,
            prefill_tokens_per_s=given.prefill_tokens_per_s,
            tokens_per_block=self._trace.block_tokens if given.prefill_tokens_per_s else 0.0,
            with_events=False,
        )
        top, lower = tiers[0], tiers[1:]
        slots = self._capacity(top)
        first = Tier(
            top.name, SlotBackend(self._seen_bytes, slots, top.name), create(top.policy, slots)
        )
        rules = [admission_rule(tier.admission) for tier in tiers][1:]
        ports = [self._node_tier(tier) for tier in lower]
        below: Below = ports[0] if ports else NoTierBelow()
        if len(ports) > 1:
            chained = [ChainedTier(port, rule) for port, rule in zip(ports, rules, strict=True)]
            below = BelowChain(chained, slots, self._clock)
        rule = rules[0] if rules else None
        return CascadingOffloadingManager(first, below, options, self._clock, admission=rule)

    def _node_tier(self, lower: TierOptions) -> NodeTier:
        """Return a tier over a path in memory."""
        slots = self._capacity(lower)
        options = VirtualTierOptions(lower, slots, self._seen_bytes, self.block_bytes)
        port, node = open_virtual_tier(options, self._clock)
        self._node_tiers.append(port)
        self._paths.append(node.path)
        return port

    @property
    def _seen_bytes(self) -> int:
        """Size of a block in bytes that manager and writer see: whole pages."""
        return min(-(-self.block_bytes // PAGE_BYTES) * PAGE_BYTES, SEEN_BLOCK_BYTES_MAX)

    def _capacity(self, tier: TierOptions) -> int:
        capacity = tier.capacity_bytes // self.block_bytes
        if capacity < 1:
            raise ConfigError(
                f"--tier {tier.name}: {tier.capacity_bytes} bytes hold no block of "
                f"{self.block_bytes} bytes; raise its size."
            )
        return capacity

    def _report(self) -> ReplayReport:
        counters, tally = self.manager.counters, self._tally
        hit_tokens = sum(tally.hit_tokens)
        speed = self._options.prefill_tokens_per_s
        served = list(zip(tally.waits_s, tally.computed_tokens, strict=True))
        return ReplayReport(
            trace=self._trace.name,
            requests=len(self._trace.requests),
            references=self._trace.references,
            distinct_blocks=self._trace.distinct,
            block_tokens=self._trace.block_tokens,
            block_bytes=self.block_bytes,
            trace_s=self._trace.duration_s / self._options.speed_up,
            input_tokens=sum(tally.prompts),
            hit_tokens=hit_tokens,
            write_mode=self._options.write_mode,
            stored_blocks=counters.stored_blocks,
            dropped_dirty_blocks=counters.dropped_dirty_blocks,
            unstored_blocks=counters.store_truncated_blocks + tally.unstored_blocks,
            requests_loaded=counters.promotions_worth,
            requests_recomputed=counters.promotions_not_worth,
            tiers=tuple(self._tier_report(i) for i in range(len(self._options.tiers))),
            prefill_s_saved=hit_tokens / speed if speed else None,
            ttft_s=Quantiles.of([wait + n / speed for wait, n in served]) if speed else None,
            ttft_without_s=Quantiles.of([n / speed for n in tally.prompts]) if speed else None,
            break_even=tuple(
                self._break_even(tier)
                for tier in self._options.tiers[1:]
                if tier.read.bytes_per_s < float("inf")
            ),
        )

    def _tier_report(self, level: int) -> ReplayedTier:
        tier, counters = self._options.tiers[level], self.manager.counters
        state = self.manager.tier_states()[level]
        link = counters.links[level - 1] if level else None
        if link:
            written, read = link.demoted_blocks, link.promoted_blocks
        else:
            written, read = counters.stored_blocks, sum(counters.loaded_blocks)
            written += sum(each.promoted_blocks for each in counters.links)
        days = self._trace.duration_s / self._options.speed_up / DAY_S
        stored = counters.stored_blocks
        return ReplayedTier(
            name=tier.name,
            policy=tier.policy,
            read=tier.read,
            write=tier.write if level else None,
            admission=tier.admission,
            write_budget_bytes=tier.write_budget_bytes,
            capacity_bytes=tier.capacity_bytes,
            capacity_blocks=state.capacity_blocks,
            resident_blocks=state.blocks,
            dirty_blocks=state.dirty_blocks,
            hit_blocks=counters.loaded_blocks[level],
            hit_tokens=self._tally.hit_tokens[level],
            demoted_blocks=link.demoted_blocks if link else 0,
            promoted_blocks=link.promoted_blocks if link else 0,
            evicted_blocks=counters.evicted_blocks[level],
            written_bytes=written * self.block_bytes,
            read_bytes=read * self.block_bytes,
            write_amplification=written / stored if link and stored else None,
            drive_writes_per_day=(
                written * self.block_bytes / tier.capacity_bytes / days
                if link and days > 0
                else None
            ),
        )

    def _break_even(self, tier: TierOptions) -> BreakEven:
        """Solve `tokens / prefill == latency + tokens * bytes_per_token / rate` for both
        unknowns."""
        bytes_per_token = self.block_bytes / self._trace.block_tokens
        speed, least = self._options.prefill_tokens_per_s, None
        if speed:
            gain_s = 1 / speed - bytes_per_token / tier.read.bytes_per_s
            least = tier.read.latency_s / gain_s if gain_s > 0 else None
        return BreakEven(tier.name, tier.read.bytes_per_s / bytes_per_token, least)


def replay(
    trace: Trace, options: ReplayOptions, progress: Progress = lambda requests: None
) -> ReplayReport:
    """Run a trace through a cascade. Raises `ConfigError` as `Simulation` does."""
    return Simulation(trace, options).run(progress)
