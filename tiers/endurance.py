"""Bytes written and read back over the last day, in buckets of a quarter of an hour.

The record lies in the index and changes in the transaction of each commit. All processes of a
namespace share it. It survives restarts and `kill -9` exactly as the blocks themselves do.

Times are wall-clock times, because the window outlives processes. If the clock goes back, the
totals of the day move to the current bucket. Writes are then never forgotten early, but all of them
expire together, a day later. If the clock jumps ahead, the buckets of the skipped time are cleared.
A time before `SET_FROM_S` is that of a clock that is not set yet. Nothing expires by it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

DAY_S = 86_400
BUCKET_S = 900
BUCKETS = DAY_S // BUCKET_S + 1
"""Number of buckets: the current one, and those of the 24 hours before it."""
SET_FROM_S = 1_577_836_800
"""Start of 2020 in seconds. A machine without a clock of its own begins in 1970, until it has asked
the network."""

_NEWEST = struct.Struct("<Q")
RECORD_BYTES = _NEWEST.size + BUCKETS * 16

_Table = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class DayTotals:
    """Totals of the last day, in bytes."""

    written: int = 0
    read: int = 0
    is_whole_day: bool = False
    """True if the oldest bucket has writes, so the totals cover a whole day."""


def add(record: bytes, now_s: float, written: int, read: int) -> bytes:
    """Return the record with `written` and `read` bytes added. A damaged record starts empty."""
    newest, table = _at(record, now_s)
    table[newest % BUCKETS] += np.array([written, read], dtype=np.uint64)
    return _NEWEST.pack(newest) + table.tobytes()


def day_totals(record: bytes, now_s: float) -> DayTotals:
    """Return the sums of the sliding day that ends now."""
    newest, table = _at(record, now_s)
    written, read = table.sum(axis=0).tolist()
    is_whole = bool(table[(newest + 1) % BUCKETS, 0])
    return DayTotals(written, read, is_whole)


def merged(first: bytes, second: bytes, now_s: float) -> bytes:
    """Return one record with the bytes of both."""
    newest = max(_at(record, now_s)[0] for record in (first, second))
    tables = [_at(record, newest * BUCKET_S)[1] for record in (first, second)]
    return _NEWEST.pack(newest) + (tables[0] + tables[1]).tobytes()


def _at(record: bytes, now_s: float) -> tuple[int, _Table]:
    """Return the number of the current bucket, and the table with expired buckets cleared."""
    now = max(0, int(now_s // BUCKET_S))
    if len(record) != RECORD_BYTES:
        return now, np.zeros((BUCKETS, 2), dtype=np.uint64)
    (newest,) = _NEWEST.unpack_from(record)
    table: _Table = np.frombuffer(record, dtype="<u8", offset=_NEWEST.size).reshape(-1, 2).copy()
    is_set, was_set = (bucket * BUCKET_S >= SET_FROM_S for bucket in (now, newest))
    if newest == now + 1 or (was_set and not is_set):  # tolerates a clock set back by seconds
        return newest, table
    if newest > now or (is_set and not was_set):
        day = table.sum(axis=0)
        table[:] = 0
        table[now % BUCKETS] = day
        return now, table
    for bucket in range(newest + 1, min(now, newest + BUCKETS) + 1):
        table[bucket % BUCKETS] = 0
    return now, table
