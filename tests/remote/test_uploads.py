"""Which blocks a store uploads, and how it does that, over a twin."""

from __future__ import annotations

from support.keys import key, keys
from support.remote_rig import RemoteRig, content

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
