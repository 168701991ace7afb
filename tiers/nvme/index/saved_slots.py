"""The slots that a process saves in the index when it closes cleanly."""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

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
