"""Uploads of a remote tier: which blocks are wanted, and their way to the engine."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ..base import BlockHash
from .base import FAILURES, RemoteOutcome
from .lookups import Link
from .presence import Presence
from .remote_counters import Verb

FIRST_TOUCHES_MAX = 1 << 17
"""Limit on the blocks whose first use is remembered."""


class WriteWhen(StrEnum):
    """Time at which an offered block is written to the remote tier."""

    SECOND_TOUCH = "second_touch"
    """At its second offer."""
    THROUGH = "through"
    """Whenever it is offered."""
    OFF = "off"
    """Never: this engine only reads."""


class Offer(StrEnum):
    """Answer to the offer of one block."""

    QUEUED = "queued"
    """It will be written; its memory is borrowed until the ticket has ended."""
    HELD = "held"
    """It is there already."""
    FIRST_TOUCH = "first_touch"
    """Not written, because it was not used before."""
    OFF = "off"
    """Not written, because this engine only reads."""
    FULL = "full"
    """Dropped: the queue has no room. Offer it again at its next use."""
    RESTING = "resting"
    """Dropped: the server failed a moment ago. Offer it again at its next use."""


@dataclass(slots=True)
class UploadJob:
    """Blocks that a ticket writes."""

    ticket: int
    keys: list[BlockHash]
    payloads: list[memoryview]
    ends_s: float
    epoch: int
    outcomes: list[RemoteOutcome | None] = field(default_factory=list)
    left: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def settle(self, numbers: Sequence[int], outcomes: Sequence[RemoteOutcome]) -> bool:
        """Set outcomes. Return True if the job has ended with them."""
        with self.lock:
            for number, outcome in zip(numbers, outcomes, strict=True):
                assert self.outcomes[number] is None, "a block ends once"
                self.outcomes[number] = outcome
            self.left -= len(numbers)
            return self.left == 0


class Uploads:
    """Decides about offers, bounds the queue, and makes the calls."""

    def __init__(self, link: Link, when: WriteWhen, queue_bytes: int) -> None:
        self._link = link
        self._when = when
        self._queue_bytes = queue_bytes
        self._lock = threading.Lock()
        self._borrowed_bytes = 0
        self._coming: set[BlockHash] = set()
        self._touched: dict[BlockHash, None] = {}

    @property
    def borrowed_bytes(self) -> int:
        """Payload bytes that wait or are being sent."""
        return self._borrowed_bytes

    def answer(self, keys: Sequence[BlockHash], is_open: bool) -> list[Offer]:
        """Decide about blocks in prefix order, so that an overfull queue drops tails.

        What is `QUEUED` counts as borrowed from now on. Owner's thread.
        """
        answers = [self._answer(key, is_open) for key in keys]
        for offer in (Offer.FULL, Offer.RESTING):
            if offer in answers:
                self._link.counters.note_unsent(offer, answers.count(offer))
        return answers

    def _answer(self, key: BlockHash, is_open: bool) -> Offer:
        if self._when is WriteWhen.OFF:
            return Offer.OFF
        with self._lock:
            if key in self._coming or self._link.memory.of(key) is Presence.HELD:
                return Offer.HELD
            if self._when is WriteWhen.SECOND_TOUCH and key not in self._touched:
                self._touch(key)
                return Offer.FIRST_TOUCH
            if not is_open:
                return Offer.RESTING
            size = self._link.objects.payload_bytes
            if self._borrowed_bytes + size > self._queue_bytes:
                return Offer.FULL
            self._borrowed_bytes += size
            self._coming.add(key)
            return Offer.QUEUED

    def _touch(self, key: BlockHash) -> None:
        self._touched[key] = None
        if len(self._touched) > FIRST_TOUCHES_MAX:
            del self._touched[next(iter(self._touched))]

    def end(
        self, job: UploadJob, numbers: Sequence[int], outcomes: Sequence[RemoteOutcome]
    ) -> bool:
        """Note what became of blocks. Return True if the job has ended with them. Any thread."""
        keys = [job.keys[number] for number in numbers]
        with self._lock:
            self._borrowed_bytes -= len(keys) * self._link.objects.payload_bytes
            self._coming.difference_update(keys)
            for key, outcome in zip(keys, outcomes, strict=True):
                if outcome in (RemoteOutcome.OK, RemoteOutcome.EXISTS):
                    self._touched.pop(key, None)
        return job.settle(numbers, outcomes)

    def give_up(self, job: UploadJob, numbers: Sequence[int], outcome: RemoteOutcome) -> bool:
        """End blocks that were not sent. Return True if the job has ended with them."""
        self._link.counters.note_unsent(outcome, len(numbers))
        return self.end(job, numbers, [outcome] * len(numbers))

    def is_stale(self, job: UploadJob) -> bool:
        """Return True if a reset came after the offer."""
        return job.epoch != self._link.memory.epoch

    def write(self, job: UploadJob, numbers: Sequence[int]) -> tuple[RemoteOutcome, bool]:
        """Send some blocks of a job. Return the worst outcome, and whether the job has ended.

        Runs on a thread.
        """
        link = self._link
        generation = link.generation.current(link.engine.timeout_s)
        if generation.outcome is not RemoteOutcome.OK:
            return generation.outcome, self.give_up(job, numbers, generation.outcome)
        keys = [job.keys[number] for number in numbers]
        names = [link.objects.name(key, generation.value) for key in keys]
        objects = [
            link.objects.make(key, generation.value, job.payloads[number])
            for key, number in zip(keys, numbers, strict=True)
        ]
        begun_s = link.clock()
        outcomes = link.engine.put(names, objects, link.engine.timeout_s * len(names))
        took_s = link.clock() - begun_s
        sent = outcomes.count(RemoteOutcome.OK) * link.objects.payload_bytes
        requests = 1 if link.engine.asks_in_one_trip else len(names)
        link.counters.note(
            Verb.WRITE, outcomes, requests=requests, payload_bytes=sent, took_s=took_s
        )
        there = (RemoteOutcome.OK, RemoteOutcome.EXISTS)
        held = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome in there]
        link.memory.note(job.epoch, held, ())
        worst = next((o for o in outcomes if o in FAILURES), RemoteOutcome.OK)
        return worst, self.end(job, numbers, outcomes)
