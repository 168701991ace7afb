"""The cascade for vLLM 0.27 to 0.33: spec, manager and worker of the `get_worker` generation.

Only translation happens here. What differs between those versions is tolerated, not asked for by
version number: arguments that later versions add have defaults, fields that earlier ones lack are
read with `getattr`, and hooks that some versions never call are simply there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    TierFilter,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from . import vllm_facts, vllm_metrics
from .assembly import Cascade, Geometry, WorkerSide, open_cascade, open_worker
from .config import CascadeConfig, parse
from .handlers.device import GpuBlocks
from .identity import is_shareable, weights_identity
from .manager.base import LookupState
from .manager.request import Request
from .tiers.base import BlockHash, BlockStatus, SlotSpec
from .tiers.policies import known_names

logger = logging.getLogger(__name__)


def _log_beside_vllm() -> None:
    """vLLM sets up handlers for its own logger only: our lines shall appear beside its own."""
    ours, theirs = logging.getLogger(__package__), logging.getLogger("vllm")
    if not ours.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.getEffectiveLevel())


_log_beside_vllm()

STATS_INTERVAL_S = 1.0
"""Metrics are sent at most this often: a step must not pay for them."""

_HIT, _MISS, _PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING
_MEDIA = {"CPU": Medium.CPU, "NVME": Medium.STORAGE}


class CascadeLoadStoreSpec(BlockIDsLoadStoreSpec):
    """Slots of the arena; travels from the scheduler to the workers."""


class CascadeManager(OffloadingManager):
    """vLLM's manager interface over the cascade. Called by the scheduler thread."""

    def __init__(self, cascade: Cascade) -> None:
        self._cascade = cascade
        self._manager = cascade.manager
        self._metrics = vllm_metrics.MetricsReader(cascade.manager)
        self._stats_due_s = 0.0
        self._context: ReqContext | None = None
        self._request = Request()
        self._top_get = cascade.manager.top_get
        self._answer = cascade.manager.answered.append
        self._counters = cascade.manager.counters
        self._is_single = cascade.manager.is_single

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Exclusive access to the manager's state (reentrant)."""
        return self._manager.lock

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        # Asked for every block of every waiting request at every step: what can be said without a
        # look at lower tiers is said here, as `lookup_block` does.
        if req_context is not self._context:
            self._switch(req_context)
        status = self._top_get(key)  # type: ignore[arg-type]
        request = self._request
        if status is not None and status.ref_cnt >= 0:
            if request.is_plain or key in request.holds:  # type: ignore[comparison-overlap]
                self._answer(key)  # type: ignore[arg-type]
                return _HIT
        elif status is None and self._is_single:
            self._counters.lookup_misses += 1
            return _MISS
        elif key in request.pending:  # type: ignore[comparison-overlap]
            return _PENDING
        return self._look_below(key, status)  # type: ignore[arg-type]

    def _look_below(self, key: BlockHash, status: BlockStatus | None) -> LookupResult:
        state = self._manager.look_below(key, status, self._request)
        if state is LookupState.MISS:
            return _MISS
        if state is LookupState.HIT:
            return _HIT
        return _PENDING if state is LookupState.PENDING else LookupResult.RETRY

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> Any:
        """Called from 0.32 on, after `prepare_load`; hence the late import."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        source = self._request_of(req_context).sources.get(BlockHash(key), "CPU")
        return CacheHitSource.HOST if source == "CPU" else CacheHitSource.DISK

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        request = self._request_of(req_context)
        return _to_vllm(self._manager.prepare_load(_hashes(keys), request))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._manager.complete_load(cast(Collection[BlockHash], keys))

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Up to 0.30 called at every step of a running request: noted, and counted once."""
        noted = self._request_of(req_context).keys
        for key in _hashes(keys):
            noted.setdefault(key, False)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        output = self._manager.prepare_store(_hashes(keys), self._request_of(req_context))
        if output is None:
            return None
        return PrepareStoreOutput(
            keys_to_store=_keys(output.block_hashes_to_store),
            store_spec=_to_vllm(output.store_spec),
            evicted_keys=_keys(output.block_hashes_evicted),
        )

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        self._manager.complete_store(cast(Collection[BlockHash], keys), success)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._switch(req_context)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._manager.finish_request(self._request_of(req_context))
        self._stats_due_s = 0.0  # an engine that goes idle now shall not sit on its last numbers

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._manager.end_step()
        self._context = None

    def take_events(self) -> Iterable[OffloadingEvent]:
        return [
            OffloadingEvent(
                keys=_keys(list(event.block_hashes)),
                medium=_MEDIA[event.medium],
                removed=event.removed,
            )
            for event in self._manager.take_events()
        ]

    def has_pending_work(self) -> bool:
        return self._manager.has_pending_work()

    def reset_cache(self) -> None:
        self._manager.reset_cache()

    def on_reset_flushed(self) -> None:
        """Called by 0.33 once the workers have ended every job from before the reset."""
        self._manager.on_reset_flushed()

    def get_stats(self) -> Any:
        now_s = time.monotonic()
        if now_s < self._stats_due_s:
            return None
        self._stats_due_s = now_s + STATS_INTERVAL_S
        return self._metrics.read()

    def config_info(self) -> Sequence[dict[str, str]]:
        """Asked by 0.33: labels of the info metric."""
        return [self._cascade.info()]

    def shutdown(self) -> None:
        self._cascade.close()

    def _request_of(self, context: ReqContext) -> Request:
        if context is not self._context:
            self._switch(context)
        return self._request

    def _switch(self, context: ReqContext) -> None:
        """vLLM hands over one context object per request, many calls in a row."""
        request = context.get_state(Request)
        if request is None:
            request = Request(context.req_id, _allowed_media(context))
            context.set_state(request)
        self._context, self._request = context, request
        self._manager.begin_asking(request)


