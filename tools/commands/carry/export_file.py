"""`kvcascade export`: write blocks of a cache to one portable file.

Only blocks whose payload matches its checksum are written. The file is written under a temporary
name and renamed when it is complete and durable. Memory grows with the blocks, by about 870 bytes
each, independently of the payload.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ....errors import ConfigError, os_errors
from ....tiers.nvme.disk.transfers import Throttle
from ....tiers.nvme.offline.reader import Description, Snapshot
from ....tiers.nvme.offline.scan import Wanted, scan
from ....tiers.nvme.segments.chains import head_of
from ....tiers.nvme.segments.format import IndexEntry, SlotRecord
from ..cache_access import OpenedCache, parse_hash
from ..verify.verify_report import Progress
from .carried import CarriedHead, real_file
from .export_writer import Choice, ExportReport, ExportWriter, whole_or_nothing


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


def only_match(cache: OpenedCache, text: str, option: str) -> bytes:
    """Return the only block whose hash begins with `text`. Raises `ConfigError` if none or several
    match."""
    matches = cache.index.keys_from(parse_hash(text), 2)
    if len(matches) != 1:
        raise ConfigError(f"{option}: there are {len(matches) or 'no'} blocks {text}")
    return matches[0]


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
    with os_errors(f"writing {path}"), whole_or_nothing(target) as file:
        created = datetime.now(UTC).isoformat(timespec="seconds")
        writer = ExportWriter(
            file,
            len(wanted),
            cache.description.block_bytes,
            lambda blocks: _head(cache.description, blocks, created),
        )
        row_of = {each.slot: row for row, each in enumerate(wanted)}
        epoch = cache.index.meta().epoch

        def put(each: Wanted, payload: memoryview) -> None:
            record = SlotRecord(each.key, generations[each.slot], each.checksum, each.length, epoch)
            writer.put(row_of[each.slot], record, payload)

        for batch in scan(cache.segments, wanted, throttle, put):
            if progress is not None:
                progress(len(batch))
        size = writer.finish()
    skipped = len(wanted) - writer.blocks
    return ExportReport(cache.description.name, str(path), writer.blocks, skipped, missing, size)


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


def _head(description: Description, blocks: int, created: str) -> CarriedHead:
    """Return the head of a file for a number of blocks of a namespace."""
    return CarriedHead(
        label=description.label,
        fields=description.fields,
        about=description.about,
        fingerprint=description.fingerprint,
        block_bytes=description.block_bytes,
        slots_per_segment=description.slots_per_segment,
        blocks=blocks,
        created=created,
    )
