"""Every metric of the cascade: name, help, labels, and the source of its values.

The table serves the declarations that vLLM asks for, the values that it is sent, and the
documentation. Names follow the rules of Prometheus: base units, with the unit last. The exporter
appends `_total` to counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from ..manager.counters import Counters, LinkCounters
from ..manager.state import TierState
from ..tiers.remote.remote_counters import VerbTotals
from ..tiers.remote.uploads import Offer

PREFIX = "vllm:kvcascade_"
VLLM_PREFIX = "vllm:kv_offload_"
"""Prefix of the metrics that vLLM's own CPU tier reports, and that this one reports like it."""

LATENCY_BUCKETS_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0,
)  # fmt: skip


class Kind(Enum):
    """Prometheus type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """State of the manager that the values are read from."""

    counters: Counters
    tiers: list[TierState]
    tokens_per_block: float = 0.0
    """Prompt tokens that one served block saves."""
    waiting_requests: int = 0
    """Number of requests that wait for their turn to have blocks promoted."""


Values = Iterator[tuple[tuple[str, ...], float]]
"""Pairs of label values and value."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric; `name` is without `prefix`."""

    kind: Kind
    name: str
    documentation: str
    labels: tuple[str, ...]
    values: Callable[[MetricsSnapshot], Values]
    prefix: str = PREFIX

    @property
    def full_name(self) -> str:
        """Name as vLLM is told it."""
        return self.prefix + self.name


def _total(field: str) -> Callable[[MetricsSnapshot], Values]:
    def read(snapshot: MetricsSnapshot) -> Values:
        yield (), float(getattr(snapshot.counters, field))

    return read


def _by_tier(field: str) -> Callable[[MetricsSnapshot], Values]:
    def read(snapshot: MetricsSnapshot) -> Values:
        counters = snapshot.counters
        for name, value in zip(counters.tier_names, getattr(counters, field), strict=True):
            yield (name,), float(value)

    return read


def _by_link(field: str) -> Callable[[MetricsSnapshot], Values]:
    def read(snapshot: MetricsSnapshot) -> Values:
        counters = snapshot.counters
        for name, link in zip(counters.tier_names[1:], counters.links, strict=True):
            yield (name,), float(getattr(link, field))

    return read


def _latencies(field: str) -> Callable[[MetricsSnapshot], Values]:
    """Return a reader that removes the samples, so that each is reported once."""

    def read(snapshot: MetricsSnapshot) -> Values:
        counters = snapshot.counters
        for name, link in zip(counters.tier_names[1:], counters.links, strict=True):
            samples = getattr(link, field)
            while samples:
                yield (name,), samples.popleft()

    return read


def _of_state(value: Callable[[TierState], float | None]) -> Callable[[MetricsSnapshot], Values]:
    def read(snapshot: MetricsSnapshot) -> Values:
        for state in snapshot.tiers:
            found = value(state)
            if found is not None:
                yield (state.name,), float(found)

    return read


def _of_tier(value: Callable[[TierState], float | None]) -> Callable[[MetricsSnapshot], Values]:
    """Return a reader of a fact that all engines of a tier share: one of them reports it, and the
    others report 0. Nobody reports it for a server, whose blocks are not counted."""

    def own(state: TierState) -> float | None:
        found = value(state) if state.remote is None else None
        return found if found is None or state.is_reporter else 0.0

    return _of_state(own)


def _budget_left_bytes(state: TierState) -> float | None:
    """Return the budget that all models of a path share; 0 for all engines but one."""
    left = state.budget_left_bytes
    return left if left is None or state.is_path_reporter else 0.0


def _misses(snapshot: MetricsSnapshot) -> Values:
    """Yield the misses of each tier: blocks that no tier had, or that a tier below served."""
    counters = snapshot.counters
    missed = counters.lookup_misses
    served = list(zip(counters.tier_names, counters.loaded_blocks, strict=True))
    for name, blocks in reversed(served):
        yield (name,), float(missed)
        missed += blocks


def _served_tokens(snapshot: MetricsSnapshot) -> Values:
    counters = snapshot.counters
    for name, blocks in zip(counters.tier_names, counters.served_blocks, strict=True):
        yield (name,), blocks * snapshot.tokens_per_block


def _write_amplification(snapshot: MetricsSnapshot) -> Values:
    stored = snapshot.counters.stored_blocks * snapshot.tiers[0].block_bytes
    for state, link in zip(snapshot.tiers[1:], snapshot.counters.links, strict=True):
        if stored:
            yield (state.name,), link.demoted_bytes / stored


