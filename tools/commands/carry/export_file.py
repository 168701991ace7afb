"""`kvcascade export`: write blocks of a cache to one portable file.

Only blocks whose payload matches its checksum are written. The file is written under a temporary
name and renamed when it is complete and durable. Memory grows with the blocks, by about 870 bytes
each, independently of the payload.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ....errors import ConfigError, os_errors
from ....tiers.nvme.disk.filesystem import RealFile, RealFileSystem
from ....tiers.nvme.disk.transfers import write_all
from ....tiers.nvme.offline.reader import Snapshot
from ....tiers.nvme.offline.scan import Throttle, Verdict, Wanted, scan
from ....tiers.nvme.segments.chains import head_of
from ....tiers.nvme.segments.format import SLOT_RECORD_BYTES, IndexEntry, SlotRecord
from ..cache_access import OpenedCache
from ..inspect.block_report import only_match
from ..verify.verify_blocks import Progress
from .carried import carried_head, real_file

PARTIAL_SUFFIX = ".partial"
FILE_MODE = 0o600


@dataclass(frozen=True, slots=True)
class Choice:
    """Selection of the blocks to export; without any criterion, all blocks."""

    prompts: tuple[str, ...] = ()
    """Start of the hash (hex) of the last block of each prompt; all blocks before it are
    included."""
    prefixes: tuple[bytes, ...] = ()
    """Hash prefixes; blocks whose hash starts with one of them are included."""
    hot_bytes: int | None = None
    """Maximum payload in bytes; the most recently used blocks are included."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """Result of an export; sizes in bytes."""

    namespace: str
    path: str
    blocks: int
    skipped: int
    """Number of chosen blocks that were damaged or gone when they were read."""
    missing: int
    """Number of blocks of the chosen prompts that are not in the cache."""
    file_bytes: int

    def as_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return asdict(self)


def choose_blocks(
    cache: OpenedCache, snapshot: Snapshot, choice: Choice, heads: Set[int]
) -> npt.NDArray[np.int64]:
    """Return positions in the snapshot, most recently used first if `hot_bytes` is set.

    `heads` are the hash heads of the blocks of `choice.prompts`.
    """
    positions = np.arange(len(snapshot), dtype=np.int64)
    if choice.prefixes or choice.prompts:
        starts = choice.prefixes
        there = [head_of(key) in heads or key.startswith(starts) for key in snapshot.keys]
        positions = np.flatnonzero(np.array(there, dtype=np.bool_))
    if choice.hot_bytes is not None:
        most = choice.hot_bytes // cache.description.block_bytes
        warmth = _warmth(cache, snapshot)[positions]
        positions = positions[np.lexsort(tuple(reversed(warmth.T)))[::-1]][:most]
    return positions


def prompt_heads(cache: OpenedCache, prompts: Sequence[str]) -> set[int]:
    """Return the hash heads of all blocks of prompts. Raises `ConfigError` if a prompt is not
    completely known."""
    heads: set[int] = set()
    if not prompts:
        return heads
    chains = cache.state.chains()
    for text in prompts:
        key = only_match(cache, text, "--prefix")
        found, is_whole = chains.up_to(head_of(key))
        if not is_whole:
            raise ConfigError(
                f"--prefix: no engine has recorded all blocks before {text}; send the prompt "
                "again, or choose blocks with --hot, --hash or --hashes"
            )
        heads.update(found)
    return heads


def export(
    cache: OpenedCache,
    choice: Choice,
    path: Path,
    *,
    may_replace: bool = False,
    throttle: Throttle | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Write the chosen blocks to `path`, or to the target of `path` if it is a link.

    Raises a `KVCascadeError`; no file is left behind then.
    """
    target = real_file(path)
    if target.exists() and not may_replace:
        raise ConfigError(f"{path} exists already; give another name, or --force")
    if cache.state.was_reset():
        raise ConfigError(
            f"the engines of {cache.description.name} were reset: blocks stored since then may "
            "belong to weights that were updated in place, not to those of its fingerprint; "
            "restart an engine and export from it"
        )
    snapshot = cache.index.snapshot()
    cache.segments.refresh()
    heads = prompt_heads(cache, choice.prompts)
    wanted, generations = _wanted(snapshot, choose_blocks(cache, snapshot, choice, heads))
    missing = len(heads.difference(map(head_of, snapshot.keys))) if heads else 0
    with os_errors(f"writing {path}"), _whole_or_nothing(target) as file:
        writer = _Writer(cache, file, wanted, generations)
        for batch in scan(cache.segments, wanted, throttle, writer.put):
            writer.done(sum(scanned.verdict is Verdict.OK for scanned in batch))
            if progress is not None:
                progress(len(batch))
        size = writer.finish()
    skipped = len(wanted) - writer.blocks
    return ExportReport(cache.description.name, str(path), writer.blocks, skipped, missing, size)


