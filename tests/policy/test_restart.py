"""Orders whose arrays outlive them: after a restart they go on as if nothing had been."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from support.arrays import KeptArrays
from support.replay import hash_of

from kvcascade.tiers.base import BlockStatus
from kvcascade.tiers.policies import ORDERS, CachePolicy, DictDirectory

CAPACITY = 64
BYTES_PER_SLOT_MAX = 100
"""Resident bytes that a block of the NVMe tier may cost in all."""


class Tier:
    """A policy over arrays that are kept, driven by a random workload."""

    def __init__(self, name: str, capacity: int = CAPACITY) -> None:
        self.name, self.capacity = name, capacity
        self.arrays = KeptArrays()
        self.directory = DictDirectory(capacity)
        self.free = list(range(capacity))
        self.policy: CachePolicy = self.restart()

    def restart(self) -> CachePolicy:
        """A new order over what the old one left."""
        policy = CachePolicy(self.directory, ORDERS[self.name](self.capacity, self.arrays))
        self.policy = policy
        return policy

    def use(self, ids: list[int]) -> list[int]:
        """A request for these blocks; returns the slots that were emptied for it, in order."""
        hashes = [hash_of(i) for i in ids]
        missing = [h for h in hashes if self.policy.get(h) is None]
        self.policy.touch([h for h in hashes if h not in missing])
        self.policy.expect(missing)
        evicted = self.policy.evict(max(0, len(missing) - len(self.free)), set(hashes))
        assert evicted is not None
        emptied = [status.block_id for _, status in evicted]
        self.free += emptied
        self.policy.insert_many(missing, [BlockStatus(0, self.free.pop(0)) for _ in missing])
        if self.policy.wants_chains:
            self.policy.note_chain(hashes)
        return emptied


def requests(rng: random.Random, n: int) -> list[list[int]]:
    """Block ids of `n` requests: some popular prefixes, some blocks that come once."""
    popular = [[100 * p + i for i in range(rng.randint(1, 12))] for p in range(12)]
    found = []
    for i in range(n):
        tail = [10_000 + 20 * i + j for j in range(rng.randint(0, 6))]
        found.append(rng.choice(popular)[: rng.randint(1, 12)] + tail)
    return found


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("seed", range(4))
def test_a_restart_changes_nothing(name: str, seed: int) -> None:
    """Ghosts, hands and counters included: what leaves next is the same for ever after."""
    rng = random.Random(seed)
    ever, restarted = Tier(name), Tier(name)
    for i, ids in enumerate(requests(rng, 600)):
        assert ever.use(ids) == restarted.use(ids), (seed, i)
        if rng.random() < 0.1:
            restarted.restart()
        if rng.random() < 0.1:
            assert [s.block_id for _, s in ever.policy.coldest(CAPACITY)] == [
                s.block_id for _, s in restarted.policy.coldest(CAPACITY)
            ]


@pytest.mark.parametrize("name", sorted({*ORDERS} - {"prefix"}))
def test_reconciling_what_is_right_keeps_the_order(name: str) -> None:
    rng = random.Random(5)
    tier = Tier(name)
    for ids in requests(rng, 300):
        tier.use(ids)
    before = [h for h, _ in tier.policy.coldest(CAPACITY)]
    present = np.array(sorted(set(range(CAPACITY)) - set(tier.free)))
    tier.restart()._order.reconcile(present)
    assert [h for h, _ in tier.policy.coldest(CAPACITY)] == before


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("seed", range(8))
def test_after_a_crash_nothing_in_the_arrays_is_trusted(name: str, seed: int) -> None:
    """Blocks came and went unseen, and the arrays hold anything: exactly those present count."""
    rng = random.Random(seed)
    tier = Tier(name)
    for ids in requests(rng, 100):
        tier.use(ids)
    for i in rng.sample(range(CAPACITY), 20):
        pair = tier.directory.at_slot(i)
        if pair is not None:
            tier.directory.pop(pair[0])
            tier.free.append(i)
    for slot in tier.free[: rng.randint(0, len(tier.free))]:
        tier.directory.put_many([hash_of(50_000 + slot)], [BlockStatus(0, slot)], [slot])
        tier.free.remove(slot)
    if seed % 2:
        tier.arrays.damage(rng)
    present = set(range(CAPACITY)) - set(tier.free)
    tier.restart()._order.reconcile(np.array(sorted(present)))
    cold = [status.block_id for _, status in tier.policy.coldest(CAPACITY)]
    assert sorted(cold) == sorted(present)
    for ids in requests(rng, 300):
        tier.use(ids)
    everything = tier.policy.evict(len(tier.policy), ())
    assert everything is not None
    assert {s.block_id for _, s in everything} == set(range(CAPACITY)) - set(tier.free)


@pytest.mark.parametrize("name", ORDERS)
def test_after_a_crash_no_array_is_trusted_because_the_others_are_right(name: str) -> None:
    rng = random.Random(7)
    for array in Tier(name).arrays.arrays:
        for _ in range(2):
            tier = Tier(name)
            for ids in requests(rng, 50):
                tier.use(ids)
            tier.arrays.damage(rng, [array])
            present = set(range(CAPACITY)) - set(tier.free)
            tier.restart()._order.reconcile(np.array(sorted(present)))
            cold = [status.block_id for _, status in tier.policy.coldest(CAPACITY)]
            assert sorted(cold) == sorted(present), array
            for ids in requests(rng, 50):
                tier.use(ids)
            everything = tier.policy.evict(len(tier.policy), ())
            assert everything is not None, array


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("seed", range(6))
def test_evict_finds_all_that_may_leave(name: str, seed: int) -> None:
    """Exactly n while there are n, whatever is pinned, protected or masked; None beyond."""
    rng = random.Random(seed)
    tier = Tier(name)
    for ids in requests(rng, 200):
        tier.use(ids)
        pairs = [p for p in map(tier.directory.at_slot, range(CAPACITY)) if p is not None]
        for _, status in pairs:
            status.ref_cnt = rng.random() < 0.6
        mask = np.array([rng.random() < 0.7 for _ in range(CAPACITY)])
        protected = {h for h, _ in pairs if rng.random() < 0.2}
        may_leave = {h for h, s in pairs if not s.ref_cnt and mask[s.block_id]} - protected
        before = tier.policy.coldest(CAPACITY, protected, mask)
        assert {h for h, _ in before} == may_leave
        assert tier.policy.evict(len(may_leave) + 1, protected, mask) is None
        assert tier.policy.coldest(CAPACITY, protected, mask) == before
        n = rng.randint(0, len(may_leave))
        evicted = tier.policy.evict(n, protected, mask)
        assert evicted == before[:n]
        tier.free += [status.block_id for _, status in before[:n]]
        for _, status in pairs:
            status.ref_cnt = 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ORDERS)
def test_a_million_blocks_keep_their_order(name: str) -> None:
    """Nothing is loaded: opening makes views of the arrays, whatever their length."""
    slots, batch = 1_000_000, 1_000
    rng = np.random.default_rng(9)
    arrays = KeptArrays()
    order = ORDERS[name](slots, arrays)
    tags = rng.integers(1, 1 << 63, slots, np.uint64)
    for start in range(0, slots, batch):
        order.insert(list(range(start, start + batch)), tags[start : start + batch].tolist())
    for _ in range(100):
        used = np.sort(rng.choice(slots, batch, replace=False)).tolist()
        order.touch(used)
        order.chain(used, len(used))
    leaving = order.victims(2 * batch, lambda slot: True)
    order.evicted(leaving[:batch], tags[leaving[:batch]].tolist())
    expected = order.victims(50 * batch, lambda slot: True)
    start_s = time.perf_counter()
    again = ORDERS[name](slots, arrays)
    opened_s = time.perf_counter() - start_s
    assert again.victims(50 * batch, lambda slot: True) == expected
    print(f"{name}: {arrays.nbytes / slots:.0f} bytes a slot, opened in {1e3 * opened_s:.2f} ms")


@pytest.mark.parametrize("name", ORDERS)
def test_memory_per_slot(name: str) -> None:
    arrays = KeptArrays()
    capacity = 1 << 17
    ORDERS[name](capacity, arrays)
    assert arrays.nbytes <= BYTES_PER_SLOT_MAX * capacity, arrays.nbytes / capacity
