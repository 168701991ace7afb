"""vLLM's own worker for CPU offloading as a contender, without an engine.

It is created like `CPUOffloadingSpec` creates it for the only rank of an engine: over a pinned
region of shared memory with one row per block. The spec itself requires a process group.
"""

from __future__ import annotations

import os
from collections.abc import Sequence, Set
from itertools import count

import torch
from vllm.utils.math_utils import round_up
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from .....handlers.device.copier import DeviceCopier, Direction, GpuBlocks, TransferResult
from .....tiers.base import SlotArray

_regions = count()


class VllmCopier(DeviceCopier):
    """Copies between tensors of shape `(blocks, page_bytes)` and vLLM's region."""

    def __init__(self, tensors: Sequence[torch.Tensor], slots: int) -> None:
        pages = [CanonicalKVCacheTensor(tensor, tensor.shape[1]) for tensor in tensors]
        sizes = [page.page_size_bytes for page in pages]
        refs = [CanonicalKVCacheRef(number, size) for number, size in enumerate(sizes)]
        region = SharedOffloadRegion(
            engine_id=f"bench-gpu-{os.getpid()}-{next(_regions)}",
            num_chunks=slots,
            rank=0,
            kv_bytes_per_chunk=round_up(sum(sizes), SharedOffloadRegion.BLOCK_SIZE_ALIGNMENT),
            cpu_page_size=sum(sizes),
            barrier=lambda: None,  # no other process joins: the file is unlinked
        )
        try:
            self._worker = CPUOffloadingWorker(CanonicalKVCaches(pages, [refs]), 1, slots, region)
        except BaseException:
            region.cleanup()
            raise
        self.is_pinned = region.is_pinned
        self._blocks: GpuBlocks | None = None
        self._last: tuple[GPULoadStoreSpec, CPULoadStoreSpec]

    def submit(
        self, direction: Direction, job_id: int, blocks: GpuBlocks, slots: SlotArray
    ) -> bool:
        device, cpu = self._specs(blocks, slots)
        if direction is Direction.STORE:
            return self._worker.submit_store(job_id, device, cpu)
        return self._worker.submit_load(job_id, cpu, device)

    def get_finished(self) -> list[TransferResult]:
        return [
            TransferResult(
                result.job_id,
                result.success,
                result.transfer_size or 0,
                result.transfer_time or 0.0,
            )
            for result in self._worker.get_finished()
        ]

    def wait(self, job_ids: Set[int]) -> None:
        self._worker.wait(set(job_ids))

    def shutdown(self, deadline_s: float = 5.0) -> None:
        self._worker.shutdown()

    def _specs(
        self, blocks: GpuBlocks, slots: SlotArray
    ) -> tuple[GPULoadStoreSpec, CPULoadStoreSpec]:
        """Return the specs of a transfer, cached if it repeats.

        In an engine the scheduler creates them, so the worker's thread does not pay for it.
        """
        if blocks is not self._blocks:
            ids, sizes, places = blocks.block_ids.tolist(), blocks.group_sizes, blocks.block_indices
            device = GPULoadStoreSpec(ids, group_sizes=sizes, block_indices=places)
            self._blocks, self._last = blocks, (device, CPULoadStoreSpec(slots.tolist()))
        return self._last
