"""Admission to a lower tier, and the warning about useless writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from ..errors import ConfigError
from ..logs import get_logger
from ..tiers.base import BlockHash
from ..tiers.endurance import DayTotals
from ..tiers.policies import named_object
from ..tiers.policies.ordered import tag_of
from ..tiers.policies.parts.tags import NONE, TagTable

logger = get_logger(__name__)

PAST_MIN = 65_536
"""Smallest number of blocks whose past uses are kept. A small tier thus also recognises blocks that
come back."""
USES_MAX = 255

AdmissionFunction = Callable[[BlockHash, int], bool]
"""`(block_hash, uses) -> bool`: True if a dirty block should be written to the tier below.

`uses`: number of uses, including the first store. They are counted while the block is in the tier
above. The count continues if the block is refused and comes back. The scheduler's thread calls the
function, so it must not block. None in its place admits every block, and no uses are counted."""


def admit_second_touch(block_hash: BlockHash, uses: int) -> bool:
    """Return True for blocks with at least two uses."""
    return uses >= 2


class AdmitBy:
    """Admission by a function of the user. Once the function raises, every block is accepted."""

    def __init__(self, function: AdmissionFunction, name: str) -> None:
        self._function: AdmissionFunction | None = function
        self._name = name

    def __call__(self, block_hash: BlockHash, uses: int) -> bool:
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
    """Return the admission for the function at `"package.module:function"`.

    Raises `ConfigError` if there is no such function.
    """
    function = named_object("admission", path, path)
    if not callable(function):
        raise ConfigError(f"admission {path!r} is no function; make it (block_hash, uses) -> bool")
    return AdmitBy(cast(AdmissionFunction, function), path)


class PastUses:
    """Use counts of blocks that may have left the tier above. The oldest entry is replaced first.

    There is one entry per slot of the tier below. It thus remembers as many blocks as the tier
    would hold if it accepted all. An entry takes 17 to 21 bytes, a small table 1.4 MB. Pages that
    were never used take no memory.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity`: slots of the tier below."""
        self._tags = TagTable("past_uses", max(PAST_MIN, capacity))
        self._uses = bytearray(self._tags.entries)
        self._oldest = 0

    def of(self, block_hash: BlockHash) -> int:
        """Return the use count of a block; 0 if it is unknown."""
        entry = self._tags.find(tag_of(block_hash))
        return 0 if entry == NONE else self._uses[entry]

    def note(self, block_hash: BlockHash, uses: int) -> None:
        """Set the use count of a block."""
        tag = tag_of(block_hash)
        entry = self._tags.find(tag)
        if entry == NONE:
            if len(self._tags) == self._tags.entries:  # the ring is full: replace the oldest entry
                self._tags.drop(self._oldest)
                self._oldest = (self._oldest + 1) % self._tags.entries
            entry = self._tags.add(tag)
        self._uses[entry] = min(USES_MAX, uses)


class EnduranceWatch:
    """Warning, given once, that no block written in a whole day was read back."""

    CHECK_S = 900.0

    def __init__(
        self, tier: str, totals: Callable[[], DayTotals], clock: Callable[[], float]
    ) -> None:
        """`clock` returns monotonic seconds."""
        self._tier = tier
        self._totals = totals
        self._clock = clock
        self.due_s = clock() + self.CHECK_S
        """Time of the next check on the clock."""

    def check(self) -> None:
        """Check the totals; the next check is due `CHECK_S` seconds later."""
        self.due_s = self._clock() + self.CHECK_S
        totals = self._totals()
        if totals.is_whole_day and not totals.read:
            self.due_s = float("inf")
            logger.warning(
                "kvcascade: tier %s took %d bytes in the last day and none was read back; its "
                'flash wears for nothing: set admission to "second_touch", or leave the tier out',
                self._tier,
                totals.written,
            )
