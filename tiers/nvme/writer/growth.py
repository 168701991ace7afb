"""Getting segments ahead of need, on an I/O thread: orphans first, then new ones.

The manager's thread calls `poll`, `want` and `balance`; the work runs in the executor. A
segment that cannot be made lowers what is available for a while: it is counted and logged once,
never raised.

Fairness: a process that finds neither an orphan nor room, and has less than its share of the
segments, says so (`Owners.say_hungry`). Whoever has more than its share then lets segments go, one
at a time and each with the blocks that it holds, and takes no more before the others have theirs.
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
"""After a segment could not be made."""
RECHECK_S = 1.0
"""Between two looks for an orphan."""
PATIENCE_S = 5.0
"""A try that takes longer is one of a device that hangs: room is made by evicting meanwhile."""
BALANCE_EVERY_S = 1.0
"""Between two looks at whether another process needs segments."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A segment that is this process's now, and what it holds."""

    number: int
    blocks: list[tuple[BlockHash, int]]
    """(hash, slot) of the blocks in it."""
    epoch: int
    """The epoch that they belong to."""


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
        """`total` segments over `paths` paths; `clock` gives monotonic seconds."""
        self.failures = 0
        self.adopted: deque[Arrival] = deque()
        """Segments that hold blocks, for the backend to take in."""
        self.surplus = 0
        """Segments that this process should let go of."""
        self.moved = MovedBlocks(segments, executor)
        """What came and went with segments."""
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
        """So many segments are wanted."""
        self._is_running = False
        self._began_s = 0.0
        self._is_balancing = False
        self._fell_short = False
        """The last try got fewer segments than it was to get: there is no more room for now."""
        self._retry_at_s = 0.0
        self._make_at_s = [0.0] * paths
        """Per path: one that is full, or fails, does not keep the others from growing."""
        self._balance_at_s = 0.0

    def poll(self) -> list[int]:
        """Numbers of the empty segments that came since the last call."""
        arrived: list[int] = []
        while self._arrived:
            arrived.append(self._arrived.popleft())
        return arrived

    def want(self, total: int) -> None:
        """Get segments until there are so many; start with that unless it is under way, done or
        just failed."""
        self._target = total
        if self._is_running or self._clock() < self._retry_at_s or not self._left:
            return
        self._is_running, self._began_s = True, self._clock()
        try:
            self._executor.submit(self._run)
        except RuntimeError:  # the executor is shutting down
            self._is_running = False

    def balance(self) -> None:
        """Look now and then whether another process needs segments."""
        if self._is_balancing or self._clock() < self._balance_at_s:
            return
        self._balance_at_s = self._clock() + BALANCE_EVERY_S
        self._is_balancing = True
        try:
            self._executor.submit(self._look_around)
        except RuntimeError:
            self._is_balancing = False

    def missing(self) -> list[int]:
        """Numbers of the segments that are not this process's, ascending."""
        segments = self._segments
        own = segments.unusable.union(segments.numbers)
        return [number for number in range(self._total) if number not in own]

    @property
    def may_come(self) -> int:
        """How many segments this process may still get soon; what others hold is not known before
        the first try. A microsecond: any step may ask."""
        is_hanging = self._is_running and self._clock() >= self._began_s + PATIENCE_S
        return 0 if self._fell_short or is_hanging else self._left

    def make(self, limit: int) -> int:
        """Get up to `limit` segments on this thread; returns how many."""
        made = 0
        while made < limit and self._get_one():
            made += 1
        self._fell_short = made < limit
        return made

    def let_go(self, number: int, removals: Sequence[Removal], epoch: int) -> None:
        """Leave a segment to other processes, after these entries have left the index."""
        with suppress(RuntimeError):  # shutting down: it is everybody's as soon as that is done
            self._executor.submit(self._let_go, number, removals, epoch)

    @property
    def _left(self) -> int:
        """How many segments are not this process's; the length of `missing`, without the list."""
        return max(0, self._total - len(self._segments.unusable) - self._segments.count)

    # -- on an I/O thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            is_short = False
            while not is_short and (wanted := self._target - self._segments.count) > 0:
                is_short = self.make(wanted) < wanted
            if is_short:
                self._retry_at_s = self._clock() + RECHECK_S
            self._owners.say_hungry(is_short and self._is_below_share())
        except (OSError, KVCascadeError) as error:
            _log.warning("no segment could be got: %s", error)
            self._fell_short = True
            self._retry_at_s = self._clock() + RETRY_AFTER_S
        finally:
            self._is_running = False

    def _look_around(self) -> None:
        try:
            self._index.forget_dead_readers()
            surplus = 0
            if self._owners.is_other_hungry():
                existing, processes = len(self._there()), self._owners.processes()
                surplus = len(self._owners.segments) - -(-existing // processes)
            self.surplus = max(0, surplus)
        except (OSError, KVCascadeError) as error:
            _log.warning("the other processes could not be looked at: %s", error)
        finally:
            self._is_balancing = False

    def _let_go(self, number: int, removals: Sequence[Removal], epoch: int) -> None:
        """Whatever becomes of the removals: those slots still hold what their entries say."""
        self._index.commit(epoch, removals)
        if self.moved.is_wanted:
            with suppress(KVCascadeError):  # only events are lost
                _, blocks = learn(self._segments, self._index, number)
                self.moved.add([block_hash for block_hash, _ in blocks], removed=True)
        try:  # the lock goes first: a segment that is not open is one that may be adopted again
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
        """Adopt an orphan or make a segment; False if there is neither one nor room."""
        missing = self.missing()
        if not missing:
            return False
        there = self._there()
        if self._owners.is_other_hungry() and self._is_at_share():
            return False
        if any(self._adopt(number) for number in missing if number in there):
            return True
        return any(
            self._make(number)
            for number in missing
            if number not in there and self._clock() >= self._make_at_s[number % self._paths]
        )

    def _there(self) -> set[int]:
        """Numbers of the segment files in the paths that answer; the others rest."""
        numbers: set[int] = set()
        for part in range(self._paths):
            try:
                numbers.update(self._segments.found_in(part))
            except OSError as error:
                self._rest(part, error)
        return numbers

    def _rest(self, part: int, error: Exception) -> None:
        """Make nothing in a path for a while."""
        if self.failures == 0:
            _log.warning("the NVMe tier does not grow for now: %s", error)
        self.failures += 1
        self._make_at_s[part] = self._clock() + RETRY_AFTER_S

    def _adopt(self, number: int) -> bool:
        if not self._owners.try_own(number):
            return False
        try:
            self._segments.open(number)
            epoch, blocks = learn(self._segments, self._index, number)
        except (OSError, KVCascadeError) as error:
            _log.warning("a segment is left out: %s", error)
            self._segments.let_go(number)
            self._segments.unusable.add(number)
            self._owners.disown(number)
            return False
        self.adopted.append(Arrival(number, blocks, epoch))
        return True

    def _make(self, number: int) -> bool:
        """Make a segment; False if somebody else does. Leaves its path alone for a while if there
        is no room."""
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


def learn(
    segments: SegmentSet, index: BlockIndex, number: int
) -> tuple[int, list[tuple[BlockHash, int]]]:
    """The committed epoch, and what an open segment holds: slot records that the index confirms.

    A slot whose record is damaged, or cannot be read, counts as free. If an entry names it
    nevertheless, the entry's block will not match its checksum once the slot is written again: a
    miss.
    """
    records = segments.records(number)
    return index.still_in((BlockHash(record.key), slot) for slot, record in records)
