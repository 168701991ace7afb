"""Reads of a remote tier: private memory, verification, and only then the destination."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..base import BlockHash
from .base import PrivateBuffer, RemoteOutcome, outcome_of_call
from .lookups import RemoteCore
from .remote_counters import Verb
from .remote_job import RemoteJob

COPIES_AT_A_TIME = 16
"""Limit on the concurrent copies of one read."""
SPARE_BUFFERS_MAX = 32
"""Limit on the private buffers that are kept for the next reads."""
PATIENCE = 0.9
"""Share of the expected time of a call that is left after each call that did not begin."""
_SLOW = frozenset({RemoteOutcome.BUSY, RemoteOutcome.TIMED_OUT})


@dataclass(slots=True)
class RemoteRead(RemoteJob):
    """Blocks that a ticket reads."""

    kind = Verb.READ

    copying: Sequence[threading.Lock] = field(
        default_factory=lambda: [threading.Lock() for _ in range(COPIES_AT_A_TIME)]
    )
    """Lock `n % COPIES_AT_A_TIME` is held while block `n` is copied. With one lock for all of them,
    threads that wait for it cost more than the copies."""

    def deliver(self, number: int, payload: memoryview) -> None:
        """Copy a verified payload to its destination, unless the block has an outcome.

        A destination that is several times as long gets as many copies.
        """
        with self.copying[number % COPIES_AT_A_TIME]:
            if self.outcomes[number] is None:
                target = np.frombuffer(self.views[number], np.uint8)
                target.reshape(-1, payload.nbytes)[:] = np.frombuffer(payload, np.uint8)
                RemoteJob.conclude(self, [number], [RemoteOutcome.OK])

    def conclude(self, numbers: Sequence[int], outcomes: Sequence[RemoteOutcome]) -> None:
        """As of any job. It waits for copies of these blocks: their outcome frees the memory."""
        for number, outcome in zip(numbers, outcomes, strict=True):
            with self.copying[number % COPIES_AT_A_TIME]:
                RemoteJob.conclude(self, [number], [outcome])

    def give_up(self, outcome: RemoteOutcome, *, waits: bool) -> bool:
        for first, lock in enumerate(self.copying):
            if lock.acquire(blocking=waits):
                try:
                    numbers = range(first, len(self.keys), COPIES_AT_A_TIME)
                    RemoteJob.conclude(self, numbers, [outcome] * len(numbers))
                finally:
                    lock.release()
        return not self.left


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

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, at: Any) -> Any:
        buffer = self._taken[at] = self._reads.take()
        return buffer

    def arrived(self, at: int) -> None:
        """Verify an object and copy it to its destination."""
        number, buffer = self._numbers[at], self._taken.pop(at)
        objects = self._reads.core.objects
        payload = objects.verified(self._job.keys[number], self._generation, buffer)
        if payload is None:
            self.bad.add(at)
            return
        self._job.deliver(number, payload)
        self._reads.give_back(buffer)


class Reads:
    """Makes the calls of reads. Any thread."""

    def __init__(self, core: RemoteCore, brief_s: float) -> None:
        """A call with less time than `brief_s` may move nothing although the server works."""
        self.core = core
        self._brief_s = brief_s
        self._expected_s = 0.0
        """Time that the next call needs: twice that of the last one, and `brief_s` at most."""
        self._lock = threading.Lock()
        self._spare: list[PrivateBuffer] = []

    def give_up(self, job: RemoteRead, numbers: Sequence[int], outcome: RemoteOutcome) -> None:
        """End blocks that were not asked for."""
        self.core.give_up(job, numbers, outcome)
        if outcome is RemoteOutcome.DROPPED:  # so that one begins at last
            self._expected_s *= PATIENCE

    def is_over(self, job: RemoteRead) -> bool:
        """Return True if a job needs no call, or its time is over before a call would end.

        A block that is cut off is lost, and on a busy link it delays others.
        """
        return not job.left or job.ends_s - self.core.clock() < self._expected_s

    def read(self, job: RemoteRead, numbers: Sequence[int]) -> RemoteOutcome:
        """Read some blocks of a job. Return the outcome of the call. Runs on a thread."""
        core = self.core
        left_s, epoch = job.ends_s - core.clock(), core.memory.epoch
        generation = core.generation.current(max(0.0, left_s))
        if generation.outcome is not RemoteOutcome.OK:
            job.conclude(numbers, [generation.outcome] * len(numbers))
            return generation.outcome
        names = [core.objects.name(job.keys[n], generation.value) for n in numbers]
        landing = _Landing(self, job, numbers, generation.value)
        begun_s = core.clock()
        left_s = max(0.0, job.ends_s - begun_s)

        def get() -> list[RemoteOutcome]:
            found = core.engine.get_into(names, landing, left_s, landing.arrived)
            for at in landing.bad:
                found[at] = RemoteOutcome.CORRUPT
            return found

        outcomes = core.call(Verb.READ, get)
        took_s = core.clock() - begun_s
        if not {RemoteOutcome.OK, RemoteOutcome.BUSY}.isdisjoint(outcomes):
            self._expected_s = min(2 * took_s, self._brief_s)
        for number, outcome in zip(numbers, outcomes, strict=True):
            if outcome is not RemoteOutcome.OK:  # what arrived has its outcome from `deliver`
                job.conclude([number], [outcome])
        if set(outcomes) & {RemoteOutcome.ABSENT, RemoteOutcome.CORRUPT}:
            keys = [job.keys[number] for number in numbers]
            self._forget_missing(keys, names, outcomes, epoch)
        outcome = outcome_of_call(outcomes)
        if max(left_s, took_s) < self._brief_s and outcome in _SLOW:
            return RemoteOutcome.DROPPED  # it says nothing about the server
        return outcome

    def _forget_missing(
        self,
        keys: Sequence[BlockHash],
        names: Sequence[str],
        outcomes: Sequence[RemoteOutcome],
        epoch: int,
    ) -> None:
        """Remember blocks that are not there, and remove damaged ones from the server."""
        core = self.core
        gone = (RemoteOutcome.CORRUPT, RemoteOutcome.ABSENT)
        missing = [k for k, outcome in zip(keys, outcomes, strict=True) if outcome in gone]
        core.memory.note(epoch, (), missing)
        pairs = zip(names, outcomes, strict=True)
        bad = [name for name, outcome in pairs if outcome is RemoteOutcome.CORRUPT]
        if bad:
            core.call(Verb.REMOVE, lambda: core.engine.remove(bad, core.engine.timeout_s))

    def take(self) -> PrivateBuffer:
        """Return a buffer for one object."""
        with self._lock:
            if self._spare:
                return self._spare.pop()
        return PrivateBuffer(self.core.objects.payload_bytes)

    def give_back(self, buffer: PrivateBuffer) -> None:
        """Keep a buffer whose object was verified; any other one could still be written to."""
        buffer.let_go()
        with self._lock:
            if len(self._spare) < SPARE_BUFFERS_MAX:
                self._spare.append(buffer)
