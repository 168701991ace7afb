"""`MemoryNode`: the node of an engine and the writer of its path, in memory and without threads.

It is the client of a `NodeTier`. Its transfers are those of two `MemoryHandler`s, so they run when
a test says so, and fail on command.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from kvcascade.handlers.node.node_keeper import JOBS_AT_MOST
from kvcascade.handlers.node.path_wire import (
    GetJob,
    JobDone,
    NodeJoined,
    NodeState,
    PutJob,
    ResetJob,
    pack_outcomes,
)
from kvcascade.tiers.base import BlockHash, BlockOutcome, BlockStatus, LoadStoreSpec
from kvcascade.tiers.nvme.path.path_messages import (
    Epoch,
    KeysListed,
    ListKeys,
    Removed,
    Stored,
    TierFigures,
    Touch,
    Why,
    unpack_slots,
)
from kvcascade.tiers.policies.ordered import CachePolicy

from .day_log import NotedBudget
from .memory_backend import MemoryBackend
from .memory_handler import MemoryHandler

FOLDER = "/memory"
LOST = (BlockOutcome.CORRUPT, BlockOutcome.GONE)
"""Outcomes of reads after which the block leaves the tier."""

OnEnd = Callable[[JobDone | None], None]


class MemoryPresence:
    """The face of a `PresenceTable`."""

    def __init__(self) -> None:
        self.epoch = 0
        self.slots: dict[bytes, int] = {}

    def find(self, key: bytes) -> int:
        """The slot of a block; -1 if it is absent."""
        return self.slots.get(key, -1)


class MemoryNode:
    """A tier of memory behind a node."""

    def __init__(
        self,
        arena: MemoryBackend,
        backend: MemoryBackend,
        policy: CachePolicy,
        on_note: Callable[[Any], None],
        *,
        is_immediate: bool = False,
        budget: NotedBudget | None = None,
    ) -> None:
        """`on_note` gets what a node says beside answers. For the rest see `MemoryHandler`."""
        self.down = MemoryHandler(arena, backend, is_immediate)
        self.up = MemoryHandler(backend, arena, is_immediate)
        self.presence = MemoryPresence()
        self._backend, self._policy, self._budget = backend, policy, budget
        self._on_note = on_note
        self._tickets = count(1)
        self._ends: dict[int, tuple[OnEnd, Callable[[Sequence[BlockOutcome]], JobDone]]] = {}
        """By ticket: who gets the answer, and what makes it of the outcomes of the transfers."""
        self.is_full = False
        """If true, the writer grants no slot, and makes no room."""
        self.mail: deque[Callable[[], None]] = deque()
        """Notes and answers until the next `poll` or `listen`."""
        self.may_deliver: Callable[[], bool] = lambda: True
        """Whether the calling thread holds the lock under which notes and answers land."""
        self._evicted_blocks = 0
        self._figures: TierFigures | None = None

    def start(self) -> None:
        """Join the path."""
        size = self._backend.capacity
        self._tell(NodeJoined(NodeState.LEADING, FOLDER, size, 0))
        self._tell_figures()

    # -- the client of a tier --------------------------------------------------------------------

    def submit(self, make_job: Callable[[int], Any], on_end: OnEnd) -> bool:
        """See `NodeClient`."""
        if len(self._ends) >= JOBS_AT_MOST:
            return False
        ticket = next(self._tickets)
        message = make_job(ticket)
        match message:
            case PutJob():
                return self._put(message, on_end)
            case GetJob():
                return self._get(message, on_end)
            case ResetJob():
                if message.is_passed_on and self.presence.slots:
                    self._tell(Removed([*self.presence.slots]))
                self._forget()
                self._tell(Epoch(self.presence.epoch, ticket))
                self.mail.append(partial(on_end, JobDone(ticket)))
        return True

    def tell(self, message: Any) -> None:
        """See `NodeClient`."""
        match message:
            case Touch(keys, is_chain=True):
                self._policy.note_chain([BlockHash(key) for key in keys])
            case Touch(keys, is_settle=True):
                self._policy.settle([BlockHash(key) for key in keys])
            case Touch(keys):
                self._policy.touch([BlockHash(key) for key in keys])
            case ListKeys(after, limit):
                known = sorted(key for key in self.presence.slots if key > after)
                self._tell(KeysListed(after, known[:limit]))

    def flush(self) -> None:
        """See `NodeClient`. Every order is taken at once."""

    def poll(self) -> None:
        """See `NodeClient`."""
        for result in (*self.down.get_finished(), *self.up.get_finished()):
            on_end, done = self._ends.pop(result.job_id)
            self.mail.append(partial(on_end, done(result.outcomes)))
        self._tell_figures()
        self._deliver()

    def listen(self) -> None:
        """See `NodeClient`. A reset by another engine is seen here."""
        if self._backend.is_overtaken:
            self._backend.is_overtaken = False
            self._forget()
            self._tell(Epoch(self.presence.epoch))
        self.poll()

    def wait_for_news(self, limit_s: float) -> None:
        """Let the oldest transfer go on."""
        queued = [*self.down.queued, *self.up.queued]
        for handler in (self.down, self.up) if queued else ():
            handler.step(min(queued))

    def replace(self) -> None:
        """See `NodeClient`."""
        self.die()

    def kill(self) -> bool:
        """See `NodeClient`."""
        return not self._ends

    def die(self) -> None:
        """The process of the node dies, and another one joins at once."""
        lost, self._ends = self._ends, {}
        for handler in (self.down, self.up):
            handler.wait(set(handler.queued))
            handler.get_finished()
        for on_end, _ in lost.values():
            self.mail.append(partial(on_end, None))
        self._tell(None)
        self.start()

    # -- jobs ------------------------------------------------------------------------------------

    def _put(self, order: PutJob, on_end: OnEnd) -> bool:
        if not self.down.accepts:
            return False
        keys = [BlockHash(key) for key in order.keys]
        granted = self._grant(keys)
        epoch = self.presence.epoch
        sources = unpack_slots(order.arena_slots)[[at for at, _ in granted]]

        def done(outcomes: Sequence[BlockOutcome]) -> JobDone:
            became = {at: outcome for (at, _), outcome in zip(granted, outcomes, strict=True)}
            if epoch != self.presence.epoch:
                became = dict.fromkeys(became, BlockOutcome.GONE)
            self._commit([(keys[at], status, became[at]) for at, status in granted])
            refused = BlockOutcome.NO_SPACE if self.is_full else BlockOutcome.CANCELLED
            packed = pack_outcomes(tuple(became.get(at, refused) for at in range(len(keys))))
            lacks = Why.FULL if self.is_full else Why.LATER
            why = Why.GRANTED if len(granted) == len(keys) else lacks
            return JobDone(order.ticket, packed, why=why)

        self._ends[order.ticket] = on_end, done
        if self._budget is not None:
            self._budget.started(len(granted) * self._backend.block_size)
        target = _places([status for _, status in granted])
        return self.down.transfer_async(order.ticket, (LoadStoreSpec(sources), target))

    def _commit(self, blocks: Sequence[tuple[BlockHash, BlockStatus, BlockOutcome]]) -> None:
        """Take in the blocks of a put that arrived, and free the slots of the others."""
        stored = [(key, status) for key, status, outcome in blocks if outcome is BlockOutcome.OK]
        for key, status in stored:
            status.ref_cnt = 0
            self.presence.slots[key] = status.block_id
        for _, status, outcome in blocks:
            if outcome is not BlockOutcome.OK:
                self._backend.free(status)
        if self._budget is not None:
            self._budget.ended(len(blocks) * self._backend.block_size)
        if stored:
            self._policy.insert_many([key for key, _ in stored], [each for _, each in stored])
            self._tell(Stored([key for key, _ in stored]))

    def _grant(self, keys: Sequence[BlockHash]) -> list[tuple[int, BlockStatus]]:
        """Give slots to the first keys, as many as can be had; evict for them."""
        if self.is_full:
            return []
        missing = len(keys) - self._backend.get_num_free_blocks()
        removed: list[bytes] = []
        for _ in range(missing):
            evicted = self._policy.evict(1, ())
            if evicted is None:
                break
            for key, status in evicted:
                self._leave(key, status)
                removed.append(key)
        self._evicted_blocks += len(removed)
        if removed:
            self._tell(Removed(removed))
        room = min(len(keys), self._backend.get_num_free_blocks())
        return list(enumerate(self._backend.allocate_blocks(keys[:room])))

    def _get(self, order: GetJob, on_end: OnEnd) -> bool:
        if not self.up.accepts:
            return False
        keys = [BlockHash(key) for key in order.keys]
        slots = unpack_slots(order.arena_slots)
        found = [(at, status) for at, key in enumerate(keys) if (status := self._policy.get(key))]
        self._policy.touch([keys[at] for at, _ in found])
        epoch = self.presence.epoch
        for _, status in found:
            status.ref_cnt += 1

        def done(outcomes: Sequence[BlockOutcome]) -> JobDone:
            became = dict.fromkeys(range(len(keys)), BlockOutcome.GONE)
            for (at, status), outcome in zip(found, outcomes, strict=True):
                status.ref_cnt -= 1
                if epoch != self.presence.epoch:
                    if status.ref_cnt == 0:
                        self._backend.free(status)
                    continue
                became[at] = outcome
                if outcome in LOST and self._policy.get(keys[at]) is status:
                    self._policy.remove(keys[at])
                    self._leave(keys[at], status)
                    self._tell(Removed([keys[at]]))
            return JobDone(order.ticket, pack_outcomes(tuple(became.values())))

        self._ends[order.ticket] = on_end, done
        source = _places([status for _, status in found])
        target = LoadStoreSpec(slots[[at for at, _ in found]])
        return self.up.transfer_async(order.ticket, (source, target))

    # -- inside ----------------------------------------------------------------------------------

    def _tell(self, note: Any) -> None:
        self.mail.append(partial(self._on_note, note))

    def _deliver(self) -> None:
        assert self.may_deliver()
        while self.mail:
            self.mail.popleft()()

    def _leave(self, key: BlockHash, status: BlockStatus) -> None:
        self.presence.slots.pop(key, None)
        self._backend.free(status)

    def _forget(self) -> None:
        """A reset, by whatever engine. Slots in use come back when their transfers end."""
        self.presence.epoch += 1
        self.presence.slots.clear()
        self._policy.clear()
        self._backend.reset()

    def _tell_figures(self) -> None:
        budget = self._budget
        figures = TierFigures(
            len(self.presence.slots),
            self._backend.capacity,
            self._evicted_blocks,
            None if budget is None else budget.left_bytes(),
            is_reporter=True,
            is_path_reporter=True,
        )
        if figures != self._figures:
            self._figures = figures
            self._tell(figures)


def _places(statuses: Sequence[BlockStatus]) -> LoadStoreSpec:
    return LoadStoreSpec(np.array([status.block_id for status in statuses], dtype=np.int32))
