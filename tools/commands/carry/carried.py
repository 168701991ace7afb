"""Format of an export file: a portable part of a cache, and a standard safetensors file.

Tensor `blocks`, U8 `[n, block_bytes]`, holds the payloads. Tensor `slots`, U8 `[n, 128]`, holds one
record per block (`SlotRecord`). The reader checks all bounds, because the file is untrusted.
"""

from __future__ import annotations

import json
import stat
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....errors import ConfigError, CorruptionError, FormatError, os_errors
from ....tiers.nvme.disk.transfers import read_all
from ....tiers.nvme.namespace import NamespaceKey
from ....tiers.nvme.segments.format import (
    MAX_BLOCK_BYTES,
    MAX_DESCRIPTION_BYTES,
    MAX_KEY_BYTES,
    MAX_SLOTS,
    PAGE_BYTES,
    read_json,
    tensor,
)
from ..path_files import open_read_only

FORMAT = "kvcascade-export"
FORMAT_VERSION = "1"
MAX_HEADER_BYTES = 2 << 20
SLOT_RECORD_BYTES = 128
_RECORD = struct.Struct("<4sI8xQI4xB64s31x")
_RECORD_MAGIC = b"KVCS"
_RECORD_BODY = 8
"""Start of the record's body, which its CRC covers."""
assert _RECORD.size == SLOT_RECORD_BYTES


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """Record of one block in an export file."""

    key: bytes
    checksum: int
    length: int

    def pack(self) -> bytes:
        """Return the record as stored in the file."""
        packed = bytearray(
            _RECORD.pack(_RECORD_MAGIC, 0, self.checksum, self.length, len(self.key), self.key)
        )
        struct.pack_into("<I", packed, 4, zlib.crc32(packed[_RECORD_BODY:]))
        return bytes(packed)


def parse_record(data: bytes) -> SlotRecord | None:
    """Return the record of a block; None if it is damaged."""
    if len(data) != SLOT_RECORD_BYTES:
        return None
    magic, crc, checksum, length, key_length, key = _RECORD.unpack(data)
    if magic != _RECORD_MAGIC or not 0 < key_length <= MAX_KEY_BYTES:
        return None
    if crc != zlib.crc32(data[_RECORD_BODY:]):
        return None
    return SlotRecord(key[:key_length], checksum, length)


