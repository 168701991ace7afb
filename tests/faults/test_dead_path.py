"""One of several paths fails: the others take the writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.fault_rig import FaultRig
from support.keys import keys

from kvcascade.tiers.breaker import REST_S
from kvcascade.tiers.nvme.writer.failing_devices import PATH_REST_S, RestingPaths

PER_SEGMENT, SEGMENTS = 8, 16
BATCH = 32
"""Enough blocks to be spread over the paths."""


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[FaultRig]:
    other = tmp_path / "other"
    other.mkdir()
    rig = FaultRig(
        tmp_path,
        more_paths=[other],
        top_slots=2 * BATCH,
        nvme_slots=PER_SEGMENT * SEGMENTS,
    )
    yield rig
    rig.memory_fs.heal()
    rig.close()


def spoil(rig: FaultRig, parts: tuple[int, ...]) -> None:
    """The devices of these paths can neither read nor write blocks any more. What is known of the
    slots can be read: else nothing leaves them anyway."""
    segments = rig.rig.tier.segments
    for number in segments.numbers:
        if number % 2 in parts:
            rig.memory_fs.spoil(segments.path_of(number), 0, segments.layout.records_offset)


def slots_of(rig: FaultRig, first: int, end: int) -> list[int]:
    found = map(rig.rig.policy.get, keys(first, end))
    return [status.block_id for status in found if status is not None]


def fill(rig: FaultRig, first: int, end: int) -> None:
    for i in range(first, end, BATCH):
        rig.on_disk(keys(i, i + BATCH))


def test_the_other_path_takes_the_writes(rig: FaultRig) -> None:
    fill(rig, 0, PER_SEGMENT * SEGMENTS)
    assert any(slot // PER_SEGMENT % 2 == 1 for slot in slots_of(rig, 0, 1000))
    spoil(rig, (1,))
    assert rig.store(keys(1000, 1000 + BATCH)) and rig.write_down()
    lost = rig.counters.demote_failed_blocks
    assert 0 < lost <= BATCH and rig.counters.demote_openings == 0
    for i in range(1100, 1100 + 8 * BATCH, BATCH):
        rig.on_disk(keys(i, i + BATCH))
        slots = slots_of(rig, i, i + BATCH)
        assert len(slots) == BATCH and all(slot // PER_SEGMENT % 2 == 0 for slot in slots)
        assert rig.read(keys(i, i + BATCH)) == BATCH
        rig.forget_top()
    assert rig.counters.demote_failed_blocks == lost and rig.counters.demote_openings == 0
    rig.clock.advance(PATH_REST_S)
    assert rig.store(keys(2000, 2000 + BATCH)) and rig.write_down()
    assert rig.counters.demote_failed_blocks > lost, "it is tried again after its rest"
    rig.recovers(3000)
    rig.on_disk(keys(3100, 3100 + BATCH))
    assert 1 in {slot // PER_SEGMENT % 2 for slot in slots_of(rig, 3100, 3100 + BATCH)}


def test_the_tier_rests_if_all_paths_fail(rig: FaultRig) -> None:
    fill(rig, 0, 2 * BATCH)
    spoil(rig, (0, 1))
    assert rig.store(keys(1000, 1000 + BATCH))
    assert not rig.write_down()
    assert rig.counters.demote_openings > 0
    written = rig.memory_fs.calls["pwritev"]
    for _ in range(50):
        rig.manager.end_step()
    assert rig.memory_fs.calls["pwritev"] == written
    rig.memory_fs.heal()
    rig.clock.advance(REST_S)
    assert rig.write_down()


def test_paths_rest_for_a_while() -> None:
    now_s = 100.0
    resting = RestingPaths(3, 2, lambda: now_s)
    own = np.ones(14, np.bool_)
    own[[4, 5, 10, 11]] = False  # of path 2 there is nothing
    assert resting.awake == [0, 1, 2]
    assert resting.rest(np.array([2, 3]), own)
    assert resting.awake == [0, 2]
    now_s += PATH_REST_S / 2
    assert not resting.rest(np.array([0]), own), "what is left is not this process's"
    assert resting.awake == [0, 1, 2]
    assert resting.rest(np.array([13]), own)
    assert resting.awake == [1, 2]
    now_s += PATH_REST_S
    assert resting.awake == [0, 1, 2]
