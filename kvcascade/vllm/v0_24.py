"""The cascade for vLLM 0.24: as for 0.25, but lookups return bool or None, and handlers copy."""

# The pinned vLLM does not have this module.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadKey, ReqContext
from vllm.v1.kv_offload.worker.worker import OffloadingHandler, TransferResult, TransferSpec

from . import v0_25, v0_26
from .generation import LookupResult
from .v0_26 import CascadeLoadStoreSpec

_ANSWERS = {
    LookupResult.HIT: True,
    LookupResult.MISS: False,
    LookupResult.HIT_PENDING: None,
    LookupResult.RETRY: None,
}


class CascadeManagerV24(v0_26.CascadeManager):
    """vLLM's manager interface over the cascade. Called by the scheduler thread."""

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> Any:
        return _ANSWERS[super().lookup(key, req_context)]


class CascadeHandlerV24(OffloadingHandler):
    """Copies between the device and the arena, both directions. Worker main thread."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._types: dict[int, tuple[str, str]] = {}
        """Source and destination medium of each job in flight."""

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        source, target = spec
        self._types[job_id] = source.medium(), target.medium()
        is_store = isinstance(source, GPULoadStoreSpec)
        submit = self._worker.submit_store if is_store else self._worker.submit_load
        return bool(submit(job_id, source, target))

    def get_finished(self) -> list[TransferResult]:
        return [
            TransferResult(
                job_id=result.job_id,
                success=result.success,
                transfer_size=result.transfer_size,
                transfer_time=result.transfer_time,
                transfer_type=self._types.pop(result.job_id),
            )
            for result in self._worker.get_finished()
        ]

    def wait(self, job_ids: set[int]) -> None:
        self._worker.wait(job_ids)

    def shutdown(self) -> None:
        self._worker.shutdown()


class CascadeOffloadingSpec(v0_25.CascadeOffloadingSpec):
    """Entry point: `"spec_name": "CascadeOffloadingSpec", "spec_module_path": "kvcascade.spec"`."""

    manager_type = CascadeManagerV24

    def get_handlers(self, kv_caches: Any) -> Iterator[tuple[Any, Any, OffloadingHandler]]:
        handler = CascadeHandlerV24(self.get_worker(kv_caches))
        yield GPULoadStoreSpec, CascadeLoadStoreSpec, handler
        yield CascadeLoadStoreSpec, GPULoadStoreSpec, handler


__all__ = ["CascadeOffloadingSpec"]
