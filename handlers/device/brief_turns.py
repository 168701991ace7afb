"""Shorter turns at the interpreter lock while a thread copies beside a scheduler that never rests.

Who wants the lock asks for it only after waiting for one switch interval, and begins to wait anew
whenever the holder gave it up for a moment and took it back: beside a scheduler that does so
every millisecond, the 5 ms of CPython were 10 to 25 before a copy, and as much after it.

The interval is the process's. It is shortened while somebody copies and put back after the last;
what somebody else sets meanwhile stays. Any thread.
"""

from __future__ import annotations

import sys
from threading import Lock

BRIEF_S = 0.001


class BriefTurns:
    """Counts who needs them."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._users = 0
        self._usual_s = self._brief_s = 0.0

    def begin(self) -> None:
        """Turns are short until `end`."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._usual_s = sys.getswitchinterval()
                sys.setswitchinterval(min(BRIEF_S, self._usual_s))
                self._brief_s = sys.getswitchinterval()  # as the interpreter rounds it

    def end(self) -> None:
        """The last to end has them as long as they were."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and sys.getswitchinterval() == self._brief_s:
                sys.setswitchinterval(self._usual_s)


BRIEF_TURNS = BriefTurns()
"""The process's."""