@dataclass(frozen=True, slots=True)
class CarriedHead:
    """Contents of the file's header."""

    label: str
    fields: Mapping[str, Any]
    about: Mapping[str, Any]
    fingerprint: str
    block_bytes: int
    slots_per_segment: int
    """Slots per segment of the exported namespace; a hint for a new namespace."""
    blocks: int
    created: str
    """Time of creation, as ISO 8601 in UTC."""

    def header(self, room_bytes: int | None = None) -> bytes:
        """Return the safetensors header, padded to whole pages, or to `room_bytes` if it is
        shorter."""
        payload = self.blocks * self.block_bytes
        end = payload + self.blocks * SLOT_RECORD_BYTES
        document = {
            "__metadata__": {
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                "fingerprint": self.fingerprint,
                "label": self.label,
                "fields": json.dumps(dict(self.fields), sort_keys=True),
                "about": json.dumps(dict(self.about), sort_keys=True),
                "slots_per_segment": str(self.slots_per_segment),
                "created": self.created,
            },
            "blocks": tensor((self.blocks, self.block_bytes), 0, payload),
            "slots": tensor((self.blocks, SLOT_RECORD_BYTES), payload, end),
        }
        text = json.dumps(document, separators=(",", ":")).encode()
        room = room_bytes or -(-(len(text) + 8) // PAGE_BYTES) * PAGE_BYTES
        return struct.pack("<Q", room - 8) + text.ljust(room - 8)


def real_file(path: Path) -> Path:
    """Return the path with links followed; the file itself need not exist.

    Raises `ConfigError` for a pipe, a device or a folder. Maps an `OSError` to a `KVCascadeError`.
    """
    with os_errors(f"looking for {path}"):
        try:
            is_file = stat.S_ISREG(path.stat().st_mode)
        except FileNotFoundError:
            is_file = True
        if not is_file:
            raise ConfigError(f"{path} is a pipe, a device or a folder; give the name of a file")
        return path.resolve()


class CarriedReader:
    """An export file that is open for reading. One thread; raises a `KVCascadeError`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with os_errors(f"opening {path}"):
            self._file = open_read_only(real_file(path))
            try:
                data = bytearray(min(self._file.size(), MAX_HEADER_BYTES))
                got = self._file.preadv([memoryview(data)], 0)
                self.head, self._start = _parse(bytes(data[:got]), self._file.size(), path)
            except BaseException:
                self._file.close()
                raise

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()

    def records(self, first: int, count: int) -> list[SlotRecord | None]:
        """Return the records of adjacent rows, with None for a damaged one."""
        offset = self._start + self.head.blocks * self.head.block_bytes + first * SLOT_RECORD_BYTES
        data = bytearray(count * SLOT_RECORD_BYTES)
        with os_errors(f"reading {self.path}"):
            read_all(self._file, [memoryview(data)], offset)
        step = SLOT_RECORD_BYTES
        return [parse_record(bytes(data[i * step : (i + 1) * step])) for i in range(count)]

    def read(self, first: int, buffers: Sequence[memoryview]) -> None:
        """Read the payloads of adjacent rows into buffers of `block_bytes`."""
        with os_errors(f"reading {self.path}"):
            read_all(self._file, buffers, self._start + first * self.head.block_bytes)


def _parse(data: bytes, file_bytes: int, path: Path) -> tuple[CarriedHead, int]:
    """Return the head, and the offset of the payload."""
    wrong = CorruptionError(f"{path} is not a file of `kvcascade export`; give one that is")
    if len(data) < 8:
        raise wrong
    (length,) = struct.unpack_from("<Q", data)
    if length + 8 > len(data):
        raise wrong
    try:
        document = json.loads(data[8 : 8 + length])
        metadata = document["__metadata__"]
        kind, version = metadata["format"], metadata["format_version"]
        blocks, block_bytes = map(int, document["blocks"]["shape"])
        head = CarriedHead(
            label=str(metadata["label"]),
            fields=_object(metadata["fields"]),
            about=_object(metadata["about"]),
            fingerprint=str(metadata["fingerprint"]),
            block_bytes=block_bytes,
            slots_per_segment=int(metadata["slots_per_segment"]),
            blocks=blocks,
            created=str(metadata["created"]),
        )
        written = head.header(length + 8)
        fingerprint = NamespaceKey(head.label, head.fields).fingerprint
        described = json.dumps([head.label, head.fields, head.about], indent=2)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise wrong from None
    if kind != FORMAT:
        raise wrong
    if version != FORMAT_VERSION:
        raise FormatError(
            f"{path} has format version {version}, this kvcascade reads {FORMAT_VERSION}; use the "
            "version that wrote it"
        )
    sane = (
        0 <= blocks <= MAX_SLOTS
        and 0 < block_bytes <= MAX_BLOCK_BYTES
        and 0 < head.slots_per_segment <= MAX_SLOTS
        and len(described) <= MAX_DESCRIPTION_BYTES - PAGE_BYTES  # `--create` stores it
    )
    end = length + 8 + blocks * (block_bytes + SLOT_RECORD_BYTES)
    if not sane or written != data[: 8 + length] or end != file_bytes:
        raise CorruptionError(f"{path} is damaged or cut short; export it again")
    if fingerprint != head.fingerprint:
        raise CorruptionError(f"{path} has fields that do not match its fingerprint")
    return head, length + 8


def _object(text: str) -> Mapping[str, Any]:
    value = read_json(text)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value
