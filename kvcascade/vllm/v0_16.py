"""The cascade for vLLM 0.16 to 0.19: spec, manager and handlers of the generation of block hashes.

Only translation happens here. This generation does not name requests; `AnonymousManager` makes up
for that. Its versions differ in three ways, which are told apart by looking at the objects:

- KV caches are a dictionary of the backends' own tensors (to 0.18) or already pages (0.19);
- block sizes have two sets of names;
- lists of device blocks carry their groups or not.

vLLM does not close a spec of this generation, so both halves close themselves when the process
ends. Its engine makes no steps for the stores of finished requests: it may go to sleep, and discard
their pages, while stores are in flight.
"""

# The pinned vLLM does not have these modules.
# pyright: reportMissingImports=false

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from vllm.v1.kv_offload.abstract import (
    LoadStoreSpec,
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
)
from vllm.v1.kv_offload.mediums import BlockIDsLoadStoreSpec, GPULoadStoreSpec
from vllm.v1.kv_offload.spec import OffloadingSpec
from vllm.v1.kv_offload.worker.worker import OffloadingHandler

from ..assembly.build import Cascade, Geometry, open_worker
from ..assembly.named import configured
from ..config.schema import CascadeConfig
from ..errors import ConfigError
from ..handlers.node.node_keeper import at_own_exit
from ..logs import get_logger
from ..manager.promotion.anonymous import AnonymousManager
from ..tiers.base import SlotArray
from . import engine_facts, kv_pages
from .copy_handler import CascadeHandler
from .kv_layers import group_specs
from .packing import group_facts, packing_of_layers
from .refusals import keeps_every_block, refuse_records
from .scheduler_side import log_beside_vllm, namespace_key, open_scheduler_side

log_beside_vllm()
logger = get_logger(__name__)

_AFTER_WORKERS = "update_connector_output"
"""The connector's method that calls `complete_store` once every worker has reported.

If another method calls `complete_store`, for a preempted request, workers may still be reading."""


class CascadeLoadStoreSpecV16(BlockIDsLoadStoreSpec):
    """Slots of the arena, as sent from the scheduler to the workers."""

    @staticmethod
    def medium() -> str:
        return "CPU"


class CascadeManagerV16(OffloadingManager):
    """vLLM's manager interface over the cascade. Called by the scheduler thread."""

    def __init__(self, cascade: Cascade, tokens_per_block: int, steps_until_done: int) -> None:
        """`steps_until_done`: steps after which workers have ended a step's transfers."""
        self._cascade = cascade
        self._tokens_per_block = tokens_per_block
        self._requests = AnonymousManager(cascade.manager, steps_until_done)

    def lookup(self, block_hashes: Iterable[Any]) -> int | None:
        return self._requests.lookup(block_hashes)

    def prepare_load(self, block_hashes: Iterable[Any]) -> LoadStoreSpec:
        return _to_vllm(self._requests.prepare_load(block_hashes).slots)

    def touch(self, block_hashes: Iterable[Any]) -> None:
        self._requests.touch(block_hashes)

    def complete_load(self, block_hashes: Iterable[Any]) -> None:
        self._requests.complete_load(block_hashes)

    def prepare_store(self, block_hashes: Iterable[Any]) -> PrepareStoreOutput | None:
        output = self._requests.prepare_store(block_hashes)
        if output is None:
            return None
        return PrepareStoreOutput(
            block_hashes_to_store=output.block_hashes_to_store,
            store_spec=_to_vllm(output.store_spec.slots),
            block_hashes_evicted=output.block_hashes_evicted,
        )

    def complete_store(self, block_hashes: Iterable[Any], success: bool = True) -> None:
        is_done = sys._getframe(1).f_code.co_name == _AFTER_WORKERS
        self._requests.complete_store(block_hashes, success, is_done=is_done)

    def take_events(self) -> Iterable[OffloadingEvent]:
        return [
            OffloadingEvent(
                block_hashes=list(event.block_hashes),
                block_size=self._tokens_per_block,
                medium=event.medium,
                removed=event.removed,
            )
            for event in self._requests.take_events()
        ]

    def close(self) -> None:
        """Write what is dirty and close every tier; idempotent."""
        self._requests.workers_ended()
        self._cascade.close()


