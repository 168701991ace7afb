"""Verifying the payloads of many slots, near the speed of the disk.

Several threads, each with one page-aligned buffer, read runs of adjacent slots with direct I/O and
hash them. Unlike the engine's threads they release the interpreter lock while they hash. The
caller's thread submits work, throttles and takes results. The number of runs in flight is bounded.
"""

from __future__ import annotations

import errno
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from ..disk.transfers import Throttle, scanned
from ..path.block_reader import payload_checksum
from .reader import SegmentReader

SCAN_THREADS = 4
READ_BYTES = 8 << 20
"""Bytes per read and thread; at least one block."""
MAX_BUFFERS_PER_READ = 1024


class Verdict(Enum):
    """Result of verifying one slot."""

    OK = "ok"
    CORRUPT = "corrupt"
    UNREADABLE = "unreadable"
    NO_SEGMENT = "no_segment"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A slot and the block that it should hold."""

    slot: int
    key: bytes
    checksum: int
    length: int
    """Payload bytes; anything but the block size counts as corrupt."""


@dataclass(frozen=True, slots=True)
class Scanned:
    """A slot and the result of verifying it."""

    wanted: Wanted
    verdict: Verdict


def scan(
    segments: SegmentReader,
    wanted: Sequence[Wanted],
    throttle: Throttle | None = None,
    on_valid: Callable[[Wanted, memoryview], None] | None = None,
    threads: int = SCAN_THREADS,
) -> Iterator[list[Scanned]]:
    """Read and verify slots in ascending order; each item is one batch.

    `wanted` may be in any order. `on_valid` receives every valid payload on one of the threads. It
    must not keep the payload after it returns.
    """
    pieces = _pieces(segments, sorted(wanted, key=lambda each: each.slot))
    local = threading.local()

    def work(piece: Sequence[Wanted]) -> list[Scanned]:
        if not hasattr(local, "buffer"):
            local.buffer = mmap.mmap(-1, max(READ_BYTES, segments.layout.block_bytes))
        return _scan_piece(segments, piece, memoryview(local.buffer), on_valid)

    yield from scanned(work, pieces, segments.layout.block_bytes, throttle, threads)


def _pieces(segments: SegmentReader, wanted: Sequence[Wanted]) -> Iterator[Sequence[Wanted]]:
    """Yield runs of adjacent slots in one segment that fit a buffer."""
    layout = segments.layout
    most = max(1, min(MAX_BUFFERS_PER_READ, READ_BYTES // layout.block_bytes))
    for begin, end in layout.runs([each.slot for each in wanted], most):
        yield wanted[begin:end]


def _scan_piece(
    segments: SegmentReader,
    piece: Sequence[Wanted],
    buffer: memoryview,
    on_valid: Callable[[Wanted, memoryview], None] | None,
) -> list[Scanned]:
    size = segments.layout.block_bytes
    views = [buffer[i * size : (i + 1) * size] for i in range(len(piece))]
    try:
        segments.read_run(piece[0].slot, views)
    except FileNotFoundError:
        return [Scanned(each, Verdict.NO_SEGMENT) for each in piece]
    except OSError as error:
        if len(piece) > 1 and error.errno != errno.EBADF:  # find out which slot it is
            return [
                scanned
                for each in piece
                for scanned in _scan_piece(segments, [each], buffer, on_valid)
            ]
        return [Scanned(each, Verdict.UNREADABLE) for each in piece]
    found: list[Scanned] = []
    for each, view in zip(piece, views, strict=True):
        is_right = each.length == size and each.checksum == payload_checksum(each.key, view)
        if is_right and on_valid is not None:
            on_valid(each, view)
        found.append(Scanned(each, Verdict.OK if is_right else Verdict.CORRUPT))
    return found
