"""Arenas in shared memory that outlive their engines: find, print and drop them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from ....config.sizes import human
from ....errors import FormatError, os_errors
from ....tiers.base import BlockHash
from ....tiers.cpu.arena_file import KEPT_NAME, kept_arenas, open_own, remove_stale
from ....tiers.cpu.header import HEADER_BYTES, MAGIC, ArenaGeometry, ArenaHeader, read_fixed
from ....tiers.cpu.locks import try_flock
from ....tiers.cpu.slot_table import SlotTable
from .. import show


@dataclass(frozen=True, slots=True)
class KeptArena:
    """An arena in shared memory that outlives its engine."""

    path: Path
    size_bytes: int
    slots: int | None
    """None if this version does not read the arena."""
    blocks: int | None
    """Number of slots with complete bytes; None as `slots`."""
    block_bytes: int | None
    is_live: bool
    """True while a process holds the arena."""

    def as_json(self) -> dict[str, Any]:
        """Return the arena as a JSON object."""
        found = asdict(self)
        return {"name": found.pop("path").name, **found}


def found(arena_dir: Path) -> list[KeptArena]:
    """Return all kept arenas of this user in a directory. Raises `TierIOError` if it cannot be
    read."""
    with os_errors(f"listing {arena_dir}"):
        os.listdir(arena_dir)
    arenas: list[KeptArena] = []
    for path in kept_arenas(str(arena_dir)):
        with suppress(FileNotFoundError):  # it was dropped meanwhile
            arena = _arena(path)
            if arena is not None:
                arenas.append(arena)
    return arenas


def _arena(path: str) -> KeptArena | None:
    """Return a kept arena; None if it is none. Raises `FileNotFoundError`."""
    header = kept_header(path)
    if header is None:
        return None
    fixed, is_live = header
    size = os.stat(path).st_size
    if fixed is None:
        return KeptArena(Path(path), size, None, None, None, is_live)
    geometry = fixed.geometry
    is_whole = size >= geometry.file_bytes
    blocks = len(_table(path, geometry).complete()[0]) if is_whole else 0
    return KeptArena(Path(path), size, geometry.slots, blocks, geometry.slot_bytes, is_live)


def drop_kept(path: str) -> bool:
    """Remove a kept arena unless a live process holds it. Return True if it was removed."""
    return bool(KEPT_NAME.fullmatch(os.path.basename(path))) and remove_stale(path)


def kept_header(path: str) -> tuple[ArenaHeader | None, bool] | None:
    """Return the header of a kept arena, and True if a live process holds it.

    The header is None if it is of another version, or damaged. Return None if the file is not an
    arena of this user. Takes the exclusive lock for a moment, as a maker does that searches for an
    arena to take over.
    """
    fd = open_own(path)
    if fd is None:
        return None
    try:
        is_free = try_flock(fd, exclusive=True)
        page = os.pread(fd, HEADER_BYTES, 0)
        with suppress(FormatError):
            return read_fixed(page, path), not is_free
        return (None, not is_free) if page.startswith(MAGIC) else None
    except OSError:
        return None
    finally:
        os.close(fd)


def none_in(arena_dir: Path) -> str:
    """Return the sentence that a directory has no kept arena."""
    return (
        f"no arena is kept in {arena_dir}; if the configuration has another arena_dir, give it "
        "with --arena-dir"
    )


def print_swept(paths: Sequence[str]) -> None:
    """Print the number of files that engines left when they were killed during their start."""
    if paths:
        print(f"removed {len(paths)} left by engines that were killed during their start")


def print_arenas(arenas: Sequence[KeptArena], arena_dir: Path) -> None:
    """Print the arenas of a directory as a table."""
    if not arenas:
        print(none_in(arena_dir))
        return
    table = Table("name", "size", "blocks", "slots", "in use")
    for arena in arenas:
        in_use = "yes" if arena.is_live else "no"
        counts = (str(arena.blocks), str(arena.slots))
        if arena.slots is None:
            counts = ("another version", "")
        table.add_row(arena.path.name, human(arena.size_bytes), *counts, in_use)
    show.console().print(table)


def print_dropped(
    dropped: Sequence[KeptArena], asked: Sequence[KeptArena], arena_dir: Path
) -> None:
    """Print the arenas of a directory that were dropped, and those that are in use."""
    if not asked:
        print(none_in(arena_dir))
        return
    freed = human(sum(arena.size_bytes for arena in dropped))
    left = len(asked) - len(dropped)
    print(f"dropped {len(dropped)} ({freed})" + (f"; {left} in use" if left else ""))


def kept_blocks(arena_dir: Path, fingerprint: str) -> tuple[set[BlockHash], int] | None:
    """Return the blocks of a namespace in kept arenas, and the slots of these arenas; None if there
    are none.

    `fingerprint` is in hex. Arenas that an engine is using are
    included. An engine may change its arena meanwhile; only complete rows count.
    """
    blocks: set[BlockHash] = set()
    slots = 0
    for path in kept_arenas(str(arena_dir)):
        with suppress(FileNotFoundError):  # it was dropped meanwhile
            header = kept_header(path)
            if header is None or header[0] is None:
                continue
            geometry = header[0].geometry
            if os.stat(path).st_size < geometry.file_bytes:
                continue
            table = _table(path, geometry)
            if table.fingerprint.hex() == fingerprint:
                blocks.update(table.complete()[0])
                slots += geometry.slots
    return (blocks, slots) if slots else None


def _table(path: str, geometry: ArenaGeometry) -> SlotTable:
    start = HEADER_BYTES + geometry.data_bytes
    return SlotTable(np.fromfile(path, np.uint8, geometry.table_bytes, offset=start))
