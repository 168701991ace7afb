"""NVMe tiers that benchmarks open: those of an engine, each behind a node."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ....assembly.node_parts import EngineFacts, OpenTier, SlotMemory, open_node_tier
from ....assembly.path_parts import path_parts
from ....tiers.base import BlockHash
from ....tiers.nvme.disk.filesystem import RealFileSystem
from ....tiers.nvme.namespace import NamespaceKey
from .bench_results import BenchError

NAME = "nvme"
STALL_S = 60.0
"""Time without the end of a read in flight, in seconds, after which the tier rests."""
PROCESS_CLOCK = 2
"""Kind of the clock that `clock_getcpuclockid` names for a process: CPUCLOCK_SCHED of Linux."""
HASH_BYTES = 32
GROUP = bytes(4)
"""Number of the KV group, with which vLLM's keys end."""


def open_bench_tier(
    folder: Path, capacity_bytes: int, key: NamespaceKey, memory: SlotMemory
) -> OpenTier:
    """Open or create a tier in a folder, with default options and no reserve.

    The node is a process, or a thread if it cannot have the memory. Raises a `KVCascadeError`.
    """
    given = {"capacity": capacity_bytes, "min_free": 0}
    parts = path_parts(RealFileSystem(), folder, given, NAME)
    engine = EngineFacts(key, memory, has_prefault=True, with_events=False, stall_s=STALL_S)
    return open_node_tier(NAME, parts.tier, engine)


def new_keys(n: int) -> list[BlockHash]:
    """Return keys that were never used."""
    return [BlockHash(os.urandom(HASH_BYTES) + GROUP) for _ in range(n)]


def reset_tier(tier: OpenTier, limit_s: float) -> None:
    """Make room where blocks are. Raises `BenchError` after `limit_s` seconds."""
    port = tier.port

    def is_empty() -> bool:
        port.maintain()
        return port.feed.epoch is not None

    port.reset()
    if not tier.node.wait(is_empty, limit_s):
        raise BenchError(f"emptying the tier took more than {limit_s:.0f} s")


def node_cpu_s(tier: OpenTier) -> float:
    """Return the CPU time of all threads of the node's process, in seconds. Raises `BenchError`."""
    pid = tier.node.pid
    if pid is None:
        raise BenchError("the node ended; see the log")
    return time.clock_gettime(~pid << 3 | PROCESS_CLOCK)
