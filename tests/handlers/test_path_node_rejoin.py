"""Attempts of a node to join again: writers that end at what it asks, and refusals that stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.keys import key
from support.node_rig import BLOCK, NodesRig, NodeTwin

from kvcascade.handlers.node.path.path_node import SHORT_LINK_S
from kvcascade.handlers.node.path_wire import NodeState
from kvcascade.tiers.base import BlockOutcome
from kvcascade.tiers.nvme.path.path_messages import (
    Commit,
    FromNode,
    FromWriter,
    Hello,
    Refused,
    RefusedWhy,
    Reset,
)

TICK_S = 0.05
MINUTE_TICKS = int(60 / TICK_S)
FEWEST, MOST = int(60 / SHORT_LINK_S), int(60 / SHORT_LINK_S) + 8
"""Paced joins of a minute: those after the longest pause, and a few after shorter ones."""


class Messages:
    """Counts messages of some type; with `kills`, the writer dies before it gets one."""

    def __init__(self, rig: NodesRig, kind: type, *, kills: bool = False) -> None:
        self.n = 0
        self.kills = kills
        self._rig, self._kind = rig, kind
        rig.before_message = self._passes

    def _passes(self, message: FromNode | FromWriter) -> None:
        if isinstance(message, self._kind):
            self.n += 1
            if self.kills:
                self._rig.writer = self._rig.kill_writer().successor()


@pytest.fixture
def rig() -> NodesRig:
    return NodesRig()


@pytest.fixture
def node(rig: NodesRig) -> NodeTwin:
    node = rig.add()
    node.tier.maintain()
    return node


def change_writer(node: NodeTwin) -> None:
    """The writer dies, and the next one is there at once."""
    node.rig.writer = node.rig.kill_writer().successor()
    node.rig.pump()


def put(node: NodeTwin, ticket: int) -> None:
    for slot in range(2):
        node.arena.view(slot)[:] = (key(slot) * 200)[:BLOCK]
    node.tier.put(ticket, [key(0), key(1)], range(2))


def outcomes(node: NodeTwin) -> list[BlockOutcome]:
    node.rig.pump()
    return [outcome for ended in node.tier.poll() for outcome in ended.outcomes]


def wait_for_minutes(node: NodeTwin, minutes: int, every_tick: Callable[[], None]) -> None:
    for _ in range(minutes * MINUTE_TICKS):
        node.tick(TICK_S)
        node.tier.maintain()
        every_tick()


def test_a_writer_that_ends_at_each_commit_costs_few_writes(rig: NodesRig, node: NodeTwin) -> None:
    """The engine is idle, but its blocks are due: it offers them again as soon as it may."""
    commits = Messages(rig, Commit, kills=True)
    ticket, ended = 0, []

    def store() -> None:
        nonlocal ticket
        ended.extend(outcomes(node))
        if node.tier.takes_puts and not node.engine.jobs:
            ticket += 1
            put(node, ticket)

    wait_for_minutes(node, 1, store)
    assert FEWEST <= commits.n <= MOST and set(ended) == {BlockOutcome.CANCELLED}
    commits.kills = False
    wait_for_minutes(node, 1, store)
    assert BlockOutcome.OK in ended, "nothing is lost"


def test_a_writer_that_ends_at_each_reset_is_followed_seldom(rig: NodesRig, node: NodeTwin) -> None:
    resets = Messages(rig, Reset, kills=True)
    node.tier.reset()
    wait_for_minutes(node, 1, lambda: None)
    assert FEWEST <= resets.n <= MOST
    resets.kills = False
    wait_for_minutes(node, 1, lambda: None)
    assert not node.tier._resets_due and node.node.state is NodeState.FOLLOWING


def test_one_change_of_writer_causes_no_pause(rig: NodesRig, node: NodeTwin) -> None:
    """Not even soon after the start, nor if there were short links long ago."""
    change_writer(node)
    node.tick()
    assert node.node.state is NodeState.FOLLOWING
    for _ in range(8):
        change_writer(node)
        node.tick()
        assert node.node.state.value == "orphaned", "one short link follows another"
        node.tick(SHORT_LINK_S)
        assert node.node.state is NodeState.FOLLOWING
    for _ in range(2):
        node.tick(SHORT_LINK_S)
        change_writer(node)
        node.tick()
        assert node.node.state is NodeState.FOLLOWING


def test_other_obstacles_after_a_final_refusal_are_tried_each_second(
    rig: NodesRig, node: NodeTwin
) -> None:
    change_writer(node)
    rig.twin.refusal = Refused(RefusedWhy.NAMESPACE, "remove the directory")
    wait_for_minutes(node, 3, lambda: None)
    hellos = Messages(rig, Hello)
    rig.twin.refusal = Refused(RefusedWhy.OPENING, "try again")
    wait_for_minutes(node, 2, lambda: None)
    assert hellos.n >= 55
