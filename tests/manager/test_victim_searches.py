"""Searches for blocks to evict: the scheduler's thread makes no search that must be vain."""

from __future__ import annotations

from collections.abc import Callable, Container

import pytest
from support.cascade import Cascade
from support.inside import first_tier
from support.keys import keys

from kvcascade.config.schema import OnReset
from kvcascade.manager.core import ManagerOptions
from kvcascade.manager.request import Request
from kvcascade.tiers.base import BlockHash, Pairs, SlotMask

HELD = 16
"""Blocks from below that a request holds: clean, but pinned."""
CAPACITY = 64
BELOW = keys(1000, 1000 + CAPACITY)


class Full:
    """A first tier of blocks that are held or dirty. No write below ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        options = ManagerOptions(promotion_deadline_s=100.0, on_reset=OnReset.KEEP)
        self.cascade = Cascade((CAPACITY, 400), options)
        self.manager = self.cascade.manager
        self.cascade.below_only(BELOW[: CAPACITY // 2])
        self.cascade.below_only(BELOW[CAPACITY // 2 :])
        self.holder = Request()
        assert self.manager.lookup(BELOW[:HELD], self.holder) is None
        self.manager.end_step()
        self.read()
        while free := self.cascade.backends[0].get_num_free_blocks():
            start = CAPACITY - free
            assert self.cascade.store(keys(start, start + min(free, 8)))
            self.manager.end_step()
        self.searches = self._counted(monkeypatch)

    def _counted(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """The number of blocks that each search for clean ones wanted, from now on."""
        searches: list[int] = []
        policy, settled = self.cascade.policies[0], first_tier(self.manager).dirt.settled_mask
        coldest = policy.coldest

        def spy(
            n: int,
            protected: Container[BlockHash] = (),
            mask: SlotMask | None = None,
            window: int | None = None,
        ) -> Pairs:
            if mask is settled:
                searches.append(n)
            return coldest(n, protected, mask, window)

        monkeypatch.setattr(policy, "coldest", spy)
        return searches

    def read(self) -> None:
        """The reads in flight arrive."""
        up = self.cascade.up[0]
        up.wait(set(up.queued))
        self.manager.end_step()

    def offer(self, blocks: int) -> bool:
        """A running request offers blocks. Return False if they are put off."""
        return self.manager.prepare_store(keys(500, 500 + blocks), Request()) is not None


def test_stores_that_are_put_off_make_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 of them cost 30 ms in each step: the clean blocks were all pinned."""
    full = Full(monkeypatch)
    for _ in range(3):
        assert not any(full.offer(8) for _ in range(64))
        full.manager.end_step()
    assert len(full.searches) <= 1


def test_reads_that_wait_for_room_make_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Full(monkeypatch)
    assert full.manager.lookup(BELOW[HELD : HELD + 8], Request()) is None
    for _ in range(10):
        full.manager.end_step()
    assert any(queue.queued for queue in full.manager._promoter.queues)
    assert not first_tier(full.manager).has_victim(may_drop_dirty=False)
    assert len(full.searches) <= 1


def give_up(full: Full) -> None:
    """The holder ends without a load."""
    full.manager.finish_request(full.holder)


def begin_load(full: Full) -> None:
    """A worker loads the held blocks."""
    manager = full.manager
    assert manager.lookup(BELOW[:HELD], full.holder) == HELD
    manager.prepare_load(BELOW[:HELD], full.holder)
    manager.finish_request(full.holder)
    manager.end_step()
    assert not full.offer(8), "it is being loaded"


def load(full: Full) -> None:
    """A worker loads the held blocks, and is done."""
    begin_load(full)
    full.manager.complete_load(BELOW[:HELD])


def flush(full: Full) -> None:
    """A reset that keeps the blocks comes in the middle of a load."""
    begin_load(full)
    full.manager.reset_cache()
    assert not full.offer(8), "workers may still read"
    full.manager.on_reset_flushed()


def write(full: Full) -> None:
    """Dirty blocks are written below."""
    full.cascade.run_transfers()


@pytest.mark.parametrize("happens", [give_up, load, flush, write])
def test_a_store_is_taken_as_soon_as_blocks_can_be_evicted(
    monkeypatch: pytest.MonkeyPatch, happens: Callable[[Full], None]
) -> None:
    full = Full(monkeypatch)
    assert not full.offer(8)
    happens(full)
    assert full.offer(8)


def test_an_eviction_leaves_no_victims_that_are_counted_in_vain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two stores take all that one request held; the next ones are put off without a search."""
    full = Full(monkeypatch)
    assert not full.offer(8)
    give_up(full)
    for start in (500, 600):
        assert full.manager.prepare_store(keys(start, start + HELD // 2), Request()) is not None
    full.searches.clear()
    assert not any(
        full.manager.prepare_store(keys(start, start + 4), Request()) is not None
        for start in range(700, 800, 4)
    )
    assert len(full.searches) == 0


def test_slots_of_evicted_blocks_do_not_count_as_evictable() -> None:
    cascade = Cascade((8, 64), is_immediate=True)
    cascade.store(keys(0, 8))
    cascade.manager.flush_dirty(cascade.now_s + 1)
    top = first_tier(cascade.manager)
    assert top.make_all_room(6, (), may_drop_dirty=False)
    top.dirt.count_evictable(cascade.backends[0].ref_counts)
    assert top.dirt.evictable_max == 2
