"""The node of a remote tier: carries out the jobs of one engine with a `RemoteStore`.

All methods are called by one thread, the node's own. Calls of the server run on the threads of the
store. A job is answered once, when every block of it has its outcome. A reset is answered when the
server was told, so a scheduler whose node dies before that repeats it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec

from ....tiers.base import GROUP_BYTES, BlockHash, BlockOutcome
from ....tiers.nvme.path.path_messages import unpack_slots
from ....tiers.remote.base import RemoteOutcome
from ....tiers.remote.remote_counters import Verb
from ....tiers.remote.remote_store import RemoteEnded, RemoteState, RemoteStore
from ..path_wire import LIFE_INTERVAL_S, JobDone, NodeReady, PutJob, pack_outcomes
from .remote_wire import (
    AskJob,
    FetchJob,
    RemoteNote,
    RemoteResetJob,
    RemoteSetup,
    ResetDone,
)

NOTE_INTERVAL_S = 1.0
"""Shortest time between two notes whose totals alone differ."""
LIFE_LIMIT_S = 300.0
"""Time for which a node shows life while a reset waits for the server. A silent node is ended, and
the next one waits in its place. That helps only against a call that never returns."""

_OF_REMOTE = {
    RemoteOutcome.OK: BlockOutcome.OK,
    RemoteOutcome.ABSENT: BlockOutcome.GONE,
    RemoteOutcome.EXISTS: BlockOutcome.HELD,
    RemoteOutcome.CORRUPT: BlockOutcome.CORRUPT,
    RemoteOutcome.NO_SPACE: BlockOutcome.NO_SPACE,
    RemoteOutcome.DENIED: BlockOutcome.IO_ERROR,
    RemoteOutcome.BUSY: BlockOutcome.IO_ERROR,
    RemoteOutcome.TIMED_OUT: BlockOutcome.IO_ERROR,
    RemoteOutcome.IO_ERROR: BlockOutcome.IO_ERROR,
    RemoteOutcome.RESTING: BlockOutcome.CANCELLED,
    RemoteOutcome.DROPPED: BlockOutcome.REFUSED,
}


class RemoteNode:
    """Jobs of one engine."""

    def __init__(
        self,
        store: RemoteStore,
        arena: memoryview,
        setup: RemoteSetup,
        tell: Callable[[msgspec.Struct], None],
        clock: Callable[[], float],
    ) -> None:
        """`arena` holds the slots, one block each. `setup` says which part of them objects hold.

        `tell` sends a message to the scheduler. `clock` returns monotonic seconds.
        """
        self._store = store
        self._arena = arena
        self._setup = setup
        self._tell = tell
        self._clock = clock
        self._began_s: dict[int, float] = {}
        """Time at which each job came that was not answered, by ticket."""
        self._resets: list[int] = []
        """Tickets of resets of which the server was not told yet."""
        self._reset_s = -math.inf
        """Time of the last of them."""
        self._noted = RemoteNote(None)
        self._noted_s = self._shown_s = clock()

    def order(self, message: Any) -> None:
        """Begin a job; `work` sends the questions of all jobs that came."""
        match message:
            case AskJob():
                self._ask(message)
            case FetchJob():
                self._get(message)
            case PutJob():
                self._put(message)
            case RemoteResetJob():
                self._store.reset(message.mark, is_new=message.is_new, known=message.known)
                self._resets.append(message.ticket)
                self._reset_s = self._clock()

    def work(self) -> None:
        """Answer what ended, and report changes. Call it after orders, ends, and now and then."""
        self._store.send()
        all_ended, state = self._store.poll(), self._store.state()
        if self._resets and state.own_mark is not None:
            for ticket in self._resets:
                self._tell(ResetDone(ticket, state.own_mark))
            self._resets.clear()
            self._noted = RemoteNote(None)  # the scheduler ignored notes until now
        if self._resets:
            self._show_life()
        self._note(state)  # before the answers, so that no one asks a server that rests
        for ended in all_ended:
            self._ended(ended)

    # -- inside --------------------------------------------------------------------------------

    def _show_life(self) -> None:
        now_s = self._clock()
        if now_s - self._shown_s >= LIFE_INTERVAL_S and now_s - self._reset_s < LIFE_LIMIT_S:
            self._shown_s = now_s
            self._tell(NodeReady())

    def _ask(self, order: AskJob) -> None:
        keys = [BlockHash(key) for request in order.requests for key in request]
        owners = [at for at, request in enumerate(order.requests) for _ in request]
        chains: dict[tuple[int, bytes], list[int]] = {}
        for at, (owner, key) in enumerate(zip(owners, keys, strict=True)):
            chains.setdefault((owner, key[-GROUP_BYTES:]), []).append(at)
        self._began_s[order.ticket] = self._clock()
        self._store.ask(order.ticket, keys, [*chains.values()])

    def _get(self, order: FetchJob) -> None:
        keys = [BlockHash(key) for key in order.keys]
        views = self._views(order.arena_slots, self._setup.copies)
        self._began_s[order.ticket] = self._clock()
        self._store.get(order.ticket, keys, views, order.limit_s)

    def _put(self, order: PutJob) -> None:
        keys = [BlockHash(key) for key in order.keys]
        self._began_s[order.ticket] = self._clock()
        self._store.put(order.ticket, keys, self._views(order.arena_slots, 1), order.epoch)

    def _ended(self, ended: RemoteEnded) -> None:
        codes = pack_outcomes(tuple(_outcome(each, ended.kind) for each in ended.outcomes))
        took_s = self._clock() - self._began_s.pop(ended.ticket)
        self._tell(JobDone(ended.ticket, codes, took_s))

    def _views(self, packed: bytes, copies: int) -> list[memoryview]:
        size, wanted = self._setup.slot_bytes, self._setup.payload_bytes * copies
        slots = unpack_slots(packed).tolist()
        return [self._arena[slot * size : slot * size + wanted] for slot in slots]

    def _note(self, state: RemoteState) -> None:
        """Report resets and breakers at once, and totals now and then."""
        now_s = self._clock()
        is_news = (
            _mark(state) != self._noted.mark
            or {v for v, totals in self._noted.verbs.items() if totals.is_resting} != state.resting
        )
        if not is_news and now_s - self._noted_s < NOTE_INTERVAL_S:
            return
        self._noted_s = now_s
        note = self._current(state)
        if note != self._noted:
            self._noted = note
            samples_s = self._store.counters.take_samples()
            self._tell(msgspec.structs.replace(note, samples_s=samples_s))

    def _current(self, state: RemoteState) -> RemoteNote:
        counters = self._store.counters
        verbs = {
            verb.value: msgspec.structs.replace(
                totals,
                outcomes=dict(totals.outcomes),
                openings=state.openings.get(verb, 0),
                is_resting=verb in state.resting,
            )
            for verb, totals in counters.verbs.items()
        }
        return RemoteNote(
            _mark(state),
            verbs,
            dict(counters.unsent),
            counters.lookup_s,
            memory=self._store.engine_memory(),
        )


def _mark(state: RemoteState) -> int | None:
    return None if state.generation is None else state.mark


def _outcome(outcome: RemoteOutcome, kind: Verb) -> BlockOutcome:
    if kind is Verb.WRITE and outcome is RemoteOutcome.ABSENT:
        return BlockOutcome.REFUSED
    return _OF_REMOTE[outcome]
