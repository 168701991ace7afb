"""`ExtentPool` against a set."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcascade.tiers.nvme.segments.extents import ExtentPool, runs

SLOTS = 48


def runs_of(slots: set[int]) -> list[tuple[int, int]]:
    mask = np.zeros(SLOTS, dtype=np.bool_)
    mask[sorted(slots)] = True
    return runs(mask)


def pool_of(extents: Iterable[tuple[int, int]]) -> ExtentPool:
    pool = ExtentPool()
    for start, length in extents:
        pool.free(start, length)
    return pool


def test_runs_of_a_mask() -> None:
    assert runs(np.zeros(0, dtype=np.bool_)) == runs(np.zeros(5, dtype=np.bool_)) == []
    assert runs(np.ones(5, dtype=np.bool_)) == [(0, 5)]
    assert runs_of({0, 1, 4, SLOTS - 1}) == [(0, 2), (4, 1), (SLOTS - 1, 1)]


class PoolMachine(RuleBasedStateMachine):
    """Random takes and frees; runs are as long as they can be."""

    @initialize(free=st.sets(st.integers(0, SLOTS - 1)))
    def start(self, free: set[int]) -> None:
        self.free = set(free)
        self.taken = set(range(SLOTS)) - free
        self.pool = pool_of(runs_of(free))

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(1, len(self.free)))
        longest = max((n for _, n in runs_of(self.free)), default=0)
        extents = self.pool.take(n)
        got = [slot for start, length in extents for slot in range(start, start + length)]
        assert len(got) == n and len(set(got)) == n and self.free.issuperset(got)
        assert extents[0][1] == min(longest, n)
        self.free.difference_update(got)
        self.taken.update(got)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.taken)))
        self.pool.free(slot)
        self.taken.discard(slot)
        self.free.add(slot)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert len(self.pool) == len(self.free)
        assert self.pool.extents() == runs_of(self.free)
        again = pool_of(self.pool.extents())
        assert again.extents() == self.pool.extents()


TestPool = PoolMachine.TestCase


def test_the_heap_does_not_grow_for_ever() -> None:
    pool = pool_of([(0, 1000)])
    for _ in range(5000):
        (start, _), *_ = pool.take(1)
        pool.free(start)
    assert len(pool._heap) < 200
    assert pool.extents() == [(0, 1000)]
