"""Which blocks are worth writing to a lower tier: admission and the write budget."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import cast

from ..errors import ConfigError
from ..logs import get_logger
from ..tiers.base import BlockHash
from ..tiers.endurance import DayTotals
from ..tiers.policies.named_object import named_object
from ..tiers.policies.ordered import tag_of
from ..tiers.policies.tags import NONE, TagTable

logger = get_logger(__name__)

PAST_MIN = 65_536
"""Blocks that are remembered at least, so that a small tier also learns what comes back."""
USES_MAX = 255

AdmissionFunction = Callable[[BlockHash, int], bool]
"""`(block_hash, uses) -> bool`. The scheduler thread calls it: it must wait for nothing."""


class Admission(ABC):
    """Asked for every dirty block before it is written down."""

    counts_uses = True
    """False if the answer never depends on how often a block was used."""

    @abstractmethod
    def admits(self, block_hash: BlockHash, uses: int) -> bool:
        """`uses`: how often the block was used, its first store included.

        Counted while it is in the tier above, and on from there if it was refused and comes back.
        """


class AdmitAll(Admission):
    """Every block."""

    counts_uses = False

    def admits(self, block_hash: BlockHash, uses: int) -> bool:
        return True


class AdmitSecondTouch(Admission):
    """Only blocks that were used again."""

    def admits(self, block_hash: BlockHash, uses: int) -> bool:
        return uses >= 2


class AdmitBy(Admission):
    """What a function of the user says. One that raises is asked no more: all are admitted."""

    def __init__(self, function: AdmissionFunction, name: str) -> None:
        self._function: AdmissionFunction | None = function
        self._name = name

    def admits(self, block_hash: BlockHash, uses: int) -> bool:
        if self._function is None:
            return True
        try:
            return bool(self._function(block_hash, uses))
        except Exception:
            logger.exception(
                "kvcascade: admission %s failed and is left out: every block is admitted from "
                "now on; mend it and restart the engine",
                self._name,
            )
            self._function = None
            return True


def admission_by_path(path: str) -> AdmitBy:
    """The function at `"package.module:function"`. Raises `ConfigError`."""
    function = named_object("admission", path, path)
    if not callable(function):
        raise ConfigError(f"admission {path!r} is no function; make it (block_hash, uses) -> bool")
    return AdmitBy(cast(AdmissionFunction, function), path)


class PastUses:
    """How often blocks were used that may not be here any more; the first that came are forgotten.

    As many as the tier has slots: so far back it would have reached had it taken everything. 17 to
    21 bytes each, and 1.4 MB in small tiers; pages of it that were never needed take no memory.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity` of the tier, in slots."""
        self._tags = TagTable("past_uses", max(PAST_MIN, capacity))
        self._uses = bytearray(self._tags.entries)
        self._oldest = 0

    def of(self, block_hash: BlockHash) -> int:
        """Uses that were noted; 0 if none were, or too long ago."""
        entry = self._tags.find(tag_of(block_hash))
        return 0 if entry == NONE else self._uses[entry]

    def note(self, block_hash: BlockHash, uses: int) -> None:
        """The block was used so often up to now."""
        tag = tag_of(block_hash)
        entry = self._tags.find(tag)
        if entry == NONE:
            if len(self._tags) == self._tags.entries:  # entries are a ring: this one is used again
                self._tags.drop(self._oldest)
                self._oldest = (self._oldest + 1) % self._tags.entries
            entry = self._tags.add(tag)
        self._uses[entry] = min(USES_MAX, uses)


class WriteBudget:
    """At most `bytes_per_day` over any sliding day, by all who write to the tier together.

    The tier's own record says what was written, so the budget survives restarts; what is on its
    way is added until it has landed.
    """

    def __init__(self, bytes_per_day: int, totals: Callable[[], DayTotals]) -> None:
        """`totals`: what the tier's record says now."""
        self._bytes_per_day = bytes_per_day
        self._totals = totals
        self._in_flight_bytes = 0

    def left_bytes(self) -> int:
        """What may be written now."""
        return max(0, self._bytes_per_day - self._totals().written - self._in_flight_bytes)

    def started(self, size_bytes: int) -> None:
        """A write is on its way."""
        self._in_flight_bytes += size_bytes

    def ended(self, size_bytes: int) -> None:
        """It has landed, and is in the tier's record, or failed."""
        self._in_flight_bytes -= size_bytes


class EnduranceWatch:
    """Warns once if a whole day's writes to a tier were never read back."""

    CHECK_S = 900.0

    def __init__(
        self, tier: str, totals: Callable[[], DayTotals], clock: Callable[[], float]
    ) -> None:
        """`clock` gives monotonic seconds."""
        self._tier = tier
        self._totals = totals
        self._clock = clock
        self._due_s = clock() + self.CHECK_S

    def check(self) -> None:
        """Look, if it is time to; a comparison otherwise."""
        if self._clock() < self._due_s:
            return
        self._due_s = self._clock() + self.CHECK_S
        totals = self._totals()
        if totals.is_whole_day and not totals.read:
            self._due_s = float("inf")
            logger.warning(
                "kvcascade: tier %s took %d bytes in the last day and none was read back; its "
                'flash wears for nothing: set admission to "second_touch", or leave the tier out',
                self._tier,
                totals.written,
            )
