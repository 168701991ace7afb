"""The cascade for vLLM 0.25: as for later versions, over the engine's own configuration.

From 0.26 on vLLM hands a spec an `OffloadingConfig`. Here the same facts are taken from the
engine's configuration and from that of its KV cache. Everything else is `v0_26`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from vllm.v1.kv_offload.base import OffloadingSpec

from . import v0_26


class CascadeOffloadingSpec(v0_26.CascadeOffloadingSpec):
    """Entry point: `"spec_name": "CascadeOffloadingSpec", "spec_module_path": "kvcascade.spec"`."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        old: Any = self
        cast(Any, OffloadingSpec).__init__(self, vllm_config, kv_cache_config)
        given = old.extra_config.get("blocks_per_chunk")
        if given is not None:  # the name from 0.26 on; `parse` will check its value
            old.block_size_factor = given
        self.config = _config(old)
        self._set_up(self.config)


def _config(spec: Any) -> Any:
    """Return the part of `OffloadingConfig` that `v0_26` uses.

    It is made from the attributes that vLLM's base class sets on a spec.
    """
    engine, cache = spec.vllm_config, spec.kv_cache_config
    parallel = engine.parallel_config
    groups = zip(spec.gpu_block_size, cache.kv_cache_groups, strict=True)
    return SimpleNamespace(
        groups=[
            SimpleNamespace(tokens_per_block=tokens, layer_names=tuple(group.layer_names))
            for tokens, group in groups
        ],
        worker_kv_bytes_per_block=_device_bytes(cache) // max(1, cache.num_blocks),
        extra_config=spec.extra_config,
        engine_id=str(engine.kv_transfer_config.engine_id),
        model=SimpleNamespace(
            name=str(engine.model_config.model),
            dtype=str(engine.cache_config.cache_dtype).removeprefix("torch."),
        ),
        cache=SimpleNamespace(
            tokens_per_hash=spec.hash_block_size, blocks_per_chunk=spec.block_size_factor
        ),
        parallel=SimpleNamespace(
            rank=parallel.rank % parallel.world_size,  # the scheduler has rank 0
            world_size=parallel.world_size,
            tp_size=parallel.tensor_parallel_size,
            pp_size=parallel.pipeline_parallel_size,
            pcp_size=parallel.prefill_context_parallel_size,
            dcp_size=parallel.decode_context_parallel_size,
        ),
    )


def _device_bytes(cache: Any) -> int:
    """Return the KV bytes of one worker; tensors of a packed layout all share one memory."""
    if any(tensor.block_stride for tensor in cache.kv_cache_tensors):
        return int(cache.kv_cache_tensors[0].size)
    return sum(tensor.size for tensor in cache.kv_cache_tensors)


__all__ = ["CascadeOffloadingSpec"]
