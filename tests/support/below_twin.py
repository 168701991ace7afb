"""`BelowTwin`: the port below in a dict, which fails, stalls and lies when a test says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcascade.handlers.node.node_keeper import WAIT_SLICE_S
from kvcascade.manager.base import BlockEvent
from kvcascade.manager.below.port import ASKING, Below, Ended, Put, TierFacts, WriteState
from kvcascade.manager.counters import LinkCounters
from kvcascade.manager.state import TierState
from kvcascade.tiers.base import BlockHash, BlockOutcome

NAME = "twin"
View = Callable[[int], memoryview]


class BelowTwin(Below):
    """One tier of so many blocks; the block that came first leaves first."""

    def __init__(self, view: View, capacity: int, block_bytes: int) -> None:
        """`view`: the bytes of a slot of the first tier."""
        self.tiers = (TierFacts(NAME, NAME, block_bytes, capacity),)
        self.links = (LinkCounters(),)
        self._view = view
        self._held: dict[BlockHash, bytes] = {}
        self._coming: dict[BlockHash, int] = {}
        self._queued: list[tuple[int, bool, list[BlockHash], list[int], int]] = []
        self._ended: list[Ended] = []
        self._landed: list[tuple[BlockHash, bytes, int]] = []
        self._lost: list[BlockHash] = []
        self._left_early: set[BlockHash] = set()
        self._events: list[BlockEvent] = []
        self._epoch = 0
        self.outcome = BlockOutcome.OK
        """Outcome of every block of a transfer that ends now."""
        self.answer = Put.STARTED
        """The answer to every put of new blocks."""
        self.is_stalled = False
        """Transfers are taken, and none ends."""
        self.pass_time: Callable[[float], None] = lambda seconds: None
        """Called with the seconds of a wait in which nothing ends."""
        self.lies: dict[BlockHash, int] = {}
        """Wrong answers of `may_hold`."""
        self.is_elsewhere = False
        """Absent blocks are being asked for."""
        self.is_overtaken = False
        """Another process resets the tier before the next upkeep."""
        self.is_full = False
        """If true, it has no room and makes none, but takes puts."""
        self.is_joining = False
        """It has no writer, and takes no puts."""
        self.reads_rest = False
        """Nothing may be read."""
        self.marks: list[int] = []
        """Marks that `take_marks` shall give."""
        self.reset_marks: list[int] = []
        """Marks of the resets that the engine asked for."""

    def may_hold(
        self, key: BlockHash, media: frozenset[str] | None = None, owner: object = None
    ) -> int:
        if media is not None and NAME not in media:
            return 0
        unknown = ASKING if self.is_elsewhere and owner is not None else 0
        return self.lies.get(key, 1 if key in self._held else unknown)

    def get(self, ticket: int, tier: int, keys: Sequence[BlockHash], slots: Sequence[int]) -> None:
        self._queued.append((ticket, True, list(keys), list(slots), self._epoch))

    def put(self, ticket: int, keys: Sequence[BlockHash], slots: Sequence[int]) -> Sequence[Put]:
        known = self._held.keys() | self._coming.keys()
        new = [(h, slot) for h, slot in zip(keys, slots, strict=True) if h not in known]
        answer = Put.RESTING if self.is_joining else self.answer
        started = new[: self.tiers[0].capacity] if answer is Put.STARTED else []
        if started:
            hashes = [h for h, _ in started]
            self._coming.update(dict.fromkeys(hashes, ticket))
            self._queued.append((ticket, False, hashes, [s for _, s in started], self._epoch))
        going, wanted = {h for h, _ in started}, {h for h, _ in new}
        late = Put.LATER if started else answer
        return [Put.STARTED if h in going else late if h in wanted else Put.ALREADY for h in keys]

    def touch(self, keys: Sequence[BlockHash]) -> None:
        for key in reversed(keys):
            if key in self._held:
                self._held[key] = self._held.pop(key)

    def run(self) -> None:
        """Let every transfer end, unless the twin is stalled."""
        while self._queued and not self.is_stalled:
            ticket, is_get, hashes, slots, epoch = self._queued.pop(0)
            move = self._load if is_get else self._store
            outcomes = [move(h, slot, epoch) for h, slot in zip(hashes, slots, strict=True)]
            self._ended.append(Ended(ticket, is_get, 1, outcomes))

    def _load(self, key: BlockHash, slot: int, epoch: int) -> BlockOutcome:
        if self.outcome is not BlockOutcome.OK:
            if self.outcome in (BlockOutcome.CORRUPT, BlockOutcome.GONE):
                self._leave(key)
            return self.outcome
        if epoch != self._epoch or key not in self._held:
            return BlockOutcome.GONE
        self._view(slot)[:] = self._held[key]
        return BlockOutcome.OK

    def _store(self, key: BlockHash, slot: int, epoch: int) -> BlockOutcome:
        if epoch != self._epoch:
            return BlockOutcome.GONE
        if self.outcome is BlockOutcome.OK:
            self._landed.append((key, bytes(self._view(slot)), epoch))
        else:
            del self._coming[key]
        return self.outcome

    def _leave(self, key: BlockHash) -> None:
        if self._held.pop(key, None) is not None:
            self._lost.append(key)
            self._events.append(BlockEvent((key,), NAME, True, NAME))

    def poll(self) -> Sequence[Ended]:
        for key, data, epoch in self._landed:
            if epoch == self._epoch:
                self._keep(key, data)
        self._landed.clear()
        ended, self._ended = self._ended, []
        return ended

    def lose_early(self, keys: Sequence[BlockHash]) -> None:
        """Store blocks of a put and evict them again, while its other blocks are still written."""
        self._lost += keys
        self._left_early.update(keys)

    def _keep(self, key: BlockHash, data: bytes) -> None:
        del self._coming[key]
        if key in self._left_early:
            self._left_early.discard(key)
            return
        while len(self._held) >= self.tiers[0].capacity:
            self.links[0].evicted_blocks += 1
            self._leave(next(iter(self._held)))
        self._held[key] = data
        self._events.append(BlockEvent((key,), NAME, False, NAME))

    def take_lost(self) -> list[BlockHash]:
        lost, self._lost = self._lost, []
        return lost

    def take_events(self) -> list[BlockEvent]:
        events, self._events = self._events, []
        return events

    def room(self, n: int) -> int:
        return min(n, self.tiers[0].capacity)

    @property
    def takes_puts(self) -> bool:
        return self.answer is not Put.RESTING and not self.is_joining

    @property
    def takes_all(self) -> bool:
        return self.answer is not Put.UNWANTED

    @property
    def is_blocked(self) -> bool:
        return self.is_full or self.answer is Put.RESTING

    def rests(self, tier: int) -> bool:
        return self.reads_rest

    def write_state(self) -> WriteState:
        rest_left_s = 1.0 if self.answer is Put.RESTING else 0.0
        return WriteState(self.is_stalled, rest_left_s, is_joining=self.is_joining)

    def maintain(self) -> bool:
        was_reset, self.is_overtaken = self.is_overtaken, False
        if was_reset:
            self._forget()
        return was_reset

    def reset(self, mark: int = 0) -> None:
        self.reset_marks.append(mark)
        self._forget()
        self._events.clear()

    def take_marks(self) -> Sequence[int]:
        marks, self.marks = self.marks, []
        return marks

    def _forget(self) -> None:
        self._held.clear()
        self._coming.clear()
        self._lost.clear()
        self._epoch += 1

    def wait(self, limit_s: float) -> bool:
        is_busy = bool(self._queued)
        self.run()
        if is_busy and self.is_stalled:
            self.pass_time(min(limit_s, WAIT_SLICE_S))
        return is_busy

    def shutdown(self, deadline_s: float) -> bool:
        self.run()
        return not self._queued

    def state(self) -> list[TierState]:
        (facts,) = self.tiers
        held = len(self._held)
        return [TierState(NAME, NAME, facts.block_bytes, held, facts.capacity, 0)]
