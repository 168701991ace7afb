"""Results of `kvcascade verify`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ..block_scan import BlockFinding


@dataclass(frozen=True, slots=True)
class BlockProblem:
    """One block with a problem."""

    hash: str
    slot: int
    problem: BlockFinding


@dataclass(slots=True)
class VerifyReport:
    """Result of verifying one namespace; sizes in bytes."""

    name: str
    is_live: bool
    problem: str | None = None
    """Reason why the namespace cannot be read or repaired, with a remedy."""
    blocks: int = 0
    ok: int = 0
    changed: int = 0
    """Number of blocks that were removed or replaced while they were read (live namespaces
    only)."""
    bytes_read: int = 0
    seconds: float = 0.0
    problems: list[BlockProblem] = field(default_factory=list)
    segments_damaged: dict[str, str] = field(default_factory=dict)
    """Mapping of damaged segment files to a description of the damage, as it was before the
    command opened the namespace."""
    dropped_at_opening: int = 0
    """Number of blocks that the writer removed when it opened the namespace for this command,
    because their segment files were missing."""
    space: str = ""
    """Result of the check of free space, in words."""
    space_adds_up: bool | None = None
    """True if free space adds up; None if engines change it during the check."""
    dropped: int = 0
    """Number of entries that `--repair` removed."""

    @property
    def is_clean(self) -> bool:
        """Return True if no problem was found."""
        is_space_wrong = self.space_adds_up is False
        is_damaged = bool(self.problems or self.segments_damaged or self.dropped_at_opening)
        return self.problem is None and not is_damaged and not is_space_wrong

    def as_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {**asdict(self), "is_clean": self.is_clean}
