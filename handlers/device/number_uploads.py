"""Upload block numbers to the device, through buffers that are allocated once.

An engine fills the memory of its GPU. A job that allocates may fail, and a failed job ends the
engine. So all buffers are allocated at the start. One buffer on the device is enough, because the
stream that fills it also reads it. The host writes immediately, so a host buffer is reused only
after its copy to the device has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .geometry import IntArray
from .stream_feed import OUTSTANDING_MAX

if TYPE_CHECKING:
    import torch

UPLOAD_OPERATIONS = 2
"""Operations of an upload: a copy and an event."""
_LEAST_USES = 3
"""Least number of operations on the same stream that use an upload: a kernel between two events."""
HOST_BUFFERS = OUTSTANDING_MAX // (UPLOAD_OPERATIONS + _LEAST_USES) + 2
"""Number of host buffers. A stream's queue never holds so many uploads, so none of them waits."""


class NumberUploads:
    """Uploads numbers on one stream, which must be the current stream."""

    def __init__(
        self,
        numbers: int,
        device: torch.device,
        make_event: Callable[[], Any],
        *,
        host_buffers: int = HOST_BUFFERS,
    ) -> None:
        """An upload has at most `numbers` numbers. `make_event` makes an event of the device."""
        import torch

        self._device = torch.zeros(numbers, dtype=torch.int64, device=device)
        self._host = torch.zeros(
            (host_buffers, numbers), dtype=torch.int64, pin_memory=device.type == "cuda"
        )
        self._copied = [make_event() for _ in range(host_buffers)]
        self._next = 0

    def upload(self, numbers: IntArray) -> torch.Tensor:
        """Enqueue a copy to the device. The result is valid until the stream's next upload."""
        at, count = self._next, len(numbers)
        self._next = (at + 1) % len(self._copied)
        self._copied[at].synchronize()
        host, device = self._host[at, :count], self._device[:count]
        host.numpy()[:] = numbers
        device.copy_(host, non_blocking=True)
        self._copied[at].record()
        return device
