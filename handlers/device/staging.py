"""Many small device pages as few large copies: gather on the device, then copy slots as a whole.

For a store, the pages of some slots are gathered on the device into a half of the staging buffer,
laid out like the slots themselves, and cross to the arena from there. A load goes the other way.
Pages large enough, and the partial chunks of a store, are copied one by one. `staging_plan` says
which tensors are staged and where. All copies of a piece are one call of the driver where it has
one for that, and else a copy per slot or run of adjacent slots.

Kernels and copies have a stream each: while one half crosses, the other is filled or emptied. An
event of each half orders the two. On the kernels' stream of a load and on the copies' stream of a
store lies everything that writes to the destination; whoever waits for that stream has waited for
the job. Nothing here waits for the device. Use one object per direction: what it did before is what
orders its buffers. A job is done as it is iterated, so that whoever iterates decides how much of it
the streams are given at a time. Device memory is taken once, by the constructor; a job takes none.
The same code runs on CPU tensors, which is how it is tested on machines without a GPU.

After a store, bytes of a stored slot that belong to no page of its group (padding between pages)
are undefined; bytes of other slots and of other ranks' parts are never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ...logs import get_logger
from ...tiers.cpu.header import round_up
from .batched_copy import Batch
from .geometry import GroupRows, IntArray, TensorLayout, WorkerLayout, merge_adjacent
from .hazards import Direction
from .host_register import slots_per_piece
from .number_uploads import UPLOAD_OPERATIONS, NumberUploads, event_maker
from .staging_plan import DIRECT_RUN_BYTES, Cell, Part, StagingPlan, Together, unit_types
from .stream_feed import Work

if TYPE_CHECKING:
    import torch

logger = get_logger(__name__)

STAGING_BYTES = 64 << 20
"""Device memory for both halves of one direction's staging buffer, at most."""
DIRECT_BLOCKS_MAX = 2
"""Up to this many blocks, launching the gathers costs more than copying page by page."""
STEP_OPERATIONS = 8
"""Operations that are enqueued before whoever iterates is asked again."""

_TENSOR_SHIFT = 44  # keeps tensors apart in `merge_adjacent`; a tensor is below 16 TiB

OnStream = Callable[[], AbstractContextManager[Any]]
"""Makes a context in which a stream is the current one."""


def torch_layouts(tensors: Sequence[torch.Tensor]) -> list[TensorLayout]:
    """Describe KV tensors, int8 of shape `(num_blocks, page_bytes)`, for `WorkerLayout`."""
    return [
        TensorLayout(int(tensor.shape[0]), int(tensor.shape[1]), int(tensor.stride(0)))
        for tensor in tensors
    ]


class _Memory(Protocol):
    """Device memory, by places that are numbers."""

    def view(self, at: int, length: int) -> torch.Tensor:
        """So many bytes from a place on."""
        ...

    def addresses(self, at: IntArray) -> IntArray:
        """Of places."""
        ...


@dataclass(frozen=True, slots=True)
class _Half:
    """A half of the staging buffer; places are offsets in bytes."""

    memory: torch.Tensor
    filled: Any
    """Event: what was staged last is there."""
    emptied: Any
    """Event: it has been taken away."""

    def view(self, at: int, length: int) -> torch.Tensor:
        return self.memory[at : at + length]

    def addresses(self, at: IntArray) -> IntArray:
        return at + self.memory.data_ptr()


