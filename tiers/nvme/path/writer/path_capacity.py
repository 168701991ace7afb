"""Disk space of a path over all its namespaces: capacity, reserve, and older versions beside it.

The writer counts its own namespaces exactly: it makes and deletes every file of them. Namespaces of
older versions are measured while the lock is held that those versions take, too, before they make a
file. So both together keep the capacity and the reserve. If room is needed, namespaces of older
versions that no process has open are removed, the one used longest ago first. A damaged namespace
counts among them, and one whose segments are larger than the capacity. A namespace that cannot be
opened for now is kept.

`claim` runs on an I/O thread, everything else on the writer's thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from .....errors import ConfigError, InUseError, NoSpaceError, os_errors
from .....logs import get_logger
from ...disk.filesystem import FileSystem
from ...namespace import (
    DESCRIPTION,
    INDEX_FILE,
    FoundNamespace,
    lock_namespace,
    namespaces_under,
    remove_leftovers,
    remove_locked_namespace,
)
from ...segments.format import MAX_DESCRIPTION_BYTES
from ..path_messages import PathOptions
from .path_plan import SMALL_FILES_BYTES

PATH_REST_S = 4.5
"""Rest of a path, or of an index, after a failed write; then it is tried again. It ends before that
of the engine (`REST_S`), whose next write finds it awake."""
RETRY_AFTER_S = 30.0
"""Pause after a segment could not be made or deleted in a path."""
BUDGET_LOCK = ".kvcascade.lock"
"""Lock file in each path that older versions hold while they make a file."""
BUDGET_WAIT_S = 30.0
"""Longest wait for an engine of an older version that makes a file."""
UNKNOWN_INDEX_BYTES = 512 << 10
"""Smallest index of an older version, for a namespace that is not described yet."""
_INDEX = Path("index", INDEX_FILE)

_WHY_REMOVED = "it is of another version, damaged, or its segments are larger than the capacity"

_log = get_logger(__name__)


def growth_bytes(fs: FileSystem, folder: Path) -> int:
    """Return the bytes by which the directory of an open namespace may grow without asking.

    The index of an older version may grow to the size of its map.
    """
    try:
        document = json.loads(fs.read(folder / DESCRIPTION, MAX_DESCRIPTION_BYTES))
        part, most = int(document["part"]), int(document["index_bytes"])
        index = folder / _INDEX
        now = fs.used_bytes(index) if fs.exists(index) else 0
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return SMALL_FILES_BYTES + UNKNOWN_INDEX_BYTES
    return SMALL_FILES_BYTES + (max(0, most - now) if part == 0 else 0)


class PathCapacity:
    """Space in each path; callers say what our own files take."""

    def __init__(
        self,
        fs: FileSystem,
        roots: Sequence[Path],
        options: PathOptions,
        clock: Callable[[], float],
    ) -> None:
        """`clock` returns monotonic seconds."""
        self.options = options
        self._fs = fs
        self._roots = tuple(roots)
        self._clock = clock
        self.own: frozenset[str] = frozenset()
        """Names of our namespaces, open or not. The writer's thread replaces it before a
        namespace is opened and before segments are made. So a job takes none of ours for that of
        another process, and none that could not be opened for ours."""
        self.was_made = False
        """True once a segment was made; whoever waits for that sets it to False."""
        self._foreign = [0] * len(roots)
        """Bytes in each path of older versions that are in use. `claim` measures them."""
        self._retry_at_s = [0.0] * len(roots)
        """Time of the next attempt to make a segment, by path."""
        self._rests_until_s = [0.0] * len(roots)

    @property
    def paths(self) -> int:
        """Number of paths."""
        return len(self._roots)

    @property
    def share_bytes(self) -> int:
        """Capacity of each path."""
        return self.options.capacity_bytes // len(self._roots)

    @property
    def awake(self) -> list[int]:
        """Numbers of the paths that take writes."""
        now_s = self._clock()
        return [p for p in range(self.paths) if self._rests_until_s[p] <= now_s]

    def rest(self, path: int) -> None:
        """Let a path take no writes for a while, because its device failed."""
        self._rests_until_s[path] = self._clock() + PATH_REST_S

    def put_off(self, path: int) -> None:
        """Make no segment in a path for a while."""
        self._retry_at_s[path] = self._clock() + RETRY_AFTER_S

    def end_pause(self, path: int) -> None:
        """Let a segment be made again in a path: one was deleted there."""
        self._retry_at_s[path] = 0.0

    def may_try(self, path: int, own_bytes: int) -> bool:
        """Return True if our files may have `own_bytes` in a path, and no attempt failed lately.

        The attempt measures older versions again: they may have taken less in the meantime.
        """
        return own_bytes <= self.share_bytes and self._clock() >= self._retry_at_s[path]

    def left_bytes(self, path: int, own_bytes: int) -> int:
        """Return what is left of the capacity of a path; negative if too much is taken."""
        return self.share_bytes - self._foreign[path] - own_bytes

    # -- on an I/O thread ----------------------------------------------------------------------

    @contextmanager
    def claim(self, path: int, growth: int, own_bytes: int) -> Iterator[None]:
        """Make a file of `growth` bytes in a path inside this context.

        `own_bytes` are those of our files with the new one. Older versions that are not in use are
        removed as far as room is needed. Raises `NoSpaceError` if capacity or reserve would not be
        kept, and `ConfigError` if the disk of the path is not mounted any more.
        """
        root = self._roots[path]
        if not self._is_mounted(root):  # the lock file would hide that from the next start
            raise ConfigError(f"path: {root} has nothing of this tier any more; mount its disk")
        try:
            with os_errors(f"locking {root}"):
                lock = self._fs.lock(root / BUDGET_LOCK, wait_s=BUDGET_WAIT_S)
        except InUseError:
            raise NoSpaceError(f"another process is making room in {root}; try again") from None
        try:
            self._make_room(path, growth, own_bytes)
            yield
        finally:
            lock.release()

    def _is_mounted(self, root: Path) -> bool:
        """Return False if the first path has directories of ours, and this one has none."""
        first = self._roots[0]
        if root == first or self._fs.exists(root / BUDGET_LOCK):
            return True
        is_here, is_first = (
            any(self._fs.exists(each / name) for name in self.own) for each in (root, first)
        )
        return is_here or not is_first

    def _make_room(self, path: int, growth: int, own_bytes: int) -> None:
        root = self._roots[path]
        taken = remove_leftovers(self._fs, root)
        ahead = held = 0
        with ExitStack() as locks:
            idle: list[FoundNamespace] = []
            for one in self._others(root):
                lock = lock_namespace(self._fs, one.path)
                if lock is None:
                    ahead += growth_bytes(self._fs, one.path)
                    held += one.used_bytes
                else:
                    locks.callback(lock.release)
                    idle.append(one)
                taken += one.used_bytes
            with os_errors(f"asking for the free space of {root}"):
                free = self._fs.free_bytes(root)
            self._foreign[path] = held + ahead
            over = taken + ahead + own_bytes - self.share_bytes
            reserve = self.options.min_free_bytes
            short = growth + reserve + (ahead if reserve else 0) - free
            self._remove_oldest(root, idle, over, short)

    def _remove_oldest(
        self, root: Path, idle: Sequence[FoundNamespace], over: int, short: int
    ) -> None:
        """Remove enough of these. None is removed if all are not enough."""
        removed, chosen = 0, []
        for one in idle:
            if removed >= max(over, short):
                break
            chosen.append(one)
            removed += one.used_bytes
        if removed < over:
            raise NoSpaceError(
                f"the capacity in {root} is taken by namespaces that other engines use; stop "
                "them, or raise the capacity"
            )
        if removed < short:
            raise NoSpaceError(
                f"less than the reserve would be left on the disk of {root}; free space there, or "
                "lower min_free"
            )
        for one in chosen:
            remove_locked_namespace(self._fs, one.path)
            _log.warning("removed %s for room: %s", one.path, _WHY_REMOVED)

    def _others(self, root: Path) -> list[FoundNamespace]:
        return [one for one in namespaces_under(self._fs, root) if one.path.name not in self.own]
