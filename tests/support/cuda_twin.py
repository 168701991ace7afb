"""A twin of torch.cuda on CPU tensors: streams that do nothing until they are told to.

What is enqueued on a stream is done later and in order, so a buffer that is used again too early is
wrong bytes here as on a GPU. A stream whose queue is full refuses what a real one would wait for.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from support.tensor_operations import tensor_operations

from kvcascade.handlers.device.batched_copy import Addresses, SourceOrder
from kvcascade.handlers.device.host_register import HostRegistration
from kvcascade.handlers.device.stream_feed import Work

STORE, LOAD = 0, 1
"""Directions."""
LAST = {STORE: 1, LOAD: 2}
"""A copier's streams are, of stores and then of loads, one for kernels and one for copies; these
write to a job's destination."""
QUEUE_MAX = 1000
"""Operations that a stream's queue holds."""

_aten: Any = torch.ops.aten
_ENQUEUED = (
    _aten.copy_.default,
    _aten.add.out,
    _aten.index.Tensor_out,
    _aten.index_put_.default,
)
"""What a copier does with tensors, and the device would do in its own time."""


def operations(work: Work) -> int:
    """Do all of it; how many operations it was, on both streams."""
    return sum(step.kernels + step.copies for step in work)


class TwinStream:
    """A queue of operations."""

    def __init__(self, queue_max: int | None = QUEUE_MAX) -> None:
        self.log: list[object] = []
        """Everything that it was told, for tests that look at the order."""
        self.given = 0
        self.most_outstanding = 0
        self.waits = 0
        """How often a thread waited for what was not done yet."""
        self._queue_max = queue_max
        self._queue: deque[Callable[[], object]] = deque()

    @property
    def outstanding(self) -> int:
        """Operations that were not done yet."""
        return len(self._queue)

    def enqueue(self, what: object, operation: Callable[[], object]) -> None:
        """Take an operation. An `AssertionError` stands for a thread that is kept waiting."""
        if self._queue_max is not None and len(self._queue) >= self._queue_max:
            raise AssertionError("the queue is full: the thread would wait for the GPU here")
        self.log.append(what)
        self._queue.append(operation)
        self.given += 1
        self.most_outstanding = max(self.most_outstanding, len(self._queue))

    def run(self, operations: int | None = None) -> None:
        """Do some of what there is, or all, in order."""
        done = self.given - len(self._queue)
        self.run_to(self.given if operations is None else done + operations)

    def run_to(self, position: int) -> None:
        """Do everything up to the operation of this number. One that waits for another stream
        makes that one go on, which may make this one go on."""
        while self._queue and self.given - len(self._queue) < position:
            self._queue.popleft()()

    def wait_stream(self, other: TwinStream) -> None:
        position = other.given
        self.enqueue(other, lambda: other.run_to(position))

    def wait_event(self, event: TwinEvent) -> None:
        assert event.is_recorded, "waiting for an event that is not there waits for nothing"
        stream, position = event.recorded
        self.enqueue(("after", event), lambda: stream.run_to(position))

    def synchronize(self) -> None:
        self.run()