class CascadeOffloadingSpec(OffloadingSpec):
    """Entry point: `"spec_name": "CascadeOffloadingSpec", "spec_module_path": "kvcascade.spec"`.

    vLLM makes one in every worker, then one for the scheduler, which may be in the same process.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, kv_cache_config)
        self._settings: CascadeConfig = configured(self.extra_config)
        refuse_records(self._settings)
        _warn_of_what_is_missing(self._settings, self.extra_config)
        self._apply_blocks_per_chunk()
        self._geometry = self._make_geometry()
        self._engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self._manager: CascadeManagerV16 | None = None
        self._handler: CascadeHandler | None = None

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            config = self.vllm_config
            events = config.kv_events_config
            model = str(config.model_config.model)
            cascade = open_scheduler_side(
                self._settings,
                self._geometry,
                self._engine_id,
                namespace_key(self._settings, config, model, self._shape()),
                config,
                with_events=events is not None and events.enable_kv_cache_events,
                waits_for_stores=False,
            )
            depth = engine_facts.pipeline_depth(config)
            self._manager = CascadeManagerV16(cascade, self._tokens_per_chunk, depth)
            at_own_exit(self._manager.close)
        return self._manager

    def get_handlers(
        self, kv_caches: Any, attn_backends: Mapping[str, Any] | None = None
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        if self._handler is None:
            if isinstance(kv_caches, Mapping):
                pages = kv_pages.from_tensors(
                    kv_caches, attn_backends or {}, self.kv_cache_config.num_blocks
                )
            else:
                pages = kv_pages.from_canonical(kv_caches)
            side = open_worker(
                self._settings,
                self._geometry,
                self._engine_id,
                rank=self.vllm_config.parallel_config.rank % self._geometry.world_size,
                tensors=pages.tensors,
                groups=pages.groups,
                packing=packing_of_layers(
                    self.vllm_config,
                    [self.kv_cache_config.kv_cache_groups[0].layer_names],
                    pages.num_blocks,
                ),
                steps_while_storing=False,
            )
            self._handler = CascadeHandler(side, self._geometry.blocks_per_chunk)
            at_own_exit(self._handler.shutdown)
        yield GPULoadStoreSpec, CascadeLoadStoreSpecV16, self._handler
        yield CascadeLoadStoreSpecV16, GPULoadStoreSpec, self._handler

    @property
    def _tokens_per_block(self) -> int:
        """Tokens of one device block; vLLM gives one number, or one per group for the one group."""
        size: Any = self.gpu_block_size
        return int(size) if isinstance(size, int) else int(size[0])

    @property
    def _tokens_per_chunk(self) -> int:
        factor = getattr(self, "block_size_factor", None)
        if factor is not None:
            return int(factor) * self._tokens_per_block
        return int(self.offloaded_block_size)

    def _apply_blocks_per_chunk(self) -> None:
        """Apply `blocks_per_chunk`, a key of later versions; `parse` has checked its value."""
        given = self.extra_config.get("blocks_per_chunk")
        if given is None:
            return
        if hasattr(self, "block_size_factor"):
            self.block_size_factor = given
        else:
            self.offloaded_block_size = given * self._tokens_per_block

    def _make_geometry(self) -> Geometry:
        cache = self.kv_cache_config
        if cache is None or len(cache.kv_cache_groups) != 1:
            raise ConfigError(
                "kvcascade needs vLLM 0.24 or newer for a model with several KV cache groups; "
                "upgrade vLLM, or disable the hybrid KV cache manager"
            )
        if not all(keeps_every_block(spec) for _, spec in group_specs(cache, [0])):
            raise ConfigError(
                "kvcascade needs vLLM 0.24 or newer for a model whose layers all keep a window or "
                "a state only, because older ones store gaps as blocks; upgrade vLLM"
            )
        block_bytes = sum(tensor.size for tensor in cache.kv_cache_tensors) // cache.num_blocks
        blocks_per_chunk = self._tokens_per_chunk // self._tokens_per_block
        return Geometry(
            rank_bytes=block_bytes * blocks_per_chunk,
            world_size=self.vllm_config.parallel_config.world_size,
            blocks_per_chunk=blocks_per_chunk,
            tokens_per_block=self._tokens_per_chunk if _knows_prefill(self._settings) else 0.0,
        )

    def _shape(self) -> dict[str, str]:
        """Return the facts of the fingerprint about blocks and parallelism."""
        parallel, model = self.vllm_config.parallel_config, self.vllm_config.model_config
        (group,) = self.kv_cache_config.kv_cache_groups
        return {
            "dtype": str(model.dtype).rpartition(".")[2],
            "tokens_per_hash": str(self.vllm_config.cache_config.block_size),
            "blocks_per_chunk": str(self._geometry.blocks_per_chunk),
            "rank_bytes": str(self._geometry.rank_bytes),
            "parallel": f"tp{parallel.tensor_parallel_size} pp{parallel.pipeline_parallel_size} "
            f"dcp{parallel.decode_context_parallel_size} world{parallel.world_size}",
            "group0": f"{self._tokens_per_block} tokens: {','.join(group.layer_names)}",
            **group_facts(self.kv_cache_config, [0]),
        }


def _knows_prefill(settings: CascadeConfig) -> bool:
    """Return whether the speed of prefill is known, which load-or-recompute depends on.

    It must be configured: these versions do not show their steps, so it cannot be measured.
    """
    return settings.prefill_tokens_per_s is not None


def _warn_of_what_is_missing(settings: CascadeConfig, given: Mapping[str, Any]) -> None:
    """Warn of options that work in part."""
    if given.get("load_or_recompute") and not _knows_prefill(settings):
        logger.warning(
            "kvcascade: load_or_recompute has no effect, because vLLM 0.16 to 0.19 do not show how "
            "fast they compute; give prefill_tokens_per_s, or install vLLM 0.24 or newer"
        )


def _to_vllm(slots: SlotArray) -> LoadStoreSpec:
    return CascadeLoadStoreSpecV16(slots.tolist())


__all__ = ["CascadeManagerV16", "CascadeOffloadingSpec"]
