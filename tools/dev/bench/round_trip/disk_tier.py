"""An NVMe tier for use without an engine, with LMDB or with an index in memory.

If LMDB is installed, the tier is the one that engines open. Otherwise the index is a dictionary
that is built from the slot records when the tier is opened. Segments, slot records, checksums,
block store and handlers are the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from .....manager.level import Tier
from .....tiers.base import BlockHash, BlockStatus, LoadStoreSpec
from .....tiers.cpu.cpu_backend import CpuBackend
from .....tiers.nvme.disk.filesystem import RealFileSystem
from .....tiers.nvme.index.index_port import CommitOutcome, Removal, SlotTest
from .....tiers.nvme.namespace import NamespaceKey
from .....tiers.nvme.nvme_backend import MEDIUM, NvmeSpec
from .....tiers.nvme.segments.format import IndexEntry, SegmentLayout
from .....tiers.nvme.segments.segment_files import SegmentSet
from .....tiers.nvme.segments.store import BlockStore, Durability
from .....tiers.policies import OrderedPolicy, create

LMDB, RECORDS = "LMDB", "in memory, from slot records"
NAME = "nvme"
SEGMENT_BYTES = 256 << 20
SPARE_BYTES = 256 << 20
METADATA_FACTOR = 1.25
"""Factor for the disk space of a tier's metadata."""


@dataclass(frozen=True, slots=True)
class DiskTierOptions:
    """Options of the tier."""

    folder: Path
    """Existing folder for the tier."""
    blocks: int
    block_bytes: int
    """Size of a block; a multiple of 4096."""

    @property
    def key(self) -> NamespaceKey:
        """Return the namespace of the blocks."""
        return NamespaceKey("round-trip", {"block_bytes": self.block_bytes})


@dataclass(frozen=True, slots=True)
class DiskTier:
    """An open tier."""

    store: BlockStore
    tier: Tier
    index: str
    """Kind of the index: `LMDB` or `RECORDS`."""
    close: Callable[[], object]


def index_here() -> str:
    """Return the kind of index that this installation supports."""
    return LMDB if find_spec("lmdb") else RECORDS


def open_disk_tier(wanted: DiskTierOptions, index: str) -> DiskTier:
    """Open or create a tier with this kind of index. Raises a `KVCascadeError`."""
    return _with_lmdb(wanted) if index == LMDB else _with_records(wanted)


def _with_lmdb(wanted: DiskTierOptions) -> DiskTier:
    from .....tiers.nvme.opening import open_nvme_tier
    from .....tiers.nvme.tier import NvmeTierConfig

    size = wanted.blocks * wanted.block_bytes
    config = NvmeTierConfig(
        paths=(wanted.folder,),
        capacity_bytes=int(size * METADATA_FACTOR) + SPARE_BYTES,
        block_bytes=wanted.block_bytes,
        key=wanted.key,
    )
    with ExitStack() as undo:
        executor: Executor = undo.enter_context(ThreadPoolExecutor(1, "kvcascade-bench-index"))
        tier = open_nvme_tier(config, executor)
        undo.callback(tier.close)
        policy = create("lru", tier.backend.capacity, tier.directory, tier.arrays)
        assert isinstance(policy, OrderedPolicy)
        if tier.recovered:
            policy.reconcile(tier.live_slots())
        return DiskTier(tier.store, Tier(NAME, tier.backend, policy), LMDB, undo.pop_all().close)


