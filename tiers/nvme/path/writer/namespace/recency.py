"""Order of eviction of one namespace, with the time of each slot's last use.

Both are arrays in `<namespace>/state/`, so they survive restarts and `kill -9`. Used by the
writer's thread only; nothing waits for a file.

Damage to these files costs recency only. `victims` trusts no answer of the order: each slot must be
in use, and none may be missing. Each search also looks for a few of the used slots, in turn: slots
may be hidden while enough others are found. After a wrong answer, or an exception, the order is
fitted to the used slots.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ......errors import KVCascadeError, NoSpaceError, os_errors
from ......logs import get_logger
from .....base import BlockHash, SlotMask
from .....policies import order_class
from .....policies.order import scalars
from .....policies.ordered import tag_of
from .....policies.parts.usage import SlotUsage
from ....disk.filesystem import FileSystem
from ....segments.arrays import MappedArrays
from ....segments.chains import CHAINS

SESSION = "session"
"""File in the state folder: the number of the last opening, in decimal digits."""
MAX_SESSION_DIGITS = 18
COLDEST_SAMPLE = 64
"""Number of next victims whose mean last use stands for a namespace's coldest blocks."""

CHECKED_PER_SEARCH = 4
"""Number of slots that each search looks for, at 0.2 µs each."""
RESTORE_REST_S = 10.0
"""Time from one restoration of the order to the next: one takes tenths of a second."""

_log = get_logger(__name__)


