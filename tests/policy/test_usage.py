"""Noting uses: the order beside it behaves as without, and the notes are right."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvcascade.tiers.policies import ORDERS
from kvcascade.tiers.policies.order import EvictionOrder
from kvcascade.tiers.policies.usage import (
    LAST_USE,
    MAX_TIME_S,
    MAX_TIMES,
    TIMES_USED,
    WRITTEN_AT,
    UsageOrder,
)

CAPACITY = 64


@pytest.mark.parametrize("name", sorted(ORDERS))
def test_the_order_is_the_same_with_notes(name: str) -> None:
    plain, noted = ORDERS[name](CAPACITY), UsageOrder(ORDERS[name](CAPACITY))
    assert noted.wants_tags == plain.wants_tags
    rng = random.Random(3)
    present: list[int] = []
    for _ in range(600):
        free = [slot for slot in range(CAPACITY) if slot not in present]
        if free and rng.random() < 0.5:
            slots = rng.sample(free, min(len(free), rng.randint(1, 12)))
            tags = [slot + 1000 * rng.randint(1, 9) for slot in slots] if plain.wants_tags else []
            for order in (plain, noted):
                order.expect(tags)
                order.insert(slots, tags)
                order.settle(slots)
            present += slots
        elif present and rng.random() < 0.6:
            slots = rng.sample(present, min(len(present), rng.randint(1, 12)))
            for order in (plain, noted):
                order.touch(slots)
        elif present:
            victims = plain.victims(5, lambda slot: slot % 7 != 0)
            assert victims == noted.victims(5, lambda slot: slot % 7 != 0)
            gone = [slot + 5000 for slot in victims] if plain.wants_tags else []
            for order in (plain, noted):
                order.evicted(victims, gone)
            present = [slot for slot in present if slot not in victims]
        assert all((slot in noted) == (slot in plain) for slot in range(CAPACITY))


def test_every_call_reaches_the_order() -> None:
    """A call that the order may answer in its own way must not end at the notes."""
    calls = {n for n, f in vars(EvictionOrder).items() if callable(f) and not n.startswith("__")}
    assert calls <= set(vars(UsageOrder))


@pytest.mark.parametrize("name", sorted(ORDERS))
def test_wishes_of_the_order_are_known(name: str) -> None:
    assert UsageOrder(ORDERS[name](CAPACITY)).wants_chains == ORDERS[name].wants_chains


@pytest.mark.parametrize("count", [1, 8, 9, 40])
def test_notes(count: int) -> None:
    now = [1000.0]
    made: dict[str, np.ndarray] = {}

    def arrays(name: str, length: int, dtype: type[np.generic]) -> np.ndarray:
        return made.setdefault(name, np.zeros(length, dtype))

    order = UsageOrder(ORDERS["lru"](CAPACITY, arrays), arrays, lambda: now[0])
    slots = list(range(count))
    order.insert(slots, [])
    now[0] = 1500.5
    order.touch(slots)
    order.touch(slots)
    assert made[WRITTEN_AT][:count].tolist() == [1000] * count
    assert made[LAST_USE][:count].tolist() == [1500] * count
    assert made[TIMES_USED][:count].tolist() == [2] * count
    assert not made[TIMES_USED][count:].any()
    made[TIMES_USED][:count] = MAX_TIMES
    order.touch(slots)
    assert made[TIMES_USED][:count].tolist() == [MAX_TIMES] * count
    order.remove(slots)
    order.insert(slots, [])
    assert not made[TIMES_USED].any(), "a new block begins anew"
    now[0] = 1e10  # a clock that is wrong by centuries
    order.touch(slots)
    assert made[LAST_USE][:count].tolist() == [MAX_TIME_S] * count
