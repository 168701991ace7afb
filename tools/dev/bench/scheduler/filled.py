"""An NVMe tier with many blocks, created without writing their payload.

The writer of a path grants slots, commits entries and keeps recency, in the order in which blocks
would arrive. Hashes are random, so the index grows as in use. Files are preallocated, payloads are
not written, and checksums are arbitrary, because no block is read.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from .....assembly.node_parts import OpenTier, SlotMemory
from .....assembly.path_parts import existing_names
from .....handlers.node.path.path_service import IO_THREADS, WriterService
from .....handlers.node.path_wire import NodeJoined, NodeState
from .....manager.below.node_feed import NodeFeed
from .....manager.below.node_tier import NodeTier
from .....manager.below.port import TierFacts
from .....manager.cascading import CascadingOffloadingManager
from .....manager.core import ManagerOptions
from .....manager.first_tier import Tier
from .....tiers.base import BlockHash
from .....tiers.cpu.cpu_backend import CpuBackend
from .....tiers.nvme.disk.filesystem import RealFileSystem
from .....tiers.nvme.namespace import NamespaceKey
from .....tiers.nvme.path.frames import frame
from .....tiers.nvme.path.lmdb_block_table import open_block_table
from .....tiers.nvme.path.path_lock import try_lead
from .....tiers.nvme.path.path_messages import (
    PROTOCOL,
    Commit,
    CommitDone,
    FromNode,
    Grant,
    Granted,
    Hello,
    PathOptions,
    Touch,
    Welcome,
)
from .....tiers.nvme.path.presence_file import PRESENCE, boot_id, map_presence
from .....tiers.nvme.path.writer.namespace.namespace_home import spec_of
from .....tiers.nvme.path.writer.namespace.namespace_start import StartMeans
from .....tiers.nvme.path.writer.path_plan import plan_segments
from .....tiers.nvme.path.writer.path_writer import PathWriter
from .....tiers.policies import create
from ....commands.bench.bench_results import BenchError
from ....commands.bench.bench_tier import NAME, open_bench_tier
from ..measurement import MeasurementSetup, Say

BLOCK_BYTES = 4096
FILL_BATCH = 512
"""Entries per commit, as many as the manager's largest job."""
METADATA_FACTOR = 1.25
SPARE_BYTES = 128 << 20
TOUCHED = 2000
"""Number of first blocks of which every second one is used again; the others are evicted first."""
GROUP_SUFFIX = bytes(4)
CLIENT = 1
ANSWER_LIMIT_S = 60.0
"""Longest wait for an answer of the writer, which makes files meanwhile."""
PAUSE_S = 0.001
STOP_LIMIT_S = 60.0

Answer = TypeVar("Answer", Welcome, Granted, CommitDone)


def key_of(number: int) -> BlockHash:
    """Return the hash of a block by its order of arrival."""
    digest = hashlib.sha256(number.to_bytes(8, "little")).digest()
    return BlockHash(digest + GROUP_SUFFIX)


def coldest_keys(blocks: int, n: int) -> list[BlockHash]:
    """Return the next `n` victims, in order, of a tier that was just filled."""
    order = [*range(1, min(TOUCHED, blocks), 2), *range(min(TOUCHED, blocks), blocks)]
    return [key_of(number) for number in order[:n]]


def namespace_key(blocks: int) -> NamespaceKey:
    """Return the namespace of a tier with `blocks` blocks."""
    return NamespaceKey("bench", {"purpose": "bench", "blocks": blocks})


def capacity_bytes(blocks: int) -> int:
    """Return the capacity of a tier with room for `blocks` small blocks."""
    return int(blocks * BLOCK_BYTES * METADATA_FACTOR) + SPARE_BYTES


