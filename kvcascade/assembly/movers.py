"""Connect the arena and the first NVMe tier by a mover process or by threads of this process."""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor

from ..config.schema import DirectIO, NvmeTierOptions
from ..handlers.node.mover import Mover
from ..handlers.node.mover_child import Connection, launch
from ..handlers.node.mover_process import MoverBackground, MoverLoadHandler, MoverStoreHandler
from ..handlers.node.mover_wire import Setup
from ..handlers.node.nvme_handlers import NvmeLoadHandler, NvmeStoreHandler
from ..manager.flow import Link
from ..tiers.cpu import Arena
from ..tiers.cpu.header import HEADER_BYTES
from ..tiers.nvme.attach import attachment_of
from ..tiers.nvme.tier import NvmeTier


def link_by_threads(arena: Arena, tier: NvmeTier, stores: Executor, loads: Executor) -> Link:
    """Return handlers that run on executors of this process."""
    return Link(
        down=NvmeStoreHandler(tier.store, arena.slot_view, stores),
        up=NvmeLoadHandler(tier.store, arena.slot_view, loads),
    )


def link_by_process(tier: NvmeTier, mover: Mover) -> Link:
    """Return handlers that leave all work to a mover, index commits included."""
    tier.backend.use_background(MoverBackground(tier.store, mover))
    return Link(down=MoverStoreHandler(tier.store, mover), up=MoverLoadHandler(tier.store, mover))


def open_mover(arena: Arena, tier: NvmeTier, options: NvmeTierOptions, has_prefault: bool) -> Mover:
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
