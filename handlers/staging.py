"""Many small device pages as few large copies: gather on the device, one copy per slot or run.

For a store, the pages of up to `rows` slots are gathered on the device into a staging buffer laid
out like the slots themselves, then each slot (or run of adjacent slots, where the worker owns whole
slots) is one contiguous copy to the arena. A load goes the other way. Pages large enough, and the
partial chunks of a store, are copied one by one.

All work is put on the current stream, in order, without waiting for it, and the stream's order is
what makes reuse of the staging buffer safe: use one object per stream. A job is done as it is
iterated, so that whoever iterates decides how much of it the stream is given at a time. Device
memory is taken once, by the constructor; a job takes none. The same code runs on CPU tensors, which
is how it is tested on machines without a GPU.

After a store, bytes of a stored slot that belong to no page of its group (padding between pages)
are undefined; bytes of other slots and of other ranks' parts are never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

import numpy as np

from ..tiers.cpu.header import round_up
from .geometry import GroupRows, PageRef, TensorLayout, WorkerLayout, merge_adjacent
from .host_register import slots_per_piece
from .number_uploads import UPLOAD_OPERATIONS, NumberUploads
from .stream_feed import Work

if TYPE_CHECKING:
    import torch

STAGING_BYTES = 64 << 20
"""Device memory for one direction's staging buffer, at most. While it is filled or emptied, by one
kernel per layer, nothing crosses to the host. With 61 layers, 3 µs each, and a link of 55 GB/s, on
which 64 MiB take 1.2 ms, 0.87 of its rate is left, with half the buffer 0.77: reckoned, not
measured."""
DIRECT_RUN_BYTES = 512 << 10
"""From this mean length on, runs are copied one by one without staging."""
PIECE_BLOCKS_MAX = 1024
"""Blocks that are staged at a time: their numbers are uploaded through buffers of that length."""

DIRECT_BLOCKS_MAX = 2
"""Up to this many blocks, launching the gathers costs more than copying page by page."""
WASTE_DIVISOR = 8
"""Whole slots are copied if at most 1/8 of them is unused."""

_TENSOR_SHIFT = 44  # keeps tensors apart in `merge_adjacent`; a tensor is below 16 TiB


@dataclass(frozen=True, slots=True)
class _Cell:
    """Where one tensor of a group lies in a staging row."""

    ref: PageRef
    offset: int
    """Of the tensor's first page in the staging row."""
    unit: int
    """Bytes per element in which the pages can be moved: 1, 2, 4 or 8."""


@dataclass(frozen=True, slots=True)
class _GroupPlan:
    """How the slots of one KV group are staged."""

    cells: tuple[_Cell, ...]
    extents: tuple[tuple[int, int, int], ...]
    """(offset in the slot, offset in the staging row, bytes) of what is copied per slot."""
    row_bytes: int
    rows: int
    """Slots that are staged at a time; 0: none, because all is copied directly."""


def torch_layouts(tensors: Sequence[torch.Tensor]) -> list[TensorLayout]:
    """Describe KV tensors, int8 of shape `(num_blocks, page_bytes)`, for `WorkerLayout`."""
    return [
        TensorLayout(int(tensor.shape[0]), int(tensor.shape[1]), int(tensor.stride(0)))
        for tensor in tensors
    ]


