"""Cost of the presence table and the block table, and of a node for the scheduler's thread."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Generator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter

from ....tiers.nvme.disk.filesystem import RealFileSystem
from ....tiers.nvme.path.block_table import Changes, block_table_bytes
from ....tiers.nvme.path.lmdb_block_table import LmdbBlockTable, open_block_table
from ....tiers.nvme.path.path_messages import Committed
from ....tiers.nvme.path.presence_file import (
    OpenPresence,
    PresenceOrigin,
    boot_id,
    is_of_this_boot,
    map_presence,
    open_presence,
)
from ....tiers.nvme.path.presence_table import PresenceTable, presence_bytes
from ...commands.bench.bench_results import OURS, BenchError, Goal, Quantity
from ...commands.bench.raw_disk import drop_page_cache
from . import node_rates
from .measurement import Case, Figures, Measurement, MeasurementSetup, Say
from .scheduler.filled import key_of

FILL_BATCH = 4096
COMMIT_BATCHES = (512, 64, 16)
"""Blocks of a commit. The largest come first: the first touch of each page is a page fault."""
COMMITS = 64
"""Most commits of each batch size; fewer where these are more blocks than the table has."""
STRETCH = 500
"""Lookups that are timed together. The fastest stretch and the median stretch are reported."""
SPARE_SHARE = 64
"""One of this many slots is free, so that commits can replace blocks."""
IDENTITY = b"bench"
EVICTING = "commit of a block that replaces one, batches of"
_OTHER_BOOT = b"another boot"


class FilledPath:
    """A block table and a presence table of `blocks` blocks in a folder."""

    def __init__(self, folder: Path, blocks: int) -> None:
        self.folder = folder
        self.blocks = blocks
        self.slots = blocks + max(1, blocks // SPARE_SHARE)
        self.fs = RealFileSystem()
        self.replaced: set[int] = set()
        """Numbers of blocks that `commits` evicted; a block's number is its first slot."""
        self.unused = count(1 << 50)
        """Numbers of blocks that `commits` stores, each once."""

    def open(self, boot: bytes) -> tuple[LmdbBlockTable, OpenPresence]:
        """Open both, as a writer of this boot does."""
        is_same_boot = is_of_this_boot(self.fs, self.folder, boot)
        table = open_block_table(
            self.folder / "blocks",
            block_table_bytes(self.slots),
            IDENTITY,
            is_durable=False,
            is_same_boot=is_same_boot,
        )
        return table, open_presence(self.fs, self.folder, self.slots, table, boot)

    def fill(self, say: Say) -> None:
        """Create both in random order of keys, and close them cleanly."""
        (self.folder / "blocks").mkdir(parents=True)
        table, presence = self.open(boot_id())
        for start in range(0, self.blocks, FILL_BATCH):
            say(f"filling a block table: {start:,} of {self.blocks:,} blocks")
            numbers = range(start, min(start + FILL_BATCH, self.blocks))
            commit(table, presence, [(key_of(number), number, number) for number in numbers])
        table.close()
        presence.close_clean()


def commit(
    table: LmdbBlockTable,
    presence: OpenPresence,
    puts: Sequence[tuple[bytes, int, int]],
    cleared: Sequence[int] = (),
) -> None:
    """Commit blocks and apply them to the presence table, as the writer of a path does."""
    applied = table.apply(Changes(table.epoch, puts, cleared=cleared, written_bytes=len(puts)))
    if applied.outcome is not Committed.OK or applied.journal is None:
        raise BenchError(f"the block table in {table.path} took no changes: {applied.outcome}")
    presence.table.apply(applied.journal)


def cases(setup: MeasurementSetup) -> Generator[Case, None, None]:
    """Yield the case of a scheduler with a node, and a case per size of the tables."""
    node = partial(node_rates.measure, setup.folder, setup.scale.questions)
    yield Case("a node, blocks of 4 KiB", {OURS: node}, node_rates.QUANTITIES)
    for blocks in setup.scale.path_blocks:
        path = FilledPath(setup.folder / str(blocks), blocks)
        needed = block_table_bytes(path.slots) + presence_bytes(path.slots)
        if needed > shutil.disk_usage(setup.folder).free:
            setup.note(f"path: {blocks:,} blocks need {needed >> 20} MiB in {setup.folder}")
            return
        path.fill(setup.say)
        yield Case(f"{blocks:,} blocks", {OURS: partial(measure, path, setup.scale.questions)})
        shutil.rmtree(path.folder)


def measure(path: FilledPath, questions: int) -> Figures:
    """Measure one filled folder; the blocks in it change, their number does not."""
    figures: dict[str, float] = {}
    figures |= opening(path)
    figures |= lookups(path, questions)
    figures |= commits(path)
    files = [path.folder / "presence", *(path.folder / "blocks").iterdir()]
    sizes = [file.stat().st_blocks * 512 / path.blocks for file in files]
    return figures | {"presence file": sizes[0], "block table": sum(sizes[1:])}


