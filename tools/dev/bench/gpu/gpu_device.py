"""Interface of the GPU benchmark to a CUDA device; tests have a twin without one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from ctypes import CDLL, byref, c_void_p
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .....config.machine import Machine
from .....handlers.device.batched_copy import DRIVER, Batch, NoBatchedCopyError, driver_batch
from .....handlers.device.copier import DeviceCopier, Direction
from .....handlers.device.geometry import WorkerLayout
from .....tiers.cpu.arena import DEFAULT_ARENA_DIR
from ....commands.bench.bench_results import PAGES, VLLM, BenchError
from .gpu_moves import Kernels, MoveChain

if TYPE_CHECKING:
    import torch

DEVICE = "cuda"
"""The current CUDA device."""
MATRICES = {Kernels.PREFILL: (4096, 4096), Kernels.DECODE: (64, 8192)}
"""Rows of the product, and rows of the square matrix of weights. A prefill-size product keeps a
large GPU's arithmetic units busy for 0.1 ms or more. A decode-size product keeps its memory busy
for 0.04 ms."""
CHAIN_S = 0.1
"""Target duration of a chain of kernels, long enough for many transfers."""
CHAIN_KERNELS_MIN, CHAIN_KERNELS_MAX = 20, 800
"""Limits of the kernels in a chain; a stream accepts about a thousand before a launch blocks."""
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no order with the default stream, as in torch's streams


@dataclass(frozen=True, slots=True)
class DeviceRoom:
    """Bytes of memory in each place."""

    device: int
    """Bytes of the GPU's memory."""
    shared: int
    """Bytes in the folder of arenas."""
    memory: int
    """Bytes of the machine's memory, including shared memory."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A copier over CPU memory of its own."""

    copier: DeviceCopier
    is_pinned: bool
    is_batched: Callable[[], bool] | None = None
    """Function that returns True if the driver's batched call makes the copies; None if the copier
    always uses it."""


Make = Callable[[Sequence["torch.Tensor"], int], Contender]
"""Function `make(tensors, slots)` that returns a contender with CPU memory for `slots` blocks."""


class Device(ABC):
    """A device that holds a KV cache."""

    @abstractmethod
    def room(self) -> DeviceRoom:
        """Return the free memory."""

    @abstractmethod
    def pages(self, blocks: int, page_bytes: int) -> torch.Tensor:
        """Return part of a KV cache in one allocation: random int8 of shape `(blocks,
        page_bytes)`."""

    @abstractmethod
    def ours(
        self, tensors: Sequence[torch.Tensor], layout: WorkerLayout, slots: npt.NDArray[np.uint8]
    ) -> Contender:
        """Return kvcascade's copier between the tensors and the slots of an arena."""

    @abstractmethod
    def others(self) -> Mapping[str, Make]:
        """Return the other contenders, as functions by name that make one over the same tensors."""

    def notes(self) -> Sequence[str]:
        """Return sentences that say which measurements are missing here, and why."""
        return ()

    @abstractmethod
    def plain_copies(self, size: int) -> Mapping[Direction, Callable[[], None]]:
        """Return functions that copy `size` bytes between the device and pinned memory, and wait
        for the end."""

    @abstractmethod
    def start_chain(self, kernels: Kernels) -> MoveChain:
        """Launch many kernels on the compute stream, each of which depends on the one before."""

    @abstractmethod
    def release(self) -> None:
        """Release cached memory that is no longer in use."""


class CudaChain:
    """A chain of matrix products on a stream."""

    def __init__(
        self, stream: Any, product: torch.Tensor, weights: torch.Tensor, kernels: int
    ) -> None:
        cuda = _cuda()
        self._start, self._end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        with cuda.stream(stream):
            self._start.record()
            for _ in range(kernels):
                product = product @ weights
            self._end.record()

    def has_ended(self) -> bool:
        """See `MoveChain`."""
        return bool(self._end.query())

    def seconds(self) -> float:
        """See `MoveChain`."""
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3


