"""An NVMe tier without an engine: a node moves blocks between a disk and an arena."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from ....assembly.node_parts import EngineFacts, OpenTier, SlotMemory, open_node_tier
from ....config.schema import parse
from ....manager.below.port import Ended, Put
from ....tiers.base import BlockHash, BlockOutcome
from ....tiers.cpu.arena import Arena
from ....tiers.nvme.namespace import NamespaceKey
from ....tiers.policies import known_names
from .bench_results import BenchError

METADATA_FACTOR = 1.25
SPARE_BYTES = 256 << 20
"""Capacity of a tier beyond its blocks, for tables and a segment that is made ahead."""
TRANSFER_LIMIT_S = 60.0
PAUSE_S = 0.001
"""Pause before blocks are offered again for which there was no room yet."""


def tier_bytes(payload_bytes: int) -> int:
    """Return the capacity of a tier for so many bytes of blocks."""
    return int(payload_bytes * METADATA_FACTOR) + SPARE_BYTES


def open_disk_tier(folder: Path, arena: Arena, capacity_bytes: int) -> OpenTier:
    """Open or create a tier in a folder; a process moves its blocks. Raises a `KVCascadeError`."""
    nvme = {"type": "nvme", "path": str(folder), "capacity": capacity_bytes, "min_free": 0}
    cpu = {"type": "cpu", "capacity": arena.slots.nbytes}
    settings = parse({"tiers": [cpu, nvme]}, known_names())
    size = arena.geometry.slot_bytes
    engine = EngineFacts(
        NamespaceKey("bench", {"block_bytes": size}),
        SlotMemory.of(arena),
        has_prefault=False,
        with_events=False,
        stall_s=TRANSFER_LIMIT_S,
    )
    return open_node_tier("nvme", settings.nvme[0], engine, None)


class DiskMoves:
    """Blocks on their way between an arena and a tier that nobody else uses. One thread."""

    def __init__(self, tier: OpenTier) -> None:
        self._port = tier.port
        self._node = tier.node
        self._tickets = count(1)

    def cpu_s(self) -> float:
        """Return the CPU time of this process and of the node, in seconds."""
        clock = (~(self._node.pid or 0) << 3) | 2  # clock_getcpuclockid(3)
        return time.process_time() + time.clock_gettime(clock)

    def put(self, keys: Sequence[BlockHash], slots: Sequence[int]) -> None:
        """Write blocks, and wait until all are committed. Raises `BenchError`."""
        left, end_s = list(zip(keys, slots, strict=True)), time.monotonic() + TRANSFER_LIMIT_S
        while left:
            ticket = next(self._tickets)
            answers = self._port.put(ticket, [key for key, _ in left], [slot for _, slot in left])
            going = [each for each, a in zip(left, answers, strict=True) if a is Put.STARTED]
            if not going:
                self._node.wait(lambda: False, PAUSE_S)
                self._port.maintain()
            else:
                outcomes = self._end_of(ticket).outcomes
                is_stored = dict(zip(going, outcomes, strict=True))
                left = [each for each in left if is_stored.get(each) is not BlockOutcome.OK]
            if time.monotonic() > end_s:
                raise BenchError(f"writing took more than {TRANSFER_LIMIT_S:.0f} s; see the log")

    def get(self, keys: Sequence[BlockHash], slots: Sequence[int]) -> None:
        """Read blocks, and wait. Raises `BenchError` if one is missing."""
        ticket = next(self._tickets)
        self._port.get(ticket, 1, keys, slots)
        if set(self._end_of(ticket).outcomes) != {BlockOutcome.OK}:
            raise BenchError("reading failed; see the log")

    def forget(self) -> None:
        """Make every block unreachable, and keep the files. Raises `BenchError`."""
        self._port.reset()
        end_s = time.monotonic() + TRANSFER_LIMIT_S
        while self._port.feed.epoch is None:
            if time.monotonic() > end_s:
                raise BenchError(f"a reset took more than {TRANSFER_LIMIT_S:.0f} s; see the log")
            self._node.wait(lambda: False, PAUSE_S)
            self._port.maintain()

    def _end_of(self, ticket: int) -> Ended:
        self._port.wait({ticket}, TRANSFER_LIMIT_S)
        for ended in self._port.poll():
            if ended.ticket == ticket:
                return ended
        raise BenchError(f"a transfer took more than {TRANSFER_LIMIT_S:.0f} s")
