"""Make many copies between device and pinned memory in one driver call, `cuMemcpyBatchAsync`.

vLLM resolves the call in the same way (its `simple_kv_offload/cuda_mem_ops.py`). The call refuses
the default stream. The driver has read the lists when the call returns.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from ...logs import get_logger

logger = get_logger(__name__)

Addresses = npt.NDArray[np.uint64]


class SourceOrder(IntEnum):
    """Time at which the driver may read the sources of a batch: `CUmemcpySrcAccessOrder`."""

    STREAM = 1
    """Sources are read after everything that the stream was given before the batch."""
    ANY = 3
    """Sources may be read at any time from the call on. No earlier work may write to them."""


Batch = Callable[[Addresses, Addresses, Addresses, SourceOrder], None]
"""`batch(targets, sources, sizes, order)` enqueues all copies on the current stream, which must not
be the default one. It raises `RuntimeError` if the driver refuses; some copies may be enqueued
then."""

DRIVER = "libcuda.so.1"
CUDA_VERSION = 12080
"""Requested version of the call. Later versions have other arguments."""


class NoBatchedCopyError(Exception):
    """There is no driver, or it is too old. The message says which."""


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
        """`current_stream` returns the handle of the current stream."""
        self._call = call
        self._current_stream = current_stream
        self._attributes = {order: _Attributes(source_order=order) for order in SourceOrder}

    def __call__(
        self, targets: Addresses, sources: Addresses, sizes: Addresses, order: SourceOrder
    ) -> None:
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(-1)  # no copy
        code = self._call(
            targets.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            len(sizes),
            ctypes.addressof(self._attributes[order]),
            ctypes.addressof(first),
            1,
            ctypes.addressof(failed),
            self._current_stream(),
        )
        if code:
            at = f" at copy {failed.value}" if failed.value < len(sizes) else ""
            raise RuntimeError(f"cuMemcpyBatchAsync failed: error {code}{at}")


def driver_batch(library: str = DRIVER) -> Batch:
    """Find the driver's call, for the current device. Raises `NoBatchedCopyError`."""
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
    """Find the driver's call, or return None and log the reason."""
    try:
        return driver_batch()
    except NoBatchedCopyError as error:
        logger.info("kvcascade: GPU copies are made one by one, which is slower: %s", error)
        return None


def _current_stream() -> int:
    import torch

    cuda: Any = torch.cuda
    return int(cuda.current_stream().cuda_stream)
