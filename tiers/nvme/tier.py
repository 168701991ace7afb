"""Opening an NVMe tier: the public entry.

`opened` defines the open tier, `opening` the steps of opening it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor

from ...errors import CorruptionError, os_errors
from ...logs import get_logger
from .disk.filesystem import FileSystem, RealFileSystem
from .namespace import Namespace, open_namespace, stored_slots_per_segment
from .opened import NvmeTier, NvmeTierConfig, StartReport
from .opening import Opening
from .writer.capacity import Plan, plan_capacity

_log = get_logger(__name__)


def open_nvme_tier(
    config: NvmeTierConfig,
    executor: Executor,
    fs: FileSystem | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> NvmeTier:
    """Open or create a tier; `executor` runs index commits and segment creation.

    Raises `ConfigError`, `InUseError`, `CorruptionError`, `FormatError`, `NoSpaceError` or
    `TierIOError`. Nothing stays open after an error.
    """
    with os_errors(f"opening the tier in {', '.join(map(str, config.paths))}"):
        return _open(config, executor, RealFileSystem() if fs is None else fs, clock)


def _open(
    config: NvmeTierConfig, executor: Executor, fs: FileSystem, clock: Callable[[], float]
) -> NvmeTier:
    slots = stored_slots_per_segment(fs, config.paths[0], config.key) or config.slots_per_segment
    plan_capacity(config.capacity_bytes, config.block_bytes, len(config.paths), slots)
    namespace = open_namespace(fs, config.paths, config.key, is_guest=config.is_guest)
    try:  # another process may have created it in between
        slots = namespace.slots_per_segment or config.slots_per_segment
        plan = plan_capacity(config.capacity_bytes, config.block_bytes, len(config.paths), slots)
        if not namespace.owners.is_alone:
            plan = _beside_others(plan, namespace)
    except BaseException:
        namespace.close()
        raise
    opening = Opening(config, plan, fs, namespace, executor, clock)
    try:
        return opening.run()
    except BaseException:
        opening.undo()
        raise


def _beside_others(plan: Plan, namespace: Namespace) -> Plan:
    """Return the plan, limited to the slots for which the shared index has room.

    Otherwise the index would be full before the segments are. Then nothing would be evicted, and
    nothing stored any more.
    """
    if namespace.description is None:
        raise CorruptionError(
            f"{namespace.folders[0]}/namespace.json was lost while other processes use it; stop "
            "them all, then start again"
        )
    within = plan.within(namespace.index_bytes)
    if within.segments < plan.segments:
        _log.warning(
            "%s takes %d of %d blocks: the index that running engines share has room for no more; "
            "for the larger capacity all engines of this path must be stopped once",
            namespace.folders[0],
            within.slots,
            plan.slots,
        )
    return within


__all__ = ["NvmeTier", "NvmeTierConfig", "StartReport", "open_nvme_tier"]
