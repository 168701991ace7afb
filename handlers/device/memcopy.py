"""Copy many scattered pieces within this process's memory, in few system calls.

`process_vm_writev` on our own process takes up to 1024 pieces per side and call, anywhere in
memory. It runs without the interpreter lock, which a busy interpreter gives back only after up to
5 ms. Some sandboxes forbid the call (seccomp). Then numpy copies piece by piece.

The kernel looks up every page of both sides. So a few long pieces, such as a prefix in adjacent
slots, are copied by numpy, too.

Addresses are trusted: the caller has checked them and keeps the memory alive.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

import numpy as np
import numpy.typing as npt

from ...logs import get_logger
from .geometry import IntArray

logger = get_logger(__name__)

FEW_PIECES = 4
"""Limit of the pieces that numpy copies, each of which waits for the interpreter lock once."""
LONG_BYTES = 1 << 20
PIECES_PER_CALL = 1024
"""Limit of the pieces in a call: IOV_MAX of Linux."""
PIECE_BYTES_MAX = 1 << 20
"""Longest piece. Longer ones are split, so that a call stays far below the kernel's 2 GiB."""

_libc = ctypes.CDLL(None, use_errno=True)
_writev = _libc.process_vm_writev
_writev.argtypes = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)
_writev.restype = ctypes.c_ssize_t


def copy_scattered(target: IntArray, source: IntArray, size: IntArray) -> None:
    """Copy `size[i]` bytes from address `source[i]` to `target[i]`, for all i."""
    if len(size) <= FEW_PIECES and size.min(initial=LONG_BYTES) >= LONG_BYTES:
        _copy_each(target, source, size)
        return
    target, source, size = cut_long(target, source, size)
    to, come = _vectors(target, size), _vectors(source, size)
    pid = os.getpid()
    for start in range(0, len(size), PIECES_PER_CALL):
        end = min(start + PIECES_PER_CALL, len(size))
        count = end - start
        asked = int(size[start:end].sum())
        done = _writev(pid, come[start:].ctypes.data, count, to[start:].ctypes.data, count, 0)
        if done != asked:
            _note_refusal()
            _copy_each(target[start:end], source[start:end], size[start:end])


def _copy_each(target: IntArray, source: IntArray, size: IntArray) -> None:
    for to, come, length in zip(target.tolist(), source.tolist(), size.tolist(), strict=True):
        np.copyto(_memory(to, length), _memory(come, length))


@cache
def _note_refusal() -> None:
    """Say once that the system refuses the call."""
    logger.info("process_vm_writev is not allowed here; copying with numpy instead")


def _memory(address: int, length: int) -> npt.NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))


def cut_long(
    target: IntArray, source: IntArray, size: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Split the pieces that are longer than `PIECE_BYTES_MAX`."""
    if len(size) == 0 or int(size.max()) <= PIECE_BYTES_MAX:
        return target, source, size
    parts = -(-size // PIECE_BYTES_MAX)
    owner = np.repeat(np.arange(len(size)), parts)
    first = np.repeat(parts.cumsum() - parts, parts)
    offset = (np.arange(len(owner)) - first) * PIECE_BYTES_MAX
    left = np.minimum(size[owner] - offset, PIECE_BYTES_MAX)
    return target[owner] + offset, source[owner] + offset, left


def _vectors(address: IntArray, size: IntArray) -> npt.NDArray[np.int64]:
    """Return an array of `struct iovec`."""
    vectors = np.empty((len(size), 2), dtype=np.int64)
    vectors[:, 0] = address
    vectors[:, 1] = size
    return vectors
