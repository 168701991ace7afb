"""Lookups of a remote tier: the chains of one step become one batch on one thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ..base import BlockHash
from .base import FAILURES, RemoteEngine, RemoteOutcome, worst_of
from .objects import ObjectFormat
from .presence import ChainSearch, Presence, PresenceMemory, held_prefix
from .remote_counters import RemoteCounters, Verb
from .shared_generation import SharedGeneration

NAMES_PER_LOOKUP = 4096
"""Limit on the names of one call."""


@dataclass(slots=True)
class ChainAsk:
    """A chain of blocks that a ticket asks for, in prefix order."""

    ticket: int
    keys: Sequence[BlockHash]
    ends_s: float
    is_over: bool = False
    """True once its end was reported: its answer came, or its deadline passed."""
    answers: list[RemoteOutcome] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RemoteLink:
    """Parts that lookups, reads and uploads share."""

    engine: RemoteEngine
    objects: ObjectFormat
    generation: SharedGeneration
    memory: PresenceMemory
    counters: RemoteCounters
    clock: Callable[[], float]

    def call(
        self, verb: Verb, make: Callable[[], list[RemoteOutcome]], trips: int = 1
    ) -> list[RemoteOutcome]:
        """Make a call of the engine about some names, and count it.

        `trips`: requests for each name, if the engine does not ask in one trip.
        """
        begun_s = self.clock()
        outcomes = make()
        took_s = self.clock() - begun_s
        has_payload = verb in (Verb.READ, Verb.WRITE)
        moved = outcomes.count(RemoteOutcome.OK) if has_payload else 0
        self.counters.note(
            verb,
            outcomes,
            requests=1 if self.engine.asks_in_one_trip else trips * len(outcomes),
            payload_bytes=moved * self.objects.payload_bytes,
            took_s=took_s,
        )
        return outcomes


class RemoteLookups:
    """Answers batches of chains. Any thread."""

    def __init__(self, link: RemoteLink) -> None:
        self._link = link

    def answer(self, asks: Sequence[ChainAsk]) -> RemoteOutcome:
        """Ask the engine for all chains that somebody still waits for, and fill their answers.

        Return the worst outcome. Runs on a thread.
        """
        link = self._link
        begun_s, epoch = link.clock(), link.memory.epoch
        asks = [ask for ask in asks if not ask.is_over and ask.ends_s > begun_s]
        if not asks:
            return RemoteOutcome.OK
        ends_s = max(ask.ends_s for ask in asks)
        generation = link.generation.current(ends_s - begun_s)
        if generation.outcome is not RemoteOutcome.OK:
            for ask in asks:
                ask.answers = [generation.outcome] * len(ask.keys)
            return generation.outcome
        answer_all = self._ask_all if link.engine.asks_in_one_trip else self._search_all
        return answer_all(asks, generation.value, ends_s, epoch)

    def _exist(
        self, keys: Sequence[BlockHash], generation: int, ends_s: float
    ) -> list[RemoteOutcome]:
        link = self._link
        found: list[RemoteOutcome] = []
        for start in range(0, len(keys), NAMES_PER_LOOKUP):
            names = [link.objects.name(k, generation) for k in keys[start:][:NAMES_PER_LOOKUP]]
            ask = partial(link.engine.exist_many, names, max(0.0, ends_s - link.clock()))
            found += link.call(Verb.LOOKUP, ask)
        return found

    def _ask_all(
        self, asks: Sequence[ChainAsk], generation: int, ends_s: float, epoch: int
    ) -> RemoteOutcome:
        """One pipelined call about every block that is not known."""
        memory = self._link.memory
        unknown = dict.fromkeys(
            key for ask in asks for key in ask.keys if memory.of(key) is Presence.UNKNOWN
        )
        keys = [*unknown]
        answers = dict(zip(keys, self._exist(keys, generation, ends_s), strict=True))
        held = [key for key, answer in answers.items() if answer is RemoteOutcome.OK]
        absent = [key for key, answer in answers.items() if answer is RemoteOutcome.ABSENT]
        memory.note(epoch, held, absent)
        for ask in asks:
            ask.answers = [answers.get(k) or _known(memory.of(k)) for k in ask.keys]
        return worst_of(answers.values())

    def _search_all(
        self, asks: Sequence[ChainAsk], generation: int, ends_s: float, epoch: int
    ) -> RemoteOutcome:
        """Search all chains at once: one round of requests narrows each of them."""
        memory = self._link.memory
        open_searches = [
            (ask, ChainSearch(len(ask.keys), held_prefix(memory, ask.keys))) for ask in asks
        ]
        worst = RemoteOutcome.OK
        while open_searches:
            probes = [(ask, search, search.probes()) for ask, search in open_searches]
            wanted = dict.fromkeys(
                ask.keys[block] for ask, _, blocks in probes for block in blocks if not ask.is_over
            )
            keys = [*wanted]
            answers = dict(zip(keys, self._exist(keys, generation, ends_s), strict=True))
            open_searches = []
            for ask, search, blocks in probes:
                found = {block: answers.get(ask.keys[block]) for block in blocks}
                failed = [a for a in found.values() if a is not None and a in FAILURES]
                if failed:
                    worst = worst_of(failed)
                    self._end(ask, search.held, failed[0], epoch)
                    continue
                search.learn({block: a is RemoteOutcome.OK for block, a in found.items()})
                if search.probes() and not ask.is_over:
                    open_searches.append((ask, search))
                else:
                    self._end(ask, search.held, RemoteOutcome.ABSENT, epoch)
        return worst

    def _end(self, ask: ChainAsk, held: int, rest: RemoteOutcome, epoch: int) -> None:
        ask.answers = [RemoteOutcome.OK] * held + [rest] * (len(ask.keys) - held)
        absent = ask.keys[held:] if rest is RemoteOutcome.ABSENT and not ask.is_over else ()
        self._link.memory.note(epoch, ask.keys[:held], absent)


def _known(presence: Presence) -> RemoteOutcome:
    return RemoteOutcome.OK if presence is Presence.HELD else RemoteOutcome.ABSENT
