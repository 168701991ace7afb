"""`kvcascade remote verify`: read blocks of a remote tier, and check each one."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

from ....tiers.nvme.segments.format import MAX_BLOCK_BYTES
from ....tiers.remote.base import FAILURES, HEADER_BYTES, PrivateBuffer, RemoteEntry, RemoteOutcome
from ..block_scan import Throttle
from ..progress import Advance
from .examine_object import Verdict, examine, parse_name
from .open_remote import CALL_LIMIT_S, RemoteServer

READ_AT_A_TIME = 64
READ_AT_A_TIME_BYTES = 64 << 20
"""Memory for blocks that are read at a time, if none is larger."""
MAX_OBJECT_BYTES = HEADER_BYTES + MAX_BLOCK_BYTES
"""Size of the largest object that is read. A larger one is no block, and counts as damaged."""
MAX_NAMED = 10_000
"""Limit on the damaged blocks that are named."""


@dataclass(slots=True)
class RemoteVerified:
    """Result of reading the blocks of a remote tier."""

    url: str
    listed: int = 0
    """Number of blocks there, as listed."""
    read: int = 0
    """Number of blocks that were asked for."""
    bytes_read: int = 0
    """Bytes that arrived, headers included."""
    seconds: float = 0.0
    outcomes: dict[str, int] = field(default_factory=dict)
    """Number of blocks by outcome: that of `Verdict`, or of the read."""
    damaged: list[str] = field(default_factory=list)
    """Names of damaged blocks, at most 10,000."""
    removed: int = 0
    """Number of damaged blocks that `--remove` removed."""

    @property
    def is_clean(self) -> bool:
        """Return True if no block was damaged, and all could be read."""
        return not self.outcomes.keys() & {Verdict.CORRUPT, *FAILURES}

    def count(self, outcome: str) -> None:
        """Count a block."""
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def as_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {**asdict(self), "is_clean": self.is_clean}


def verify_remote(
    tier: RemoteServer,
    namespace: str,
    advance: Advance,
    *,
    sample: int | None,
    may_remove: bool,
    bytes_per_s: int | None = None,
) -> RemoteVerified:
    """Read all blocks, or a sample of so many, of namespaces that begin with these digits.

    With `may_remove` damaged blocks are removed. `advance` takes bytes. Raises `CommandError`.
    """
    report, began = RemoteVerified(tier.options.url), perf_counter()
    throttle = Throttle(bytes_per_s)
    blocks = _counted(tier.entries(namespace), report)
    for batch in _batches(blocks if sample is None else _drawn(blocks, sample)):
        n_bytes = sum(e.size_bytes for e in batch if e.size_bytes <= MAX_OBJECT_BYTES)
        throttle.take(n_bytes)
        damaged = _verify(tier, batch, report)
        advance(n_bytes)
        if may_remove and damaged:
            report.removed += tier.engine.remove(damaged, CALL_LIMIT_S).count(RemoteOutcome.OK)
    report.seconds = perf_counter() - began
    return report


def _counted(entries: Iterable[RemoteEntry], report: RemoteVerified) -> Iterator[RemoteEntry]:
    for entry in entries:
        if parse_name(entry.name) is not None:
            report.listed += 1
            yield entry


def _drawn(entries: Iterable[RemoteEntry], n: int) -> list[RemoteEntry]:
    """Return `n` of the entries, each with the same chance, or all if there are fewer."""
    drawn: list[RemoteEntry] = []
    for number, entry in enumerate(entries):
        if number < n:
            drawn.append(entry)
        elif (place := random.randrange(number + 1)) < n:
            drawn[place] = entry
    return drawn


def _batches(entries: Iterable[RemoteEntry]) -> Iterator[list[RemoteEntry]]:
    batch: list[RemoteEntry] = []
    held_bytes = 0
    for entry in entries:
        if batch and (
            len(batch) == READ_AT_A_TIME or held_bytes + entry.size_bytes > READ_AT_A_TIME_BYTES
        ):
            yield batch
            batch, held_bytes = [], 0
        batch.append(entry)
        held_bytes += entry.size_bytes
    if batch:
        yield batch


def _verify(tier: RemoteServer, batch: list[RemoteEntry], report: RemoteVerified) -> list[str]:
    """Read and judge blocks; return the names of the damaged ones."""
    measured = tier.engine.measure(batch, CALL_LIMIT_S)
    sizes = {entry.name: size for entry, size in zip(batch, measured, strict=True)}
    said = {name: Verdict.CORRUPT.value for name in sizes}
    failed = [size for size in measured if isinstance(size, RemoteOutcome)]
    whole: dict[str, PrivateBuffer] = {}
    for name, size in sizes.items():
        if isinstance(size, RemoteOutcome):
            said[name] = size.value
        elif HEADER_BYTES < size <= MAX_OBJECT_BYTES:
            whole[name] = PrivateBuffer(size - HEADER_BYTES)
    outcomes = tier.engine.get_into([*whole], [*whole.values()], CALL_LIMIT_S)
    tier.note([*failed, *outcomes])
    for (name, buffer), outcome in zip(whole.items(), outcomes, strict=True):
        said[name] = outcome.value
        if outcome is RemoteOutcome.OK:
            parts = parse_name(name)
            assert parts is not None, "only blocks are read"
            said[name] = examine(parts, buffer, tier.seal).value
            report.bytes_read += HEADER_BYTES + buffer.payload_bytes
    for word in said.values():
        report.count(word)
    damaged = [name for name, word in said.items() if word == Verdict.CORRUPT]
    report.read += len(batch)
    report.damaged += damaged[: MAX_NAMED - len(report.damaged)]
    return damaged
