"""Build a cascade from its configuration: arena, tiers, handlers, manager, background thread.

The two sides of an engine share the arena: every worker process opens a `WorkerSide`, then the
scheduler process opens a `Cascade`. If opening fails, everything opened so far is closed again, and
one of our errors is raised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, ClassVar

from ..config import sizes
from ..config.machine import Machine, cpu_capacity, settled, small_tier_warnings, writing
from ..config.schema import (
    DEFAULT_FLUSH_S,
    CascadeConfig,
    CpuTierOptions,
    NvmeTierOptions,
    TierConfig,
    WriteMode,
)
from ..errors import ConfigError
from ..handlers.device.copier import DeviceCopier
from ..handlers.device.geometry import PageRef, WorkerLayout
from ..logs import get_logger
from ..manager.cascading import CascadingOffloadingManager
from ..manager.core import ManagerOptions, OnTransfer
from ..manager.first_tier import Tier
from ..manager.request import Request
from ..manager.state import TierState
from ..manager.ticker import Ticker
from ..observe.recording import Recorder, RecordFacts, open_recorder
from ..threads import started_pool
from ..tiers.base import BlockHash
from ..tiers.cpu.arena import Arena, ArenaRole
from ..tiers.cpu.cpu_backend import CpuBackend
from ..tiers.cpu.header import ArenaGeometry
from ..tiers.cpu.slot_table import KeptDirectory
from ..tiers.nvme.namespace import NamespaceKey
from ..tiers.policies import create
from .below_parts import OpenBelow, epoch_below, open_below, port_of
from .chain_notes import ChainNotes
from .node_parts import EngineFacts, OpenTier, Replicas, SlotMemory

if TYPE_CHECKING:
    import torch

logger = get_logger(__name__)

COPY_THREADS = 2
"""Threads of a worker on the CPU platform that copy pages, one per direction."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of a block, as the engine states them; equal in all its processes."""

    rank_bytes: int
    """Bytes of one block (all blocks of a chunk) that belong to one worker."""
    world_size: int
    """Worker processes, all on this host."""
    blocks_per_chunk: int
    """Device blocks in one of our blocks."""
    tokens_per_block: float = 0.0
    """Prompt tokens that one of our blocks saves; 0: unknown."""
    served_end: bytes = b""
    """End of the hashes of the blocks that `tokens_per_block` applies to; empty: all."""
    mean_tokens: float = 0.0
    """Prompt tokens per block over the blocks of all KV groups of a prompt."""
    replicated: Mapping[str, str] | None = None
    """Facts of the fingerprint without the number of workers, in place of those that depend on it.
    None unless the engine says that all workers hold the same bytes."""
    offered_once: tuple[bytes, ...] = ()
    """Ends of the hashes of blocks that the engine offers only once, whatever the answer."""


class WorkerSide:
    """The worker's side: the mapped arena and the copier. Worker main thread."""

    def __init__(self, arena: Arena, copier: DeviceCopier, executor: ThreadPoolExecutor) -> None:
        self.arena = arena
        self.copier = copier
        self._executor = executor

    def close(self) -> None:
        """Wait for transfers to end, then close the arena; idempotent."""
        self.copier.shutdown()
        self._executor.shutdown()
        self.arena.close()


def open_worker(
    settings: CascadeConfig,
    geometry: Geometry,
    engine_id: str,
    rank: int,
    tensors: Sequence[torch.Tensor],
    groups: Sequence[Sequence[tuple[int, int]]],
    packing: str = "",
    *,
    steps_while_storing: bool = True,
) -> WorkerSide:
    """Open a worker's side over its KV tensors.

    `tensors`: int8, shape `(num_blocks, page_bytes)`; `groups`: per KV group, (tensor index, page
    bytes without padding) of every layer; `packing`: facts about the inside of a page that only the
    worker knows; `steps_while_storing`: the engine makes steps until every store has ended. Raises
    one of our errors.
    """
    from ..handlers.device.staging import torch_layouts

    settings = settled(settings, Machine(), geometry.world_size)
    arena_geometry = _arena_geometry(settings, geometry)
    refs = [[PageRef(tensor, size) for tensor, size in group] for group in groups]
    layout = WorkerLayout(
        torch_layouts(tensors), refs, geometry.blocks_per_chunk, arena_geometry, rank
    )
    arena_dir = str(settings.cpu.arena_dir)
    with ExitStack() as undo:
        arena = Arena.open(arena_geometry, engine_id, ArenaRole.worker(rank), arena_dir=arena_dir)
        undo.callback(arena.close)
        arena.publish_layout(layout.digest(packing))
        executor = started_pool(COPY_THREADS, "kvcascade-copy")
        undo.callback(executor.shutdown)
        prefault = settings.cpu.prefault
        copier = _copier(tensors, layout, arena, executor, prefault, steps_while_storing)
        undo.pop_all()
    return WorkerSide(arena, copier, executor)


