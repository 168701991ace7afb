"""Ghosts, tags and linked lists in arrays, against dictionaries."""

from __future__ import annotations

import random
from collections import OrderedDict
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.arrays import KeptArrays

from kvcascade.errors import ConfigError
from kvcascade.tiers.base import BlockHash, BlockStatus
from kvcascade.tiers.cpu.cpu_backend import CpuBackend
from kvcascade.tiers.policies import ENTRY_POINTS, ORDERS, create, known_names, order_class
from kvcascade.tiers.policies.lru import LruOrder
from kvcascade.tiers.policies.ordered import MANY_PINNED
from kvcascade.tiers.policies.parts import log as log_module
from kvcascade.tiers.policies.parts.directory import DictDirectory
from kvcascade.tiers.policies.parts.ghosts import SLACK, GhostLists
from kvcascade.tiers.policies.parts.links import LinkedLists
from kvcascade.tiers.policies.parts.log import (
    LOG_LENGTH_PER_SLOT,
    NO_PLACE,
    WALK,
    WALK_FACTOR,
    RecencyLog,
    Search,
    by_stamp,
)
from kvcascade.tiers.policies.parts.tags import NONE
from kvcascade.tiers.policies.s3fifo import S3FifoOrder

COLLIDING = 1 << 40
"""Tags that are multiples of this fall into the same bucket."""


@given(
    st.lists(st.one_of(st.integers(0, 60), st.integers(-(1 << 63), (1 << 63) - 1)), max_size=40),
    st.booleans(),
)
def test_slots_come_in_the_order_of_their_stamps(numbers: list[int], are_unique: bool) -> None:
    """Damaged arrays hold any numbers; those without a stamp come first."""
    stamps = np.array([*dict.fromkeys(numbers)] if are_unique else numbers, np.int64)
    slots = np.arange(len(stamps), dtype=np.int32)[::-1].copy()
    expected = sorted(range(len(stamps)), key=lambda at: (stamps[at] != 0, stamps[at]))
    assert by_stamp(slots, stamps).tolist() == slots[expected].tolist()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("step", [1, COLLIDING])
def test_ghosts_equal_ordered_dicts(seed: int, step: int) -> None:
    rng = random.Random(seed)
    arrays = KeptArrays()
    ghosts = GhostLists("g", 8, 2, arrays)
    model: list[OrderedDict[int, None]] = [OrderedDict(), OrderedDict()]
    for _ in range(3000):
        tag, list_ = rng.randrange(60) * step, rng.randrange(2)
        was_in = next((i for i in (0, 1) if tag in model[i]), NONE)
        assert ghosts.list_of(tag) == was_in
        if rng.random() < 0.5:
            ghosts.add(list_, tag)
            for known in model:
                known.pop(tag, None)
            model[list_][tag] = None
        elif rng.random() < 0.5:
            assert ghosts.drop(tag) == was_in
            for known in model:
                known.pop(tag, None)
        elif model[list_]:
            ghosts.drop_oldest(list_)
            model[list_].popitem(last=False)
        if rng.random() < 0.02:
            ghosts = GhostLists("g", 8, 2, arrays)
        assert [ghosts.size(i) for i in (0, 1)] == [len(known) for known in model]
    ghosts.clear()
    assert len(ghosts) == 0 and ghosts.list_of(next(iter(model[0] or model[1]))) == NONE


def test_ghosts_are_bounded() -> None:
    ghosts = GhostLists("g", 8)
    for tag in range(5 * SLACK):
        ghosts.add(0, tag)
    assert len(ghosts) == 8 + SLACK
    assert ghosts.list_of(5 * SLACK - 1) == 0 and ghosts.list_of(0) == NONE


def test_an_empty_log_with_ends_far_away_begins_anew() -> None:
    arrays = KeptArrays()
    log = RecencyLog("l", 8, arrays)
    arrays.arrays["l_ends"][:2] = (1 << 63) - 1
    log.rebuild(np.empty(0, np.int64))
    log.append(range(8))
    assert log.to_array().tolist() == [*range(8)]


