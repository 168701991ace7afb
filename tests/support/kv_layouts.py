"""KV tensor layouts and a slow, plain model of what a transfer does, for CPU and GPU tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvcascade.handlers.device.copier import GpuBlocks
from kvcascade.handlers.device.geometry import PageRef, TensorLayout, WorkerLayout
from kvcascade.tiers.base import SlotArray
from kvcascade.tiers.cpu.header import ArenaGeometry

Pages = npt.NDArray[np.int8]


@dataclass(frozen=True)
class Case:
    """A layout and how many device blocks and slots there are."""

    pages: tuple[int, ...]
    """Padded page bytes per tensor."""
    gaps: tuple[int, ...]
    """Bytes between the rows of each tensor, beyond the page."""
    groups: tuple[tuple[PageRef, ...], ...]
    chunk: int
    world: int = 1
    rank: int = 0
    spare: int = 0
    """Bytes of the rank's part that no tensor uses."""
    num_blocks: int = 24
    slots: int = 16

    @property
    def geometry(self) -> ArenaGeometry:
        rank_bytes = sum(self.pages) * self.chunk + self.spare
        return ArenaGeometry(self.slots, rank_bytes, self.world)

    @property
    def layout(self) -> WorkerLayout:
        tensors = [
            TensorLayout(self.num_blocks, page, page + gap)
            for page, gap in zip(self.pages, self.gaps, strict=True)
        ]
        return WorkerLayout(tensors, self.groups, self.chunk, self.geometry, self.rank)

    def tensors(self, rng: np.random.Generator) -> list[Pages]:
        """Random KV tensors, as views of larger memory where rows have gaps."""
        found = []
        for page, gap in zip(self.pages, self.gaps, strict=True):
            whole = rng.integers(-128, 128, (self.num_blocks, page + gap), dtype=np.int8)
            found.append(whole[:, :page])
        return found

    def arena(self, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
        """Random slots."""
        shape = (self.slots, self.geometry.slot_bytes)
        return rng.integers(0, 256, shape, dtype=np.uint8)


@dataclass(frozen=True)
class Job:
    """A transfer of some blocks."""

    blocks: GpuBlocks
    slots: SlotArray


def one_group(*pages: int, **more: int) -> Case:
    """A model with one KV group, all of whose layers have a tensor of their own."""
    refs = tuple(PageRef(i, page) for i, page in enumerate(pages))
    chunk = more.pop("chunk", 1)
    return Case(pages, (0,) * len(pages), (refs,), chunk, **more)


def in_one_allocation(tensors: Sequence[Pages], device: str = "cpu") -> list[torch.Tensor]:
    """Copies of the tensors side by side in one storage, as vLLM 0.32 lays its layers."""
    sizes = [len(tensor) * tensor.strides[0] for tensor in tensors]
    memory = torch.zeros(sum(sizes), dtype=torch.int8, device=device)
    found: list[torch.Tensor] = []
    parts: list[torch.Tensor] = memory.split(sizes)  # type: ignore[no-untyped-call]
    for tensor, part in zip(tensors, parts, strict=True):
        found.append(part.view(len(tensor), tensor.strides[0])[:, : tensor.shape[1]])
        found[-1].copy_(torch.from_numpy(np.ascontiguousarray(tensor)))
    return found


NAMED_CASES = {
    "llama": one_group(64, 64, 64, 64),
    "fills_whole_slots": one_group(2048, 2048),
    "odd_pages": one_group(37, 1, 130),
    "chunk_2": one_group(48, 80, chunk=2),
    "chunk_4": one_group(24, 40, chunk=4),
    "one_packed_tensor": one_group(4096, chunk=1),
    "packed_chunks": one_group(1024, chunk=4),
    "strided_rows": Case((40, 96), (24, 8), ((PageRef(0, 40), PageRef(1, 96)),), 2),
    "second_of_two_ranks": one_group(64, 32, chunk=2, world=2, rank=1),
    "first_of_three_ranks": one_group(33, world=3, rank=0),
    "overlay_groups": Case(
        (64, 64),
        (0, 0),
        ((PageRef(0, 64), PageRef(1, 64)), (PageRef(0, 48), PageRef(1, 16))),
        2,
    ),
    "three_groups": Case(
        (32, 64, 16, 8),
        (0, 16, 0, 0),
        ((PageRef(0, 32), PageRef(2, 16)), (PageRef(1, 60),), (PageRef(3, 8), PageRef(0, 5))),
        4,
        spare=100,
    ),
    "shared_tensor_in_group": Case((64,), (0,), ((PageRef(0, 16), PageRef(0, 48)),), 2),
    "group_without_layers": Case((32,), (0,), ((), (PageRef(0, 32),)), 2),
}


def make_job(case: Case, rng: np.random.Generator) -> Job:
    """A random job: distinct blocks and slots, unaligned starts and ends, some adjacent."""
    sizes, starts, needed = [], [], 0
    most = case.num_blocks // len(case.groups)
    for _ in case.groups:
        start = int(rng.integers(0, 9))
        room = (case.slots - needed) * case.chunk - start % case.chunk
        size = int(rng.integers(0, max(min(most, room), 0) + 1))
        sizes.append(size)
        starts.append(start)
        needed += -(-(start % case.chunk + size) // case.chunk) if size else 0
    ids = _shuffle_some(rng, case.num_blocks)[: sum(sizes)]
    slots = _shuffle_some(rng, case.slots)[:needed].astype(np.int32)
    return Job(GpuBlocks.of(ids.tolist(), sizes, starts), slots)


def page_places(case: Case, job: Job) -> list[tuple[int, int, int, int, int]]:
    """Slow and plain: (tensor, block, slot, offset in the slot, bytes) of every page of a job."""
    places = []
    block_at = slot_at = 0
    base = case.rank * case.geometry.rank_bytes
    for group, size in enumerate(job.blocks.group_sizes):
        inside = job.blocks.block_indices[group] % case.chunk
        for i in range(size):
            if i and (inside + i) % case.chunk == 0:
                slot_at += 1
            block = int(job.blocks.block_ids[block_at + i])
            for ref in case.groups[group]:
                offset = base + sum(case.pages[: ref.tensor]) * case.chunk
                offset += (inside + i) % case.chunk * case.pages[ref.tensor]
                slot = int(job.slots[slot_at])
                places.append((ref.tensor, block, slot, offset, ref.page_bytes))
        block_at += size
        slot_at += 1 if size else 0
    return places


def model_store(case: Case, job: Job, tensors: list[Pages], arena: npt.NDArray[np.uint8]) -> None:
    """Do a store page by page."""
    signed = arena.view(np.int8)
    for tensor, block, slot, offset, length in page_places(case, job):
        signed[slot, offset : offset + length] = tensors[tensor][block, :length]


def model_load(case: Case, job: Job, tensors: list[Pages], arena: npt.NDArray[np.uint8]) -> None:
    """Do a load page by page."""
    signed = arena.view(np.int8)
    for tensor, block, slot, offset, length in page_places(case, job):
        tensors[tensor][block, :length] = signed[slot, offset : offset + length]


def written_mask(case: Case, job: Job) -> npt.NDArray[np.bool_]:
    """True for the bytes of the arena that belong to a page of the job."""
    mask = np.zeros((case.slots, case.geometry.slot_bytes), dtype=np.bool_)
    for _, _, slot, offset, length in page_places(case, job):
        mask[slot, offset : offset + length] = True
    return mask


def may_change_mask(case: Case, job: Job) -> npt.NDArray[np.bool_]:
    """True for the bytes that a store may leave undefined: the rank's part of the job's slots.

    Padding at the end of a slot goes with the part where there is one rank.
    """
    mask = np.zeros((case.slots, case.geometry.slot_bytes), dtype=np.bool_)
    start = case.rank * case.geometry.rank_bytes
    end = None if case.world == 1 else start + case.geometry.rank_bytes
    mask[job.slots, start:end] = True
    return mask


def _shuffle_some(rng: np.random.Generator, n: int) -> npt.NDArray[np.int64]:
    """0..n-1 in an order with some runs left whole."""
    runs = np.array_split(np.arange(n), int(rng.integers(1, n)))
    return np.concatenate([runs[i] for i in rng.permutation(len(runs))])
