"""The cascade for vLLM 0.25: as for later versions, over the engine's own configuration.

From 0.26 on vLLM hands a spec an `OffloadingConfig`. Here the same facts are taken from the
engine's configuration and from that of its KV cache. Everything else is `v0_26`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from vllm.v1.kv_offload.base import OffloadingSpec

from . import v0_26


@dataclass(frozen=True, slots=True)
class Group:
    """A KV cache group."""

    tokens_per_block: int
    layer_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """Name of the model and type of its KV cache."""

    name: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Cache:
    """Sizes of blocks."""

    tokens_per_hash: int
    blocks_per_chunk: int


@dataclass(frozen=True, slots=True)
class Parallel:
    """This process's rank (0 for the scheduler) and the sizes of all kinds of parallelism."""

    rank: int
    world_size: int
    tp_size: int
    pp_size: int
    pcp_size: int
    dcp_size: int


@dataclass(frozen=True, slots=True)
class Config:
    """The part of vLLM's later `OffloadingConfig` that the adapter uses."""

    groups: tuple[Group, ...]
    worker_kv_bytes_per_block: int
    extra_config: Mapping[str, Any]
    engine_id: str
    model: Model
    cache: Cache
    parallel: Parallel


class CascadeOffloadingSpec(v0_26.CascadeOffloadingSpec):
    """Entry point: `"spec_name": "CascadeOffloadingSpec", "spec_module_path": "kvcascade.spec"`."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        old: Any = self
        cast(Any, OffloadingSpec).__init__(self, vllm_config, kv_cache_config)
        given = old.extra_config.get("blocks_per_chunk")
        if given is not None:  # the name from 0.26 on; `parse` will check its value
            old.block_size_factor = given
        self.config = cast(Any, _config(old))
        self._set_up(self.config)


def _config(spec: Any) -> Config:
    """Make the configuration from the attributes that vLLM's base class sets on a spec."""
    engine, cache = spec.vllm_config, spec.kv_cache_config
    transfer, parallel = engine.kv_transfer_config, engine.parallel_config
    groups = zip(spec.gpu_block_size, cache.kv_cache_groups, strict=True)
    return Config(
        groups=tuple(Group(tokens, tuple(group.layer_names)) for tokens, group in groups),
        worker_kv_bytes_per_block=_device_bytes(cache) // max(1, cache.num_blocks),
        extra_config=spec.extra_config,
        engine_id=str(transfer.engine_id),
        model=Model(
            str(engine.model_config.model),
            str(engine.cache_config.cache_dtype).removeprefix("torch."),
        ),
        cache=Cache(spec.hash_block_size, spec.block_size_factor),
        parallel=Parallel(
            rank=parallel.rank % parallel.world_size,
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