def _written_per_read(snapshot: MetricsSnapshot) -> Values:
    for state in snapshot.tiers:
        if state.day is not None and state.day.read:
            own = state.is_reporter
            yield (state.name,), state.day.written / state.day.read if own else 0.0


def _by_verb(value: Callable[[VerbTotals], float]) -> Callable[[MetricsSnapshot], Values]:
    """Return a reader of a figure about each kind of request to a server."""

    def read(snapshot: MetricsSnapshot) -> Values:
        for state in snapshot.tiers:
            for verb, totals in {} if state.remote is None else state.remote.verbs.items():
                yield (state.name, verb), float(value(totals))

    return read


def _remote_calls_s(snapshot: MetricsSnapshot) -> Values:
    for state in snapshot.tiers:
        for verb, samples_s in state.remote_calls_s.items():
            while samples_s:
                yield (state.name, verb), samples_s.popleft()


def _remote_outcomes(snapshot: MetricsSnapshot) -> Values:
    for state in snapshot.tiers:
        for verb, totals in {} if state.remote is None else state.remote.verbs.items():
            for outcome, blocks in totals.outcomes.items():
                yield (state.name, verb, outcome), float(blocks)


_NEVER_DROPPED = {offer.value: 0 for offer in (Offer.FULL, Offer.RESTING)}
"""The usual reasons are reported from the start, so that an alert sees the first increase."""


def _remote_dropped(snapshot: MetricsSnapshot) -> Values:
    for state in snapshot.tiers:
        if state.remote is not None:
            for reason, blocks in {**_NEVER_DROPPED, **state.remote.unsent}.items():
                yield (state.name, reason), float(blocks)


LINK_FIELDS: dict[str, str] = {
    "demoted_blocks": "Blocks written to a tier.",
    "demoted_bytes": "Bytes written to a tier.",
    "demote_s": "Seconds of transfers to a tier.",
    "demote_failed_blocks": "Blocks that could not be written to a tier.",
    "demote_no_space_blocks": (
        "Attempts to write a block that failed because a tier's disk, or its index, was full."
    ),
    "demote_refused_blocks": "Blocks that admission kept out of a tier.",
    "demote_over_budget_blocks": "Blocks that the day's write budget kept out of a tier.",
    "demote_held_blocks": "Blocks that another engine had stored in a tier first.",
    "demote_missed_blocks": "Blocks that only other tiers took: a tier rested, was full or slow.",
    "demote_openings": "Times that a tier took no writes for a while: it failed or stalled.",
    "promoted_blocks": "Blocks read from a tier and verified.",
    "promoted_bytes": "Bytes read from a tier and verified.",
    "promote_s": "Seconds of transfers from a tier.",
    "promote_gone_blocks": "Blocks that had left a tier when they were read.",
    "promote_corrupt_blocks": "Blocks of a tier that failed verification: dropped, never served.",
    "promote_failed_blocks": "Blocks of a tier that could not be read.",
    "promote_openings": "Times that nothing was read from a tier for a while: failed or stalled.",
    "promote_refused_blocks": "Lookups that were misses because a tier was not read meanwhile.",
}
TOTAL_FIELDS: dict[str, str] = {
    "lookup_misses": "Lookups that no tier could answer.",
    "stored_blocks": "Blocks that workers stored in the first tier.",
    "store_refused_busy": "Stores that were put off because slots were busy.",
    "store_lost_blocks": "Blocks that were put off and not stored before their request ended.",
    "store_truncated_blocks": "Blocks that were not stored because they could not fit.",
    "dropped_dirty_blocks": "Blocks that left the last tier that held them, unwritten.",
    "turn_waits": "Requests that waited for their turn to have blocks read from a tier.",
    "promotions_worth": "Requests for which reading blocks was expected to beat recomputing.",
    "promotions_not_worth": "Requests that recomputed, as reading was expected to take longer.",
    "recorded_requests": "Requests written to the recording.",
    "record_dropped_requests": "Requests that the recording could not take.",
    "promotion_probes": "Reads that nobody waited for, to see whether a slow tier recovered.",
    "resets": "Cache resets.",
    "resets_by_others": "Resets of a shared tier by other engines.",
}


def _recomputed(snapshot: MetricsSnapshot) -> Values:
    for reason, blocks in snapshot.counters.recomputed_blocks.items():
        yield (reason.value,), float(blocks)


