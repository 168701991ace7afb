"""Transfers to the device: complete ones, and a limit on how many are in flight.

A device may move fewer bytes than asked; `write_all` and `read_all` continue until it has moved
all.

`TransferLimit` lets hashing and copying overlap with I/O. A disk interleaves the transfers in
flight, so they end at about the same time. Without a limit every thread transfers at once, then
every thread hashes and copies at once. The disk is idle during that second phase. If fewer threads
may transfer than exist, another thread is ready whenever a transfer ends.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .filesystem import File

MAX_BUFFERS_PER_CALL = 1024
"""`IOV_MAX` of Linux."""
MAX_BYTES_PER_CALL = 64 << 20
"""Payload bytes per system call."""
MAX_SHORT_TRANSFERS = 1000
"""Short transfers per call after which the device is considered broken."""
HANDOVER_S = 50e-6
"""Pause after a transfer, in seconds, so that the next thread gets the interpreter lock and starts
its transfer. Without it, the thread that has just transferred keeps the lock while it hashes. The
pause is far shorter than a transfer, which takes milliseconds."""


class TransferLimit:
    """Context manager around a transfer. Entering waits until a place is free. Any thread."""

    def __init__(self, at_once: int) -> None:
        """`at_once` is the number of threads that may be inside."""
        self._free = threading.BoundedSemaphore(at_once)

    def __enter__(self) -> None:
        self._free.acquire()

    def __exit__(self, *error: object) -> None:
        self._free.release()
        time.sleep(HANDOVER_S)


def vectored(
    buffers: Sequence[memoryview], offset: int, block_bytes: int
) -> Iterator[tuple[Sequence[memoryview], int]]:
    """Yield the buffers of adjacent blocks for one system call each, with their file offset.

    Each buffer has `block_bytes`; the first one belongs at `offset`.
    """
    step = max(1, min(MAX_BUFFERS_PER_CALL, MAX_BYTES_PER_CALL // block_bytes))
    for start in range(0, len(buffers), step):
        yield buffers[start : start + step], offset + start * block_bytes


def write_all(file: File, buffers: Sequence[memoryview], offset: int) -> None:
    """Write the buffers from `offset` on. Raises `OSError`, also after too many short writes."""
    wanted = sum(len(buffer) for buffer in buffers)
    done = 0
    for _ in range(MAX_SHORT_TRANSFERS):
        done += file.pwritev(buffers if not done else _after(buffers, done), offset + done)
        if done >= wanted:
            return
    raise OSError(errno.EIO, "the device keeps writing less than asked")


class ShortFileError(OSError):
    """A file ends before the bytes that were asked for."""


def read_all(file: File, buffers: Sequence[memoryview], offset: int) -> None:
    """Fill the buffers from `offset` on. Raises `ShortFileError`, or another `OSError`."""
    wanted = sum(len(buffer) for buffer in buffers)
    done = 0
    for _ in range(MAX_SHORT_TRANSFERS):
        moved = file.preadv(buffers if not done else _after(buffers, done), offset + done)
        done += moved
        if done >= wanted:
            return
        if moved == 0:
            raise ShortFileError(errno.EIO, "the file ends before the block does")
    raise OSError(errno.EIO, "the device keeps reading less than asked")


Transfer = Callable[[File, Sequence[memoryview], int], None]
"""Function that moves whole buffers from or to a file, from an offset on."""


@dataclass(frozen=True, slots=True)
class Transfers:
    """Functions that move payload."""

    read: Transfer
    write: Transfer


DIRECT = Transfers(read_all, write_all)


def _after(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return the part of the buffers after their first `done` bytes."""
    left: list[memoryview] = []
    for buffer in buffers:
        if done >= len(buffer):
            done -= len(buffer)
            continue
        left.append(buffer[done:])
        done = 0
    return left
