"""`RemoteJob`: blocks of one ticket that are looked up, read or written, on several threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from ..base import BlockHash
from .base import RemoteOutcome
from .remote_counters import Verb


@dataclass(slots=True)
class RemoteJob:
    """Blocks that a ticket looks up, reads or writes. Any thread."""

    kind: ClassVar[Verb]

    ticket: int
    keys: Sequence[BlockHash]
    views: Sequence[memoryview]
    """Memory of each block: the destination of a read, or the payload that is written. A lookup has
    none."""
    ends_s: float
    outcomes: list[RemoteOutcome | None] = field(init=False)
    """None for a block that is still to come."""
    left: int = field(init=False)
    """Number of blocks without an outcome. Without any, the memory is somebody else's."""
    is_reported: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.left = len(self.keys)
        self.outcomes = [None] * self.left

    def conclude(self, numbers: Sequence[int], outcomes: Sequence[RemoteOutcome]) -> None:
        """Give blocks their outcomes; those that have one keep it."""
        with self.lock:
            for number, outcome in zip(numbers, outcomes, strict=True):
                if self.outcomes[number] is None:
                    self.outcomes[number] = outcome
                    self.left -= 1

    def give_up(self, outcome: RemoteOutcome, *, waits: bool) -> bool:
        """Give all blocks without an outcome this one. Return True if all have one now.

        Some are left out while another thread copies one of them, unless `waits`.
        """
        self.conclude(range(len(self.keys)), [outcome] * len(self.keys))
        return True

    def take_end(self) -> list[RemoteOutcome] | None:
        """Return all outcomes, once, when no block is left; None otherwise."""
        with self.lock:
            if self.left or self.is_reported:
                return None
            self.is_reported = True
            return [outcome for outcome in self.outcomes if outcome is not None]
