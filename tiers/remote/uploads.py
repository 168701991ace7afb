"""Uploads of a remote tier: choice of the blocks that are written, and the calls of the engine.

The scheduler's process chooses and bounds what is written (`OfferRule`). The store of its node
writes all that it gets (`Uploads`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ...config.remote import WriteWhen
from ..base import BlockHash
from .base import RemoteObject, RemoteOutcome, outcome_of_call
from .lookups import RemoteCore
from .objects import ObjectFormat
from .presence import Presence, PresenceMemory, drop_oldest
from .remote_counters import Verb
from .remote_job import RemoteJob

THERE = frozenset({RemoteOutcome.OK, RemoteOutcome.EXISTS})
"""Outcomes of a write after which the server has the block."""


class Offer(StrEnum):
    """Answer to the offer of one block."""

    QUEUED = "queued"
    """The block will be written; its memory is borrowed until the ticket has ended."""
    HELD = "held"
    """The server has the block already."""
    FIRST_TOUCH = "first_touch"
    """Not written, because it was not used before."""
    OFF = "off"
    """Not written, because this engine only reads."""
    FULL = "full"
    """Dropped: the queue has no room. Offer it again at its next use."""
    RESTING = "resting"
    """Dropped: the server failed a moment ago. Offer it again at its next use."""


@dataclass(slots=True, kw_only=True)
class UploadJob(RemoteJob):
    """Blocks that a ticket writes."""

    kind = Verb.WRITE

    epoch: int
    mark: int | None
    """Mark of the last reset before the blocks were stored; None: the mark of this
    host's last reset."""


class OfferRule:
    """Decides which offered blocks are written, and bounds those under way. One thread."""

    def __init__(
        self,
        when: WriteWhen,
        queue_bytes: int,
        payload_bytes: int,
        memory: PresenceMemory,
        renew_after_s: float,
        clock: Callable[[], float],
    ) -> None:
        """At most `queue_bytes` are under way, or one block; `memory` says which are there already.

        A block that arrived is wanted again after `renew_after_s`, so that it does not expire while
        it is used.
        """
        self._renew_after_s = renew_after_s
        self._clock = clock
        self._when = when
        self._queue_bytes = max(queue_bytes, payload_bytes)
        self._payload_bytes = payload_bytes
        self._memory = memory
        self._coming: dict[BlockHash, int] = {}
        """Blocks under way, each with the epoch in which it was offered."""
        self._touched: dict[BlockHash, None] = {}

    @property
    def borrowed_bytes(self) -> int:
        """Payload bytes that wait or are being sent."""
        return len(self._coming) * self._payload_bytes

    @property
    def takes_all(self) -> bool:
        """True if it wants every block that is offered now and is not there."""
        has_room = self.borrowed_bytes + self._payload_bytes <= self._queue_bytes
        return self._when is WriteWhen.THROUGH and has_room

    def may_want(self, key: BlockHash) -> bool:
        """Return True if the next offer of a block may be worth it. It counts as no offer."""
        return self._when is not WriteWhen.OFF and not self._is_there(key)

    def _is_there(self, key: BlockHash) -> bool:
        """Return True if a write of the block would be in vain."""
        if self._coming.get(key) == self._memory.epoch or self._memory.of(key) is Presence.HELD:
            return True
        return self._clock() < self._memory.arrived_s(key) + self._renew_after_s

    def answer(self, key: BlockHash, is_open: bool) -> Offer:
        """Decide about one block. One that is `QUEUED` counts as borrowed from now on."""
        if self._when is WriteWhen.OFF:
            return Offer.OFF
        if self._is_there(key):
            return Offer.HELD
        if self._when is WriteWhen.SECOND_TOUCH and key not in self._touched:
            self._touched[key] = None
            drop_oldest(self._touched)
            return Offer.FIRST_TOUCH
        if not is_open:
            return Offer.RESTING
        if self.borrowed_bytes + self._payload_bytes > self._queue_bytes:
            return Offer.FULL
        self._coming[key] = self._memory.epoch
        return Offer.QUEUED

    def end(self, keys: Sequence[BlockHash], arrived: Sequence[BlockHash], epoch: int) -> None:
        """End blocks that were `QUEUED` in `epoch`. Those that `arrived` are there now, and start
        anew if they vanish. One that was queued again after a reset goes on."""
        self._memory.note_arrivals(epoch, arrived)
        for key in keys:
            if self._coming.get(key) == epoch:
                del self._coming[key]
        for key in arrived:
            self._touched.pop(key, None)


class _Leaving(Sequence[RemoteObject]):
    """Objects of one call. Each is made when it is about to be sent.

    Its payload is then sent while it is in the processor's cache. A block that the server has
    already costs no checksum.
    """

    def __init__(
        self, objects: ObjectFormat, job: UploadJob, numbers: Sequence[int], generation: int
    ) -> None:
        self._objects = objects
        self._job = job
        self._numbers = numbers
        self._generation = generation

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, at: Any) -> Any:
        number = self._numbers[at]
        return self._objects.make(self._job.keys[number], self._generation, self._job.views[number])


class Uploads:
    """Makes the calls that write blocks. Any thread."""

    def __init__(self, core: RemoteCore) -> None:
        self._core = core

    def is_stale(self, job: UploadJob) -> bool:
        """Return True if a reset came after the call of `put`."""
        return job.epoch != self._core.memory.epoch

    def write(self, job: UploadJob, numbers: Sequence[int]) -> RemoteOutcome:
        """Send some blocks of a job. Return the outcome of the call; DROPPED if none is wanted now.

        Runs on a thread.
        """
        core = self._core
        generation = core.generation.current(core.engine.timeout_s)
        if generation.outcome is not RemoteOutcome.OK:
            core.give_up(job, numbers, generation.outcome)
            return generation.outcome
        own = core.generation.own_mark if job.mark is None else job.mark
        is_old = own is None or core.generation.mark > own  # another host's reset came since
        if is_old or self.is_stale(job):
            core.give_up(job, numbers, RemoteOutcome.DROPPED)
            return RemoteOutcome.DROPPED
        keys = [job.keys[number] for number in numbers]
        names = [core.objects.name(key, generation.value) for key in keys]
        objects = _Leaving(core.objects, job, numbers, generation.value)
        was_there = any(map(core.memory.was_there, keys))
        # The age of an object that was there is asked for, and most are then old enough.
        write, trips = (core.engine.renew, 2) if was_there else (core.engine.put, 1)
        in_one_trip, usual = core.engine.asks_in_one_trip, core.engine.names_per_call
        limit_s = core.engine.timeout_s * (min(len(names), usual) if in_one_trip else len(names))
        outcomes = core.call(Verb.WRITE, lambda: write(names, objects, limit_s), trips)
        held = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome in THERE]
        core.memory.note_arrivals(job.epoch, held)
        job.conclude(numbers, outcomes)
        return outcome_of_call(outcomes)