def _turn_waits(snapshot: MetricsSnapshot) -> Values:
    samples = snapshot.counters.turn_waits_s
    while samples:
        yield (), samples.popleft()


def _waiting(snapshot: MetricsSnapshot) -> Values:
    yield (), float(snapshot.waiting_requests)


_LATENCIES = {
    "demotion_seconds": ("demote_latencies_s", "Seconds that a batch took to a tier, with queues."),
    "promotion_seconds": (
        "promote_latencies_s",
        "Seconds that a batch took up from a tier, with queues.",
    ),
}
assert {"evicted_blocks", *LINK_FIELDS, *(field for field, _ in _LATENCIES.values())} == set(
    LinkCounters.__dataclass_fields__
), "every counter of a link has its metric"

_TIERS: dict[str, tuple[str, Callable[[TierState], float | None]]] = {
    "tier_used_ratio": ("Share of a tier's slots in use.", lambda s: s.blocks / s.capacity_blocks),
    "tier_blocks": ("Blocks in a tier.", lambda s: s.blocks),
    "tier_used_bytes": ("Bytes of the blocks in a tier.", lambda s: s.blocks * s.block_bytes),
    "tier_capacity_bytes": (
        "Bytes that a tier can hold.",
        lambda s: s.capacity_blocks * s.block_bytes,
    ),
    "write_budget_left_bytes": ("What may still be written to a tier today.",
                                _budget_left_bytes),
    "day_written_bytes": ("Bytes written to a tier in the last 24 hours, by all its engines.",
                          lambda s: None if s.day is None else s.day.written),
    "day_read_bytes": ("Bytes read back from a tier in the last 24 hours, by all its engines.",
                       lambda s: None if s.day is None else s.day.read),
}  # fmt: skip
"""Gauges of whole tiers. Of the engines that share a tier, all but one report 0."""
_STATES: dict[str, tuple[str, Callable[[TierState], float | None]]] = {
    "tier_dirty_ratio": (
        "Share of a tier's slots whose block is not known to be in a tier below.",
        lambda s: s.dirty_blocks / s.capacity_blocks,
    ),
    "pending_blocks": ("Blocks queued or on their way up from a tier.", lambda s: s.waiting_blocks),
    "demotion_jobs": ("Writes into a tier that are under way.", lambda s: s.demote_jobs),
    "tier_blocked": ("1 while a tier takes no writes: it failed or is full, or no writer serves "
                     "the engine (see `kvcascade inspect`), or its process is not there.",
                     lambda s: s.is_blocked),
}  # fmt: skip


_REMOTE: dict[str, tuple[str, Callable[[VerbTotals], float]]] = {
    "remote_calls": ("Calls of a remote tier's server; one may be many requests.",
                     lambda t: t.calls),
    "remote_call_seconds": ("Seconds of these calls, concurrent ones added up.",
                            lambda t: t.seconds),
    "remote_requests": ("Requests to a remote tier's server; a pipeline is one.",
                        lambda t: t.requests),
    "remote_bytes": ("Bytes of blocks that went to or came from a remote tier's server.",
                     lambda t: t.payload_bytes),
    "remote_openings": ("Times that nothing of a kind was asked of a remote tier's server for a "
                        "while, because it failed.", lambda t: t.openings),
}  # fmt: skip


def counter_name(field: str) -> str:
    """Return the name of the metric for a field of the counters."""
    return field[:-2] + "_seconds" if field.endswith("_s") else field


