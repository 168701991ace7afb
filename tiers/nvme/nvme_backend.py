"""`NvmeBackend`: slots in segment files. Used by the manager's thread only; does no I/O.

A slot whose block was committed may be reused at once. The entry to remove travels with the next
store (`NvmeSpec.removals`), and its removal is committed before anything is written.

The slots are those of the segments that this process owns; segments arrive and leave in `maintain`.
A block in any other segment has a status only to be pinned and read.
"""

from __future__ import annotations

import ctypes
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...errors import NoSpaceError
from ...logs import get_logger
from ..base import (
    NOT_READY,
    Backend,
    BlockHash,
    BlockStatus,
    CachePolicy,
    LoadStoreSpec,
    Moved,
    SlotArray,
)
from .index.index_port import Removal
from .index_directory import IndexDirectory
from .segments.extents import Extent, ExtentPool, complement
from .writer.failing_devices import OnEnd, RecordRepairs, RestingPaths
from .writer.growth import Arrival, SegmentGrowth

MEDIUM = "NVME"
MIN_SPREAD_BLOCKS = 16
"""Smallest batch that is spread over the paths; smaller ones go to one path in turn, as large
transfers are faster than many small ones."""
REMOVALS_PER_JOB = 1024
"""Number of pending removals at which they are committed without waiting for a store."""
BATCHES_AHEAD = 4
"""Segments are requested while fewer slots are free than this many batches take, at the largest
batch size so far. The manager starts that many batches at once, and evicts if there is no room for
one."""
MAX_AHEAD_BLOCKS = 2048
"""Largest number of free slots that are kept ahead of need."""
COLD_SAMPLE_BLOCKS = 128
COLD_SAMPLE_SHARE = 8
"""Number of coldest blocks, or share of all blocks, that are sampled to find the segment worth
least."""

_log = get_logger(__name__)


class Background(ABC):
    """Work that the backend hands to an I/O thread; no method waits."""

    @abstractmethod
    def commit(self, removals: Sequence[Removal], epoch: int) -> None:
        """Queue an index commit."""

    @abstractmethod
    def repair_records(self, slots: Set[int], on_end: OnEnd) -> None:
        """Queue rewriting the records of these slots from the index."""

    @abstractmethod
    def take_orphans(self) -> list[int]:
        """Return slots for which `repair_records` found no entry."""


@dataclass(frozen=True, slots=True)
class NvmeSpec(LoadStoreSpec):
    """Blocks of the NVMe tier."""

    hashes: tuple[BlockHash, ...]
    slots: SlotArray
    epoch: int
    """Epoch (reset number) that these blocks belong to."""
    values: tuple[bytes | None, ...] | None = None
    """For a load: the raw index entries; they stay valid because the blocks are pinned."""
    removals: tuple[Removal, ...] = ()
    """For a store: entries to remove first."""

    @staticmethod
    def medium() -> str:
        return MEDIUM


class StatusTable:
    """Status of every slot, 8 bytes each, and flags for owned slots and slots in use."""

    def __init__(self, capacity: int) -> None:
        memory = mmap.mmap(-1, max(1, capacity) * ctypes.sizeof(BlockStatus))
        self._table = np.frombuffer(memory, dtype=np.int32).reshape(-1, 2)[:capacity]
        # An array element costs a quarter of a separate status object over the same bytes.
        self._statuses = (BlockStatus * capacity).from_buffer(memory)
        self.used = bytearray(capacity)
        self.is_used: npt.NDArray[np.bool_] = np.frombuffer(self.used, dtype=np.bool_)
        """Flags of `used` as a numpy array over the same memory; likewise `is_owned`."""
        self.owned = bytearray(capacity)
        self.is_owned: npt.NDArray[np.bool_] = np.frombuffer(self.owned, dtype=np.bool_)

    def at(self, slot: int) -> BlockStatus:
        """Return the live status of a slot."""
        status = self._statuses[slot]
        status.block_id = slot
        return status

    def hand_out(self, extents: Iterable[Extent]) -> list[BlockStatus]:
        """Mark slots as used and not ready; return their statuses."""
        statuses: list[BlockStatus] = []
        for start, length in extents:
            self._table[start : start + length, 0] = NOT_READY
            self.is_used[start : start + length] = True
            statuses.extend(map(self.at, range(start, start + length)))
        return statuses

    def has_transfers(self, first: int, end: int) -> bool:
        """Return True if a transfer uses any of the slots `first .. end - 1`."""
        return bool(self._table[first:end, 0].any())

    def busy(self) -> list[BlockStatus]:
        """Return the slots that a transfer uses."""
        return [self.at(slot) for slot in np.flatnonzero(self.is_used & (self._table[:, 0] != 0))]


