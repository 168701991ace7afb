"""Getting segments ahead of need, on an I/O thread: orphaned segments first, then new ones.

The manager's thread calls `poll`, `want` and `balance`; the work runs in the executor. If a segment
cannot be made, less space is available for a while. The failure is counted and logged once, never
raised.

Fairness: a process may find neither an orphaned segment nor room while it owns less than its share.
It then announces that (`Owners.announce_below_share`). A process with more than its share releases
segments, one at a time and each with its blocks. It takes no more until the others have their
share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....errors import KVCascadeError, NoSpaceError
from ....logs import get_logger
from ...base import BlockHash
from ..index.index_port import Removal
from ..segments.segment_files import SegmentSet
from .capacity import SpaceBudget
from .moved import MovedBlocks
from .owners import Owners

if TYPE_CHECKING:
    from ..index.block_index import BlockIndex

RETRY_AFTER_S = 30.0
"""Pause after a segment could not be made."""
RECHECK_S = 1.0
"""Pause between two searches for an orphaned segment."""
PATIENCE_S = 5.0
"""Age of an attempt after which the device counts as hanging; room is made by eviction
meanwhile."""
BALANCE_EVERY_S = 1.0
"""Interval between two checks whether another process needs segments."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Arrival:
    """An adopted segment with the blocks in it."""

    number: int
    blocks: list[tuple[BlockHash, int]]
    """(hash, slot) of the blocks in the segment."""
    epoch: int
    """Epoch that the blocks belong to."""


