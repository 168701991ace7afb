"""A full tier whose index takes no commit, so that nothing can be evicted.

The tier rests, and memory goes on without it. It takes writes again once the index does.
"""

from __future__ import annotations

import pytest
from support.fault_rig import PER_SEGMENT, FaultRig
from support.keys import keys
from support.memory_block_table import MemoryBlockTable

from kvcascade.config.schema import WriteMode
from kvcascade.manager.cascading import CascadingOffloadingManager
from kvcascade.manager.core import ManagerOptions
from kvcascade.manager.first_tier import Tier
from kvcascade.tiers.breaker import REST_S
from kvcascade.tiers.nvme.path.path_messages import Committed
from kvcascade.tiers.policies import create

TOP_SLOTS = 16
MANY = 10_000


def use_mode(rig: FaultRig, mode: WriteMode) -> None:
    """Put another manager in place, with a write mode."""
    rig.top_policy = create("lru", TOP_SLOTS)
    rig.manager = CascadingOffloadingManager(
        Tier("cpu", rig.top, rig.top_policy),
        rig.node.tier,
        ManagerOptions(write_mode=mode, dirty_age_s=5.0),
        rig.clock,
        rig.clock.advance,
    )
    rig.manager.maintain()


@pytest.mark.parametrize("mode", [WriteMode.BACK, WriteMode.THROUGH])
@pytest.mark.parametrize("outcome", [Committed.IO_ERROR, Committed.NO_SPACE])
def test_evictions_that_the_index_refuses_rest_the_tier(
    mode: WriteMode, outcome: Committed
) -> None:
    rig = FaultRig(top_slots=TOP_SLOTS, nvme_slots=2 * PER_SEGMENT)
    use_mode(rig, mode)
    rig.on_disk(keys(0, 2 * PER_SEGMENT))
    (namespace,) = rig.nodes.core.namespaces.values()
    table = namespace.table
    assert isinstance(table, MemoryBlockTable)
    table.disk.failures = [outcome] * MANY
    begin_s, put_off = rig.clock(), 0
    for second in range(60):
        new = keys(1000 + 4 * second, 1004 + 4 * second)
        put_off += rig.store(new) != new
        for _ in range(20):
            rig.clock.advance(0.05)
            rig.manager.maintain()
    rests = (rig.clock() - begin_s) / REST_S
    assert rests / 2 < MANY - len(table.disk.failures) <= rests + 1
    assert rests / 2 < rig.counters.demote_openings <= rests + 1
    assert put_off <= 1, "memory waits for nothing"
    table.disk.failures.clear()
    rig.recovers(5000)
    rig.close()
