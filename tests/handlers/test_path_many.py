"""Eight engines on one path: what one stores, all find; the limits of the path hold over all."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from support.path_engine import PathEngine

from kvcascade.handlers.node.path_wire import NodeState
from kvcascade.tiers.base import BlockOutcome
from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.path.path_messages import PathOptions
from kvcascade.tiers.nvme.path.writer.path_plan import capacity_of

BLOCK, PER_SEGMENT, ENGINES, PROCESSES = 4096, 8, 8, 2
TURNS_MAX = 20
SLOTS = 128
OPTIONS = PathOptions(
    capacity_of(SLOTS // PER_SEGMENT, PER_SEGMENT, BLOCK), segment_bytes=PER_SEGMENT * BLOCK
)
OK = BlockOutcome.OK
Start = Callable[[PathOptions], list[PathEngine]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts eight engines, two of them with processes as nodes."""
    made: list[PathEngine] = []

    def start(options: PathOptions) -> list[PathEngine]:
        for number in range(ENGINES):
            engine = PathEngine(
                [tmp_path],
                options,
                name=f"engine {number}",
                is_thread=number >= PROCESSES,
                capacity=SLOTS,
            )
            made.append(engine)
            engine.open()
        return made

    yield start
    for engine in reversed(made):  # the writer last
        engine.close()


def test_all_blocks_of_all_are_found_by_all(start: Start) -> None:
    engines = start(OPTIONS)
    assert [each.state for each in engines].count(NodeState.LEADING) == 1
    for number, engine in enumerate(engines):
        engine.store(range(8 * number, 8 * number + 8))
    blocks = range(8 * ENGINES)
    for engine in engines:
        assert engine.holds(blocks) == list(blocks)
        for first in range(0, len(blocks), 16):
            assert list(engine.get(blocks[first : first + 16])) == [OK] * 16


def test_the_capacity_holds_and_eviction_is_that_of_one_tier(start: Start, tmp_path: Path) -> None:
    engines = start(OPTIONS)
    fs, rng, warm = RealFileSystem(), random.Random(5), range(8)
    engines[0].store(warm)
    for first in range(100, 100 + 3 * SLOTS, 8):  # three times what fits, by engines at random
        rng.choice(engines).store(range(first, first + 8))
        assert list(rng.choice(engines).get(warm)) == [OK] * 8, "what any engine uses stays"
        assert fs.used_bytes(tmp_path) <= OPTIONS.capacity_bytes
    last = range(100 + 2 * SLOTS + SLOTS // 2, 100 + 3 * SLOTS)
    for engine in engines:
        assert engine.holds(last) == list(last), "the last ones stored are there for all"
        assert engine.holds(range(100, 100 + SLOTS)) == [], "the first ones have left for all"


def test_the_write_budget_is_exact_over_all(start: Start) -> None:
    budget = 3 * ENGINES + 2
    engines = start(msgspec.structs.replace(OPTIONS, write_budget_bytes=budget * BLOCK))
    stored = turn = 0
    while turn < 3 or (stored < budget and turn < TURNS_MAX):  # a grant may be refused
        for number, engine in enumerate(engines):
            first = 100 * turn + 8 * number
            engine.until(lambda engine=engine: engine.tier.room(1) > 0)  # type: ignore[misc]
            engine.put(range(first, first + 3))
            stored += len(engine.holds(range(first, first + 3)))
            assert stored <= budget
        turn += 1
    assert stored == budget, "all of it is used, by whoever comes first"
    for engine in engines:
        feed = engine.tier.feed
        engine.until(lambda feed=feed: feed.figures.budget_left_bytes == 0)  # type: ignore[misc]
