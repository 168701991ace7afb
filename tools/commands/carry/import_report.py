"""Results of `kvcascade import`, and the checks of what it imports."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ....errors import ConfigError
from ....tiers.nvme.path.block_reader import payload_checksum
from .carried import CarriedHead, CarriedReader, SlotRecord

BATCH_BYTES = 16 << 20
MAX_BATCH_BLOCKS = 1024
DEVICE_REFUSED = "the device refused some writes; see the log lines above"


class DifferentNamespaceError(ConfigError):
    """The blocks of the file belong to another namespace."""


@dataclass(slots=True)
class ImportReport:
    """Outcomes of the blocks of a file, as counts."""

    namespace: str
    blocks: int
    imported: int = 0
    already_there: int = 0
    damaged: int = 0
    """Number of blocks whose payload and record do not match."""
    failed: int = 0
    """Number of blocks that the device refused, that found no room, or that were evicted again."""
    reason: str | None = None
    """Reason why blocks failed, with a remedy."""
    was_given_up: bool = False
    """True if the import ended early, because the device refused everything."""


@dataclass(frozen=True, slots=True)
class StoredKeys:
    """Keys of the blocks that the tier had after their batch."""

    imported: list[bytes] = field(default_factory=list)
    already_there: list[bytes] = field(default_factory=list)


def refuse_unless_equal(
    name: str, fields: Mapping[str, Any], block_bytes: int, head: CarriedHead
) -> None:
    """Raise `DifferentNamespaceError` unless the blocks of a file belong to a namespace."""
    missing = object()
    names = sorted(
        each
        for each in fields.keys() | head.fields.keys()
        if fields.get(each, missing) != head.fields.get(each, missing)
    )
    if names or block_bytes != head.block_bytes:
        shown = ", ".join(names) or "block_bytes"
        raise DifferentNamespaceError(
            f"these blocks do not belong to {name}: {shown} differ; import them where "
            "every field of the fingerprint is equal"
        )


def right_batches(
    carried: CarriedReader, report: ImportReport
) -> Iterator[tuple[int, dict[bytes, memoryview]]]:
    """Read the whole file; yield the number of rows of each batch, and its blocks by key.

    Damaged blocks and second blocks of a key are counted in the report and left out. The payloads
    are valid until the next batch.
    """
    head, size = carried.head, carried.head.block_bytes
    step = max(1, min(MAX_BATCH_BLOCKS, BATCH_BYTES // size))
    memory = memoryview(mmap.mmap(-1, step * size))
    for first in range(0, head.blocks, step):
        count = min(step, head.blocks - first)
        views = [memory[i * size : (i + 1) * size] for i in range(count)]
        carried.read(first, views)
        good: dict[bytes, memoryview] = {}
        for record, view in zip(carried.records(first, count), views, strict=True):
            if record is None or not _is_right(record, view):
                report.damaged += 1
            elif record.key in good:
                report.already_there += 1
            else:
                good[record.key] = view
        yield count, good


def _is_right(record: SlotRecord, payload: memoryview) -> bool:
    """Return True if a payload is that of its record."""
    if record.length != len(payload):
        return False
    return record.checksum == payload_checksum(record.key, payload)
