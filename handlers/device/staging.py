"""Many small device pages as few large copies: gather on the device, then copy slots as a whole.

For a store, the pages of some slots are gathered on the device into a half of the staging buffer.
They lie there as in the slots, and are copied to the arena as whole slots. A load goes the other
way.
Large pages, and the partial chunks at the ends of a job, are copied one by one. `staging_plan` says
which tensors are staged and where. All copies of a piece are one call of the driver if it has such
a call. Otherwise each slot or run of adjacent slots is a copy.

Kernels and copies have a stream each: while one half crosses, the other is filled or emptied. An
event of each half orders the two streams. Stores write to the arena on the copies' stream, and
loads write to the device on the kernels' stream. The end of that stream is the end of the job.
Block numbers are uploaded for many pieces at a time. A piece is then six operations, where one
kernel and one call of the driver move it.

Nothing here waits for the device. Each direction has an object of its own, because the buffers are
reused in the order of its streams. A job is done as it is iterated, so the caller decides how much
of it the streams are given at a time. Device memory is taken once, by the constructor. No job needs
the content that an earlier job left there: sleep mode discards it. The same code runs on CPU
tensors, which is how it is tested on machines without a GPU.

After a store, the bytes of a slot that belong to no page of its group are undefined. Bytes of other
slots and of other ranks' parts are never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...logs import get_logger
from ...tiers.cpu.header import round_up
from .batched_copy import Batch, SourceOrder
from .copier import Direction
from .geometry import GroupRows, IntArray, TensorLayout, WorkerLayout, merge_adjacent
from .host_register import slots_per_piece
from .number_uploads import UPLOAD_OPERATIONS, NumberUploads
from .staging_plan import DIRECT_RUN_BYTES, Cell, Part, StagingPlan, Together, unit_types
from .stream_feed import Operations, Work

if TYPE_CHECKING:
    import torch

logger = get_logger(__name__)

STAGING_BYTES = 64 << 20
"""Limit of the device memory of one direction's staging buffer, both halves together."""
DIRECT_BLOCKS_MAX = 2
"""Largest job that is copied page by page. For so few blocks launching kernels costs more."""
ALIGNED_BYTES = 256
"""Both staging buffers begin at a multiple of this, so that both run the kernels warmed up."""
STEP_OPERATIONS = 8
"""Operations that are enqueued in one step of a job."""

_TENSOR_SHIFT = 44  # keeps tensors apart in `merge_adjacent`; a tensor is below 16 TiB

OnStream = Callable[[], AbstractContextManager[Any]]
"""Function that returns a context in which a stream is the current stream."""


def torch_layouts(tensors: Sequence[torch.Tensor]) -> list[TensorLayout]:
    """Describe KV tensors, int8 of shape `(num_blocks, page_bytes)`, for `WorkerLayout`."""
    return [
        TensorLayout(int(tensor.shape[0]), int(tensor.shape[1]), int(tensor.stride(0)))
        for tensor in tensors
    ]


@dataclass(frozen=True, slots=True)
class _Way:
    """Direction of a job, and the order in which its sources may be read."""

    direction: Direction
    order: SourceOrder

    @property
    def is_store(self) -> bool:
        """True if the arena is the destination."""
        return self.direction is Direction.STORE


@dataclass(frozen=True, slots=True)
class _Half:
    """A half of the staging buffer, used as `_Pages`. Places are offsets in bytes."""

    memory: torch.Tensor
    filled: Any
    """Event behind the last operation that filled the half."""
    emptied: Any
    """Event behind the last operation that emptied the half."""

    def view(self, at: int, length: int) -> torch.Tensor:
        return self.memory[at : at + length]

    def addresses(self, at: IntArray) -> IntArray:
        return at + self.memory.data_ptr()


