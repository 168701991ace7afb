"""Files on disk and in shared memory, as the demo sees them from outside the engine."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import lmdb

from ....tiers.nvme.path.writer.namespace.namespace_home import BLOCKS

META, TOTALS = b"meta", b"totals"
"""Database of the block table, and the record in it that begins with the bytes written."""
MAX_DATABASES = 3
SHARED_MEMORY = "/dev/shm/"
ARENA_PREFIX = "kvcascade-"


def written_bytes(root: Path) -> int:
    """Return all bytes ever written to namespaces under `root`; no engine may be using them.

    Each namespace's block table counts them in the transaction that adds the blocks, so the number
    is also correct after `kill -9`. It is read here without a writer, which would close the path
    cleanly in place of the killed one.
    """
    total = 0
    for path in root.glob(f"*/{BLOCKS}"):
        with lmdb.open(str(path), readonly=True, lock=False, max_dbs=MAX_DATABASES) as table:
            with table.begin(db=table.open_db(META, create=False)) as transaction:
                total += int.from_bytes(transaction.get(TOTALS, b"")[:8], "little")
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
