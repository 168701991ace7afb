"""The contract suite of cache policies, for every built-in order."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
from contract.policy_contract import CAPACITY, Make, PolicyContract, fill
from support.keys import key

from kvcascade.errors import ConfigError
from kvcascade.manager.admission import admission_by_path
from kvcascade.tiers.base import BlockStatus
from kvcascade.tiers.policies import ORDERS, create, order_class


@pytest.mark.parametrize("name", sorted(ORDERS))
class TestPolicies(PolicyContract):
    @pytest.fixture
    def make(self, name: str) -> Make:
        return lambda capacity: create(name, capacity)


def test_unknown_policy_names_what_there_is() -> None:
    with pytest.raises(ConfigError, match="'nonsense' is unknown; use one of arc, fifo, lirs"):
        order_class("nonsense")
    with pytest.raises(ConfigError, match="no EvictionOrder"):
        order_class("json:JSONDecoder")
    with pytest.raises(ConfigError, match="cannot be imported"):
        order_class("json:Nothing")
    with pytest.raises(ConfigError, match="broken_rules:Order.*ZeroDivisionError.*mend the module"):
        order_class("support.broken_rules:Order")
    with pytest.raises(ConfigError, match="broken_rules:admit.*ZeroDivisionError.*mend the module"):
        admission_by_path("support.broken_rules:admit")
    assert order_class("kvcascade.tiers.policies.lru:LruOrder") is ORDERS["lru"]


@pytest.mark.parametrize("capacity", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(ORDERS))
def test_tiers_of_a_few_slots(name: str, capacity: int) -> None:
    rng, policy = random.Random(capacity), create(name, capacity)
    free, held = list(range(capacity)), dict[int, BlockStatus]()
    for _ in range(2000):
        number = rng.randrange(2 * capacity + 1)
        if number in held:
            if rng.random() < 0.8:
                policy.touch([key(number)])
            else:
                policy.remove(key(number))
                free.append(held.pop(number).block_id)
            continue
        if not free:
            evicted = policy.evict(1, ())
            assert evicted is not None
            ((left, status),) = evicted
            assert held.pop(int.from_bytes(left[28:32], "big")) is status
            free.append(status.block_id)
        held[number] = BlockStatus(0, free.pop())
        policy.insert(key(number), held[number])
        assert {block_hash for block_hash, _ in policy.coldest(capacity)} == set(map(key, held))


def test_lru_equals_an_ordered_dict_over_many_compactions() -> None:
    rng = random.Random(7)
    policy = create("lru", CAPACITY)
    model: OrderedDict[int, int] = OrderedDict()
    free = set(range(CAPACITY))
    for _ in range(20_000):
        i = rng.randrange(40)
        if i in model:
            policy.touch([key(i)])
            model.move_to_end(i)
            continue
        if not free:
            victim, slot = model.popitem(last=False)
            evicted = policy.evict(1, ())
            assert evicted is not None and evicted[0][0] == key(victim)
            free.add(slot)
        slot = free.pop()
        policy.insert(key(i), BlockStatus(0, slot))
        model[i] = slot
    left = policy.coldest(CAPACITY)
    assert [block_hash for block_hash, _ in left] == [key(i) for i in model]


def test_arc_keeps_what_was_used_twice_through_a_scan() -> None:
    policy = create("arc", CAPACITY)
    fill(policy, 4)
    policy.touch([key(i) for i in range(4)])
    free = list(range(4, CAPACITY))
    for i in range(1000, 1200):
        if not free:
            evicted = policy.evict(1, ())
            assert evicted is not None
            free.append(evicted[0][1].block_id)
        policy.insert(key(i), BlockStatus(0, free.pop()))
    assert all(policy.get(key(i)) is not None for i in range(4))


def test_arc_learns_from_a_ghost() -> None:
    policy = create("arc", 4)
    fill(policy, 4)
    evicted = policy.evict(1, ())
    assert evicted == [(key(0), evicted[0][1])] if evicted else False
    assert evicted is not None
    policy.insert(key(0), evicted[0][1])  # back from B1: counts as used twice
    again = policy.evict(2, ())
    assert again is not None
    assert {h for h, _ in again} == {key(1), key(2)}
