"""The cascade for vLLM 0.26 to 0.33: spec, manager and worker of the `get_worker` generation.

Only translation happens here. Differences between these versions are tolerated. Arguments that
later versions add have defaults. Fields that earlier versions lack are read with `getattr`. Hooks
that some versions never call are defined all the same. All other differences are in `generation`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from statistics import harmonic_mean
from typing import TYPE_CHECKING, Any, cast

from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingEvent,
    OffloadingManager,
    OffloadingSpec,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    make_offload_key,
)

from ..assembly.build import Cascade, Geometry, WorkerSide, open_worker
from ..assembly.named import configured
from ..config.schema import CascadeConfig, OnReset
from ..handlers.device.copier import GpuBlocks
from ..handlers.node.node_keeper import close_at_exit
from ..manager.base import HIT, MISS, PENDING, BlockEvent
from ..manager.promotion.standstill import Standstill
from ..manager.request import Request
from ..tiers.base import GROUP_BYTES, BlockHash
from . import engine_facts, offload_metrics
from .generation import (
    KEY_POSITIONS,
    Locality,
    LookupResult,
    Medium,
    OffloadingWorker,
    TierFilter,
    TransferResult,
    known_fields,
    schedules_block_holders_first,
    set_state,
    state_of,
)
from .kv_layers import (
    about_blocks,
    full_attention_group,
    groups_of_windows,
    groups_offered_once,
    layer_names,
    numbered_groups,
)
from .kv_pages import from_canonical, require_whole
from .packing import group_facts, packing_of_layers
from .refusals import refuse_wrong_stores
from .scheduler_side import log_beside_vllm, namespace_key, open_scheduler_side

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import ScheduleEndContext
    from vllm.v1.kv_offload.config import OffloadingConfig

log_beside_vllm()

_HIT, _MISS, _PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING
_ROW_LAYOUTS = ("replicated_layout", "canonical_layout")
"""Options of vLLM's tiering that put the same bytes of a block in another order."""
_PAGE_ORDER = "VLLM_KV_CACHE_LAYOUT"
_MEDIA = {
    "CPU": (Medium.CPU, Locality.LOCAL),
    "NVME": (Medium.STORAGE, Locality.LOCAL),
    "REMOTE": (Medium.STORAGE, Locality.REMOTE),
}


class CascadeLoadStoreSpec(BlockIDsLoadStoreSpec):
    """Slots of the arena, as sent from the scheduler to the workers."""

    @staticmethod
    def medium() -> str:
        """Called up to 0.25."""
        return "CPU"


