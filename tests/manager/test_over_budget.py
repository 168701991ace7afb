"""Blocks that the write budget kept out of the tier below."""

from __future__ import annotations

import pytest
from support.cascade import BLOCK_SIZE, Cascade, key

from kvcascade.config.schema import WriteMode
from kvcascade.manager.core import ManagerOptions
from kvcascade.manager.request import Request
from kvcascade.tiers.endurance import DAY_S

SPENT = range(100, 104)
PROMPT = [key(number) for number in range(4)]


def use(cascade: Cascade) -> None:
    """A request loads the prompt, and ends."""
    manager, request = cascade.manager, Request()
    assert manager.lookup(PROMPT, request) == len(PROMPT)
    manager.prepare_load(PROMPT, request)
    manager.complete_load(PROMPT)
    manager.finish_request(request)
    manager.end_step()


def written(cascade: Cascade) -> int:
    """The blocks of the prompt that the tier below holds after a flush."""
    cascade.manager.flush_dirty(cascade.now_s + 1)
    return sum(cascade.holds(1, block_hash) for block_hash in PROMPT)


@pytest.mark.parametrize("mode", [WriteMode.BACK, WriteMode.THROUGH, WriteMode.DEMOTE])
def test_a_block_that_is_used_again_is_written_once_the_budget_is_back(
    mode: WriteMode,
) -> None:
    options = ManagerOptions(write_mode=mode)
    cascade = Cascade((16, 64), options, is_immediate=True, bytes_per_day=4 * BLOCK_SIZE)
    cascade.store([key(number) for number in SPENT])
    cascade.manager.flush_dirty(cascade.now_s + 1)
    counters = cascade.manager.counters.links[0]
    cascade.store(PROMPT)
    assert written(cascade) == 0 and counters.demote_over_budget_blocks == len(PROMPT)
    use(cascade)
    assert written(cascade) == 0
    assert counters.demote_over_budget_blocks == len(PROMPT), "nothing is tried while it is spent"
    cascade.now_s += DAY_S * 1.1
    cascade.manager.end_step()  # the writer's figures come
    use(cascade)
    assert written(cascade) == len(PROMPT)
    stored = counters.demoted_blocks
    use(cascade)
    assert written(cascade) == len(PROMPT) and counters.demoted_blocks == stored
