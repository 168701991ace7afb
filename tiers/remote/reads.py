"""Reads of a remote tier: private memory, verification, and only then the destination."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..base import BlockHash
from .base import FAILURES, PrivateBuffer, RemoteOutcome
from .lookups import RemoteLink
from .remote_counters import Verb

SPARE_BUFFERS_MAX = 32
"""Limit on the private buffers that are kept for the next reads."""


@dataclass(slots=True)
class RemoteRead:
    """Blocks that a ticket reads."""

    ticket: int
    keys: Sequence[BlockHash]
    destinations: Sequence[memoryview]
    ends_s: float
    outcomes: list[RemoteOutcome | None] = field(default_factory=list)
    """None for a block that is still to come."""
    left: int = 0
    is_over: bool = False
    """True if nothing may be copied any more: the destinations are somebody else's."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def settle(self, numbers: Sequence[int], outcome: RemoteOutcome) -> bool:
        """Give blocks without an outcome this one. Return True if the job has ended with it."""
        with self.lock:
            for number in numbers:
                self._set(number, outcome)
            return self._ends()

    def deliver(self, number: int, payload: memoryview) -> bool:
        """Copy a verified payload to its destination, unless the job is over.

        A destination that is several times as long gets as many copies.
        """
        with self.lock:
            if not self.is_over and self.outcomes[number] is None:
                target = np.frombuffer(self.destinations[number], np.uint8)
                target.reshape(-1, payload.nbytes)[:] = np.frombuffer(payload, np.uint8)
                self._set(number, RemoteOutcome.OK)
            return self._ends()

    def give_up(self, outcome: RemoteOutcome, *, waits: bool) -> bool:
        """End the job now. Return True if it has ended with this call.

        If a copy is being made just now, wait for its end, or change nothing.
        """
        if not self.lock.acquire(blocking=waits):
            return False
        try:
            for number in range(len(self.keys)):
                self._set(number, outcome)
            return self._ends()
        finally:
            self.lock.release()

    def _set(self, number: int, outcome: RemoteOutcome) -> None:
        if not self.is_over and self.outcomes[number] is None:
            self.outcomes[number] = outcome
            self.left -= 1

    def _ends(self) -> bool:
        if self.is_over or self.left:
            return False
        self.is_over = True
        return True


class _Landing(Sequence[PrivateBuffer]):
    """Buffers of one call. Each object is verified and copied as soon as it has arrived.

    The buffer is then used for the next one, while its memory is still in the processor's cache.
    """

    def __init__(
        self, reads: Reads, job: RemoteRead, numbers: Sequence[int], generation: int
    ) -> None:
        self._reads = reads
        self._job = job
        self._numbers = numbers
        self._generation = generation
        self._taken: dict[int, PrivateBuffer] = {}
        self.bad: set[int] = set()
        """Objects that failed verification, by their number in the call."""
        self.has_ended = False
        """True if the job ended with one of these blocks."""

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, at: Any) -> Any:
        buffer = self._taken[at] = self._reads.take()
        return buffer

    def arrived(self, at: int) -> None:
        """Verify an object and copy it to its destination."""
        number, buffer = self._numbers[at], self._taken.pop(at)
        objects = self._reads.link.objects
        payload = objects.verified(self._job.keys[number], self._generation, buffer)
        if payload is None:
            self.bad.add(at)
            return
        if self._job.deliver(number, payload):
            self.has_ended = True
        self._reads.give_back(buffer)


class Reads:
    """Makes the calls of reads. Any thread."""

    def __init__(self, link: RemoteLink) -> None:
        self.link = link
        self._lock = threading.Lock()
        self._spare: list[PrivateBuffer] = []

    def read(self, job: RemoteRead, numbers: Sequence[int]) -> tuple[RemoteOutcome, bool]:
        """Read some blocks of a job. Return the worst outcome, and whether the job has ended.

        Runs on a thread.
        """
        link = self.link
        left_s, epoch = job.ends_s - link.clock(), link.memory.epoch
        generation = link.generation.current(max(0.0, left_s))
        if generation.outcome is not RemoteOutcome.OK:
            return generation.outcome, job.settle(numbers, generation.outcome)
        names = [link.objects.name(job.keys[n], generation.value) for n in numbers]
        landing = _Landing(self, job, numbers, generation.value)
        begun_s = link.clock()
        left_s = max(0.0, job.ends_s - begun_s)
        outcomes = link.engine.get_into(names, landing, left_s, landing.arrived)
        took_s = link.clock() - begun_s
        for at in landing.bad:
            outcomes[at] = RemoteOutcome.CORRUPT
        ended = landing.has_ended
        for number, outcome in zip(numbers, outcomes, strict=True):
            if outcome is not RemoteOutcome.OK:
                ended |= job.settle([number], outcome)
        got_bytes = outcomes.count(RemoteOutcome.OK) * link.objects.payload_bytes
        requests = 1 if link.engine.asks_in_one_trip else len(names)
        link.counters.note(
            Verb.READ, outcomes, requests=requests, payload_bytes=got_bytes, took_s=took_s
        )
        if set(outcomes) & {RemoteOutcome.ABSENT, RemoteOutcome.CORRUPT}:
            keys = [job.keys[number] for number in numbers]
            self._forget_missing(keys, names, outcomes, epoch)
        return next((o for o in outcomes if o in FAILURES), RemoteOutcome.OK), ended

    def _forget_missing(
        self,
        keys: Sequence[BlockHash],
        names: Sequence[str],
        outcomes: Sequence[RemoteOutcome],
        epoch: int,
    ) -> None:
        """Remember blocks that are not there, and remove damaged ones from the server."""
        link = self.link
        gone = (RemoteOutcome.CORRUPT, RemoteOutcome.ABSENT)
        missing = [k for k, outcome in zip(keys, outcomes, strict=True) if outcome in gone]
        link.memory.note(epoch, (), missing)
        pairs = zip(names, outcomes, strict=True)
        bad = [name for name, outcome in pairs if outcome is RemoteOutcome.CORRUPT]
        if bad:
            begun_s = link.clock()
            removed = link.engine.remove(bad, link.engine.timeout_s)
            took_s = link.clock() - begun_s
            link.counters.note(Verb.REMOVE, removed, requests=len(bad), took_s=took_s)

    def take(self) -> PrivateBuffer:
        """Return a buffer for one object."""
        with self._lock:
            if self._spare:
                return self._spare.pop()
        return PrivateBuffer(self.link.objects.payload_bytes)

    def give_back(self, buffer: PrivateBuffer) -> None:
        """Keep a buffer whose object was verified; any other one could still be written to."""
        with self._lock:
            if len(self._spare) < SPARE_BUFFERS_MAX:
                self._spare.append(buffer)