class CascadeManager(OffloadingManager):
    """vLLM's manager interface over the cascade. Called by the scheduler thread."""

    def __init__(
        self, cascade: Cascade, tokens_per_block: float = 0.0, window_ends: Collection[bytes] = ()
    ) -> None:
        """`tokens_per_block`: prompt tokens that one served block saves. `window_ends`: ends of the
        keys of groups with a window or states."""
        self._cascade = cascade
        self._manager = cascade.manager
        self._metrics = offload_metrics.MetricsReader(
            cascade.manager, tokens_per_block, time.monotonic
        )
        self._standstill = None if schedules_block_holders_first() else Standstill()
        self._context: ReqContext | None = None
        self._request = Request()
        self._lookups = cascade.manager.lookups
        self._top_get = self._lookups.top_get
        self._answers = self._lookups.answers
        self._ready_at = self._lookups.answers.ready_at
        self._is_single = self._lookups.is_single
        self._is_deferred = False
        """True while lookups are for a request that the engine must look up again later."""
        self._deferred_group = b""
        """KV group of the last key that was looked up for such a request."""
        self._window_ends = frozenset(window_ends)
        self._was_reset = False
        """True in the first step after a reset that keeps the blocks."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Exclusive access to the manager's state (reentrant)."""
        return self._manager.lock

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        # Called for every block of every waiting request at every step. The quick answers of
        # `lookup_block` are repeated inline.
        if req_context is not self._context:
            if self._standstill is not None and self._standstill.must_defer():
                return LookupResult.RETRY
            self._switch(req_context, key)
        if self._is_deferred:
            return self._defer(key)
        answers = self._answers
        at = answers.at
        if self._ready_at[at] == key:  # type: ignore[comparison-overlap]
            answers.at = at + 1
            return _HIT
        request = self._request
        if request.holds and key in request.holds:  # type: ignore[comparison-overlap]
            answers.hit(key)  # type: ignore[arg-type]
            return _HIT
        status = self._top_get(key)  # type: ignore[arg-type]
        if status is not None:
            state = self._lookups.lookup_block(key, request)  # type: ignore[arg-type]
        elif self._is_single:
            answers.misses += 1
            return _MISS
        else:
            state = self._lookups.look_below(key, None, request)  # type: ignore[arg-type]
        if state is MISS:
            return _MISS
        if state is HIT:
            return _HIT
        if state is PENDING:
            return _PENDING
        self._is_deferred, self._deferred_group = True, b""
        return self._defer(key)

    def _defer(self, key: OffloadKey) -> LookupResult:
        """Return the answer that makes the engine retry the request after the fewest lookups.

        One RETRY in each KV group is enough. After it, the search for a prefix ends with the first
        miss. The search for a window or a state ends once all of its blocks are present or in
        flight. Once it got a RETRY, it retries the request whatever the other answers are.
        """
        group = key[-GROUP_BYTES:]
        if group != self._deferred_group:
            self._deferred_group = group
            return LookupResult.RETRY
        return _PENDING if group in self._window_ends else _MISS

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> Any:
        """Called from 0.32 on, after `prepare_load`; earlier versions lack the module."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        source = self._request_of(req_context).sources.get(BlockHash(key), "CPU")
        return CacheHitSource.HOST if source == "CPU" else CacheHitSource.DISK

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        self._note_progress()
        request = self._request_of(req_context)
        request.has_run = True
        slots = self._manager.prepare_load(cast(Collection[BlockHash], keys), request).slots
        return CascadeLoadStoreSpec(slots)  # type: ignore[arg-type]

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._manager.complete_load(cast(Collection[BlockHash], keys))

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Note the keys, to count them once; called at every step of a request up to 0.30."""
        touched = self._request_of(req_context).touched
        for key in cast(Collection[BlockHash], keys):
            touched[key] = None

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        self._note_progress()
        hashes, request = cast(list[BlockHash], list(keys)), self._request_of(req_context)
        request.has_run = True
        output = self._manager.prepare_store(hashes, request)
        if output is None:
            return None
        return PrepareStoreOutput(
            keys_to_store=cast(list[OffloadKey], output.block_hashes_to_store),
            store_spec=CascadeLoadStoreSpec(output.store_spec.slots),  # type: ignore[arg-type]
            evicted_keys=cast(list[OffloadKey], output.block_hashes_evicted),
        )

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        request: Request | None = state_of(req_context, Request)  # None if the request has ended
        self._manager.complete_store(cast(Collection[BlockHash], keys), success, request)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._request_of(req_context)  # the request waits from now on
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._note_progress()
        request = self._request_of(req_context)
        if self._cascade.recorder is not None:
            self._cascade.record(request, _prompt(request, req_context))
        if request.positions and self._cascade.chains is not None:
            self._cascade.chains.note(request.positions, request.keys)  # type: ignore[arg-type]
        self._manager.finish_request(request)
        self._metrics.note_end()

    def on_schedule_end(self, context: ScheduleEndContext | None = None) -> None:
        self._manager.end_step()
        self._context = None
        self._was_reset = False
        if self._standstill is not None:
            self._standstill.end_step()

    def take_events(self) -> Iterable[OffloadingEvent]:
        return [to_vllm_event(event) for event in self._manager.take_events()]

    def has_pending_work(self) -> bool:
        return self._manager.has_pending_work()

    def reset_cache(self) -> None:
        self._was_reset = self._manager.options.on_reset is OnReset.KEEP
        self._manager.reset_cache()

    def on_reset_flushed(self) -> None:
        """Called from 0.33 on, once the workers have ended every job from before the reset."""
        self._manager.on_reset_flushed()

    def get_stats(self) -> Any:
        return self._metrics.read_if_due()

    def config_info(self) -> Sequence[dict[str, str]]:
        """Return the labels of the info metric, from 0.33 on."""
        return [self._cascade.info()]

    def shutdown(self) -> None:
        self._cascade.close()

    def _note_progress(self) -> None:
        if self._standstill is not None:
            self._standstill.note_progress()

    def _request_of(self, context: ReqContext) -> Request:
        if context is self._context:
            return self._request
        request: Request | None = state_of(context, Request)
        if request is None:
            positions = getattr(context, KEY_POSITIONS, {})
            request = Request(_allowed_media(context), time.monotonic(), positions)
            set_state(context, request)
            self._metrics.note_begin()
        return request

    def _switch(self, context: ReqContext, first: OffloadKey) -> None:
        """Make another request the current one, for the many lookups in a row that follow.

        Only lookups switch: a store after the end of a step must not count as a lookup.
        """
        self._request = self._request_of(context)
        self._context = context
        self._deferred_group = b""
        is_waiting = self._lookups.begin_asking(self._request, BlockHash(first))
        # A reset may have preempted the request, also one that fails and never comes here. vLLM
        # says so in the step that schedules it again, and up to 0.32 it fails if it loads there.
        self._is_deferred = is_waiting or self._was_reset or self._request.has_run
        self._request.has_run = False


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

    vLLM makes one in every worker process, then one in the scheduler process.
    """

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return offload_metrics.definitions()

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:
        """Return the label names of the info metric, from 0.33 on."""
        return Cascade.INFO_KEYS

    manager_type: type[CascadeManager] = CascadeManager
    """Class of the manager; 0.24 needs another one."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._set_up(config)

    def _set_up(self, config: OffloadingConfig) -> None:
        self._settings: CascadeConfig = configured(config.extra_config)
        self._engine_config = engine_facts.engine_config()
        self._kv_config = engine_facts.kv_cache_config()
        refuse_wrong_stores(config, self._kv_config, self._engine_config)
        self._geometry = _geometry(config, self._engine_config, self._kv_config)
        self._manager: CascadeManager | None = None
        self._worker: CascadeWorker | None = None

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            config, engine_config = self.config, self._engine_config
            key = namespace_key(
                self._settings,
                engine_config,
                config.model.name,
                shape_facts(config, self._kv_config),
                about_blocks(config, self._kv_config),
            )
            cascade = open_scheduler_side(
                self._settings,
                self._geometry,
                config.engine_id,
                key,
                engine_config,
                with_events=self.kv_events_config.enable_kv_cache_events,
            )
            # vLLM closes an engine in the process of its script after thread pools have stopped.
            close_at_exit(cascade.close)
            windows = groups_of_windows(config, self._kv_config)
            self._manager = self.manager_type(
                cascade,
                self._geometry.tokens_per_block,
                [make_offload_key(b"", number) for number in windows],
            )
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            self._worker = CascadeWorker(self._open_worker(kv_caches))
        return self._worker

    def _open_worker(self, kv_caches: CanonicalKVCaches) -> WorkerSide:
        config = self.config
        layers = layer_names(config)
        pages = from_canonical(kv_caches)
        require_whole(pages, layers, config.worker_kv_bytes_per_block)
        return open_worker(
            self._settings,
            self._geometry,
            config.engine_id,
            rank=config.parallel.rank,
            tensors=pages.tensors,
            groups=pages.groups,
            packing=packing_of_layers(self._engine_config, layers, pages.num_blocks),
        )


