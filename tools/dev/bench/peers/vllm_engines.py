"""Two engines without a model: kvcascade's and vLLM's specs over memory in place of a device.

All parts between the scheduler's calls and the disk are real. On our side these are spec, manager,
worker, arena and NVMe tier. On vLLM's side they are `TieringOffloadingSpec`, its manager and its
`fs` tier. Only vLLM's copy between device and CPU, which refuses CPU tensors, is replaced by a
tensor copy on a separate thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingManager,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from .....assembly.node_parts import OpenTier
from .....vllm.v0_26 import CascadeManager, CascadeOffloadingSpec, CascadeWorker
from ....commands.path_blocks import open_path

TOKENS_PER_BLOCK = 16
_engines = count()


class Engine(ABC):
    """An engine over a device tensor of shape `(blocks, block_bytes)`."""

    manager: OffloadingManager

    def __init__(self, device: torch.Tensor) -> None:
        self.device = device

    @abstractmethod
    def store(self, blocks: Sequence[int], target: LoadStoreSpec) -> None:
        """Copy device blocks to the CPU; return at the end of the copy."""

    @abstractmethod
    def load(self, blocks: Sequence[int], source: LoadStoreSpec) -> int:
        """Start to copy to device blocks; return a number that `loaded` reports."""

    @abstractmethod
    def loaded(self) -> list[int]:
        """Return the numbers of the loads that ended since the last call."""

    @abstractmethod
    def on_disk(self) -> int:
        """Return the blocks that reached the disk since the engine was opened; may be 0 until all
        have."""

    def blocks_per_path(self) -> list[int]:
        """Return the number of blocks in each path; empty if there is only one path."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Shut down in the engine's order: workers first."""