class NvmeBackend(Backend):
    """Slots of one namespace. `capacity` is the final number; segments come ahead of need."""

    is_lasting = True

    def __init__(
        self,
        block_size: int,
        table: StatusTable,
        directory: IndexDirectory,
        pools: Sequence[ExtentPool],
        growth: SegmentGrowth,
        slots_per_segment: int,
        background: Background,
    ) -> None:
        """`pools` has one pool per path with the free slots of the existing segments."""
        self.set_aside_blocks = 0
        """Number of blocks that cannot be evicted because their slot record is unreadable."""
        super().__init__(block_size, MEDIUM, len(table.is_used))
        self._table = table
        self._directory = directory
        self._pools = list(pools)
        self._growth = growth
        self._slots_per_segment = slots_per_segment
        self._held_segments = int(np.count_nonzero(table.is_owned)) // slots_per_segment
        """Number of owned segments whose slots are known here. Growth may have one more already;
        counting that one would request one segment too many."""
        self._background = background
        self._repairs = RecordRepairs(directory, growth.clock)
        self._next_path = 0
        self._resting = RestingPaths(len(pools), slots_per_segment, growth.clock)
        self._ahead_blocks = -(-slots_per_segment // 2)
        """Number of slots to keep free while segments can be had. Half a segment leaves enough time
        to make one. A process that stores little does not take a second segment of the shared
        capacity."""
        self._tell_found: Callable[[SlotArray], None] | None = None

    def get_num_free_blocks(self) -> int:
        self.take_arrived()
        self._repairs.begin(self._background.repair_records)
        free = self._count_free()
        if free < self._ahead_blocks:
            self._grow_ahead(free)
            self.take_arrived()
            free = self._count_free()
        return free

    def get_num_possible_blocks(self) -> int:
        return self.get_num_free_blocks() + self._growth.may_come * self._slots_per_segment

    def allocate_blocks(self, block_hashes: Sequence[BlockHash]) -> list[BlockStatus]:
        n, free = len(block_hashes), self.get_num_free_blocks()
        if n > free:
            raise NoSpaceError(f"{n} slots asked for, {free} free; evict first")
        self._ahead_blocks = max(self._ahead_blocks, min(BATCHES_AHEAD * n, MAX_AHEAD_BLOCKS))
        self._grow_ahead(free - n)
        return self._table.hand_out(self._take(n))

    def free(self, status: BlockStatus) -> None:
        slot = status.block_id
        if not self._table.owned[slot]:  # a foreign block has no slot to free
            return
        assert self._table.is_used[slot], "a slot may be freed only once"
        self._table.is_used[slot] = False
        status.ref_cnt = 0
        self._directory.released(slot)
        self._pool_of(slot).free(slot)
        if self._directory.pending_removals >= REMOVALS_PER_JOB:
            self.flush_removals()

    def avoid(self, slots: Sequence[int]) -> bool:
        return self._resting.rest(np.array(slots, dtype=np.intp), self._table.is_owned)

    def get_load_store_spec(
        self, block_hashes: Sequence[BlockHash], statuses: Sequence[BlockStatus]
    ) -> NvmeSpec:
        slots = np.array([status.block_id for status in statuses], dtype=np.int32)
        hashes, epoch = tuple(block_hashes), self._directory.epoch
        if statuses and statuses[0].ref_cnt == NOT_READY:
            removals = tuple(self._directory.take_removals())
            return NvmeSpec(hashes, slots, epoch, removals=removals)
        values = tuple(self._directory.values_of(list(block_hashes)))
        return NvmeSpec(hashes, slots, epoch, values=values)

    def reset(self) -> list[BlockStatus]:
        table = self._table
        busy = table.busy()
        self.take_arrived()
        table.is_used[:] = False
        for status in busy:
            table.is_used[status.block_id] = True
        self._pools = free_pools(
            table.is_used, table.is_owned, self._slots_per_segment, self._paths
        )
        self.flush_removals()
        return busy

    def maintain(self, policy: CachePolicy) -> bool:
        """Costs a few microseconds, unless a segment arrives or leaves."""
        is_overtaken = self._keep_up(policy)
        self._directory.release()  # last: an idle engine's next lookup sees the index of its time
        return is_overtaken

    def tell_found(self, told: Callable[[SlotArray], None]) -> None:
        self._tell_found = told
        told(np.flatnonzero(self._table.is_used).astype(np.int32))

    def take_moved(self) -> Moved | None:
        return self._growth.moved.take()

    def use_background(self, background: Background) -> None:
        """Use another background from now on."""
        self._background = background

    def flush_removals(self) -> None:
        """Queue a commit of the pending removals, and of the epoch if it is new."""
        self._background.commit(self._directory.take_removals(), self._directory.epoch)

    def free_extents(self) -> npt.NDArray[np.int32]:
        """Return all free runs, ascending: shape `(n, 2)`."""
        self.take_arrived()
        return _ascending(self._pools)

    def free_beside(self, used_slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Return the free runs as `free_extents` does, if exactly these slots were in use."""
        is_used = np.zeros(len(self._table.used), dtype=np.bool_)
        is_used[used_slots] = True
        self.take_arrived()
        owned = self._table.is_owned
        return _ascending(free_pools(is_used, owned, self._slots_per_segment, self._paths))

    @property
    def available(self) -> int:
        """Number of slots in the segments that this process owns, free or not."""
        self.take_arrived()
        return int(np.count_nonzero(self._table.is_owned))

    def take_arrived(self) -> None:
        """Add the empty segments that growth has created."""
        for number in self._growth.poll():
            first, end = self._span(number)
            self._table.is_owned[first:end] = True
            self._pool_of(first).free(first, end - first)
            self._directory.adopt(0)
            self._held_segments += 1

    def close(self) -> None:
        self._pools = [ExtentPool() for _ in self._pools]

    # -- inside --------------------------------------------------------------------------------

    def _grow_ahead(self, free: int) -> None:
        missing = self._ahead_blocks - free
        if missing > 0:
            more = max(-(-missing // self._slots_per_segment), self._paths)
            self._growth.want(self._held_segments + len(self._growth.adopted) + more)

    def _keep_up(self, policy: CachePolicy) -> bool:
        """Do the work of `maintain`, except for the final release."""
        directory, growth = self._directory, self._growth
        directory.release()  # what arrives and leaves now is compared with the current index
        if directory.is_overtaken:
            growth.moved.note_lost(np.flatnonzero(self._table.is_used & self._table.is_owned))
            directory.join_epoch()
            return True
        if growth.adopted:
            self._take_adopted(policy)
        if growth.surplus > 0:
            self._let_go_of_one(policy)
        for slot in self._background.take_orphans():
            if self._table.is_used[slot] and self._table.at(slot).ref_cnt == 0:
                directory.put_orphan(slot)
        for slot in self._repairs.take_unrepairable():
            self._set_aside(slot, policy)
        for slot in self._repairs.take_retried():
            self._take_back(slot, policy)
        growth.balance()
        return False

    def _set_aside(self, slot: int, policy: CachePolicy) -> None:
        """Exclude a slot from eviction if its block still cannot be identified."""
        table, directory = self._table, self._directory
        is_idle = table.is_owned[slot] and table.is_used[slot] and table.at(slot).ref_cnt == 0
        if is_idle and directory.at_slot(slot) is None and not directory.is_leaving(slot, slot + 1):
            if self.set_aside_blocks == 0:
                _log.warning(
                    "records of slots can be neither read nor written; their blocks stay, and the "
                    "slots are not used again as long as that is so; check the device"
                )
            self.set_aside_blocks += 1
            policy.disown([slot])
            directory.set_aside(slot)
            table.is_used[slot] = table.is_owned[slot] = False
            self._repairs.retry_later(slot)

    def _take_back(self, slot: int, policy: CachePolicy) -> None:
        """Return a slot that was set aside to normal use, if its block can be identified now."""
        table, directory = self._table, self._directory
        if not directory.is_set_aside(slot):  # it left with its segment
            return
        table.is_used[slot] = table.is_owned[slot] = True
        found = directory.at_slot(slot)
        if found is None:
            table.is_used[slot] = table.is_owned[slot] = False
            self._repairs.retry_later(slot)
            return
        self.set_aside_blocks -= 1
        directory.take_back(slot)
        policy.adopt([found[0]], [slot])

    @property
    def _paths(self) -> int:
        return len(self._pools)

    def _count_free(self) -> int:
        return sum(len(self._pools[part]) for part in self._resting.awake)

    def _pool_of(self, slot: int) -> ExtentPool:
        return self._pools[slot // self._slots_per_segment % self._paths]

    def _span(self, number: int) -> tuple[int, int]:
        """Return the first slot of a segment, and the slot after its last."""
        return number * self._slots_per_segment, (number + 1) * self._slots_per_segment

    def _take_adopted(self, policy: CachePolicy) -> None:
        """Take over adopted segments with their blocks, unless transfers in them are in flight."""
        adopted = self._growth.adopted
        for _ in range(len(adopted)):
            arrival = adopted.popleft()
            is_early = arrival.epoch > self._directory.epoch
            if is_early or self._table.has_transfers(*self._span(arrival.number)):
                adopted.append(arrival)
            else:
                self._take_one(arrival, policy)

    def _take_one(self, arrival: Arrival, policy: CachePolicy) -> None:
        first, end = self._span(arrival.number)
        table, pool = self._table, self._pool_of(first)
        blocks = arrival.blocks if arrival.epoch == self._directory.epoch else []
        slots = np.array([slot for _, slot in blocks], dtype=np.int64)
        table.is_owned[first:end] = True
        table.is_used[slots] = True
        for start, length in complement(slots, first, end):
            pool.free(start, length)
        self._directory.adopt(len(blocks))
        self._held_segments += 1
        hashes = [block_hash for block_hash, _ in blocks]
        policy.adopt(hashes, slots.tolist())
        if self._tell_found is not None:
            self._tell_found(slots.astype(np.int32))
        self._growth.moved.add(hashes, removed=False)

    def _let_go_of_one(self, policy: CachePolicy) -> None:
        """Leave the idle segment with the most of the coldest blocks to other processes."""
        growth = self._growth
        growth.surplus -= 1
        per_segment = self._slots_per_segment
        few = min(COLD_SAMPLE_BLOCKS, 1 + len(policy) // COLD_SAMPLE_SHARE)
        sample = policy.coldest(few, window=few)
        cold = np.bincount(
            [status.block_id // per_segment for _, status in sample],
            minlength=len(self._table.owned) // per_segment,
        )
        own = np.flatnonzero(self._table.is_owned.reshape(-1, per_segment).any(axis=1))
        for number in own[np.argsort(-cold[own], kind="stable")].tolist():
            first, end = self._span(number)
            if self._table.has_transfers(first, end) or self._directory.is_leaving(first, end):
                continue
            used = np.flatnonzero(self._table.is_used[first:end]) + first
            policy.disown(used.tolist())
            self._directory.abandon(first, end, len(used))
            self._pool_of(first).carve(first, end)
            self._table.is_used[first:end] = False
            self._table.is_owned[first:end] = False
            self._held_segments -= 1
            removals, epoch = self._directory.take_removals(), self._directory.epoch
            growth.let_go(number, removals, epoch)
            return

    def _take(self, n: int) -> list[Extent]:
        """Take `n` slots, spread evenly over the paths as far as they have room."""
        first, self._next_path = self._next_path, (self._next_path + 1) % self._paths
        pools = [self._pools[part] for part in self._resting.awake]
        order = [pools[(first + i) % len(pools)] for i in range(len(pools))]
        share = n if n < MIN_SPREAD_BLOCKS else -(-n // len(pools))
        extents: list[Extent] = []
        for limit in (share, n):  # the second round takes what did not fit in the first
            for pool in order:
                wanted = min(n - sum(length for _, length in extents), limit, len(pool))
                extents.extend(pool.take(wanted))
        return extents


def free_pools(
    is_used: npt.NDArray[np.bool_],
    exists: npt.NDArray[np.bool_],
    slots_per_segment: int,
    paths: int,
) -> list[ExtentPool]:
    """Return the free slots of the existing segments, as one pool per path."""
    pools = [ExtentPool() for _ in range(paths)]
    for number in range(len(is_used) // slots_per_segment):
        first = number * slots_per_segment
        end = first + slots_per_segment
        taken = is_used[first:end] | ~exists[first:end]
        used = np.flatnonzero(taken).astype(np.int64) + first
        for start, length in complement(used, first, end):
            pools[number % paths].free(start, length)
    return pools


def _ascending(pools: Sequence[ExtentPool]) -> npt.NDArray[np.int32]:
    extents = np.concatenate([pool.to_array() for pool in pools])
    return extents[np.argsort(extents[:, 0])]
