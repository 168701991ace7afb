"""`IndexDirectory`: which block lies in which slot of the NVMe tier, for the policy.

LMDB holds what was committed. Above it lie two small dictionaries: the *overlay*, blocks that were
given a slot and are not seen in the index yet, and the *tombstones*, blocks that left and are
still seen there. Both shrink by themselves as the held transaction is renewed.

Used by the manager's thread only; no method touches a file but through mapped memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ..base import BlockHash, BlockStatus
from ..policies.directory import BlockDirectory
from .format import parse_entry
from .index import BlockIndex, Removal
from .segments import SegmentSet

REFRESH_EVERY_CHANGES = 64
"""Renew the held transaction after so many puts and pops, so that it pins few old pages."""
SWEEP_PER_CHANGE = 2
"""Overlay entries and tombstones looked at per change: more than come in, so both drain."""
MAX_UNKNOWN_SLOTS = 4096

StatusAt = Callable[[int], BlockStatus]


class IndexDirectory(BlockDirectory):
    """The directory over a `BlockIndex`. `status_at` gives the live status of a slot."""

    def __init__(
        self,
        index: BlockIndex,
        segments: SegmentSet,
        status_at: StatusAt,
        epoch_word: npt.NDArray[np.uint64],
    ) -> None:
        """`epoch_word` is a mapped array of one number: the epoch that is wanted."""
        self._index = index
        self._segments = segments
        self._status_at = status_at
        self._epoch_word = epoch_word
        self._overlay: dict[BlockHash, BlockStatus] = {}
        self._key_at: dict[int, BlockHash] = {}
        """Slot to hash for the overlay."""
        self._gone: dict[BlockHash, int] = {}
        """Tombstones: hash to the slot it lay in."""
        self._popped: dict[int, BlockHash] = {}
        """Slots that lost their block and are not freed yet."""
        self._unknown: set[int] = set()
        self._to_sweep: deque[BlockHash] = deque()
        self._removals: list[Removal] = []
        self._changes = 0
        self._is_index_stale = index.seen_epoch() != int(epoch_word[0])
        self._count = index.entries_at_open
        self.get = self._get

    @property
    def epoch(self) -> int:
        """The epoch that everything stored from now on belongs to."""
        return int(self._epoch_word[0])

    def put(self, block_hash: BlockHash, status: BlockStatus) -> None:
        assert block_hash not in self._overlay, "a block may be inserted only once"
        slot = status.block_id
        if self._gone.get(block_hash) == slot:
            del self._gone[block_hash]
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
        if self._overlay.pop(block_hash, None) is not None:
            del self._key_at[slot]
        self._gone[block_hash] = slot
        self._popped[slot] = block_hash
        self._to_sweep.append(block_hash)
        self._count -= 1
        self._changed()
        return status

    def at_slot(self, slot: int) -> tuple[BlockHash, BlockStatus] | None:
        key = self._key_at.get(slot)
        if key is not None:
            return key, self._overlay[key]
        if self._is_index_stale and not self._is_current():
            return None
        record = self._segments.record(slot)
        key = None if record is None else BlockHash(record.key)
        if key is not None and (key in self._overlay or self._gone.get(key) == slot):
            return None
        if key is None or self._index.slot_of(key) != slot:
            if len(self._unknown) < MAX_UNKNOWN_SLOTS:
                self._unknown.add(slot)
            return None
        return key, self._status_at(slot)

    def take_unknown(self) -> set[int]:
        """Slots that were asked for and whose records do not match the index, each given once."""
        taken, self._unknown = self._unknown, set()
        return taken

    def clear(self) -> None:
        """Forget every block, for ever: a new epoch begins, even if the process dies now."""
        self._epoch_word[0] += np.uint64(1)
        self._is_index_stale = True
        self._overlay.clear()
        self._key_at.clear()
        self._gone.clear()
        self._popped.clear()
        self._to_sweep.clear()
        self._removals.clear()
        self._unknown.clear()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def values_of(self, block_hashes: Sequence[BlockHash]) -> list[bytes | None]:
        """The committed entries of blocks, as of now."""
        if not self._is_current():
            return [None] * len(block_hashes)
        self._index.refresh()
        value_of = self._index.value_of
        return [value_of(block_hash) for block_hash in block_hashes]

    def released(self, slot: int) -> None:
        """A slot is free again and no transfer uses it: its block, if any, leaves the index."""
        key = self._popped.pop(slot, None)
        if key is None or not self._is_current():
            return
        (value,) = self.values_of([key])
        entry = None if value is None else parse_entry(key, value)
        if entry is not None and entry.slot == slot:
            self._removals.append(Removal(key, slot, entry.generation))
        elif self._gone.get(key) == slot:
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
    def unsettled(self) -> int:
        """Size of the overlay and the tombstones."""
        return len(self._overlay) + len(self._gone)

    def refresh(self) -> None:
        """Renew the held transaction and drop what the index now shows."""
        self._index.refresh()
        self._changes = 0
        if not self._is_current():
            return
        for _ in range(min(len(self._to_sweep), SWEEP_PER_CHANGE * REFRESH_EVERY_CHANGES)):
            self._sweep(self._to_sweep.popleft())

    # -- inside --------------------------------------------------------------------------------

    def _get(self, block_hash: BlockHash) -> BlockStatus | None:
        status = self._overlay.get(block_hash)
        if status is not None:
            return status
        if self._is_index_stale and not self._is_current():
            return None
        slot = self._index.slot_of(block_hash)
        if slot < 0 or self._gone.get(block_hash) == slot:
            return None
        return self._status_at(slot)

    def _is_current(self) -> bool:
        """True if the index that is seen belongs to the epoch that is wanted."""
        if self._is_index_stale:
            self._index.refresh()
            self._is_index_stale = self._index.seen_epoch() != self.epoch
        return not self._is_index_stale

    def _changed(self) -> None:
        self._changes += 1
        if self._changes >= REFRESH_EVERY_CHANGES:
            self.refresh()

    def _sweep(self, key: BlockHash) -> None:
        """Drop a hash from the overlay or the tombstones if the index agrees, else keep it."""
        slot = self._index.slot_of(key)
        status = self._overlay.get(key)
        if status is not None and status.ref_cnt >= 0 and status.block_id == slot:
            del self._overlay[key]
            del self._key_at[slot]
        if key in self._gone and self._gone[key] != slot and self._gone[key] not in self._popped:
            del self._gone[key]
        if key in self._overlay or key in self._gone:
            self._to_sweep.append(key)
