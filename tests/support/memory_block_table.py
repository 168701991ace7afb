"""A block table in memory: the twin of `LmdbBlockTable`, with crashes and failures on command."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvcascade.errors import CorruptionError
from kvcascade.tiers import endurance
from kvcascade.tiers.nvme.path.block_table import (
    MAX_COMMIT_BLOCKS,
    Applied,
    Changes,
    Entry,
    ScanBatch,
)
from kvcascade.tiers.nvme.path.path_messages import Committed
from kvcascade.tiers.nvme.path.presence_table import Journal, hash_of, hashes_of


@dataclass(frozen=True)
class _State:
    """All that one commit left; never changed."""

    blocks: dict[bytes, Entry] = field(default_factory=dict)
    slots: dict[int, bytes] = field(default_factory=dict)
    epoch: int = 0
    commit_number: int = 0
    journal: Journal | None = None
    totals: tuple[int, int] = (0, 0)
    day: bytes = b""


class MemoryBlockDisk:
    """The part that outlives a `MemoryBlockTable`: its commits, and the durable ones of them."""

    def __init__(self) -> None:
        self.states = [_State()]
        """The last durable state, and those after it."""
        self.identity: bytes | None = None
        self.failures: list[Committed] = []
        """Outcomes of the next commits, which change nothing."""

    def lose_power(self, rng: random.Random) -> None:
        """Go back to the last durable commit, or one after it."""
        del self.states[rng.randint(1, len(self.states)) :]
        self.states = self.states[-1:]


class MemoryBlockTable:
    """A `BlockTable` over a `MemoryBlockDisk`; a new one over the same disk is a reopening."""

    def __init__(
        self,
        disk: MemoryBlockDisk,
        identity: bytes = b"",
        *,
        is_durable: bool = False,
        wall_clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        if disk.identity not in (None, identity):
            raise CorruptionError("the block table belongs to another namespace; remove it")
        disk.identity = identity
        self.disk = disk
        self.is_durable = is_durable
        self.wall_clock = wall_clock
        self.is_unusable = False
        self.sync()

    @property
    def _state(self) -> _State:
        return self.disk.states[-1]

    @property
    def epoch(self) -> int:
        return self._state.epoch

    @property
    def commit_number(self) -> int:
        return self._state.commit_number

    @property
    def totals(self) -> tuple[int, int]:
        return self._state.totals

    def count(self) -> int:
        return len(self._state.blocks)

    def get_many(self, keys: Sequence[bytes]) -> list[Entry | None]:
        return [self._state.blocks.get(key) for key in keys]

    def keys_after(self, key: bytes, limit: int) -> list[tuple[bytes, Entry]]:
        return sorted(pair for pair in self._state.blocks.items() if pair[0] > key)[:limit]

    def last_changes(self) -> Journal | None:
        return self._state.journal

    def scan(self) -> Iterator[ScanBatch]:
        blocks = self._state.blocks
        if blocks:
            yield ScanBatch(
                hashes_of(list(blocks)),
                np.array([entry.slot for entry in blocks.values()], dtype=np.int32),
                np.array([entry.checksum for entry in blocks.values()], dtype=np.uint64),
            )

    def day_totals(self) -> endurance.DayTotals:
        return endurance.day_totals(self._state.day, self.wall_clock())

    def day_record(self) -> bytes:
        return self._state.day

    def apply(self, changes: Changes) -> Applied:
        state = self._state
        if changes.epoch != state.epoch:
            return Applied(Committed.STALE)
        if self.disk.failures:
            return Applied(self.disk.failures.pop(0))
        if max(len(changes.puts) + len(changes.removals), len(changes.cleared)) > MAX_COMMIT_BLOCKS:
            return Applied(Committed.NO_SPACE)
        blocks, slots = dict(state.blocks), dict(state.slots)
        removed: list[tuple[bytes, int]] = []
        for key in changes.removals:
            if key in blocks:
                removed.append((key, blocks[key].slot))
        removed += [(slots[slot], slot) for slot in changes.cleared if slot in slots]
        removed = list(dict.fromkeys(removed))
        for key, slot in removed:
            del blocks[key], slots[slot]
        already: set[int] = set()
        stored: list[tuple[int, int, int]] = []
        for position, (key, slot, checksum) in enumerate(changes.puts):
            if key in blocks:
                already.add(position)
                continue
            if slot in slots:
                removed.append((slots[slot], slot))
                del blocks[slots[slot]]
            blocks[key], slots[slot] = Entry(slot, checksum), key
            stored.append((hash_of(key), slot, checksum))
        gone = tuple((hash_of(key), slot) for key, slot in removed)
        number = state.commit_number + bool(gone or stored)
        journal = Journal(number, state.epoch, gone, tuple(stored)) if gone or stored else None
        written, read = changes.written_bytes, changes.read_bytes
        self._commit(
            replace(
                state,
                blocks=blocks,
                slots=slots,
                commit_number=number,
                journal=journal or state.journal,
                totals=(state.totals[0] + written, state.totals[1] + read),
                day=endurance.add(state.day, self.wall_clock(), written, read),
            )
        )
        return Applied(Committed.OK, frozenset(already), tuple(removed), journal)

    def reset(self, epoch: int) -> Applied:
        state = self._state
        if epoch <= state.epoch:
            return Applied(Committed.STALE)
        if self.disk.failures:
            return Applied(self.disk.failures.pop(0))
        journal = Journal(state.commit_number + 1, epoch, is_reset=True)
        self._commit(_State({}, {}, epoch, journal.number, journal, state.totals, state.day))
        self.sync()
        return Applied(Committed.OK, journal=journal)

    def sync(self) -> None:
        self.disk.states = self.disk.states[-1:]

    def close(self) -> None:
        self.is_unusable = True
        self.sync()

    def abandon(self) -> None:
        self.is_unusable = True

    def _commit(self, state: _State) -> None:
        self.disk.states.append(state)
        if self.is_durable:
            self.sync()
