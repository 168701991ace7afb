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
"""In so many steps an engine may ask in vain. It does so, too, while all that run only decode: then
a step in which all is put off costs those that wait one step, and those that run nothing."""


class Standstill:
    """Says when to put off what is asked."""

    def __init__(self) -> None:
        self._steps = 0
        """In which was asked, since something came of it."""
        self._has_asked = False

    def puts_off(self) -> bool:
        """True if the questions of this step shall be put off: all of them."""
        self._has_asked = True
        return self._steps >= STILL_STEPS

    def note_progress(self) -> None:
        """A request began, stored, or ended."""
        self._steps = 0

    def end_step(self) -> None:
        """The next question is the first one of a step."""
        if self._steps >= STILL_STEPS:
            self._steps = 0
        self._steps += self._has_asked
        self._has_asked = False
