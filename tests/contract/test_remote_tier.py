"""The contract suite of the port below, for a remote tier."""

from __future__ import annotations

from dataclasses import replace

import pytest
from contract.below_contract import SLOTS, BelowContract, BelowRig
from support.keys import keys
from support.remote_rig import PAYLOAD_BYTES, THROUGH
from support.remote_tier_rig import RemoteTierRig, is_asking

from kvcascade.handlers.node.node_keeper import LISTEN_INTERVAL_S
from kvcascade.manager.below.port import Put
from kvcascade.tiers.remote.shared_generation import GENERATION_FRESH_S


class RemoteBelowRig(BelowRig):
    def __init__(self) -> None:
        self.host = RemoteTierRig(options=replace(THROUGH, queue_bytes=SLOTS * PAYLOAD_BYTES))
        self.below = self.host.tier
        self.host.pump()  # the node has read the generation

    def view(self, slot: int) -> memoryview:
        return self.host.arena.view(slot)

    def overtake(self) -> None:
        """Another host resets the tier; this one sees it when it asks next."""
        other = RemoteTierRig(self.host.twin, self.host.clock)
        other.tier.reset()
        other.pump()
        self.host.clock.advance(GENERATION_FRESH_S + 1.0)
        assert is_asking(self.below, keys(99)[98], "somebody")
        self.below.maintain()
        while self.host.step():
            pass
        self.host.clock.advance(2 * LISTEN_INTERVAL_S)

    def now_s(self) -> float:
        return self.host.clock()


class TestRemoteTier(BelowContract):
    @pytest.fixture
    def rig(self) -> BelowRig:
        return RemoteBelowRig()

    def test_more_than_fits_is_taken_from_its_start(self, rig: BelowRig) -> None:
        """The rest is dropped: it may leave the first tier, and is offered at its next use."""
        answers = list(rig.begin_put(keys(SLOTS + 4)))
        assert answers == [Put.STARTED] * SLOTS + [Put.UNWANTED] * 4
        rig.end()
        assert [rig.below.may_hold(h) for h in keys(SLOTS + 4)] == [1] * SLOTS + [0] * 4
