"""NVMe tiers that benchmarks open: those of an engine, each behind a node."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from ....assembly.node_parts import EngineFacts, OpenTier, SlotMemory, open_node_tier
from ....assembly.path_parts import path_parts
from ....manager.below.port import Ended, Put
from ....manager.core import MAX_JOBS_IN_FLIGHT
from ....tiers.base import BlockHash, BlockOutcome
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
OFFERED_AGAIN = frozenset({BlockOutcome.CANCELLED, BlockOutcome.NO_SPACE, BlockOutcome.GONE})
"""Outcomes of writes for which there was no file yet, or before which the path was reset."""
PAUSE_S = 0.002
"""Longest wait until blocks that were put off are offered again."""

_tickets = count(1)


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


def move_blocks(
    tier: OpenTier, keys: Sequence[BlockHash], per_job: int, limit_s: float, *, is_put: bool
) -> None:
    """Write block `i` from slot `i` of the memory, or read it into that slot, in some jobs at once.

    Writes that are put off are offered again. Raises `BenchError` if a block fails, or after
    `limit_s` seconds.
    """
    port, left, flying = tier.port, list(range(len(keys))), dict[int, list[int]]()
    put_off = OFFERED_AGAIN if is_put else frozenset[BlockOutcome]()
    end_s = time.monotonic() + limit_s
    while left or flying:
        while left and len(flying) < MAX_JOBS_IN_FLIGHT:
            some, ticket = left[:per_job], next(_tickets)
            started = _start(tier, ticket, [keys[at] for at in some], some, is_put=is_put)
            if not started:
                break
            flying[ticket], refused = started, set(some).difference(started)
            left = [at for at in some if at in refused] + left[per_job:]
        port.maintain()
        for ended in _ended(tier, PAUSE_S if left else limit_s):
            moved = dict(zip(flying.pop(ended.ticket), ended.outcomes, strict=True))
            left += [at for at, outcome in moved.items() if outcome in put_off]
            for failed in {*moved.values()} - put_off - {BlockOutcome.OK}:
                doing = "writing" if is_put else "reading"
                raise BenchError(f"{doing} failed: {failed.value}; see the log")
        port.take_lost()
        if time.monotonic() > end_s:
            raise BenchError(f"{len(left)} blocks were not moved in {limit_s:.0f} s")


def _start(
    tier: OpenTier, ticket: int, keys: list[BlockHash], slots: list[int], *, is_put: bool
) -> list[int]:
    """Start a job; return the slots of the blocks that it moves."""
    if not is_put:
        tier.port.get(ticket, 1, keys, slots)
        return slots
    answers = tier.port.put(ticket, keys, slots)
    return [slot for slot, answer in zip(slots, answers, strict=True) if answer is Put.STARTED]


def _ended(tier: OpenTier, limit_s: float) -> list[Ended]:
    """Return jobs that ended; wait for the first one, `limit_s` at most."""
    found: list[Ended] = []

    def has_ended() -> bool:
        found.extend(tier.port.poll())
        return bool(found)

    tier.node.wait(has_ended, limit_s)
    return found


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