class Recency:
    """Eviction order by slot. `wall_clock` returns seconds since 1970."""

    def __init__(
        self,
        fs: FileSystem,
        folder: Path,
        policy: str,
        is_used: SlotMask,
        wall_clock: Callable[[], float],
    ) -> None:
        """Load the order as it was left. After a crash it is fitted to the used slots. A policy
        that was not in use last begins with the order of the last uses. The arrays of other
        policies are deleted.

        Raises `ConfigError` for an unknown policy, or another `KVCascadeError`.
        """
        self._arrays = MappedArrays(fs, folder, _next_session(fs, folder))
        self._folder = folder
        self._wall_clock = wall_clock
        self._is_used = is_used
        self._is_used_at = scalars(is_used)
        self._is_damaged = False
        """True if the order is to be restored."""
        self._restored_s = -RESTORE_REST_S
        self._nameless: set[int] = set()
        """Used slots that are in no order."""
        self._checked = 0
        """Slot before which the slots were looked for in this turn."""
        self._order = order_class(policy)(len(is_used), self._arrays)
        was_other_policy = self._arrays.was_unused
        self._usage = SlotUsage(len(is_used), self._arrays, wall_clock)
        if self._arrays.was_replaced:
            self._order.reconcile(np.flatnonzero(is_used))
        if was_other_policy:
            self._order_by_last_use()
        self._arrays.remove_others(kept=CHAINS)  # a plan counts the arrays of one policy

    @property
    def wants_chains(self) -> bool:
        """True if the policy uses the blocks of ended requests."""
        return self._order.wants_chains

    def expect(self, keys: Iterable[bytes]) -> None:
        """Announce blocks that will be stored, before room is made for them."""
        if self._order.expects:
            with self._faults_noted():
                self._order.expect([tag_of(BlockHash(key)) for key in keys])

    def insert(self, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """Add blocks in prefix order; the first is the most recent afterwards."""
        self._nameless.difference_update(slots)
        with self._faults_noted():
            self._order.insert(slots[::-1], self._tags(keys[::-1]))
        self._usage.note_insert(slots)

    def touch(self, slots: Sequence[int]) -> None:
        """Note a use of blocks in prefix order."""
        slots = self._named(slots)
        with self._faults_noted():
            self._order.touch(slots[::-1])
        self._usage.note_use(slots)

    def settle(self, slots: Sequence[int]) -> None:
        """Put blocks that were stored in parts into prefix order; this is no use."""
        with self._faults_noted():
            self._order.settle(self._named(slots)[::-1])

    def chain(self, slots: Sequence[int], blocks: int) -> None:
        """Note the end of a request of `blocks` blocks, which is a use of them.

        `slots` ends before the first absent block.
        """
        slots = self._named(slots)
        with self._faults_noted():
            self._order.chain(slots, blocks)
        self._usage.note_use(slots)

    def remove(self, slots: Sequence[int]) -> None:
        """Forget blocks that are gone for other reasons than eviction."""
        with self._faults_noted():
            self._order.remove(self._named(slots))

    def set_aside(self, slots: Sequence[int]) -> None:
        """Never evict these used slots: the index does not say whose they are."""
        self.remove(slots)
        self._nameless.update(slots)

    def evicted(self, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """Forget blocks because they were evicted."""
        with self._faults_noted():
            self._order.evicted(slots, self._tags(keys))

    def victims(self, n: int, mask: SlotMask | None = None) -> list[int]:
        """Return up to `n` used slots in order of eviction, without those that are False in `mask`.

        There are fewer only if no more are used, or if the order was restored a short time ago.
        """
        found = self._search(n, mask)
        self._look_for_next()
        self._is_damaged |= self._hides_some(found, n, mask)
        if self._is_damaged and self._restore():
            found = self._search(n, mask)
        return found

    def clear(self) -> None:
        """Forget all blocks."""
        self._nameless.clear()
        self._order.clear()

    def coldest_age_s(self, mask: SlotMask | None = None) -> float | None:
        """Return the mean time since the last use of the next victims; None if there are none."""
        if not (slots := self.victims(COLDEST_SAMPLE, mask)):
            return None
        return float(self._wall_clock() - self._usage.last_use[slots].mean(dtype=np.float64))

    def segment_ages_s(self, slots_per_segment: int) -> npt.NDArray[np.float64]:
        """Return the mean time since the last use by segment; infinite for one without blocks."""
        rows = self._is_used.reshape(-1, slots_per_segment)
        last_use = self._usage.last_use.reshape(-1, slots_per_segment)
        used = np.count_nonzero(rows, axis=1)
        sums = np.where(rows, last_use, 0).sum(axis=1, dtype=np.float64)
        means = np.full(len(used), -np.inf)
        np.divide(sums, used, out=means, where=used > 0)
        return self._wall_clock() - means

    def last_used_s(self, slots: Sequence[int]) -> list[int]:
        """Return the time of the last use of each slot, in seconds since 1970."""
        inside = np.clip(np.asarray(slots, dtype=np.int64), 0, len(self._is_used) - 1)
        return list(map(int, self._usage.last_use[inside]))

    def close(self, *, is_clean: bool) -> None:
        """Close the arrays. With `is_clean` they are sealed, so that the next start trusts them."""
        if is_clean:
            with suppress(KVCascadeError):  # the next start fits them to the used slots
                self._arrays.sync()
        self._arrays.close()

    @contextmanager
    def _faults_noted(self) -> Iterator[None]:
        """Note damage if a call of the order raises: its arrays are files, which may be damaged."""
        try:
            yield
        except Exception as error:
            if not self._is_damaged:
                _log.warning("%s: the order of eviction failed", self._folder, exc_info=error)
            self._is_damaged = True

    def _search(self, n: int, mask: SlotMask | None) -> list[int]:
        """Return victims of the order that are used slots, each once."""
        found: list[int] = []
        with self._faults_noted():
            found = self._order.victims(n, lambda slot: True, mask)
        is_used, slots = self._is_used_at, len(self._is_used_at)
        right = [slot for slot in dict.fromkeys(found) if 0 <= slot < slots and is_used[slot]]
        self._is_damaged |= len(right) < len(found)
        return right

    def _look_for_next(self) -> None:
        """Note damage if one of the next slots belongs into the order, and is not there."""
        first, is_used, order = self._checked, self._is_used_at, self._order
        end = min(first + CHECKED_PER_SEARCH, len(is_used))
        self._checked = end % len(is_used)
        with self._faults_noted():
            self._is_damaged |= any(
                is_used[slot] and slot not in order and slot not in self._nameless
                for slot in range(first, end)
            )

    def _hides_some(self, found: list[int], n: int, mask: SlotMask | None) -> bool:
        """Return True if fewer than `n` victims were found although more slots are in the order."""
        if len(found) >= n:
            return False
        present = self._present()
        evictable = present if mask is None else present[mask[present]]
        return len(found) < min(n, len(evictable))

    def _named(self, slots: Sequence[int]) -> Sequence[int]:
        """Return the slots without those that are set aside."""
        nameless = self._nameless
        return [slot for slot in slots if slot not in nameless] if nameless else slots

    def _present(self) -> npt.NDArray[np.intp]:
        """Return the slots that belong into the order, ascending."""
        present = np.flatnonzero(self._is_used)
        return np.setdiff1d(present, [*self._nameless]) if self._nameless else present

    def _restore(self) -> bool:
        """Fit the order to the used slots. Return False if that was done a short time ago."""
        now_s = self._wall_clock()
        if 0 <= now_s - self._restored_s < RESTORE_REST_S:
            return False
        self._restored_s = now_s
        _log.warning("%s is damaged; the order of eviction is restored", self._folder)
        self._is_damaged = False
        with self._faults_noted():
            self._order.reconcile(self._present())
        return True

    def _order_by_last_use(self) -> None:
        """Order the blocks by their last use: what another policy left to this one."""
        slots = np.flatnonzero(self._is_used)
        by_use = np.argsort(self._usage.last_use[slots], kind="stable")
        self._order.settle(slots[by_use].tolist())

    def _tags(self, keys: Sequence[bytes]) -> list[int]:
        return [tag_of(BlockHash(key)) for key in keys] if self._order.wants_tags else []


def _next_session(fs: FileSystem, folder: Path) -> int | None:
    """Number this opening. Arrays that the opening before it did not seal are stale.

    Return None if the disk has no room for the number. The next opening then fits the arrays anew.
    """
    path = folder / SESSION
    try:
        with os_errors(f"numbering the opening of {folder}"):
            fs.make_dir(folder)
            digits = _read_digits(fs, path) if fs.exists(path) else b""
            session = int(digits) + 1 if digits.isdigit() else 1
            fs.replace(path, b"%d" % session)
    except NoSpaceError:
        return None
    return session


def _read_digits(fs: FileSystem, path: Path) -> bytes:
    """Return the contents of the file of the session; nothing if it is too long to be a number."""
    try:
        return fs.read(path, MAX_SESSION_DIGITS)
    except OSError as error:
        if error.errno != errno.EOVERFLOW:
            raise
        return b""
