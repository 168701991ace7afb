"""Files on disk and in shared memory, as the demo sees them from outside the engine."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ....tiers.nvme.offline.reader import IndexReader

SHARED_MEMORY = "/dev/shm/"
ARENA_PREFIX = "kvcascade-"


def written_bytes(root: Path) -> int:
    """Return all bytes ever written to namespaces under `root`; no engine may be using them.

    Each namespace's index counts them in the transaction that adds the blocks, so the number is
    also correct after `kill -9`.
    """
    total = 0
    for path in root.glob("*/index"):
        with IndexReader(path) as index:
            total += index.meta().written_bytes
    return total


def shared_memory_of(pids: Iterable[int]) -> frozenset[str]:
    """Return the files in shared memory that these processes have mapped, if they have a name now.

    Files are identified by inode, because a file may get its name after it was mapped, as
    semaphores do.
    """
    mapped: set[int] = set()
    for pid in pids:
        with suppress(OSError):  # the process may have ended
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            mapped.update(int(line.split()[4]) for line in lines if f" {SHARED_MEMORY}" in line)
    with os.scandir(SHARED_MEMORY) as entries:
        return frozenset(entry.path for entry in entries if entry.inode() in mapped)


def left_behind(files: Iterable[str]) -> list[str]:
    """Return those of an engine's files in shared memory that are ours, after the engine has ended.

    Files of the engine itself, which remain if it is killed, are removed.
    """
    ours: list[str] = []
    for path in sorted(files):
        if Path(path).name.startswith(ARENA_PREFIX):
            ours += [path] if Path(path).exists() else []
        else:
            Path(path).unlink(missing_ok=True)
    return ours