def _with_records(wanted: DiskTierOptions) -> DiskTier:
    slots = max(1, min(wanted.blocks, SEGMENT_BYTES // wanted.block_bytes))
    layout = SegmentLayout(wanted.block_bytes, slots, wanted.key.fingerprint)
    segments = SegmentSet(RealFileSystem(), [wanted.folder], layout)
    with ExitStack() as undo:
        undo.callback(segments.close)
        there = set(segments.found())
        for number in range(-(-wanted.blocks // slots)):
            (segments.open if number in there else segments.create)(number)
        index = RecordIndex(segments)
        backend = RecordBackend(wanted.block_bytes, segments.count * slots)
        policy = create("lru", backend.capacity)
        known = dict(index.keys())
        taken = [entry.slot for entry in known.values()]
        hashes = [BlockHash(key) for key in known]
        policy.insert_many(hashes, backend.adopt(taken))
        policy.mark_ready(hashes, taken)
        store = BlockStore(index, segments, Durability.PROCESS, index.next_generation)
        return DiskTier(store, Tier(NAME, backend, policy), RECORDS, undo.pop_all().close)


class RecordIndex:
    """An index in memory over the segments of this process; see `IndexPort`. Thread-safe."""

    def __init__(self, segments: SegmentSet) -> None:
        """Read every slot record of the open segments; of two records for a block, the later one
        counts."""
        self.epoch = 0
        self.has_panicked = False
        self.next_generation = 1
        """Next generation, larger than that of any block found."""
        self._lock = threading.Lock()
        self._entries: dict[bytes, IndexEntry] = {}
        self._keys: dict[int, bytes] = {}
        """Mapping of slots to the blocks in them."""
        records = [pair for number in segments.numbers for pair in segments.records(number)]
        for slot, record in sorted(records, key=lambda pair: pair[1].generation):
            entry = IndexEntry(slot, record.length, record.checksum, record.generation)
            self._put(record.key, entry)
            self.next_generation = record.generation + 1

    def entry(self, key: bytes) -> IndexEntry | None:
        """Return the entry of a block."""
        return self._entries.get(key)

    def keys(self) -> Iterator[tuple[bytes, IndexEntry]]:
        """Yield every block with its entry."""
        with self._lock:
            return iter(list(self._entries.items()))

    def commit(
        self,
        epoch: int,
        removals: Sequence[Removal],
        puts: Sequence[tuple[BlockHash, IndexEntry]] = (),
        is_own: SlotTest | None = None,
        held: set[BlockHash] | None = None,
        read_bytes: int = 0,
    ) -> CommitOutcome:
        """Remove and add entries; no other process uses these segments, so no block is held."""
        with self._lock:
            for removal in removals:
                entry = self._entries.get(removal.key)
                if entry and (entry.slot, entry.generation) == (removal.slot, removal.generation):
                    self._remove(removal.key)
            for key, entry in puts:
                self._put(key, entry)
        return CommitOutcome.DONE

    def take_away(
        self, epoch: int, entries: Sequence[tuple[bytes, bytes]]
    ) -> tuple[CommitOutcome, int]:
        """Remove entries that are unchanged; return the number of removed entries."""
        removed = 0
        with self._lock:
            for key, value in entries:
                entry = self._entries.get(key)
                if entry is not None and entry.pack(key) == value:
                    self._remove(key)
                    removed += 1
        return CommitOutcome.DONE, removed

    def _put(self, key: bytes, entry: IndexEntry) -> None:
        """Add an entry; it replaces the previous block of its slot."""
        for stale in (self._keys.get(entry.slot), key):
            if stale is not None:
                self._remove(stale)
        self._entries[key] = entry
        self._keys[entry.slot] = key

    def _remove(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._keys.pop(entry.slot, None)


class RecordBackend(CpuBackend):
    """Slots of segments whose index is a `RecordIndex`. One thread, the manager's."""

    is_lasting = True

    def __init__(self, block_size: int, capacity: int) -> None:
        super().__init__(block_size, capacity)
        self.medium = MEDIUM

    def get_load_store_spec(
        self, block_hashes: Sequence[BlockHash], statuses: Sequence[BlockStatus]
    ) -> LoadStoreSpec:
        slots = np.array([status.block_id for status in statuses], dtype=np.int32)
        return NvmeSpec(tuple(block_hashes), slots, epoch=0)
