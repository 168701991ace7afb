"""No copy straddles two registrations of host memory: the driver may refuse it, and a refused copy
ends the engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.cuda_twin import NoEvent, operations
from support.kv_layouts import NAMED_CASES, Case

from kvcascade.handlers.device import host_register
from kvcascade.handlers.device.copier import GpuBlocks
from kvcascade.handlers.device.host_register import HostRegistration
from kvcascade.handlers.device.staging import StagedCopier

PIECE_SLOTS = 3
FIRST = 1
"""The job's slots begin in the middle of a registered piece."""
BLOCKS = 10


class Registered:
    """Host memory in pieces, and every host range that a copy names."""

    def __init__(self, arena: np.typing.NDArray[np.uint8]) -> None:
        self.begin, self.end = arena.ctypes.data, arena.ctypes.data + arena.nbytes
        self.pieces: list[tuple[int, int]] = []
        self.copies: list[tuple[int, int]] = []
        HostRegistration(self._register, lambda address: None).pin(self.begin, *arena.shape)

    def _register(self, address: int, length: int) -> None:
        self.pieces.append((address, address + length))

    def note(self, tensor: torch.Tensor) -> None:
        start = tensor.data_ptr()
        if self.begin <= start < self.end:
            self.copies.append((start, start + tensor.numel() * tensor.element_size()))

    def straddling(self) -> list[tuple[int, int]]:
        """Copies that lie in no single piece."""
        return [
            (start, end)
            for start, end in self.copies
            if not any(first <= start and end <= last for first, last in self.pieces)
        ]


@pytest.mark.parametrize("direct_run_bytes", [1, 1 << 30], ids=["page_by_page", "whole_slots"])
@pytest.mark.parametrize("is_store", [True, False], ids=["store", "load"])
def test_runs_of_slots_are_cut_where_a_registration_ends(
    is_store: bool, direct_run_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case: Case = NAMED_CASES["one_packed_tensor"]
    slot_bytes = case.geometry.slot_bytes
    monkeypatch.setattr(host_register, "REGISTER_PIECE_BYTES", PIECE_SLOTS * slot_bytes + 1)
    rng = np.random.default_rng(0)
    arena = case.arena(rng)
    registered = Registered(arena)
    assert len(registered.pieces) == -(-case.slots // PIECE_SLOTS)
    copier = StagedCopier(
        [torch.from_numpy(tensor) for tensor in case.tensors(rng)],
        case.layout,
        torch.from_numpy(arena).view(torch.int8),
        NoEvent,
        direct_run_bytes=direct_run_bytes,
    )
    copy = torch.Tensor.copy_

    def noted(
        target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        registered.note(source)
        registered.note(target)
        return copy(target, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    blocks = GpuBlocks.of(list(range(BLOCKS)), [BLOCKS], [0])
    rows = case.layout.rows(blocks, np.arange(FIRST, FIRST + BLOCKS, dtype=np.int32))
    operations((copier.store if is_store else copier.load)(rows))
    assert registered.straddling() == []
    assert len(registered.copies) == 4, "slots 1 to 2, 3 to 5, 6 to 8, 9 to 10: still in runs"
