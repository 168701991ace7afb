"""The clean mark of an index: a file beside it that names the last transaction on the disk.

Without sync, pages reach the disk in any order, and an old page that LMDB reuses may look like a
new one. After a loss of power nothing inside the file can prove that it is complete. So the mark is
a file of its own, and valid only while that transaction is the newest of the index.

- It is never early: it is written after all of that transaction was synced.
- It is never late: the next writer has a newer transaction on the disk before it overwrites any
  page of this one. It syncs its first commit (`LmdbBlockTable.load`), and LMDB leaves the pages of
  a transaction alone in the next two.

If the mark is missing, torn or of another transaction, every page is checked at opening.

The epoch has such a file, too, which is written before a reset counts. A page of before the reset,
which a loss of power left, cannot bring an earlier epoch back then.
"""

from __future__ import annotations

import struct
from pathlib import Path

import xxhash

from ....errors import os_errors
from ..disk.filesystem import RealFileSystem

NAME = "clean"
EPOCH_NAME = "epoch"
_MARK_MAGIC = b"KVCCLEAN"
_MARK = struct.Struct("<8sQ")
_CHECK_BYTES = 8


def write_mark(path: Path, number: int, name: str = NAME) -> None:
    """Mark the index in `path` as whole, after it was synced, or note its epoch.

    Raises a `KVCascadeError`.
    """
    body = _MARK.pack(_MARK_MAGIC, number)
    with os_errors(f"writing {path / name}"):
        RealFileSystem().replace(path / name, body + xxhash.xxh3_64_digest(body))


def read_mark(path: Path, name: str = NAME) -> int | None:
    """Return the transaction that is known to be whole, or the epoch; None without a valid mark."""
    try:
        data = RealFileSystem().read(path / name, _MARK.size + _CHECK_BYTES)
    except OSError:
        return None
    body, check = data[: _MARK.size], data[_MARK.size :]
    if len(body) < _MARK.size or xxhash.xxh3_64_digest(body) != check:
        return None
    magic, number = _MARK.unpack(body)
    return int(number) if magic == _MARK_MAGIC else None