def _copier(
    tensors: Sequence[torch.Tensor],
    layout: WorkerLayout,
    arena: Arena,
    executor: ThreadPoolExecutor,
    has_prefault: bool,
    may_hold_back: bool,
) -> DeviceCopier:
    if tensors[0].is_cuda:
        from ..handlers.device.device_cuda import CudaDeviceCopier

        return CudaDeviceCopier(tensors, layout, arena.slots, may_hold_back=may_hold_back)
    kind = str(tensors[0].device.type)
    if kind != "cpu":
        raise ConfigError(
            f"this worker's KV cache is on a device of type {kind!r}, which kvcascade cannot copy "
            f"from; leave kv_transfer_config out, or use a CUDA or ROCm GPU"
        )
    from ..handlers.device.device_cpu import CpuDeviceCopier

    if has_prefault:
        arena.prefault()
    return CpuDeviceCopier([t.numpy() for t in tensors], layout, arena.slots, executor)


class Cascade:
    """The scheduler's side: all tiers and the manager over them."""

    INFO_KEYS: ClassVar[tuple[str, ...]] = ("kvcascade_tiers", "kvcascade_write_mode")

    def __init__(
        self,
        settings: CascadeConfig,
        arena: Arena,
        manager: CascadingOffloadingManager,
        below: Sequence[OpenBelow],
        recorder: Recorder | None = None,
        chains: ChainNotes | None = None,
    ) -> None:
        self.below = list(below)
        """Tiers below the first, nearest first."""
        self.chains = chains
        """Log of the order of blocks in prompts; None without NVMe."""
        self.settings = settings
        self.recorder = recorder
        """Recording of requests; None: requests are not recorded."""
        self.arena = arena
        self.manager = manager
        self._ticker = Ticker(self._tick)
        self._is_closed = False

    def info(self) -> dict[str, str]:
        """Return the constant facts for an info metric: `INFO_KEYS` and their values."""
        states = self.manager.tier_states()
        tiers = ",".join(f"{state.name}:{state.capacity_blocks}" for state in states)
        mode = str(self.manager.options.write_mode)
        return dict(zip(self.INFO_KEYS, (tiers, mode), strict=True))

    def record(self, request: Request, prompt: Sequence[BlockHash]) -> None:
        """Record a request that ended, if there is a recorder; `prompt`: its blocks in order."""
        if self.recorder is not None and prompt:
            self.recorder.note(request.arrived_s, prompt)
            self.manager.counters.recorded_requests = self.recorder.recorded_requests
            self.manager.counters.record_dropped_requests = self.recorder.dropped_requests

    def _tick(self) -> None:
        self.manager.maintain()
        if self.chains is not None:
            self.chains.send()

    def close(self) -> None:
        """Write dirty blocks within `shutdown_flush_s`, then close every tier; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._ticker.stop()
        if self.recorder is not None:
            self.recorder.close()
        if self.chains is not None:
            self.chains.send()
        if not self.manager.shutdown():
            logger.warning(
                "kvcascade: the disk did not end its transfers within shutdown_flush_s; what was "
                "stored before is safe, and the next start checks the rest"
            )
            return
        for end in (*(tier.close for tier in self.below), self.arena.close):
            try:
                end()
            except Exception:
                logger.exception("kvcascade: a part was not closed as it should; the others are")


def open_cascade(
    settings: CascadeConfig,
    geometry: Geometry,
    engine_id: str,
    key: NamespaceKey,
    *,
    steps_until_flushed: int,
    with_events: bool,
    waits_for_stores: bool = True,
    expect_workers: bool = True,
    on_transfer: OnTransfer | None = None,
) -> Cascade:
    """Open the scheduler's side; the workers have opened theirs.

    The workers' tensor layouts are added to the fields of `key`. For the rest see `ManagerOptions`.
    Raises one of our errors.
    """
    settings = settled(settings, Machine(), geometry.world_size)
    arena_geometry = _arena_geometry(settings, geometry)
    role = ArenaRole.scheduler(expect_workers=expect_workers)
    with ExitStack() as undo:
        arena = Arena.open(arena_geometry, engine_id, role, arena_dir=str(settings.cpu.arena_dir))
        undo.callback(arena.close)
        digests = [d.hex() if d else "none" for d in arena.layout_digests()]
        key = replace(key, fields={**key.fields, "tensors": ",".join(digests)})
        backend = CpuBackend(arena.geometry.slot_bytes, arena.geometry.slots)
        table = arena.slot_table() if arena.geometry.kept else None
        below: list[OpenBelow] = []
        epoch_of = partial(epoch_below, below)
        directory = None if table is None else KeptDirectory(backend.capacity, table, epoch_of)
        top = Tier("cpu", backend, create(settings.cpu.policy, backend.capacity, directory))
        engine = EngineFacts(
            key,
            SlotMemory.of(arena),
            settings.cpu.prefault,
            with_events,
            settings.promotion_deadline_s,
            _replicas(geometry, digests),
        )
        open_below(settings.below, engine, below, undo)
        nodes = [tier for tier in below if isinstance(tier, OpenTier)]
        options = replace(
            _manager_options(settings, backend),
            steps_until_flushed=steps_until_flushed,
            waits_for_stores=waits_for_stores,
            with_events=with_events,
            tokens_per_block=geometry.tokens_per_block,
            served_end=geometry.served_end,
            offered_once=geometry.offered_once,
            on_transfer=on_transfer,
        )
        recorder = _recorder(settings, geometry, arena_geometry.slot_bytes)
        port = port_of(below, backend.capacity)
        rule = below[0].admission if below else None
        manager = CascadingOffloadingManager(top, port, options, admission=rule)
        if table is not None and table.begin(key.digest, epoch_of()):
            found, slots = table.complete()
            manager.adopt(found, backend.adopt(slots))
        chains = ChainNotes(nodes[0].note_chain) if nodes else None
        cascade = Cascade(settings, arena, manager, below, recorder, chains)
        undo.pop_all()
    _log_start(cascade, geometry.tokens_per_block)
    return cascade


def _replicas(geometry: Geometry, digests: Sequence[str]) -> Replicas | None:
    """Return what all workers hold alike; None if the engine or their layouts say otherwise."""
    if geometry.replicated is None or len(set(digests)) > 1:
        return None
    facts = {**geometry.replicated, "tensors": digests[0]}
    return Replicas(geometry.world_size, geometry.rank_bytes, facts)


def _recorder(settings: CascadeConfig, geometry: Geometry, block_bytes: int) -> Recorder | None:
    if settings.record is None:
        return None
    facts = RecordFacts(geometry.mean_tokens, block_bytes)
    return open_recorder(settings.record, facts, monotonic)


def _arena_geometry(settings: CascadeConfig, geometry: Geometry) -> ArenaGeometry:
    capacity = cpu_capacity(settings.cpu, Machine())
    return ArenaGeometry.fit(
        capacity, geometry.rank_bytes, geometry.world_size, kept=settings.cpu.persist
    )


def _manager_options(settings: CascadeConfig, top: CpuBackend) -> ManagerOptions:
    machine = Machine()
    written = writing(settings, machine)
    if written is not None:
        logger.info("kvcascade: %s", written)
    for said in small_tier_warnings(settings, machine):
        logger.warning("kvcascade: %s", said)
    return ManagerOptions(
        write_mode=WriteMode.DEMOTE if written is None else written.mode,
        on_reset=settings.on_reset,
        low_watermark=float(settings.cpu.low_watermark.part),
        high_watermark=float(settings.cpu.high_watermark.part),
        dirty_age_s=settings.dirty_age_s,
        promotion_budget_slots=(
            None
            if settings.promotion_budget is None
            else sizes.budget_blocks(settings.promotion_budget, top.capacity, top.block_size)
        ),
        promotion_deadline_s=settings.promotion_deadline_s,
        shutdown_flush_s=(
            DEFAULT_FLUSH_S if settings.shutdown_flush_s is None else settings.shutdown_flush_s
        ),
        load_or_recompute=settings.load_or_recompute,
        prefill_tokens_per_s=settings.prefill_tokens_per_s,
    )


def _log_start(cascade: Cascade, tokens_per_block: float) -> None:
    """Log one line about the opened tiers, with the same facts as fields for structured logs."""
    fields = _start_fields(cascade, tokens_per_block)
    shown = "; ".join(
        f"{name} ({', '.join(f'{key}={value}' for key, value in facts.items())})"
        for name, facts in fields.items()
    )
    logger.info("kvcascade opened: %s", shown, extra={"kvcascade": fields})


def _start_fields(cascade: Cascade, tokens_per_block: float) -> dict[str, dict[str, object]]:
    """Return each tier's capacity and contents at the start.

    Prompts with fewer tokens than a block are in no tier.
    """
    tokens = {"tokens_per_block": round(tokens_per_block)} if tokens_per_block else {}
    facts: list[dict[str, object]] = [
        {**tokens, "pages": "huge" if cascade.arena.is_huge else "small"},
        *(tier.start_facts() for tier in cascade.below),
    ]
    states = cascade.manager.tier_states()
    tiers = zip(states, cascade.settings.tiers, facts, strict=True)
    return {state.name: {**_size(state, options), **more} for state, options, more in tiers}


def _size(state: TierState, options: TierConfig) -> dict[str, object]:
    """Return capacity and contents of a tier of this machine; nothing for others."""
    if not isinstance(options, CpuTierOptions | NvmeTierOptions):
        return {}
    share = sizes.share_of(options.capacity)
    return {
        "blocks": state.blocks,
        "capacity_blocks": state.capacity_blocks,
        "capacity": sizes.human(state.capacity_blocks * state.block_bytes),
        "policy": options.policy,
        **({} if share is None else {"share": share}),
    }
