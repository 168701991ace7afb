"""The order of eviction of a namespace: openings of other sizes, and damage in use."""

from __future__ import annotations

import random
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from support.keys import key

from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.path.writer.namespace.recency import (
    CHECKED_PER_SEARCH,
    RESTORE_REST_S,
    Recency,
)
from kvcascade.tiers.policies import ORDERS

BEFORE, AFTER = 400, 300
HEADER_BYTES = 64
"""Bytes of a file before its array."""
SEEDS = [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 90))]


def opened(folder: Path, policy: str, is_used: np.ndarray) -> Recency:
    return Recency(RealFileSystem(False), folder, policy, is_used, lambda: 1000.0)


def keys(slots: range) -> list[bytes]:
    return [bytes(key(slot)) for slot in slots]


@pytest.mark.parametrize("policy", ORDERS)
def test_a_tier_that_became_smaller_evicts_only_slots_that_it_has(
    tmp_path: Path, policy: str
) -> None:
    """Uses of the slots that are gone are still in its arrays."""
    recency = opened(tmp_path, policy, np.zeros(BEFORE, np.bool_))
    for first in range(0, BEFORE, 8):
        recency.insert(keys(range(first, first + 8)), range(first, first + 8))
    gone = range(AFTER, BEFORE)
    recency.evicted(keys(gone), gone)
    recency.close(is_clean=True)
    for _ in range(2):
        recency = opened(tmp_path, policy, np.ones(AFTER, np.bool_))
        assert sorted(recency.victims(BEFORE)) == [*range(AFTER)]
        for first in range(0, AFTER, 4):
            recency.touch(range(first, first + 4))
        assert sorted(recency.victims(BEFORE)) == [*range(AFTER)]
        recency.close(is_clean=True)


class Namespace:
    """A namespace of `BEFORE` slots that is stored to and used, and the files of its recency."""

    def __init__(self, folder: Path, policy: str, seed: int) -> None:
        self.folder = folder
        self.rng = random.Random(seed)
        self.is_used = np.zeros(BEFORE, np.bool_)
        clock = count(1000.0, RESTORE_REST_S)
        self.recency = Recency(
            RealFileSystem(False), folder, policy, self.is_used, lambda: next(clock)
        )
        self.keys = {slot: b"" for slot in range(BEFORE)}
        for _ in range(100):
            self.step()

    def files(self, pattern: str) -> list[Path]:
        return sorted(self.folder.glob(pattern))

    def used(self) -> list[int]:
        return list(np.flatnonzero(self.is_used).tolist())

    def some(self) -> list[int]:
        used = self.used()
        return self.rng.sample(used, min(len(used), self.rng.randint(1, 12)))

    def step(self) -> None:
        """Store blocks, or use, order or remove some that are there."""
        self.store(self.rng.randint(1, 24))
        self.recency.touch(self.some())
        self.recency.settle(self.some())
        chain = self.some()
        self.recency.chain(chain, len(chain) + 2)
        if self.rng.random() < 0.2:
            self.remove()
        self.recency.coldest_age_s()

    def store(self, blocks: int) -> None:
        if (lack := blocks - int(np.count_nonzero(~self.is_used))) > 0:
            victims = self.recency.victims(lack)
            assert len(victims) == lack
            self.recency.evicted([self.keys[slot] for slot in victims], victims)
            self.is_used[victims] = False
        slots = np.flatnonzero(~self.is_used)[:blocks].tolist()
        names = [bytes(key(self.rng.randrange(3 * BEFORE))) for _ in slots]
        self.keys.update(zip(slots, names, strict=True))
        self.is_used[slots] = True
        self.recency.insert(names, slots)

    def remove(self) -> None:
        slots = self.some()
        self.recency.remove(slots)
        self.is_used[slots] = False

    def check(self) -> None:
        """Every block can be evicted, before and after more uses."""
        for _ in range(2):
            assert sorted(self.recency.victims(BEFORE)) == self.used()
            for _ in range(20):
                self.step()
        self.recency.close(is_clean=False)


def words(path: Path) -> np.memmap[tuple[int, ...], np.dtype[np.int64]]:
    return np.memmap(path, np.int64, "r+", HEADER_BYTES)


def bytes_in(path: Path) -> np.memmap[tuple[int, ...], np.dtype[np.uint8]]:
    return np.memmap(path, np.uint8, "r+", HEADER_BYTES)


@pytest.mark.parametrize("policy", ORDERS)
def test_a_position_that_is_damaged_in_use_hides_no_slot(tmp_path: Path, policy: str) -> None:
    """Neither from the next search, which may remember positions, nor after more uses."""
    names = [
        (path.name, at)
        for end in ("*_ends.arr", "*_hand.arr")
        for path in Namespace(tmp_path / "0", policy, 0).files(end)
        for at in range(len(words(path)))
    ]
    for i, (name, at) in enumerate(names):
        for flipped in (1 << 40, 1 << 62, -1, 100):
            namespace = Namespace(folder := tmp_path / f"{i} {flipped}", policy, i)
            namespace.recency.victims(1)
            words(folder / name)[at] ^= flipped
            namespace.check()


