"""Events of engines that share a tier behind nodes: each block is named once by each engine."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from support.keys import key, keys
from support.node_rig import BLOCK, SLOTS, NodesRig, NodeTwin

from kvcascade.manager.below import node_events
from kvcascade.manager.below.node_events import NodeEvents
from kvcascade.tiers.base import BlockHash
from kvcascade.tiers.endurance import DayTotals
from kvcascade.tiers.nvme.path.path_messages import ListKeys

FOUND = range(10)


@dataclass
class Router:
    """A follower of one engine's events."""

    node: NodeTwin
    held: set[BlockHash] = field(default_factory=set)

    def follow(self) -> None:
        """Take the events; a block is stored or removed only if that is new."""
        self.node.tier.poll()
        self.node.tier.maintain()
        for event in self.node.tier.take_events():
            blocks = set(event.block_hashes)
            assert len(blocks) == len(event.block_hashes)
            if event.removed:
                assert blocks <= self.held, "it was never named"
                self.held -= blocks
            else:
                assert not blocks & self.held, "it was named twice"
                self.held |= blocks


def put(node: NodeTwin, numbers: range | list[int], ticket: int) -> None:
    for slot, number in enumerate(numbers):
        node.arena.view(slot)[:] = (key(number) * 200)[:BLOCK]
    node.tier.put(ticket, [key(n) for n in numbers], range(len(numbers)))


def join(rig: NodesRig) -> Router:
    """A new engine that has looked once."""
    router = Router(rig.add())
    router.follow()
    return router


def drain(rig: NodesRig, *routers: Router, rounds: int = 40) -> None:
    for _ in range(rounds):
        rig.pump()
        for router in routers:
            router.follow()


@pytest.fixture(params=[False, True], ids=["twin", "writer"])
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> NodesRig:
    monkeypatch.setattr(node_events, "LISTED_BLOCKS", 3)
    return NodesRig(is_real=request.param)


@pytest.mark.parametrize("seed", range(12))
def test_found_blocks_and_later_ones_are_named_once(rig: NodesRig, seed: int) -> None:
    rng = random.Random(seed)
    first = join(rig)
    put(first.node, FOUND, 1)
    drain(rig, first)
    assert first.held == set(keys(len(FOUND)))
    second = join(rig)
    rig.rng = rng
    for ticket in range(2, 10):
        writer = rng.choice([first, second])
        put(writer.node, rng.sample(range(40), 4), ticket)
        for _ in range(rng.randrange(60)):
            rig.step()
            rng.choice([first, second]).follow()
    drain(rig, first, second)
    held = {key(n) for n in range(40) if first.node.tier.may_hold(key(n))}
    assert first.held == second.held == held and held


def test_one_batch_waits_at_a_time_and_the_list_ends(rig: NodesRig) -> None:
    first = join(rig)
    put(first.node, FOUND, 1)
    drain(rig, first)
    second = rig.add()
    for _ in range(5):
        second.tier.maintain()
        rig.pump()
        second.tier.poll()
    named = [len(event.block_hashes) for event in second.tier.feed.events.take()]
    assert named == [3], "the next one is asked for when this one was taken"
    router = Router(second, set(sorted(keys(len(FOUND)))[:3]))
    drain(rig, router)
    assert router.held == set(keys(len(FOUND)))
    assert second.tier.feed.events.question() is None


def test_the_list_goes_on_with_the_next_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_events, "LISTED_BLOCKS", 3)
    rig = NodesRig()
    first = join(rig)
    put(first.node, FOUND, 1)
    drain(rig, first)
    second = join(rig)  # it asks
    rig.twin.is_stalled = True
    rig.pump()
    rig.writer = rig.kill_writer().successor()
    rig.pump()
    second.node.tick(1.0)
    drain(rig, second)
    assert second.held == set(keys(len(FOUND)))
    assert any(isinstance(message, ListKeys) for message in rig.twin.heard)


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_reset_by_another_engine_removes_what_was_named(is_listed: bool) -> None:
    rig = NodesRig(is_real=True)
    first, second = join(rig), join(rig)
    put(first.node, FOUND, 1)
    drain(rig, first, *([second] if is_listed else []))
    assert bool(second.held) == is_listed
    first.node.tier.reset()
    drain(rig, first, second)
    assert second.held == set()
    assert first.held == set(keys(len(FOUND))), "a reset of one's own names no block"
    first.held.clear()
    put(first.node, range(4), 2)
    drain(rig, first, second)
    assert first.held == second.held == set(keys(4))


