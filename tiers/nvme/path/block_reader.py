"""Read blocks of a namespace without its writer: presence table, segment files, checksums.

A block counts as read only if its bytes match the checksum that the presence table has for its
slot. The checksum is seeded with the key. So a cell that is wrong or outdated costs a miss or a
second read, and never serves wrong bytes. If the epoch changed during the read, every block is
GONE.

Threads: any number may call `read` at once, each with buffers of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import xxhash

from ....errors import from_os_error
from ....logs import get_logger
from ...base import BlockHash, BlockOutcome
from ..disk.transfers import ShortFileError
from .payload_files import PayloadFiles
from .presence_table import PresenceTable

CACHED_BYTES = 512 << 10
"""Bytes that stay in a core's cache between verifying a block and copying it; smaller than most."""

_log = get_logger(__name__)

OnRight = Callable[[list[int]], None]
"""Callback with positions of verified blocks."""


def payload_checksum(key: bytes, payload: memoryview) -> int:
    """Return 64 bits over a payload, seeded by its key: another block's valid bytes never match.

    One call per block takes the interpreter lock once. A call per piece takes it once per piece,
    and waits for it while other threads run.
    """
    return xxhash.xxh3_64_intdigest(payload, xxhash.xxh3_64_intdigest(key))


@dataclass(slots=True)
class BlocksRead:
    """Result of one `read`."""

    outcomes: list[BlockOutcome]
    """One outcome per key."""
    bad: list[tuple[BlockHash, int, int]] = field(default_factory=list)
    """Key, slot and stored checksum of each damaged block, for the writer's `Bad`."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of one block, as the presence table named it before the read."""

    position: int
    key: BlockHash
    slot: int
    checksum: int


class BlockReader:
    """Reads blocks of one namespace by key."""

    def __init__(
        self, table: PresenceTable, files: PayloadFiles, at_device: AbstractContextManager[None]
    ) -> None:
        """`at_device` is held during device transfers; it limits how many threads transfer at
        once."""
        self._table = table
        self._files = files
        self._at_device = at_device
        self._few = max(1, CACHED_BYTES // files.layout.block_bytes)
        self._has_warned = False

    def read(
        self,
        keys: Sequence[BlockHash],
        buffers: Sequence[memoryview],
        on_right: OnRight | None = None,
    ) -> BlocksRead:
        """Read blocks into buffers of one block each.

        `on_right` receives the positions of verified blocks, a few at a time, while the processor's
        cache still holds them. Blocks that it received may still be reported as GONE.
        """
        table = self._table
        epoch = table.epoch
        done = BlocksRead([BlockOutcome.GONE] * len(keys))
        places = self._places(keys)
        self._transfer(places, buffers, done.outcomes)
        self._report_lost(places, done)
        for start in range(0, len(places), self._few):
            some = places[start : start + self._few]
            for place in some:
                if done.outcomes[place.position] is BlockOutcome.OK:
                    self._verify(place, buffers[place.position], done)
            if on_right is not None:
                positions = [place.position for place in some]
                on_right([i for i in positions if done.outcomes[i] is BlockOutcome.OK])
        if table.epoch != epoch:
            return BlocksRead([BlockOutcome.GONE] * len(keys))
        return done

    def _places(self, keys: Sequence[BlockHash]) -> list[_Place]:
        """Return the places of the blocks that the table names, by ascending slot."""
        table = self._table
        found = enumerate(zip(keys, table.find_many(keys).tolist(), strict=True))
        places = [
            _Place(position, key, slot, table.checksum_of(slot))
            for position, (key, slot) in found
            if 0 <= slot < table.slots
        ]
        places.sort(key=lambda place: place.slot)
        return places

    def _transfer(
        self,
        places: Sequence[_Place],
        buffers: Sequence[memoryview],
        outcomes: list[BlockOutcome],
    ) -> None:
        slots = [place.slot for place in places]
        with self._at_device:
            for begin, end in self._files.layout.runs(slots):
                run = [place.position for place in places[begin:end]]
                outcome = self._read_run(slots[begin], [buffers[i] for i in run])
                for i in run:
                    outcomes[i] = outcome

    def _read_run(self, first_slot: int, buffers: Sequence[memoryview]) -> BlockOutcome:
        try:
            self._files.read_run(first_slot, buffers)
        except (FileNotFoundError, ShortFileError):  # deleted by the writer, or lost
            return BlockOutcome.GONE
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                _log.warning("%s", from_os_error(error, "reading blocks"))
            return BlockOutcome.IO_ERROR
        return BlockOutcome.OK

    def _verify(self, place: _Place, payload: memoryview, done: BlocksRead) -> None:
        """Note the outcome of a block that was read; a mismatch is read once more."""
        if payload_checksum(place.key, payload) == place.checksum:
            return
        done.outcomes[place.position] = BlockOutcome.GONE
        if not self._is_still(place):
            return
        self._files.forget_slot(place.slot)  # the segment may be another file of the same name
        again = self._read_run(place.slot, [payload])
        if again is not BlockOutcome.OK:
            done.outcomes[place.position] = again
        elif payload_checksum(place.key, payload) == place.checksum:
            done.outcomes[place.position] = BlockOutcome.OK
        elif self._is_still(place):
            done.outcomes[place.position] = BlockOutcome.CORRUPT
            _log.warning(
                "a block in %s is damaged: it counts as a miss, and the writer removes it; check "
                "the other blocks with: kvcascade verify",
                self._files.path_of(place.slot),
            )
            done.bad.append((place.key, place.slot, place.checksum))

    def _report_lost(self, places: Sequence[_Place], done: BlocksRead) -> None:
        """Report blocks of files that are gone or cut: the writer removes blocks before files."""
        is_there: dict[int, bool] = {}
        for place in places:
            if done.outcomes[place.position] is BlockOutcome.GONE and self._is_still(place):
                number = place.slot // self._files.layout.slots
                if number not in is_there:
                    is_there[number] = self._files.has_folder(number)
                if is_there[number]:
                    done.bad.append((place.key, place.slot, place.checksum))

    def _is_still(self, place: _Place) -> bool:
        """Return True if the table still names this place and checksum for the block."""
        table = self._table
        return (
            table.is_same(place.key, place.slot) and table.checksum_of(place.slot) == place.checksum
        )
