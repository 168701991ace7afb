"""Counters of a remote tier. Any thread may add to them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from .base import FAILURES, RemoteOutcome

NEW_SHARE = 0.25
"""Weight of a new observation in the moving average."""
MAX_SAMPLES = 1024
"""Limit on the times of calls of one verb that wait to be taken. The others are only summed up."""


class Verb(StrEnum):
    """Kind of a request to an engine."""

    LOOKUP = "lookup"
    READ = "read"
    WRITE = "write"
    REMOVE = "remove"
    GENERATION = "generation"
    """Reads and raises the counters of a namespace."""


class VerbTotals(msgspec.Struct, array_like=True):
    """Totals of one verb since the node's start; part of its notes to the scheduler's process."""

    calls: int = 0
    requests: int = 0
    """Requests to the server; a pipelined call is one."""
    payload_bytes: int = 0
    seconds: float = 0.0
    """Sum over all calls, concurrent ones included."""
    outcomes: dict[str, int] = {}
    """Number of keys by outcome."""
    openings: int = 0
    """Number of times that its breaker opened; only notes tell."""
    is_resting: bool = False
    """True while its breaker is open; only notes tell."""


class RemoteCounters:
    """Totals of all verbs, and of uploads that were not made."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.verbs = {verb: VerbTotals() for verb in Verb}
        self.unsent: Counter[str] = Counter()
        """Blocks that were offered and not written, by reason."""
        self.lookup_s: float | None = None
        """Time of a lookup that was answered, a moving average; None before the first one."""
        self._samples_s: dict[Verb, list[float]] = {}

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
            found = Counter(outcomes)
            for outcome, keys in found.items():
                totals.outcomes[outcome.value] = totals.outcomes.get(outcome, 0) + keys
            totals.requests += requests
            totals.payload_bytes += payload_bytes
            if took_s is not None:
                totals.calls += 1
                totals.seconds += took_s
                if verb is Verb.LOOKUP and FAILURES.isdisjoint(found):
                    old_s = took_s if self.lookup_s is None else self.lookup_s
                    self.lookup_s = old_s + NEW_SHARE * (took_s - old_s)
                samples_s = self._samples_s.setdefault(verb, [])
                if len(samples_s) < MAX_SAMPLES:
                    samples_s.append(took_s)

    def take_samples(self) -> dict[str, list[float]]:
        """Return the seconds of each call since the last time, by verb."""
        with self._lock:
            taken, self._samples_s = self._samples_s, {}
        return {verb.value: samples_s for verb, samples_s in taken.items()}

    def note_unsent(self, reason: str, blocks: int) -> None:
        """Add blocks that were offered and not written."""
        with self._lock:
            self.unsent[reason] += blocks
