"""Deadlock of the engine's scheduler: requests that hold device blocks wait behind one that needs
more blocks than are free.

vLLM up to 0.30 considers waiting requests in order, and stops at the first that does not fit. A
request whose blocks were loaded is one of them, and it keeps its device blocks while it waits. It
can be behind a request that was deferred while its own blocks were promoted. If that earlier
request needs more device blocks than are free, no request runs, and no block is freed. Later
versions consider requests that hold blocks first.

The scheduler skips a request whose lookup is deferred. It makes no lookup for a request whose
blocks were loaded. After many steps with lookups but without progress, all lookups of one step are
therefore deferred. The scheduler then reaches the requests that hold blocks, and they run and free
them. No other request starts before the first one.

All calls come from the scheduler's thread.
"""

from __future__ import annotations

STILL_STEPS = 32
"""Number of steps with lookups but no progress before all lookups of one step are deferred. Steps
in which all running requests only decode count too. Then the deferral delays waiting requests
by one step and running requests not at all."""


class Standstill:
    """Decide when to defer the lookups of a scheduler step."""

    def __init__(self) -> None:
        self._steps = 0
        """Consecutive scheduler steps with lookups but no progress."""
        self._has_asked = False

    def must_defer(self) -> bool:
        """Return True if all lookups of this step must be deferred."""
        self._has_asked = True
        return self._steps >= STILL_STEPS

    def note_progress(self) -> None:
        """Reset the step count, because a request began, stored, or ended."""
        self._steps = 0

    def end_step(self) -> None:
        """End the step; the next lookup belongs to a new step."""
        if self._steps >= STILL_STEPS:
            self._steps = 0
        self._steps += self._has_asked
        self._has_asked = False
