"""Slot records for the manager's thread: by the page, since who leaves lies mostly side by side.

The first record of a page that is asked for is read alone, all others with the second. A page is
remembered until `forget`, and may be old by then. Used by one thread, but for `forget`.
"""

from __future__ import annotations

from .format import SLOT_RECORD_BYTES, SlotRecord, parse_record
from .segment_files import RECORDS_PER_PAGE, SegmentSet

MAX_PAGES = 256
"""Remembered at a time."""


class RecordPages:
    """The records of open segments."""

    def __init__(self, segments: SegmentSet) -> None:
        self._segments = segments
        self._slots_per_segment = segments.layout.slots
        self._pages: dict[int, bytes] = {}
        """By the first slot of each; empty after the first record, or if it cannot be read."""

    def at(self, slot: int) -> SlotRecord | None:
        """What a slot says it holds; None if unwritten or damaged, or if it cannot be read."""
        place = slot % self._slots_per_segment % RECORDS_PER_PAGE
        first, pages = slot - place, self._pages
        page = pages.get(first)
        if page is None:
            if len(pages) >= MAX_PAGES:
                pages.clear()
            pages[first] = b""
            return self._segments.record(slot)
        if not page:
            page = pages[first] = self._segments.record_page(first) or b""
        start = place * SLOT_RECORD_BYTES
        return parse_record(page[start : start + SLOT_RECORD_BYTES])

    def forget(self) -> None:
        """What is asked for from now on is read from now on."""
        self._pages = {}  # not cleared: what is just being read belongs to the old ones
