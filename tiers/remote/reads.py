"""Reads of a remote tier: private memory, verification, and only then the destination."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..base import BlockHash
from .base import FAILURES, PrivateBuffer, RemoteOutcome
from .lookups import Link
from .remote_counters import Verb

SPARE_BUFFERS_MAX = 32
"""Limit on the private buffers that are kept for the next reads."""


@dataclass(slots=True)
class ReadJob:
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
        """Copy a verified payload to its destination, unless the job is over."""
        with self.lock:
            if not self.is_over:
                target = np.frombuffer(self.destinations[number], np.uint8)
                target[:] = np.frombuffer(payload, np.uint8)
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


class Reads:
    """Makes the calls of reads. Any thread."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._spare: list[PrivateBuffer] = []

    def read(self, job: ReadJob, numbers: Sequence[int]) -> tuple[RemoteOutcome, bool]:
        """Read some blocks of a job. Return the worst outcome, and whether the job has ended.

        Runs on a thread.
        """
        link = self._link
        left_s, epoch = job.ends_s - link.clock(), link.memory.epoch
        generation = link.generation.current(max(0.0, left_s))
        if generation.outcome is not RemoteOutcome.OK:
            return generation.outcome, job.settle(numbers, generation.outcome)
        names = [link.objects.name(job.keys[n], generation.value) for n in numbers]
        buffers = [self._take() for _ in numbers]
        with self._lock:
            link.speed.began()
        begun_s = link.clock()
        outcomes = link.engine.get_into(names, buffers, max(0.0, job.ends_s - begun_s))
        took_s = link.clock() - begun_s
        ended = False
        for at, number in enumerate(numbers):
            if outcomes[at] is not RemoteOutcome.OK:
                ended |= job.settle([number], outcomes[at])
                continue
            payload = link.objects.verified(job.keys[number], generation.value, buffers[at])
            if payload is None:
                outcomes[at] = RemoteOutcome.CORRUPT
                ended |= job.settle([number], RemoteOutcome.CORRUPT)
            else:
                ended |= job.deliver(number, payload)
                self._give_back(buffers[at])
        got_bytes = outcomes.count(RemoteOutcome.OK) * link.objects.payload_bytes
        with self._lock:
            link.speed.ended(got_bytes)
        requests = 1 if link.engine.asks_in_one_trip else len(names)
        link.counters.note(
            Verb.READ, outcomes, requests=requests, payload_bytes=got_bytes, took_s=took_s
        )
        self._forget_missing(job, numbers, names, outcomes, epoch)
        return next((o for o in outcomes if o in FAILURES), RemoteOutcome.OK), ended

    def _forget_missing(
        self,
        job: ReadJob,
        numbers: Sequence[int],
        names: Sequence[str],
        outcomes: Sequence[RemoteOutcome],
        epoch: int,
    ) -> None:
        """Remember blocks that are not there, and remove damaged ones from the server."""
        pairs = [*zip(numbers, names, outcomes, strict=True)]
        bad = [name for _, name, outcome in pairs if outcome is RemoteOutcome.CORRUPT]
        missing = [
            job.keys[number]
            for number, _, outcome in pairs
            if outcome in (RemoteOutcome.CORRUPT, RemoteOutcome.ABSENT)
        ]
        if missing:
            self._link.memory.note(epoch, (), missing)
        if bad:
            begun_s = self._link.clock()
            removed = self._link.engine.remove(bad, self._link.engine.timeout_s)
            took_s = self._link.clock() - begun_s
            self._link.counters.note(Verb.REMOVE, removed, requests=len(bad), took_s=took_s)

    def _take(self) -> PrivateBuffer:
        with self._lock:
            if self._spare:
                return self._spare.pop()
        return PrivateBuffer(self._link.objects.payload_bytes)

    def _give_back(self, buffer: PrivateBuffer) -> None:
        """Keep a buffer whose read ended with `OK`; any other one could still be written to."""
        with self._lock:
            if len(self._spare) < SPARE_BUFFERS_MAX:
                self._spare.append(buffer)