class OurEngine(Engine):
    """The engine of kvcascade."""

    def __init__(
        self,
        device: torch.Tensor,
        cpu_blocks: int,
        folders: Sequence[Path],
        disk_bytes: int,
        weights: str = "bench",
    ) -> None:
        """Open the engine; `weights` names the weights."""
        super().__init__(device)
        self._folders = list(folders)
        block_bytes = device.shape[1]
        extra = {
            "tiers": [
                {"type": "cpu", "capacity": cpu_blocks * block_bytes},
                {
                    "type": "nvme",
                    "capacity": disk_bytes,
                    "path": [str(folder) for folder in folders],
                    "min_free": 0,
                },
            ],
            "write_mode": "through",
            "weights_id": weights,
        }
        config = offloading_config(block_bytes, extra)
        pages = CanonicalKVCaches(
            [CanonicalKVCacheTensor(device, block_bytes)], [[CanonicalKVCacheRef(0, block_bytes)]]
        )
        worker = CascadeOffloadingSpec(config).get_worker(pages)
        assert isinstance(worker, CascadeWorker)
        self._worker = worker
        try:
            manager = CascadeOffloadingSpec(config).get_manager()
        except BaseException:
            worker.shutdown()
            raise
        assert isinstance(manager, CascadeManager)
        self.manager = manager
        self._cascade = manager._cascade
        self._jobs = count()

    def store(self, blocks: Sequence[int], target: LoadStoreSpec) -> None:
        number = next(self._jobs)
        self._worker.submit_store(number, _device_blocks(blocks), target)
        self._worker.wait({number})
        self._worker.get_finished()

    def load(self, blocks: Sequence[int], source: LoadStoreSpec) -> int:
        number = next(self._jobs)
        self._worker.submit_load(number, source, _device_blocks(blocks))
        return number

    def loaded(self) -> list[int]:
        return [result.job_id for result in self._worker.get_finished()]

    def on_disk(self) -> int:
        return self._cascade.manager.counters.links[0].demoted_blocks

    def blocks_per_path(self) -> list[int]:
        (node,) = self._cascade.below
        assert isinstance(node, OpenTier)
        home = node.folder
        if home is None:
            return []
        with open_path(home) as path:
            namespace = path.namespace(home.name)
            found = [0] * len(namespace.folders)
            for block in path.blocks(home.name):
                found[block.slot // namespace.layout.slots % len(found)] += 1
        return found

    def close(self) -> None:
        self._worker.shutdown()
        self.manager.shutdown()


class VllmEngine(Engine):
    """vLLM's tiering with its `fs` tier, with default options."""

    def __init__(self, device: torch.Tensor, cpu_blocks: int, folder: Path) -> None:
        super().__init__(device)
        block_bytes = device.shape[1]
        extra = {
            "cpu_bytes_to_use": cpu_blocks * block_bytes,
            "secondary_tiers": [{"type": "fs", "root_dir": str(folder)}],
        }
        self._spec = TieringOffloadingSpec(offloading_config(block_bytes, extra))
        self.manager = self._spec.get_manager()
        region = self._spec._scheduler_mmap
        assert region is not None
        self._memory = region.base_tensor.view(-1, block_bytes)
        self._executor = ThreadPoolExecutor(1)
        self._running: dict[int, Future[None]] = {}
        self._jobs = count()
        self._stored = 0

    def store(self, blocks: Sequence[int], target: LoadStoreSpec) -> None:
        assert isinstance(target, CPULoadStoreSpec)
        _copy(self._memory, target.chunk_ids.tolist(), self.device, blocks)
        self._stored += len(blocks)

    def load(self, blocks: Sequence[int], source: LoadStoreSpec) -> int:
        assert isinstance(source, CPULoadStoreSpec)
        number = next(self._jobs)
        ids = source.chunk_ids.tolist()
        self._running[number] = self._executor.submit(_copy, self.device, blocks, self._memory, ids)
        return number

    def loaded(self) -> list[int]:
        ended = [number for number, future in self._running.items() if future.done()]
        for number in ended:
            self._running.pop(number).result()
        return ended

    def on_disk(self) -> int:
        return 0 if self.manager.has_pending_work() else self._stored

    def close(self) -> None:
        self._executor.shutdown()
        del self._memory
        self.manager.shutdown()


def _copy(target: torch.Tensor, to: Sequence[int], source: torch.Tensor, of: Sequence[int]) -> None:
    """Copy rows; rows that are adjacent on both sides are copied together."""
    start = 0
    for i in range(1, len(to) + 1):
        is_next = i < len(to) and to[i] == to[i - 1] + 1 and of[i] == of[i - 1] + 1
        if not is_next:
            a, b, n = int(to[start]), int(of[start]), i - start
            target[a : a + n].copy_(source[b : b + n])
            start = i


def _device_blocks(blocks: Sequence[int]) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(list(blocks), group_sizes=[len(blocks)], block_indices=[0])


def offloading_config(block_bytes: int, extra: dict[str, Any]) -> OffloadingConfig:
    """Return the configuration that vLLM passes to a spec, for one worker and one KV group."""
    group = _make(
        OffloadingGroupConfig,
        tokens_per_block=TOKENS_PER_BLOCK,
        layer_names=("layer",),
        group_id=0,
        sliding_window_size_in_chunks=None,
    )
    parallel = _make(
        OffloadingParallelConfig,
        rank=0,
        world_size=1,
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=False,
    )
    made: OffloadingConfig = _make(
        OffloadingConfig,
        groups=(group,),
        worker_kv_bytes_per_block=block_bytes,
        enable_kv_cache_events=False,
        extra_config=extra,
        engine_id=f"bench-{next(_engines)}-{id(extra):x}",
        model=_make(OffloadingModelConfig, name="bench/model", dtype="float16", max_model_len=4096),
        cache=OffloadingCacheConfig(TOKENS_PER_BLOCK, 1),
        parallel=parallel,
        kv_cache_layout="LBHNC",
    )
    return made


def _make(kind: Any, **values: Any) -> Any:
    """Create a configuration of any version; fields that the version lacks are left out."""
    known = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in known})
