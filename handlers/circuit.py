"""A circuit breaker: a device that keeps failing is left alone for a while."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ..tiers.base import BlockOutcome

BREAKER_FAILURES = 3
"""Failed jobs in a row after which a tier takes no stores for a while."""
BREAKER_PROBE_S = 10.0
"""After this, one job may try again."""

_FAULTS = frozenset({BlockOutcome.IO_ERROR, BlockOutcome.NO_SPACE})


def is_fault(outcomes: Collection[BlockOutcome]) -> bool:
    """True if the device is to blame for one of these outcomes."""
    return not _FAULTS.isdisjoint(outcomes)


class CircuitBreaker:
    """Refuses work after failures in a row, then lets one probe through at a time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives monotonic seconds."""
        self._clock = clock
        self._failures = 0
        self._closed_until_s = 0.0
        self._is_probing = False

    @property
    def is_open(self) -> bool:
        """True while work is refused."""
        if self._failures < BREAKER_FAILURES:
            return False
        return self._is_probing or self._clock() < self._closed_until_s

    def started(self) -> None:
        """A job was let through."""
        self._is_probing = self._failures >= BREAKER_FAILURES

    def ended(self, is_failure: bool) -> None:
        """A job ended."""
        self._is_probing = False
        self._failures = self._failures + 1 if is_failure else 0
        if self._failures >= BREAKER_FAILURES:
            self._closed_until_s = self._clock() + BREAKER_PROBE_S

    def trip(self) -> None:
        """Open at once."""
        self._failures = BREAKER_FAILURES
        self.ended(is_failure=True)
