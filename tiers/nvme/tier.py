"""Opening an NVMe tier: the way in.

What it consists of is in `opened`, the steps are in `opening`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor

from .capacity import plan_capacity
from .filesystem import FileSystem, RealFileSystem
from .namespace import open_namespace, stored_slots_per_segment
from .opened import NvmeTier, NvmeTierConfig, StartReport
from .opening import Opening


def open_nvme_tier(
    config: NvmeTierConfig,
    executor: Executor,
    fs: FileSystem | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> NvmeTier:
    """Open or create a tier; `executor` runs index commits and segment creation.

    Raises `ConfigError`, `InUseError`, `CorruptionError`, `FormatError`, `NoSpaceError` or
    `TierIOError`; nothing is held afterwards.
    """
    fs = RealFileSystem() if fs is None else fs
    slots = stored_slots_per_segment(fs, config.paths[0], config.key) or config.slots_per_segment
    plan_capacity(config.capacity_bytes, config.block_bytes, len(config.paths), slots)
    namespace = open_namespace(fs, config.paths, config.key)
    try:  # another process may have made it in between
        slots = namespace.slots_per_segment or config.slots_per_segment
        plan = plan_capacity(config.capacity_bytes, config.block_bytes, len(config.paths), slots)
    except BaseException:
        namespace.close()
        raise
    opening = Opening(config, plan, fs, namespace, executor, clock)
    try:
        return opening.run()
    except BaseException:
        opening.undo()
        raise


__all__ = ["NvmeTier", "NvmeTierConfig", "StartReport", "open_nvme_tier"]