def opening(path: FilledPath) -> dict[str, float]:
    """Open after a loss of power, and close cleanly."""
    table, presence = path.open(boot_id())
    commit(table, presence, [(key_of(path.blocks), path.slots - 1, 0)])
    commit(table, presence, [], [path.slots - 1])
    table.abandon()
    drop_page_cache([path.folder])
    began = perf_counter()
    table, presence = path.open(_OTHER_BOOT)
    took_s = perf_counter() - began
    if presence.origin is not PresenceOrigin.REBUILT:
        raise BenchError(f"the presence table was {presence.origin.value}, not rebuilt")
    table.close()
    presence.close_clean()
    return {"opening after a loss of power": took_s}


def lookups(path: FilledPath, questions: int) -> dict[str, float]:
    """Look up keys that are present and absent, as a reader in another process would."""
    presence = map_presence(path.fs, path.folder, path.slots)
    warm = presence.used_slots()
    if int(warm.sum()) != path.blocks:
        raise BenchError(f"{int(warm.sum())} of {path.blocks} blocks are in the presence table")
    figures: dict[str, float] = {}
    # Keys made in one go lie side by side; those of an engine do not.
    numbers = random.choices(range(path.blocks), k=2 * questions)
    known = [key_of(number) for number in numbers if number not in path.replaced][:questions]
    unknown = [key_of(-1 - number + (1 << 60)) for number in range(questions)]
    for name, keys in (("present", known), ("absent", unknown)):
        stretches = timed(partial(ask, presence), keys)
        figures[f"find, {name}"] = stretches[len(stretches) // 2]
        figures[f"  fastest stretch, {name}"] = stretches[0]
        bulk = sorted(timed(presence.find_many, keys, len(keys)) for _ in range(5))
        figures[f"find in bulk, {name}"] = bulk[0][0]
        if name == "present" and any(presence.find(key) < 0 for key in keys):
            raise BenchError("a block that is present was not found")
    return figures


def ask(presence: PresenceTable, keys: Sequence[bytes]) -> None:
    """Look up keys one by one."""
    find = presence.find
    for key in keys:
        find(key)


def timed(
    look: Callable[[Sequence[bytes]], object], keys: Sequence[bytes], stretch: int = STRETCH
) -> list[float]:
    """Return the time per key of each stretch of keys in µs, ascending."""
    found: list[float] = []
    for start in range(0, max(1, len(keys) - stretch + 1), stretch):
        part = keys[start : start + stretch]
        began = perf_counter()
        look(part)
        found.append((perf_counter() - began) / len(part) * 1e6)
    return sorted(found)


def commits(path: FilledPath) -> dict[str, float]:
    """Replace blocks: each commit clears slots and fills others, in a full table."""
    figures: dict[str, float] = {}
    table, presence = path.open(boot_id())
    try:
        for size in COMMIT_BATCHES:
            batch = min(size, path.slots - path.blocks)
            free = [int(slot) for slot in (~presence.table.used_slots()).nonzero()[0][:batch]]
            rounds = max(1, min(COMMITS, path.blocks // batch))
            taken: list[float] = []
            for _ in range(rounds):
                puts = [(key_of(next(path.unused)), slot, i) for i, slot in enumerate(free)]
                first = random.randrange(path.blocks - batch)
                held = presence.table.used_slots().nonzero()[0]  # not all: other sizes left holes
                used = [int(slot) for slot in held[first : first + batch]]
                began = perf_counter()
                commit(table, presence, puts, used)
                taken.append((perf_counter() - began) / batch * 1e6)
                path.replaced.update(used)
                free = used
            figures[f"{EVICTING} {size}"] = sorted(taken)[len(taken) // 2]
    finally:
        table.close()
        presence.close_clean()
    return figures


MEASUREMENT = Measurement(
    "path",
    "One writer per path: presence table and block table",
    "Keys are random, and the block table was filled in their order of arrival. Lookups are on a "
    "mapping of the presence file, 500 keys a stretch; the row is the median stretch. A commit is "
    "one LMDB transaction without sync, then the change of the presence table. Page cache dropped "
    "before the opening after a loss of power: every page of the block table is checked, and the "
    "table is scanned. Other openings are those of reopening. The rows of a node are processor "
    "time of the scheduler's thread: the median step, from the start of its jobs to their ends.",
    (
        Quantity("find, present", "µs/key", (Goal(0.6),)),
        Quantity("  fastest stretch, present", "µs/key"),
        Quantity("find, absent", "µs/key", (Goal(0.6),)),
        Quantity("  fastest stretch, absent", "µs/key"),
        Quantity("find in bulk, present", "µs/key", (Goal(0.1),)),
        Quantity("find in bulk, absent", "µs/key", (Goal(0.1),)),
        *(Quantity(f"{EVICTING} {size}", "µs/block") for size in COMMIT_BATCHES),
        Quantity("opening after a loss of power", "s"),
        Quantity("presence file", "B/block"),
        Quantity("block table", "B/block"),
    ),
    cases,
)
"""Cost of the tables of a path."""
