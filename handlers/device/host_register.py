"""Pin the arena for the GPU in bounded pieces; all of it or nothing.

One registration of hundreds of GiB fails on large hosts. A piece ends on a slot boundary, so that
no copy of a slot straddles two registrations, which the driver may refuse; copies of several slots
are cut there (`slots_per_piece`). If a piece fails, the pieces before it are undone,
one warning says what that costs, and transfers go on with unregistered memory: right, but slower,
and the submitting thread then waits for each copy.
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
"""Longest piece that is registered at once."""

_OUT_OF_MEMORY, _NOT_SUPPORTED = 2, 801
_REMEDIES = {
    _OUT_OF_MEMORY: "raise the limit of locked memory (ulimit -l), or lower the tier's capacity",
    _NOT_SUPPORTED: "set arena_dir to a folder on tmpfs or hugetlbfs",
}
_REMEDY = "look the error up in CUDA's documentation; a second copier may hold the same memory"
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process


def slots_per_piece(slot_bytes: int) -> int:
    """How many slots are registered at once: pieces end after multiples of it."""
    return max(1, REGISTER_PIECE_BYTES // slot_bytes)


class HostRegistration:
    """The pinned state of one range of host memory."""

    def __init__(
        self, register: Callable[[int, int], str | None], unregister: Callable[[int], None]
    ) -> None:
        """`register(address, bytes)` says why it was refused and what to do; None: it worked.
        Neither may raise."""
        self._register = register
        self._unregister = unregister
        self._addresses: list[int] = []

    @property
    def is_pinned(self) -> bool:
        """True if the whole range is registered."""
        return bool(self._addresses)

    def pin(self, address: int, slots: int, slot_bytes: int) -> bool:
        """Register `slots` slots from `address` on; False, and nothing is, if a piece fails."""
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
        """Undo every registration; idempotent. No copy may be running."""
        while self._addresses:
            self._unregister(self._addresses.pop())


def cuda_registration(device: torch.device) -> HostRegistration:
    """Registration through the CUDA runtime that torch has loaded."""
    import torch

    cuda: Any = torch.cuda
    runtime = cuda.cudart()

    def clear_error() -> None:
        """A failed call leaves its error for the next kernel launch to report; launch one here."""
        with suppress(RuntimeError):
            torch.zeros(1, device=device)

    def register(address: int, length: int) -> str | None:
        with torch.cuda.device(device):
            error = int(runtime.cudaHostRegister(address, length, _PORTABLE))
            if error == 0:
                return None
            clear_error()
            said = runtime.cudaGetErrorString(runtime.cudaError(error))
            return f"{said} (CUDA error {error}); {_REMEDIES.get(error, _REMEDY)}"

    def unregister(address: int) -> None:
        with torch.cuda.device(device):
            if int(runtime.cudaHostUnregister(address)) != 0:
                clear_error()

    return HostRegistration(register, unregister)
