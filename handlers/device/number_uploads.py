"""Block numbers on their way to the device, through memory that is taken once.

An engine fills its GPU and serves with what is left: memory that is first asked for by a job may
not be there, and a job that fails ends the engine. So both ends of the way exist from the start.
On the device one buffer is enough, because the stream that fills it also reads it. The host writes
at once, so each of its buffers is used again only after the copy out of it has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .geometry import IntArray
from .stream_feed import OUTSTANDING_MAX

if TYPE_CHECKING:
    import torch

UPLOAD_OPERATIONS = 2
"""An upload is a copy and an event."""
_LEAST_USES = 6
"""Operations that use an upload: pages are gathered or scattered, and cross to or from the host;
each waits for an event and is followed by one."""
HOST_BUFFERS = OUTSTANDING_MAX // (UPLOAD_OPERATIONS + _LEAST_USES) + 2
"""More than there are uploads among the outstanding operations of a stream, so none waits."""


class NumberUploads:
    """Uploads on one stream, which must be the current one."""

    def __init__(
        self,
        numbers: int,
        device: torch.device,
        *,
        host_buffers: int = HOST_BUFFERS,
        make_event: Callable[[], Any] | None = None,
    ) -> None:
        """For up to `numbers` numbers at a time. `make_event` is CUDA's where that is the device,
        and else something that ends at once."""
        import torch

        make_event = make_event or event_maker(device)
        self._device = torch.zeros(numbers, dtype=torch.int64, device=device)
        self._host = torch.zeros(
            (host_buffers, numbers), dtype=torch.int64, pin_memory=device.type == "cuda"
        )
        self._copied = [make_event() for _ in range(host_buffers)]
        self._next = 0

    def upload(self, numbers: IntArray) -> torch.Tensor:
        """Enqueue a copy to the device. What it returns is good up to the stream's next upload."""
        at, count = self._next, len(numbers)
        self._next = (at + 1) % len(self._copied)
        self._copied[at].synchronize()
        host, device = self._host[at, :count], self._device[:count]
        host.numpy()[:] = numbers
        device.copy_(host, non_blocking=True)
        self._copied[at].record()
        return device


def event_maker(device: torch.device) -> Callable[[], Any]:
    """CUDA's events where that is the device, and else some that have ended at once."""
    return _cuda_event if device.type == "cuda" else _NoEvent


class _NoEvent:
    """Where a copy has ended when it returns."""

    def record(self) -> None:
        """Nothing is under way."""

    def wait(self) -> None:
        """Nothing is under way."""

    def synchronize(self) -> None:
        """Nothing is under way."""


def _cuda_event() -> Any:
    import torch

    cuda: Any = torch.cuda
    return cuda.Event()
