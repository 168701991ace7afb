"""Namespaces of a path that no engine has open: their size, their last use, and their locks.

They count in the capacity like all others. If their room is needed, the writer opens the one that
was used longest ago, and takes its segments, the coldest first. Used by the writer's thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .....errors import KVCascadeError, os_errors
from .....logs import get_logger
from ....endurance import DAY_S
from ...disk.filesystem import FileLock
from ...namespace import LOCK
from .namespace_home import homes_under, open_home
from .namespace_start import StartMeans

_log = get_logger(__name__)


@dataclass(slots=True)
class IdleNamespace:
    """A namespace that is not open."""

    name: str
    bytes_by_path: list[int]
    last_used_s: float
    """Wall-clock time of the last use, in seconds."""
    written_in_day_bytes: int = 0
    """Bytes written in the day before the writer started."""
    is_usable: bool = True
    """False if it could not be opened; its room is not taken then."""
    locks: list[FileLock] = field(default_factory=list)
    """Shared locks, so that older versions do not remove it."""


class IdleNamespaces:
    """All namespaces of the path that are not open."""

    def __init__(self, means: StartMeans, roots: Sequence[Path]) -> None:
        self._means = means
        self._roots = tuple(roots)
        self._found: dict[str, IdleNamespace] = {}

    def find(self, capacity_bytes: int, *, with_totals: bool) -> None:
        """Find all namespaces. With `with_totals` the bytes written to each in a day are read."""
        for name in homes_under(self._means.fs, self._roots[0]):
            try:
                self._found[name] = self._look(name, capacity_bytes, with_totals)
            except KVCascadeError as error:
                _log.warning(
                    "%s cannot be used, and is removed if room is needed: %s",
                    self._roots[0] / name,
                    error,
                )

    def take(self, name: str) -> None:
        """Forget a namespace that was opened or removed."""
        one = self._found.pop(name, None)
        for lock in one.locks if one is not None else ():
            lock.release()

    def mark_unusable(self, name: str) -> None:
        """Never try again to take the segments of a namespace."""
        if name in self._found:
            self._found[name].is_usable = False

    @property
    def all(self) -> list[IdleNamespace]:
        """Every namespace that is not open."""
        return list(self._found.values())

    @property
    def folders(self) -> frozenset[Path]:
        """Directories of all of them."""
        return frozenset(root / name for root in self._roots for name in self._found)

    def bytes_in(self, path: int) -> int:
        """Return the bytes of all of them in a path."""
        return sum(one.bytes_by_path[path] for one in self._found.values())

    def oldest(self, spared: str | None) -> tuple[str, float] | None:
        """Return the one that was used longest ago, with the seconds since then."""
        usable = [one for one in self._found.values() if one.is_usable and one.name != spared]
        one = min(usable, key=lambda each: each.last_used_s, default=None)
        return None if one is None else (one.name, self._means.wall_clock() - one.last_used_s)

    def written_in_day(self) -> int:
        """Return the bytes written to them in a day: too many rather than too few."""
        now_s = self._means.wall_clock()
        recent = (one for one in self._found.values() if now_s - one.last_used_s < DAY_S)
        return sum(one.written_in_day_bytes for one in recent)

    def close(self) -> None:
        """Release all locks."""
        for name in list(self._found):
            self.take(name)

    def _look(self, name: str, capacity_bytes: int, with_totals: bool) -> IdleNamespace:
        fs = self._means.fs
        home = open_home(fs, self._roots, name, capacity_bytes)
        assert home is not None, "its description was just read"
        try:
            sizes = []
            with os_errors(f"looking at {name}"):
                for folder in home.folders:
                    sizes.append(fs.used_bytes(folder))
                last_used_s = fs.modified_at(home.folders[0] / LOCK)
            written = 0
            if with_totals and self._means.wall_clock() - last_used_s < DAY_S:
                table = self._means.table_of(home, is_durable=False)
                written = table.day_totals().written
                table.close()
            locks = list(home.locks)
            home.locks.clear()
        finally:
            home.close()
        return IdleNamespace(name, sizes, last_used_s, written, locks=locks)