@pytest.mark.parametrize("share", [0.0, 0.002, 0.05, 0.9])
def test_a_search_finds_what_a_mask_leaves_in_order(share: float) -> None:
    """Few are sorted by their place, many are met along the log: the same slots either way."""
    rng = random.Random(11)
    slots = 4000
    order = LruOrder(slots)
    log = order._recency
    for _ in range(60):
        log.append(rng.sample(range(slots), 200))
    log.discard(rng.sample(range(slots), 300))
    ordered = log.to_array().tolist()
    mask = np.array([rng.random() < share for _ in range(slots)])
    expected = [slot for slot in ordered if mask[slot] and slot % 3]
    for limit in (1, 20, slots):
        assert order.victims(limit, lambda slot: slot % 3 > 0, mask) == expected[:limit]
    looked_at = [slot for slot in ordered[:900] if mask[slot] and slot % 3]
    assert order.victims(slots, lambda slot: slot % 3 > 0, mask, window=900) == looked_at
    start, stop = log.position(ordered[1000]), log.position(ordered[3000])
    between = [slot for slot in ordered[1000:3000] if mask[slot]]
    assert list(log.scan(Search(mask=mask), start, stop)) == between


def used_log(arrays: KeptArrays) -> tuple[RecencyLog, npt.NDArray[np.int64]]:
    """Return a log whose last uses wrap around, and the slots that it holds."""
    rng, slots = random.Random(12), 400
    log = RecencyLog("l", slots, arrays)
    for start in range(0, 1400, 20):
        log.append([(start + i) % slots for i in rng.sample(range(20), 20)])
        next(log.scan(Search()))  # the head follows
    log.discard(rng.sample(range(slots), 30))
    assert log.tail > LOG_LENGTH_PER_SLOT * slots > log.head > 0
    return log, np.sort(log.to_array()).astype(np.int64)


def test_a_log_that_is_right_is_only_read_after_a_crash() -> None:
    arrays = KeptArrays()
    log, present = used_log(arrays)
    before = log.to_array().tolist()
    for array in arrays.arrays.values():
        array.flags.writeable = False
    log.rebuild(present)
    assert log.to_array().tolist() == before
    with pytest.raises(ValueError, match="read-only"):
        log.rebuild(present[1:])  # a slot too many is no right log


def test_a_slot_too_many_in_a_log_is_found() -> None:
    """Its number of slots was written, and the slot's removal was not."""
    arrays = KeptArrays()
    log, present = used_log(arrays)
    arrays.arrays["l_ends"][-1] -= 1
    log.rebuild(present[1:])
    assert np.array_equal(np.sort(log.to_array()), present[1:]) and present[0] not in log


@pytest.mark.parametrize("name", ["l_stamp", "l_log", "l_ends"])
def test_one_wrong_number_in_a_log_is_found(name: str) -> None:
    """The log then holds the slots all the same, and works on. Some entries are not live."""
    for at in range(0, LOG_LENGTH_PER_SLOT * 400 if name == "l_log" else 400, 3):
        for wrong in (-(1 << 63), (1 << 63) - 1) if at % 57 else (-(1 << 63), -1, 0, 1, 1000):
            arrays = KeptArrays()
            log, present = used_log(arrays)
            array = arrays.arrays[name]
            array[at % len(array)] = wrong & 0x7FFFFFFF if array.itemsize == 4 else wrong
            log.rebuild(present)
            assert np.array_equal(np.sort(log.to_array()), present)
            log.append(present[:100].tolist())
            log.append(present[200:203].tolist())
            assert log.to_array()[-3:].tolist() == present[200:203].tolist()
            assert len(log) == len(present) == len([*log.scan(Search())])


