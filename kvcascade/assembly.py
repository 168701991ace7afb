"""Building a cascade from its configuration: arena, tiers, handlers, manager, background thread.

The two halves of an engine meet in the arena: every worker process opens a `WorkerSide`, and the
scheduler process, last, a `Cascade`. What fails while opening raises one of our errors and leaves
nothing behind: whatever was opened is closed again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from . import sizes
from .config import Admission, CascadeConfig, DirectIO, NvmeTier
from .errors import os_errors
from .handlers.device import DeviceCopier
from .handlers.geometry import PageRef, WorkerLayout
from .handlers.nvme import NvmeLoadHandler, NvmeStoreHandler
from .handlers.nvme_pair import NvmePairHandler
from .machine import ThisMachine, cpu_capacity, nvme_capacity
from .manager.admission import AdmitAll, AdmitSecondTouch, WriteBudget
from .manager.cascading import CascadingOffloadingManager, ManagerOptions
from .manager.flow import Link
from .manager.level import Tier
from .manager.ticker import Ticker
from .tiers.cpu import Arena, ArenaGeometry, ArenaRole, CpuBackend
from .tiers.nvme import tier as nvme
from .tiers.nvme.filesystem import RealFileSystem
from .tiers.nvme.namespace import NamespaceKey
from .tiers.nvme.store import Durability
from .tiers.policies import OrderedPolicy, create

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

COPY_THREADS = 2
"""Threads of a worker on the CPU platform that copy pages, one per direction."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the engine says about the bytes of one block; equal in all its processes."""

    rank_bytes: int
    """Bytes of one block (all blocks of a chunk) that belong to one worker."""
    world_size: int
    """Worker processes, all on this host."""
    blocks_per_chunk: int
    """Device blocks in one of our blocks."""


class WorkerSide:
    """A worker's part: the mapped arena and the copier. Worker main thread."""

    def __init__(self, arena: Arena, copier: DeviceCopier, executor: ThreadPoolExecutor) -> None:
        self.arena = arena
        self.copier = copier
        self._executor = executor

    def close(self) -> None:
        """Let transfers end, then let go of the arena; idempotent."""
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
) -> WorkerSide:
    """Open a worker's part over its KV tensors.

    `tensors`: int8, shape `(num_blocks, page_bytes)`; `groups`: per KV group, (tensor index, page
    bytes without padding) of every layer. Raises one of our errors.
    """
    from .handlers.staging import torch_layouts

    arena_geometry = _arena_geometry(settings, geometry)
    refs = [[PageRef(tensor, size) for tensor, size in group] for group in groups]
    layout = WorkerLayout(
        torch_layouts(tensors), refs, geometry.blocks_per_chunk, arena_geometry, rank
    )
    arena_dir = str(settings.cpu.arena_dir)
    with ExitStack() as undo:
        arena = Arena.open(arena_geometry, engine_id, ArenaRole.worker(rank), arena_dir=arena_dir)
        undo.callback(arena.close)
        arena.publish_layout(layout.digest())
        executor = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="kvcascade-copy")
        undo.callback(executor.shutdown)
        copier = _copier(tensors, layout, arena, executor, settings.cpu.prefault)
        undo.pop_all()
    return WorkerSide(arena, copier, executor)


def _copier(
    tensors: Sequence[torch.Tensor],
    layout: WorkerLayout,
    arena: Arena,
    executor: ThreadPoolExecutor,
    has_prefault: bool,
) -> DeviceCopier:
    if tensors[0].is_cuda:
        from .handlers.device_cuda import CudaDeviceCopier

        return CudaDeviceCopier(tensors, layout, arena.slots)
    from .handlers.device_cpu import CpuDeviceCopier

    if has_prefault:
        arena.prefault(executor)
    return CpuDeviceCopier([t.numpy() for t in tensors], layout, arena.slots, executor)


