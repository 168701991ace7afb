"""Find the processes that own a namespace, without touching their locks.

The kernel lists every lock in `/proc/locks`, where a lock is identified by the inode of its file.
Taking the lock for a moment would be simpler, but could refuse an engine that starts at that time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from ..namespace import LOCK

LOCK_TABLE = Path("/proc/locks")
MAX_PID_CHARS = 20
_KIND = "FLOCK"


def owners(folders: Iterable[Path], lock_table: Path = LOCK_TABLE) -> list[int]:
    """Return the pids that hold locks of these namespace directories, ascending; 0 for unknown.

    Processes of other PID namespaces are only seen if the machine's `/proc` shows them.
    """
    files = dict(_lock_files(folders))
    found: set[int] = set()
    for inode, pid in _held(lock_table):
        if inode in files:
            found.add(pid if pid > 0 else _written_pid(files[inode]))
    return sorted(found - {0}) or sorted(found)


def _lock_files(folders: Iterable[Path]) -> Iterator[tuple[int, Path]]:
    """Yield (inode, path) of the lock file of each directory, which every user of it locks."""
    for path in (folder / LOCK for folder in folders):
        with suppress(OSError):  # just removed
            yield os.lstat(path).st_ino, path


def _held(lock_table: Path) -> Iterator[tuple[int, int]]:
    """Yield (inode, pid) of every lock of the kind that owners take."""
    try:
        lines = lock_table.read_text("ascii", "replace").splitlines()
    except OSError:  # a kernel without the file: no owner is found
        return
    for line in lines:
        words = line.split()
        # "1: FLOCK  ADVISORY  WRITE 5512 fd:00:3015 0 EOF"
        if len(words) < 6 or words[1] != _KIND:
            continue
        inode = words[5].rpartition(":")[2]
        if inode.isdigit() and words[4].lstrip("-").isdigit():
            yield int(inode), int(words[4])


def _written_pid(path: Path) -> int:
    """Return the pid written in a lock file; 0 if there is none."""
    try:
        text = path.read_bytes()[:MAX_PID_CHARS].decode("ascii", "replace").strip()
    except OSError:
        return 0
    return int(text) if text.isascii() and text.isdigit() else 0
