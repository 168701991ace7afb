"""The order of eviction of a namespace over openings of other sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.keys import key

from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.path.writer.namespace.recency import Recency
from kvcascade.tiers.policies import ORDERS

BEFORE, AFTER = 400, 300


@pytest.mark.parametrize("policy", ORDERS)
def test_a_tier_that_became_smaller_evicts_only_slots_that_it_has(
    tmp_path: Path, policy: str
) -> None:
    """Uses of the slots that are gone are still in its arrays."""

    def opened(is_used: np.ndarray) -> Recency:
        return Recency(RealFileSystem(False), tmp_path, policy, is_used, lambda: 1000.0)

    def keys(slots: range) -> list[bytes]:
        return [bytes(key(slot)) for slot in slots]

    recency = opened(np.zeros(BEFORE, np.bool_))
    for first in range(0, BEFORE, 8):
        recency.insert(keys(range(first, first + 8)), range(first, first + 8))
    gone = range(AFTER, BEFORE)
    recency.evicted(keys(gone), gone)
    recency.close(is_clean=True)
    for _ in range(2):
        recency = opened(np.ones(AFTER, np.bool_))
        assert sorted(recency.victims(BEFORE)) == [*range(AFTER)]
        for first in range(0, AFTER, 4):
            recency.touch(range(first, first + 4))
        assert sorted(recency.victims(BEFORE)) == [*range(AFTER)]
        recency.close(is_clean=True)
