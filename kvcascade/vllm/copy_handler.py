"""vLLM's handler interface, up to 0.24: copies between the device and the arena."""

# The pinned vLLM does not have this module.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.kv_offload.worker.worker import OffloadingHandler, TransferResult, TransferSpec

from ..assembly.build import WorkerSide
from ..handlers.device.copier import GpuBlocks

_DEVICE = "GPU"
"""Medium of vLLM's specs of device blocks."""


class CascadeHandler(OffloadingHandler):
    """Copies both directions. Worker main thread."""

    def __init__(self, side: WorkerSide, blocks_per_chunk: int) -> None:
        self._side = side
        self._copier = side.copier
        self._blocks_per_chunk = blocks_per_chunk
        self._types: dict[int, tuple[str, str]] = {}
        """Source and destination medium of each job in flight."""

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        source: Any
        target: Any
        source, target = spec
        self._types[job_id] = source.medium(), target.medium()
        if source.medium() == _DEVICE:
            self._copier.submit_store(job_id, self._blocks(source), _slots(target))
        else:
            self._copier.submit_load(job_id, self._blocks(target), _slots(source))
        return True

    def get_finished(self) -> list[TransferResult]:
        return [
            TransferResult(
                job_id=result.job_id,
                success=result.success,
                transfer_size=result.size_bytes,
                transfer_time=result.time_s,
                transfer_type=self._types.pop(result.job_id),
            )
            for result in self._copier.get_finished()
        ]

    def wait(self, job_ids: set[int]) -> None:
        self._copier.wait(job_ids)

    def shutdown(self) -> None:
        """Called by 0.24; idempotent."""
        self._side.close()

    def _blocks(self, spec: Any) -> GpuBlocks:
        """Return the device blocks of a transfer.

        A store covers whole chunks. A load ends at the end of a chunk and may begin within one;
        versions that do not state where it begins leave that to be counted from the end.
        """
        ids = spec.block_ids.astype(np.int32)
        sizes = tuple(getattr(spec, "group_sizes", None) or (len(ids),))
        indices = getattr(spec, "block_indices", None) or (-len(ids) % self._blocks_per_chunk,)
        return GpuBlocks(ids, sizes, tuple(indices))


def _slots(spec: Any) -> Any:
    return spec.block_ids.astype(np.int32, copy=False)
