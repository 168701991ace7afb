"""State of a remote tier in the scheduler's process: notes of its node, and questions to it."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import msgspec

from ...handlers.node.path_wire import JobDone, unpack_outcomes
from ...handlers.node.remote.remote_wire import AskJob, RemoteNote
from ...tiers.base import RESET_TICKS_PER_S, BlockHash, BlockOutcome
from ...tiers.remote.presence import PresenceMemory, drop_oldest
from ...tiers.remote.remote_counters import Verb, VerbTotals
from ..counters import latencies
from .port import ASKING
from .single_tier import MAX_MARKS, NodeClient, TierFeed

CLOCK_SKEW_TICKS = 60 * RESET_TICKS_PER_S
"""Greatest difference of two hosts' clocks. An engine that stored blocks before it heard of a reset
keeps them only if the reset is older than the engine by more than that."""

_NO_ANSWER = frozenset({BlockOutcome.IO_ERROR, BlockOutcome.CANCELLED})
"""Outcomes of questions that the server did not answer."""


class RemoteFeed(TierFeed):
    """Notes of a node."""

    def __init__(self, began: int, clock: Callable[[], float]) -> None:
        """`began`: mark of a reset that begins now. `clock` returns monotonic seconds."""
        super().__init__()
        self.memory = PresenceMemory(clock)
        """Answers of the server."""
        self.unsent: Counter[str] = Counter()
        """Blocks that this process did not even send to the node, by reason."""
        self._before = RemoteNote(None)
        """Totals of the nodes that died."""
        self._last = RemoteNote(None)
        self.is_up = False
        """True from the first note of a node until that node dies."""
        self.has_failed = False
        """True after the server failed, until it answers a question. No request waits for it."""
        self.calls_s: dict[str, deque[float]] = {verb.value: latencies() for verb in Verb}
        """Seconds of each call of the server, by verb; the metrics remove them."""
        self.mark: int | None = None
        """Mark of the last reset before this engine's blocks were stored; None while it is unknown,
        or older blocks are not forgotten yet."""
        self.has_blocks = False
        """True once this engine may have blocks."""
        self._began = began
        self.known = 0
        """Greatest mark that was heard of."""
        self._newest: int | None = None
        """Mark of a reset by another host that was not taken in yet; None: there was none."""
        self._is_resetting = False
        self.has_reset = False
        """True once this engine itself was reset. Any thread may read it."""

    @property
    def latency_s(self) -> float:
        """Time of a request to the server that moves no payload; 0 while it is unknown."""
        return self._last.latency_s or 0.0

    @property
    def node_memory(self) -> bytes:
        """Facts that the last node left for the next one. Any thread."""
        return self._last.memory

    @property
    def lookups_rest(self) -> bool:
        """True while the node asks for no blocks, because the server failed."""
        looked = self._last.verbs.get(Verb.LOOKUP)
        return looked is not None and looked.is_resting

    def begin_reset(self, *, is_new: bool) -> None:
        """Ignore what the node says of resets until `end_reset`. `is_new`: it is this engine's."""
        self.has_reset |= is_new
        self._is_resetting, self._newest, self.mark = True, None, None

    def end_reset(self, mark: int) -> None:
        """Note the mark of this engine's reset."""
        self._is_resetting, self.mark = False, mark

    def note_failure(self) -> None:
        """Note that the server failed: what it has is unknown."""
        self.has_failed = True
        self.memory.forget()

    def was_reset(self) -> bool:
        """Return True once after another host reset the namespace, or may have done so."""
        if self._newest is None:
            return False
        self.marks = [*self.marks, self._newest][-MAX_MARKS:]
        self.mark, self._newest = self._newest, None
        return True

    def totals(self) -> RemoteNote:
        """Return the totals since the start of the engine. Without a node all verbs rest."""
        found = self._of_nodes()
        unsent = Counter(found.unsent) + self.unsent
        verbs = found.verbs
        if not self.is_up:
            verbs = {v: msgspec.structs.replace(n, is_resting=True) for v, n in verbs.items()}
        return msgspec.structs.replace(found, verbs=verbs, unsent=dict(unsent))

    def _of_nodes(self) -> RemoteNote:
        last = self._last
        verbs = {
            verb.value: _sum(self._before.verbs.get(verb.value), last.verbs.get(verb.value))
            for verb in Verb
        }
        unsent = Counter(self._before.unsent) + Counter(last.unsent)
        return RemoteNote(last.mark, verbs, dict(unsent))

    def take(self, note: Any) -> None:
        self.is_up = note is not None
        if note is None:
            last = self._last
            self._before = self._of_nodes()
            self._last = RemoteNote(None, latency_s=last.latency_s, memory=last.memory)
        elif isinstance(note, RemoteNote):
            self._take_in(note)

    def _take_in(self, note: RemoteNote) -> None:
        if _openings(note) > _openings(self._last):
            self.note_failure()
        last = self._last
        self._last = msgspec.structs.replace(
            note, latency_s=note.latency_s or last.latency_s, memory=note.memory or last.memory
        )
        for verb, samples_s in note.samples_s.items():
            self.calls_s[verb].extend(samples_s)
        self.known = max(self.known, note.mark or 0)
        if note.mark is None or self._is_resetting:
            return
        is_late = note.mark > self._began - CLOCK_SKEW_TICKS
        if self._newest is not None:
            self._newest = max(self._newest, note.mark)
        elif self.mark is None and not (self.has_blocks and is_late):
            self.mark = note.mark
        elif self.mark is None or note.mark > self.mark:  # before this engine's blocks, perhaps
            self.mark, self._newest = None, note.mark


