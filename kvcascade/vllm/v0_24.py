"""The cascade for vLLM 0.24: as for 0.25, but lookups return bool or None, and handlers copy."""

# The pinned vLLM does not have this module.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadKey, ReqContext
from vllm.v1.kv_offload.worker.worker import OffloadingHandler

from . import v0_25, v0_26
from .copy_handler import CascadeHandler
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


class CascadeOffloadingSpec(v0_25.CascadeOffloadingSpec):
    """Entry point: `"spec_name": "CascadeOffloadingSpec", "spec_module_path": "kvcascade.spec"`."""

    manager_type = CascadeManagerV24

    def get_handlers(self, kv_caches: Any) -> Iterator[tuple[Any, Any, OffloadingHandler]]:
        side = self._open_worker(kv_caches)
        handler = CascadeHandler(side, self._geometry.blocks_per_chunk)
        yield GPULoadStoreSpec, CascadeLoadStoreSpec, handler
        yield CascadeLoadStoreSpec, GPULoadStoreSpec, handler


__all__ = ["CascadeOffloadingSpec"]
