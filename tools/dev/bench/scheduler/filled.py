"""An NVMe tier with many blocks, created without writing their payload.

The tier's own code allocates slots, writes slot records, commits entries and sets recency, in the
order in which blocks would arrive. Hashes are random, so the index grows as in use. Files are
preallocated, payloads are not written, and checksums are arbitrary, because no block is read.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence, Set
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .....handlers.base import OffloadingHandler, TransferResult, TransferSpec
from .....manager.cascading import CascadingOffloadingManager, ManagerOptions, build_cascade
from .....manager.flow import Link
from .....manager.level import Tier
from .....tiers.base import BlockHash
from .....tiers.cpu.cpu_backend import CpuBackend
from .....tiers.nvme.index.index_port import CommitOutcome
from .....tiers.nvme.namespace import NamespaceKey
from .....tiers.nvme.opening import open_nvme_tier
from .....tiers.nvme.segments.format import SLOT_RECORD_BYTES, IndexEntry, SlotRecord
from .....tiers.nvme.tier import NvmeTier, NvmeTierConfig
from .....tiers.policies import OrderedPolicy, create
from .....tiers.policies.lru import LruOrder
from ....commands.bench.bench_results import BenchError
from ..measurement import MeasurementSetup, Say

BLOCK_BYTES = 4096
FILL_BATCH = 512
"""Entries per commit, as many as the manager's largest job. Larger commits leave more free pages
behind than normal use does."""
METADATA_FACTOR = 1.25
SPARE_BYTES = 128 << 20
TOUCHED = 2000
"""Number of first blocks of which every second one is used again; the others are evicted first."""
GROUP_SUFFIX = bytes(4)


def key_of(number: int) -> BlockHash:
    """Return the hash of a block by its order of arrival."""
    digest = hashlib.sha256(number.to_bytes(8, "little")).digest()
    return BlockHash(digest + GROUP_SUFFIX)


def coldest_keys(blocks: int, n: int) -> list[BlockHash]:
    """Return the next `n` victims, in order, of a tier that was just filled."""
    order = [*range(1, min(TOUCHED, blocks), 2), *range(min(TOUCHED, blocks), blocks)]
    return [key_of(number) for number in order[:n]]


def config_of(folder: Path, blocks: int) -> NvmeTierConfig:
    """Return the configuration of a tier with room for `blocks` small blocks."""
    slot_bytes = BLOCK_BYTES + SLOT_RECORD_BYTES
    return NvmeTierConfig(
        paths=(folder,),
        capacity_bytes=int(blocks * slot_bytes * METADATA_FACTOR) + SPARE_BYTES,
        block_bytes=BLOCK_BYTES,
        key=NamespaceKey("bench", {"purpose": "bench", "blocks": blocks}),
    )


def filled(setup: MeasurementSetup, blocks: int) -> Path:
    """Return the folder of a tier with `blocks` blocks; it is created once per run, beside
    `setup.folder`."""
    folder = setup.folder.parent / f"filled-{blocks}"
    if folder.exists():
        return folder
    room = shutil.disk_usage(setup.folder).free
    needed = config_of(folder, blocks).capacity_bytes
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
    with ThreadPoolExecutor(1) as executor:
        tier = open_nvme_tier(config_of(folder, blocks), executor)
        try:
            tier.growth.make(len(tier.growth.missing()))
            if tier.backend.get_num_free_blocks() < blocks:
                raise BenchError(f"the tier in {folder} did not grow; is the disk full?")
            order = LruOrder(tier.backend.capacity, tier.arrays)
            first: list[int] = []
            for start in range(0, blocks, FILL_BATCH):
                say(f"filling an index: {start:,} of {blocks:,} blocks")
                slots = _add(tier, range(start, min(start + FILL_BATCH, blocks)))
                order.insert(slots, ())
                if start < TOUCHED:
                    first += slots
                    if len(first) >= min(TOUCHED, blocks):
                        order.touch(first[0 : min(TOUCHED, blocks) : 2])
        finally:
            executor.shutdown()
            tier.close()


def _add(tier: NvmeTier, numbers: range) -> list[int]:
    """Add blocks like a store does, without the payload; return their slots."""
    keys = [key_of(number) for number in numbers]
    statuses = tier.backend.allocate_blocks(keys)
    slots = [status.block_id for status in statuses]
    entries = [IndexEntry(s, BLOCK_BYTES, s, g) for s, g in zip(slots, numbers, strict=True)]
    epoch = tier.directory.epoch
    for begin, end in tier.segments.layout.runs(slots):
        records = [
            SlotRecord(key, entry.generation, entry.checksum, entry.length, epoch).pack()
            for key, entry in zip(keys[begin:end], entries[begin:end], strict=True)
        ]
        tier.segments.write_records(slots[begin], records)
    pairs = sorted(zip(keys, entries, strict=True), key=lambda pair: pair[0])
    if tier.index.commit(epoch, (), pairs) is not CommitOutcome.DONE:
        raise BenchError(f"the index in {tier.index.path} took no more entries; is the disk full?")
    tier.index.refresh()  # frees the pages that this commit replaced
    for status in statuses:
        status.ref_cnt = 0
    return slots


class Stalled(OffloadingHandler):
    """Handler that accepts every job and never finishes one, so pending jobs stay pending."""

    def __init__(self) -> None:
        self.jobs: list[int] = []

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        self.jobs.append(job_id)
        return True

    def get_finished(self) -> list[TransferResult]:
        return []

    def wait(self, job_ids: Set[int], timeout_s: float | None = None) -> None:
        return


@dataclass(slots=True)
class Opened:
    """A filled tier below a CPU tier without bytes."""

    tier: NvmeTier
    policy: OrderedPolicy
    manager: CascadingOffloadingManager
    up: Stalled

    def holds(self, keys: Sequence[BlockHash]) -> int:
        """Return how many of these blocks the NVMe tier has."""
        return sum(self.policy.get(key) is not None for key in keys)


def open_filled(folder: Path, blocks: int, cpu_blocks: int, executor: Executor) -> Opened:
    """Open a filled tier as `open_cascade` does; promotions start and never finish."""
    tier = open_nvme_tier(config_of(folder, blocks), executor)
    try:
        policy = create("lru", tier.backend.capacity, tier.directory, tier.arrays)
        assert isinstance(policy, OrderedPolicy)
        if tier.recovered:
            policy.reconcile(tier.live_slots())
        up = Stalled()
        top = Tier("cpu", CpuBackend(BLOCK_BYTES, cpu_blocks), create("lru", cpu_blocks))
        manager = build_cascade(
            [top, Tier("nvme", tier.backend, policy)],
            [Link(Stalled(), up)],
            ManagerOptions(with_events=False),
        )
    except BaseException:
        tier.close(clean=False)
        raise
    return Opened(tier, policy, manager, up)