def _geometry(
    config: OffloadingConfig, engine_config: Any | None, kv_config: Any | None
) -> Geometry:
    served_end, served_tokens = _served(config, kv_config)
    return Geometry(
        rank_bytes=config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk,
        world_size=config.parallel.world_size,
        blocks_per_chunk=config.cache.blocks_per_chunk,
        tokens_per_block=served_tokens,
        served_end=served_end,
        mean_tokens=_mean_tokens(config),
        offered_once=tuple(
            make_offload_key(b"", n) for n in groups_offered_once(config, kv_config)
        ),
        replicated=replicated_facts(config, engine_config),
    )


def _mean_tokens(config: OffloadingConfig) -> float:
    """Return the tokens per block over all KV groups: saving a token takes blocks of each group."""
    tokens = [group.tokens_per_block for group in config.groups]
    return harmonic_mean(tokens) / len(tokens) * config.cache.blocks_per_chunk


def _served(config: OffloadingConfig, kv_config: Any | None) -> tuple[bytes, float]:
    """Return the end of the keys by which saved tokens are counted, and the tokens of each.

    For a group with a window or states, only the last blocks of a prefix are loaded. Blocks of the
    group with full attention therefore stand for all. If none is known, every block counts in part.
    """
    group = full_attention_group(config, kv_config) if len(config.groups) > 1 else None
    if group is None:
        return b"", _mean_tokens(config)
    group_id, tokens = group
    return make_offload_key(b"", group_id), float(tokens * config.cache.blocks_per_chunk)


