"""Plan the staging buffer of a worker: which tensors lie where in it, and how many slots fit.

A staging row holds the tensors in the order of the slot. Slots larger than the buffer are staged in
parts. In vLLM 0.32 the layers lie in one allocation, whole pages apart. Then the pages of all
layers are rows of one view, and one kernel moves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

import numpy as np

from ...logs import get_logger
from .geometry import IntArray, PageRef, WorkerLayout

if TYPE_CHECKING:
    import torch

logger = get_logger(__name__)

DIRECT_RUN_BYTES = 512 << 10
"""Mean page size from which pages are copied one by one without staging."""
PIECE_BLOCKS_MAX = 1024
"""Limit of the blocks that are staged at a time."""
UPLOAD_BLOCKS_MAX = 2048
"""Limit of the blocks whose numbers are uploaded at a time, for one piece or more."""
WASTE_DIVISOR = 8
"""Divisor of the slot size. Whole slots are copied if at most this share of them is unused."""


def unit_types() -> dict[int, torch.dtype]:
    """Return the element types in which pages can be moved, by their size in bytes."""
    import torch

    return {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Cell:
    """Position of one tensor of a group in a staging row."""

    ref: PageRef
    offset: int
    """Offset of the tensor's first page in the staging row."""
    unit: int
    """Bytes per element in which the pages can be moved: 1, 2, 4 or 8."""


@dataclass(frozen=True, slots=True)
class Together:
    """One view of the pages of several tensors."""

    pages: torch.Tensor
    """View of all pages, shape `(rows, page)`, in units."""
    starts: IntArray
    """Row of each tensor's first page, in the order of the staging row. The rows are uploaded with
    each job, because sleep mode discards device memory."""
    unit: int
    page_bytes: int
    """Bytes of a page with its padding."""


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors of one KV group that are staged together, because they fit into the buffer."""

    cells: tuple[Cell, ...]
    """Cells in the order of their offsets."""
    together: Together | None
    """View of all pages, or None if each tensor needs a kernel of its own."""
    extents: tuple[tuple[int, int, int], ...]
    """Copies of each slot: offset in the slot, offset in the staging row, and bytes."""
    row_bytes: int
    rows: int
    """Number of slots that are staged at a time."""
    uploaded: int
    """Number of slots whose block numbers are uploaded at a time, a multiple of `rows`."""


class StagingPlan:
    """Parts of every KV group."""

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
        """Parts of each group. A group without parts is copied page by page."""

    def _parts(self, refs: Sequence[PageRef], staging_bytes: int) -> tuple[Part, ...]:
        """Split the tensors, in the order of the slot, into parts of which a slot fits the buffer.

        There are no parts if the pages are large enough to be copied one by one. There are none
        either if the pages of one chunk do not fit.
        """
        if sum(ref.page_bytes for ref in refs) >= self._direct_run_bytes * len(refs):
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
        """Plan one part. `is_all` says that it holds all tensors of the group."""
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
        chunk, slots = self._layout.blocks_per_chunk, self._layout.slots
        rows = min(staging_bytes // row_bytes, slots, PIECE_BLOCKS_MAX // chunk)
        pieces = max(1, min(UPLOAD_BLOCKS_MAX // chunk // rows, -(-slots // rows)))
        return Part(cells, self._together(cells), tuple(extents), row_bytes, rows, pieces * rows)

    def _together(self, cells: Sequence[Cell]) -> Together | None:
        """Make one view of all pages of these tensors, or return None if there is none."""
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
            np.array(starts, dtype=np.int64),
            unit,
            self._layout.tensors[cells[0].ref.tensor].page_bytes,
        )

    def _may_take_whole_slot(self, start: int, row_bytes: int, staging_bytes: int) -> bool:
        """Return True if slots hold only this worker's part and are almost full.

        Adjacent slots are then one copy, which includes their unused bytes.
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
