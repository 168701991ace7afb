"""A contender without vLLM: it copies every page by one descriptor of a batched copy, as vLLM does.

vLLM's worker gives all pages of a transfer to the driver in one call, between the device and a
pinned region in shared memory. Here the same call (`cuMemcpyBatchAsync`, CUDA 12.8 or later) is
made through ctypes, over an arena of its own.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...handlers.base import TransferResult
from ...handlers.device import DeviceCopier, GpuBlocks
from ...handlers.hazards import Direction
from ...handlers.host_register import HostRegistration
from ...tiers.base import SlotArray
from ...tiers.cpu import Arena, ArenaGeometry, ArenaRole
from .results import BenchError

if TYPE_CHECKING:
    import torch

Addresses = npt.NDArray[np.uint64]

DRIVER = "libcuda.so.1"
CUDA_VERSION = 12080
"""The version of the call that is asked for: later ones have other arguments."""
SOURCE_ORDER = {Direction.STORE: 1, Direction.LOAD: 3}
"""`CUmemcpySrcAccessOrder`: STREAM while device memory may be written; ANY for pinned memory."""
MS_PER_S = 1000.0

Batch = Callable[[Addresses, Addresses, Addresses, Direction, Any], None]
"""`batch(targets, sources, sizes, direction, stream)` copies all of them. Raises `BenchError`."""

_arenas = count()


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("source_order", ctypes.c_uint),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


def driver_batch(library: str = DRIVER) -> Batch:
    """The driver's call. Raises `BenchError` if there is no driver or it is too old."""
    try:
        ask = ctypes.CDLL(library).cuGetProcAddress_v2
    except (OSError, AttributeError) as error:
        raise BenchError(f"the NVIDIA driver has no cuGetProcAddress_v2 ({error})") from None
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
        raise BenchError(
            f"the NVIDIA driver has no cuMemcpyBatchAsync (error {code}, status {status.value}); "
            "it came with CUDA 12.8"
        )
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    kinds = (pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
    return _Caller(ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(found.value))


class _Caller:
    """Makes the call."""

    def __init__(self, call: Callable[..., int]) -> None:
        self._call = call
        self._attributes = {
            way: _Attributes(source_order=order) for way, order in SOURCE_ORDER.items()
        }

    def __call__(
        self, targets: Addresses, sources: Addresses, sizes: Addresses, way: Direction, stream: Any
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
            stream.cuda_stream,
        )
        if code:
            raise BenchError(f"cuMemcpyBatchAsync failed: error {code} at copy {failed.value}")


@dataclass(frozen=True, slots=True)
class _Job:
    job_id: int
    size_bytes: int
    start: Any
    end: Any


class PageCopier(DeviceCopier):
    """Copies between tensors of shape `(blocks, page_bytes)` and an arena of its own.

    One stream per direction; a transfer is one call, whatever its size. One thread.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        slots: int,
        batch: Batch,
        registration: HostRegistration,
    ) -> None:
        """`slots` rows of CPU memory are pinned by `registration`."""
        import torch

        cuda: Any = torch.cuda
        self._cuda, self._batch, self._registration = cuda, batch, registration
        self._device = tensors[0].device
        pages = [tensor.shape[1] for tensor in tensors]
        geometry = ArenaGeometry(slots, sum(pages), 1)
        role = ArenaRole.scheduler(expect_workers=False)
        self._arena = Arena.open(geometry, f"bench-pages-{os.getpid()}-{next(_arenas)}", role)
        rows = self._arena.slots
        registration.pin(int(rows.ctypes.data), slots, geometry.slot_bytes)
        offsets = np.cumsum([0, *pages[:-1]])
        self._pages = np.array(pages, dtype=np.uint64)
        self._bases = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64)
        self._strides = np.array([tensor.stride(0) for tensor in tensors], dtype=np.uint64)
        self._places = (offsets + rows.ctypes.data).astype(np.uint64)
        self._slot_bytes = np.uint64(geometry.slot_bytes)
        self._streams = {way: cuda.Stream(self._device) for way in Direction}
        self._jobs: dict[Direction, deque[_Job]] = {way: deque() for way in Direction}
        self._events: list[Any] = []
        """Events of transfers that ended, to be used again."""

    def submit_store(self, job_id: int, blocks: GpuBlocks, slots: SlotArray) -> bool:
        return self._submit(Direction.STORE, job_id, blocks, slots)

    def submit_load(self, job_id: int, blocks: GpuBlocks, slots: SlotArray) -> bool:
        return self._submit(Direction.LOAD, job_id, blocks, slots)

    def get_finished(self) -> list[TransferResult]:
        found: list[TransferResult] = []
        for jobs in self._jobs.values():
            while jobs and jobs[0].end.query():
                job = jobs.popleft()
                time_s = job.start.elapsed_time(job.end) / MS_PER_S
                found.append(TransferResult(job.job_id, True, job.size_bytes, time_s))
                self._events += (job.start, job.end)
        return found

    def wait(self, job_ids: Set[int]) -> None:
        for jobs in self._jobs.values():
            for job in jobs:
                if job.job_id in job_ids:
                    job.end.synchronize()

    def shutdown(self, deadline_s: float = 5.0) -> None:
        for jobs in self._jobs.values():
            if jobs:
                jobs[-1].end.synchronize()
            jobs.clear()
        self._registration.release()
        self._arena.close()

    def _event(self) -> Any:
        return self._events.pop() if self._events else self._cuda.Event(enable_timing=True)

    def _submit(self, way: Direction, job_id: int, blocks: GpuBlocks, slots: SlotArray) -> bool:
        ids, rows = blocks.block_ids.astype(np.uint64), slots.astype(np.uint64)
        device = (self._bases[:, None] + ids * self._strides[:, None]).ravel()
        memory = (self._places[:, None] + rows * self._slot_bytes).ravel()
        sizes = np.repeat(self._pages, len(ids))
        sources, targets = (device, memory) if way is Direction.STORE else (memory, device)
        stream = self._streams[way]
        start, end = self._event(), self._event()
        stream.wait_stream(self._cuda.current_stream(self._device))
        start.record(stream)
        self._batch(targets, sources, sizes, way, stream)
        end.record(stream)
        self._jobs[way].append(_Job(job_id, int(sizes.sum()), start, end))
        return True
