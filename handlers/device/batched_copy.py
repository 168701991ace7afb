"""Many copies between device and pinned memory in one call of the driver: `cuMemcpyBatchAsync`.

vLLM resolves the call in the same way (its `simple_kv_offload/cuda_mem_ops.py`). It takes no
default stream. The driver has read the lists when the call returns.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ...logs import get_logger
from .hazards import Direction

logger = get_logger(__name__)

Addresses = npt.NDArray[np.uint64]

Batch = Callable[[Addresses, Addresses, Addresses, Direction], None]
"""`batch(targets, sources, sizes, direction)` copies all of them on the current stream, which must
not be the default one. Raises `RuntimeError`: some copies may have been made then, or none."""

DRIVER = "libcuda.so.1"
CUDA_VERSION = 12080
"""The version of the call that is asked for: later ones have other arguments."""
SOURCE_ORDER = {Direction.STORE: 1, Direction.LOAD: 3}
"""`CUmemcpySrcAccessOrder`: STREAM while device memory may be written; ANY for pinned memory."""


class NoBatchedCopyError(Exception):
    """There is no driver, or it is too old. The text says which."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("source_order", ctypes.c_uint),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


class DriverBatch:
    """The driver's call as a `Batch`."""

    def __init__(self, call: Callable[..., int], current_stream: Callable[[], int]) -> None:
        """`current_stream` gives the handle of the stream."""
        self._call = call
        self._current_stream = current_stream
        self._attributes = {
            way: _Attributes(source_order=order) for way, order in SOURCE_ORDER.items()
        }

    def __call__(
        self, targets: Addresses, sources: Addresses, sizes: Addresses, way: Direction
    ) -> None:
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        code = self._call(
            targets.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            len(sizes),
            ctypes.addressof(self._attributes[way]),
            ctypes.addressof(first),
            1,
            ctypes.addressof(failed),
            self._current_stream(),
        )
        if code:
            raise RuntimeError(f"cuMemcpyBatchAsync failed: error {code} at copy {failed.value}")


def driver_batch(library: str = DRIVER) -> Batch:
    """The driver's call, for the current device. Raises `NoBatchedCopyError`."""
    try:
        ask = ctypes.CDLL(library).cuGetProcAddress_v2
    except (OSError, AttributeError) as error:
        raise NoBatchedCopyError(f"there is no cuGetProcAddress_v2 ({error})") from None
    found, status = ctypes.c_void_p(), ctypes.c_int()
    ask.argtypes = (
        ctypes.c_char_p,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint64,
        ctypes.c_void_p,
    )
    code = ask(b"cuMemcpyBatchAsync", ctypes.byref(found), CUDA_VERSION, 0, ctypes.byref(status))
    if code or not found.value:
        raise NoBatchedCopyError(
            f"the driver has no cuMemcpyBatchAsync (error {code}, status {status.value}); "
            "it came with CUDA 12.8"
        )
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    kinds = (pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
    call = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(found.value)
    return DriverBatch(call, _current_stream)


def find_driver_batch() -> Batch | None:
    """The driver's call, or None and a line in the log that says why."""
    try:
        return driver_batch()
    except NoBatchedCopyError as error:
        logger.info("kvcascade: GPU copies are made one by one, which is slower: %s", error)
        return None


def _current_stream() -> int:
    import torch

    cuda: Any = torch.cuda
    return int(cuda.current_stream().cuda_stream)
