"""The clean mark of an index: a file beside it that names the last transaction on the disk.

Without sync, pages reach the disk in any order, and an old page that LMDB reuses may look like a
new one. After a loss of power nothing inside the file can prove that it is complete. So the mark is
a file of its own, and valid only while that transaction is the newest of the index.

- It is never early: it is written after all of that transaction was synced.
- It is never late: the next writer has a newer transaction on the disk before it overwrites any
  page of this one. It syncs its first commit (`LmdbBlockTable.load`), and LMDB leaves the pages of
  a transaction alone in the next two.

If the mark is missing, torn or of another transaction, every page is checked at opening.

The epoch has such a file, too. A reset notes its epoch there before it changes the index. So pages
of before the reset, which a loss of power left, cannot bring the earlier epoch back.
"""

from __future__ import annotations

import struct
from contextlib import closing
from pathlib import Path

import xxhash

from ....errors import os_errors
from ..disk.filesystem import RealFileSystem

NAME = "clean"
EPOCH_NAME = "epoch"
_MARK_MAGIC = b"KVCCLEAN"
_MARK = struct.Struct("<8sQ")
MARK_BYTES = _MARK.size + 8


def write_mark(path: Path, transaction: int) -> None:
    """Mark the index in `path` as whole, after it was synced. Raises a `KVCascadeError`."""
    with os_errors(f"writing {path / NAME}"):
        RealFileSystem().replace(path / NAME, _marked(transaction))


def read_mark(path: Path) -> int | None:
    """Return the transaction that is known to be whole; None without a valid mark."""
    try:
        return _number_in(RealFileSystem().read(path / NAME, MARK_BYTES))
    except OSError:
        return None


def note_epoch(path: Path, epoch: int) -> None:
    """Note the epoch of the index in `path` durably; it takes room only the first time.

    Raises a `KVCascadeError`.
    """
    fs, name = RealFileSystem(), path / EPOCH_NAME
    with os_errors(f"writing {name}"):
        if not fs.exists(name):
            fs.replace(name, _marked(epoch))
            return
        with closing(fs.open(name)) as file:
            file.pwritev([memoryview(_marked(epoch))], 0)
            file.sync()


def noted_epoch(path: Path) -> int:
    """Return the epoch that was noted for an index; 0 if none is, or if the note is damaged.

    Raises a `KVCascadeError` if it cannot be read.
    """
    with os_errors(f"reading {path / EPOCH_NAME}"):
        try:
            return _number_in(RealFileSystem().read(path / EPOCH_NAME, MARK_BYTES)) or 0
        except FileNotFoundError:
            return 0


def _marked(number: int) -> bytes:
    body = _MARK.pack(_MARK_MAGIC, number)
    return body + xxhash.xxh3_64_digest(body)


def _number_in(data: bytes) -> int | None:
    body, check = data[: _MARK.size], data[_MARK.size :]
    if len(body) < _MARK.size or xxhash.xxh3_64_digest(body) != check:
        return None
    magic, number = _MARK.unpack(body)
    return int(number) if magic == _MARK_MAGIC else None