def _openings(note: RemoteNote) -> int:
    """Return how often the breakers of lookups and reads have opened."""
    return sum(note.verbs[verb].openings for verb in (Verb.LOOKUP, Verb.READ) if verb in note.verbs)


def _sum(before: VerbTotals | None, last: VerbTotals | None) -> VerbTotals:
    if before is None or last is None:
        found = before or last or VerbTotals()
        return found if last else msgspec.structs.replace(found, is_resting=False)
    return VerbTotals(
        before.calls + last.calls,
        before.requests + last.requests,
        before.payload_bytes + last.payload_bytes,
        before.seconds + last.seconds,
        dict(Counter(before.outcomes) + Counter(last.outcomes)),
        before.openings + last.openings,
        last.is_resting,
    )


class _Remaining(NamedTuple):
    """Rest of the deadline after the lookup of a block."""

    left_s: float
    until_s: float
    """Monotonic time from which a read has the whole deadline again."""


class _Question(NamedTuple):
    """A question about blocks of one request."""

    ends_s: float
    """Time at which the blocks that were not answered count as absent."""
    keys: list[BlockHash]


@dataclass(slots=True, eq=False)
class Questions:
    """Questions whether blocks are there: gathered in a step, and sent as one batch.

    After the server failed, one block at a time is asked for, and no request waits for the answer.
    So a server that has stopped costs one deadline, not one for each probe.

    Used under the manager's lock.
    """

    _client: NodeClient
    _feed: RemoteFeed
    _clock: Callable[[], float]
    _deadline_s: float
    """Time after its question at which a block that is not known counts as absent."""
    _may_ask: Callable[[], bool]
    """Returns False while the answers are of no use."""
    asked: dict[BlockHash, float] = field(default_factory=dict)
    """Blocks whose answer is awaited, with the time at which they count as absent."""
    _unsent: list[_Question] = field(default_factory=list)
    """Questions of this step. A block can be in several, or in one twice; `send` asks for it once,
    because a chain in which a block comes again would seem to end before it."""
    _owner: object = None
    """Owner of the last block in this step. Most blocks have the owner of the one before."""
    _keys: list[BlockHash] = field(default_factory=list)
    """Blocks of that owner. A list: each growth of `asked` would delay one lookup."""
    _answer: int = 0
    """Answer about them. They are asked for only if it is ASKING."""
    _remaining: dict[BlockHash, _Remaining] = field(default_factory=dict)
    """Blocks that are there and were not read since their lookup."""
    _rests_until_s: float = -math.inf
    """Time until which nothing is asked, because a deadline passed without an answer. The node
    notices at about the same time, and says so in a note."""

    def ask(self, key: BlockHash, owner: object) -> int:
        """Ask for an unknown block unless that was done.

        Return ASKING if its owner may wait for the answer, else 0.
        """
        if owner is self._owner:  # `send` leaves out what was asked for before
            self._keys.append(key)
            return self._answer
        if key in self.asked:
            return ASKING if self._may_ask() and self._is_awaited(key, self.asked[key]) else 0
        self._begin(key, owner)
        return self._answer

    def _begin(self, key: BlockHash, owner: object) -> None:
        """Begin a question of another owner with this block, unless none may be asked for now."""
        feed, now_s = self._feed, self._clock()
        self._owner, self._keys, self._answer = owner, [], 0
        if not self._may_ask() or feed.lookups_rest or now_s < self._rests_until_s:
            return
        if feed.has_failed and (self.asked or self._unsent):
            return
        feed.has_blocks = True  # or will have
        asked = [key]
        self._unsent.append(_Question(now_s + self._deadline_s, asked))
        if not feed.has_failed:  # a probe has one block, and nobody waits for it
            self._keys, self._answer = asked, ASKING

    def _is_awaited(self, key: BlockHash, ends_s: float) -> bool:
        """Return True if an answer is still awaited. If it is late, the server failed."""
        feed, now_s = self._feed, self._clock()
        if now_s < ends_s:
            return not feed.has_failed
        feed.note_failure()
        self._owner = None
        self._rests_until_s = now_s + self._deadline_s
        self._end([], [key], self._feed.memory.epoch)
        return False

    def send(self) -> None:
        """Ask what was gathered."""
        unsent = self._unsent
        self._forget_unsent()
        gathered: list[list[BlockHash]] = []
        for question in unsent:
            new = [key for key in dict.fromkeys(question.keys) if key not in self.asked]
            self.asked.update(dict.fromkeys(new, question.ends_s))
            if new:
                gathered.append(new)
        if not gathered:
            return
        on_end = partial(self._answered, gathered, self._feed.memory.epoch)
        if not self._client.submit(lambda ticket: AskJob(ticket, gathered), on_end):
            on_end(None)

    def left_s(self, keys: Sequence[BlockHash]) -> float:
        """Return how long a read of blocks may take.

        What a lookup left of the deadline counts for one read, and for one deadline: after that it
        would limit the read of another request.
        """
        now_s, take = self._clock(), self._remaining.pop
        found = [each for key in keys if (each := take(key, None)) is not None]
        return min((e.left_s for e in found if now_s < e.until_s), default=self._deadline_s)

    def clear(self) -> None:
        """Forget all questions, because the tier was reset."""
        self.asked.clear()
        self._remaining.clear()
        self._forget_unsent()

    def _forget_unsent(self) -> None:
        self._unsent, self._owner = [], None

    def _answered(
        self, gathered: Sequence[Sequence[BlockHash]], epoch: int, done: JobDone | None
    ) -> None:
        """Note answers. What could not be found out counts as absent for some seconds, too."""
        keys = [key for keys in gathered for key in keys]
        n = len(keys)
        outcomes = (
            [BlockOutcome.IO_ERROR] * n if done is None else unpack_outcomes(done.outcomes, n)
        )
        pairs = [*zip(keys, outcomes, strict=True)]
        held = [key for key, outcome in pairs if outcome is BlockOutcome.OK]
        if not _NO_ANSWER.issuperset(outcomes):
            self._feed.has_failed = False
        self._end(held, [key for key, outcome in pairs if outcome is not BlockOutcome.OK], epoch)

    def _end(self, held: Sequence[BlockHash], absent: Sequence[BlockHash], epoch: int) -> None:
        if epoch != self._feed.memory.epoch:
            return
        now_s = self._clock()
        for key in held:
            ends_s = self.asked.pop(key, None)
            if ends_s is not None:
                self._remaining[key] = _Remaining(ends_s - now_s, now_s + self._deadline_s)
        for key in absent:
            self.asked.pop(key, None)
        drop_oldest(self._remaining)
        self._feed.memory.note(epoch, held, absent)