def shape_facts(config: OffloadingConfig, kv_config: Any | None) -> dict[str, str]:
    """Return the facts of the fingerprint about blocks and parallelism."""
    parallel = config.parallel
    facts = {
        "dtype": config.model.dtype,
        "tokens_per_hash": str(config.cache.tokens_per_hash),
        "blocks_per_chunk": str(config.cache.blocks_per_chunk),
        "rank_bytes": str(config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk),
        # Up to 0.28 the configuration does not have it; the environment variable decides.
        "layout": str(getattr(config, "kv_cache_layout", None) or os.environ.get(_PAGE_ORDER)),
        "row_layout": " ".join(name for name in _ROW_LAYOUTS if getattr(config, name, False)),
        "parallel": f"tp{parallel.tp_size} pp{parallel.pp_size} pcp{parallel.pcp_size} "
        f"dcp{parallel.dcp_size} world{parallel.world_size}",
    }
    groups = numbered_groups(config)
    for group_id, group in groups.items():
        layers = ",".join(group.layer_names)
        facts[f"group{group_id}"] = f"{group.tokens_per_block} tokens: {layers}"
    return facts | group_facts(kv_config, groups)


def replicated_facts(config: OffloadingConfig, engine_config: Any | None) -> dict[str, str] | None:
    """Return facts in place of those about parallelism, if all ranks hold the same bytes.

    vLLM says so of MLA with tensor parallelism alone. Of one rank it says nothing.
    """
    model = getattr(engine_config, "model_config", None)
    is_single = config.parallel.world_size == 1 and getattr(model, "use_mla", False)
    if not (is_single or getattr(config, "replicated_layout", False)):
        return None
    rows = [name for name in _ROW_LAYOUTS if getattr(config, name, False)]
    return {
        "parallel": "replicated",
        "row_layout": " ".join(name for name in rows if name != "replicated_layout"),
    }


def to_vllm_event(event: BlockEvent) -> OffloadingEvent:
    """Translate an event of the manager to the installed vLLM.

    vLLM keeps the tokens of a block until all expected removals are published. A remote tier
    publishes none.
    """
    medium, locality = _MEDIA[event.medium]
    about: dict[str, Any] = {
        "locality": locality,
        "ownership": None if medium is Medium.CPU else event.tier,
        "removal_expected": locality is Locality.LOCAL,
    }
    return OffloadingEvent(
        keys=cast(list[OffloadKey], list(event.block_hashes)),
        medium=medium,
        removed=event.removed,
        **known_fields(OffloadingEvent, about),
    )


def _prompt(request: Request, context: ReqContext) -> list[BlockHash]:
    """Return the blocks of the prompt in order, up to the last one that the cache was asked for.

    Blocks whose store was deferred to the end are among them: the prompt is as long without them.
    """
    used = dict.fromkeys([*request.touched, *request.keys, *request.deferred])
    if request.missed_at is not None:
        used.setdefault(request.missed_at)
    return prompt_up_to_last(context, used)


def prompt_up_to_last(context: ReqContext, used: Collection[BlockHash]) -> list[BlockHash]:
    """Return the blocks of a request in order, up to the last one in `used`.

    From 0.31 on the context knows all blocks, including those that the device held and those of the
    answer. Before, the result is `used` in its own order.
    """
    positions: dict[BlockHash, int] = getattr(context, KEY_POSITIONS, {})
    if not positions:
        return list(used)
    end = max((positions.get(key, 0) for key in used), default=0)
    ordered = sorted(positions.items(), key=lambda item: item[1])
    return [key for key, position in ordered if position <= end]


def _gpu_blocks(spec: GPULoadStoreSpec) -> GpuBlocks:
    return GpuBlocks(spec.block_ids, tuple(spec.group_sizes), tuple(spec.block_indices))


def _allowed_media(context: ReqContext) -> frozenset[str] | None:
    """Return the media that a request may read from, by its `kv_load_tiers`; None means all.

    Every block comes through the CPU tier, so that one is included, as in vLLM's own tiering. An
    empty set means that nothing is loaded.
    """
    load_filter = getattr(context, "load_tier_filter", TierFilter.ALL)
    if load_filter is TierFilter.ALL:
        return None
    allows = load_filter.allows
    allowed = {name for name, place in _MEDIA.items() if allows(*place)}
    return frozenset(allowed | {"CPU"}) if allowed else frozenset()