def filled(setup: MeasurementSetup, blocks: int) -> Path:
    """Return the folder of a tier with `blocks` blocks; it is created once per run, beside
    `setup.folder`."""
    folder = setup.folder.parent / f"filled-{blocks}"
    if folder.exists():
        return folder
    room, needed = shutil.disk_usage(setup.folder).free, capacity_bytes(blocks)
    if needed > room:
        raise BenchError(
            f"an index of {blocks:,} blocks needs {needed >> 20} MiB in {setup.folder.parent}, "
            f"{room >> 20} are free; free some, give another --path, or use --quick"
        )
    folder.mkdir()
    try:
        fill(folder, blocks, setup.say)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def fill(folder: Path, blocks: int, say: Say) -> None:
    """Fill an empty tier and close it."""
    fs = RealFileSystem()
    lock = try_lead(fs, folder)
    assert lock is not None, "nobody else has the folder"
    means = StartMeans(fs, time.time, open_block_table, boot_id())
    options = PathOptions(capacity_bytes(blocks))
    try:
        with ThreadPoolExecutor(IO_THREADS) as executor:
            writer = PathWriter(means, [folder], options, time.monotonic, executor)
            try:
                _Filler(writer, folder, blocks).fill(say)
            finally:
                writer.close()
    finally:
        lock.release()


class _Filler:
    """The only client of a writer. One thread."""

    def __init__(self, writer: PathWriter, folder: Path, blocks: int) -> None:
        self._writer = writer
        self._blocks = blocks
        spec = spec_of(namespace_key(blocks), BLOCK_BYTES)
        writer.connect(CLIENT)
        hello = Hello(
            PROTOCOL, "bench", (str(folder),), spec, PathOptions(capacity_bytes(blocks)), False
        )
        welcome = self._ask(hello, Welcome)
        if welcome.slots < blocks:
            raise BenchError(f"the tier in {folder} has {welcome.slots} slots for {blocks} blocks")

    def fill(self, say: Say) -> None:
        """Add all blocks; a message lists the most recent one first, as prompts have heads."""
        touched = min(TOUCHED, self._blocks)
        for start in range(0, self._blocks, FILL_BATCH):
            say(f"filling an index: {start:,} of {self._blocks:,} blocks")
            end = min(start + FILL_BATCH, self._blocks)
            self._add([key_of(number) for number in reversed(range(start, end))])
            if start < touched <= end:
                used = [key_of(number) for number in reversed(range(0, touched, 2))]
                self._writer.receive(CLIENT, Touch([*used]))

    def _add(self, keys: list[BlockHash]) -> None:
        """Add blocks like a store does, without the payload."""
        granted = self._ask(Grant(1, [*keys]), Granted)
        slots = np.frombuffer(granted.slots, np.int32)
        if (slots < 0).any():
            raise BenchError(f"the tier took no more blocks: {granted.why.value}")
        checksums = slots.astype(np.uint64).tobytes()
        commit = Commit(1, granted.epoch, [*keys], granted.slots, checksums)
        if any(self._ask(commit, CommitDone).outcomes):
            raise BenchError("the index took no more entries; is the disk full?")

    def _ask(self, message: FromNode, kind: type[Answer]) -> Answer:
        self._writer.receive(CLIENT, message)
        end_s = time.monotonic() + ANSWER_LIMIT_S
        while time.monotonic() < end_s:
            for _, answer in self._writer.step():
                if isinstance(answer, kind):
                    return answer
            time.sleep(PAUSE_S)  # files are being made
        raise BenchError(f"the writer did not answer within {ANSWER_LIMIT_S:.0f} s")


class StalledNode:
    """A node that has joined and never ends a job, so pending jobs stay pending."""

    def __init__(self, take: Callable[[Any], None], folder: Path, slots: int) -> None:
        self.jobs: list[int] = []
        take(NodeJoined(NodeState.FOLLOWING, str(folder), slots, 0))

    def submit(self, make_job: Callable[[int], Any], on_end: Callable[[Any], None]) -> bool:
        """Encode a job as for a process, and keep it."""
        self.jobs.append(len(frame(make_job(len(self.jobs) + 1))))
        return True

    def tell(self, message: Any) -> None:
        """Ignore a note."""

    def flush(self) -> None:
        """Do nothing: nothing is sent."""

    def poll(self) -> None:
        """Do nothing: no answer comes."""

    def listen(self) -> None:
        """Do nothing: no answer comes."""

    def wait_for_news(self, limit_s: float) -> None:
        """Do nothing: none comes."""

    def replace(self) -> None:
        """Do nothing: no transfer hangs."""

    def kill(self) -> bool:
        """Return True: nothing runs."""
        return True


