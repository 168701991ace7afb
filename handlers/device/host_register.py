"""Pin the arena for the GPU in pieces of limited size: all of it or nothing.

One registration of hundreds of GiB fails on large hosts. The driver may refuse a copy that spans
two registrations. So a piece ends on a slot boundary, and copies of several slots are split there
(`slots_per_piece`). If the driver refuses a piece, the earlier pieces are unregistered, and a
warning names the reason. Transfers then use unregistered memory: the bytes are right, but copies
are slower and the submitting thread waits for each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ...logs import get_logger

if TYPE_CHECKING:
    import torch

logger = get_logger(__name__)

REGISTER_PIECE_BYTES = 8 << 30
"""Largest piece that is registered at once."""

_OUT_OF_MEMORY, _NOT_SUPPORTED = 2, 801
_REMEDIES = {
    _OUT_OF_MEMORY: "raise the limit of locked memory (ulimit -l), or lower the tier's capacity",
    _NOT_SUPPORTED: "set arena_dir to a folder on tmpfs or hugetlbfs",
}
_REMEDY = "look the error up in CUDA's documentation; a second copier may hold the same memory"
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all contexts of the process


def slots_per_piece(slot_bytes: int) -> int:
    """Return the number of slots that are registered at once."""
    return max(1, REGISTER_PIECE_BYTES // slot_bytes)


class HostRegistration:
    """Registration of one range of host memory."""

    def __init__(
        self, register: Callable[[int, int], str | None], unregister: Callable[[int], None]
    ) -> None:
        """`register(address, bytes)` returns None, or the reason of a refusal and a remedy. Neither
        function may raise."""
        self._register = register
        self._unregister = unregister
        self._addresses: list[int] = []

    @property
    def is_pinned(self) -> bool:
        """True if the whole range is registered."""
        return bool(self._addresses)

    def pin(self, address: int, slots: int, slot_bytes: int) -> bool:
        """Register `slots` slots from `address` on. Return False, with none registered, if a piece
        is refused."""
        step = slots_per_piece(slot_bytes) * slot_bytes
        total = slots * slot_bytes
        for offset in range(0, total, step):
            length = min(step, total - offset)
            refused_by = self._register(address + offset, length)
            if refused_by is not None:
                self.release()
                logger.warning(
                    "the CPU arena could not be pinned for the GPU at byte %d of %d: %s; transfers "
                    "go on, but slower",
                    offset,
                    total,
                    refused_by,
                )
                return False
            self._addresses.append(address + offset)
        return True

    def release(self) -> None:
        """Unregister everything. Idempotent. No copy may be running."""
        while self._addresses:
            self._unregister(self._addresses.pop())


def cuda_registration(device: torch.device) -> HostRegistration:
    """Make a registration that uses the CUDA runtime of torch."""
    import torch

    cuda: Any = torch.cuda
    runtime = cuda.cudart()

    def clear_error() -> None:
        """Launch a kernel that takes the error of a failed call, or the next kernel would."""
        with suppress(RuntimeError):
            torch.ones(1, device=device)  # torch after 2.13 makes zeros without a kernel

    def register(address: int, length: int) -> str | None:
        with torch.cuda.device(device):
            error = runtime.cudaHostRegister(address, length, _PORTABLE)
            code = int(error)
            if code == 0:
                return None
            clear_error()
            said = runtime.cudaGetErrorString(error)
            return f"{said} (CUDA error {code}); {_REMEDIES.get(code, _REMEDY)}"

    def unregister(address: int) -> None:
        with torch.cuda.device(device):
            if int(runtime.cudaHostUnregister(address)) != 0:
                clear_error()

    return HostRegistration(register, unregister)
