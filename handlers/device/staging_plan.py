"""How the slots of a worker are staged on the device: which tensors, where in the buffer, how many.

Tensors lie in a staging row in the order of the slot. Of slots larger than the buffer a part is
staged at a time. Where the layers of a part lie in one allocation at distances that are whole
pages, as in vLLM 0.32, their pages are rows of one view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

from ...logs import get_logger
from .geometry import PageRef, WorkerLayout

if TYPE_CHECKING:
    import torch

logger = get_logger(__name__)

DIRECT_RUN_BYTES = 512 << 10
"""From this mean length on, runs are copied one by one without staging."""
PIECE_BLOCKS_MAX = 1024
"""Blocks that are staged at a time: their numbers are uploaded through buffers of that length."""
WASTE_DIVISOR = 8
"""Whole slots are copied if at most 1/8 of them is unused."""


def unit_types() -> dict[int, torch.dtype]:
    """Element types in which pages can be moved, by their bytes."""
    import torch

    return {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Cell:
    """Where one tensor of a group lies in a staging row."""

    ref: PageRef
    offset: int
    """Of the tensor's first page in the staging row."""
    unit: int
    """Bytes per element in which the pages can be moved: 1, 2, 4 or 8."""


@dataclass(frozen=True, slots=True)
class Together:
    """The pages of several tensors as rows of one view."""

    pages: torch.Tensor
    """Shape `(rows, page)`, in units."""
    starts: torch.Tensor
    """On the device, per tensor in the order of the staging row: the row of its first page."""
    unit: int
    page_bytes: int
    """With padding."""


@dataclass(frozen=True, slots=True)
class Part:
    """How a part of the slots of one KV group is staged: tensors that fit into the buffer."""

    cells: tuple[Cell, ...]
    """In the order of their offsets."""
    together: Together | None
    """None: a kernel for each tensor."""
    extents: tuple[tuple[int, int, int], ...]
    """(offset in the slot, offset in the staging row, bytes) of what is copied per slot."""
    row_bytes: int
    rows: int
    """Slots that are staged at a time."""


class StagingPlan:
    """The parts of every KV group."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        layout: WorkerLayout,
        staging_bytes: int,
        direct_run_bytes: int,
    ) -> None:
        self._tensors = tensors
        self._layout = layout
        self._direct_run_bytes = direct_run_bytes
        self.groups = [self._parts(refs, staging_bytes) for refs in layout.groups]
        """Per group its parts; none where all is copied directly."""

    def _parts(self, refs: Sequence[PageRef], staging_bytes: int) -> tuple[Part, ...]:
        """Tensors in the order of the slot, as many in a part as the buffer holds of one slot.

        None where pages are large enough to be copied one by one, or not one page of each block of
        a chunk fits.
        """
        if self._is_direct(refs):
            return ()
        parts: list[list[PageRef]] = []
        room = 0
        for ref in sorted(refs, key=lambda ref: ref.tensor):
            length = self._chunk_bytes(ref)
            if length > staging_bytes or self._layout.blocks_per_chunk > PIECE_BLOCKS_MAX:
                logger.info(
                    "kvcascade: %d pages of %d bytes a slot are copied one by one: they do not fit "
                    "into the staging buffer; a smaller blocks_per_chunk makes copies faster",
                    self._layout.blocks_per_chunk,
                    ref.page_bytes,
                )
                return ()
            if length > room:
                parts.append([])
                room = staging_bytes
            parts[-1].append(ref)
            room -= length
        return tuple(self._part(part, staging_bytes, len(parts) == 1) for part in parts)

    def _chunk_bytes(self, ref: PageRef) -> int:
        return self._layout.tensors[ref.tensor].page_bytes * self._layout.blocks_per_chunk

    def _part(self, refs: Sequence[PageRef], staging_bytes: int, is_all: bool) -> Part:
        """`is_all`: nothing else of the group is in the slot."""
        extents: list[tuple[int, int, int]] = []
        offsets: dict[int, int] = {}
        row_bytes = 0
        for ref in refs:
            start = int(self._layout.tensor_offsets[ref.tensor])
            length = self._chunk_bytes(ref)
            offsets[ref.tensor] = row_bytes
            if extents and extents[-1][0] + extents[-1][2] == start:
                in_slot, in_row, before = extents.pop()
                extents.append((in_slot, in_row, before + length))
            else:
                extents.append((start, row_bytes, length))
            row_bytes += length
        is_whole = is_all and len(extents) == 1
        if is_whole and self._may_take_whole_slot(extents[0][0], row_bytes, staging_bytes):
            row_bytes = self._layout.slot_bytes
            extents = [(0, 0, row_bytes)]
        cells = tuple(
            Cell(ref, offsets[ref.tensor], self._unit(ref, offsets[ref.tensor], row_bytes))
            for ref in refs
        )
        most = PIECE_BLOCKS_MAX // self._layout.blocks_per_chunk
        rows = min(staging_bytes // row_bytes, self._layout.slots, most)
        return Part(cells, self._together(cells), tuple(extents), row_bytes, rows)

    def _together(self, cells: Sequence[Cell]) -> Together | None:
        """One view of all pages of these tensors; None if there is none."""
        import torch

        unit = min(cell.unit for cell in cells)
        tensors = [self._tensors[cell.ref.tensor] for cell in cells]
        first = min(tensors, key=lambda tensor: tensor.storage_offset())
        facts = {
            (
                tensor.untyped_storage().data_ptr(),
                tensor.stride(0),
                self._layout.tensors[cell.ref.tensor].page_bytes,
                cell.ref.page_bytes,
            )
            for tensor, cell in zip(tensors, cells, strict=True)
        }
        stride, begin = int(first.stride(0)), int(first.storage_offset())
        distances = [int(tensor.storage_offset()) - begin for tensor in tensors]
        if len(cells) == 1 or len(facts) > 1 or any(each % stride for each in distances):
            return None
        starts = [distance // stride for distance in distances]
        rows = max(at + int(tensor.shape[0]) for at, tensor in zip(starts, tensors, strict=True))
        page = cells[0].ref.page_bytes
        pages = first.as_strided((rows, page), (stride, 1), begin)
        return Together(
            pages.view(unit_types()[unit]),
            torch.tensor(starts, dtype=torch.int64, device=first.device),
            unit,
            self._layout.tensors[cells[0].ref.tensor].page_bytes,
        )

    def _is_direct(self, refs: Sequence[PageRef]) -> bool:
        """True if pages are large enough to be copied one by one."""
        return sum(ref.page_bytes for ref in refs) >= self._direct_run_bytes * len(refs)

    def _may_take_whole_slot(self, start: int, row_bytes: int, staging_bytes: int) -> bool:
        """True if slots are this worker's alone and almost full: adjacent ones are then one copy.

        The unused bytes come along.
        """
        slot_bytes = self._layout.slot_bytes
        unused = slot_bytes - row_bytes
        fits = slot_bytes <= staging_bytes and unused * WASTE_DIVISOR <= slot_bytes
        return self._layout.owns_slot and start == 0 and fits

    def _unit(self, ref: PageRef, offset: int, row_bytes: int) -> int:
        tensor = self._tensors[ref.tensor]
        padded = self._layout.tensors[ref.tensor].page_bytes
        common = gcd(
            8, ref.page_bytes, padded, offset, row_bytes, tensor.stride(0), tensor.storage_offset()
        )
        return gcd(common, tensor.data_ptr())
