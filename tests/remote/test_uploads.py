"""Uploads of a store over a twin: the choice of blocks, and the way they go."""

from __future__ import annotations

import pytest
from support.executors import SteppingExecutor
from support.keys import key, keys
from support.remote_rig import RemoteRig, content
from support.remote_twin import RemoteTwin

from kvcascade.tiers.remote.base import RemoteOutcome
from kvcascade.tiers.remote.presence import Presence
from kvcascade.tiers.remote.remote_counters import Verb
from kvcascade.tiers.remote.uploads import Offer

OK, ABSENT, TIMED_OUT = RemoteOutcome.OK, RemoteOutcome.ABSENT, RemoteOutcome.TIMED_OUT


class TestBlocksInUse:
    """A server whose objects expire by age."""

    def test_a_block_is_written_again_once_in_a_while(self) -> None:
        rig = RemoteRig(renew_after_s=3600.0)
        rig.write(keys(1))
        for _ in range(10):
            rig.clock.advance(359.0)
            assert rig.begin_write(keys(1))[1] == [Offer.HELD]
        rig.clock.advance(11.0)
        assert rig.write(keys(1)) == [RemoteOutcome.EXISTS]
        rig.clock.advance(359.0)
        assert rig.begin_write(keys(1))[1] == [Offer.HELD]

    def test_a_block_that_left_the_server_is_written_at_once(self) -> None:
        rig = RemoteRig(renew_after_s=3600.0)
        rig.write(keys(1))
        rig.twin.held.clear()
        rig.clock.advance(60.0)
        assert rig.look(keys(1)) == [ABSENT]
        rig.clock.advance(60.0)
        assert rig.write(keys(1)) == [OK]

    def test_after_a_reset_it_is_written_at_once(self) -> None:
        rig = RemoteRig(renew_after_s=3600.0)
        rig.write(keys(1))
        rig.store.reset()
        rig.store.poll()
        rig.clock.advance(60.0)
        assert rig.write(keys(1)) == [OK]

    def test_a_call_that_times_out_makes_no_upload(self) -> None:
        """The server has the block all the same, and a busy link has no room for it."""
        rig = RemoteRig(renew_after_s=3600.0)
        rig.write(keys(1))
        rig.twin.fails["get_into"] = rig.twin.fails["exist_many"] = TIMED_OUT
        assert rig.look([key(9)]) == rig.read([key(8)]) == [TIMED_OUT]
        assert rig.known(key(0)) is Presence.UNKNOWN
        rig.clock.advance(60.0)
        assert rig.begin_write(keys(1))[1] == [Offer.HELD]

    def test_after_another_hosts_reset_it_is_written_at_once(self) -> None:
        rig = RemoteRig(renew_after_s=3600.0)
        rig.write(keys(1))
        rig.host().store.reset()
        rig.clock.advance(6.0)
        assert rig.look([key(9)]) == [ABSENT]
        payload = memoryview(content(key(0)))
        mark = rig.store.state().mark
        assert rig.store.offer(7, keys(1), [payload], mark) == [Offer.QUEUED]
        assert rig.ended(7, Verb.WRITE) == [OK]


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
    ticket, _ = rig.begin_write(keys(12 * names_per_call))
    stepping.run_all()
    assert rig.ended(ticket, Verb.WRITE) == [OK] * 12 * names_per_call
    assert while_slow == [False] * 3 and not rig.store.counters.unsent
    took_s += 0.2
    while_slow.clear()
    rig.begin_write(keys(100, 101))
    stepping.run_all()
    assert while_slow == [True]
