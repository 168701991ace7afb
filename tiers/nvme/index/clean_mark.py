"""The mark of a clean close: which transaction of the index is known to be whole on the disk.

Where nothing is synced, pages reach the disk in any order, and an old page that LMDB uses again may
look like a new one: no word inside the file can be trusted after a loss of power. So the mark is a
file of its own. It names the last transaction of a close after which nobody has the index open, and
counts only while that is the newest one of the index.

- It is never early: it is written once all of that transaction was synced.
- It is never late: whoever changes the index next has a newer transaction on the disk before it
  writes over any page of this one. An engine syncs its first commit (`BlockIndex.load`), a command
  every one, and LMDB leaves the pages of a transaction alone in the next two.

A mark that is missing, torn or of another transaction costs a look at every page.
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
    """Vouch for the index in `path`, all of which was synced. Raises one of our errors."""
    body = _BODY.pack(_MAGIC, transaction)
    with os_errors(f"writing {path / NAME}"):
        RealFileSystem().replace(path / NAME, body + xxhash.xxh3_64_digest(body))


def read_mark(path: Path) -> int | None:
    """The transaction that is whole; None if nobody vouches for any."""
    try:
        data = RealFileSystem().read(path / NAME, _BODY.size + _CHECK_BYTES)
    except OSError:
        return None
    body, check = data[: _BODY.size], data[_BODY.size :]
    if len(body) < _BODY.size or xxhash.xxh3_64_digest(body) != check:
        return None
    magic, transaction = _BODY.unpack(body)
    return int(transaction) if magic == _MAGIC else None