METRICS: tuple[Metric, ...] = (
    Metric(Kind.COUNTER, "loaded_blocks",
           "Hits: blocks that requests loaded, by the tier they came from.", ("tier",),
           _by_tier("loaded_blocks")),
    Metric(Kind.COUNTER, "tier_misses",
           "Lookups that a tier could not answer: no tier could, or one below it did.",
           ("tier",), _misses),
    Metric(Kind.COUNTER, "served_tokens",
           "Prompt tokens that were not recomputed, by the tier their blocks came from.",
           ("tier",), _served_tokens),
    Metric(Kind.COUNTER, "evicted_blocks", "Blocks that left a tier to make room.", ("tier",),
           _by_tier("evicted_blocks")),
    *(Metric(Kind.COUNTER, counter_name(field), text, ("tier",), _by_link(field))
      for field, text in LINK_FIELDS.items()),
    *(Metric(Kind.COUNTER, field, text, (), _total(field))
      for field, text in TOTAL_FIELDS.items()),
    *(Metric(Kind.COUNTER, name, text, ("tier", "verb"), _by_verb(value))
      for name, (text, value) in _REMOTE.items()),
    Metric(Kind.GAUGE, "remote_resting",
           "1 while nothing of a kind is asked of a remote tier's server: it failed, or the "
           "process that moves the tier's blocks is not there.",
           ("tier", "verb"), _by_verb(lambda t: t.is_resting)),
    Metric(Kind.HISTOGRAM, "remote_latency_seconds",
           "Seconds of one call of a remote tier's server, without queues.",
           ("tier", "verb"), _remote_calls_s),
    Metric(Kind.COUNTER, "remote_blocks",
           "Blocks and other objects that a remote tier's server was asked for, by outcome.",
           ("tier", "verb", "outcome"), _remote_outcomes),
    Metric(Kind.COUNTER, "remote_dropped_blocks",
           "Blocks that were offered to a remote tier and not sent, by reason.",
           ("tier", "reason"), _remote_dropped),
    Metric(Kind.COUNTER, "recomputed_blocks",
           "Blocks that requests computed although a tier held them: larger than the promotion "
           "budget (budget), nothing moved (deadline), or computing was expected to be faster "
           "(not_worth).", ("reason",), _recomputed),
    Metric(Kind.GAUGE, "waiting_requests",
           "Requests that wait for their turn to have blocks read from a tier.", (), _waiting),
    Metric(Kind.HISTOGRAM, "turn_wait_seconds",
           "Seconds that a request waited for its turn to have blocks read from a tier.", (),
           _turn_waits),
    *(Metric(Kind.HISTOGRAM, name, text, ("tier",), _latencies(field))
      for name, (field, text) in _LATENCIES.items()),
    *(Metric(Kind.GAUGE, name, text, ("tier",), _of_tier(value))
      for name, (text, value) in _TIERS.items()),
    *(Metric(Kind.GAUGE, name, text, ("tier",), _of_state(value))
      for name, (text, value) in _STATES.items()),
    Metric(Kind.GAUGE, "write_amplification",
           "Bytes written to a tier per byte that workers stored, since the start.", ("tier",),
           _write_amplification),
    Metric(Kind.GAUGE, "written_per_read",
           "Bytes written to a tier per byte read back, in the last 24 hours.", ("tier",),
           _written_per_read),
)  # fmt: skip
"""Every metric."""


def _store_sizes(snapshot: MetricsSnapshot) -> Values:
    sizes = snapshot.counters.store_sizes
    while sizes:
        yield (), float(sizes.popleft())


def _refused(snapshot: MetricsSnapshot) -> Values:
    yield (), float(sum(link.demote_refused_blocks for link in snapshot.counters.links))


def _pinned(blocks: Callable[[TierState], int]) -> Callable[[MetricsSnapshot], Values]:
    """Return a reader of a share of the first tier's slots."""

    def read(snapshot: MetricsSnapshot) -> Values:
        first = snapshot.tiers[0]
        yield (), blocks(first) / first.capacity_blocks

    return read


VLLM_METRICS: tuple[Metric, ...] = (
    Metric(Kind.GAUGE, "cpu_cache_usage_perc",
           "Share of the CPU tier's slots that transfers or waiting requests use now (0 to 1).", (),
           _pinned(lambda s: s.writing_blocks + s.reading_blocks), VLLM_PREFIX),
    Metric(Kind.GAUGE, "cpu_cache_write_usage_perc",
           "Share of the CPU tier's slots that receive a block now (0 to 1).", (),
           _pinned(lambda s: s.writing_blocks), VLLM_PREFIX),
    Metric(Kind.GAUGE, "cpu_cache_read_usage_perc",
           "Share of the CPU tier's slots whose block is being read or is kept for a waiting "
           "request (0 to 1).", (), _pinned(lambda s: s.reading_blocks), VLLM_PREFIX),
    Metric(Kind.HISTOGRAM, "cpu_allocation_size",
           "Number of slots of the CPU tier that each store asked for.", (), _store_sizes,
           VLLM_PREFIX),
    Metric(Kind.COUNTER, "stores_skipped",
           "Blocks that admission kept out of a tier below, such as blocks used only once.", (),
           _refused, VLLM_PREFIX),
)  # fmt: skip
"""Metrics of vLLM's own CPU tier, under its names; declared only where vLLM declares them."""
