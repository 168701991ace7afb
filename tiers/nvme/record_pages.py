"""Slot records for the manager's thread: by the page, since who leaves lies mostly side by side.

A page is remembered until `forget`, and may be old by then. Used by one thread, but for `forget`.
"""

from __future__ import annotations

from .format import SLOT_RECORD_BYTES, SlotRecord, parse_record
from .segments import RECORDS_PER_PAGE, SegmentSet

MAX_PAGES = 64
"""Remembered at a time."""


class RecordPages:
    """The records of open segments."""

    def __init__(self, segments: SegmentSet) -> None:
        self._segments = segments
        self._slots_per_segment = segments.layout.slots
        self._pages: dict[int, bytes] = {}
        """By the first slot of each; empty if it cannot be read."""

    def at(self, slot: int) -> SlotRecord | None:
        """What a slot says it holds; None if unwritten or damaged, or if it cannot be read."""
        place = slot % self._slots_per_segment % RECORDS_PER_PAGE
        pages = self._pages
        page = pages.get(slot - place)
        if page is None:
            page = self._read(pages, slot - place)
        start = place * SLOT_RECORD_BYTES
        return parse_record(page[start : start + SLOT_RECORD_BYTES])

    def forget(self) -> None:
        """What is asked for from now on is read from now on."""
        self._pages = {}  # not cleared: what is just being read belongs to the old ones

    def _read(self, pages: dict[int, bytes], first: int) -> bytes:
        if len(pages) >= MAX_PAGES:
            pages.clear()
        page = pages[first] = self._segments.record_page(first) or b""
        return page
