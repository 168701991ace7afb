"""The port `Below`: everything below the first tier, as the manager sees it.

The port takes keys instead of slots and batches instead of blocks, and returns outcomes instead of
exceptions. The manager asks whether a key may be below. It sends batches of keys with slots of its
first tier, and polls for the outcomes. The port hides the slots, eviction policy, index, growth,
write budget and breakers of the tiers below, and their order.

Tiers below are numbered from 1. All methods except `wait` are called by one thread at a time, under
the manager's lock. `wait` is called without the lock, and changes nothing. Only `wait` and
`shutdown` may block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ...tiers.base import BlockHash, BlockOutcome
from ..base import BlockEvent
from ..counters import LinkCounters
from ..state import TierState


class Put(Enum):
    """Immediate answer to one key of a `put`."""

    STARTED = "started"
    """The write is in flight; `poll` reports its outcome."""
    ALREADY = "already"
    """Tier 1 holds the block, or is receiving it."""
    LATER = "later"
    """There is no room now, but blocks are being evicted to make room."""
    FULL = "full"
    """There is no room, and none is being made."""
    OVER_BUDGET = "over_budget"
    """The write budget of the day is spent."""
    RESTING = "resting"
    """The tier accepts no writes for a while, because it failed or stalls."""
    UNWANTED = "unwanted"
    """A rule of the tier leaves the block out; offer it again at its next use."""
    NOT_TAKEN = "not_taken"
    """The transfer could not be started; the tier rests from now on."""


NOT_WANTED = frozenset(
    {BlockOutcome.HELD, BlockOutcome.GONE, BlockOutcome.CORRUPT, BlockOutcome.REFUSED}
)
"""Outcomes of a `put` that are no failure, and for which a retry is useless.

Another engine stored the block first, the tier was reset, the block was damaged in the tier above,
or the write budget is spent.
"""


ASKING = -1
"""Answer of `may_hold` while a tier that is elsewhere asks for the block."""
LOAD_RATIO_MAX_HERE = 2.0
LOAD_RATIO_MAX_REMOTE = 1.0
"""See `TierFacts.load_ratio_max`. A device of this machine is slow for a moment only, and a load
leaves the accelerator to others. A slow link stays slow, and each load occupies it."""


@dataclass(frozen=True, slots=True)
class TierFacts:
    """Constant properties of one tier below."""

    name: str
    medium: str
    block_bytes: int
    capacity: int
    """Capacity of the tier in slots."""
    load_ratio_max: float = LOAD_RATIO_MAX_HERE
    """Loading is refused if it is expected to take more than this many times as long as
    computing."""
    is_elsewhere: bool = False
    """True if the tier has to be asked for its blocks (see `Below.may_hold`)."""


class Ended(NamedTuple):
    """One `get` or `put` that ended. A tuple, because the scheduler's thread makes one a job."""

    ticket: int
    is_get: bool
    tier: int
    """Number of the tier that was read or written."""
    outcomes: Sequence[BlockOutcome]
    """Outcomes in key order: one per key of a `get`, or one per started key of a `put`."""
    size_bytes: int = 0
    """Number of bytes transferred."""
    time_s: float = 0.0
    """Duration of the transfer itself in seconds."""


@dataclass(frozen=True, slots=True)
class WriteState:
    """Reason why tier 1 accepts no writes, and the time until it does."""

    is_stalled: bool = False
    """True if writes are in flight and none has ended for a long time."""
    rest_left_s: float = 0.0
    """Seconds until writes may be tried again after a failure; 0 if the tier does not rest."""
    may_recover: bool = True
    """False if the last failure was lack of room: a retry is useless."""
    is_joining: bool = False
    """True while the tier looks for a writer, because it lost one. It may take writes soon."""


