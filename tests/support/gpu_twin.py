"""Twins of what the GPU benchmark drives: a link in virtual time, and a device that is ordinary
memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvcascade.handlers.device.copier import DeviceCopier, Direction, GpuBlocks, TransferResult
from kvcascade.handlers.device.device_cpu import CpuDeviceCopier
from kvcascade.handlers.device.geometry import WorkerLayout
from kvcascade.tiers.base import SlotArray
from kvcascade.tiers.cpu.header import ArenaGeometry
from kvcascade.tools.commands.bench.bench_results import VLLM
from kvcascade.tools.dev.bench.gpu import gpu_device, gpu_moves
from kvcascade.tools.dev.bench.gpu.gpu import GpuShape
from kvcascade.tools.dev.bench.gpu.gpu_device import Contender, Device, DeviceRoom, Make

from .clock import ManualClock
from .executors import InlineExecutor


class Link(DeviceCopier):
    """Jobs that take their time one after another, and calls that keep their caller."""

    def __init__(
        self,
        clock: ManualClock,
        job_s: float = 0.0,
        submit_s: Sequence[float] = (0.0,),
        hear_s: float = 0.0,
    ) -> None:
        """`submit_s`: of the first submission, the next one, ...; the last for all others."""
        self.is_failing = False
        self.free_at_s = clock.now_s
        """When the last job ends."""
        self.submitted: list[tuple[Direction, float]] = []
        self._clock = clock
        self._job_s, self._hear_s = job_s, hear_s
        self._submit_s = deque(submit_s)
        self._jobs: deque[tuple[int, float]] = deque()

    def get_finished(self) -> list[TransferResult]:
        self._clock.advance(self._hear_s)
        found: list[TransferResult] = []
        while self._jobs and self._jobs[0][1] <= self._clock():
            found.append(
                TransferResult(self._jobs.popleft()[0], not self.is_failing, 1, self._job_s)
            )
        return found

    def wait(self, job_ids: Set[int]) -> None:
        self._clock.advance(max(0.0, self.free_at_s - self._clock()))

    def shutdown(self, deadline_s: float = 5.0) -> None:
        pass

    def submit(
        self, direction: Direction, job_id: int, blocks: GpuBlocks, slots: SlotArray
    ) -> bool:
        self.submitted.append((direction, self._clock()))
        several = len(self._submit_s) > 1
        self._clock.advance(self._submit_s.popleft() if several else self._submit_s[0])
        self.free_at_s = max(self._clock(), self.free_at_s) + self._job_s
        self._jobs.append((job_id, self.free_at_s))
        return True


@dataclass(frozen=True)
class Kernels:
    """A chain of kernels in virtual time."""

    clock: ManualClock
    took_s: float
    end_s: float

    def has_ended(self) -> bool:
        return self.clock() >= self.end_s

    def seconds(self) -> float:
        self.clock.advance(max(0.0, self.end_s - self.clock()))
        return self.took_s


class AskedKernels:
    """A chain of kernels that ends when it was asked often enough."""

    def __init__(self, times: int) -> None:
        self._left = times

    def has_ended(self) -> bool:
        self._left -= 1
        return self._left < 0

    def seconds(self) -> float:
        return 1000.0


class MemoryDevice(Device):
    """The CPU's memory; both contenders copy it with our CPU copier."""

    def __init__(self, room: DeviceRoom) -> None:
        self.free = room
        self.said: tuple[str, ...] = ()
        """Its notes."""
        self.more: dict[str, Make] = {}
        """Contenders beside vLLM's."""
        self.released = 0

    def room(self) -> DeviceRoom:
        return self.free

    def pages(self, blocks: int, page_bytes: int) -> torch.Tensor:
        return torch.randint(-128, 128, (blocks, page_bytes), dtype=torch.int8)

    def ours(
        self, tensors: Sequence[torch.Tensor], layout: WorkerLayout, slots: npt.NDArray[np.uint8]
    ) -> Contender:
        pages = [tensor.numpy() for tensor in tensors]
        copier = CpuDeviceCopier(pages, layout, slots, InlineExecutor())
        return Contender(copier, is_pinned=True, is_batched=lambda: False)

    def notes(self) -> Sequence[str]:
        return self.said

    def others(self) -> Mapping[str, Make]:
        return {VLLM: self._vllm, **self.more}

    def _vllm(self, tensors: Sequence[torch.Tensor], slots: int) -> Contender:
        shape = GpuShape("", len(tensors), tensors[0].shape[1])
        geometry = ArenaGeometry(slots, shape.block_bytes, 1)
        memory = np.zeros((slots, geometry.slot_bytes), dtype=np.uint8)
        return Contender(
            self.ours(tensors, shape.layout(slots, geometry), memory).copier, is_pinned=False
        )

    def plain_copies(self, size: int) -> Mapping[Direction, Callable[[], None]]:
        device, host = np.zeros(size, np.int8), np.zeros(size, np.int8)
        return {
            Direction.STORE: lambda: np.copyto(host, device),
            Direction.LOAD: lambda: np.copyto(device, host),
        }

    def start_chain(self, kernels: gpu_moves.Kernels) -> AskedKernels:
        return AskedKernels(3)

    def release(self) -> None:
        self.released += 1


