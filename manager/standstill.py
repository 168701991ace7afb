"""An engine that stands still: requests that hold device blocks wait behind one that finds too few.

vLLM up to 0.30 looks at waiting requests in their order, and at none behind the first that does not
fit. A request whose blocks were loaded is among them, and keeps them meanwhile. It may have been
let in while the blocks of an earlier one were on their way, which was passed over then. If that one
needs more than is left, nothing runs, so nothing becomes free. Later versions look first at those
that hold something.

What is put off is passed over, and who has loaded is not asked about. So when the engine has asked
in many steps and nothing came of it, all questions of one step are put off: those that hold blocks
are reached, run, and let go of them. Nobody else gets in before the first one.

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

    def puts_off(self) -> bool:
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
