"""Slot records for the manager's thread, read by the page, since victims mostly lie side by side.

The first record of a page is read alone, all others with the second request. A page is cached until
`forget`, and may be outdated by then. One thread only, except for `forget`.
"""

from __future__ import annotations

from .format import SLOT_RECORD_BYTES, SlotRecord, parse_record
from .segment_files import RECORDS_PER_PAGE, SegmentSet

MAX_PAGES = 256
"""Largest number of cached pages."""


class RecordPages:
    """The cached records of open segments."""

    def __init__(self, segments: SegmentSet) -> None:
        self._segments = segments
        self._slots_per_segment = segments.layout.slots
        self._pages: dict[int, bytes] = {}
        """Pages by their first slot; empty if one record was read, or if the page cannot be
        read."""

    def at(self, slot: int) -> SlotRecord | None:
        """Return the record of a slot; None if unwritten, damaged or unreadable."""
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
        """Drop the cache, so that later calls read again."""
        self._pages = {}  # replaced, not cleared: a read in progress fills the old one
