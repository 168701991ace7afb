"""`IndexDirectory`: which block lies in which slot of the NVMe tier, for the policy.

LMDB holds the committed entries. Two small dictionaries lie above it. The *overlay* holds blocks
that were given a slot and are not seen in the index yet. The *tombstones* are blocks that left and
are still seen there. Both shrink as the held transaction is renewed.

Other processes store blocks too. An entry whose slot is not this process's own is *foreign*. A
foreign block can be found and read like any other, but the policy does not order it. Dropping it
here only changes what this process reports about it.

A slot of its own whose record can be neither read nor written is *set aside*. Its block is treated
as foreign from then on, so that no eviction considers it again.

Other processes also remove entries: of damaged blocks, and of blocks that an operator wants gone. A
slot that lost its entry this way is *orphaned*. It stays in use until it is chosen for eviction.
Its record then shows that no entry names it, and it is evicted like any other slot.

The *epoch* numbers the resets of the namespace. It is the sum of one counter per process, in memory
that all processes map, so each reset yields a new epoch.

Used by the manager's thread only. No method touches a file except through mapped memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..base import BlockHash, BlockStatus
from ..policies.directory import BlockDirectory
from ..policies.order import scalars
from .index.index_port import Removal
from .segments.format import parse_entry
from .segments.segment_files import RecordPages, SegmentSet

if TYPE_CHECKING:
    from .index.block_index import BlockIndex

REFRESH_EVERY_CHANGES = 64
"""Number of puts and pops after which the held transaction is renewed, so that it pins few old
pages."""
SWEEP_PER_CHANGE = 2
"""Overlay entries and tombstones checked per change; more than one change adds, so both drain."""
MAX_UNKNOWN_SLOTS = 4096
"""Largest number of slots that wait for `take_unknown`."""
MAX_CACHED_ENTRIES = 16384
"""Largest number of index entries cached until the next renewal, at 400 bytes each."""
_STAND_IN_PREFIX = b"kvcascade stray "
"""Prefix of a stand-in hash, followed by a slot number. It names an orphaned slot whose own block
is stored elsewhere, or not known."""

StatusAt = Callable[[int], BlockStatus]


class IndexDirectory(BlockDirectory):
    """The directory over a `BlockIndex`. `status_at` returns the live status of a slot."""

    def __init__(
        self,
        index: BlockIndex,
        segments: SegmentSet,
        status_at: StatusAt,
        owned: bytearray,
        used: bytearray,
        count: int,
        resets: npt.NDArray[np.uint64],
        state: int,
        proven_from: int = 0,
    ) -> None:
        """`owned` and `used` have one byte per slot, not 0 for slots of this process and for slots
        in use. `count` of those slots hold a block.

        `resets` is an array that all processes map: the resets of each process, by state number.
        Slot records with a generation below `proven_from` may be outdated, because of a loss of
        power.
        """
        self._index = index
        self._segments = segments
        self._records = RecordPages(segments)
        self._status_at = status_at
        self.owned = self._owned = owned
        self._used = used
        self._resets = scalars(resets)
        self._state = state
        self._proven_from = proven_from
        self._epoch = sum(self._resets)
        self._is_joining = False
        self._overlay: dict[BlockHash, BlockStatus] = {}
        self._key_at: dict[int, BlockHash] = {}
        """Hash by slot, for the blocks in the overlay."""
        self._tombstones: dict[BlockHash, int] = {}
        """Tombstones: slot by hash, for blocks that left and may still be seen in the index."""
        self._leaving: dict[int, BlockHash] = {}
        """Hash by slot, for slots that lost their block and are not freed yet."""
        self._unknown: set[int] = set()
        """Slots whose records could not be used when they were needed."""
        self._set_aside: set[int] = set()
        """Slots of this process that are treated as another process's."""
        self._entries: dict[BlockHash, tuple[BlockStatus, bytes]] = {}
        """Cache of index entries read in the current transaction; a block is usually looked up
        again within the same step."""
        self._to_sweep: deque[BlockHash] = deque()
        """Hashes in the overlay or the tombstones, in the order in which they are checked."""
        self._removals: list[Removal] = []
        self._changes = 0
        self._is_index_stale = True
        """True while no transaction is held, or if the held one shows another epoch."""
        self._is_released = False  # the index opens with a transaction held
        self._count = count
        self.get = self._get

    @property
    def epoch(self) -> int:
        """Epoch of everything that is stored from now on."""
        return self._epoch

    @property
    def is_overtaken(self) -> bool:
        """True if another process reset the namespace and this one still lists its old blocks."""
        return sum(self._resets) != self._epoch

    def put(self, block_hash: BlockHash, status: BlockStatus) -> None:
        assert block_hash not in self._overlay, "a block may be inserted only once"
        slot = status.block_id
        if self._tombstones.get(block_hash) == slot:
            del self._tombstones[block_hash]
        self._entries.pop(block_hash, None)
        self._overlay[block_hash] = status
        self._key_at[slot] = block_hash
        self._to_sweep.append(block_hash)
        self._count += 1
        self._changed()

    def pop(self, block_hash: BlockHash) -> BlockStatus | None:
        status = self.get(block_hash)
        if status is None:
            return None
        slot = status.block_id
        if not self._owned[slot]:
            if slot in self._set_aside:
                self._remove_entry(block_hash, slot)
            self._entries.pop(block_hash, None)
            self._is_index_stale = True  # the caller knows more than the held transaction shows
            return status
        if self._overlay.pop(block_hash, None) is not None:
            del self._key_at[slot]
        self._leave(block_hash, slot)
        return status

    def pop_many(self, block_hashes: Sequence[BlockHash], slots: Sequence[int]) -> None:
        """Remove blocks as `at_slot` reported them, including slots orphaned before or since."""
        for key, slot in zip(block_hashes, slots, strict=True):
            if self._key_at.get(slot) == key:
                del self._overlay[key], self._key_at[slot]
            self._leave(key, slot)

    def at_slot(self, slot: int) -> tuple[BlockHash, BlockStatus] | None:
        key = self._key_at.get(slot)
        if key is not None:
            return key, self._overlay[key]
        if self._is_index_stale and not self._is_current():
            return None
        if not self._used[slot]:
            return None
        proven_from = self._proven_from  # read before the record: see `trust_records`
        record = self._records.at(slot)
        if record is not None and slot not in self._leaving:
            key = BlockHash(record.key)
            damaged = self._index.damaged_lookups
            found_in = self._index.slot_of(key)
            if found_in == slot:
                has_left = key in self._overlay or self._tombstones.get(key) == slot
                return None if has_left else (key, self._status_at(slot))
            is_proven = record.generation >= proven_from
            if is_proven and self._index.damaged_lookups == damaged:
                return self._hash_to_evict(slot, key, found_in), self._status_at(slot)
        if len(self._unknown) < MAX_UNKNOWN_SLOTS and slot not in self._leaving:
            self._unknown.add(slot)
        return None

    def is_readable(self) -> bool:
        """Return False between another process's reset and the end of the step, as nothing can be
        evicted then. Finding that out slot by slot took 3 s in a tier of a million slots."""
        return self._is_current()

    def take_unknown(self) -> set[int]:
        """Return slots that were asked for but have no usable record, each once."""
        taken, self._unknown = self._unknown, set()
        return taken - self._set_aside

    def look_again(self) -> None:
        """Allow unreadable records to be read again. Any thread."""
        self._segments.look_again()
        self._records.forget()

    def clear(self) -> None:
        """Forget every block. A new epoch begins, which holds even if the process dies now.

        After `join_epoch` the epoch is the one that another process began.
        """
        if not self._is_joining:
            self._resets[self._state] += 1
        self._is_joining = False
        self._epoch = sum(self._resets)
        self._is_index_stale = True
        self._overlay.clear()
        self._key_at.clear()
        self._tombstones.clear()
        self._leaving.clear()
        self._entries.clear()
        self._to_sweep.clear()
        self._removals.clear()
        self._unknown.clear()
        self._count = 0

    def join_epoch(self) -> None:
        """Make the next `clear` follow another process's reset, instead of being one itself."""
        self._is_joining = True

    # -- slots that arrive and leave -----------------------------------------------------------

    def adopt(self, count: int) -> None:
        """Record that slots now belong to this process, with `count` blocks that the index names.
        `count` is 0 for new slots."""
        self._entries.clear()
        self._count += count

    def abandon(self, first: int, end: int, used: int) -> None:
        """Give up the idle slots `first .. end - 1`, of which `used` hold blocks."""
        self._entries.clear()
        self._records.forget()
        for slot in [slot for slot in self._key_at if first <= slot < end]:
            del self._overlay[self._key_at.pop(slot)]
        for key in [key for key, slot in self._tombstones.items() if first <= slot < end]:
            del self._tombstones[key]
        self._unknown = {slot for slot in self._unknown if not first <= slot < end}
        self._set_aside = {slot for slot in self._set_aside if not first <= slot < end}
        self._count -= used

    def set_aside(self, slot: int) -> None:
        """Exclude a slot in use whose block cannot be identified, so that it cannot be evicted.

        Its block is found and read like another process's. Its entry is removed if the block is
        damaged.
        """
        self._entries.clear()
        self._set_aside.add(slot)
        self._unknown.discard(slot)
        self._count -= 1

    def is_set_aside(self, slot: int) -> bool:
        """Return True if the slot is set aside: not taken back, and not gone with its segment."""
        return slot in self._set_aside

    def take_back(self, slot: int) -> None:
        """Return a slot that was set aside to normal use, with its block."""
        self._entries.clear()
        self._set_aside.discard(slot)
        self._count += 1

    def trust_records(self) -> None:
        """Treat all records of its slots as up to date from now on. Any thread."""
        self._records.forget()
        self._proven_from = 0

    def put_orphan(self, slot: int) -> None:
        """Make a used slot evictable that neither the index nor its record connects with a block. A
        stand-in hash is listed in place of the block."""
        if slot not in self._key_at and slot not in self._leaving and self.at_slot(slot) is None:
            self._unknown.discard(slot)
            key = _stand_in(slot)
            self._overlay[key] = self._status_at(slot)
            self._key_at[slot] = key

    def is_leaving(self, first: int, end: int) -> bool:
        """Return True if a block has left one of these slots and the slot is not free yet."""
        return any(first <= slot < end for slot in self._leaving)

    def __len__(self) -> int:
        return self._count

    def values_of(self, block_hashes: Sequence[BlockHash]) -> list[bytes | None]:
        """Return the committed entries of blocks; cached ones are as of the current transaction."""
        cached = [self._entries.get(block_hash) for block_hash in block_hashes]
        if not all(cached) and not self._renew():
            return [None] * len(block_hashes)
        value_of = self._index.value_of
        return [
            value_of(block_hash) if found is None else found[1]
            for block_hash, found in zip(block_hashes, cached, strict=True)
        ]

    def released(self, slot: int) -> None:
        """Note that a slot is free and unused by transfers: its block, if any, leaves the index."""
        key = self._leaving.pop(slot, None)
        if (
            key is not None
            and not self._remove_entry(key, slot)
            and self._tombstones.get(key) == slot
        ):
            del self._tombstones[key]

    def take_removals(self) -> list[Removal]:
        """Return entries to remove from the index with the next job, each once."""
        taken, self._removals = self._removals, []
        return taken

    @property
    def pending_removals(self) -> int:
        """Number of entries that wait for `take_removals`."""
        return len(self._removals)

    @property
    def is_committed(self) -> bool:
        """True if the index agrees with this directory on all slots of this process."""
        self.refresh()
        slot_of = self._index.slot_of
        return (
            not self._is_index_stale
            and not self._leaving
            and all(slot_of(key) == status.block_id for key, status in self._overlay.items())
            and all(slot_of(key) != slot for key, slot in self._tombstones.items())
        )

    def release(self) -> None:
        """Hold no pages of the index; the next lookup starts a new transaction."""
        if not self._is_released:
            self._entries.clear()
            self._index.release()
            self._is_released = self._is_index_stale = True

    def refresh(self) -> None:
        """Renew the held transaction; drop the overlay entries and tombstones it confirms."""
        self._changes = 0
        is_current = self._renew()
        for _ in range(min(len(self._to_sweep), SWEEP_PER_CHANGE * REFRESH_EVERY_CHANGES)):
            key = self._to_sweep.popleft()
            if is_current:
                self._sweep(key)
            if key in self._overlay or key in self._tombstones:
                self._to_sweep.append(key)

    # -- inside --------------------------------------------------------------------------------

    def _get(self, block_hash: BlockHash) -> BlockStatus | None:
        status = self._overlay.get(block_hash)
        if status is not None:
            return status
        cached = self._entries.get(block_hash)
        if cached is not None:
            return cached[0]
        if self._is_index_stale and not self._is_current():
            return None
        value = self._index.value_of(block_hash)
        if value is None:
            return None
        slot = self._index.slot_in(block_hash, value)
        if slot < 0 or self._tombstones.get(block_hash) == slot:
            return None
        # A damaged index may name a slot that is free, or another block's.
        if self._owned[slot] and (not self._used[slot] or slot in self._key_at):
            return None
        if len(self._entries) >= MAX_CACHED_ENTRIES:
            self._entries.clear()
        status = self._status_at(slot)
        self._entries[block_hash] = status, value
        return status

    def _is_current(self) -> bool:
        """Renew the held transaction if needed; return True if it shows the current epoch."""
        return not self._is_index_stale or self._renew()

    def _renew(self) -> bool:
        """Renew the held transaction. Return True if it belongs to the current epoch.

        Cached records are dropped here, which is early enough: a slot that was written stays in the
        overlay until this call.
        """
        self._entries.clear()
        self._records.forget()
        self._index.refresh()
        self._is_released = False
        self._is_index_stale = self._index.seen_epoch() != self._epoch
        return not self._is_index_stale

    def _remove_entry(self, key: BlockHash, slot: int) -> bool:
        """Queue the removal of a block's entry; return False if it names another slot."""
        (value,) = self.values_of([key])
        entry = None if value is None else parse_entry(key, value)
        if entry is None or entry.slot != slot:
            return False
        self._removals.append(Removal(key, slot, entry.generation))
        return True

    def _leave(self, key: BlockHash, slot: int) -> None:
        """Note that a slot of this process has lost its block and will be freed."""
        self._entries.pop(key, None)
        if key not in self._overlay:  # otherwise an orphaned slot whose block was stored again
            self._tombstones[key] = slot
            self._to_sweep.append(key)
        self._leaving[slot] = key
        self._count -= 1
        self._changed()

    def _hash_to_evict(self, slot: int, key: BlockHash, found_in: int) -> BlockHash:
        """Return the hash under which an orphaned slot is evicted.

        It is the hash of its block if that block is stored nowhere else, otherwise a stand-in.
        An evicted hash is announced, so it must not belong to a block that can be found.
        """
        is_elsewhere = found_in >= 0 or key in self._overlay or key in self._tombstones
        return _stand_in(slot) if is_elsewhere else key

    def _changed(self) -> None:
        self._changes += 1
        if self._changes >= REFRESH_EVERY_CHANGES:
            self.refresh()

    def _sweep(self, key: BlockHash) -> None:
        """Drop a hash from the overlay or the tombstones if the index agrees."""
        slot = self._index.slot_of(key)
        status = self._overlay.get(key)
        if status is not None and self._is_settled(key, status, slot):
            del self._overlay[key]
            del self._key_at[status.block_id]
        if (
            key in self._tombstones
            and self._tombstones[key] != slot
            and self._tombstones[key] not in self._leaving
        ):
            del self._tombstones[key]

    def _is_settled(self, key: BlockHash, status: BlockStatus, found_in: int) -> bool:
        """Return True if a block's entry was committed: it is seen, or was removed since."""
        if found_in == status.block_id:
            return status.ref_cnt >= 0
        if status.ref_cnt != 0:
            return False
        record = self._records.at(status.block_id)
        return record is not None and record.key == key


def _stand_in(slot: int) -> BlockHash:
    return BlockHash(_STAND_IN_PREFIX + slot.to_bytes(4, "little"))
