"""Statistics of slots: what is noted of insertions and uses."""

from __future__ import annotations

import numpy as np
import pytest

from kvcascade.tiers.policies.parts.usage import (
    LAST_USE,
    MAX_TIME_S,
    MAX_TIMES,
    TIMES_USED,
    WRITTEN_AT,
    SlotUsage,
)

CAPACITY = 64


@pytest.mark.parametrize("count", [1, 8, 9, 40])
def test_notes(count: int) -> None:
    now = [1000.0]
    made: dict[str, np.ndarray] = {}

    def arrays(name: str, length: int, dtype: type[np.generic]) -> np.ndarray:
        return made.setdefault(name, np.zeros(length, dtype))

    usage = SlotUsage(CAPACITY, arrays, lambda: now[0])
    slots = list(range(count))
    usage.note_insert(slots)
    now[0] = 1500.5
    usage.note_use(slots)
    usage.note_use(slots)
    assert made[WRITTEN_AT][:count].tolist() == [1000] * count
    assert made[LAST_USE][:count].tolist() == [1500] * count
    assert made[TIMES_USED][:count].tolist() == [2] * count
    assert not made[TIMES_USED][count:].any()
    made[TIMES_USED][:count] = MAX_TIMES
    usage.note_use(slots)
    assert made[TIMES_USED][:count].tolist() == [MAX_TIMES] * count
    usage.note_insert(slots)
    assert not made[TIMES_USED].any(), "a new block begins anew"
    now[0] = 1e10  # a clock that is wrong by centuries
    usage.note_use(slots)
    assert made[LAST_USE][:count].tolist() == [MAX_TIME_S] * count
