"""Another process's way into a tier that is open: moving blocks, and nothing else.

The owner of the tier has loaded, marked and repaired what there was; who attaches reads no entry,
takes no lock of the namespace and makes no file. Segments that the owner makes later are opened
when a block of theirs is asked for. The owner must outlive whoever attaches.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import os_errors
from .filesystem import RealFileSystem
from .format import SegmentLayout
from .index import attach_index
from .segments import Segment, SegmentSet
from .store import BlockStore, Durability

if TYPE_CHECKING:
    from .tier import NvmeTier

GENERATIONS_PER_ATTACHMENT = 1 << 32


@dataclass(frozen=True, slots=True)
class Attachment:
    """Everything that is needed to move blocks of an open tier; plain data."""

    index_folder: str
    capacity_blocks: int
    segment_folders: tuple[str, ...]
    block_bytes: int
    slots_per_segment: int
    fingerprint: str
    durability: str
    first_generation: int
    """Of `GENERATIONS_PER_ATTACHMENT` that nobody else uses."""
    has_direct_io: bool = True


def attachment_of(tier: NvmeTier, has_direct_io: bool = True) -> Attachment:
    """What one process needs to attach to an open tier; each is for one process only."""
    layout = tier.segments.layout
    return Attachment(
        str(tier.index.path),
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
    """Open a store in this process, for as long as it lives. Raises one of our errors."""
    durability = Durability(attachment.durability)
    index = attach_index(
        Path(attachment.index_folder),
        attachment.capacity_blocks,
        is_durable=durability is Durability.POWER,
    )
    layout = SegmentLayout(
        attachment.block_bytes, attachment.slots_per_segment, attachment.fingerprint
    )
    segments = AttachedSegments(
        RealFileSystem(attachment.has_direct_io),
        [Path(f) for f in attachment.segment_folders],
        layout,
    )
    return BlockStore(index, segments, durability, attachment.first_generation)


class AttachedSegments(SegmentSet):
    """Segments of somebody else, opened as they are asked for. Any thread."""

    _opening = threading.Lock()

    def _segment(self, number: int) -> Segment:
        segment = self._open.get(number)
        if segment is not None:
            return segment
        path = self.path_of(number)
        with self._opening, os_errors(f"opening {path}"):
            if number not in self._open:
                self._open[number] = self._open_files(number, path)
            return self._open[number]