class SegmentGrowth:
    """Gets the missing segments of a tier, a few at a time."""

    def __init__(
        self,
        segments: SegmentSet,
        owners: Owners,
        index: BlockIndex,
        budget: SpaceBudget,
        total: int,
        paths: int,
        executor: Executor,
        clock: Callable[[], float],
    ) -> None:
        """`total` segments over `paths` paths; `clock` returns monotonic seconds."""
        self.failures = 0
        self.adopted: deque[Arrival] = deque()
        """Adopted segments that hold blocks, for the backend to take over."""
        self.surplus = 0
        """Number of segments that this process should release."""
        self.moved = MovedBlocks(segments, executor)
        """Names of the blocks that arrived or left with segments."""
        self._segments = segments
        self._owners = owners
        self._index = index
        self._budget = budget
        self._total = total
        self._paths = paths
        self._executor = executor
        self.clock = self._clock = clock
        self._arrived: deque[int] = deque()
        self._target = 0
        """Number of segments that are wanted."""
        self._is_running = False
        self._began_s = 0.0
        self._is_balancing = False
        self._fell_short = False
        """True if the last attempt got fewer segments than requested: there is no room for now."""
        self._retry_at_s = 0.0
        self._make_at_s = [0.0] * paths
        """Earliest time of the next attempt by path. A path that is full or fails does not keep the
        others from growing."""
        self._balance_at_s = 0.0

    def poll(self) -> list[int]:
        """Return the numbers of the empty segments that were made since the last call."""
        arrived: list[int] = []
        while self._arrived:
            arrived.append(self._arrived.popleft())
        return arrived

    def want(self, total: int) -> None:
        """Get segments until there are `total`. Does nothing if an attempt is running or has just
        failed."""
        self._target = total
        if self._is_running or self._clock() < self._retry_at_s or not self._left:
            return
        self._is_running, self._began_s = True, self._clock()
        try:
            self._executor.submit(self._run)
        except RuntimeError:  # the executor is shutting down
            self._is_running = False

    def balance(self) -> None:
        """Check now and then whether another process needs segments."""
        if self._is_balancing or self._clock() < self._balance_at_s:
            return
        self._balance_at_s = self._clock() + BALANCE_EVERY_S
        self._is_balancing = True
        try:
            self._executor.submit(self._check_balance)
        except RuntimeError:
            self._is_balancing = False

    def missing(self) -> list[int]:
        """Return the numbers of the segments that this process does not own, ascending."""
        segments = self._segments
        own = segments.unusable.union(segments.numbers)
        return [number for number in range(self._total) if number not in own]

    @property
    def may_come(self) -> int:
        """Number of segments that this process may still get soon. Segments of other processes are
        included until the first attempt. Costs a microsecond, so any step may ask."""
        is_hanging = self._is_running and self._clock() >= self._began_s + PATIENCE_S
        return 0 if self._fell_short or is_hanging else self._left

    def make(self, limit: int) -> int:
        """Get up to `limit` segments on this thread; return how many."""
        made = 0
        while made < limit and self._get_one():
            made += 1
        self._fell_short = made < limit
        return made

    def let_go(self, number: int, removals: Sequence[Removal], epoch: int) -> None:
        """Release a segment to other processes, after these entries have left the index."""
        with suppress(RuntimeError):  # shutting down: the segment is free after that
            self._executor.submit(self._let_go, number, removals, epoch)

    @property
    def _left(self) -> int:
        """Number of segments that this process does not own: the length of `missing`."""
        return max(0, self._total - len(self._segments.unusable) - self._segments.count)

    # -- on an I/O thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            is_short = False
            while not is_short and (wanted := self._target - self._segments.count) > 0:
                is_short = self.make(wanted) < wanted
            if is_short:
                self._retry_at_s = self._clock() + RECHECK_S
            self._owners.announce_below_share(is_short and self._is_below_share())
        except (OSError, KVCascadeError) as error:
            _log.warning("no segment could be got: %s", error)
            self._fell_short = True
            self._retry_at_s = self._clock() + RETRY_AFTER_S
        finally:
            self._is_running = False

    def _check_balance(self) -> None:
        try:
            self._index.forget_dead_readers()
            surplus = 0
            if self._owners.is_other_below_share():
                existing, processes = len(self._there()), self._owners.processes()
                surplus = len(self._owners.segments) - -(-existing // processes)
            self.surplus = max(0, surplus)
        except (OSError, KVCascadeError) as error:
            _log.warning("the other processes could not be looked at: %s", error)
        finally:
            self._is_balancing = False

    def _let_go(self, number: int, removals: Sequence[Removal], epoch: int) -> None:
        """Release the segment whatever the commit's outcome: its slots still match their
        entries."""
        self._index.commit(epoch, removals)
        if self.moved.is_wanted:
            with suppress(KVCascadeError):  # only events are lost
                _, blocks = confirmed_blocks(self._segments, self._index, number)
                self.moved.add([block_hash for block_hash, _ in blocks], removed=True)
        try:  # the lock goes first, as a segment that is not open may be adopted again
            self._owners.disown(number)
        except OSError as error:
            _log.warning("segment %d was not handed over: %s", number, error)
            return
        self._segments.let_go(number)

    def _is_below_share(self) -> bool:
        share = len(self._there()) // self._owners.processes()
        return len(self._owners.segments) < share

    def _is_at_share(self) -> bool:
        existing = len(self._there())
        return len(self._owners.segments) >= -(-existing // self._owners.processes())

    def _get_one(self) -> bool:
        """Adopt an orphaned segment or make one. Return False if there is neither one nor room."""
        missing = self.missing()
        if not missing:
            return False
        there = self._there()
        if self._owners.is_other_below_share() and self._is_at_share():
            return False
        if any(self._adopt(number) for number in missing if number in there):
            return True
        return any(
            self._make(number)
            for number in missing
            if number not in there and self._clock() >= self._make_at_s[number % self._paths]
        )

    def _there(self) -> set[int]:
        """Return the numbers of the segment files in responding paths; the other paths rest."""
        numbers: set[int] = set()
        for part in range(self._paths):
            try:
                numbers.update(self._segments.found_in(part))
            except OSError as error:
                self._rest(part, error)
        return numbers

    def _rest(self, part: int, error: Exception) -> None:
        """Create nothing in a path for a while."""
        if self.failures == 0:
            _log.warning("the NVMe tier does not grow for now: %s", error)
        self.failures += 1
        self._make_at_s[part] = self._clock() + RETRY_AFTER_S

    def _adopt(self, number: int) -> bool:
        if not self._owners.try_own(number):
            return False
        try:
            self._segments.open(number)
            epoch, blocks = confirmed_blocks(self._segments, self._index, number)
        except (OSError, KVCascadeError) as error:
            _log.warning("a segment is left out: %s", error)
            self._segments.let_go(number)
            self._segments.unusable.add(number)
            self._owners.disown(number)
            return False
        self.adopted.append(Arrival(number, blocks, epoch))
        return True

    def _make(self, number: int) -> bool:
        """Make a segment. Return False if another process does, or if there is no room; its path
        then rests."""
        if not self._owners.try_own(number):
            return False
        layout, part = self._segments.layout, number % self._paths
        try:
            with self._budget.claim(part, layout.file_bytes):
                if number in self._segments.found_in(part):  # another was faster, and is gone
                    raise NoSpaceError("the segment is there already; it will be adopted")
                self._segments.create(number)
        except (OSError, KVCascadeError) as error:
            self._owners.disown(number)
            self._rest(part, error)
            return False
        self._arrived.append(number)
        return True


def confirmed_blocks(
    segments: SegmentSet, index: BlockIndex, number: int
) -> tuple[int, list[tuple[BlockHash, int]]]:
    """Return the committed epoch, and the slot records of an open segment that the index confirms.

    A slot with a damaged or unreadable record counts as free. If an entry names it nevertheless,
    that block becomes a miss once the slot is rewritten, because its checksum does not match.
    """
    records = segments.records(number)
    return index.still_in((BlockHash(record.key), slot) for slot, record in records)
