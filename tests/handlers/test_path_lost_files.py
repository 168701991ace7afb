"""Segment files that are deleted or cut under an engine: misses, and then new files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from support.path_engine import WAIT_S, PathEngine
from support.writer_twin import LABEL

from kvcascade.tiers.base import BlockOutcome
from kvcascade.tiers.nvme.path.path_messages import PathOptions
from kvcascade.tiers.nvme.path.writer.path_plan import capacity_of

OK = BlockOutcome.OK
BLOCK, PER_SEGMENT = 4096, 8


def engine_of(folder: Path, segments: int, label: str = LABEL) -> PathEngine:
    """An engine that has opened no segment file yet."""
    capacity = capacity_of(segments, PER_SEGMENT, BLOCK)
    options = PathOptions(capacity, segment_bytes=PER_SEGMENT * BLOCK)
    return PathEngine([folder], options, is_thread=True, label=label).open()


@pytest.mark.parametrize("is_cut", [False, True])
def test_blocks_of_a_lost_segment_can_be_stored_again(tmp_path: Path, is_cut: bool) -> None:
    engine = engine_of(tmp_path, 8)
    engine.store(range(8))
    engine.close()
    engine = engine_of(tmp_path, 8)
    segment = min(tmp_path.glob("*/segments/*"))
    if is_cut:
        os.truncate(segment, 0)
    else:
        segment.unlink()
    assert OK not in engine.get(range(8))
    engine.until(lambda: not engine.holds(range(8)))
    engine.until(lambda: list(engine.put(range(8))) == [OK] * 8)
    assert list(engine.get(range(8))) == [OK] * 8
    engine.close()


def test_a_full_tier_makes_a_lost_segment_anew(tmp_path: Path) -> None:
    """Else each eviction would free slots of a file that is not there."""
    engine = engine_of(tmp_path, 2)
    engine.store(range(8))
    engine.store(range(8, 16))
    engine.close()
    engine = engine_of(tmp_path, 2)
    min(tmp_path.glob("*/segments/*")).unlink()
    stored, next_key = 0, 100

    def go_on() -> bool:
        nonlocal stored, next_key
        if engine.tier.takes_puts and engine.tier.room(1):
            stored += list(engine.put(range(next_key, next_key + 4))).count(OK)
            next_key += 4
        return stored >= 20

    engine.until(go_on, 2 * WAIT_S)
    assert len(list(tmp_path.glob("*/segments/*"))) == 2
    engine.close()


@pytest.mark.parametrize("is_writer", [True, False])
def test_engines_go_on_after_the_directory_of_their_model_is_removed(
    tmp_path: Path, is_writer: bool
) -> None:
    """Misses for a moment, then an empty cache; another model of the path loses nothing."""
    first, second = (engine_of(tmp_path, 80, label) for label in ("first", "second"))
    gone, other = (first, second) if is_writer else (second, first)
    gone.store(range(8))
    other.store(range(8))
    (folder,) = tmp_path.glob(f"{'first' if is_writer else 'second'}-*")
    shutil.rmtree(folder)
    gone.until(lambda: not gone.holds(range(8)))
    gone.until(lambda: gone.tier.takes_puts and list(gone.put(range(8))) == [OK] * 8)
    assert list(gone.get(range(8))) == list(other.get(range(8))) == [OK] * 8
    assert (folder / "namespace.json").exists()
    second.close()
    first.close()
