"""The spec over two NVMe tiers, each behind a node: what a user sees of inclusive tiers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from support.kv_bytes import Shape, damage, tiers
from support.open_tiers import nodes_of
from support.spec_driver import Driver
from support.waiting import wait_until

from kvcascade.tiers.base import BlockHash

SHAPE = Shape()
CHUNKS = 8
TEXTS = 24
CPU, NEAR, FAR = 64, 64, 512
"""Slots of the tiers; the last one holds all texts, the others do not."""


def three(path: Path, **far: Any) -> list[Any]:
    """The `tiers` of a configuration; `far` are options of the last one."""
    for name in ("near", "far"):
        (path / name).mkdir(exist_ok=True)
    last = tiers(SHAPE, path / "far", cpu=CPU, nvme=FAR, **far)[1]
    return [*tiers(SHAPE, path / "near", cpu=CPU, nvme=NEAR), last]


def is_empty(driver: Driver, tier: int) -> bool:
    """Return True once a tier is known to hold nothing; take the step in which that is heard."""
    driver.step()
    return driver.cascade.manager.tier_states()[tier].blocks == 0


def serve_all(driver: Driver) -> int:
    """Serve every text; returns the chunks that were loaded."""
    loaded = 0
    for text in range(TEXTS):
        loaded += driver.serve(f"text {text}", CHUNKS)
        driver.settle()
    return loaded


def test_blocks_come_back_from_every_tier(tmp_path: Path) -> None:
    with Driver(SHAPE, three(tmp_path), write_mode="through") as driver:
        assert serve_all(driver) == 0
        assert serve_all(driver) == TEXTS * CHUNKS
        near, far = driver.counters.links
        assert far.demoted_blocks + far.demote_missed_blocks >= TEXTS * CHUNKS
        assert driver.counters.loaded_blocks[2] > 0 and driver.counters.dropped_dirty_blocks == 0
        for text in range(TEXTS):
            assert driver.serve(f"text {text}", CHUNKS) == CHUNKS
        assert near.promote_corrupt_blocks == far.promote_corrupt_blocks == 0
        driver.take_events()
        for node, name in zip(nodes_of(driver.cascade), ("nvme0", "nvme1"), strict=True):
            assert all(node.port.may_hold(BlockHash(bytes(key))) for key in driver.seen[name])


def test_a_restart_finds_the_blocks_of_both_disks_and_full_tiers_take_new_ones(
    tmp_path: Path,
) -> None:
    with Driver(SHAPE, three(tmp_path), write_mode="through") as driver:
        serve_all(driver)
    with Driver(SHAPE, three(tmp_path), write_mode="through") as driver:
        assert serve_all(driver) == TEXTS * CHUNKS
        assert driver.counters.links[1].demoted_blocks == 0, "what is there is not written again"
        assert driver.serve("new", CHUNKS) == 0
        driver.settle()
        assert driver.counters.links[0].demoted_blocks >= CHUNKS
    (tmp_path / "near").rename(tmp_path / "gone")
    with Driver(SHAPE, three(tmp_path), write_mode="through") as driver:
        assert driver.serve("new", CHUNKS) == CHUNKS, "the last tier alone has it, too"


def test_a_disk_that_damages_blocks_costs_no_hits_of_another(tmp_path: Path) -> None:
    with Driver(SHAPE, three(tmp_path), write_mode="through") as driver:
        assert driver.serve("text", CHUNKS) == 0
        driver.settle()
    damage(tmp_path / "near")
    with Driver(SHAPE, three(tmp_path), write_mode="through") as driver:
        request = driver.request("text", CHUNKS)
        driver.await_hits(request)
        driver.finish(request)
        driver.settle()
        assert driver.counters.links[0].promote_corrupt_blocks > 0
        wait_until(lambda: is_empty(driver, 1))
        assert driver.serve("text", CHUNKS) == CHUNKS
        assert driver.counters.loaded_blocks[2] > 0


def test_admission_of_the_last_tier_is_its_own(tmp_path: Path) -> None:
    with Driver(SHAPE, three(tmp_path, admission="second_touch"), write_mode="through") as driver:
        driver.serve("text", CHUNKS)
        driver.settle()
        near, far = driver.counters.links
        assert (near.demoted_blocks, far.demoted_blocks) == (CHUNKS, 0)
        assert far.demote_refused_blocks == CHUNKS


def test_a_reset_empties_every_tier(tmp_path: Path) -> None:
    with Driver(SHAPE, three(tmp_path), write_mode="through") as driver:
        serve_all(driver)
        driver.reset()
        driver.step()
        driver.settle()
        assert serve_all(driver) == 0
    shutil.rmtree(tmp_path / "near")
    with Driver(SHAPE, three(tmp_path), write_mode="through") as driver:
        assert serve_all(driver) == 0, "blocks of after a reset are not for the next start"