def test_a_search_one_by_one_walks_a_short_way_only() -> None:
    """Then it sorts: with few candidates, it walked over all slots."""
    rng, n = random.Random(3), 50 * WALK
    ordered = rng.sample(range(n), n)
    places = np.empty(n, np.int64)
    places[ordered] = np.arange(n)
    places[ordered[:2]] = NO_PLACE  # absent
    mask = np.zeros(n, np.bool_)
    late = ordered[-5 * WALK :: 7]
    mask[late] = True
    for limit in (1, 8, 3 * WALK):
        slots = iter(ordered[2:])
        found = Search(lambda slot: slot % 3 > 0, mask).pick(slots, limit, lambda: places)
        assert found == [slot for slot in late if slot % 3 > 0][:limit]
        assert next(slots) == ordered[2 + max(WALK, WALK_FACTOR * limit)]


def test_a_search_one_by_one_ends_with_its_window() -> None:
    places, mask = np.arange(4 * WALK), np.arange(4 * WALK) % 8 == 0
    for window in (3, WALK, 2 * WALK + 1):
        expected = list(range(0, window, 8))
        for limit in (len(expected), 4 * WALK):
            search = Search(lambda slot: True, mask, window)
            assert search.pick(range(4 * WALK), limit, lambda: places) == expected


@pytest.mark.parametrize("name", ["slru", "lirs"])
def test_lists_have_one_order_whether_walked_or_sorted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, capacity = random.Random(8), 400
    order = ORDERS[name](capacity)
    order.insert(range(capacity), range(1, capacity + 1))
    for round_ in range(40):
        order.touch(rng.sample(range(capacity), 60))
        order.settle(rng.sample(range(capacity), 5))
        gone = order.victims(20, lambda slot: slot % 3 > 0)
        order.evicted(gone, gone)
        order.insert(gone, rng.sample(range(1, 600), len(gone)))
        if round_ % 10 == 9:
            order.reconcile(np.arange(capacity))
        walked = order.victims(capacity, lambda slot: True)
        assert sorted(walked) == list(range(capacity))
        mask = np.array([rng.random() < 0.3 for _ in range(capacity)])
        with monkeypatch.context() as patch:
            patch.setattr(log_module, "WALK", 1)
            patch.setattr(log_module, "WALK_FACTOR", 0)
            assert order.victims(capacity, lambda slot: True) == walked
            expected = [slot for slot in walked[:300] if mask[slot]]
            assert order.victims(capacity, lambda slot: True, mask, 300) == expected


@pytest.mark.parametrize("seed", range(4))
def test_linked_lists_equal_ordered_dicts(seed: int) -> None:
    rng = random.Random(seed)
    lists = LinkedLists("l", 20, 3)
    model: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(3)]
    for _ in range(3000):
        entry, list_ = rng.randrange(20), rng.randrange(3)
        where = next((i for i in range(3) if entry in model[i]), None)
        assert (entry in lists) == (where is not None)
        if where is None:
            lists.append(list_, entry)
            model[list_][entry] = None
        elif rng.random() < 0.5:
            lists.remove(where, entry)
            del model[where][entry]
        for i in range(3):
            assert list(lists.iterate(i)) == list(model[i]) == lists.walk(i)
            assert lists.coldest(i) == next(iter(model[i]), NONE)
        if rng.random() < 0.05:
            lists.rebuild([np.array(list(known), np.int64) for known in model])


def test_a_walk_over_damaged_links_ends() -> None:
    arrays = KeptArrays()
    LinkedLists("l", 50, 2, arrays)
    for seed in range(50):
        arrays.damage(random.Random(seed))
        links = arrays.arrays["l_hotter"]
        links[:] = links % 60 - 4
        found = LinkedLists("l", 50, 2, arrays).walk(0)
        assert len(set(found)) == len(found) and all(0 <= entry < 50 for entry in found)


