"""The contract suite of the port below, for its twin and for every implementation."""

from __future__ import annotations

import pytest
from contract.below_contract import ARENA_SLOTS, SLOTS, BelowContract, BelowRig
from support.below_twin import BelowTwin
from support.cascade import BLOCK_SIZE
from support.keys import key, keys
from support.memory_backend import MemoryBackend
from support.node_rig import NodesRig

from kvcascade.manager.below.chain import LOWER_SHARE, BelowChain, ChainedTier
from kvcascade.manager.below.port import Below, Put
from kvcascade.tiers.base import BlockOutcome


class TwinRig(BelowRig):
    def __init__(self) -> None:
        self._arena = MemoryBackend(BLOCK_SIZE, ARENA_SLOTS, medium="CPU")
        self.twin = BelowTwin(self._arena.view, SLOTS, BLOCK_SIZE)
        self.below: Below = self.twin

    def view(self, slot: int) -> memoryview:
        return self._arena.view(slot)

    def overtake(self) -> None:
        self.twin.is_overtaken = True

    def now_s(self) -> float:
        return 0.0


class NodeTierRig(BelowRig):
    """A tier behind a node; another engine on the same path resets it."""

    def __init__(self, engines: int = 2, *, is_real: bool = False) -> None:
        self.path = NodesRig(is_real=is_real)
        self.nodes = [self.path.add() for _ in range(engines)]
        self.below = self.nodes[0].tier
        for node in self.nodes:
            node.tier.maintain()

    def view(self, slot: int) -> memoryview:
        return self.nodes[0].arena.view(slot)

    def overtake(self) -> None:
        other = self.nodes[-1] if len(self.nodes) > 1 else self.path.add()
        other.tier.reset()
        self.path.pump()

    def now_s(self) -> float:
        return self.path.clock()


class ChainOfTwinsRig(TwinRig):
    """Two tiers of different sizes; the nearest one is the twin that others reset."""

    def __init__(self) -> None:
        super().__init__()
        self.lower = BelowTwin(self._arena.view, 2 * SLOTS, BLOCK_SIZE)
        tiers = [ChainedTier(twin, None) for twin in (self.twin, self.lower)]
        self.below = BelowChain(tiers, LOWER_SHARE * ARENA_SLOTS, self.now_s)


class ChainOfNodesRig(NodeTierRig):
    """Two engines over the same two paths with real writers."""

    def __init__(self) -> None:
        super().__init__(is_real=True)
        self.lower = NodesRig(is_real=True)
        lower = [self.lower.add(arena=node.arena) for node in self.nodes]
        self.chains = [
            BelowChain(
                [ChainedTier(tier, None) for tier in (upper.tier, below.tier)],
                LOWER_SHARE * ARENA_SLOTS,
                self.now_s,
            )
            for upper, below in zip(self.nodes, lower, strict=True)
        ]
        self.below = self.chains[0]
        for chain in self.chains:
            chain.maintain()

    def overtake(self) -> None:
        self.chains[1].reset()
        self.path.pump()
        self.lower.pump()


class TestTwin(BelowContract):
    @pytest.fixture
    def rig(self) -> BelowRig:
        return TwinRig()


class TestNodeTier(BelowContract):
    @pytest.fixture
    def rig(self) -> BelowRig:
        return NodeTierRig(engines=1)


class TestNodeTierOfTwo(BelowContract):
    @pytest.fixture
    def rig(self) -> BelowRig:
        return NodeTierRig()


class TestNodeTierWithTheWriter(BelowContract):
    @pytest.fixture
    def rig(self) -> BelowRig:
        return NodeTierRig(is_real=True)


class TestChainOfTwins(BelowContract):
    @pytest.fixture
    def rig(self) -> BelowRig:
        return ChainOfTwinsRig()


class TestChainOfNodes(BelowContract):
    @pytest.fixture
    def rig(self) -> BelowRig:
        return ChainOfNodesRig()


def test_a_job_whose_end_is_told_twice_ends_once() -> None:
    """An interrupt between an answer and its record, and then the death of the node."""
    rig = NodeTierRig(engines=1)
    rig.begin_put(keys(2))
    (tell,) = rig.nodes[0].engine.jobs.values()
    assert list(rig.end().outcomes) == [BlockOutcome.OK] * 2
    tell(None)
    assert list(rig.below.poll()) == []
    assert list(rig.get(keys(2))) == [BlockOutcome.OK] * 2


def test_the_twin_lies_stalls_and_fails_when_it_is_told_to() -> None:
    rig = TwinRig()
    rig.put(keys(2))
    rig.twin.lies = {key(0): 0, key(9): 1}
    assert [rig.below.may_hold(h) for h in (key(0), key(1), key(9))] == [0, 1, 1]
    assert list(rig.get([key(9)])) == [BlockOutcome.GONE]
    rig.twin.is_stalled = True
    rig.begin_put(keys(2, 4))
    assert rig.below.wait(1.0)
    assert list(rig.below.poll()) == [] and rig.below.write_state().is_stalled
    rig.twin.is_stalled, rig.twin.outcome = False, BlockOutcome.IO_ERROR
    rig.twin.run()
    (ended,) = rig.below.poll()
    assert set(ended.outcomes) == {BlockOutcome.IO_ERROR} and not rig.below.may_hold(key(2))
    rig.twin.answer = Put.OVER_BUDGET
    assert list(rig.begin_put([key(1), key(5)])) == [Put.ALREADY, Put.OVER_BUDGET]
