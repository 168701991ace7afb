"""Counters of a remote tier. Any thread may add to them."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from .base import RemoteOutcome

LATENCY_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Upper bounds of the latency classes; one more class holds everything above."""


class Verb(StrEnum):
    """Kind of a request to an engine."""

    LOOKUP = "lookup"
    READ = "read"
    WRITE = "write"
    REMOVE = "remove"
    RESET = "reset"


@dataclass(slots=True)
class VerbCounters:
    """Totals of one verb."""

    calls: int = 0
    requests: int = 0
    """Requests to the server; a pipelined call is one."""
    payload_bytes: int = 0
    outcomes: Counter[RemoteOutcome] = field(default_factory=Counter)
    """Number of keys by outcome."""
    seconds: float = 0.0
    """Sum over all calls, concurrent ones included."""
    latencies: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_S) + 1))
    """Number of calls by latency class."""


class RemoteCounters:
    """Totals of all verbs, and of uploads that were not made."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.verbs = {verb: VerbCounters() for verb in Verb}
        self.unsent: Counter[str] = Counter()
        """Blocks that were offered and not written, by reason."""

    def note(
        self,
        verb: Verb,
        outcomes: Iterable[RemoteOutcome],
        *,
        requests: int = 0,
        payload_bytes: int = 0,
        took_s: float | None = None,
    ) -> None:
        """Add the outcomes of some keys; `took_s` is None if no call was made."""
        with self._lock:
            totals = self.verbs[verb]
            totals.outcomes.update(outcomes)
            totals.requests += requests
            totals.payload_bytes += payload_bytes
            if took_s is not None:
                totals.calls += 1
                totals.seconds += took_s
                totals.latencies[bisect_left(LATENCY_BOUNDS_S, took_s)] += 1

    def note_unsent(self, reason: str, blocks: int = 1) -> None:
        """Add blocks that were offered and not written."""
        with self._lock:
            self.unsent[reason] += blocks