def test_other_packages_add_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an entry point; a built-in name cannot be taken."""
    folder = tmp_path / "others-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        f"[{ENTRY_POINTS}]\n"
        "others-sieve = kvcascade.tiers.policies.sieve:SieveOrder\n"
        "lru = json:JSONDecoder\n"
        "others-broken = json:JSONDecoder\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert order_class("others-sieve") is ORDERS["sieve"]
    assert "others-sieve" in known_names()
    assert order_class("lru") is ORDERS["lru"]
    with pytest.raises(ConfigError, match="'others-broken' is no EvictionOrder"):
        order_class("others-broken")


class _EntriesRead:
    """Number of log entries that searches read in chunks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entries = 0
        between = RecencyLog.between

        def counting(log: RecencyLog, start: int, stop: int) -> npt.NDArray[np.int32]:
            self.entries += stop - start
            return between(log, start, stop)

        monkeypatch.setattr(RecencyLog, "between", counting)


def _s3fifo_with_main(slots: int, rng: random.Random) -> S3FifoOrder:
    """An order whose main queue holds most slots, with all numbers of uses."""
    order = S3FifoOrder(slots)
    order.insert(range(slots), range(1, slots + 1))
    for _ in range(2):
        order.touch(range(slots))
    order.evicted([slots - 1], [slots])  # promotes all slots before it
    order.touch([slot for slot in range(slots - 1) if rng.random() < 0.5])
    return order


def test_one_eviction_of_many_passes_the_queue_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3-FIFO passed the queue from its head for each of the victims."""
    rng, slots = random.Random(5), 20_000
    order = _s3fifo_with_main(slots, rng)
    mask = np.array([rng.random() < 0.02 for _ in range(slots)])
    victims = order.victims(300, lambda slot: True, mask)
    assert len(victims) == 300
    read = _EntriesRead(monkeypatch)
    order.evicted(victims, victims)
    assert read.entries < 20 * slots


@pytest.mark.parametrize("seed", range(4))
def test_one_eviction_of_many_equals_single_ones(seed: int) -> None:
    rng, slots = random.Random(seed), 300
    together = _s3fifo_with_main(slots, random.Random(seed))
    one_by_one = _s3fifo_with_main(slots, random.Random(seed))
    for _ in range(6):
        mask = np.array([rng.random() < 0.3 for _ in range(slots)])
        victims = together.victims(20, lambda slot: True, mask)
        assert victims == one_by_one.victims(20, lambda slot: True, mask)
        together.evicted(victims, victims)
        for slot in victims:
            one_by_one.evicted([slot], [slot])
        left = together.victims(slots, lambda slot: True)
        assert left == one_by_one.victims(slots, lambda slot: True)


@pytest.mark.parametrize("name", sorted(ORDERS))
@pytest.mark.parametrize("has_mask", [False, True])
def test_a_search_meets_few_of_many_pinned_blocks(
    name: str, has_mask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It called a function for each of them: 40 to 60 ms at 200,000 slots."""
    capacity = 20 * MANY_PINNED
    backend, policy = CpuBackend(4096, capacity), create(name, capacity)
    policy.ref_counts = backend.ref_counts
    hashes = [BlockHash(number.to_bytes(8, "little") * 2) for number in range(capacity)]
    statuses = backend.allocate_blocks(hashes)
    policy.insert_many(hashes, statuses)
    idle = set(random.Random(2).sample(hashes, 50))
    for block_hash, status in zip(hashes, statuses, strict=True):
        status.ref_cnt = int(block_hash not in idle)
    mask = np.ones(capacity, np.bool_) if has_mask else None
    looked_at: list[int] = []
    at_slot = DictDirectory.at_slot

    def counting(directory: DictDirectory, slot: int) -> tuple[BlockHash, BlockStatus] | None:
        looked_at.append(slot)
        return at_slot(directory, slot)

    monkeypatch.setattr(DictDirectory, "at_slot", counting)
    assert policy.evict(51, (), mask) is None
    assert len(looked_at) <= MANY_PINNED + 3 * len(idle)
    evicted = policy.evict(50, (), mask)
    assert evicted is not None and {block_hash for block_hash, _ in evicted} == idle