class Cascade:
    """The scheduler's part: all tiers and the manager over them."""

    INFO_KEYS: ClassVar[tuple[str, ...]] = ("kvcascade_tiers", "kvcascade_write_mode")

    def __init__(
        self,
        settings: CascadeConfig,
        arena: Arena,
        manager: CascadingOffloadingManager,
        nvme_tiers: Sequence[nvme.NvmeTier],
        executors: Sequence[ThreadPoolExecutor],
    ) -> None:
        self.settings = settings
        self.arena = arena
        self.manager = manager
        self.nvme_tiers = list(nvme_tiers)
        self._executors = executors
        self._ticker = Ticker(manager.maintain)
        self._is_closed = False

    def info(self) -> dict[str, str]:
        """Fixed facts, for an info metric: `INFO_KEYS` and their values."""
        tiers = ",".join(f"{name}:{capacity}" for name, _, capacity, _ in self.manager.usage())
        return dict(zip(self.INFO_KEYS, (tiers, str(self.settings.write_mode)), strict=True))

    def close(self) -> None:
        """Write what is dirty within `shutdown_flush_s`, close every tier; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._ticker.stop()
        if not self.manager.shutdown():
            logger.warning(
                "kvcascade: the disk did not end its transfers within shutdown_flush_s; what was "
                "stored before is safe, and the next start checks the rest"
            )
            return
        for executor in self._executors:
            executor.shutdown(cancel_futures=True)
        for tier in self.nvme_tiers:
            tier.close()
        self.arena.close()


def open_cascade(
    settings: CascadeConfig,
    geometry: Geometry,
    engine_id: str,
    facts: Mapping[str, str],
    *,
    label: str,
    steps_until_flushed: int,
    with_events: bool,
    expect_workers: bool = True,
) -> Cascade:
    """Open the scheduler's part; the workers have opened theirs.

    `facts` are the fields of the fingerprint; the workers' tensor layouts are added to them.
    `label` names the namespace for people. Raises one of our errors.
    """
    arena_geometry = _arena_geometry(settings, geometry)
    role = ArenaRole.scheduler(expect_workers=expect_workers)
    with ExitStack() as undo:
        arena = Arena.open(arena_geometry, engine_id, role, arena_dir=str(settings.cpu.arena_dir))
        undo.callback(arena.close)
        digests = [d.hex() if d else "none" for d in arena.layout_digests()]
        key = NamespaceKey(label, {**facts, "tensors": ",".join(digests)})
        backend = CpuBackend.over(arena)
        tiers = [Tier("cpu", backend, create(settings.cpu.policy, backend.capacity))]
        links: list[Link] = []
        executors: list[ThreadPoolExecutor] = []
        opened: list[nvme.NvmeTier] = []
        for number, options in enumerate(settings.nvme):
            stores, loads = _io_threads(options, executors, undo)
            tier = _open_nvme(options, arena_geometry.slot_bytes, key, stores)
            undo.callback(tier.close)
            opened.append(tier)
            name = "nvme" if len(settings.nvme) == 1 else f"nvme{number}"
            tiers.append(_nvme_level(name, options, tier))
            links.append(_link(arena, opened, stores, loads))
        options_ = _manager_options(settings, backend, steps_until_flushed, with_events)
        manager = CascadingOffloadingManager(tiers, links, options_)
        cascade = Cascade(settings, arena, manager, opened, executors)
        undo.pop_all()
    _log_start(cascade)
    return cascade


def _link(
    arena: Arena,
    opened: Sequence[nvme.NvmeTier],
    stores: ThreadPoolExecutor,
    loads: ThreadPoolExecutor,
) -> Link:
    """Between the last opened tier and the one above it."""
    store = opened[-1].store
    if len(opened) > 1:
        above = opened[-2].store
        return Link(NvmePairHandler(above, store, stores), NvmePairHandler(store, above, loads))
    return Link(
        down=NvmeStoreHandler(store, arena.slot_view, stores),
        up=NvmeLoadHandler(store, arena.slot_view, loads),
    )


def _arena_geometry(settings: CascadeConfig, geometry: Geometry) -> ArenaGeometry:
    capacity = cpu_capacity(settings.cpu, ThisMachine())
    return ArenaGeometry.fit(capacity, geometry.rank_bytes, geometry.world_size)


def _manager_options(
    settings: CascadeConfig, top: CpuBackend, steps_until_flushed: int, with_events: bool
) -> ManagerOptions:
    return ManagerOptions(
        write_mode=settings.write_mode,
        on_reset=settings.on_reset,
        low_watermark=float(settings.cpu.low_watermark.part),
        high_watermark=float(settings.cpu.high_watermark.part),
        dirty_age_s=settings.dirty_age_s,
        promotion_budget_slots=sizes.budget_blocks(
            settings.promotion_budget, top.capacity, top.block_size
        ),
        promotion_deadline_s=settings.promotion_deadline_s,
        shutdown_flush_s=settings.shutdown_flush_s,
        steps_until_flushed=steps_until_flushed,
        with_events=with_events,
    )


def _io_threads(
    options: NvmeTier, executors: list[ThreadPoolExecutor], undo: ExitStack
) -> tuple[ThreadPoolExecutor, ThreadPoolExecutor]:
    """Threads for stores and for loads: a load never queues behind a store."""
    for direction in ("store", "load"):
        executor = ThreadPoolExecutor(options.io_threads, f"kvcascade-{direction}")
        undo.callback(executor.shutdown, cancel_futures=True)
        executors.append(executor)
    return executors[-2], executors[-1]


def _open_nvme(
    options: NvmeTier, block_bytes: int, key: NamespaceKey, executor: ThreadPoolExecutor
) -> nvme.NvmeTier:
    machine, segment_size = ThisMachine(), options.segment_size
    for path in options.path:
        with os_errors(f"creating {path} ({options.key}.path)"):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
    config = nvme.NvmeTierConfig(
        paths=options.path,
        capacity_bytes=nvme_capacity(options, machine),
        block_bytes=block_bytes,
        key=key,
        durability=Durability(str(options.durability)),
        min_free_bytes=options.min_free.of(machine.disk(options.path[0]).total),
        slots_per_segment=(
            None if segment_size is None else max(1, segment_size.of(0) // block_bytes)
        ),
    )
    return nvme.open_nvme_tier(
        config, executor, RealFileSystem(direct=options.direct_io is not DirectIO.OFF)
    )


def _nvme_level(name: str, options: NvmeTier, tier: nvme.NvmeTier) -> Tier:
    policy = create(options.policy, tier.backend.capacity, tier.directory, tier.arrays)
    if tier.recovered:
        assert isinstance(policy, OrderedPolicy)
        policy.reconcile(tier.live_slots())
    is_all = options.admission is Admission.ALL
    budget = options.write_budget
    return Tier(
        name,
        tier.backend,
        policy,
        AdmitAll() if is_all else AdmitSecondTouch(),
        None if budget is None else WriteBudget(budget.of(0), time.monotonic),
    )


def _log_start(cascade: Cascade) -> None:
    for name, blocks, capacity, _ in cascade.manager.usage():
        logger.info("kvcascade: tier %s holds %d of %d blocks", name, blocks, capacity)
    for tier in cascade.nvme_tiers:
        report = tier.report
        logger.info(
            "kvcascade: namespace %s, made %s, last shutdown %s",
            report.folder,
            report.created.isoformat(timespec="seconds"),
            "clean" if report.was_clean else "not clean",
        )
