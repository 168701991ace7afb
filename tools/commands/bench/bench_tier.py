"""NVMe tiers that benchmarks open: those of an engine, each behind a node."""

from __future__ import annotations

from pathlib import Path

from ....assembly.node_parts import EngineFacts, OpenTier, SlotMemory, open_node_tier
from ....assembly.path_parts import path_parts
from ....tiers.nvme.disk.filesystem import RealFileSystem
from ....tiers.nvme.namespace import NamespaceKey

NAME = "nvme"
STALL_S = 60.0
"""Time without the end of a read in flight, in seconds, after which the tier rests."""


def open_bench_tier(
    folder: Path, capacity_bytes: int, key: NamespaceKey, memory: SlotMemory
) -> OpenTier:
    """Open or create a tier in a folder, with default options and no reserve.

    The node is a process, or a thread if it cannot have the memory. Raises a `KVCascadeError`.
    """
    given = {"capacity": capacity_bytes, "min_free": 0}
    parts = path_parts(RealFileSystem(), folder, given, NAME)
    engine = EngineFacts(key, memory, has_prefault=True, with_events=False, stall_s=STALL_S)
    return open_node_tier(NAME, parts.tier, engine, None)
