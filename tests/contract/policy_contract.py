"""What every CachePolicy must do. Subclass `PolicyContract` and give a `make` fixture."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from support.keys import key

from kvcascade.tiers.base import BlockStatus
from kvcascade.tiers.policies.ordered import CachePolicy

Make = Callable[[int], CachePolicy]
CAPACITY = 16


def fill(policy: CachePolicy, n: int, ref_cnt: int = 0) -> list[BlockStatus]:
    statuses = [BlockStatus(ref_cnt, slot) for slot in range(n)]
    for slot, status in enumerate(statuses):
        policy.insert(key(slot), status)
    return statuses


class PolicyContract:
    """The shared suite.

    Two promises are not every policy's; parametrize `name` where it is one of those.
    """

    @pytest.fixture
    def name(self) -> str:
        return "lru"

    @pytest.fixture
    def one_use_saves(self, name: str) -> bool:
        """A single use keeps a block longer than one that came later and was never used."""
        return name not in {"fifo", "s3fifo"}

    @pytest.fixture
    def orders_by_last_use(self, name: str) -> bool:
        """Of blocks that were all used once, the last one used leaves last."""
        # slru fills its upper segments first come first served while there is room.
        return name not in {"fifo", "s3fifo", "sieve", "slru"}

    @pytest.fixture
    def policy(self, make: Make) -> CachePolicy:
        return make(CAPACITY)

    def test_get_insert_remove(self, policy: CachePolicy) -> None:
        (status,) = fill(policy, 1)
        assert policy.get(key(0)) is status
        assert len(policy) == 1
        assert policy.remove(key(0)) is status
        assert policy.get(key(0)) is None
        assert policy.remove(key(0)) is None
        assert len(policy) == 0

    def test_evict_returns_exactly_n(self, policy: CachePolicy) -> None:
        fill(policy, CAPACITY)
        evicted = policy.evict(5, ())
        assert evicted is not None and len(evicted) == 5
        assert len({block_hash for block_hash, _ in evicted}) == 5
        assert all(policy.get(block_hash) is None for block_hash, _ in evicted)
        assert len(policy) == CAPACITY - 5

    def test_evict_of_too_many_changes_nothing(self, policy: CachePolicy) -> None:
        fill(policy, 8)
        before = policy.coldest(8)
        assert policy.evict(9, ()) is None
        assert policy.evict(6, {key(0), key(3), key(7)}) is None
        assert policy.coldest(8) == before
        assert len(policy) == 8

    def test_evict_of_none_is_no_change(self, policy: CachePolicy) -> None:
        fill(policy, 3)
        assert policy.evict(0, ()) == []
        assert len(policy) == 3

    @pytest.mark.parametrize("ref_cnt", [-1, 1, 7])
    def test_blocks_under_transfer_never_leave(self, policy: CachePolicy, ref_cnt: int) -> None:
        statuses = fill(policy, 6)
        statuses[0].ref_cnt = ref_cnt
        statuses[4].ref_cnt = ref_cnt
        assert policy.evict(5, ()) is None
        evicted = policy.evict(4, ())
        assert evicted is not None
        assert {h for h, _ in evicted} == {key(1), key(2), key(3), key(5)}

    def test_protected_blocks_never_leave(self, policy: CachePolicy) -> None:
        fill(policy, 6)
        evicted = policy.evict(3, {key(0), key(1), key(2)})
        assert evicted is not None
        assert {h for h, _ in evicted} == {key(3), key(4), key(5)}

    def test_mask_excludes_slots(self, policy: CachePolicy) -> None:
        fill(policy, 6)
        mask = np.zeros(CAPACITY, dtype=np.bool_)
        mask[[1, 4]] = True
        assert policy.evict(3, (), mask) is None
        evicted = policy.evict(2, (), mask)
        assert evicted is not None
        assert {h for h, _ in evicted} == {key(1), key(4)}

    def test_coldest_is_what_evict_takes(self, policy: CachePolicy) -> None:
        fill(policy, CAPACITY)
        policy.touch([key(2), key(5), key(11)])
        cold = policy.coldest(6, {key(1)})
        assert policy.evict(6, {key(1)}) == cold

    def test_coldest_looks_no_further_than_its_window(self, policy: CachePolicy) -> None:
        statuses = fill(policy, 10)
        for status in statuses[:4]:
            status.ref_cnt = 1
        assert policy.coldest(10, window=4) == []

    def test_touch_saves_from_eviction(self, policy: CachePolicy, one_use_saves: bool) -> None:
        if not one_use_saves:
            pytest.skip("takes more than one use")
        fill(policy, 8)
        policy.touch([key(0), key(1)])
        evicted = policy.evict(6, ())
        assert evicted is not None
        assert {key(0), key(1)}.isdisjoint(h for h, _ in evicted)

    def test_expecting_blocks_changes_no_presence(self, policy: CachePolicy) -> None:
        statuses = fill(policy, CAPACITY)
        before = policy.coldest(CAPACITY)
        policy.expect([key(1), key(77)])
        assert policy.coldest(CAPACITY) == before
        evicted = policy.evict(4, ())
        assert evicted is not None
        gone = [block_hash for block_hash, _ in evicted]
        policy.expect(gone)
        policy.expect(gone)
        assert all(policy.get(block_hash) is None for block_hash in gone)
        policy.insert_many(gone, [status for _, status in evicted])
        assert len(policy) == CAPACITY == len(statuses)
        assert len(policy.coldest(CAPACITY)) == CAPACITY

    def test_touch_of_unknown_blocks_is_ignored(self, policy: CachePolicy) -> None:
        fill(policy, 2)
        policy.touch([key(99), key(1)])
        assert len(policy) == 2
        assert policy.get(key(99)) is None

    def test_tails_leave_before_heads(self, policy: CachePolicy, orders_by_last_use: bool) -> None:
        if not orders_by_last_use:
            pytest.skip("does not order by last use alone")
        fill(policy, 8)
        policy.touch([key(i) for i in range(8)])
        evicted = policy.evict(3, ())
        assert evicted is not None
        assert {h for h, _ in evicted} == {key(7), key(6), key(5)}

    @pytest.mark.parametrize(
        "offered", [range(8), [7, 6, 5, 4, 3, 2, 1, 0], [4, 0, 6, 2, 5, 1, 7, 3]]
    )
    def test_blocks_inserted_bit_by_bit_leave_tail_first(
        self, policy: CachePolicy, offered: Sequence[int]
    ) -> None:
        statuses = [BlockStatus(0, slot) for slot in range(8)]
        for number in offered:
            policy.insert(key(number), statuses[number])
        in_order = [key(number) for number in range(8)]
        if policy.wants_chains:
            policy.note_chain(in_order)
        else:
            policy.settle(in_order)
        gone = [policy.evict(1, ()) for _ in range(8)]
        assert [h for pairs in gone for h, _ in pairs or ()] == in_order[::-1]

    def test_insert_many_is_in_prefix_order(self, policy: CachePolicy) -> None:
        statuses = [BlockStatus(0, slot) for slot in range(8)]
        policy.insert_many([key(i) for i in range(8)], statuses)
        evicted = policy.evict(2, ())
        assert evicted is not None
        assert {h for h, _ in evicted} == {key(7), key(6)}

    def test_slots_may_be_used_again(self, policy: CachePolicy) -> None:
        fill(policy, CAPACITY)
        for round_number in range(1, 60):
            evicted = policy.evict(4, ())
            assert evicted is not None
            for i, (_, status) in enumerate(evicted):
                policy.insert(key(round_number * 100 + i), status)
        assert len(policy) == CAPACITY
        slots = {status.block_id for _, status in policy.coldest(CAPACITY)}
        assert slots == set(range(CAPACITY))

    def test_clear_forgets_everything(self, policy: CachePolicy) -> None:
        fill(policy, 5)
        policy.clear()
        assert len(policy) == 0
        assert policy.get(key(1)) is None
        assert policy.coldest(5) == []
        fill(policy, 3)
        assert len(policy) == 3