@dataclass(frozen=True, slots=True)
class StalledTier:
    """A filled tier below a CPU tier without bytes; nobody writes it."""

    manager: CascadingOffloadingManager
    node: StalledNode
    presence: Path
    """File that lookups read."""


def open_stalled(folder: Path, blocks: int, cpu_blocks: int) -> StalledTier:
    """Open a filled tier for lookups; promotions start and never finish."""
    fs = RealFileSystem()
    (name,) = existing_names(fs, folder)
    home = folder / name
    slots = plan_segments(capacity_bytes(blocks), BLOCK_BYTES, 1).slots
    with ThreadPoolExecutor(1) as executor:
        facts = TierFacts(NAME, "NVME", BLOCK_BYTES, slots)
        feed = NodeFeed(
            facts,
            lambda path, count: map_presence(fs, Path(path), count),
            executor,
            time.monotonic,
            with_events=False,
        )
        node = StalledNode(feed.take, home, slots)
        port = NodeTier(node, feed, facts, time.monotonic)
        port.maintain()  # maps the table
    port.maintain()
    return StalledTier(_manager(port, cpu_blocks), node, home / PRESENCE)


@dataclass(frozen=True, slots=True)
class WrittenTier:
    """A filled tier below a CPU tier, with the node and the writer in this process."""

    manager: CascadingOffloadingManager
    tier: OpenTier
    service: WriterService

    def holds(self, keys: Sequence[BlockHash]) -> int:
        """Return how many of these blocks the NVMe tier has."""
        return sum(bool(self.tier.port.may_hold(key)) for key in keys)

    def share_of_victims(self, keys: Sequence[BlockHash]) -> float:
        """Return the share of these blocks that are next victims in this order.

        The writer must be idle.
        """
        (namespace,) = self.service._writer.namespaces.values()
        victims = namespace.recency.victims(len(keys))
        entries = namespace.table.get_many(keys)
        pairs = zip(victims, entries, strict=False)
        return sum(e is not None and e.slot == slot for slot, e in pairs) / len(keys)

    def close(self) -> None:
        """Close the tier cleanly."""
        self.tier.close()
        self.service.stop(STOP_LIMIT_S)


def open_written(folder: Path, blocks: int, cpu_blocks: int) -> WrittenTier:
    """Open a filled tier as an engine that writes its path does, all of it in this process."""
    fs = RealFileSystem()
    lock = try_lead(fs, folder)
    if lock is None:
        raise BenchError(f"another process writes {folder}")
    service = WriterService(fs, [folder], PathOptions(capacity_bytes(blocks)), lock)
    try:
        view = memoryview(bytearray(BLOCK_BYTES * cpu_blocks))
        # No block is moved, so buffers beside small pages would only count as memory.
        memory = SlotMemory(BLOCK_BYTES, cpu_blocks, view, is_huge=True)
        tier = open_bench_tier(folder, capacity_bytes(blocks), namespace_key(blocks), memory)
    except BaseException:
        service.stop(STOP_LIMIT_S)
        raise
    return WrittenTier(_manager(tier.port, cpu_blocks), tier, service)


def _manager(port: NodeTier, cpu_blocks: int) -> CascadingOffloadingManager:
    top = Tier("cpu", CpuBackend(BLOCK_BYTES, cpu_blocks), create("lru", cpu_blocks))
    return CascadingOffloadingManager(top, port, ManagerOptions(with_events=False))