class CascadeWorker(OffloadingWorker):
    """vLLM's worker interface: copies between the device and the arena. Worker main thread."""

    def __init__(self, side: WorkerSide) -> None:
        self._side = side
        self._copier = side.copier

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        assert isinstance(dst_spec, BlockIDsLoadStoreSpec)
        self._copier.submit_store(job_id, _gpu_blocks(src_spec), dst_spec.block_ids)
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        assert isinstance(src_spec, BlockIDsLoadStoreSpec)
        self._copier.submit_load(job_id, _gpu_blocks(dst_spec), src_spec.block_ids)
        return True

    def get_finished(self) -> list[TransferResult]:
        return [
            TransferResult(
                job_id=result.job_id,
                success=result.success,
                transfer_size=result.size_bytes,
                transfer_time=result.time_s,
            )
            for result in self._copier.get_finished()
        ]

    def wait(self, job_ids: set[int]) -> None:
        self._copier.wait(job_ids)

    def shutdown(self) -> None:
        self._side.close()


class CascadeOffloadingSpec(OffloadingSpec):
    """Entry point: `"spec_name": "CascadeOffloadingSpec", "spec_module_path": "kvcascade.spec"`.

    Made once in every worker process and once in the scheduler process, workers first.
    """

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return vllm_metrics.definitions()

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:
        """Asked by 0.33: label names of the info metric."""
        return Cascade.INFO_KEYS

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._settings: CascadeConfig = parse(dict(config.extra_config), known_names())
        self._engine_config = vllm_facts.engine_config()
        self._geometry = _geometry(config)
        self._manager: CascadeManager | None = None
        self._worker: CascadeWorker | None = None

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            facts = _facts(self.config, self._settings, self._engine_config)
            if not is_shareable(facts["weights"]):
                logger.warning(
                    "kvcascade: the weights of %r cannot be identified, so nothing is shared with "
                    "other processes or kept for the next start; set weights_id to change that",
                    self.config.model.name,
                )
            if vllm_facts.hashes_change_at_restart(self._engine_config):
                logger.warning(
                    "kvcascade: this vLLM draws a new block hash seed at every start, so nothing "
                    "on disk will be found again; set the environment variable PYTHONHASHSEED=0"
                )
            cascade = open_cascade(
                self._settings,
                self._geometry,
                self.config.engine_id,
                facts,
                label=self._settings.label or self.config.model.name,
                steps_until_flushed=vllm_facts.pipeline_depth(self._engine_config),
                with_events=self.kv_events_config.enable_kv_cache_events,
            )
            self._manager = CascadeManager(cascade)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            side = open_worker(
                self._settings,
                self._geometry,
                self.config.engine_id,
                rank=self.config.parallel.rank,
                tensors=[tensor.tensor for tensor in kv_caches.tensors],
                groups=[
                    [(ref.tensor_idx, ref.page_size_bytes) for ref in refs]
                    for refs in kv_caches.group_data_refs
                ],
            )
            self._worker = CascadeWorker(side)
        return self._worker


