"""Attaching to an open tier from another process, to move blocks and nothing else.

The owner of the tier has loaded, marked and repaired its data. An attached process reads no entries
at the start, takes no namespace lock and creates no file. A segment that the owner creates later is
opened when one of its blocks is requested. The owner must outlive every attached process.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import os_errors
from .disk.filesystem import FileSystem, RealFileSystem
from .index.block_index import attach_index
from .namespace import OWNERS
from .segments.format import SegmentLayout
from .segments.segment_files import Segment, SegmentSet
from .segments.store import BlockStore, Durability
from .writer.owners import last_owner

if TYPE_CHECKING:
    from .tier import NvmeTier

GENERATIONS_PER_ATTACHMENT = 1 << 32
"""Size of the range of generations that each attached process receives."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """Everything that a process needs to move blocks of an open tier; plain data."""

    index_folder: str
    """Directory of the LMDB environment."""
    index_bytes: int
    """Address space of the index, in bytes."""
    owners: str
    """Path of the file that records which process owns which segment."""
    state: int
    """State number of the owner."""
    capacity_blocks: int
    segment_folders: tuple[str, ...]
    block_bytes: int
    slots_per_segment: int
    fingerprint: str
    durability: str
    """Value of `Durability`."""
    first_generation: int
    """First of `GENERATIONS_PER_ATTACHMENT` generations that no other process uses."""
    has_direct_io: bool = True


def attachment_of(tier: NvmeTier, has_direct_io: bool = True) -> Attachment:
    """Return what one process needs to attach to an open tier.

    Each attachment is for one process only.
    """
    layout = tier.segments.layout
    return Attachment(
        str(tier.index.path),
        tier.index.map_bytes,
        str(tier.namespace.folders[0] / OWNERS),
        tier.namespace.owners.state,
        tier.index.capacity,
        tuple(map(str, tier.namespace.segment_folders)),
        layout.block_bytes,
        layout.slots,
        layout.fingerprint,
        tier.store.durability.value,
        tier.store.reserve_generations(GENERATIONS_PER_ATTACHMENT),
        has_direct_io,
    )


def attach(attachment: Attachment) -> BlockStore:
    """Open a store in this process, for the lifetime of the process. Raises a `KVCascadeError`."""
    durability = Durability(attachment.durability)
    index = attach_index(
        Path(attachment.index_folder),
        attachment.capacity_blocks,
        attachment.index_bytes,
        is_durable=durability is Durability.POWER,
    )
    layout = SegmentLayout(
        attachment.block_bytes, attachment.slots_per_segment, attachment.fingerprint
    )
    segments = AttachedSegments(
        RealFileSystem(attachment.has_direct_io),
        [Path(f) for f in attachment.segment_folders],
        layout,
        attachment,
    )
    return BlockStore(index, segments, durability, attachment.first_generation)


class AttachedSegments(SegmentSet):
    """Segments of another process, each opened when it is first used. Any thread."""

    _opening = threading.Lock()

    def __init__(
        self, fs: FileSystem, folders: Sequence[Path], layout: SegmentLayout, owner: Attachment
    ) -> None:
        super().__init__(fs, folders, layout)
        self._state = owner.state
        with os_errors(f"opening {owner.owners}"):
            self._owners = fs.byte_locks(Path(owner.owners))

    def is_own(self, slot: int) -> bool:
        """Return True if the slot lies in a segment of the process that this one works for."""
        return last_owner(self._owners, slot // self.layout.slots) == self._state

    def close(self) -> None:
        super().close()
        self._owners.close()

    def _segment(self, number: int) -> Segment:
        segment = self._open.get(number)
        if segment is not None:
            return segment
        path = self.path_of(number)
        with self._opening, os_errors(f"opening {path}"):
            if number not in self._open:
                self._open[number] = self._open_files(number, path)
            return self._open[number]
