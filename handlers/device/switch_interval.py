"""Shorten the interpreter's switch interval while a thread copies beside a busy scheduler.

A thread asks for the interpreter lock after it has waited for one switch interval. The wait starts
again whenever the holder releases the lock for a moment and takes it back. So beside a busy
scheduler the usual 5 ms become several times that, before each copy and after it.

The interval belongs to the whole process. It is shortened while a copy runs, and restored after
the last copy. A value that other code sets meanwhile is kept. Any thread may use this.
"""

from __future__ import annotations

import sys
from threading import Lock

SHORT_S = 0.001


class SwitchInterval:
    """Shortens the switch interval while it has users, and counts them."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._users = 0
        self._usual_s = self._short_s = 0.0

    def shorten(self) -> None:
        """Add a user. The first one shortens the interval."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._usual_s = sys.getswitchinterval()
                sys.setswitchinterval(min(SHORT_S, self._usual_s))
                self._short_s = sys.getswitchinterval()  # as the interpreter rounds it

    def restore(self) -> None:
        """Remove a user. The last one restores the interval."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and sys.getswitchinterval() == self._short_s:
                sys.setswitchinterval(self._usual_s)


SWITCH_INTERVAL = SwitchInterval()
"""Switch interval of this process."""
