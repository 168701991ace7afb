"""`NodeInbox`: notes of a node and ends of its jobs, queued for the manager's thread.

The node's client calls `take` and `end` in any thread that waits for it. They only queue what came.
The manager's thread works it off in order (`process`), under the manager's lock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

MAX_MARKS = 64
"""Most marks of resets that are kept until they are taken."""
OnJobEnd = Callable[[Any], None]
"""Function that gets the answer to a job; None if the node died."""


class NodeInbox(ABC):
    """Queue of what one node says."""

    def __init__(self) -> None:
        self.marks: list[int] = []
        """Marks of resets by other engines that were not taken yet."""
        self._incoming: deque[tuple[OnJobEnd | None, Any]] = deque()

    def take(self, note: Any) -> None:
        """Queue a note of the node; None if its process died. Any thread."""
        self._incoming.append((None, note))

    def end(self, on_end: OnJobEnd, done: Any) -> None:
        """Queue the end of a job. Any thread."""
        self._incoming.append((on_end, done))

    def process(self) -> None:
        """Work off what came, in order."""
        incoming = self._incoming
        while incoming:
            on_end, message = incoming.popleft()
            if on_end is not None:
                on_end(message)
            else:
                self._note(message)

    @abstractmethod
    def _note(self, message: Any) -> None:
        """Take in a note; None if the process of the node died."""
