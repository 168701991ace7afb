"""Writes that may still run although the writer no longer knows of their grants.

A writer knows only the grants that it made itself. It would grant a slot again into which a node is
still writing, and the late bytes would damage an acknowledged block.

Each node holds a shared lock on `.kvcascade/writes` from its `Welcome` until its last write under
that writer has ended. The kernel drops the lock of a process that dies. A new writer gives the file
another name, and grants no slot until it gets the lock of the file exclusively. Nodes that it
welcomes lock a new file. A writer does the same if another program removes a namespace that engines
use, because a late write could go into the new files of the same names.

No guarantee is given for a write that takes longer than `FORMER_WRITES_LIMIT_S`, or if the disk has
no room for a lock file.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

from ....errors import InUseError
from ....logs import get_logger
from ..disk.filesystem import FileLock, FileSystem
from .writer.path_options import PATH_FOLDER

WRITES = "writes"
"""Name of the file that nodes lock."""
FORMER_WRITES_LIMIT_S = 10.0
"""Longest time for which a writer grants nothing, in seconds."""

_log = get_logger(__name__)


def hold_writes(fs: FileSystem, root: Path) -> FileLock | None:
    """Lock the file for the writes of a node.

    Return None if that is not possible. Nothing depends on the lock while the writer lives.
    """
    try:
        return fs.lock(root / PATH_FOLDER / WRITES, shared=True)
    except (OSError, InUseError):
        return None


class FormerWrites:
    """Writes under grants that the writer of a path does not know. The writer's thread."""

    def __init__(self, fs: FileSystem, root: Path, clock: Callable[[], float]) -> None:
        """Wait for the nodes of earlier writers. `clock` returns monotonic seconds."""
        self._fs = fs
        self._folder = root / PATH_FOLDER
        self._clock = clock
        self._ends_s = 0.0
        self._files: list[Path] = []
        self._only: frozenset[str] | None = None
        """Names of the namespaces into which such writes may go; None: all."""
        self._wait()

    def wait_for(self, names: frozenset[str]) -> None:
        """Wait for writes into namespaces that were removed, for a limited time.

        They end before the nodes of these namespaces are welcomed again. Nodes of other namespaces
        keep the file locked, so the wait may take the whole time beside them.
        """
        if not self._files or self._clock() >= self._ends_s:
            self._only = names
        elif self._only is not None:
            self._only |= names
        self._wait()

    def may_run(self, name: str) -> bool:
        """Return True while a write into this namespace may run under a grant that is not known."""
        if not self._files or (self._only is not None and name not in self._only):
            return False
        self.look()
        if self._files and self._clock() >= self._ends_s:
            if self._only is None:
                _log.warning(
                    "a node writes for more than %d s; slots are granted again without its end",
                    FORMER_WRITES_LIMIT_S,
                )
            self._files = []
        return bool(self._files)

    def look(self) -> None:
        """Remove the files of nodes that have ended, also if nothing is to be granted."""
        with suppress(OSError):
            self._files = [file for file in self._files if not self._has_ended(file)]

    def _wait(self) -> None:
        """Nodes that are welcomed from now on have another file than the others."""
        self._ends_s = self._clock() + FORMER_WRITES_LIMIT_S
        with suppress(OSError):
            self._files = self._set_aside()

    def _set_aside(self) -> list[Path]:
        names = [name for name in self._fs.list_dir(self._folder) if name.startswith(WRITES)]
        if WRITES in names:
            names.remove(WRITES)
            free = next(name for n in count() if (name := f"{WRITES}.{n}") not in names)
            self._fs.rename(self._folder / WRITES, self._folder / free)
            names.append(free)
        return [self._folder / name for name in names]

    def _has_ended(self, file: Path) -> bool:
        try:
            lock = self._fs.lock(file)
        except InUseError:
            return False
        self._fs.unlink(file)
        lock.release()
        return True
