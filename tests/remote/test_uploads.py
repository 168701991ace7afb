"""Uploads: the choice of blocks, and the way of those that a store gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.clock import ManualClock
from support.executors import SteppingExecutor
from support.keys import key, keys
from support.remote_rig import PAYLOAD_BYTES, RemoteRig
from support.remote_twin import RemoteTwin

from kvcascade.config.remote import WriteWhen
from kvcascade.tiers.remote.base import RemoteOutcome
from kvcascade.tiers.remote.presence import Presence, PresenceMemory
from kvcascade.tiers.remote.remote_counters import Verb
from kvcascade.tiers.remote.remote_store import StoreOptions
from kvcascade.tiers.remote.uploads import Offer, OfferRule

OK, EXISTS = RemoteOutcome.OK, RemoteOutcome.EXISTS
QUEUED, HELD, FULL = Offer.QUEUED, Offer.HELD, Offer.FULL


class Owner:
    """The owner that offers blocks, with its rule and its memory of the server."""

    def __init__(
        self,
        when: WriteWhen = WriteWhen.THROUGH,
        queue_blocks: int = 64,
        renew_after_s: float = 0.0,
    ) -> None:
        self.clock = ManualClock()
        self.memory = PresenceMemory(self.clock)
        limit = queue_blocks * PAYLOAD_BYTES
        self.rule = OfferRule(when, limit, PAYLOAD_BYTES, self.memory, renew_after_s, self.clock)

    def offer(self, n: int) -> list[Offer]:
        return [self.rule.answer(block_hash, is_open=True) for block_hash in keys(n)]

    def end(self, n: int, *, is_there: bool = True) -> None:
        """The first blocks were written, or dropped."""
        self.rule.end(keys(n), keys(n) if is_there else (), self.memory.epoch)


class TestRule:
    def test_second_touch_is_the_default(self) -> None:
        owner = Owner(StoreOptions().when)
        assert owner.offer(3) == [Offer.FIRST_TOUCH] * 3
        assert owner.offer(3) == [QUEUED] * 3
        assert owner.offer(3) == [HELD] * 3, "they are on their way"
        owner.end(3)
        assert owner.offer(3) == [HELD] * 3

    def test_off_writes_nothing(self) -> None:
        owner = Owner(WriteWhen.OFF)
        for _ in range(3):
            assert owner.offer(3) == [Offer.OFF] * 3

    def test_an_overfull_queue_drops_tails_and_takes_them_at_the_next_use(self) -> None:
        owner = Owner(queue_blocks=5)
        assert owner.offer(8) == [QUEUED] * 5 + [FULL] * 3
        assert owner.rule.borrowed_bytes == 5 * PAYLOAD_BYTES
        assert owner.offer(8) == [HELD] * 5 + [FULL] * 3
        owner.end(5)
        assert owner.rule.borrowed_bytes == 0
        assert owner.offer(8) == [HELD] * 5 + [QUEUED] * 3

    def test_a_block_that_is_larger_than_the_queue_is_written_alone(self) -> None:
        owner = Owner(queue_blocks=0)
        assert owner.rule.takes_all
        assert owner.offer(2) == [QUEUED, FULL] and not owner.rule.takes_all
        owner.end(1)
        assert owner.offer(2) == [HELD, QUEUED]

    def test_what_was_dropped_is_offered_again(self) -> None:
        owner = Owner()
        assert owner.offer(6) == [QUEUED] * 6
        owner.end(6, is_there=False)
        assert owner.rule.borrowed_bytes == 0 and owner.offer(6) == [QUEUED] * 6


class TestBlocksInUse:
    """A server whose objects expire by age."""

    @pytest.fixture
    def owner(self) -> Owner:
        """A block was written a minute ago."""
        owner = Owner(renew_after_s=3600.0)
        assert owner.offer(1) == [QUEUED]
        owner.end(1)
        owner.clock.advance(60.0)
        return owner

    def test_a_block_is_written_again_once_in_a_while(self, owner: Owner) -> None:
        for _ in range(2):
            owner.clock.advance(3530.0)
            assert owner.offer(1) == [HELD]
            owner.clock.advance(20.0)
            assert owner.offer(1) == [QUEUED]
            owner.end(1)
            owner.clock.advance(60.0)

    def test_a_block_that_left_the_server_is_written_at_once(self, owner: Owner) -> None:
        owner.memory.note(owner.memory.epoch, (), keys(1))
        assert owner.offer(1) == [QUEUED]

    def test_after_a_reset_it_is_written_at_once(self, owner: Owner) -> None:
        owner.memory.clear()
        assert owner.offer(1) == [QUEUED]

    def test_a_call_that_times_out_makes_no_upload(self, owner: Owner) -> None:
        """The server has the block all the same, and a busy link has no room for it."""
        owner.memory.forget()
        assert owner.memory.of(key(0)) is Presence.UNKNOWN
        assert owner.offer(1) == [HELD]

    def test_a_block_that_was_written_is_renewed_though_answers_were_forgotten(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rig = RemoteRig()
        renewed: list[str] = []
        rig.write(keys(1))

        def renew(names: Sequence[str], *given: Any) -> list[RemoteOutcome]:
            renewed.extend(names)
            return rig.twin.put(names, *given)

        monkeypatch.setattr(rig.twin, "renew", renew)
        rig.store._core.memory.forget()
        assert rig.write(keys(1)) == [EXISTS] and len(renewed) == 1


@pytest.mark.parametrize("names_per_call", [1, 4])
def test_a_slow_upload_that_ends_well_costs_no_other_one(names_per_call: int) -> None:
    """One that never ends opens the breaker."""
    twin = RemoteTwin(names_per_call=names_per_call)
    twin.timeout_s = 2.0
    rig = RemoteRig(twin, executor=(stepping := SteppingExecutor()), queue_s=100.0)
    took_s = twin.timeout_s * (names_per_call + 1) - 0.1
    while_slow: list[bool] = []

    def be_slow(method: str) -> None:
        if method == "put" and len(while_slow) < 3:
            rig.clock.advance(took_s)
            assert rig.store.poll() == []
            while_slow.append(Verb.WRITE in rig.store.state().resting)

    twin.before = be_slow
    ticket = rig.begin_write(keys(12 * names_per_call))
    stepping.run_all()
    assert rig.ended(ticket, Verb.WRITE) == [OK] * 12 * names_per_call
    assert while_slow == [False] * 3 and not rig.store.counters.unsent
    took_s += 0.2
    while_slow.clear()
    rig.begin_write(keys(100, 101))
    stepping.run_all()
    assert while_slow == [True]


def test_each_file_of_a_call_has_the_time_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written one after the other; blocks of one trip share the time of a usual call."""
    for in_one_trip, expected_s in ((False, 8.0), (True, 2.0)):
        twin = RemoteTwin(asks_in_one_trip=in_one_trip, names_per_call=1)
        twin.timeout_s, twin.bytes_per_call = 2.0, 4 * PAYLOAD_BYTES
        rig, put, limits_s = RemoteRig(twin, writes_at_a_time=1), twin.put, list[float]()

        def note(
            names: Sequence[str], objects: Any, limit_s: float, put: Any = put, to: Any = limits_s
        ) -> list[RemoteOutcome]:
            to.append(limit_s)
            return list(put(names, objects, limit_s))

        monkeypatch.setattr(twin, "put", note)
        assert rig.write(keys(8)) == [OK] * 8
        assert limits_s == [expected_s] * 2
