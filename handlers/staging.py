"""Many small device pages as few large copies: gather on the device, one copy per slot or run.

For a store, the pages of up to `rows` slots are gathered on the device into a staging buffer laid
out like the slots themselves, then each slot (or run of adjacent slots, where the worker owns whole
slots) is one contiguous copy to the arena. A load goes the other way. Pages large enough, and the
partial chunks of a store, are copied one by one. Of slots larger than the buffer a part is staged
at a time.

Where the layers of a part lie in one allocation at distances that are whole pages, as in vLLM 0.32,
their pages are rows of one view, and one kernel gathers or scatters a piece of all of them.

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
from typing import TYPE_CHECKING, Any

import numpy as np

from ..logs import get_logger
from ..tiers.cpu.header import round_up
from .geometry import GroupRows, PageRef, TensorLayout, WorkerLayout, merge_adjacent
from .host_register import slots_per_piece
from .number_uploads import UPLOAD_OPERATIONS, NumberUploads
from .stream_feed import Work

if TYPE_CHECKING:
    import torch

logger = get_logger(__name__)

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
class _Together:
    """The pages of several tensors as rows of one view."""

    pages: torch.Tensor
    """Shape `(rows, page)`, in units."""
    starts: torch.Tensor
    """On the device, per tensor in the order of the staging row: the row of its first page."""
    unit: int
    page_bytes: int
    """With padding."""


@dataclass(frozen=True, slots=True)
class _Part:
    """How a part of the slots of one KV group is staged: tensors that fit into the buffer."""

    cells: tuple[_Cell, ...]
    """In the order of their offsets."""
    together: _Together | None
    """None: a kernel for each tensor."""
    extents: tuple[tuple[int, int, int], ...]
    """(offset in the slot, offset in the staging row, bytes) of what is copied per slot."""
    row_bytes: int
    rows: int
    """Slots that are staged at a time."""


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
        self._gather: Any = torch.ops.aten.index.Tensor_out
        self._add: Any = torch.ops.aten.add.out
        self._tensors = list(tensors)
        self._layout = layout
        self._arena = arena
        self._flat_arena = arena.view(-1)
        self._piece_slots = slots_per_piece(layout.slot_bytes)
        """No copy goes beyond a multiple of it: the memory there is registered by itself."""
        self._direct_run_bytes = direct_run_bytes
        self._device = tensors[0].device
        self._dtypes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        self._groups = [self._parts(refs, staging_bytes) for refs in layout.groups]
        """Per group its parts; none where all is copied directly."""
        parts = [part for group in self._groups for part in group]
        staged = max((part.rows * part.row_bytes for part in parts), default=0)
        staged = round_up(staged, max(self._dtypes))
        self._staging = torch.zeros(staged, dtype=torch.int8, device=self._device)
        chunk = layout.blocks_per_chunk
        numbers = max((part.rows for part in parts), default=0) * chunk
        self._uploads = NumberUploads(numbers, self._device)
        joined = [part.rows * chunk * len(part.cells) for part in parts if part.together]
        self._rows = torch.zeros(max(joined, default=0), dtype=torch.int64, device=self._device)
        """Of a piece, the rows of `_Together.pages`."""

    def warm_up(self) -> None:
        """Do on the device what jobs do: kernels are loaded, which takes memory, and errors come
        now. The first page of each tensor is gathered, again and again, and put back: no byte
        changes. A last piece of one row may take kernels of its own."""
        chunk = self._layout.blocks_per_chunk
        for part in (part for group in self._groups for part in group):
            for rows in sorted({part.rows, 1}):
                first = np.zeros(rows * chunk, dtype=np.int64)
                blocks = self._uploads.upload(first).view(rows, chunk)
                for work in (self._gathered(part, blocks), self._scattered(part, blocks)):
                    for _ in work:
                        pass

    def store(self, rows: Sequence[GroupRows]) -> Work:
        """Device -> arena for a job, enqueued as it is iterated."""
        return self._move(rows, self._store_piece, is_store=True)

    def load(self, rows: Sequence[GroupRows]) -> Work:
        """Arena -> device for a job, enqueued as it is iterated."""
        return self._move(rows, self._load_piece, is_store=False)

    def _move(
        self,
        rows: Sequence[GroupRows],
        move_piece: Callable[[_Part, GroupRows], Work],
        *,
        is_store: bool,
    ) -> Work:
        for each in rows:
            parts = self._groups[each.group]
            whole, rest = self._whole_chunks(each) if parts else (_cut(each, 0, 0), [each])
            for part in parts:
                for piece in self._pieces(part, whole):
                    yield from move_piece(part, piece)
            for runs in rest:
                yield from self._copy_runs(runs, is_store=is_store)

    def _store_piece(self, part: _Part, piece: GroupRows) -> Work:
        chunk = self._layout.blocks_per_chunk
        count = len(piece.blocks) // chunk
        blocks = self._uploads.upload(piece.blocks).view(count, chunk)
        yield UPLOAD_OPERATIONS
        yield from self._gathered(part, blocks)
        for arena, staging in self._transfers(part, piece, count):
            arena.copy_(staging, non_blocking=True)
            yield 1

    def _load_piece(self, part: _Part, piece: GroupRows) -> Work:
        chunk = self._layout.blocks_per_chunk
        count = len(piece.blocks) // chunk
        blocks = self._uploads.upload(piece.blocks).view(count, chunk)
        yield UPLOAD_OPERATIONS
        for arena, staging in self._transfers(part, piece, count):
            staging.copy_(arena, non_blocking=True)
            yield 1
        yield from self._scattered(part, blocks)

    def _gathered(self, part: _Part, blocks: torch.Tensor) -> Work:
        """The pages of these blocks, shape `(slots, blocks a chunk)`, into the staging buffer."""
        if part.together is None:
            for cell in part.cells:
                self._gather(self._pages(cell), [blocks], out=self._cells(part, cell, len(blocks)))
                yield 1
            return
        rows = self._joined_rows(part.together, blocks)
        yield 1
        out = self._joined_cells(part, part.together, len(blocks))
        self._gather(part.together.pages, [rows], out=out)
        yield 1

    def _scattered(self, part: _Part, blocks: torch.Tensor) -> Work:
        """`_gathered`, the other way."""
        if part.together is None:
            for cell in part.cells:
                self._pages(cell).index_put_((blocks,), self._cells(part, cell, len(blocks)))
                yield 1
            return
        rows = self._joined_rows(part.together, blocks)
        yield 1
        cells = self._joined_cells(part, part.together, len(blocks))
        part.together.pages.index_put_((rows,), cells)
        yield 1

    def _joined_rows(self, together: _Together, blocks: torch.Tensor) -> torch.Tensor:
        """Rows of all tensors for these blocks, shape `(slots, tensors, blocks a chunk)`."""
        count, chunk = blocks.shape
        shape = (count, len(together.starts), chunk)
        rows = self._rows[: count * len(together.starts) * chunk].view(shape)
        self._add(blocks.view(count, 1, chunk), together.starts.view(1, -1, 1), out=rows)
        return rows

    def _joined_cells(self, part: _Part, together: _Together, count: int) -> torch.Tensor:
        """All of a part in the staging buffer: `(count, tensors, chunk, page)` in units."""
        unit, padded = together.unit, together.page_bytes
        chunk = self._layout.blocks_per_chunk
        return self._staging.view(self._dtypes[unit]).as_strided(
            (count, len(part.cells), chunk, together.pages.shape[1]),
            (part.row_bytes // unit, padded * chunk // unit, padded // unit, 1),
        )

    def _transfers(
        self, part: _Part, piece: GroupRows, count: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of contiguous (arena, staging) stretches that make up a piece."""
        slots = piece.slots[:: self._layout.blocks_per_chunk]
        slot_bytes, row_bytes = self._layout.slot_bytes, part.row_bytes
        if part.extents == ((0, 0, slot_bytes),):
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
            for in_slot, in_row, length in part.extents:
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

    def _whole_chunks(self, rows: GroupRows) -> tuple[GroupRows, list[GroupRows]]:
        """Whole chunks, which are staged; and what is copied directly: the partial chunks at the
        start and the end, or everything."""
        chunk, count = self._layout.blocks_per_chunk, len(rows.blocks)
        if count <= DIRECT_BLOCKS_MAX:
            return _cut(rows, 0, 0), [rows]
        first = min(-int(rows.subs[0]) % chunk, count)
        last = max(first, count - (int(rows.subs[-1]) + 1) % chunk)
        rest = [_cut(rows, 0, first), _cut(rows, last, count)]
        return _cut(rows, first, last), [each for each in rest if len(each.blocks)]

    def _pieces(self, part: _Part, rows: GroupRows) -> list[GroupRows]:
        """As many slots at a time as are staged."""
        step, count = part.rows * self._layout.blocks_per_chunk, len(rows.blocks)
        return [_cut(rows, at, min(at + step, count)) for at in range(0, count, step)]

    def _cells(self, part: _Part, cell: _Cell, count: int) -> torch.Tensor:
        """One tensor's pages in the staging buffer, shape `(count, chunk, page)` in units."""
        unit = cell.unit
        padded = self._layout.tensors[cell.ref.tensor].page_bytes
        return self._staging.view(self._dtypes[unit]).as_strided(
            (count, self._layout.blocks_per_chunk, cell.ref.page_bytes // unit),
            (part.row_bytes // unit, padded // unit, 1),
            cell.offset // unit,
        )

    def _pages(self, cell: _Cell) -> torch.Tensor:
        """The used part of a device tensor's pages, shape `(num_blocks, page)` in units."""
        pages = self._tensors[cell.ref.tensor][:, : cell.ref.page_bytes]
        return pages.view(self._dtypes[cell.unit])

    def _parts(self, refs: Sequence[PageRef], staging_bytes: int) -> tuple[_Part, ...]:
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

    def _part(self, refs: Sequence[PageRef], staging_bytes: int, is_all: bool) -> _Part:
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
            _Cell(ref, offsets[ref.tensor], self._unit(ref, offsets[ref.tensor], row_bytes))
            for ref in refs
        )
        most = PIECE_BLOCKS_MAX // self._layout.blocks_per_chunk
        rows = min(staging_bytes // row_bytes, self._layout.slots, most)
        return _Part(cells, self._together(cells), tuple(extents), row_bytes, rows)

    def _together(self, cells: Sequence[_Cell]) -> _Together | None:
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
        stride = first.stride(0)
        distances = [tensor.storage_offset() - first.storage_offset() for tensor in tensors]
        if len(cells) == 1 or len(facts) > 1 or any(each % stride for each in distances):
            return None
        starts = [distance // stride for distance in distances]
        rows = max(at + tensor.shape[0] for at, tensor in zip(starts, tensors, strict=True))
        page = cells[0].ref.page_bytes
        pages = first.as_strided((rows, page), (stride, 1), first.storage_offset())
        return _Together(
            pages.view(self._dtypes[unit]),
            torch.tensor(starts, dtype=torch.int64, device=self._device),
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


def _cut(rows: GroupRows, first: int, last: int) -> GroupRows:
    """Some consecutive blocks of a group's rows."""
    return GroupRows(
        rows.group, rows.blocks[first:last], rows.slots[first:last], rows.subs[first:last]
    )