@pytest.mark.parametrize("policy", ORDERS)
@pytest.mark.parametrize("seed", SEEDS)
def test_damage_in_use_costs_recency_only(tmp_path: Path, policy: str, seed: int) -> None:
    """No damage to any array hides a slot, gives one that is not used, or ends the writer."""
    namespace = Namespace(tmp_path, policy, seed)
    rng = namespace.rng
    damaged = bytes_in(rng.choice(namespace.files("*.arr")))
    at = rng.randrange(len(damaged)) // 8 * 8
    part = damaged[at : at + rng.choice([1, 8, 512, 4096])]
    part[:] = rng.choice([part * 0, part | 255, part ^ (1 << rng.randrange(8))])
    namespace.check()


@pytest.mark.parametrize("policy", ORDERS)
def test_slots_that_searches_do_not_miss_are_found_hidden_after_a_while(
    tmp_path: Path, policy: str
) -> None:
    """Searches for a few victims find others. A clean close seals the damage."""
    namespace = Namespace(tmp_path, policy, 1)
    for pattern in ("*_stamp.arr", "*_kind.arr", "*_segment.arr", "*_run_of.arr"):
        for path in namespace.files(pattern):
            bytes_in(path)[: path.stat().st_size * 8 // 10] = 0
    namespace.recency.close(is_clean=True)
    namespace.recency = opened(tmp_path, policy, namespace.is_used)
    for _ in range(BEFORE // CHECKED_PER_SEARCH + 1):
        namespace.store(12)
    assert all(slot in namespace.recency._order for slot in namespace.used())
    namespace.recency.close(is_clean=False)


def test_an_order_that_fails_again_and_again_is_restored_once_in_a_while(tmp_path: Path) -> None:
    """It takes time, and may not help."""
    now_s = [1000.0]
    recency = Recency(
        RealFileSystem(False), tmp_path, "lru", np.ones(BEFORE, np.bool_), lambda: now_s[0]
    )
    recency.remove([3])
    assert len(recency.victims(BEFORE)) == BEFORE
    recency.remove([3])
    assert len(recency.victims(BEFORE)) == BEFORE - 1
    now_s[0] += RESTORE_REST_S
    assert len(recency.victims(BEFORE)) == BEFORE
    recency.close(is_clean=False)


def test_slots_that_no_entry_names_are_no_victims(tmp_path: Path) -> None:
    """Their eviction would free nothing. They come back with a block that is stored there."""
    clock = count(1000.0, RESTORE_REST_S)
    recency = Recency(
        RealFileSystem(False), tmp_path, "lru", np.ones(BEFORE, np.bool_), lambda: next(clock)
    )
    assert 3 in recency.victims(BEFORE)
    recency.set_aside([3])
    for _ in range(3):
        assert sorted(recency.victims(BEFORE)) == [slot for slot in range(BEFORE) if slot != 3]
    recency.insert(keys(range(3, 4)), [3])
    assert recency.victims(BEFORE)[-1] == 3
    recency.close(is_clean=False)


@pytest.mark.parametrize("policy", ORDERS)
def test_a_slot_that_is_set_aside_and_then_loses_its_block_disturbs_no_order(
    tmp_path: Path, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged index may name the block of a slot again, after an eviction found no name."""
    is_used = np.zeros(BEFORE, np.bool_)
    recency = opened(tmp_path, policy, is_used)
    recency.insert(keys(range(BEFORE)), range(BEFORE))
    is_used[:] = True
    recency.touch(range(0, BEFORE, 7))
    recency.set_aside([0, 3])
    expected = recency.victims(BEFORE)
    recency.remove([3, 0])
    is_used[[0, 3]] = False
    assert recency.victims(BEFORE) == expected and len(expected) == BEFORE - 2
    assert caplog.messages == []
    recency.close(is_clean=False)


@pytest.mark.parametrize("policy", ORDERS)
def test_slots_that_do_not_exist_in_a_log_in_use_cost_recency_only(
    tmp_path: Path, policy: str
) -> None:
    is_used = np.zeros(BEFORE, np.bool_)
    recency = opened(tmp_path, policy, is_used)
    for first in range(0, BEFORE, 8):
        recency.insert(keys(range(first, first + 8)), range(first, first + 8))
    is_used[:] = True
    for path in tmp_path.glob("*_log.arr"):
        np.memmap(path, np.int32, "r+", HEADER_BYTES)[:] = 1 << 14
    for _ in range(2):
        assert sorted(recency.victims(BEFORE)) == [*range(BEFORE)]
    recency.close(is_clean=True)
