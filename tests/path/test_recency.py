"""The order of eviction of a namespace: openings of other sizes, and damage in use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.keys import key

from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.path.writer.namespace.recency import Recency
from kvcascade.tiers.policies import ORDERS

BEFORE, AFTER = 400, 300
HEADER_BYTES = 64
"""Bytes of a file before its array."""


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
