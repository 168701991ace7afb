"""The CPU backend: the shared contract by another file, here its own promises."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.keys import keys

from kvcascade.errors import NoSpaceError
from kvcascade.tiers.base import NOT_READY, BlockStatus
from kvcascade.tiers.cpu.cpu_backend import CpuBackend

CAPACITY = 24


def ids(statuses: list[BlockStatus]) -> list[int]:
    return [status.block_id for status in statuses]


class BackendMachine(RuleBasedStateMachine):
    """A backend and a dictionary slot -> ref_cnt of what is allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.backend = CpuBackend(64, CAPACITY)
        self.held: dict[int, BlockStatus] = {}
        self.refs: dict[int, int] = {}

    @rule(n=st.integers(0, CAPACITY + 2))
    def allocate(self, n: int) -> None:
        free = CAPACITY - len(self.held)
        if n > free:
            with pytest.raises(NoSpaceError):
                self.backend.allocate_blocks(keys(n))
            return
        statuses = self.backend.allocate_blocks(keys(n))
        assert len(set(ids(statuses))) == n
        assert ids(statuses) == sorted(ids(statuses))
        assert not set(ids(statuses)) & set(self.held)
        assert all(status.ref_cnt == NOT_READY for status in statuses)
        self.held.update({status.block_id: status for status in statuses})
        self.refs.update(dict.fromkeys(ids(statuses), NOT_READY))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), count=st.integers(0, 3))
    def set_ref_cnt(self, data: st.DataObject, count: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        self.held[slot].ref_cnt = count
        self.refs[slot] = count

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        status = self.held.pop(slot)
        del self.refs[slot]
        self.backend.free(status)
        assert status.ref_cnt == 0
        with pytest.raises(AssertionError):
            self.backend.free(status)

    @rule()
    def reset(self) -> None:
        busy = self.backend.reset()
        self.refs = {slot: count for slot, count in self.refs.items() if count != 0}
        self.held = {slot: self.held[slot] for slot in self.refs}
        assert sorted(ids(busy)) == sorted(self.held)

    @invariant()
    def counts_and_views_agree(self) -> None:
        assert self.backend.get_num_free_blocks() == CAPACITY - len(self.held)
        want = [self.refs.get(slot, 0) for slot in range(CAPACITY)]
        assert self.backend.ref_counts.tolist() == want


TestBackendModel = BackendMachine.TestCase


def test_freed_slots_are_put_in_order_for_larger_allocations() -> None:
    backend = CpuBackend(64, 16)
    assert backend.medium == "CPU"
    statuses = backend.allocate_blocks(keys(16))
    for slot in (5, 2, 7, 4, 3, 6, 9, 8):
        backend.free(statuses[slot])
    assert ids(backend.allocate_blocks(keys(8))) == list(range(2, 10))
