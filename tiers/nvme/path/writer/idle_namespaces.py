"""Namespaces of a path that no engine has open: their size, their last use, and their locks.

They count in the capacity as if they were open: with the most bytes that their tables take. So no
segment has to leave because a tool or an engine opens one. If their room is needed, the writer
opens the one that was used longest ago, and takes its segments, the coldest first. Used by the
writer's thread only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from .....errors import FINAL_ERRORS, InUseError, KVCascadeError, os_errors
from .....logs import get_logger
from ....endurance import DAY_S, day_totals
from ...disk.filesystem import FileLock
from ...namespace import DESCRIPTION, LOCK
from ..path_messages import PathOptions
from ..presence_file import recorded_slots
from .namespace.namespace_home import (
    BLOCKS,
    NOTE_USE_EVERY_S,
    NamespaceHome,
    homes_under,
    open_home,
)
from .namespace.namespace_start import StartMeans
from .path_capacity import RETRY_AFTER_S
from .path_options import POWER

RECENT_S = DAY_S + 2 * NOTE_USE_EVERY_S
"""Time since the noted use after which nothing was written in the last day."""

_log = get_logger(__name__)


@dataclass(slots=True)
class IdleNamespace:
    """A namespace that is not open."""

    name: str
    bytes_by_path: list[int]
    last_used_s: float
    """Wall-clock time of the last use, in seconds."""
    day: bytes = b""
    """Record of the bytes written in the last day; empty if it was not read."""
    usable_from_s: float = 0.0
    """Monotonic time from which it may be opened for its room, in seconds: it failed before."""
    locks: list[FileLock] = field(default_factory=list)
    """Shared locks, so that older versions do not remove it."""


class IdleNamespaces:
    """All namespaces of the path that are not open."""

    def __init__(
        self, means: StartMeans, roots: Sequence[Path], clock: Callable[[], float]
    ) -> None:
        """`clock` is monotonic, in seconds."""
        self._means = means
        self._clock = clock
        self._roots = tuple(roots)
        self._found: dict[str, IdleNamespace] = {}
        self.unusable: dict[str, str] = {}
        """Names of those that cannot be used, with the reason and the remedy. They are not counted
        among the others."""

    def find(self, options: PathOptions) -> None:
        """Find all namespaces. With a write budget, the record of the last day of each is read.

        Raises `TierIOError` if the bytes of one cannot be counted.
        """
        with ExitStack() as if_failed:
            if_failed.callback(self.close)
            for name in homes_under(self._means.fs, self._roots[0]):
                folder = self._roots[0] / name
                try:
                    self._found[name] = self._look(name, options)
                except FINAL_ERRORS as error:
                    text = "%s cannot be used, and is removed if room is needed: %s"
                    _log.warning(text, folder, error)
                    self.unusable[name] = str(error)
                except KVCascadeError as error:
                    _log.warning("%s cannot be opened for now, and is kept: %s", folder, error)
                    self._keep(name, options)
            if_failed.pop_all()

    def add(self, home: NamespaceHome, day: bytes, sizes: list[int] | None = None) -> None:
        """Count a namespace that was open, with its record of the last day.

        Locks that it holds are taken over, so that nobody removes it. Without `sizes` its
        directories are measured: another program may be removing them.
        """
        if sizes is None:
            sizes = [0] * len(home.folders)
            for path, folder in enumerate(home.folders):
                with suppress(OSError):
                    sizes[path] = self._means.fs.used_bytes(folder)
        last_used_s, locks = self._last_used_s(home.folders[0]), _locks_from(home)
        self._found[home.name] = IdleNamespace(home.name, sizes, last_used_s, day, locks=locks)

    def take(self, name: str) -> bytes:
        """Forget a namespace that was opened or removed. Return its record of the last day."""
        one = self._found.pop(name, None)
        for lock in one.locks if one is not None else ():
            lock.release()
        return b"" if one is None else one.day

    def put_off(self, name: str, *, is_final: bool) -> None:
        """Do not try to take the segments of a namespace for a while, or never if `is_final`."""
        if name in self._found:
            pause_s = math.inf if is_final else RETRY_AFTER_S
            self._found[name].usable_from_s = self._clock() + pause_s

    @property
    def names(self) -> frozenset[str]:
        """Names of all of them."""
        return frozenset(self._found)

    def take_gone(self, spared: Container[str]) -> list[tuple[str, bytes]]:
        """Forget those that another program removed, except the `spared` ones.

        Return their names and records of the last day. A namespace that lost its block table alone
        is kept, but its record is returned: it is on the disk no more.
        """
        lost: list[tuple[str, bytes]] = []
        exists = self._means.fs.exists
        for one in list(self._found.values()):
            name, folder = one.name, self._roots[0] / one.name
            if name in spared:
                continue
            if not exists(folder / DESCRIPTION):
                lost.append((name, self.take(name)))
            elif one.day and not exists(folder / BLOCKS):
                lost.append((name, one.day))
                one.day = b""
        return lost

    def bytes_in(self, path: int) -> int:
        """Return the bytes of all of them in a path."""
        return sum(one.bytes_by_path[path] for one in self._found.values())

    def usable_bytes_in(self, path: int) -> int:
        """Return the bytes in a path of those that may be opened for their room."""
        return sum(one.bytes_by_path[path] for one in self._usable)

    def oldest(self, spared: str | None) -> tuple[str, float] | None:
        """Return the one that was used longest ago, with the seconds since then."""
        usable = (one for one in self._usable if one.name != spared)
        one = min(usable, key=lambda each: each.last_used_s, default=None)
        return None if one is None else (one.name, self._means.wall_clock() - one.last_used_s)

    def written_in_day(self) -> int:
        """Return the bytes written to them in the last day, as far as their records were read."""
        now_s = self._means.wall_clock()
        return sum(day_totals(one.day, now_s).written for one in self._found.values() if one.day)

    def close(self) -> None:
        """Release all locks."""
        for name in list(self._found):
            self.take(name)

    @property
    def _usable(self) -> list[IdleNamespace]:
        now_s = self._clock()
        return [one for one in self._found.values() if one.usable_from_s <= now_s]

    def _look(self, name: str, options: PathOptions) -> IdleNamespace:
        fs = self._means.fs
        home = open_home(fs, self._roots, name, options)
        if home is None:
            raise InUseError(f"{name} is being removed by another program")
        try:
            with os_errors(f"looking at {name}"):
                last_used_s = fs.modified_at(home.folders[0] / LOCK)
            is_recent = self._means.wall_clock() - last_used_s < RECENT_S
            is_counted = is_recent and options.write_budget_bytes is not None
            day = self._day_of(home, options) if is_counted else b""
            sizes = self._sizes_of(home)  # afterwards, since the table may have changed
            locks = _locks_from(home)
        finally:
            home.close()
        return IdleNamespace(name, sizes, last_used_s, day, locks=locks)

    def _keep(self, name: str, options: PathOptions) -> None:
        """Count a namespace that cannot be opened for now, unless its directory is not ours."""
        fs = self._means.fs
        folders = [root / name for root in self._roots]
        try:
            fs.check_dir(folders[0])
        except OSError:
            return
        last_used_s = self._last_used_s(folders[0])
        with os_errors(f"looking at {name}"):
            sizes = [fs.used_bytes(folder) if fs.exists(folder) else 0 for folder in folders]
        with suppress(KVCascadeError):  # it counts with what is there if nobody can say more
            home = open_home(fs, self._roots, name, options, is_locked=False)
            sizes = self._sizes_of(home) if home is not None else sizes
        self._found[name] = IdleNamespace(name, sizes, last_used_s)
        self.put_off(name, is_final=False)

    def _last_used_s(self, folder: Path) -> float:
        """Return the wall-clock time of the last use of a namespace; now if it is not known."""
        try:
            return self._means.fs.modified_at(folder / LOCK)
        except OSError:
            return self._means.wall_clock()

    def _sizes_of(self, home: NamespaceHome) -> list[int]:
        """Return what a namespace takes in each path, open or not. Raises `TierIOError`.

        After the capacity was lowered its tables keep their size until it is opened.
        """
        fs = self._means.fs
        home.slots = max(home.slots, recorded_slots(fs, home.folders[0]))
        with os_errors(f"looking at {home.name}"):
            home.measure_index(fs)
            used = [fs.used_bytes(folder) for folder in home.folders]
        return [max(now, home.most_bytes(path)) for path, now in enumerate(used)]

    def _day_of(self, home: NamespaceHome, options: PathOptions) -> bytes:
        """Return the record of the last day; empty if the block table cannot be opened.

        The table does not grow to a raised capacity meanwhile.
        """
        former = recorded_slots(self._means.fs, home.folders[0]) or home.slots
        home = replace(home, slots=min(home.slots, former))
        try:
            table = self._means.table_of(home, is_durable=options.durability == POWER)
            day = table.day_record()
            table.close()
        except KVCascadeError as error:
            _log.warning("the budget lacks what was written to %s in a day: %s", home.name, error)
            return b""
        return day


def _locks_from(home: NamespaceHome) -> list[FileLock]:
    """Take the locks of a namespace over, so that closing it does not release them."""
    locks = list(home.locks)
    home.locks.clear()
    return locks
