"""Contract of every `Below`. Subclass `BelowContract` and give a `rig` fixture.

The port holds nothing at first, its tier 1 has room for `SLOTS` blocks, and `arena` has as many
slots and more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from support.keys import key, keys

from kvcascade.manager.below.port import Below, Ended, Put
from kvcascade.tiers.base import BlockHash, BlockOutcome

SLOTS = 16
ARENA_SLOTS = 64
WAIT_S = 10.0
OK, GONE = BlockOutcome.OK, BlockOutcome.GONE


class BelowRig(ABC):
    """A port and the slots of the first tier above it."""

    below: Below
    _tickets = 0

    @abstractmethod
    def view(self, slot: int) -> memoryview:
        """The bytes of a slot of the first tier."""

    @abstractmethod
    def overtake(self) -> None:
        """Another process resets the nearest tier, and perhaps others."""

    @abstractmethod
    def now_s(self) -> float:
        """The clock of the port."""

    def content(self, block_hash: BlockHash) -> bytes:
        """The one right content of a block."""
        size = self.below.tiers[0].block_bytes
        return (block_hash * (size // len(block_hash) + 1))[:size]

    def ticket(self) -> int:
        """The next one."""
        self._tickets += 1
        return self._tickets

    def begin_put(self, hashes: Sequence[BlockHash]) -> Sequence[Put]:
        """Write these blocks from the first slots."""
        for slot, block_hash in enumerate(hashes):
            self.view(slot)[:] = self.content(block_hash)
        return self.below.put(self.ticket(), hashes, range(len(hashes)))

    def put(self, hashes: Sequence[BlockHash]) -> Sequence[BlockOutcome]:
        """Write these blocks, all new, and wait."""
        assert self.begin_put(hashes) == [Put.STARTED] * len(hashes)
        return self.end().outcomes

    def get(self, hashes: Sequence[BlockHash]) -> Sequence[BlockOutcome]:
        """Read blocks into the slots from `SLOTS` on, and wait; what came is compared."""
        slots = range(SLOTS, SLOTS + len(hashes))
        for slot in slots:
            self.view(slot)[:] = b"\xee" * len(self.view(slot))
        self.below.get(self.ticket(), 1, hashes, slots)
        ended = self.end()
        for block_hash, slot, outcome in zip(hashes, slots, ended.outcomes, strict=True):
            if outcome is OK:
                assert bytes(self.view(slot)) == self.content(block_hash), "wrong bytes"
        return ended.outcomes

    def await_ended(self) -> Sequence[Ended]:
        """Wait for transfers that are in flight, until some have ended."""
        while not (ended := self.below.poll()):
            assert self.below.wait(WAIT_S), "nothing is in flight"
        return ended

    def end(self) -> Ended:
        """Wait for the last transfer, which is the only one."""
        (ended,) = self.await_ended()
        assert ended.ticket == self._tickets
        assert list(self.below.poll()) == [], "each end is reported once"
        return ended


class BelowContract:
    """The shared suite."""

    def test_nothing_is_held_at_first(self, rig: BelowRig) -> None:
        assert rig.below.may_hold(key(0)) == 0
        assert list(rig.below.poll()) == [] and rig.below.take_lost() == []
        assert rig.below.take_events() == []
        assert rig.below.takes_puts and not rig.below.is_blocked and not rig.below.rests(1)

    def test_a_block_may_be_held_once_its_write_has_ended(self, rig: BelowRig) -> None:
        rig.begin_put(keys(3))
        assert rig.below.wait(WAIT_S)
        assert [rig.below.may_hold(h) for h in keys(3)] == [0, 0, 0], "nobody was told"
        (ended,) = rig.await_ended()
        assert (ended.is_get, ended.tier, list(ended.outcomes)) == (False, 1, [OK] * 3)
        assert [rig.below.may_hold(h) for h in keys(4)] == [1, 1, 1, 0]

    def test_what_was_put_comes_back(self, rig: BelowRig) -> None:
        rig.put(keys(4))
        assert list(rig.get([key(3), key(1)])) == [OK, OK]

    def test_a_key_that_is_not_there_is_gone(self, rig: BelowRig) -> None:
        rig.put(keys(1))
        assert list(rig.get([key(7), key(0), key(8)])) == [GONE, OK, GONE]
        assert list(rig.get([key(7)])) == [GONE]

    def test_only_media_that_are_asked_for_count(self, rig: BelowRig) -> None:
        rig.put(keys(1))
        medium = rig.below.tiers[0].medium
        assert rig.below.may_hold(key(0), frozenset({medium})) == 1
        assert rig.below.may_hold(key(0), frozenset({"elsewhere"})) == 0
        assert rig.below.may_hold(key(0), frozenset()) == 0

    def test_what_is_there_or_coming_is_not_written_again(self, rig: BelowRig) -> None:
        rig.begin_put(keys(2))
        again = rig.below.put(rig.ticket(), [key(0)], [0])
        assert list(again) == [Put.ALREADY]
        assert [ended.ticket for ended in rig.await_ended()] == [rig._tickets - 1]
        assert list(rig.begin_put(keys(4))) == [Put.ALREADY] * 2 + [Put.STARTED] * 2
        assert len(rig.end().outcomes) == 2

    def test_more_than_fits_is_taken_from_its_start(self, rig: BelowRig) -> None:
        answers = list(rig.begin_put(keys(SLOTS + 4)))
        taken = answers.count(Put.STARTED)
        assert 0 < taken <= SLOTS and answers[:taken] == [Put.STARTED] * taken
        assert set(answers[taken:]) <= {Put.LATER}
        rig.end()
        assert [rig.below.may_hold(h) for h in keys(SLOTS + 4)].count(1) == taken

    def test_what_leaves_is_named_once(self, rig: BelowRig) -> None:
        for start in range(0, 2 * SLOTS, 4):
            rig.put(keys(start, start + 4))
        lost = rig.below.take_lost()
        held = [h for h in keys(2 * SLOTS) if rig.below.may_hold(h)]
        assert sorted(lost + held) == sorted(keys(2 * SLOTS)), "each is lost or held"
        assert rig.below.take_lost() == []

    def test_events_tell_what_is_held(self, rig: BelowRig) -> None:
        seen: set[BlockHash] = set()
        for start in range(0, 2 * SLOTS, 4):
            rig.put(keys(start, start + 4))
        for event in rig.below.take_events():
            (seen.difference_update if event.removed else seen.update)(event.block_hashes)
        assert seen == {h for h in keys(2 * SLOTS) if rig.below.may_hold(h)}

    def test_a_reset_leaves_nothing_to_find(self, rig: BelowRig) -> None:
        rig.put(keys(4))
        rig.below.reset()
        assert [rig.below.may_hold(h) for h in keys(4)] == [0] * 4
        assert rig.below.take_events() == [], "a reset removes without naming"
        assert list(rig.get(keys(2))) == [GONE, GONE]
        rig.put(keys(4))
        assert list(rig.get(keys(4))) == [OK] * 4

    def test_a_write_that_outlives_a_reset_leaves_nothing_behind(self, rig: BelowRig) -> None:
        rig.begin_put(keys(4))
        rig.below.reset()
        rig.end()
        assert [rig.below.may_hold(h) for h in keys(4)] == [0] * 4
        for start in range(0, SLOTS, 4):
            rig.put(keys(start, start + 4))
        assert [rig.below.may_hold(h) for h in keys(SLOTS)] == [1] * SLOTS, "no slot is lost"

    def test_a_read_that_outlives_a_reset_ends(self, rig: BelowRig) -> None:
        rig.put(keys(2))
        rig.below.get(rig.ticket(), 1, keys(2), range(SLOTS, SLOTS + 2))
        rig.below.reset()
        assert len(rig.end().outcomes) == 2
        assert [rig.below.may_hold(h) for h in keys(2)] == [0, 0]

    def test_a_reset_by_another_process_is_seen_at_the_next_upkeep(self, rig: BelowRig) -> None:
        rig.put(keys(4))
        assert not rig.below.maintain()
        rig.overtake()
        assert rig.below.maintain()
        assert [rig.below.may_hold(h) for h in keys(4)] == [0] * 4
        assert not rig.below.maintain()
        rig.put(keys(4))

    def test_its_state_counts_what_it_holds(self, rig: BelowRig) -> None:
        rig.put(keys(3))
        state, facts = rig.below.state()[0], rig.below.tiers[0]
        assert (state.name, state.blocks, state.capacity_blocks) == (facts.name, 3, facts.capacity)
        assert len(rig.below.state()) == len(rig.below.tiers) == len(rig.below.links)

    def test_a_shutdown_ends_what_is_under_way(self, rig: BelowRig) -> None:
        rig.begin_put(keys(2))
        assert rig.below.shutdown(rig.now_s() + WAIT_S)
        assert rig.below.shutdown(rig.now_s() + WAIT_S), "idempotent"

    def test_without_a_failure_writes_neither_rest_nor_stall(self, rig: BelowRig) -> None:
        rig.put(keys(2))
        state = rig.below.write_state()
        assert not state.is_stalled and state.rest_left_s == 0.0
        assert 0 < rig.below.room(4) <= 4
