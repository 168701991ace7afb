"""State that a clean close leaves: the slots of the process, and the mark of a whole index.

The *saved slots* lie in the index. With them the next start of the process reads no entry.

The *clean mark* is a file beside the index that names the transaction which is completely on the
disk. Without sync, pages reach the disk in any order. An old page that LMDB reuses may look like a
new one. After a loss of power nothing inside the file can prove that it is complete, so the mark is
a file of its own. It names the last transaction of a close that left no process behind. It is valid
only while that is the newest transaction of the index.

- It is never early: it is written after all of that transaction was synced.
- It is never late: the next process to change the index has a newer transaction on the disk before
  it overwrites any page of this one. An engine syncs its first commit (`BlockIndex.load`), a
  command syncs every commit. LMDB leaves the pages of a transaction alone in the next two.

If the mark is missing, torn or of another transaction, every page is checked at opening.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from ....errors import os_errors
from ..disk.filesystem import RealFileSystem

NAME = "clean"
_MARK_MAGIC = b"KVCCLEAN"
_MARK = struct.Struct("<8sQ")
_HEAD = struct.Struct("<QQ")
_CHECK_BYTES = 8


@dataclass(frozen=True, slots=True)
class SavedSlots:
    """State of a process's segments at its clean close."""

    epoch: int
    """Epoch of the save; if the namespace has another epoch now, all blocks are gone."""
    used: int
    """Number of slots that held a block."""
    free: npt.NDArray[np.int32]
    """Free runs, ascending: shape `(n, 2)`."""


def pack_saved_slots(saved: SavedSlots) -> bytes:
    """Return the saved slots as stored in the index."""
    body = _HEAD.pack(saved.epoch, saved.used) + saved.free.astype("<i4").tobytes()
    return body + xxhash.xxh3_64_digest(body)


def parse_saved_slots(blob: bytes | None) -> SavedSlots | None:
    """Parse what `BlockIndex.close` wrote; None if missing or damaged."""
    if blob is None or len(blob) < _HEAD.size + _CHECK_BYTES or len(blob) % 8:
        return None
    body, check = blob[:-_CHECK_BYTES], blob[-_CHECK_BYTES:]
    if xxhash.xxh3_64_digest(body) != check:
        return None
    epoch, used = _HEAD.unpack_from(body)
    runs = np.frombuffer(body, dtype="<i4", offset=_HEAD.size)
    return SavedSlots(epoch, used, runs.reshape(-1, 2))


def runs_within(
    free: Sequence[Sequence[int]], segments: Sequence[int], per_segment: int
) -> list[tuple[int, int]]:
    """Return the parts of runs (first slot, slots) in these ascending segments, cut at their
    borders.

    The number of parts is bounded by the number that runs without overlap produce. Any further
    parts come from damaged data, and are dropped.
    """
    found: list[tuple[int, int]] = []
    for start, length in free:
        end = start + length
        first = bisect_left(segments, start // per_segment)
        for number in segments[first : bisect_right(segments, (end - 1) // per_segment)]:
            if len(found) > len(free) + len(segments):
                return found
            cut, stop = max(start, number * per_segment), min(end, (number + 1) * per_segment)
            found.append((cut, stop - cut))
    return found


def write_mark(path: Path, transaction: int) -> None:
    """Mark the index in `path` as whole, after it was synced. Raises a `KVCascadeError`."""
    body = _MARK.pack(_MARK_MAGIC, transaction)
    with os_errors(f"writing {path / NAME}"):
        RealFileSystem().replace(path / NAME, body + xxhash.xxh3_64_digest(body))


def read_mark(path: Path) -> int | None:
    """Return the transaction that is known to be whole; None without a valid mark."""
    try:
        data = RealFileSystem().read(path / NAME, _MARK.size + _CHECK_BYTES)
    except OSError:
        return None
    body, check = data[: _MARK.size], data[_MARK.size :]
    if len(body) < _MARK.size or xxhash.xxh3_64_digest(body) != check:
        return None
    magic, transaction = _MARK.unpack(body)
    return int(transaction) if magic == _MARK_MAGIC else None