class StagedCopier:
    """Copies between device tensors and the arena on the current stream."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        layout: WorkerLayout,
        arena: torch.Tensor,
        *,
        staging_bytes: int = STAGING_BYTES,
        direct_run_bytes: int = DIRECT_RUN_BYTES,
    ) -> None:
        """`arena` is int8 of shape `(slots, slot_bytes)` in host memory."""
        import torch

        # With an output, so that the pages land in the staging buffer whatever its strides.
        self._gather = torch.ops.aten.index.Tensor_out
        self._tensors = list(tensors)
        self._layout = layout
        self._arena = arena
        self._flat_arena = arena.view(-1)
        self._piece_slots = slots_per_piece(layout.slot_bytes)
        """No copy goes beyond a multiple of it: the memory there is registered by itself."""
        self._direct_run_bytes = direct_run_bytes
        self._device = tensors[0].device
        self._dtypes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        self._plans = [self._plan(refs, staging_bytes) for refs in layout.groups]
        staged = max((plan.rows * plan.row_bytes for plan in self._plans), default=0)
        staged = round_up(staged, max(self._dtypes))
        self._staging = torch.zeros(staged, dtype=torch.int8, device=self._device)
        numbers = max((plan.rows for plan in self._plans), default=0) * layout.blocks_per_chunk
        self._uploads = NumberUploads(numbers, self._device)

    def warm_up(self) -> None:
        """Do on the device what jobs do: kernels are loaded, which takes memory, and errors come
        now. The first page of each tensor is gathered, again and again, and put back: no byte
        changes. A last piece of one row may take kernels of its own."""
        for plan in self._plans:
            for rows in sorted({plan.rows, min(plan.rows, 1)} - {0}):
                self._warm_up(plan, rows)

    def _warm_up(self, plan: _GroupPlan, rows: int) -> None:
        chunk = self._layout.blocks_per_chunk
        first = np.zeros(rows * chunk, dtype=np.int64)
        blocks = self._uploads.upload(first).view(rows, chunk)
        for cell in plan.cells:
            pages, cells = self._pages(cell), self._cells(plan, cell, rows)
            self._gather(pages, [blocks], out=cells)
            pages.index_put_((blocks,), cells)

    def store(self, rows: Sequence[GroupRows]) -> Work:
        """Device -> arena for a job, enqueued as it is iterated."""
        return self._move(rows, self._store_piece, is_store=True)

    def load(self, rows: Sequence[GroupRows]) -> Work:
        """Arena -> device for a job, enqueued as it is iterated."""
        return self._move(rows, self._load_piece, is_store=False)

    def _move(
        self,
        rows: Sequence[GroupRows],
        move_piece: Callable[[_GroupPlan, GroupRows], Work],
        *,
        is_store: bool,
    ) -> Work:
        for each in rows:
            plan = self._plans[each.group]
            pieces, rest = self._pieces(plan, each)
            for piece in pieces:
                yield from move_piece(plan, piece)
            for runs in rest:
                yield from self._copy_runs(runs, is_store=is_store)

    def _store_piece(self, plan: _GroupPlan, piece: GroupRows) -> Work:
        chunk = self._layout.blocks_per_chunk
        count = len(piece.blocks) // chunk
        blocks = self._uploads.upload(piece.blocks).view(count, chunk)
        yield UPLOAD_OPERATIONS
        for cell in plan.cells:
            self._gather(self._pages(cell), [blocks], out=self._cells(plan, cell, count))
            yield 1
        for arena, staging in self._transfers(plan, piece, count):
            arena.copy_(staging, non_blocking=True)
            yield 1

    def _load_piece(self, plan: _GroupPlan, piece: GroupRows) -> Work:
        chunk = self._layout.blocks_per_chunk
        count = len(piece.blocks) // chunk
        blocks = self._uploads.upload(piece.blocks).view(count, chunk)
        yield UPLOAD_OPERATIONS
        for arena, staging in self._transfers(plan, piece, count):
            staging.copy_(arena, non_blocking=True)
            yield 1
        for cell in plan.cells:
            self._pages(cell).index_put_((blocks,), self._cells(plan, cell, count))
            yield 1

    def _transfers(
        self, plan: _GroupPlan, piece: GroupRows, count: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of contiguous (arena, staging) stretches that make up a piece."""
        slots = piece.slots[:: self._layout.blocks_per_chunk]
        slot_bytes, row_bytes = self._layout.slot_bytes, plan.row_bytes
        if plan.extents == ((0, 0, slot_bytes),):
            is_head = (np.diff(slots) != 1) | (slots[1:] % self._piece_slots == 0)
            heads = np.flatnonzero(np.concatenate(([True], is_head)))
            ends = np.append(heads[1:], count)
            for head, end in zip(heads.tolist(), ends.tolist(), strict=True):
                start = int(slots[head]) * slot_bytes
                length = (end - head) * slot_bytes
                staged = self._staging[head * row_bytes : head * row_bytes + length]
                yield self._flat_arena[start : start + length], staged
            return
        for row, slot in enumerate(slots.tolist()):
            for in_slot, in_row, length in plan.extents:
                at = row * row_bytes + in_row
                yield self._arena[slot, in_slot : in_slot + length], self._staging[at : at + length]

    def _copy_runs(self, rows: GroupRows, *, is_store: bool) -> Work:
        """Copy page by page, neighbours joined; exact to the byte."""
        copies = self._layout.copy_list([rows])
        device, arena, size = merge_adjacent(
            (copies.tensor << _TENSOR_SHIFT) + copies.device,
            copies.arena,
            copies.size,
            self._piece_slots * self._layout.slot_bytes,
        )
        for at, to, length in zip(device.tolist(), arena.tolist(), size.tolist(), strict=True):
            offset = at & ((1 << _TENSOR_SHIFT) - 1)
            tensor = self._tensors[at >> _TENSOR_SHIFT]
            start = tensor.storage_offset() + offset
            page = tensor.as_strided((length,), (1,), start)
            host = self._flat_arena[to : to + length]
            if is_store:
                host.copy_(page, non_blocking=True)
            else:
                page.copy_(host, non_blocking=True)
            yield 1

    def _pieces(self, plan: _GroupPlan, rows: GroupRows) -> tuple[list[GroupRows], list[GroupRows]]:
        """Whole chunks, as many at a time as are staged; and what is copied directly: the partial
        chunks at the start and the end, or everything."""
        chunk, count = self._layout.blocks_per_chunk, len(rows.blocks)
        if plan.rows == 0 or count <= DIRECT_BLOCKS_MAX:
            return [], [rows]
        first = min(-int(rows.subs[0]) % chunk, count)
        last = max(first, count - (int(rows.subs[-1]) + 1) % chunk)
        step = plan.rows * chunk
        pieces = [_cut(rows, at, min(at + step, last)) for at in range(first, last, step)]
        rest = [_cut(rows, 0, first), _cut(rows, last, count)]
        return pieces, [part for part in rest if len(part.blocks)]

    def _cells(self, plan: _GroupPlan, cell: _Cell, count: int) -> torch.Tensor:
        """One tensor's pages in the staging buffer, shape `(count, chunk, page)` in units."""
        unit = cell.unit
        padded = self._layout.tensors[cell.ref.tensor].page_bytes
        return self._staging.view(self._dtypes[unit]).as_strided(
            (count, self._layout.blocks_per_chunk, cell.ref.page_bytes // unit),
            (plan.row_bytes // unit, padded // unit, 1),
            cell.offset // unit,
        )

    def _pages(self, cell: _Cell) -> torch.Tensor:
        """The used part of a device tensor's pages, shape `(num_blocks, page)` in units."""
        pages = self._tensors[cell.ref.tensor][:, : cell.ref.page_bytes]
        return pages.view(self._dtypes[cell.unit])

    def _plan(self, refs: Sequence[PageRef], staging_bytes: int) -> _GroupPlan:
        chunk = self._layout.blocks_per_chunk
        extents: list[tuple[int, int, int]] = []
        offsets: dict[int, int] = {}
        row_bytes = 0
        for ref in sorted(refs, key=lambda ref: ref.tensor):
            start = int(self._layout.tensor_offsets[ref.tensor])
            length = self._layout.tensors[ref.tensor].page_bytes * chunk
            offsets[ref.tensor] = row_bytes
            if extents and extents[-1][0] + extents[-1][2] == start:
                in_slot, in_row, before = extents.pop()
                extents.append((in_slot, in_row, before + length))
            else:
                extents.append((start, row_bytes, length))
            row_bytes += length
        if len(extents) == 1 and self._may_take_whole_slot(extents[0][0], row_bytes):
            row_bytes = self._layout.slot_bytes
            extents = [(0, 0, row_bytes)]
        cells = tuple(
            _Cell(ref, offsets[ref.tensor], self._unit(ref, offsets[ref.tensor], row_bytes))
            for ref in refs
        )
        rows = 0 if self._is_direct(refs) else self._rows(row_bytes, staging_bytes)
        return _GroupPlan(cells, tuple(extents), row_bytes, rows)

    def _is_direct(self, refs: Sequence[PageRef]) -> bool:
        """True if pages are large enough to be copied one by one."""
        return sum(ref.page_bytes for ref in refs) >= self._direct_run_bytes * len(refs)

    def _rows(self, row_bytes: int, staging_bytes: int) -> int:
        """Slots that are staged at a time."""
        most = PIECE_BLOCKS_MAX // self._layout.blocks_per_chunk
        return min(staging_bytes // row_bytes, self._layout.slots, most)

    def _may_take_whole_slot(self, start: int, row_bytes: int) -> bool:
        """True if slots are this worker's alone and almost full: adjacent ones are then one copy.

        The unused bytes come along.
        """
        slot_bytes = self._layout.slot_bytes
        unused = slot_bytes - row_bytes
        return self._layout.owns_slot and start == 0 and unused * WASTE_DIVISOR <= slot_bytes

    def _unit(self, ref: PageRef, offset: int, row_bytes: int) -> int:
        tensor = self._tensors[ref.tensor]
        padded = self._layout.tensors[ref.tensor].page_bytes
        common = gcd(
            8, ref.page_bytes, padded, offset, row_bytes, tensor.stride(0), tensor.storage_offset()
        )
        return gcd(common, tensor.data_ptr())


def _cut(rows: GroupRows, first: int, last: int) -> GroupRows:
    """Some consecutive blocks of a group's rows."""
    return GroupRows(
        rows.group, rows.blocks[first:last], rows.slots[first:last], rows.subs[first:last]
    )
