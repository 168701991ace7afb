"""What every Backend must do. Subclass `BackendContract` and give a `backend` fixture."""

from __future__ import annotations

import pytest

from kvcascade.errors import NoSpaceError
from kvcascade.tiers.base import NOT_READY, Backend, BlockHash, BlockStatus


def hashes(n: int, start: int = 0) -> list[BlockHash]:
    return [BlockHash(i.to_bytes(32, "big") + b"\0\0\0\0") for i in range(start, start + n)]


class BackendContract:
    """The shared suite. The backend must be empty and have at least eight slots."""

    def test_all_slots_are_free_at_first(self, backend: Backend) -> None:
        assert backend.get_num_free_blocks() == backend.capacity

    def test_allocation_gives_distinct_slots_that_are_not_ready(self, backend: Backend) -> None:
        statuses = backend.allocate_blocks(hashes(5))
        assert len({status.block_id for status in statuses}) == 5
        assert all(0 <= status.block_id < backend.capacity for status in statuses)
        assert [status.ref_cnt for status in statuses] == [NOT_READY] * 5
        assert backend.get_num_free_blocks() == backend.capacity - 5

    def test_blocks_allocated_together_are_adjacent(self, backend: Backend) -> None:
        slots = [status.block_id for status in backend.allocate_blocks(hashes(4))]
        assert sorted(slots) == list(range(min(slots), min(slots) + 4))

    def test_free_gives_the_slot_back_and_makes_it_idle(self, backend: Backend) -> None:
        statuses = backend.allocate_blocks(hashes(backend.capacity))
        backend.free(statuses[3])
        assert backend.get_num_free_blocks() == 1
        assert statuses[3].ref_cnt == 0
        again = backend.allocate_blocks(hashes(1, start=100_000))
        assert again[0].block_id == statuses[3].block_id

    def test_freeing_twice_is_our_bug(self, backend: Backend) -> None:
        (status,) = backend.allocate_blocks(hashes(1))
        backend.free(status)
        with pytest.raises(AssertionError):
            backend.free(status)

    def test_asking_for_too_much_takes_nothing(self, backend: Backend) -> None:
        backend.allocate_blocks(hashes(3))
        with pytest.raises(NoSpaceError):
            backend.allocate_blocks(hashes(backend.capacity, start=10))
        assert backend.get_num_free_blocks() == backend.capacity - 3

    def test_a_status_is_a_live_view(self, backend: Backend) -> None:
        (status,) = backend.allocate_blocks(hashes(1))
        status.ref_cnt = 0
        status.ref_cnt += 2
        assert status.ref_cnt == 2

    def test_reset_frees_idle_slots_and_returns_busy_ones(self, backend: Backend) -> None:
        arriving, idle, read = backend.allocate_blocks(hashes(3))
        idle.ref_cnt = 0
        read.ref_cnt = 2
        busy = backend.reset()
        assert {status.block_id for status in busy} == {arriving.block_id, read.block_id}
        assert backend.get_num_free_blocks() == backend.capacity - 2
        self.free_all(backend, busy)
        assert backend.get_num_free_blocks() == backend.capacity

    @staticmethod
    def free_all(backend: Backend, statuses: list[BlockStatus]) -> None:
        for status in statuses:
            backend.free(status)
