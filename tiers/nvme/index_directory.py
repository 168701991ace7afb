"""`IndexDirectory`: which block lies in which slot of the NVMe tier, for the policy.

LMDB holds what was committed. Above it lie two small dictionaries: the *overlay*, blocks that were
given a slot and are not seen in the index yet, and the *tombstones*, blocks that left and are
still seen there. Both shrink by themselves as the held transaction is renewed.

Other processes store blocks too: what the index shows in a slot that is not this process's own is
*foreign*. It can be found and read like any other; it has no place in the policy's order, and
dropping it here changes nothing but what this process says about it.

A slot of its own whose record can be neither read nor written is *set aside*: its block is like a
foreign one from then on, so that no eviction asks for it again.

They also take entries away: a damaged block, or one that an operator wants gone. A slot that lost
its block so is a *stray*. It stays in use until its turn to leave comes; then its own record tells
that no entry names it, and it is evicted like any other.

The *epoch* numbers the resets of the namespace: the sum of one counter per process, in memory that
all of them map, so that no two resets are ever taken for one.

Used by the manager's thread only; no method touches a file but through mapped memory.
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
from .segments.record_pages import RecordPages
from .segments.segment_files import SegmentSet

if TYPE_CHECKING:
    from .index.block_index import BlockIndex

REFRESH_EVERY_CHANGES = 64
"""Renew the held transaction after so many puts and pops, so that it pins few old pages."""
SWEEP_PER_CHANGE = 2
"""Overlay entries and tombstones looked at per change: more than come in, so both drain."""
MAX_UNKNOWN_SLOTS = 4096
MAX_MET = 16384
"""Blocks found in the index and remembered until it is looked at anew, 400 bytes each."""
_STRAY = b"kvcascade stray "
"""With a slot number behind it: stands for a stray whose block is elsewhere now, or not known."""

StatusAt = Callable[[int], BlockStatus]


class IndexDirectory(BlockDirectory):
    """The directory over a `BlockIndex`. `status_at` gives the live status of a slot."""

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
        """`owned` and `used` have a byte per slot, not 0 for one's own and those with a block in
        them; `count` blocks lie there.

        `resets` is an array that all processes map: how often each of them, by its state number,
        reset the namespace. Slot records with a generation below `proven_from` may be older than
        what was written last: a loss of power came between.
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
        """Slot to hash for the overlay."""
        self._gone: dict[BlockHash, int] = {}
        """Tombstones: hash to the slot it lay in."""
        self._popped: dict[int, BlockHash] = {}
        """Slots that lost their block and are not freed yet."""
        self._unknown: set[int] = set()
        self._set_aside: set[int] = set()
        """Slots in its own segments that are treated as another process's."""
        self._met: dict[BlockHash, tuple[BlockStatus, bytes]] = {}
        """What the index that is held says of blocks: who found one asks for it again at once."""
        self._to_sweep: deque[BlockHash] = deque()
        self._removals: list[Removal] = []
        self._changes = 0
        self._is_index_stale = True
        """True while nothing is held of the index, or what is held is of another epoch."""
        self._is_released = False  # the index holds a transaction from its opening on
        self._count = count
        self.get = self._get

    @property
    def epoch(self) -> int:
        """The epoch that everything stored from now on belongs to."""
        return self._epoch

    @property
    def is_overtaken(self) -> bool:
        """True if another process reset the namespace and this one has not forgotten its blocks."""
        return sum(self._resets) != self._epoch

    def put(self, block_hash: BlockHash, status: BlockStatus) -> None:
        assert block_hash not in self._overlay, "a block may be inserted only once"
        slot = status.block_id
        if self._gone.get(block_hash) == slot:
            del self._gone[block_hash]
        self._met.pop(block_hash, None)
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
            self._met.pop(block_hash, None)
            self._is_index_stale = True  # whoever drops it knows more than what is held says
            return status
        if self._overlay.pop(block_hash, None) is not None:
            del self._key_at[slot]
        self._leave(block_hash, slot)
        return status

    def pop_many(self, block_hashes: Sequence[BlockHash], slots: Sequence[int]) -> None:
        """As `at_slot` gave them: a stray leaves as well, and so does what became one since."""
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
        proven_from = self._proven_from  # before the record is read: see `trust_records`
        record = self._records.at(slot)
        if record is not None and slot not in self._popped:
            key = BlockHash(record.key)
            damaged = self._index.damaged_lookups
            found_in = self._index.slot_of(key)
            if found_in == slot:
                has_left = key in self._overlay or self._gone.get(key) == slot
                return None if has_left else (key, self._status_at(slot))
            is_proven = record.generation >= proven_from
            if is_proven and self._index.damaged_lookups == damaged:
                return self._stray(slot, key, found_in), self._status_at(slot)
        if len(self._unknown) < MAX_UNKNOWN_SLOTS and slot not in self._popped:
            self._unknown.add(slot)
        return None

    def is_readable(self) -> bool:
        """Between another process's reset and the end of the step nothing can be evicted: to find
        that out slot by slot took 3 s in a tier of a million."""
        return self._is_current()

    def take_unknown(self) -> set[int]:
        """Slots that were asked for and whose records prove nothing, each given once."""
        taken, self._unknown = self._unknown, set()
        return taken - self._set_aside

    def look_again(self) -> None:
        """Read anew what could not be read, or said nothing. Any thread."""
        self._segments.look_again()
        self._records.forget()

    def clear(self) -> None:
        """Forget every block, for ever: a new epoch begins, even if the process dies now.

        After `join_epoch` the epoch is the one that another process began.
        """
        if not self._is_joining:
            self._resets[self._state] += 1
        self._is_joining = False
        self._epoch = sum(self._resets)
        self._is_index_stale = True
        self._overlay.clear()
        self._key_at.clear()
        self._gone.clear()
        self._popped.clear()
        self._met.clear()
        self._to_sweep.clear()
        self._removals.clear()
        self._unknown.clear()
        self._count = 0

    def join_epoch(self) -> None:
        """The next `clear` is not a reset of its own: it follows another process's."""
        self._is_joining = True

    # -- slots that come and go ----------------------------------------------------------------

    def adopt(self, count: int) -> None:
        """Slots are this process's from now on, with so many blocks that the index has; none if
        they are new."""
        self._met.clear()
        self._count += count

    def abandon(self, first: int, end: int, used: int) -> None:
        """Slots `first .. end - 1`, `used` of them with idle blocks, are somebody else's now."""
        self._met.clear()
        self._records.forget()
        for slot in [slot for slot in self._key_at if first <= slot < end]:
            del self._overlay[self._key_at.pop(slot)]
        for key in [key for key, slot in self._gone.items() if first <= slot < end]:
            del self._gone[key]
        self._unknown = {slot for slot in self._unknown if not first <= slot < end}
        self._set_aside = {slot for slot in self._set_aside if not first <= slot < end}
        self._count -= used

    def set_aside(self, slot: int) -> None:
        """A slot in use that cannot be named leaves its owner's hands, and cannot be evicted.

        Its block is found and read like another process's. It leaves the index if it is damaged.
        """
        self._met.clear()
        self._set_aside.add(slot)
        self._unknown.discard(slot)
        self._count -= 1

    def is_set_aside(self, slot: int) -> bool:
        """True after `set_aside`, unless it was taken back or went with its segment."""
        return slot in self._set_aside

    def take_back(self, slot: int) -> None:
        """A slot that was set aside is its owner's again, with what is in it."""
        self._met.clear()
        self._set_aside.discard(slot)
        self._count += 1

    def trust_records(self) -> None:
        """All records of its slots are now known to be as new as the entries. Any thread."""
        self._records.forget()
        self._proven_from = 0

    def put_stray(self, slot: int) -> None:
        """The index was searched, and names no block for a slot that is in use, nor does its
        record: let a stand-in be evicted for it."""
        if slot not in self._key_at and slot not in self._popped and self.at_slot(slot) is None:
            self._unknown.discard(slot)
            key = _stand_in(slot)
            self._overlay[key] = self._status_at(slot)
            self._key_at[slot] = key

    def is_leaving(self, first: int, end: int) -> bool:
        """True if a block has left one of these slots, which is not free yet."""
        return any(first <= slot < end for slot in self._popped)

    def __len__(self) -> int:
        return self._count

    def values_of(self, block_hashes: Sequence[BlockHash]) -> list[bytes | None]:
        """The committed entries of blocks: of those found just now as they were then."""
        met = [self._met.get(block_hash) for block_hash in block_hashes]
        if not all(met) and not self._renew():
            return [None] * len(block_hashes)
        value_of = self._index.value_of
        return [
            value_of(block_hash) if found is None else found[1]
            for block_hash, found in zip(block_hashes, met, strict=True)
        ]

    def released(self, slot: int) -> None:
        """A slot is free again and no transfer uses it: its block, if any, leaves the index."""
        key = self._popped.pop(slot, None)
        if key is not None and not self._remove_entry(key, slot) and self._gone.get(key) == slot:
            del self._gone[key]

    def take_removals(self) -> list[Removal]:
        """Entries to remove from the index, for the next job to commit; each is given once."""
        taken, self._removals = self._removals, []
        return taken

    @property
    def pending_removals(self) -> int:
        """How many entries wait for `take_removals`."""
        return len(self._removals)

    @property
    def is_committed(self) -> bool:
        """True if the index says exactly what this directory says about its own slots."""
        self.refresh()
        slot_of = self._index.slot_of
        return (
            not self._is_index_stale
            and not self._popped
            and all(slot_of(key) == status.block_id for key, status in self._overlay.items())
            and all(slot_of(key) != slot for key, slot in self._gone.items())
        )

    def release(self) -> None:
        """Hold no pages of the index; the next question takes hold of them as they are then."""
        if not self._is_released:
            self._met.clear()
            self._index.release()
            self._is_released = self._is_index_stale = True

    def refresh(self) -> None:
        """Renew the held transaction and drop what the index now shows."""
        self._changes = 0
        is_current = self._renew()
        for _ in range(min(len(self._to_sweep), SWEEP_PER_CHANGE * REFRESH_EVERY_CHANGES)):
            key = self._to_sweep.popleft()
            if is_current:
                self._sweep(key)
            if key in self._overlay or key in self._gone:
                self._to_sweep.append(key)

    # -- inside --------------------------------------------------------------------------------

    def _get(self, block_hash: BlockHash) -> BlockStatus | None:
        status = self._overlay.get(block_hash)
        if status is not None:
            return status
        met = self._met.get(block_hash)
        if met is not None:
            return met[0]
        if self._is_index_stale and not self._is_current():
            return None
        value = self._index.value_of(block_hash)
        if value is None:
            return None
        slot = self._index.slot_in(block_hash, value)
        if slot < 0 or self._gone.get(block_hash) == slot:
            return None
        # A damaged index may name a slot that is free, or another block's.
        if self._owned[slot] and (not self._used[slot] or slot in self._key_at):
            return None
        if len(self._met) >= MAX_MET:
            self._met.clear()
        status = self._status_at(slot)
        self._met[block_hash] = status, value
        return status

    def _is_current(self) -> bool:
        """True if the index that is seen belongs to the epoch that is wanted."""
        return not self._is_index_stale or self._renew()

    def _renew(self) -> bool:
        """See the index as it is now; True if it belongs to the epoch that is wanted.

        A slot that is written leaves the overlay after this only, so until then no record that was
        read before is one that matters.
        """
        self._met.clear()
        self._records.forget()
        self._index.refresh()
        self._is_released = False
        self._is_index_stale = self._index.seen_epoch() != self._epoch
        return not self._is_index_stale

    def _remove_entry(self, key: BlockHash, slot: int) -> bool:
        """Have a block leave the index; False if its entry does not name this slot."""
        (value,) = self.values_of([key])
        entry = None if value is None else parse_entry(key, value)
        if entry is None or entry.slot != slot:
            return False
        self._removals.append(Removal(key, slot, entry.generation))
        return True

    def _leave(self, key: BlockHash, slot: int) -> None:
        """A slot of one's own has lost its block, and will be freed."""
        self._met.pop(key, None)
        if key not in self._overlay:  # otherwise it is a stray whose block was stored anew
            self._gone[key] = slot
            self._to_sweep.append(key)
        self._popped[slot] = key
        self._count -= 1
        self._changed()

    def _stray(self, slot: int, key: BlockHash, found_in: int) -> BlockHash:
        """By what name a slot leaves that no entry names: its block's, if that is nowhere else.

        A name that leaves is announced, so it may be no block's that can be found.
        """
        is_elsewhere = found_in >= 0 or key in self._overlay or key in self._gone
        return _stand_in(slot) if is_elsewhere else key

    def _changed(self) -> None:
        self._changes += 1
        if self._changes >= REFRESH_EVERY_CHANGES:
            self.refresh()

    def _sweep(self, key: BlockHash) -> None:
        """Drop a hash from the overlay or the tombstones if the index agrees, else keep it."""
        slot = self._index.slot_of(key)
        status = self._overlay.get(key)
        if status is not None and self._is_settled(key, status, slot):
            del self._overlay[key]
            del self._key_at[status.block_id]
        if key in self._gone and self._gone[key] != slot and self._gone[key] not in self._popped:
            del self._gone[key]

    def _is_settled(self, key: BlockHash, status: BlockStatus, found_in: int) -> bool:
        """True if a block's entry was committed: it is seen, or somebody took it away again."""
        if found_in == status.block_id:
            return status.ref_cnt >= 0
        if status.ref_cnt != 0:
            return False
        record = self._records.at(status.block_id)
        return record is not None and record.key == key


def _stand_in(slot: int) -> BlockHash:
    return BlockHash(_STRAY + slot.to_bytes(4, "little"))