class CudaDevice(Device):
    """The current CUDA device. Raises `BenchError` if there is none.

    Kernels run on a separate stream. A transfer waits for earlier work of the caller's stream, so
    on that stream it would begin after the kernels instead of beside them.
    """

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise BenchError(
                "no CUDA device answers; run `make bench-gpu` on a machine with an NVIDIA GPU and "
                "a torch that was built for CUDA, or `--only round_trip` here, without one"
            )
        self._factors = {
            kind: (weights[:rows], weights)
            for kind, (rows, size) in MATRICES.items()
            for weights in [torch.eye(size, device=DEVICE, dtype=torch.float16)]
        }
        _cuda().synchronize()
        self._compute = _own_stream()  # needs the driver, as does the next line
        self._others, self._notes = _others()
        self._counts = dict.fromkeys(Kernels, CHAIN_KERNELS_MIN)
        self._counts = {kind: self._count(kind) for kind in Kernels}

    def room(self) -> DeviceRoom:
        free, _ = _cuda().mem_get_info()
        machine = Machine()
        shared = machine.disk(Path(DEFAULT_ARENA_DIR)).free
        return DeviceRoom(int(free), shared, machine.memory().available)

    def pages(self, blocks: int, page_bytes: int) -> torch.Tensor:
        import torch

        return torch.randint(-128, 128, (blocks, page_bytes), dtype=torch.int8, device=DEVICE)

    def ours(
        self, tensors: Sequence[torch.Tensor], layout: WorkerLayout, slots: npt.NDArray[np.uint8]
    ) -> Contender:
        from .....handlers.device.device_cuda import CudaDeviceCopier
        from .....handlers.device.host_register import cuda_registration

        registration = cuda_registration(tensors[0].device)
        copier = CudaDeviceCopier(tensors, layout, slots, registration=registration)
        return Contender(copier, registration.is_pinned, lambda: copier.is_batched)

    def others(self) -> Mapping[str, Make]:
        return self._others

    def notes(self) -> Sequence[str]:
        return self._notes

    def plain_copies(self, size: int) -> Mapping[Direction, Callable[[], None]]:
        import torch

        device = torch.zeros(size, dtype=torch.int8, device=DEVICE)
        host = torch.zeros(size, dtype=torch.int8, pin_memory=True)

        def copy(target: torch.Tensor, source: torch.Tensor) -> None:
            target.copy_(source, non_blocking=True)
            _cuda().synchronize()

        return {
            Direction.STORE: lambda: copy(host, device),
            Direction.LOAD: lambda: copy(device, host),
        }

    def start_chain(self, kernels: Kernels) -> MoveChain:
        return CudaChain(self._compute, *self._factors[kernels], self._counts[kernels])

    def _count(self, kernels: Kernels) -> int:
        """Return the number of kernels that take long enough."""
        self.start_chain(kernels).seconds()  # takes the one-time costs
        kernel_s = self.start_chain(kernels).seconds() / CHAIN_KERNELS_MIN
        return max(CHAIN_KERNELS_MIN, min(CHAIN_KERNELS_MAX, math.ceil(CHAIN_S / kernel_s)))

    def release(self) -> None:
        _cuda().empty_cache()


def _own_stream() -> Any:
    """Return a stream of the current device that nobody else gets, where CUDA's driver makes one.

    Raises `BenchError` if the driver refuses.

    torch hands out 32 streams in turn. vLLM's worker takes one for each transfer in flight, so one
    of these would wait for the kernels. The stream stays until the process ends, because torch
    keeps memory for it.
    """
    handle = c_void_p()
    try:
        code = CDLL(DRIVER).cuStreamCreate(byref(handle), _NON_BLOCKING)
    except OSError:  # not of NVIDIA
        return _cuda().Stream()
    if code:
        raise BenchError(f"the driver made no stream for kernels: cuStreamCreate, error {code}")
    return _cuda().ExternalStream(handle.value)


def _others() -> tuple[dict[str, Make], list[str]]:
    """Return the other contenders (vLLM's worker, and its copies without it), and notes about
    those that are missing."""
    found: dict[str, Make] = {}
    notes: list[str] = []
    if find_spec("vllm"):
        found[VLLM] = _vllm
    else:
        notes.append(
            "vLLM is not installed: a batched copy of single pages, as its worker makes it, stands "
            "in; pip install vllm to measure its worker"
        )
    try:
        found[PAGES] = partial(_pages, driver_batch())
    except NoBatchedCopyError as error:
        notes.append(f"batched copies of single pages are not measured: {error}")
    return found, notes


def _vllm(tensors: Sequence[torch.Tensor], slots: int) -> Contender:
    from .vllm_device import VllmCopier

    copier = VllmCopier(tensors, slots)
    return Contender(copier, copier.is_pinned)


def _pages(batch: Batch, tensors: Sequence[torch.Tensor], slots: int) -> Contender:
    from .....handlers.device.host_register import cuda_registration
    from .page_copies import PageCopier

    registration = cuda_registration(tensors[0].device)
    return Contender(PageCopier(tensors, slots, batch, registration), registration.is_pinned)


def _cuda() -> Any:
    import torch

    return torch.cuda