class _Pages:
    """Device tensors. A place is `(tensor << _TENSOR_SHIFT) + offset in bytes`."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._starts = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)

    def view(self, at: int, length: int) -> torch.Tensor:
        """Return a view of `length` bytes from a place on."""
        tensor = self._tensors[at >> _TENSOR_SHIFT]
        start = tensor.storage_offset() + (at & ((1 << _TENSOR_SHIFT) - 1))
        return tensor.as_strided((length,), (1,), start)

    def addresses(self, at: IntArray) -> IntArray:
        """Return the addresses of places."""
        offsets: IntArray = at & ((1 << _TENSOR_SHIFT) - 1)
        starts: IntArray = self._starts[at >> _TENSOR_SHIFT]
        return starts + offsets


class StagedCopier:
    """Copies between device tensors and the arena, in one direction."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        layout: WorkerLayout,
        arena: torch.Tensor,
        make_event: Callable[[], Any],
        *,
        staging_bytes: int = STAGING_BYTES,
        direct_run_bytes: int = DIRECT_RUN_BYTES,
        batch: Batch | None = None,
        on_kernels: OnStream = nullcontext,
        on_copies: OnStream = nullcontext,
    ) -> None:
        """`arena` is int8 of shape `(slots, slot_bytes)` in host memory, pinned for a `batch`.

        `make_event` makes an event of the device.
        """
        import torch

        # The variant with an output gathers into the staging buffer, whatever its strides are.
        self._gather: Any = torch.ops.aten.index.Tensor_out
        self._add: Any = torch.ops.aten.add.out
        self._batch = batch
        self._on_kernels, self._on_copies = on_kernels, on_copies
        self._pages = _Pages(list(tensors))
        self._tensors = list(tensors)
        self._layout = layout
        self._arena = arena.view(-1)
        self._piece_slots = slots_per_piece(layout.slot_bytes)
        """Slots of a registration. No copy crosses a multiple of it."""
        device = tensors[0].device
        self._groups = StagingPlan(
            self._tensors, layout, staging_bytes // 2, direct_run_bytes
        ).groups
        parts = [part for group in self._groups for part in group]
        staged = max((part.rows * part.row_bytes for part in parts), default=0)
        halves = torch.zeros((2, round_up(staged, ALIGNED_BYTES)), dtype=torch.int8, device=device)
        self._halves = [_Half(half, make_event(), make_event()) for half in halves]
        chunk = layout.blocks_per_chunk
        starts = max((len(part.together.starts) for part in parts if part.together), default=0)
        numbers = max((part.uploaded for part in parts), default=0) * chunk + starts
        self._uploads = NumberUploads(numbers, device, make_event)
        joined = [part.uploaded * chunk * len(part.cells) for part in parts if part.together]
        self._rows = torch.zeros(max(joined, default=0), dtype=torch.int64, device=device)
        """Rows of `Together.pages` for the blocks of an upload."""

    @property
    def is_batched(self) -> bool:
        """Return True if there is a batched call, and the driver has not refused it."""
        return self._batch is not None

    def warm_up(self) -> None:
        """Run every kernel that jobs need, on the kernels' stream, and one batched copy.

        Loading a kernel takes memory, and errors show now. The first page of each tensor is
        gathered and scattered back, so no byte changes. Pieces of one row may need other kernels.
        """
        chunk = self._layout.blocks_per_chunk
        memory = self._halves[0].memory
        with self._on_kernels():
            for part in (part for group in self._groups for part in group):
                for rows in sorted({part.uploaded, part.rows, 1}):
                    index, _ = self._upload(part, np.zeros(rows * chunk, dtype=np.int64))
                    for work in (
                        self._gathered(part, index[: part.rows], memory),
                        self._scattered(part, index[: part.rows], memory),
                    ):
                        for _ in work:
                            pass
        self._try_batch(self._halves[1])  # the kernels use the other half

    def _try_batch(self, half: _Half) -> None:
        """Copy a byte of the arena into the buffer, so that a refusal shows before serving."""
        if self._batch is not None and len(half.memory):
            start, one = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
            with self._on_copies():
                way = _Way(Direction.LOAD, SourceOrder.STREAM)
                self._cross_at_once(start, start, one, half, way)

    def store(self, rows: Sequence[GroupRows], order: SourceOrder = SourceOrder.STREAM) -> Work:
        """Copy a job from device to arena. Operations are enqueued as the result is iterated."""
        return self._move(rows, _Way(Direction.STORE, order))

    def load(self, rows: Sequence[GroupRows], order: SourceOrder = SourceOrder.STREAM) -> Work:
        """Copy a job from arena to device, like `store`.

        `order` may be `ANY` if no store to these slots is in flight.
        """
        return self._move(rows, _Way(Direction.LOAD, order))

    def _move(self, rows: Sequence[GroupRows], way: _Way) -> Work:
        for each in rows:
            parts = self._groups[each.group]
            whole, rest = self._whole_chunks(each) if parts else (_cut(each, 0, 0), [each])
            for part in parts:
                for some in self._split(whole, part.uploaded):
                    yield from self._move_staged(part, some, way)
            for runs in rest:
                yield from self._within(not way.is_store, self._copy_runs(runs, way))

    def _move_staged(self, part: Part, rows: GroupRows, way: _Way) -> Work:
        """Move whole slots whose block numbers are uploaded together, piece after piece."""
        with self._on_kernels():
            index, operations = self._upload(part, rows.blocks)
        yield Operations(operations, 0)
        for at, piece in enumerate(self._split(rows, part.rows)):
            self._halves.reverse()
            of_piece = index[at * part.rows : (at + 1) * part.rows]
            yield from self._move_piece(part, piece, of_piece, self._halves[0], way)

    def _move_piece(
        self, part: Part, piece: GroupRows, index: torch.Tensor, half: _Half, way: _Way
    ) -> Work:
        """Fill and empty a half of the buffer: one by kernels, and the other by copies."""
        cross = self._cross(*self._stretches(part, piece), half, way)
        if way.is_store:
            fill, empty = self._gathered(part, index, half.memory), cross
        else:
            fill, empty = cross, self._scattered(part, index, half.memory)
        yield from self._within(way.is_store, _between(half.emptied, fill, half.filled))
        yield from self._within(not way.is_store, _between(half.filled, empty, half.emptied))

    def _within(self, is_kernels: bool, work: Iterator[int]) -> Work:
        """Do work with one of the streams as the current stream.

        Several operations share one setting, which takes as long as an operation.
        """
        on_stream = self._on_kernels if is_kernels else self._on_copies
        while True:
            operations = 0
            with on_stream():
                for step in work:
                    operations += step
                    if operations >= STEP_OPERATIONS:
                        break
            if not operations:
                return
            yield Operations(operations, 0) if is_kernels else Operations(0, operations)

    def _upload(self, part: Part, blocks: IntArray) -> tuple[torch.Tensor, int]:
        """Upload the index of the pages of whole slots. Return it and the number of operations.

        Its shape is `(slots, blocks a chunk)`, or `(slots, tensors, blocks a chunk)` if one kernel
        moves all tensors.
        """
        chunk = self._layout.blocks_per_chunk
        count = len(blocks) // chunk
        if part.together is None:
            return self._uploads.upload(blocks).view(count, chunk), UPLOAD_OPERATIONS
        tensors = len(part.together.starts)
        numbers = self._uploads.upload(np.concatenate((part.together.starts, blocks)))
        rows = self._rows[: count * tensors * chunk].view(count, tensors, chunk)
        starts, ids = numbers[:tensors], numbers[tensors:]
        self._add(ids.view(count, 1, chunk), starts.view(1, -1, 1), out=rows)
        return rows, UPLOAD_OPERATIONS + 1

    def _gathered(self, part: Part, index: torch.Tensor, memory: torch.Tensor) -> Iterator[int]:
        """Gather the pages of an index into a half of the buffer."""
        for pages, cells in self._moved(part, len(index), memory):
            self._gather(pages, [index], out=cells)
            yield 1

    def _scattered(self, part: Part, index: torch.Tensor, memory: torch.Tensor) -> Iterator[int]:
        """Scatter a half of the buffer into the pages of an index."""
        for pages, cells in self._moved(part, len(index), memory):
            pages.index_put_((index,), cells)
            yield 1

    def _moved(
        self, part: Part, count: int, memory: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield what each kernel of a part moves: all pages, and `count` rows of the buffer."""
        if part.together is not None:
            yield part.together.pages, self._joined_cells(part, part.together, count, memory)
            return
        for cell in part.cells:
            yield self._pages_of(cell), self._cells(part, cell, count, memory)

    def _joined_cells(
        self, part: Part, together: Together, count: int, memory: torch.Tensor
    ) -> torch.Tensor:
        """View a part in the buffer, shape `(count, tensors, chunk, page)` in units."""
        unit, padded = together.unit, together.page_bytes
        chunk = self._layout.blocks_per_chunk
        return memory.view(unit_types()[unit]).as_strided(
            (count, len(part.cells), chunk, together.pages.shape[1]),
            (part.row_bytes // unit, padded * chunk // unit, padded // unit, 1),
            memory.storage_offset() // unit,
        )

    def _cells(self, part: Part, cell: Cell, count: int, memory: torch.Tensor) -> torch.Tensor:
        """View one tensor's pages in the buffer, shape `(count, chunk, page)` in units."""
        unit = cell.unit
        padded = self._layout.tensors[cell.ref.tensor].page_bytes
        return memory.view(unit_types()[unit]).as_strided(
            (count, self._layout.blocks_per_chunk, cell.ref.page_bytes // unit),
            (part.row_bytes // unit, padded // unit, 1),
            (memory.storage_offset() + cell.offset) // unit,
        )

    def _pages_of(self, cell: Cell) -> torch.Tensor:
        """View the used part of a device tensor's pages, shape `(num_blocks, page)` in units."""
        pages = self._tensors[cell.ref.tensor][:, : cell.ref.page_bytes]
        return pages.view(unit_types()[cell.unit])

    def _stretches(self, part: Part, piece: GroupRows) -> tuple[IntArray, IntArray, IntArray]:
        """Return the copies of a piece: places in arena and buffer, and lengths in bytes."""
        slots = piece.slots[:: self._layout.blocks_per_chunk].astype(np.int64)
        slot_bytes, row_bytes = self._layout.slot_bytes, part.row_bytes
        if part.extents == ((0, 0, slot_bytes),):
            is_head = (np.diff(slots) != 1) | (slots[1:] % self._piece_slots == 0)
            heads = np.flatnonzero(np.concatenate(([True], is_head)))
            runs = np.diff(heads, append=len(slots))
            return slots[heads] * slot_bytes, heads * row_bytes, runs * slot_bytes
        in_slot, in_row, lengths = np.array(part.extents, dtype=np.int64).T
        arena = slots[:, None] * slot_bytes + in_slot
        staged = np.arange(len(slots), dtype=np.int64)[:, None] * row_bytes + in_row
        return arena.ravel(), staged.ravel(), np.tile(lengths, len(slots))

    def _copy_runs(self, rows: GroupRows, way: _Way) -> Iterator[int]:
        """Copy page by page. Adjacent pages are one copy, and no other byte is touched."""
        tensors = np.arange(len(self._tensors), dtype=np.int64)
        copies = self._layout.copy_list([rows], tensors << _TENSOR_SHIFT)
        device, arena, size = merge_adjacent(copies, self._piece_slots * self._layout.slot_bytes)
        return self._cross(arena, device, size, self._pages, way)

    def _cross(
        self, arena: IntArray, device: IntArray, size: IntArray, memory: _Half | _Pages, way: _Way
    ) -> Iterator[int]:
        """Copy stretches between the arena and device memory."""
        if self._batch is not None and self._cross_at_once(arena, device, size, memory, way):
            yield 1
            return
        for to, at, length in zip(arena.tolist(), device.tolist(), size.tolist(), strict=True):
            host, page = self._arena[to : to + length], memory.view(at, length)
            if way.is_store:
                host.copy_(page, non_blocking=True)
            else:
                page.copy_(host, non_blocking=True)
            yield 1

    def _cross_at_once(
        self, arena: IntArray, device: IntArray, size: IntArray, memory: _Half | _Pages, way: _Way
    ) -> bool:
        """Copy in one driver call. If the driver refuses, return False and never ask it again."""
        host, there = arena + self._arena.data_ptr(), memory.addresses(device)
        target, source = (host, there) if way.is_store else (there, host)
        assert self._batch is not None
        targets, sources, sizes = (each.astype(np.uint64) for each in (target, source, size))
        try:
            self._batch(targets, sources, sizes, way.order)
        except RuntimeError as error:
            logger.warning(
                "kvcascade: GPU copies are made one by one from now on, which is slower: %s", error
            )
            self._batch = None
        return self._batch is not None

    def _whole_chunks(self, rows: GroupRows) -> tuple[GroupRows, list[GroupRows]]:
        """Split rows into whole chunks, which are staged, and the rest, which is copied directly.

        The rest is the partial chunks at both ends, or everything in a small job.
        """
        chunk, count = self._layout.blocks_per_chunk, len(rows.blocks)
        if count <= DIRECT_BLOCKS_MAX:
            return _cut(rows, 0, 0), [rows]
        first = min(-int(rows.subs[0]) % chunk, count)
        last = max(first, count - (int(rows.subs[-1]) + 1) % chunk)
        rest = [_cut(rows, 0, first), _cut(rows, last, count)]
        return _cut(rows, first, last), [each for each in rest if len(each.blocks)]

    def _split(self, rows: GroupRows, slots: int) -> list[GroupRows]:
        """Split the rows of whole slots into lists of at most `slots` slots."""
        step, count = slots * self._layout.blocks_per_chunk, len(rows.blocks)
        return [_cut(rows, at, min(at + step, count)) for at in range(0, count, step)]


def _cut(rows: GroupRows, first: int, last: int) -> GroupRows:
    """Return consecutive blocks of a group's rows."""
    return GroupRows(
        rows.group, rows.blocks[first:last], rows.slots[first:last], rows.subs[first:last]
    )


def _between(before: Any, work: Iterator[int], after: Any) -> Iterator[int]:
    """Do work after one event, and record another event behind it."""
    before.wait()
    yield 1
    yield from work
    after.record()
    yield 1
