"""vLLM's own tiering in the real engine on a machine without a GPU, for tests and benchmarks.

vLLM refuses CPU tensors only in the copy between the device and the CPU tier. `CpuDeviceCopier`
replaces that copy. vLLM's manager, tiers, shared region and row layout are unchanged. Use it as
`"spec_name": "CpuTieringSpec", "spec_module_path": "kvcascade.tools.dev.vllm_cpu_tiering"`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from ...handlers.device.device_cpu import CpuDeviceCopier
from ...handlers.device.geometry import PageRef, WorkerLayout
from ...handlers.device.staging import torch_layouts
from ...tiers.cpu.header import ArenaGeometry
from ...vllm.v0_26 import CascadeWorker

COPY_THREADS = 2


class _Side:
    """The parts that `CascadeWorker` requires: a copier, and a method to close it."""

    def __init__(self, copier: CpuDeviceCopier, executor: ThreadPoolExecutor, region: Any) -> None:
        self.copier = copier
        self._executor = executor
        self._region = region

    def close(self) -> None:
        """Wait for transfers, then release the region; idempotent."""
        self.copier.shutdown()
        self._executor.shutdown()
        if self._region is not None:
            self._region.cleanup()
            self._region = None


class CpuTieringSpec(TieringOffloadingSpec):
    """`TieringOffloadingSpec` whose worker copies CPU tensors."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        rank, world = self.config.parallel.rank, self.config.parallel.world_size
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        geometry = ArenaGeometry(self.num_chunks, self.cpu_page_size_per_worker, world)
        assert geometry.slot_bytes == self.kv_bytes_per_chunk, "rows are laid out as ours are"
        tensors = [tensor.tensor for tensor in kv_caches.tensors]
        refs = [
            [PageRef(ref.tensor_idx, ref.page_size_bytes) for ref in group]
            for group in kv_caches.group_data_refs
        ]
        layout = WorkerLayout(torch_layouts(tensors), refs, self.blocks_per_chunk, geometry, rank)
        rows = region.base_tensor.numpy().view(np.uint8).reshape(geometry.slots, -1)
        executor = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="tiering-copy")
        copier = CpuDeviceCopier([t.numpy() for t in tensors], layout, rows, executor)
        return CascadeWorker(_Side(copier, executor, region))  # type: ignore[arg-type]