class _Writer:
    """Writes rows in slot order; rows from the end fill the gaps of skipped blocks. `put` is
    thread-safe."""

    def __init__(
        self,
        cache: OpenedCache,
        file: RealFile,
        wanted: list[Wanted],
        generations: dict[int, int],
    ) -> None:
        """Prepare the rows; `generations` maps slots to generations."""
        self.blocks = 0
        self._file = file
        self._description = cache.description
        self._epoch = cache.index.meta().epoch
        self._generations = generations
        self._created = datetime.now(UTC).isoformat(timespec="seconds")
        self._row_of = {each.slot: row for row, each in enumerate(wanted)}
        self._records: list[bytes | None] = [None] * len(wanted)
        self._room = len(carried_head(self._description, len(wanted), self._created).header())

    def put(self, wanted: Wanted, payload: memoryview) -> None:
        """Write a payload that has been verified."""
        row = self._row_of[wanted.slot]
        write_all(self._file, [payload], self._offset(row))
        generation = self._generations[wanted.slot]
        record = SlotRecord(wanted.key, generation, wanted.checksum, wanted.length, self._epoch)
        self._records[row] = record.pack()

    def done(self, count: int) -> None:
        """Count rows that have been written."""
        self.blocks += count

    def finish(self) -> int:
        """Close the gaps, write records and header; return the size of the file."""
        rows = [row for row, record in enumerate(self._records) if record is not None]
        gaps = [row for row in range(len(rows)) if self._records[row] is None]
        buffer = memoryview(bytearray(self._description.block_bytes))
        for gap in gaps:
            last = rows.pop()
            self._file.preadv([buffer], self._offset(last))
            write_all(self._file, [buffer], self._offset(gap))
            self._records[gap], self._records[last] = self._records[last], None
        there = [record for record in self._records if record is not None]
        assert len(there) == self.blocks
        end = self._offset(len(there))
        write_all(self._file, [memoryview(b"".join(there))], end)
        head = carried_head(self._description, len(there), self._created)
        header = head.header(self._room)
        assert len(header) == self._room, "the header only gets shorter"
        write_all(self._file, [memoryview(header)], 0)
        size = end + len(there) * SLOT_RECORD_BYTES
        self._file.truncate(size)
        return size

    def _offset(self, row: int) -> int:
        return self._room + row * self._description.block_bytes


def _wanted(
    snapshot: Snapshot, positions: npt.NDArray[np.int64]
) -> tuple[list[Wanted], dict[int, int]]:
    """Return the blocks to read, in slot order, and the generation of each slot; damaged entries
    are left out."""
    found: dict[int, tuple[IndexEntry, bytes]] = {}
    for position in positions.tolist():
        entry = snapshot.entry(position)
        if entry is not None:
            found[entry.slot] = (entry, snapshot.keys[position])
    wanted = [
        Wanted(slot, key, entry.checksum, entry.length)
        for slot, (entry, key) in sorted(found.items())
    ]
    return wanted, {slot: entry.generation for slot, (entry, _) in found.items()}


def _warmth(cache: OpenedCache, snapshot: Snapshot) -> npt.NDArray[np.int64]:
    """Return per entry: time of the last use, position in the policy's order, order of writing."""
    slots = np.clip(snapshot.slots, 0, max(0, cache.slots - 1))
    count = max(1, cache.slots)
    last, order = cache.state.usage(count).last_use[slots], cache.state.recency(count)[slots]
    return np.stack((last, order, snapshot.generations.astype(np.int64)), axis=1)


@contextmanager
def _whole_or_nothing(path: Path) -> Iterator[RealFile]:
    """Yield a file that gets its final name when it is complete and durable. Raises `OSError`."""
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    file = RealFile(os.open(partial, flags, FILE_MODE))
    try:
        yield file
        file.sync()
        os.replace(partial, path)
        RealFileSystem().sync_dir(path.absolute().parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    finally:
        file.close()