class TwinEvent:
    """An event that has ended once its stream came by, or a test finished it."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.is_lost = False
        self._is_timed = enable_timing
        self._stream: TwinStream | None = None
        self._position = 0

    @property
    def is_recorded(self) -> bool:
        return self._stream is not None

    @property
    def recorded(self) -> tuple[TwinStream, int]:
        """Where it was recorded last; who waits for it does not wait for a later time."""
        assert self._stream is not None
        return self._stream, self._position

    def record(self, stream: TwinStream | None = None) -> None:
        self._stream = stream or TwinCuda.now
        assert self._stream is not None, "nothing says on which stream"
        self._stream.enqueue(self, lambda: None)
        self._position = self._stream.given

    def wait(self) -> None:
        """The current stream goes on after it; one that was never recorded is not waited for."""
        if self.is_recorded:
            assert TwinCuda.now is not None, "nothing says which stream waits"
            TwinCuda.now.wait_event(self)

    def query(self) -> bool:
        if self.is_lost:
            raise RuntimeError("CUDA error: the device is lost")
        stream = self._stream
        return stream is None or stream.given - stream.outstanding >= self._position

    def finish(self) -> None:
        """Let its stream do everything up to it."""
        if self._stream is not None:
            self._stream.run_to(self._position)

    def synchronize(self) -> None:
        if self._stream is not None and not self.query():
            self._stream.waits += 1
        self.finish()

    def elapsed_time(self, end: TwinEvent) -> float:
        assert self._is_timed and end._is_timed, "the elapsed time is asked for"
        if not (self.is_recorded and end.is_recorded):  # as torch 2.13
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if end.is_lost:
            raise RuntimeError("CUDA error: the device is lost")
        return 250.0


class NoEvent:
    """An event of a device whose copies have ended when they return."""

    def record(self) -> None:
        """No operation is pending."""

    def wait(self) -> None:
        """No operation is pending."""

    def synchronize(self) -> None:
        """No operation is pending."""


class TwinCuda:
    """The part of torch.cuda that is used."""

    now: TwinStream | None = None
    """The stream on which copiers enqueue."""

    def __init__(self, queue_max: int | None = QUEUE_MAX) -> None:
        self.compute = TwinStream(None)
        self.streams: list[TwinStream] = []
        self.queue_max = queue_max

    def make_stream(self, device: torch.device, priority: int = 0) -> TwinStream:
        self.streams.append(TwinStream(self.queue_max))
        return self.streams[-1]

    @contextmanager
    def on(self, stream: TwinStream) -> Iterator[None]:
        before, TwinCuda.now = TwinCuda.now, stream
        try:
            yield
        finally:
            TwinCuda.now = before

    def device(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()

    def last(self, direction: int) -> TwinStream:
        """The stream on which a direction's jobs end."""
        return self.streams[LAST[direction]]

    def ends(self, direction: int) -> list[TwinEvent]:
        """End events of a direction's jobs, in order."""
        log = self.last(direction).log
        timed = [each for each in log if isinstance(each, TwinEvent) and each._is_timed]
        return timed[1::2]


def batch(targets: Addresses, sources: Addresses, sizes: Addresses, order: SourceOrder) -> None:
    """Writes when the current stream comes to it, or at once where there is none. Reads as early as
    the order allows."""
    pairs = list(zip(sources.tolist(), sizes.tolist(), strict=True))
    early = [ctypes.string_at(*pair) for pair in pairs] if order is SourceOrder.ANY else None

    def do() -> None:
        data = early or [ctypes.string_at(*pair) for pair in pairs]
        for target, what in zip(targets.tolist(), data, strict=True):
            ctypes.memmove(target, what, len(what))

    if TwinCuda.now is None:
        do()
    else:
        TwinCuda.now.enqueue(batch, do)


def pinned(addresses: list[int]) -> HostRegistration:
    """A registration that always works, and keeps what is registered in `addresses`."""
    return HostRegistration(lambda address, length: addresses.append(address), addresses.remove)


def _later(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is enqueued on a stream is done when the stream comes to it."""
    stream = TwinCuda.now
    if stream is None or func not in _ENQUEUED:
        return func(*args, **kwargs)

    def do() -> None:
        before, TwinCuda.now = TwinCuda.now, None
        try:
            func(*args, **kwargs)
        finally:
            TwinCuda.now = before

    stream.enqueue(func, do)
    return kwargs.get("out", args[0])


@contextmanager
def twin_of_cuda(
    patch: pytest.MonkeyPatch, queue_max: int | None = QUEUE_MAX
) -> Iterator[TwinCuda]:
    """Put the twin where torch.cuda is."""
    twin = TwinCuda(queue_max)
    patch.setattr(torch.cuda, "Stream", twin.make_stream)
    patch.setattr(torch.cuda, "Event", TwinEvent)
    patch.setattr(torch.cuda, "current_stream", lambda device: twin.compute)
    patch.setattr(torch.cuda, "stream", twin.on)
    patch.setattr(torch.cuda, "device", twin.device)
    with tensor_operations(_later):
        yield twin
