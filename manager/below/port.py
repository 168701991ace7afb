"""The port `Below`: everything below the first tier, as the manager sees it.

Keys, not slots; batches, not blocks; outcomes, not exceptions. The manager asks whether a key may
be below, sends batches of keys with slots of its first tier, and polls for what became of them.
Slots, eviction policy, index, growth, write budget and breakers of the tiers below stay behind the
port, and so does the order of several tiers.

Tiers below are numbered from 1. All methods are called by one thread at a time, under the manager's
lock; `wait` alone is called without it. No method but `wait`, `flush` and `shutdown` may block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ...tiers.base import BlockHash, BlockOutcome
from ..base import BlockEvent
from ..counters import Departures, LinkCounters
from ..state import TierState


class Put(Enum):
    """The immediate answer to one key of a `put`."""

    STARTED = "started"
    """The block is being written; `poll` says what became of it."""
    ALREADY = "already"
    """The first tier holds the block, or is receiving it."""
    LATER = "later"
    """There is no room now, and some is being made."""
    FULL = "full"
    """There is no room, and none is being made."""
    OVER_BUDGET = "over_budget"
    """The day's write budget is spent."""
    RESTING = "resting"
    """The tier takes no writes for a while, because it failed or stalls."""
    NOT_TAKEN = "not_taken"
    """The transfer could not be started; the tier rests from now on."""


@dataclass(frozen=True, slots=True)
class TierFacts:
    """What never changes about one tier below."""

    name: str
    medium: str
    block_bytes: int
    capacity: int
    """Slots."""
    is_lasting: bool
    """True if the medium keeps blocks after the process has ended."""


@dataclass(frozen=True, slots=True)
class Ended:
    """One `get` or `put` that ended."""

    ticket: int
    is_get: bool
    tier: int
    """The tier that was read or written."""
    outcomes: Sequence[BlockOutcome]
    """One per key of a `get`, and one per started key of a `put`, in their order."""
    size_bytes: int = 0
    """Bytes that were moved."""
    time_s: float = 0.0
    """Seconds of the transfer itself."""


@dataclass(frozen=True, slots=True)
class WriteState:
    """Why the first tier takes no writes, and for how long."""

    is_stalled: bool = False
    """True if writes are under way and none has ended for long."""
    rest_left_s: float = 0.0
    """Seconds until writes may be tried again after a failure; 0 if the tier does not rest."""
    may_recover: bool = True
    """False if the last failure was want of room: trying again is of no use."""
    is_making_room: bool = False
    """True while writes between the tiers below are under way and go on."""


@dataclass(frozen=True, slots=True)
class FlushMeans:
    """What the manager lends to a flush."""

    lock: AbstractContextManager[Any]
    """Held while anything is looked at, never while waiting."""
    collect: Callable[[], None]
    """Takes in the transfers that ended, of every tier."""
    end_step: Callable[[], None]
    """Upkeep of the tiers. It sees what other processes did, and lets go of everything that is
    held: a process that held pages of a shared index would keep all others from committing."""
    in_use: Callable[[], list[BlockHash]]
    """Pinned blocks of the first tier, tails before heads."""
    clock: Callable[[], float]
    """Monotonic seconds."""
    pause: Callable[[float], None]
    """Waits for so many seconds of the clock."""