def _geometry(config: OffloadingConfig) -> Geometry:
    return Geometry(
        rank_bytes=config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk,
        world_size=config.parallel.world_size,
        blocks_per_chunk=config.cache.blocks_per_chunk,
    )


def _facts(
    config: OffloadingConfig, settings: CascadeConfig, engine_config: Any | None
) -> dict[str, str]:
    """Every fact of the fingerprint that is known before the workers' tensors are."""
    parallel = config.parallel
    facts = {
        "vllm": ".".join(map(str, vllm_facts.vllm_version())),
        "dtype": config.model.dtype,
        "tokens_per_hash": str(config.cache.tokens_per_hash),
        "blocks_per_chunk": str(config.cache.blocks_per_chunk),
        "rank_bytes": str(config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk),
        "layout": str(getattr(config, "kv_cache_layout", None)),
        "parallel": f"tp{parallel.tp_size} pp{parallel.pp_size} pcp{parallel.pcp_size} "
        f"dcp{parallel.dcp_size} world{parallel.world_size}",
        "label": settings.label,
    }
    for i, group in enumerate(config.groups):
        group_id = getattr(group, "group_id", i)
        layers = ",".join(group.layer_names)
        facts[f"group{group_id}"] = f"{group.tokens_per_block} tokens: {layers}"
    if engine_config is None:
        facts["weights"] = settings.weights_id or weights_identity(config.model.name, None, True)
        return facts
    facts.update(vllm_facts.model_facts(engine_config))
    model, revision, is_real = vllm_facts.weights_facts(engine_config)
    facts["weights"] = settings.weights_id or weights_identity(model, revision, is_real)
    return facts


def _hashes(keys: Collection[OffloadKey]) -> list[BlockHash]:
    """vLLM's keys are our hashes; only the type checker sees a difference."""
    return cast(list[BlockHash], keys if isinstance(keys, list) else list(keys))


def _keys(hashes: list[BlockHash]) -> list[OffloadKey]:
    return cast(list[OffloadKey], hashes)


def _gpu_blocks(spec: GPULoadStoreSpec) -> GpuBlocks:
    return GpuBlocks(spec.block_ids, tuple(spec.group_sizes), tuple(spec.block_indices))


def _to_vllm(spec: object) -> LoadStoreSpec:
    assert isinstance(spec, SlotSpec)
    translated = CascadeLoadStoreSpec([])
    translated.block_ids = np.ascontiguousarray(spec.slots, dtype=np.int32)
    return translated


def _allowed_media(context: ReqContext) -> frozenset[str] | None:
    """Media that a request may read from, from its `kv_load_tiers`; None means all.

    Whatever is allowed comes through the CPU tier, so that one is part of it, as in vLLM's own
    tiers; an empty list means that nothing is loaded.
    """
    load_filter = getattr(context, "load_tier_filter", TierFilter.ALL)
    if load_filter is TierFilter.ALL:
        return None
    allows = load_filter.allows
    allowed = {name for name, medium in _MEDIA.items() if allows(medium, Locality.LOCAL)}
    return frozenset(allowed | {"CPU"}) if allowed else frozenset()