class _Pages:
    """Device tensors; a place is (number of the tensor << `_TENSOR_SHIFT`) + offset in bytes."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._starts = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)

    def view(self, at: int, length: int) -> torch.Tensor:
        tensor = self._tensors[at >> _TENSOR_SHIFT]
        start = tensor.storage_offset() + (at & ((1 << _TENSOR_SHIFT) - 1))
        return tensor.as_strided((length,), (1,), start)

    def addresses(self, at: IntArray) -> IntArray:
        offsets: IntArray = at & ((1 << _TENSOR_SHIFT) - 1)
        starts: IntArray = self._starts[at >> _TENSOR_SHIFT]
        return starts + offsets


class StagedCopier:
    """Copies one direction between device tensors and the arena."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        layout: WorkerLayout,
        arena: torch.Tensor,
        *,
        staging_bytes: int = STAGING_BYTES,
        direct_run_bytes: int = DIRECT_RUN_BYTES,
        batch: Batch | None = None,
        on_kernels: OnStream = nullcontext,
        on_copies: OnStream = nullcontext,
    ) -> None:
        """`arena` is int8 of shape `(slots, slot_bytes)` in host memory; pinned for a `batch`."""
        import torch

        # With an output, so that the pages land in the staging buffer whatever its strides.
        self._gather: Any = torch.ops.aten.index.Tensor_out
        self._add: Any = torch.ops.aten.add.out
        self._batch = batch
        self._on_kernels, self._on_copies = on_kernels, on_copies
        self._pages = _Pages(list(tensors))
        self._tensors = list(tensors)
        self._layout = layout
        self._arena = arena.view(-1)
        self._piece_slots = slots_per_piece(layout.slot_bytes)
        """No copy goes beyond a multiple of it: the memory there is registered by itself."""
        device = tensors[0].device
        self._groups = StagingPlan(
            self._tensors, layout, staging_bytes // 2, direct_run_bytes
        ).groups
        parts = [part for group in self._groups for part in group]
        staged = max((part.rows * part.row_bytes for part in parts), default=0)
        halves = torch.zeros((2, round_up(staged, 8)), dtype=torch.int8, device=device)
        make_event = event_maker(device)
        self._halves = [_Half(half, make_event(), make_event()) for half in halves]
        chunk = layout.blocks_per_chunk
        numbers = max((part.rows for part in parts), default=0) * chunk
        self._uploads = NumberUploads(numbers, device)
        joined = [part.rows * chunk * len(part.cells) for part in parts if part.together]
        self._rows = torch.zeros(max(joined, default=0), dtype=torch.int64, device=device)
        """Of a piece, the rows of `Together.pages`."""

    def warm_up(self) -> None:
        """Do on the device what jobs do: kernels are loaded, which takes memory, and errors come
        now. The first page of each tensor is gathered, again and again, and put back: no byte
        changes. A last piece of one row may take kernels of its own."""
        chunk = self._layout.blocks_per_chunk
        memory = self._halves[0].memory
        with self._on_kernels():
            for part in (part for group in self._groups for part in group):
                for rows in sorted({part.rows, 1}):
                    first = np.zeros(rows * chunk, dtype=np.int64)
                    blocks = self._uploads.upload(first).view(rows, chunk)
                    for work in (
                        self._gathered(part, blocks, memory),
                        self._scattered(part, blocks, memory),
                    ):
                        for _ in work:
                            pass

    def store(self, rows: Sequence[GroupRows]) -> Work:
        """Device -> arena for a job, enqueued as it is iterated."""
        return self._move(rows, Direction.STORE)

    def load(self, rows: Sequence[GroupRows]) -> Work:
        """Arena -> device for a job, enqueued as it is iterated."""
        return self._move(rows, Direction.LOAD)

    def _move(self, rows: Sequence[GroupRows], way: Direction) -> Work:
        is_store = way is Direction.STORE
        move_piece = self._store_piece if is_store else self._load_piece
        on_last = self._on_copies if is_store else self._on_kernels
        for each in rows:
            parts = self._groups[each.group]
            whole, rest = self._whole_chunks(each) if parts else (_cut(each, 0, 0), [each])
            for part in parts:
                for piece in self._pieces(part, whole):
                    self._halves.reverse()
                    yield from move_piece(part, piece, self._halves[0])
            for runs in rest:
                yield from _within(on_last, self._copy_runs(runs, way))

    def _store_piece(self, part: Part, piece: GroupRows, half: _Half) -> Work:
        yield from _within(self._on_kernels, self._fill_from_device(part, piece, half))
        yield from _within(self._on_copies, self._empty_to_arena(part, piece, half))

    def _load_piece(self, part: Part, piece: GroupRows, half: _Half) -> Work:
        yield from _within(self._on_copies, self._fill_from_arena(part, piece, half))
        yield from _within(self._on_kernels, self._empty_to_device(part, piece, half))

    def _fill_from_device(self, part: Part, piece: GroupRows, half: _Half) -> Work:
        blocks = self._upload(piece)
        yield UPLOAD_OPERATIONS
        yield from _after(half.emptied)
        yield from self._gathered(part, blocks, half.memory)
        yield from _then(half.filled)

    def _empty_to_arena(self, part: Part, piece: GroupRows, half: _Half) -> Work:
        yield from _after(half.filled)
        yield from self._cross(*self._stretches(part, piece), half, Direction.STORE)
        yield from _then(half.emptied)

    def _fill_from_arena(self, part: Part, piece: GroupRows, half: _Half) -> Work:
        yield from _after(half.emptied)
        yield from self._cross(*self._stretches(part, piece), half, Direction.LOAD)
        yield from _then(half.filled)

    def _empty_to_device(self, part: Part, piece: GroupRows, half: _Half) -> Work:
        blocks = self._upload(piece)
        yield UPLOAD_OPERATIONS
        yield from _after(half.filled)
        yield from self._scattered(part, blocks, half.memory)
        yield from _then(half.emptied)

    def _upload(self, piece: GroupRows) -> torch.Tensor:
        """Its device blocks, on the device: shape `(slots, blocks a chunk)`."""
        chunk = self._layout.blocks_per_chunk
        return self._uploads.upload(piece.blocks).view(len(piece.blocks) // chunk, chunk)

    def _gathered(self, part: Part, blocks: torch.Tensor, memory: torch.Tensor) -> Work:
        """The pages of these blocks, shape `(slots, blocks a chunk)`, into a half of the buffer."""
        if part.together is None:
            for cell in part.cells:
                out = self._cells(part, cell, len(blocks), memory)
                self._gather(self._pages_of(cell), [blocks], out=out)
                yield 1
            return
        rows = self._joined_rows(part.together, blocks)
        yield 1
        out = self._joined_cells(part, part.together, len(blocks), memory)
        self._gather(part.together.pages, [rows], out=out)
        yield 1

    def _scattered(self, part: Part, blocks: torch.Tensor, memory: torch.Tensor) -> Work:
        """`_gathered`, the other way."""
        if part.together is None:
            for cell in part.cells:
                cells = self._cells(part, cell, len(blocks), memory)
                self._pages_of(cell).index_put_((blocks,), cells)
                yield 1
            return
        rows = self._joined_rows(part.together, blocks)
        yield 1
        cells = self._joined_cells(part, part.together, len(blocks), memory)
        part.together.pages.index_put_((rows,), cells)
        yield 1

    def _joined_rows(self, together: Together, blocks: torch.Tensor) -> torch.Tensor:
        """Rows of all tensors for these blocks, shape `(slots, tensors, blocks a chunk)`."""
        count, chunk = blocks.shape
        shape = (count, len(together.starts), chunk)
        rows = self._rows[: count * len(together.starts) * chunk].view(shape)
        self._add(blocks.view(count, 1, chunk), together.starts.view(1, -1, 1), out=rows)
        return rows

    def _joined_cells(
        self, part: Part, together: Together, count: int, memory: torch.Tensor
    ) -> torch.Tensor:
        """All of a part in the buffer: `(count, tensors, chunk, page)` in units."""
        unit, padded = together.unit, together.page_bytes
        chunk = self._layout.blocks_per_chunk
        return memory.view(unit_types()[unit]).as_strided(
            (count, len(part.cells), chunk, together.pages.shape[1]),
            (part.row_bytes // unit, padded * chunk // unit, padded // unit, 1),
            memory.storage_offset() // unit,
        )

    def _cells(self, part: Part, cell: Cell, count: int, memory: torch.Tensor) -> torch.Tensor:
        """One tensor's pages in the buffer, shape `(count, chunk, page)` in units."""
        unit = cell.unit
        padded = self._layout.tensors[cell.ref.tensor].page_bytes
        return memory.view(unit_types()[unit]).as_strided(
            (count, self._layout.blocks_per_chunk, cell.ref.page_bytes // unit),
            (part.row_bytes // unit, padded // unit, 1),
            (memory.storage_offset() + cell.offset) // unit,
        )

    def _pages_of(self, cell: Cell) -> torch.Tensor:
        """The used part of a device tensor's pages, shape `(num_blocks, page)` in units."""
        pages = self._tensors[cell.ref.tensor][:, : cell.ref.page_bytes]
        return pages.view(unit_types()[cell.unit])

    def _stretches(self, part: Part, piece: GroupRows) -> tuple[IntArray, IntArray, IntArray]:
        """What makes up a piece: places in the arena and in the buffer, and lengths in bytes."""
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

    def _copy_runs(self, rows: GroupRows, way: Direction) -> Work:
        """Copy page by page, neighbours joined; exact to the byte."""
        copies = self._layout.copy_list([rows])
        device, arena, size = merge_adjacent(
            (copies.tensor << _TENSOR_SHIFT) + copies.device,
            copies.arena,
            copies.size,
            self._piece_slots * self._layout.slot_bytes,
        )
        return self._cross(arena, device, size, self._pages, way)

    def _cross(
        self, arena: IntArray, device: IntArray, size: IntArray, memory: _Memory, way: Direction
    ) -> Work:
        """Copy stretches between the arena and device memory."""
        if self._batch is not None and self._cross_at_once(arena, device, size, memory, way):
            yield 1
            return
        for to, at, length in zip(arena.tolist(), device.tolist(), size.tolist(), strict=True):
            host, page = self._arena[to : to + length], memory.view(at, length)
            if way is Direction.STORE:
                host.copy_(page, non_blocking=True)
            else:
                page.copy_(host, non_blocking=True)
            yield 1

    def _cross_at_once(
        self, arena: IntArray, device: IntArray, size: IntArray, memory: _Memory, way: Direction
    ) -> bool:
        """In one call; False if the driver refuses, which is not asked again then."""
        host, there = arena + self._arena.data_ptr(), memory.addresses(device)
        target, source = (host, there) if way is Direction.STORE else (there, host)
        assert self._batch is not None
        targets, sources, sizes = (each.astype(np.uint64) for each in (target, source, size))
        try:
            self._batch(targets, sources, sizes, way)
        except RuntimeError as error:
            logger.warning(
                "kvcascade: GPU copies are made one by one from now on, which is slower: %s", error
            )
            self._batch = None
        return self._batch is not None

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

    def _pieces(self, part: Part, rows: GroupRows) -> list[GroupRows]:
        """As many slots at a time as are staged."""
        step, count = part.rows * self._layout.blocks_per_chunk, len(rows.blocks)
        return [_cut(rows, at, min(at + step, count)) for at in range(0, count, step)]


def _cut(rows: GroupRows, first: int, last: int) -> GroupRows:
    """Some consecutive blocks of a group's rows."""
    return GroupRows(
        rows.group, rows.blocks[first:last], rows.slots[first:last], rows.subs[first:last]
    )


def _within(on_stream: OnStream, work: Work) -> Work:
    """Work that is done with that stream, whatever the one who iterates has set.

    Some steps at a time, as setting the stream takes as long as enqueuing an operation.
    """
    while True:
        operations = 0
        with on_stream():
            for step in work:
                operations += step
                if operations >= STEP_OPERATIONS:
                    break
        if not operations:
            return
        yield operations


def _after(event: Any) -> Work:
    event.wait()
    yield 1


def _then(event: Any) -> Work:
    event.record()
    yield 1
