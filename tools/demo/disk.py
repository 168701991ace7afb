"""What the demo looks at from outside the engine: the files on disk and in shared memory."""

from __future__ import annotations

import struct
from pathlib import Path

import lmdb

SHARED_MEMORY = Path("/dev/shm")
_TOTALS = struct.Struct("<QQ")


def written_bytes(root: Path) -> int:
    """Bytes written to all namespaces under `root`, ever; no engine may be using them.

    Each namespace's index counts them in the transaction that makes the blocks findable, so the
    number is right after `kill -9` too.
    """
    return sum(_totals(index)[0] for index in root.glob("*/index"))


def _totals(index: Path) -> tuple[int, int]:
    """Bytes written and read."""
    with lmdb.open(str(index), readonly=True, lock=False, max_dbs=4) as environment:
        meta = environment.open_db(b"meta", create=False)
        with environment.begin(db=meta) as transaction:
            stored = transaction.get(b"totals") or b""
    if len(stored) != _TOTALS.size:
        return 0, 0
    written, read = _TOTALS.unpack(stored)
    return written, read


def arenas() -> frozenset[str]:
    """Arenas in shared memory, of any engine on this machine."""
    return frozenset(str(path) for path in SHARED_MEMORY.glob("kvcascade-*"))
