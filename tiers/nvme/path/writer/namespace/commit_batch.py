"""Reports of nodes since the last commit of one namespace: blocks they wrote, and damaged ones.

Used by the writer's thread only.
"""

from __future__ import annotations

from collections.abc import Container

from ...block_table import BlockTable
from ...path_messages import (
    Bad,
    Commit,
    CommitDone,
    Committed,
    unpack_checksums,
    unpack_slots,
)
from ...presence_table import PresenceTable
from .slot_space import SlotSpace
from .waiting_grants import Reply


class CommitBatch:
    """Messages that the next commit of the block table takes in; false if there are none."""

    def __init__(self, space: SlotSpace) -> None:
        self.entries: list[tuple[bytes, int, int]] = []
        """Key, slot and checksum of each block whose grant is valid, once `check` was called."""
        self._space = space
        self._commits: list[tuple[int, Commit]] = []
        self._bads: list[Bad] = []
        self._codes: list[bytearray] = []
        """For each message, the outcomes of its blocks."""
        self.blocks = 0
        """Blocks of all messages."""
        self._places: list[tuple[int, int]] = []
        """For each entry, the position of its message, and its own position in that."""

    def __bool__(self) -> bool:
        return bool(self._commits or self._bads)

    def add(self, client: int, message: Commit) -> None:
        """Take in a `Commit`."""
        self._commits.append((client, message))
        self.blocks += len(message.keys)
        self._codes.append(bytearray([Committed.STALE]) * len(message.keys))

    def add_bad(self, message: Bad) -> None:
        """Take in a report of damaged blocks."""
        self._bads.append(message)
        self.blocks += len(message.keys)

    def check(self, epoch: int) -> None:
        """Find the blocks whose grants are valid in an epoch. All other slots are freed."""
        grant_of, seen = self._space.grant_of, set[int]()
        for number, (client, message) in enumerate(self._commits):
            slots = unpack_slots(message.slots).tolist()
            checksums = unpack_checksums(message.checksums)
            if not len(slots) == len(checksums) == len(message.keys):
                self._space.release(client, slots)
                continue
            for place, entry in enumerate(zip(message.keys, slots, checksums, strict=True)):
                key, slot, _ = entry
                grant = grant_of(slot, client)
                if grant is None or slot in seen:
                    continue
                if grant.key == key and grant.epoch == message.epoch == epoch:
                    seen.add(slot)
                    self.entries.append(entry)
                    self._places.append((number, place))
                else:
                    self._space.give_up([slot])

    def segments_of(self, clients: Container[int]) -> set[int]:
        """Return the numbers of the segments with entries of these clients."""
        size = self._space.slots_per_segment
        return {
            slot // size
            for (_, slot, _), (number, _) in zip(self.entries, self._places, strict=True)
            if self._commits[number][0] in clients
        }

    def damaged(self, table: BlockTable, presence: PresenceTable) -> list[bytes]:
        """Return the keys of blocks reported as damaged that are still in the same slot.

        The checksum is that of the entry, or of a presence table that is damaged itself.
        """
        removals: list[bytes] = []
        for bad in self._bads:
            slots, checksums = unpack_slots(bad.slots).tolist(), unpack_checksums(bad.checksums)
            entries = table.get_many(bad.keys)
            for key, slot, checksum, entry in zip(
                bad.keys, slots, checksums, entries, strict=False
            ):
                if entry is not None and entry.slot == slot:
                    if checksum in (entry.checksum, presence.checksum_of(slot)):
                        removals.append(key)
        return removals

    def fail(self, outcome: Committed) -> None:
        """Give every entry this outcome, and free its slot."""
        for number, place in self._places:
            self._codes[number][place] = outcome
        self._space.give_up([slot for _, slot, _ in self.entries])
        self.entries.clear()
        self._places.clear()

    def succeed(
        self, already: frozenset[int]
    ) -> tuple[list[tuple[list[bytes], list[int]]], list[bytes]]:
        """Use the slots of the entries, except those at the positions in `already`.

        The table held these blocks before, so their slots are freed. Return keys and slots of the
        stored blocks, by message, and the keys of those that were held.
        """
        stored: dict[int, tuple[list[bytes], list[int]]] = {}
        held: list[tuple[bytes, int]] = []
        blocks = zip(self.entries, self._places, strict=True)
        for position, ((key, slot, _), (number, place)) in enumerate(blocks):
            if position in already:
                self._codes[number][place] = Committed.ALREADY
                held.append((key, slot))
                continue
            self._codes[number][place] = Committed.OK
            if number not in stored:
                stored[number] = [], []
            keys, slots = stored[number]
            keys.append(key)
            slots.append(slot)
        self._space.give_back([slot for _, slot in held])
        for _, slots in stored.values():
            self._space.use(slots)
        return list(stored.values()), [key for key, _ in held]

    def replies(self) -> list[Reply]:
        """Return the answers to the commits."""
        return [
            (client, CommitDone(message.request, bytes(codes)))
            for (client, message), codes in zip(self._commits, self._codes, strict=True)
        ]