class Below(ABC):
    """One or more tiers below the manager's own."""

    tiers: Sequence[TierFacts]
    """The tiers, nearest first; the first entry is tier 1."""
    links: Sequence[LinkCounters]
    """Traffic of each tier. The port counts what transfers do; the manager adds its decisions."""
    departures: Sequence[Departures]
    """Blocks that left each tier to make room."""

    # -- keys ------------------------------------------------------------------------------

    @abstractmethod
    def may_hold(self, key: BlockHash, media: frozenset[str] | None = None) -> int:
        """Number of the nearest tier that may hold the block; 0 if none does.

        In process and without I/O. The answer may be wrong either way. `media`: look only at tiers
        of these media; None: at all.
        """

    @abstractmethod
    def get(self, ticket: int, tier: int, keys: Sequence[BlockHash], slots: Sequence[int]) -> None:
        """Read and verify blocks of a tier into slots of the first tier; `poll` answers.

        `tier` is what `may_hold` said. Keys that are not there end as GONE. A job that could not be
        started ends as CANCELLED.
        """

    @abstractmethod
    def put(self, ticket: int, keys: Sequence[BlockHash], slots: Sequence[int]) -> Sequence[Put]:
        """Write blocks from slots of the first tier to tier 1; one answer per key.

        Keys come in prefix order; if there is not room for all, the first ones are taken. `poll`
        answers for the keys that were STARTED, if there are any. Slots must keep their bytes until
        then.
        """

    @abstractmethod
    def touch(self, keys: Sequence[BlockHash]) -> None:
        """A use of these blocks in tier 1, in prefix order; unknown ones are ignored."""

    @abstractmethod
    def settle(self, keys: Sequence[BlockHash]) -> None:
        """Blocks that one request stored bit by bit, in the order of its prompt. Not a use."""

    @abstractmethod
    def chain(self, keys: Sequence[BlockHash]) -> bool:
        """All blocks of a request that ended, in prefix order.

        False if the policy of tier 1 makes no use of it: then `touch` and `settle` say it.
        """

    # -- what became of it -----------------------------------------------------------------

    @abstractmethod
    def poll(self) -> Sequence[Ended]:
        """Transfers that ended since the last call; each is reported exactly once."""

    @abstractmethod
    def take_lost(self) -> list[BlockHash]:
        """Keys that left a tier since the last call, evicted or found damaged.

        Blocks of a tier that was reset are not named.
        """

    @abstractmethod
    def take_events(self) -> list[BlockEvent]:
        """What was stored in the tiers or removed from them since the last call, in order."""

    @abstractmethod
    def announce(self, tier: int, keys: Sequence[BlockHash]) -> None:
        """Make events of those blocks, found by an earlier look, that a tier still holds."""

    # -- whether it takes anything -----------------------------------------------------------

    @abstractmethod
    def room(self, n: int) -> int:
        """Of `n` blocks, how many the next `put` should bring; 0: some room is being made.

        A tier that can still grow evicts nothing: it takes what there is room for now.
        """

    @property
    @abstractmethod
    def takes_puts(self) -> bool:
        """False while no write may be started."""

    @property
    @abstractmethod
    def is_blocked(self) -> bool:
        """True while tier 1 is not even probed: dirty blocks above may then be dropped."""

    @abstractmethod
    def rests(self, tier: int) -> bool:
        """True while nothing may be read from a tier: it failed or stalls."""

    @abstractmethod
    def write_state(self) -> WriteState:
        """The state of writes to tier 1."""

    # -- upkeep ------------------------------------------------------------------------------

    @abstractmethod
    def keep_ahead(self) -> None:
        """Start the writes between the tiers below that are due. At every step and tick."""

    @abstractmethod
    def maintain(self) -> int:
        """Upkeep at the end of a step, and about every 50 ms in an idle engine.

        Returns the number of the lowest tier that another process reset; 0 if none was. That tier
        and all above it below the manager's own are empty then. Nothing shared is held afterwards.
        """

    @abstractmethod
    def reset(self) -> None:
        """Make every older block of every tier unreachable.

        Transfers under way end later, and leave nothing behind.
        """

    @abstractmethod
    def wait(self, tickets: set[int], limit_s: float) -> None:
        """Block until these gets and puts have ended, so long at most; not under the lock.

        Without tickets: until the writes between the tiers below have ended.
        """

    @abstractmethod
    def flush(self, means: FlushMeans, deadline_s: float) -> None:
        """Write what would be lost with this process to a tier that lasts; not under the lock.

        Blocks that are hot in a tier that ends with the process are hot below it, too, afterwards.
        """

    @abstractmethod
    def shutdown(self, deadline_s: float) -> bool:
        """Stop all transfers by `deadline_s` on the clock; idempotent.

        False if transfers are still under way: what they use must stay open.
        """

    @abstractmethod
    def state(self) -> list[TierState]:
        """How things stand in each tier, nearest first."""


class NoTierBelow(Below):
    """The port where the first tier is the only one: it holds nothing and takes nothing."""

    tiers: Sequence[TierFacts] = ()
    links: Sequence[LinkCounters] = ()
    departures: Sequence[Departures] = ()

    @property
    def takes_puts(self) -> bool:
        return False

    @property
    def is_blocked(self) -> bool:
        return True

    def may_hold(self, key: BlockHash, media: frozenset[str] | None = None) -> int:
        return 0

    def get(self, ticket: int, tier: int, keys: Sequence[BlockHash], slots: Sequence[int]) -> None:
        raise AssertionError("there is no tier to read from")

    def put(self, ticket: int, keys: Sequence[BlockHash], slots: Sequence[int]) -> Sequence[Put]:
        return [Put.FULL] * len(keys)

    def touch(self, keys: Sequence[BlockHash]) -> None:
        """Nothing is there."""

    def settle(self, keys: Sequence[BlockHash]) -> None:
        """Nothing is there."""

    def chain(self, keys: Sequence[BlockHash]) -> bool:
        return False

    def poll(self) -> Sequence[Ended]:
        return ()

    def take_lost(self) -> list[BlockHash]:
        return []

    def take_events(self) -> list[BlockEvent]:
        return []

    def announce(self, tier: int, keys: Sequence[BlockHash]) -> None:
        """Nothing is there."""

    def room(self, n: int) -> int:
        return 0

    def rests(self, tier: int) -> bool:
        return True

    def write_state(self) -> WriteState:
        return WriteState(may_recover=False)

    def keep_ahead(self) -> None:
        """Nothing is there."""

    def maintain(self) -> int:
        return 0

    def reset(self) -> None:
        """Nothing is there."""

    def wait(self, tickets: set[int], limit_s: float) -> None:
        """Nothing is under way."""

    def flush(self, means: FlushMeans, deadline_s: float) -> None:
        """Nothing is there."""

    def shutdown(self, deadline_s: float) -> bool:
        return True

    def state(self) -> list[TierState]:
        return []