def test_a_reset_that_another_tier_had_removes_what_was_named() -> None:
    """The engine did not ask for it, so its routers were not told either."""
    rig = NodesRig(is_real=True)
    first, second = join(rig), join(rig)
    put(first.node, FOUND, 1)
    drain(rig, first, second)
    assert first.held == second.held == set(keys(len(FOUND)))
    first.node.tier.pass_on(77)
    second.node.tier.pass_on(77)
    drain(rig, first, second)
    assert first.held == second.held == set()
    put(first.node, range(4), 2)
    drain(rig, first, second)
    assert first.held == second.held == set(keys(4))


def test_without_events_nothing_is_asked_for() -> None:
    events = node_events.NodeEvents("nvme", "NVME", is_wanted=False)
    events.joined()
    events.changed([key(0)], removed=False)
    assert events.question() is None and events.take() == []


def test_one_engine_reports_the_whole_tier() -> None:
    rig = NodesRig(is_real=True)
    one, two = join(rig).node, join(rig).node
    put(one, range(SLOTS), 1)
    rig.pump()
    rig.clock.advance(1.0)
    one.tier.touch(keys(1))  # the writer looks at its clock
    rig.pump()
    for node in (one, two):
        node.tier.maintain()
    states = [node.tier.state()[0] for node in (one, two)]
    assert [state.is_reporter for state in states] == [True, False]
    assert [state.is_path_reporter for state in states] == [True, False]
    assert states[0].blocks == states[1].blocks > 0
    totals = states[1].day
    assert totals is not None and totals.written == SLOTS * BLOCK and not totals.is_whole_day
    one.can_join = False
    one.cut()
    two.tick(1.0)
    two.tier.touch(keys(1))
    rig.pump()
    two.tier.maintain()
    assert two.tier.state()[0].is_reporter, "the first one is gone"


def test_wear_is_told_by_the_engine_that_reports(caplog: pytest.LogCaptureFixture) -> None:
    rig = NodesRig()
    nodes = [join(rig).node, join(rig).node]
    put(nodes[0], range(2), 1)
    rig.pump()
    for node in nodes:
        node.tier.maintain()
        figures = node.tier.feed.figures
        assert figures is not None
        node.tier.feed.figures = type(figures)(
            2, SLOTS, 0, None, day=(1, 800, 0), is_reporter=figures.is_reporter
        )
        assert node.tier.feed.day_totals() == DayTotals(800, 0, is_whole_day=True)
    rig.clock.advance(1000.0)
    for _ in range(3):
        for node in nodes:
            node.tier.maintain()
    assert caplog.text.count("none was read back") == 1


def test_the_capacity_of_a_tier_is_that_of_its_path() -> None:
    """Another engine may have sized the path."""
    rig = NodesRig(is_real=True)
    node = rig.add(slots=4)
    node.tier.maintain()
    rig.pump()
    node.tick(1.1)
    node.tier.maintain()
    (state,) = node.tier.state()
    assert state.capacity_blocks == SLOTS != 4


def named(events: NodeEvents) -> list[tuple[bool, tuple[BlockHash, ...]]]:
    return [(event.removed, event.block_hashes) for event in events.take()]


def test_an_idle_engine_keeps_what_its_routers_do_not_know() -> None:
    """Events of every store and eviction by other engines filled the memory of an idle one."""
    events = NodeEvents("nvme", "NVME", is_wanted=True)
    events.end_list()
    events.changed(keys(8), removed=False)
    assert named(events) == [(False, tuple(keys(8)))]
    for number in range(8, 4000):  # eight blocks fit the tier
        events.changed([key(number)], removed=False)
        events.changed([key(number - 8)], removed=True)
    assert len(events._changed) == 16
    assert named(events) == [(True, tuple(keys(8))), (False, tuple(keys(4000)[-8:]))]


def test_a_block_that_is_as_it_was_is_not_named() -> None:
    events = NodeEvents("nvme", "NVME", is_wanted=True)
    events.end_list()
    events.changed(keys(3), removed=False)
    events.take()
    events.changed([key(1)], removed=True)
    events.changed([key(1)], removed=False)
    events.changed([key(5)], removed=False)
    events.changed([key(5)], removed=True)
    assert events.take() == []


def test_a_step_publishes_a_part_of_many_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_events, "TAKEN_BLOCKS", 10)
    events = NodeEvents("nvme", "NVME", is_wanted=True)
    events.end_list()
    events.changed(keys(25), removed=False)
    parts = [named(events) for _ in range(4)]
    assert [sum(len(blocks) for _, blocks in part) for part in parts] == [10, 10, 5, 0]
    assert {block for part in parts for _, blocks in part for block in blocks} == set(keys(25))
