"""The mark of a clean close: which transaction of the index is completely on the disk.

Without sync, pages reach the disk in any order. An old page that LMDB reuses may look like a new
one. After a loss of power nothing inside the file can prove that it is complete, so the mark is a
file of its own. It names the last transaction of a close that left no process behind. It is valid
only while that is the newest transaction of the index.

- It is never early: it is written after all of that transaction was synced.
- It is never late: the next process to change the index has a newer transaction on the disk before
  it overwrites any page of this one. An engine syncs its first commit (`BlockIndex.load`), a
  command syncs every commit. LMDB leaves the pages of a transaction alone in the next two.

If the mark is missing, torn or of another transaction, every page is checked at opening.
"""

from __future__ import annotations

import struct
from pathlib import Path

import xxhash

from ....errors import os_errors
from ..disk.filesystem import RealFileSystem

NAME = "clean"
_MAGIC = b"KVCCLEAN"
_BODY = struct.Struct("<8sQ")
_CHECK_BYTES = 8


def write_mark(path: Path, transaction: int) -> None:
    """Mark the index in `path` as whole, after it was synced. Raises a `KVCascadeError`."""
    body = _BODY.pack(_MAGIC, transaction)
    with os_errors(f"writing {path / NAME}"):
        RealFileSystem().replace(path / NAME, body + xxhash.xxh3_64_digest(body))


def read_mark(path: Path) -> int | None:
    """Return the transaction that is known to be whole; None without a valid mark."""
    try:
        data = RealFileSystem().read(path / NAME, _BODY.size + _CHECK_BYTES)
    except OSError:
        return None
    body, check = data[: _BODY.size], data[_BODY.size :]
    if len(body) < _BODY.size or xxhash.xxh3_64_digest(body) != check:
        return None
    magic, transaction = _BODY.unpack(body)
    return int(transaction) if magic == _MAGIC else None
