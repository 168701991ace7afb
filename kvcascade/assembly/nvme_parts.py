"""Open one NVMe tier from its options, and link it to the arena.

The parts are its folders, threads, policy, admission and budget. Blocks are moved by a mover
process or by threads of this process.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np

from ..config.machine import ThisMachine, nvme_capacity, nvme_disk_bytes
from ..config.schema import DirectIO, NvmeTierOptions
from ..errors import KVCascadeError
from ..handlers.node.mover import Mover
from ..handlers.node.mover_child import Connection, launch
from ..handlers.node.mover_process import MoverBackground, MoverLoadHandler, MoverStoreHandler
from ..handlers.node.mover_wire import Setup
from ..handlers.node.nvme_handlers import NvmeLoadHandler, NvmeStoreHandler
from ..logs import get_logger
from ..manager.admission import WriteBudget
from ..manager.flow import Link
from ..manager.level import Tier
from ..tiers.cpu.arena import Arena
from ..tiers.cpu.header import HEADER_BYTES
from ..tiers.endurance import DayTotals
from ..tiers.nvme import tier as nvme
from ..tiers.nvme.attach import attachment_of
from ..tiers.nvme.disk.filesystem import FileSystem
from ..tiers.nvme.namespace import NamespaceKey
from ..tiers.nvme.opening import open_nvme_tier
from ..tiers.nvme.segments.chain_book import ChainBook
from ..tiers.nvme.segments.chains import CHAINS, ChainLog, cells_for
from ..tiers.nvme.segments.store import Durability
from ..tiers.policies import OrderedPolicy, create
from .chain_notes import ChainNotes
from .named import admission_rule
from .path_parts import make_folders

_log = get_logger(__name__)

READY_BYTES_MIN = 256 << 20
READY_BYTES_MAX = 1 << 30
READY_PARTS = 8
"""Share of the capacity that is allocated at the start, as one part in `READY_PARTS`.

The share is bounded by the two limits above. A small tier is allocated in full. A large one leaves
room for other namespaces in the path."""


def io_threads_of(
    options: NvmeTierOptions, executors: list[ThreadPoolExecutor], undo: ExitStack
) -> tuple[ThreadPoolExecutor, ThreadPoolExecutor]:
    """Return threads for stores and for loads, so that a load never queues behind a store."""
    for direction in ("store", "load"):
        executor = ThreadPoolExecutor(options.io_threads, f"kvcascade-{direction}")
        undo.callback(executor.shutdown, cancel_futures=True)
        executors.append(executor)
    return executors[-2], executors[-1]


def slots_of_segment(options: NvmeTierOptions, block_bytes: int) -> int | None:
    """Return the configured slots of a segment; None if the tier decides."""
    size = options.segment_size
    return None if size is None else max(1, size.of(0) // block_bytes)


def open_nvme(
    options: NvmeTierOptions,
    block_bytes: int,
    key: NamespaceKey,
    executor: ThreadPoolExecutor,
    file_system: FileSystem,
) -> nvme.NvmeTier:
    """Open the namespace of `key` in the folders of `options`; `executor` runs background work.

    Raises one of our errors.
    """
    machine = ThisMachine()
    make_folders(options.path, f"{options.key}.path")
    capacity = nvme_capacity(options, machine)
    config = nvme.NvmeTierConfig(
        paths=options.path,
        capacity_bytes=capacity,
        ready_bytes=min(READY_BYTES_MAX, max(READY_BYTES_MIN, capacity // READY_PARTS)),
        block_bytes=block_bytes,
        key=key,
        durability=Durability(str(options.durability)),
        min_free_bytes=options.min_free.of(machine.disk(options.path[0]).total),
        slots_per_segment=slots_of_segment(options, block_bytes),
    )
    return open_nvme_tier(config, executor, file_system)


def chain_notes(tier: nvme.NvmeTier) -> ChainNotes | None:
    """Open the log of the order of blocks; log a warning and return None if that fails.

    `tier` is open. The array is not sealed at the end, so that the next start need not read it.
    """
    arrays = tier.arrays.unsealed()
    try:
        cells = arrays(CHAINS, cells_for(tier.backend.capacity), np.uint64)
    except KVCascadeError as error:
        _log.warning("which block follows which is not noted: %s", error)
        return None
    finally:
        arrays.close()  # it stays mapped
    return ChainNotes(ChainBook(ChainLog(cells)).write)


def nvme_level(name: str, options: NvmeTierOptions, tier: nvme.NvmeTier) -> Tier:
    """Return an open tier for the manager. Raises `ConfigError` for names that do not exist."""
    policy = create(
        options.policy, tier.backend.capacity, tier.directory, tier.arrays, with_usage=True
    )
    if tier.recovered:
        assert isinstance(policy, OrderedPolicy)
        policy.reconcile(tier.live_slots())
    totals = tier.index.day_totals
    return Tier(
        name,
        tier.backend,
        policy,
        admission_rule(options.admission),
        write_budget=_write_budget(options, totals),
        day_totals=totals,
    )


def _write_budget(options: NvmeTierOptions, totals: Callable[[], DayTotals]) -> WriteBudget | None:
    if options.write_budget is None:
        return None
    return WriteBudget(options.write_budget.of(nvme_disk_bytes(options, ThisMachine())), totals)


def link_by_threads(arena: Arena, tier: nvme.NvmeTier, stores: Executor, loads: Executor) -> Link:
    """Return handlers that run on executors of this process."""
    return Link(
        down=NvmeStoreHandler(tier.store, arena.slot_view, stores),
        up=NvmeLoadHandler(tier.store, arena.slot_view, loads),
    )


def link_by_process(tier: nvme.NvmeTier, mover: Mover) -> Link:
    """Return handlers that leave all work to a mover, index commits included."""
    tier.backend.use_background(MoverBackground(tier.store, mover))
    return Link(down=MoverStoreHandler(tier.store, mover), up=MoverLoadHandler(tier.store, mover))


def open_mover(
    arena: Arena, tier: nvme.NvmeTier, options: NvmeTierOptions, has_prefault: bool
) -> Mover:
    """Start the mover of an open tier; close it before the tier. Raises `TierIOError`."""

    def start() -> Connection:
        tier.index.forget_dead_readers()
        setup = Setup(
            attachment_of(tier, options.direct_io is not DirectIO.OFF),
            HEADER_BYTES,
            arena.geometry.slot_bytes,
            arena.geometry.slots,
            options.io_threads,
            has_prefault,
            arena.is_huge,
        )
        return launch(setup, arena.duplicate())

    mover = Mover(start, ThreadPoolExecutor(1, "kvcascade-keeper"))
    try:
        mover.start()
    except BaseException:
        mover.close()
        raise
    return mover
