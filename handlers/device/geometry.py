"""Mapping between device pages and slots of the arena, in numbers only.

One rank's part of a slot is `[tensor 0 | tensor 1 | ...]`. In it each tensor has `blocks_per_chunk`
consecutive padded pages. The page of device block j of the chunk starts at `j * page_bytes`. Each
key of the offloading manager belongs to one KV group and has its own slot. The slot holds the
tensors that the group refers to; the rest of it is unused. Several groups may refer to the same
tensor, and to fewer bytes of a page than the padded page.

Offsets and sizes are in bytes. Everything is immutable and may be shared between threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError
from ...tiers.base import SlotArray
from ...tiers.cpu.header import ArenaGeometry
from .copier import GpuBlocks

IntArray = npt.NDArray[np.int64]

Copies = tuple[IntArray, IntArray, IntArray]
"""Single copies: place of each on the device, its offset from slot 0 of the arena, and its bytes.
Either side may be the source."""

LAYOUT_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Shape of one KV tensor, seen as int8 of shape `(num_blocks, page_bytes)`."""

    num_blocks: int
    page_bytes: int
    """Bytes of a page with its padding."""
    row_stride: int
    """Bytes from one block to the next, at least `page_bytes`."""


@dataclass(frozen=True, slots=True)
class PageRef:
    """Part of a tensor that one layer of a KV group uses."""

    tensor: int
    """Index of the tensor."""
    page_bytes: int
    """Bytes to copy from the start of each page: the page without its padding."""


@dataclass(frozen=True, slots=True)
class GroupRows:
    """One KV group's part of a job, with one element per device block."""

    group: int
    blocks: IntArray
    """Numbers of the device blocks, shape `(n,)`."""
    slots: IntArray
    """Slot of each block's chunk."""
    subs: IntArray
    """Position of each block in its chunk, 0 to `blocks_per_chunk - 1`."""


