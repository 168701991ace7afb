"""Results of `kvcascade import`, and the checks of what it imports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ....errors import ConfigError
from ....tiers.nvme.path.block_reader import payload_checksum
from ....tiers.nvme.segments.format import SlotRecord
from .carried import CarriedHead

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
    """Number of blocks that the device refused, or that found no room."""
    reason: str | None = None
    """Reason why blocks failed, with a remedy."""

    def as_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return asdict(self)


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


def is_right(record: SlotRecord, payload: memoryview) -> bool:
    """Return True if a payload is that of its record."""
    if record.length != len(payload):
        return False
    return record.checksum == payload_checksum(record.key, payload)