FREE_BYTES = 1 << 34
"""Of the twin of a GPU's memory."""
POOL_STREAMS = 32
"""Streams that torch hands out in turn."""
OWN_STREAM = 0x5EED0
"""A stream of the driver, which is none of torch's."""


class FakeCuda:
    """The part of torch.cuda that `CudaDevice` uses, over ordinary memory: kernels run at once, and
    take on the device's clock what they are told to."""

    def __init__(self, kernel_ms: float) -> None:
        self.now_ms = 0.0
        self.current = 0
        """The stream that was made the current one last."""
        self._kernel_ms = kernel_ms
        self._pool = cycle(range(POOL_STREAMS))

    def take_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stand in for torch.cuda."""
        zeros, product = torch.zeros, torch.Tensor.__matmul__

        def counted(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            self.now_ms += self._kernel_ms
            return product(one, other)

        driver = SimpleNamespace(cuStreamCreate=self._create_stream)
        monkeypatch.setattr(gpu_device, "CDLL", lambda library: driver)
        monkeypatch.setattr(gpu_device, "DEVICE", "cpu")
        monkeypatch.setattr(gpu_device, "MATRICES", dict.fromkeys(gpu_moves.Kernels, (2, 4)))
        monkeypatch.setattr(torch.Tensor, "__matmul__", counted)
        monkeypatch.setattr(torch, "zeros", lambda *sizes, dtype, **_: zeros(*sizes, dtype=dtype))
        for name, twin in (
            ("is_available", lambda: True),
            ("Stream", lambda: next(self._pool)),
            ("ExternalStream", lambda handle: handle),
            ("stream", self._on),
            ("Event", lambda enable_timing: FakeEvent(self)),
            ("synchronize", lambda: None),
            ("mem_get_info", lambda: (FREE_BYTES, 2 * FREE_BYTES)),
            ("empty_cache", lambda: None),
        ):
            monkeypatch.setattr(torch.cuda, name, twin)

    def _on(self, stream: int) -> AbstractContextManager[None]:
        self.current = stream
        return nullcontext()

    def _create_stream(self, handle: Any, flags: int) -> int:
        """The driver's call, which knows nothing of torch's streams."""
        assert flags == 1, "it would wait for the default stream, and that one for it"
        handle._obj.value = OWN_STREAM
        return 0


class FakeEvent:
    """A moment on the device's clock; it has come when somebody waited for it."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._at_ms = 0.0
        self._has_come = False

    def record(self) -> None:
        self._at_ms = self._cuda.now_ms

    def query(self) -> bool:
        return self._has_come

    def synchronize(self) -> None:
        self._has_come = True

    def elapsed_time(self, end: FakeEvent) -> float:
        return end._at_ms - self._at_ms
