"""kvcascade's NVMe tier inside vLLM's own tiering, for users who keep vLLM's manager.

    "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": ...,
    "secondary_tiers": [{"type": "KVCascadeTier", "module_path": "kvcascade.vllm_tier",
                         "path": "/mnt/nvme/kv", "capacity": "2TiB"}]

The options are those of an `nvme` tier, `label`, `weights_id` and `on_reset`. vLLM writes every
block through. This tier is bounded, evicts by its own policy, verifies every block that it reads,
and has the model in its namespace. The scheduler thread calls all methods. A ticker maintains the
tier while the engine is idle.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from ..assembly.named import admission_rule, checked_tier
from ..assembly.node_parts import EngineFacts, SlotMemory, open_node_tier
from ..config.machine import Machine
from ..config.schema import CascadeConfig, NvmeTierOptions, OnReset
from ..handlers.node.node_keeper import close_at_exit
from ..logs import get_logger
from ..manager.below.single_tier import STALLED_S
from ..manager.below.tier_jobs import TierJobs
from ..manager.ticker import Ticker
from ..tiers.base import BlockHash
from ..tiers.nvme.namespace import NamespaceKey
from . import engine_facts
from .generation import chunk_rows, known_fields, set_state, state_of
from .kv_layers import layer_names
from .packing import packing_of_layers
from .refusals import refuse_wrong_stores
from .scheduler_side import log_beside_vllm, namespace_key
from .v0_26 import prompt_up_to_last, shape_facts, to_vllm_event

logger = get_logger(__name__)

MAX_KEPT_S = 5.0
"""Longest wait for transfers in flight at shutdown."""


@dataclass(slots=True)
class _Used:
    """Blocks that one request used."""

    of_tiers: dict[KVCascadeTier, dict[BlockHash, bool]] = field(default_factory=dict)
    """Blocks that were looked up, stored or loaded in each tier, and whether a store or load
    counted the use. An engine may have several tiers, and a request has one object of a class."""


class KVCascadeTier(SecondaryTierManager):
    """An NVMe tier of ours as a secondary tier of vLLM."""

    medium: ClassVar[Medium | None] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        """`options`: those of the module's docstring. Raises one of our errors."""
        if backpressure_detector is None:  # an argument of later versions
            super().__init__(offloading_spec, primary_kv_view, tier_type)
        else:
            super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        log_beside_vllm()
        self._rows = primary_kv_view.cast("B")
        assert primary_kv_view.strides is not None, "a view has strides"
        self._row_bytes = primary_kv_view.strides[0]  # up to 0.28 nothing else states it
        settings = checked_tier(options, Machine())
        key = _namespace_key(offloading_spec.config, settings, self._row_bytes)
        self._on_reset = settings.on_reset
        self._steps_until_flushed = engine_facts.steps_until_flushed(
            offloading_spec.config.parallel.pp_size
        )
        self._flush_steps_left = 0
        """Number of steps in which workers may still write rows from before a reset."""
        with_events = bool(offloading_spec.kv_events_config.enable_kv_cache_events)
        with ExitStack() as undo:
            self._jobs, folder = self._open(settings.nvme[0], key, with_events, undo)
            self._resources = undo.pop_all()
        self._lock = threading.Lock()
        """Guards `_jobs`, except lookups: their answer may be wrong either way."""
        (state,) = self._jobs.below.state()
        logger.info(
            "kvcascade opened: %s (blocks=%d, capacity_blocks=%d, policy=%s, namespace=%s)",
            tier_type,
            state.blocks,
            state.capacity_blocks,
            settings.nvme[0].policy,
            folder,
        )
        self._ticker = Ticker(self._tick)
        close_at_exit(self.shutdown)  # vLLM may do so only after thread pools have stopped

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return RETRY for the first steps after a reset.

        vLLM regards all its rows as free then, but workers may still write stores from before the
        reset into them. A read into such a row could be overwritten.
        """
        if not self._jobs.has(BlockHash(key)):
            return LookupResult.MISS
        if self._flush_steps_left:
            return LookupResult.RETRY
        self._used_by(req_context).setdefault(BlockHash(key), False)
        return LookupResult.HIT

    def submit_store(self, job_metadata: Any) -> None:
        hashes, used = _hashes(job_metadata.keys), self._used_by(job_metadata.req_context)
        with self._lock:
            stored = self._jobs.store(job_metadata.job_id, hashes, chunk_rows(job_metadata))
        for block_hash in hashes:
            used.setdefault(block_hash, False)
        used.update(dict.fromkeys(stored, True))

    def submit_load(self, job_metadata: Any) -> None:
        hashes = _hashes(job_metadata.keys)
        self._used_by(job_metadata.req_context).update(dict.fromkeys(hashes, True))
        with self._lock:
            self._jobs.load(job_metadata.job_id, hashes, chunk_rows(job_metadata))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        with self._lock:
            finished = self._jobs.finished()
        for result in finished:
            about = {
                "successful_keys": result.loaded or None,
                "transfer_time": result.time_s,
                "transfer_bytes": result.size_bytes,
            }
            known = known_fields(JobResult, about)
            results.append(JobResult(result.job_id, result.is_whole, **cast(Any, known)))
        return results

    def has_pending_work(self) -> bool:
        is_busy: bool = self._jobs.is_busy
        return is_busy

    def take_events(self) -> Iterable[OffloadingEvent]:
        with self._lock:
            events = self._jobs.take_events()
        return [to_vllm_event(event) for event in events]

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Note the keys, to count them once; called at every step of a request up to 0.30."""
        used = self._used_by(req_context)
        for key in _hashes(keys):
            used.setdefault(key, False)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        used = self._used_by(req_context)
        counted = {block_hash for block_hash, is_counted in used.items() if is_counted}
        with self._lock:
            self._jobs.finish_request(prompt_up_to_last(req_context, used), counted)
        used.clear()

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._flush_steps_left = max(0, self._flush_steps_left - 1)
        with self._lock:
            self._jobs.maintain()

    def drain_jobs(self) -> None:
        """Drain and reset: vLLM calls this only in `reset_cache`, and resets only its own tier.

        The weights may have been updated in place, so no older block may be a hit afterwards.
        """
        self._flush_steps_left = self._steps_until_flushed
        with self._lock:
            self._jobs.drain()
            if self._jobs.is_busy:
                logger.error("kvcascade: transfers do not end, and vLLM would use their memory")
            if self._on_reset is OnReset.INVALIDATE:
                self._jobs.reset()

    def shutdown(self) -> None:
        self._ticker.stop()
        with self._lock:
            has_ended = self._jobs.close(MAX_KEPT_S)
        if not has_ended:
            logger.warning("kvcascade: the disk did not end its transfers; the next start checks")
            return
        self._resources.close()

    def _used_by(self, context: ReqContext) -> dict[BlockHash, bool]:
        used: _Used | None = state_of(context, _Used)
        if used is None:
            used = _Used()
            set_state(context, used)
        return used.of_tiers.setdefault(self, {})

    def _tick(self) -> None:
        """Hear the node, which cannot keep all that it has to tell an engine that is idle."""
        if self._lock.acquire(blocking=False):
            try:
                self._jobs.maintain()
            finally:
                self._lock.release()

    def _open(
        self, options: NvmeTierOptions, key: NamespaceKey, with_events: bool, undo: ExitStack
    ) -> tuple[TierJobs, Path | None]:
        """Open the tier behind a node on a thread, and return its folder; `undo` closes it."""
        memory = SlotMemory(self._row_bytes, len(self._rows) // self._row_bytes, self._rows)
        engine = EngineFacts(key, memory, False, with_events, STALLED_S, has_metrics=False)
        tier = open_node_tier(self.tier_type, options, engine)
        undo.callback(tier.close)
        jobs = TierJobs(tier.port, admission_rule(options.admission), time.monotonic)
        return jobs, tier.folder


def _namespace_key(config: Any, settings: CascadeConfig, row_bytes: int) -> NamespaceKey:
    engine_config, kv_config = engine_facts.engine_config(), engine_facts.kv_cache_config()
    refuse_wrong_stores(config, kv_config, engine_config)
    cache = getattr(engine_config, "cache_config", None)
    shape = {
        **shape_facts(config, kv_config),
        "rows": f"vLLM's tiering, {row_bytes} bytes",
        # None of our code runs in workers. Their attention backends are known only if the one
        # worker lives in this process; otherwise `shape_facts` must suffice.
        "layers": packing_of_layers(
            engine_config, layer_names(config), getattr(cache, "num_gpu_blocks", 0) or 1
        ),
    }
    return namespace_key(settings, engine_config, config.model.name, shape)


def _hashes(keys: Collection[OffloadKey]) -> list[BlockHash]:
    return cast(list[BlockHash], list(keys))
