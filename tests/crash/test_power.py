"""Power is lost at any moment, on real file systems: no wrong block, and `power` keeps its word."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from support.logged_disks import LoggedDisks, Loss
from support.path_engine import PathEngine

from kvcascade.assembly.path_parts import make_folders
from kvcascade.tiers.base import BlockOutcome
from kvcascade.tiers.nvme.path.path_messages import PathOptions

BLOCK, ARENA_SLOTS = 16 << 10, 64
CAPACITY_BYTES = 160 << 20
ROUNDS = 240
RESET_EVERY = 60
LOOKED_UP = 400
"""The latest blocks of an engine, about a tenth of the tier."""
LOSSES = 40
LABELS = ("one", "two")
NEW = range(10**6, 10**6 + 8)


@dataclass
class Known:
    """Facts about one engine's blocks, by number."""

    acknowledged: set[int] = field(default_factory=set)
    """Blocks that were stored, and that no reset removed."""
    removed: set[int] = field(default_factory=set)
    """Blocks of before a reset that was answered."""
    is_resetting: bool = False


def opened(folders: Sequence[Path], durability: str, label: str) -> PathEngine:
    """Start an engine."""
    paths = [folder / "kv" for folder in folders]
    make_folders(paths)
    options = PathOptions(CAPACITY_BYTES, segment_bytes=4 << 20, durability=durability)
    return PathEngine(
        paths, options, block_bytes=BLOCK, arena_slots=ARENA_SLOTS, label=label, is_thread=True
    ).open()


@contextmanager
def engines(folders: Sequence[Path], durability: str) -> Iterator[dict[str, PathEngine]]:
    """Give an engine of each model; the first one writes the path."""
    running: dict[str, PathEngine] = {}
    try:
        for label in LABELS:
            running[label] = opened(folders, durability, label)
        yield running
    finally:
        while running:
            running.popitem()[1].close()


def use(disks: LoggedDisks, durability: str, rng: random.Random) -> None:
    """Store more blocks than there is room for, with resets, and mark what was acknowledged."""
    latest: dict[str, list[int]] = {label: [] for label in LABELS}
    with engines(disks.folders, durability) as running:
        for turn in range(ROUNDS):
            label = rng.choice(LABELS)
            engine, known = running[label], latest[label]
            numbers = range(turn * ARENA_SLOTS, turn * ARENA_SLOTS + rng.randint(1, ARENA_SLOTS))
            stored = [
                number
                for number, outcome in zip(numbers, engine.put(numbers), strict=False)
                if outcome is BlockOutcome.OK
            ]
            disks.mark(json.dumps(["stored", label, stored]))
            known += stored
            del known[:-LOOKED_UP]
            disks.mark(json.dumps(["there", label, engine.holds(known)]))
            if turn % RESET_EVERY == RESET_EVERY // 2:
                disks.mark(json.dumps(["asked", label, []]))
                engine.tier.reset()
                engine.until(partial(has_reset, engine))
                engine.close()  # what it stores after the reset is for no other start
                running[label] = opened(disks.folders, durability, label)
                disks.mark(json.dumps(["reset", label, []]))
                known.clear()


def has_reset(engine: PathEngine) -> bool:
    """True once the reset of an engine is answered."""
    return not engine.tier._resets_due


def known_after(marks: Sequence[str]) -> dict[str, Known]:
    """The state of each engine after some marks."""
    known = {label: Known() for label in LABELS}
    for mark in marks:
        kind, label, numbers = json.loads(mark)
        of_engine = known[label]
        of_engine.is_resetting = kind == "asked"
        if kind == "stored":
            of_engine.acknowledged |= set(numbers)
        elif kind == "reset":
            of_engine.removed |= of_engine.acknowledged
            of_engine.acknowledged = set()
    return known


def never_evicted(label: str, later_marks: Sequence[str]) -> set[int]:
    """Blocks of an engine that were there at a later time, if no reset came between."""
    for mark in later_marks:
        kind, of, numbers = json.loads(mark)
        if of == label and kind in ("there", "asked"):
            return set(numbers)
    return set()


def check(loss: Loss, marks: Sequence[str], durability: str) -> int:
    """Open the tier after a loss of power; return the number of blocks that were found."""
    known, later, found = known_after(marks[: loss.marks_before]), marks[loss.marks_before :], 0
    with loss.mounted() as folders, engines(folders, durability) as running:
        for label in LABELS:
            of_engine, there = known[label], blocks_there(running[label], known[label])
            found += len(there)
            assert not there & of_engine.removed, (loss.what, label, "blocks of before a reset")
            if durability == "power" and not of_engine.is_resetting:
                lost = of_engine.acknowledged & never_evicted(label, later) - there
                assert not lost, (loss.what, label, sorted(lost))
    return found


def blocks_there(engine: PathEngine, known: Known) -> set[int]:
    """Read all blocks that an engine ever had, which compares their bytes, and store some more."""
    numbers, found = [*known.acknowledged, *known.removed], set[int]()
    for begin in range(0, len(numbers), ARENA_SLOTS):
        some = numbers[begin : begin + ARENA_SLOTS]
        outcomes = zip(some, engine.get(some), strict=True)
        found |= {number for number, outcome in outcomes if outcome is BlockOutcome.OK}
    engine.store(NEW)
    assert set(engine.get(NEW)) == {BlockOutcome.OK}
    return found


@pytest.mark.soak
@pytest.mark.parametrize(
    ("file_system", "count", "durability"),
    [
        ("ext4", 2, "power"),
        ("xfs", 1, "power"),
        ("btrfs", 1, "power"),
        ("ext4", 1, "process"),
    ],
)
def test_power_is_lost_at_any_moment(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file_system: str,
    count: int,
    durability: str,
) -> None:
    monkeypatch.setattr(
        "kvcascade.handlers.node.path.path_service.boot_id", lambda: uuid.uuid4().bytes
    )
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    disks = LoggedDisks(tmp_path, file_system, count)
    with disks:
        use(disks, durability, rng)
    marks = disks.marks()
    found = [check(loss, marks, durability) for loss in disks.losses(rng, LOSSES)]
    print(f"blocks found: {found}")
    assert any(found)
