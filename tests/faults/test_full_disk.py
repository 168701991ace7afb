"""A disk that is really full: the file system says so itself.

The tier takes no writes then, serves what it holds, and takes writes again by itself as soon as
there is room; several engines share what there is and never go beyond it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec
import pytest
from support.cache_rig import call
from support.path_engine import PathEngine
from support.small_disk import Filler, free_bytes, on_small_disk, on_small_image

from kvcascade.tiers.base import BlockOutcome
from kvcascade.tiers.nvme.disk.filesystem import PAGE_BYTES, RealFileSystem
from kvcascade.tiers.nvme.path.path_messages import PathOptions
from kvcascade.tiers.nvme.path.writer import path_capacity
from kvcascade.tiers.nvme.path.writer.path_options import load_record, save_record
from kvcascade.tiers.nvme.path.writer.path_plan import capacity_of, fixed_bytes
from kvcascade.tiers.nvme.path.writer_note import WRITER_FILE
from kvcascade.tools.commands.command_line import ExitCode

BLOCK, SLOTS, PER_SEGMENT = 4096, 1024, 16
DISK_BYTES = 6 << 20
"""Less than the tier may take."""
DISK_OF_TWO_BYTES = 11 << 20
"""Room for the tables of two models, the reserve, and some segments."""
SPARE_BYTES = 512 << 10
"""Not enough for one more segment and what comes with it."""
BATCH = 16
PAUSE_S = 0.02
PATIENCE_S = 120.0
MANY, FEWER = 704, 448
"""Slots before and after the capacity is lowered: the index has one size for both."""
OK, NO_SPACE, CANCELLED = BlockOutcome.OK, BlockOutcome.NO_SPACE, BlockOutcome.CANCELLED


@contextmanager
def engine_on(
    path: Path, model: int = 0, min_free_bytes: int = 0, slots: int = SLOTS
) -> Iterator[PathEngine]:
    """An engine that has joined; its node is a thread. It tries again soon what failed."""
    path_capacity.RETRY_AFTER_S = 0.1  # this process runs nothing else
    options = PathOptions(
        capacity_of(slots // PER_SEGMENT, PER_SEGMENT, BLOCK),
        min_free_bytes=min_free_bytes,
        segment_bytes=PER_SEGMENT * BLOCK,
    )
    label = f"model-{model}"
    engine = PathEngine([path], options, is_thread=True, capacity=SLOTS, label=label)
    try:
        yield engine.open()
    finally:
        engine.close()


def segments(path: Path) -> int:
    return sum(1 for _ in path.rglob("*.safetensors"))


def has_at_most(path: Path, slots: int) -> bool:
    return segments(path) <= slots // PER_SEGMENT


def store(engine: PathEngine, first: int, batches: int) -> int:
    """Offer blocks batch by batch, as a busy engine does; the number that was stored."""
    stored = 0
    for start in range(first, first + BATCH * batches, BATCH):
        outcomes: Sequence[BlockOutcome] = engine.put(range(start, start + BATCH))
        assert set(outcomes) <= {OK, NO_SPACE, CANCELLED}
        stored += outcomes.count(OK)
        engine.keeper.wait(lambda: False, PAUSE_S)
    return stored


def store_all(engine: PathEngine, first: int, batches: int) -> None:
    """Store blocks batch by batch while there is room for all."""
    for start in range(first, first + BATCH * batches, BATCH):
        engine.store(range(start, start + BATCH))


def full_for_all(path: Path) -> None:
    """Two engines and a stranger: they serve what they have, and grow again when he is gone."""
    with engine_on(path) as one, engine_on(path) as two:
        engines = (one, two)
        for i, engine in enumerate(engines):
            store_all(engine, 100 * i, 1)
        filler = Filler(path)
        held = segments(path)
        for i, engine in enumerate(engines):
            first = 1000 * (i + 1)
            assert store(engine, first, 20) > 0, "new blocks take the places of old ones"
            newest = engine.holds(range(first + 19 * BATCH, first + 20 * BATCH))
            assert newest and set(engine.get(newest)) == {OK}
        assert free_bytes(path) == 0 and segments(path) == held
        every = range(1000, 1000 + 20 * BATCH)
        assert one.holds(every) == two.holds(every)
        filler.remove()
        for i, engine in enumerate(engines):
            assert store(engine, 5000 + 1000 * i, 20) > 0
        assert segments(path) > held, "and they grow"


def test_a_full_disk_is_survived_by_all_who_share_it(tmp_path: Path) -> None:
    on_small_disk(full_for_all, tmp_path, DISK_BYTES)


def can_begin_again(path: Path) -> None:
    """An engine starts on a disk without a free byte; with a smaller capacity it makes room."""
    with engine_on(path) as one:
        store_all(one, 0, 8)
    held, few = segments(path), 4 * PER_SEGMENT
    Filler(path)
    assert free_bytes(path) == 0
    with engine_on(path) as one:
        assert set(one.get(range(BATCH))) == {OK}
        assert not list(path.glob(f".kvcascade/{WRITER_FILE}")), "it would name another process"
    Filler(path)
    with engine_on(path, slots=few) as one:
        assert one.keeper.wait(partial(has_at_most, path, few), PATIENCE_S)
    assert segments(path) < held


def test_a_restart_on_a_full_disk(tmp_path: Path) -> None:
    on_small_disk(can_begin_again, tmp_path, DISK_BYTES)


def goes_on(path: Path) -> None:
    """An engine starts again, serves its blocks, and new ones take the places of old ones."""
    with engine_on(path) as one:
        store_all(one, 0, 64)
    with (path / "others").open("wb", buffering=0) as file:
        for size in 1 << 20, PAGE_BYTES:
            with suppress(OSError):
                while file.write(bytes(size)):
                    os.fsync(file.fileno())
    with engine_on(path) as one:
        assert set(one.get(range(63 * BATCH, 64 * BATCH))) == {OK}
        store_all(one, 2000, 8)


@pytest.mark.parametrize("kind", ["btrfs", "xfs"])
def test_a_restart_on_a_full_disk_of_another_kind(tmp_path: Path, kind: str) -> None:
    """Of btrfs a write to a mapped page would end the process; XFS has no room for a socket."""
    on_small_image(kind, goes_on, tmp_path)


def can_be_collected(path: Path) -> None:
    """The disk has no room for a second presence table beside the one of the former capacity."""
    with engine_on(path, slots=MANY) as one:
        store_all(one, 0, FEWER // BATCH // 2)
    held, found = segments(path), load_record(RealFileSystem(), path)
    assert found is not None
    less = capacity_of(FEWER // PER_SEGMENT, PER_SEGMENT, BLOCK)
    options = msgspec.structs.replace(found.options, capacity_bytes=less)
    save_record(RealFileSystem(), path, msgspec.structs.replace(found, options=options))
    for command in ["verify"], ["gc", "--dry-run", "--older-than", "0s"]:
        Filler(path)
        assert free_bytes(path) == 0
        answer = call(*command, path)
        assert answer.code == ExitCode.OK, answer.err
        assert segments(path) == held
    Filler(path)
    assert call("gc", path, "--older-than", "0s").code == ExitCode.OK
    assert segments(path) == held - FEWER // PER_SEGMENT // 2, "all that had blocks are gone"


def test_commands_work_on_a_full_disk_after_the_capacity_was_lowered(tmp_path: Path) -> None:
    on_small_disk(can_be_collected, tmp_path, DISK_BYTES)


def reserve_is_kept(path: Path) -> None:
    """Three engines of two models write for long: whenever one looks, the reserve is there."""
    reserve = free_bytes(path) // 4
    with engine_on(path, model=9) as old:
        store_all(old, 0, 4)
    assert list(path.glob("model-9*"))
    least = free_bytes(path)
    with ExitStack() as stack:
        engines = [stack.enter_context(engine_on(path, model, reserve)) for model in (0, 1, 0)]
        rounds_there, held = 0, range(10_000, 10_000 + 60 * BATCH)
        for round_ in range(60):
            for number, engine in enumerate(engines):
                store(engine, 10_000 * number + BATCH * round_, 1)
                least = min(least, free_bytes(path))
            rounds_there += bool(engines[1].holds(held))
        assert rounds_there > 30, "who writes less has room most of the time"
    assert least >= reserve, f"tables included: {least} < {reserve}"
    not_reserved = reserve + fixed_bytes(SLOTS, 0, "lru") + SPARE_BYTES
    assert least < not_reserved, "and what is not reserved is used"
    assert not list(path.glob("model-9*")), "what nobody has open left first"
    assert len(list(path.glob("model-*"))) == 2, "what somebody has open did not"


def test_the_reserve_is_kept_by_all_together(tmp_path: Path) -> None:
    on_small_disk(reserve_is_kept, tmp_path, DISK_OF_TWO_BYTES)
