"""Structures of segments, with their checks. All numbers are little endian.

Readers accept bytes from any source. Lengths are checked before anything is allocated. Data that
does not parse is None, a `CorruptionError` or a `FormatError`, never a crash.
"""

from __future__ import annotations

import json
import os
import shlex
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....errors import CorruptionError, FormatError

FORMAT_VERSION = 3
PAGE_BYTES = 4096
MAX_KEY_BYTES = 64
MAX_DESCRIPTION_BYTES = 1 << 20
MAX_DEPTH = 100
"""Levels of a document that others may have written, with that of its numbers and texts."""
MAX_SLOTS = 2**31 - 1
MAX_BLOCK_BYTES = 2**32 - PAGE_BYTES
MAX_INDEX_BYTES = 2**42
"""Largest address space of an index, in bytes."""

_SEGMENT_SUFFIX = ".safetensors"
_SEGMENT_DIGITS = 6
MAX_SEGMENTS = 10**_SEGMENT_DIGITS
"""Most segments of a namespace; the names of more would be too long."""


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """The shape of every segment of a namespace."""

    block_bytes: int
    """Bytes of a slot; a multiple of the page size."""
    slots: int
    """Number of slots of a segment."""
    fingerprint: str
    """Fingerprint of the namespace, in hexadecimal."""

    def header(self, number: int) -> bytes:
        """Return the head of segment `number`: a safetensors header, padded to whole pages."""
        document = {
            "__metadata__": {
                "format": "kvcascade-segment",
                "format_version": str(FORMAT_VERSION),
                "fingerprint": self.fingerprint,
                "segment": str(number),
            },
            "blocks": tensor((self.slots, self.block_bytes), 0, self.slots * self.block_bytes),
        }
        text = json.dumps(document, separators=(",", ":")).encode()
        padded = -(-(len(text) + 8) // PAGE_BYTES) * PAGE_BYTES - 8
        return struct.pack("<Q", padded) + text.ljust(padded)

    def runs(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        """Return `slot_runs` of an ascending list."""
        return slot_runs(slots, self.slots)

    @property
    def header_bytes(self) -> int:
        """Offset of slot 0."""
        return len(self.header(0))

    @property
    def file_bytes(self) -> int:
        """Size of a segment file."""
        return self.header_bytes + self.slots * self.block_bytes


def slot_runs(slots: Sequence[int], slots_per_segment: int) -> list[tuple[int, int]]:
    """Group positions of an ascending slot list into runs of adjacent slots in one segment.

    Each run is the pair (begin, end) of positions.
    """
    found: list[tuple[int, int]] = []
    begin = 0
    for i in range(1, len(slots) + 1):
        is_next = i < len(slots) and slots[i] == slots[i - 1] + 1
        if not is_next or slots[i] % slots_per_segment == 0:
            found.append((begin, i))
            begin = i
    return found


def segment_name(number: int) -> str:
    """Return the file name of a segment."""
    return f"{number:0{_SEGMENT_DIGITS}d}{_SEGMENT_SUFFIX}"


def segment_number(name: str) -> int | None:
    """Return the number in the file name of a segment; None for other names."""
    digits = name.removesuffix(_SEGMENT_SUFFIX)
    is_number = digits.isascii() and digits.isdigit() and len(digits) == _SEGMENT_DIGITS
    return int(digits) if is_number and digits != name else None


def read_json(data: str | bytes) -> Any:
    """Parse a document that others may have written.

    Raises `ValueError`, or `RecursionError` for lists in lists beyond `MAX_DEPTH`. Pythons differ
    in how many they read, and indentation makes text of the square of their number.
    """
    document = json.loads(data)
    level = [document]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
    if level:
        raise RecursionError("too many lists in lists")
    return document


def parse_description(data: bytes, where: str) -> dict[str, Any]:
    """Return the parsed document of `namespace.json`.

    Raises `FormatError` for an unknown version, otherwise `CorruptionError` (naming `where`).
    """
    remedy = f"remove the directory {where} to start empty"
    try:
        document = read_json(data)
    except (ValueError, RecursionError):
        raise CorruptionError(f"{where}/namespace.json is damaged; {remedy}") from None
    if not isinstance(document, dict) or document.get("format") != "kvcascade-namespace":
        raise CorruptionError(f"{where}/namespace.json is not a description of blocks; {remedy}")
    version = document.get("format_version")
    if version != FORMAT_VERSION:
        root, name = os.path.split(where)
        raise FormatError(
            f"{where} has format version {version!r}, this kvcascade reads {FORMAT_VERSION}; "
            "use the version that wrote it, or clear it with "
            f"kvcascade gc {shlex.quote(root)} -n {shlex.quote(name)} --remove-namespace"
        )
    limits = {
        "block_bytes": MAX_BLOCK_BYTES,
        "slots_per_segment": MAX_SLOTS,
        "index_bytes": MAX_INDEX_BYTES,
    }
    for key, limit in limits.items():
        value = document.get(key)
        if type(value) is not int or not 0 < value <= limit:
            raise CorruptionError(f"{where}/namespace.json has no valid {key}; {remedy}")
    part, parts = document.get("part"), document.get("parts")
    if not (type(part) is int and type(parts) is int and 0 <= part < parts <= MAX_SEGMENTS):
        raise CorruptionError(f"{where}/namespace.json has no valid part and parts; {remedy}")
    if not isinstance(document.get("fields"), Mapping):
        raise CorruptionError(f"{where}/namespace.json has no valid fields; {remedy}")
    if not isinstance(document.get("fingerprint"), str):
        raise CorruptionError(f"{where}/namespace.json has no valid fingerprint; {remedy}")
    return document


def tensor(shape: tuple[int, int], begin: int, end: int) -> dict[str, object]:
    """Return the safetensors description of a table of bytes."""
    return {"dtype": "U8", "shape": list(shape), "data_offsets": [begin, end]}
