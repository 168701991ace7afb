"""Lookups of a remote tier: the chains of one step become one batch on one thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ..base import BlockHash
from .base import FAILURES, RemoteEngine, RemoteOutcome, worst_of
from .objects import ObjectFormat
from .presence import ChainSearch, PresenceMemory
from .remote_counters import RemoteCounters, Verb
from .remote_job import RemoteJob
from .shared_generation import SharedGeneration

NAMES_PER_LOOKUP = 4096
"""Limit on the names of one call."""


@dataclass(slots=True, kw_only=True)
class LookupJob(RemoteJob):
    """Blocks that a ticket looks up."""

    kind = Verb.LOOKUP

    chains: Sequence[Sequence[int]]
    """Numbers of the blocks of each prefix chain, head first."""


@dataclass(frozen=True, slots=True)
class RemoteCore:
    """Parts that lookups, reads and uploads share."""

    engine: RemoteEngine
    objects: ObjectFormat
    generation: SharedGeneration
    memory: PresenceMemory
    """Blocks that the server had at the last answer. Uploads renew them; lookups always ask."""
    counters: RemoteCounters
    clock: Callable[[], float]

    def give_up(self, job: RemoteJob, numbers: Sequence[int], outcome: RemoteOutcome) -> None:
        """End blocks of a job that the engine was not asked for."""
        if job.kind is Verb.WRITE:
            self.counters.note_unsent(outcome, len(numbers))
        else:
            self.counters.note(job.kind, [outcome] * len(numbers))
        job.conclude(numbers, [outcome] * len(numbers))

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
    """Answers batches of lookups. Any thread."""

    def __init__(self, core: RemoteCore) -> None:
        self._core = core

    def answer(self, jobs: Sequence[LookupJob]) -> RemoteOutcome:
        """Ask the engine for all blocks that somebody still waits for, and conclude their jobs.

        Return the worst outcome. Runs on a thread.
        """
        core = self._core
        begun_s, epoch = core.clock(), core.memory.epoch
        for job in jobs:
            if job.ends_s <= begun_s:
                job.give_up(RemoteOutcome.TIMED_OUT, waits=True)
        jobs = [job for job in jobs if job.left]
        if not jobs:
            return RemoteOutcome.OK
        ends_s = max(job.ends_s for job in jobs)
        generation = core.generation.current(ends_s - begun_s)
        if generation.outcome is not RemoteOutcome.OK:
            for job in jobs:
                job.give_up(generation.outcome, waits=True)
            return generation.outcome
        answer_all = self._ask_all if core.engine.asks_in_one_trip else self._search_all
        return answer_all(jobs, generation.value, ends_s, epoch)

    def _exist(
        self, keys: Sequence[BlockHash], generation: int, ends_s: float
    ) -> dict[BlockHash, RemoteOutcome]:
        core = self._core
        found: list[RemoteOutcome] = []
        for start in range(0, len(keys), NAMES_PER_LOOKUP):
            names = [core.objects.name(k, generation) for k in keys[start:][:NAMES_PER_LOOKUP]]
            ask = partial(core.engine.exist_many, names, max(0.0, ends_s - core.clock()))
            found += core.call(Verb.LOOKUP, ask)
        return dict(zip(keys, found, strict=True))

    def _ask_all(
        self, jobs: Sequence[LookupJob], generation: int, ends_s: float, epoch: int
    ) -> RemoteOutcome:
        """One pipelined call about every block."""
        wanted = dict.fromkeys(key for job in jobs for key in job.keys)
        answers = self._exist([*wanted], generation, ends_s)
        held = [key for key, answer in answers.items() if answer is RemoteOutcome.OK]
        absent = [key for key, answer in answers.items() if answer is RemoteOutcome.ABSENT]
        self._core.memory.note(epoch, held, absent)
        for job in jobs:
            job.conclude(range(len(job.keys)), [answers[key] for key in job.keys])
        return worst_of(answers.values())

    def _search_all(
        self, jobs: Sequence[LookupJob], generation: int, ends_s: float, epoch: int
    ) -> RemoteOutcome:
        """Search all chains at once: one round of requests narrows each of them."""
        searches = [(job, chain, ChainSearch(len(chain))) for job in jobs for chain in job.chains]
        worst = RemoteOutcome.OK
        while going := [
            (job, chain, search, search.probes()) for job, chain, search in searches if job.left
        ]:
            wanted = dict.fromkeys(
                job.keys[chain[at]] for job, chain, _, probes in going for at in probes
            )
            answers = self._exist([*wanted], generation, ends_s)
            searches = []
            for job, chain, search, probes in going:
                found = {at: answers[job.keys[chain[at]]] for at in probes}
                failed = [answer for answer in found.values() if answer in FAILURES]
                if failed:
                    worst = worst_of([worst, *failed])
                    self._end(job, chain, search.held, failed[0], epoch)
                    continue
                search.learn({at: a is RemoteOutcome.OK for at, a in found.items()})
                if search.probes():
                    searches.append((job, chain, search))
                else:
                    self._end(job, chain, search.held, RemoteOutcome.ABSENT, epoch)
        return worst

    def _end(
        self,
        job: LookupJob,
        chain: Sequence[int],
        held: int,
        rest: RemoteOutcome,
        epoch: int,
    ) -> None:
        keys = [job.keys[number] for number in chain]
        absent = keys[held:] if rest is RemoteOutcome.ABSENT else ()
        self._core.memory.note(epoch, keys[:held], absent)
        job.conclude(chain, [RemoteOutcome.OK] * held + [rest] * (len(chain) - held))