class WorkerLayout:
    """Mapping of one worker's KV tensors into its part of a slot."""

    def __init__(
        self,
        tensors: Sequence[TensorLayout],
        groups: Sequence[Sequence[PageRef]],
        blocks_per_chunk: int,
        geometry: ArenaGeometry,
        rank: int,
    ) -> None:
        """Describe the worker of one rank in an arena.

        Raises `ConfigError` if the tensors do not fit into `geometry.rank_bytes` or make no sense.
        """
        self.tensors = tuple(tensors)
        self.groups = tuple(_one_ref_per_tensor(refs) for refs in groups)
        self.blocks_per_chunk = blocks_per_chunk
        self.slots = geometry.slots
        self.slot_bytes = geometry.slot_bytes
        self.owns_slot = geometry.world_size == 1
        """True if a slot holds only this worker's part."""
        self.rank_bytes = geometry.rank_bytes
        self._check()
        pages = np.array([0, *(tensor.page_bytes for tensor in tensors)], dtype=np.int64)
        part_offset = rank * geometry.rank_bytes
        self.tensor_offsets: IntArray = part_offset + pages.cumsum()[:-1] * blocks_per_chunk
        """Offset of each tensor's first page in a slot."""

    def rows(self, blocks: GpuBlocks, slots: SlotArray) -> list[GroupRows]:
        """Match device blocks to slots for each group that has blocks.

        The shapes and numbers come from the scheduler, and become addresses. A mismatch is a bug in
        this package or in the engine. It raises an `AssertionError`, under `python -O` too.
        """
        _require(len(blocks.group_sizes) == len(self.groups), "one size per KV group")
        _require(len(blocks.block_indices) == len(self.groups), "one index per KV group")
        _require(sum(blocks.group_sizes) == len(blocks.block_ids), "sizes add up to the blocks")
        chunk = self.blocks_per_chunk
        found: list[GroupRows] = []
        block_at = slot_at = 0
        for group, size in enumerate(blocks.group_sizes):
            if size == 0:
                continue
            skip = blocks.block_indices[group] % chunk
            place = skip + np.arange(size, dtype=np.int64)
            slot_end = slot_at + int(place[-1]) // chunk + 1
            _require(slot_end <= len(slots), "a slot for every chunk")
            if self.groups[group]:  # a pipeline stage may have no layer of a group
                group_slots = slots[slot_at:slot_end].astype(np.int64)
                ids = blocks.block_ids[block_at : block_at + size].astype(np.int64)
                self._check_numbers(group, ids, group_slots)
                found.append(GroupRows(group, ids, group_slots[place // chunk], place % chunk))
            block_at, slot_at = block_at + size, slot_end
        _require(slot_at == len(slots), "no slot is left over")
        return found

    def copy_list(self, rows: Sequence[GroupRows], bases: IntArray) -> Copies:
        """List the single copies, one per block and tensor of its group.

        `bases`: place of each tensor's memory, to which the offsets of its copies are added.
        """
        parts = [self._group_copies(each, bases) for each in rows]
        if not parts:
            none = np.zeros(0, dtype=np.int64)
            return none, none, none
        device, arena, size = (np.concatenate(column) for column in zip(*parts, strict=True))
        return device, arena, size

    def total_bytes(self, rows: Sequence[GroupRows]) -> int:
        """Return the number of bytes that a job moves."""
        return sum(
            len(each.blocks) * sum(ref.page_bytes for ref in self.groups[each.group])
            for each in rows
        )

    def digest(self, packing: str = "") -> bytes:
        """Return 16 bytes that are equal for two workers only if they lay out pages alike.

        `packing` describes how the engine arranges the inside of a page, as far as it is known. The
        digest covers pages, strides, groups and chunk size. It does not cover the number of blocks
        or slots or the position in the slot: they may differ between two runs that share blocks.
        """
        facts = [
            "kvcascade layout 1",
            str(self.blocks_per_chunk),
            ";".join(f"{t.page_bytes},{t.row_stride}" for t in self.tensors),
            *(";".join(f"{r.tensor},{r.page_bytes}" for r in refs) for refs in self.groups),
            *([packing] if packing else []),
        ]
        text = "|".join(facts).encode()
        return hashlib.blake2b(text, digest_size=LAYOUT_DIGEST_BYTES).digest()

    def _group_copies(self, rows: GroupRows, bases: IntArray) -> Copies:
        refs = self.groups[rows.group]
        index = np.array([ref.tensor for ref in refs], dtype=np.int64)
        stride = np.array([self.tensors[ref.tensor].row_stride for ref in refs], dtype=np.int64)
        padded = np.array([self.tensors[ref.tensor].page_bytes for ref in refs], dtype=np.int64)
        sizes = np.array([ref.page_bytes for ref in refs], dtype=np.int64)
        device = bases[index] + rows.blocks[:, None] * stride
        arena = (rows.slots * self.slot_bytes)[:, None] + self.tensor_offsets[index]
        arena = arena + rows.subs[:, None] * padded
        size = np.broadcast_to(sizes, device.shape)
        if self.blocks_per_chunk > 1:  # pages of one tensor are adjacent in the slot
            return device.T.ravel(), arena.T.ravel(), size.T.ravel()
        return device.ravel(), arena.ravel(), size.ravel()

    def _check_numbers(self, group: int, ids: IntArray, slots: IntArray) -> None:
        blocks = min(self.tensors[ref.tensor].num_blocks for ref in self.groups[group])
        _require(0 <= ids.min() and ids.max() < blocks, "device blocks in range")
        _require(0 <= slots.min() and slots.max() < self.slots, "slots in range")

    def _check(self) -> None:
        for tensor in self.tensors:
            if tensor.row_stride < tensor.page_bytes or tensor.page_bytes < 1:
                raise ConfigError(
                    f"KV tensor layout {tensor} overlaps; this KV layout is not supported: "
                    "report it"
                )
        for refs in self.groups:
            for ref in refs:
                fits = 0 <= ref.tensor < len(self.tensors)
                if not fits or not 1 <= ref.page_bytes <= self.tensors[ref.tensor].page_bytes:
                    raise ConfigError(
                        f"KV page {ref} lies outside of its tensor; this KV layout is not "
                        "supported: report it"
                    )
        needed = sum(tensor.page_bytes for tensor in self.tensors) * self.blocks_per_chunk
        if needed > self.rank_bytes:
            raise ConfigError(
                f"the KV tensors of this worker take {needed} bytes per block, the engine "
                f"announced {self.rank_bytes}; this KV layout is not supported: report it"
            )


def merge_adjacent(copies: Copies, piece_bytes: int | None = None) -> Copies:
    """Join copies that are adjacent on both sides. Adjacent places are adjacent in memory.

    With `piece_bytes`, no copies are joined across its multiples in the arena.
    """
    device, arena, size = copies
    if len(size) < 2:
        return copies
    follows = (device[1:] == device[:-1] + size[:-1]) & (arena[1:] == arena[:-1] + size[:-1])
    if piece_bytes is not None:
        follows &= arena[1:] % piece_bytes != 0
    heads = np.flatnonzero(np.concatenate(([True], ~follows)))
    return device[heads], arena[heads], np.add.reduceat(size, heads)


def _one_ref_per_tensor(refs: Sequence[PageRef]) -> tuple[PageRef, ...]:
    """Merge the layers of a group that share a tensor into one copy of their largest page."""
    largest: dict[int, int] = {}
    for ref in refs:
        largest[ref.tensor] = max(largest.get(ref.tensor, 0), ref.page_bytes)
    return tuple(PageRef(tensor, size) for tensor, size in largest.items())


def _require(holds: bool | np.bool_, rule: str) -> None:
    if not holds:
        raise AssertionError(f"a transfer was asked for that breaks a rule: {rule}")