class Below(ABC):
    """One or more tiers below the manager's own."""

    tiers: Sequence[TierFacts]
    """The tiers, nearest first; the first entry is tier 1."""
    links: Sequence[LinkCounters]
    """Traffic of each tier. The port counts what transfers do; the manager adds its decisions."""
    late_puts = 0
    """Number of puts in flight that only tiers below tier 1 still write."""

    # -- keys ------------------------------------------------------------------------------

    @abstractmethod
    def may_hold(
        self, key: BlockHash, media: frozenset[str] | None = None, owner: object = None
    ) -> int:
        """Return the number of the nearest tier that may hold the block; 0 if none does.

        The call stays in this process and does no I/O. The answer may be wrong either way. `media`
        limits the search to tiers of these media; None means all tiers.

        `owner` waits for the answer. A tier that is elsewhere answers from memory. It asks for
        unknown blocks at the end of the step, and answers by a deadline. Until then it returns
        ASKING, and the owner asks again. Keys of one owner come in the order of its prompt. Without
        an owner, unknown blocks are absent.
        """

    def wants_again(self, key: BlockHash) -> bool:
        """Return True if a `put` of this block is of use although tier 1 may hold it.

        The manager asks for the blocks that an ended request reused and the first tier holds.
        """
        return False

    @abstractmethod
    def get(self, ticket: int, tier: int, keys: Sequence[BlockHash], slots: Sequence[int]) -> None:
        """Read and verify blocks of a tier into slots of the first tier; `poll` reports the
        outcomes.

        `tier` is the number that `may_hold` returned. Missing keys end as GONE. A job that could
        not be started ends as CANCELLED.
        """

    @abstractmethod
    def put(self, ticket: int, keys: Sequence[BlockHash], slots: Sequence[int]) -> Sequence[Put]:
        """Write blocks from slots of the first tier below it; return one answer per key.

        They go to tier 1. A chain of tiers also writes them to each lower tier that admits them.

        Keys come in prefix order; if there is not room for all, the first ones are written. `poll`
        reports the outcomes of the STARTED keys, if there are any. Slots must keep their bytes
        until then.
        """

    def touch(self, keys: Sequence[BlockHash]) -> None:  # noqa: B027 - optional for implementers
        """Count a use of these blocks in the nearest tier that holds them, in prefix order;
        unknown blocks are ignored."""

    # -- outcomes --------------------------------------------------------------------------

    @abstractmethod
    def poll(self) -> Sequence[Ended]:
        """Return the transfers that ended since the last call; each is reported exactly once."""

    def take_lost(self) -> list[BlockHash]:
        """Return the keys lost by a tier since the last call, by eviction or damage.

        A chain of inclusive tiers lists only the keys that none of its tiers holds any more.

        Blocks of a tier that was reset are not listed.
        """
        return []

    @abstractmethod
    def take_events(self) -> list[BlockEvent]:
        """Return the blocks stored in or removed from the tiers since the last call, in order."""

    # -- whether it takes anything -----------------------------------------------------------

    @abstractmethod
    def room(self, n: int) -> int:
        """Return how many of `n` blocks the next `put` should bring; 0 while room is being made.

        A tier that can still grow evicts nothing: it accepts only blocks for which there is room
        now.
        """

    @property
    @abstractmethod
    def takes_puts(self) -> bool:
        """False while no write may be started."""

    @property
    def has_stand_in(self) -> bool:
        """True while tier 1 rests, and a lower tier takes blocks in its place."""
        return False

    @property
    def unwritten_blocks(self) -> int:
        """Number of blocks that tier 1 was to write, and did not for a reason that may pass."""
        return 0

    @property
    def takes_all(self) -> bool:
        """False if a rule of the tier may leave out blocks that it is offered now."""
        return True

    @property
    @abstractmethod
    def is_blocked(self) -> bool:
        """True while tier 1 is not even probed: dirty blocks above may then be dropped."""

    @abstractmethod
    def rests(self, tier: int) -> bool:
        """Return True while nothing may be read from a tier, because it failed or stalls."""

    def latency_s(self, tier: int) -> float:
        """Return the measured latency of a read from a tier, in seconds: its time without payload.

        0 for a tier on this machine.
        """
        return 0.0

    @abstractmethod
    def write_state(self) -> WriteState:
        """Return the state of writes to tier 1."""

    # -- upkeep ------------------------------------------------------------------------------

    @abstractmethod
    def maintain(self) -> bool:
        """Maintain the tiers at the end of a step, and about every 50 ms in an idle engine.

        Return True if another process reset a tier: older blocks above it are then outdated, too.
        """

    @abstractmethod
    def reset(self, mark: int = 0) -> None:
        """Make every older block of every tier unreachable.

        Transfers in flight end later, and leave nothing behind. `mark` names the reset for all
        engines: a shared tier carries out each mark once. 0: a new reset.
        """

    def pass_on(self, mark: int) -> None:
        """Carry out a reset that another tier had, unless this tier had it already."""
        self.reset(mark)

    def take_marks(self) -> Sequence[int]:
        """Return the marks of resets by other engines since the last call, as far as known.

        A mark may be known later than `maintain` has returned.
        """
        return ()

    @abstractmethod
    def wait(self, limit_s: float) -> bool:
        """Block until a transfer may have ended, or for a moment; call without the lock.

        Return False if none was in flight. The wait takes at most `limit_s`, then `poll` again.
        """

    @abstractmethod
    def shutdown(self, deadline_s: float) -> bool:
        """Stop all transfers by `deadline_s` on the clock; idempotent.

        Return False if transfers are still in flight: the resources that they use must stay open.
        """

    @abstractmethod
    def state(self) -> list[TierState]:
        """Return the state of each tier, nearest first."""


class NoTierBelow(Below):
    """Port without tiers, for a cascade of one tier: it holds and accepts nothing."""

    tiers: Sequence[TierFacts] = ()
    links: Sequence[LinkCounters] = ()

    @property
    def takes_puts(self) -> bool:
        return False

    @property
    def is_blocked(self) -> bool:
        return True

    def may_hold(
        self, key: BlockHash, media: frozenset[str] | None = None, owner: object = None
    ) -> int:
        return 0

    def get(self, ticket: int, tier: int, keys: Sequence[BlockHash], slots: Sequence[int]) -> None:
        raise AssertionError("there is no tier to read from")

    def put(self, ticket: int, keys: Sequence[BlockHash], slots: Sequence[int]) -> Sequence[Put]:
        return [Put.FULL] * len(keys)

    def poll(self) -> Sequence[Ended]:
        return ()

    def take_events(self) -> list[BlockEvent]:
        return []

    def room(self, n: int) -> int:
        return 0

    def rests(self, tier: int) -> bool:
        return True

    def write_state(self) -> WriteState:
        return WriteState(may_recover=False)

    def maintain(self) -> bool:
        return False

    def reset(self, mark: int = 0) -> None:
        """Do nothing: there is no tier."""

    def wait(self, limit_s: float) -> bool:
        return False

    def shutdown(self, deadline_s: float) -> bool:
        return True

    def state(self) -> list[TierState]:
        return []
