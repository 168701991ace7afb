"""The relation of a node to its writer: refusals, silence, loss, resets, and grants."""

from __future__ import annotations

import errno

import pytest
from support.keys import key, keys
from support.node_rig import BLOCK, CoreWriter, NodesRig, NodeTwin

from kvcascade.errors import InUseError
from kvcascade.handlers.node.path import path_node
from kvcascade.handlers.node.path.path_node import (
    NOBODY_LIMIT_S,
    REASONS_MAX,
    SHORT_LINK_S,
    SILENCE_LIMIT_S,
    WELCOME_LIMIT_S,
)
from kvcascade.handlers.node.path_wire import NodeNote, NodeReady, NodeState
from kvcascade.manager.below.port import Ended, Put
from kvcascade.tiers.base import BlockOutcome
from kvcascade.tiers.breaker import REST_S
from kvcascade.tiers.nvme.path.former_writes import WRITES
from kvcascade.tiers.nvme.path.path_messages import (
    Bad,
    Commit,
    Grant,
    Hello,
    PathOptions,
    Read,
    Refused,
    RefusedWhy,
    Release,
    Reset,
    StillOpening,
    Touch,
    Why,
)
from kvcascade.tiers.nvme.path.writer.path_options import PATH_FOLDER
from kvcascade.tiers.nvme.path.writer.path_plan import capacity_of

OK, GONE, CANCELLED = BlockOutcome.OK, BlockOutcome.GONE, BlockOutcome.CANCELLED


@pytest.fixture
def rig() -> NodesRig:
    return NodesRig()


@pytest.fixture
def node(rig: NodesRig) -> NodeTwin:
    node = rig.add()
    node.tier.maintain()
    return node


def fill(node: NodeTwin, numbers: range) -> None:
    for slot, number in enumerate(numbers):
        node.arena.view(slot)[:] = (key(number) * 200)[:BLOCK]


def put(node: NodeTwin, numbers: range, ticket: int = 1) -> list[Put]:
    fill(node, numbers)
    return list(node.tier.put(ticket, [key(n) for n in numbers], range(len(numbers))))


def end(node: NodeTwin) -> Ended:
    node.rig.pump()
    (ended,) = node.tier.poll()
    return ended


def heard(rig: NodesRig, kind: type) -> list[object]:
    return [message for message in rig.twin.heard if isinstance(message, kind)]


@pytest.mark.parametrize("why", [RefusedWhy.PATHS, RefusedWhy.NAMESPACE])
def test_a_refused_node_is_off_and_says_why_once(rig: NodesRig, why: RefusedWhy) -> None:
    rig.twin.refusal = Refused(why, "give the same list")
    node = rig.add()
    for _ in range(5):
        node.tick(30.0)
    node.tier.maintain()
    assert node.node.state is NodeState.OFF and len(heard(rig, Hello)) == 1
    assert [m.text for m in node.told if isinstance(m, NodeNote)] == ["give the same list"]
    assert put(node, range(2)) == [Put.RESTING] * 2 and node.tier.rests(1)
    assert node.tier.is_blocked and not node.tier.write_state().may_recover


def test_a_node_that_was_served_is_never_off(rig: NodesRig, node: NodeTwin) -> None:
    """One of several folders may be mounted again, or a damaged directory removed."""
    put(node, range(2))
    assert end(node).outcomes == [OK, OK]
    rig.writer = rig.kill_writer().successor()
    rig.twin.refusal = Refused(RefusedWhy.NAMESPACE, "mount its disk")
    for _ in range(3):
        node.tick(1.0)
    node.node.not_linked("mount its disk", is_final=True)
    assert node.node.state is not NodeState.OFF
    node.tier.get(2, 1, keys(2), [8, 9])
    assert end(node).outcomes == [OK, OK], "reads go on"
    rig.twin.refusal = None
    node.tick(1.0)
    assert node.node.state is NodeState.FOLLOWING


def test_a_flush_may_wait_for_a_writer_only_while_one_may_come(
    rig: NodesRig, node: NodeTwin
) -> None:
    assert not node.tier.write_state().is_joining
    writer = rig.kill_writer()
    rig.pump()
    node.tier.maintain()
    assert node.tier.feed.state is NodeState.ORPHANED and node.tier.write_state().is_joining
    rig.writer = writer.successor()
    node.tick(1.0)
    node.tier.maintain()
    assert node.node.state is NodeState.FOLLOWING and not node.tier.write_state().is_joining
    rig.twin.refusal = Refused(RefusedWhy.PATHS, "give the same list")
    other = rig.add()
    other.tier.maintain()
    assert other.node.state is NodeState.OFF and not other.tier.write_state().is_joining
    rig.kill_writer()
    late = rig.add()
    late.tier.maintain()
    assert late.tier.feed.state is NodeState.JOINING and not late.tier.write_state().is_joining


def test_writers_that_end_at_once_are_followed_by_others_every_few_seconds(
    rig: NodesRig, node: NodeTwin
) -> None:
    """As one that fails at each commit: the payload would be written anew each time."""
    for _ in range(1200):  # a minute
        if node.node.state is not NodeState.ORPHANED:
            rig.writer = rig.kill_writer()
            rig.pump()
        node.tick(0.05)
    assert 60 / SHORT_LINK_S <= len(heard(rig, Hello)) <= 60 / SHORT_LINK_S + 6


def test_one_change_of_the_writer_costs_no_pause(rig: NodesRig, node: NodeTwin) -> None:
    for _ in range(3):
        node.tick(SHORT_LINK_S)
        rig.writer = rig.kill_writer()
        rig.pump()
        node.tick(0.05)
        assert node.node.state is NodeState.FOLLOWING


def test_an_engine_that_leads_opens_a_damaged_index_twice_a_minute(
    rig: NodesRig, node: NodeTwin
) -> None:
    rig.kill_writer()
    rig.pump()
    node.can_join, attempts = False, 0  # its own writer is what fails
    for _ in range(600):
        node.tick(0.5)
        if node.is_joining:
            attempts, node.is_joining = attempts + 1, False
            node.node.not_linked("the index is damaged", is_final=True)
    assert 10 <= attempts <= 20


def test_a_refusal_for_good_is_asked_for_twice_a_minute(rig: NodesRig, node: NodeTwin) -> None:
    """Each time the writer opens the index."""
    rig.writer = rig.kill_writer()
    rig.twin.refusal = Refused(RefusedWhy.NAMESPACE, "the index is damaged")
    for _ in range(600):
        node.tick(0.5)
    assert 10 <= len(heard(rig, Hello)) <= 20


def test_a_store_thread_that_raises_fails_its_blocks(rig: NodesRig, node: NodeTwin) -> None:
    """Their outcome opens the breaker, so that they are not tried 20 times a second."""
    put(node, range(2))
    while not node.writes:
        rig.step()
    node._cancels[node.writes.pop()]()  # what the thread reports then, too
    assert end(node).outcomes == [BlockOutcome.IO_ERROR] * 2
    assert node.tier.links[0].demote_failed_blocks == 2 and node.tier.is_blocked


@pytest.mark.parametrize("why", [RefusedWhy.CLOSING, RefusedWhy.OPENING, RefusedWhy.FAILED])
def test_a_writer_that_cannot_serve_now_is_asked_again(rig: NodesRig, why: RefusedWhy) -> None:
    rig.twin.refusal = Refused(why, "try again")
    node = rig.add()
    node.tick(1.0)
    rig.twin.refusal = None
    node.tick(1.0)
    assert node.node.state is NodeState.FOLLOWING


def test_a_writer_of_a_newer_version_is_asked_to_retire_once(rig: NodesRig) -> None:
    rig.twin.refusal = rig.twin.refusal_to_retire = Refused(RefusedWhy.PROTOCOL, "run one version")
    node = rig.add()
    for _ in range(4):
        node.tick(2.0)
    assert rig.twin.retirements == 1 and node.node.state is NodeState.OFF


def test_every_writer_of_an_older_version_is_asked_to_retire(rig: NodesRig) -> None:
    """Each of the older engines may lead once the one before it has closed."""
    rig.twin.refusal = Refused(RefusedWhy.PROTOCOL, "run one version")
    node = rig.add()
    for asked in (1, 2, 3):
        for _ in range(2):
            node.tick(2.0)
        assert rig.twin.retirements == asked and node.node.state is NodeState.JOINING
        rig.writer = rig.kill_writer().successor()
        rig.pump()
    rig.twin.refusal = None
    for _ in range(2):
        node.tick(2.0)
    assert node.node.state is NodeState.FOLLOWING


def test_a_namespace_that_fails_to_open_is_logged_once_and_stops_no_start(rig: NodesRig) -> None:
    rig.twin.refusal = Refused(RefusedWhy.FAILED, "look at the disk")
    node = rig.add()
    for _ in range(40):
        node.tick(1.0)
        node.tier.maintain()
    notes = [m for m in node.told if isinstance(m, NodeNote)]
    assert [m.text for m in notes] == ["look at the disk"]
    assert node.node.state is NodeState.JOINING and not node.tier.feed.misconfigured
    assert 30 < len(heard(rig, Hello)) <= 45, "the pause between attempts is bounded"


def test_nobody_answers_and_the_log_says_so_once(rig: NodesRig) -> None:
    writer = rig.twin
    rig.writer = None
    node = rig.add()
    for _ in range(40):
        node.tick(1.0)
    texts = [m.text for m in node.told if isinstance(m, NodeNote)]
    assert texts == ["there is no writer"] and 40 > NOBODY_LIMIT_S
    rig.writer = writer
    node.tick(1.0)
    assert node.node.state is NodeState.FOLLOWING


def test_a_writer_that_accepts_and_says_nothing_is_left(rig: NodesRig) -> None:
    rig.twin.is_stalled = True
    node = rig.add()
    node.tick(WELCOME_LIMIT_S + 1)
    rig.twin.go_on()
    node.tick(1.0)
    assert node.node.state is NodeState.FOLLOWING and len(heard(rig, Hello)) == 1


def test_gets_miss_from_a_reset_to_its_epoch(rig: NodesRig, node: NodeTwin) -> None:
    put(node, range(2))
    assert end(node).outcomes == [OK, OK]
    rig.twin.is_stalled = True
    node.tier.get(2, 1, keys(1), [8])
    rig.step()  # the order is there, the read waits
    node.tier.reset()
    node.tier.get(3, 1, keys(1), [9])
    assert node.tier.may_hold(key(0)) == 0
    rig.pump()
    assert {e.ticket: list(e.outcomes) for e in node.tier.poll()} == {2: [GONE], 3: [GONE]}
    rig.twin.go_on()
    rig.pump()
    node.tier.maintain()
    assert not node.tier._resets_due and not node.tier.maintain()


def test_a_reset_that_was_lost_comes_first_at_the_next_writer(
    rig: NodesRig, node: NodeTwin
) -> None:
    put(node, range(2))
    end(node)
    rig.twin.is_stalled = True
    node.tier.reset()
    rig.pump()
    dead = rig.kill_writer()
    rig.pump()
    node.tier.get(5, 1, keys(1), [8])
    assert end(node).outcomes == [GONE]
    rig.writer = dead.successor()
    node.tick(0.1)
    assert [type(m) for m in rig.twin.heard[:2]] == [Hello, Reset]
    node.tier.maintain()
    assert not node.tier._resets_due and not rig.twin.held


@pytest.mark.parametrize("writer", ["stopped", "gone", "refuses"])
def test_a_node_whose_reset_waits_shows_life(rig: NodesRig, writer: str) -> None:
    """It would be ended once a minute; the next one sends the reset first if it is answered."""
    if writer == "refuses":
        rig.twin.refusal = Refused(RefusedWhy.PATHS, "give the same list")
    node = rig.add()
    if writer == "stopped":
        rig.twin.is_stalled = True
    elif writer == "gone":
        rig.kill_writer()
    node.tier.reset()
    rig.pump()
    for _ in range(3):
        node.told.clear()
        for _ in range(60):
            node.tick(1.0)
        assert 4 <= [type(m) for m in node.told].count(NodeReady) <= 6
    node.tier.maintain()
    assert node.tier._resets_due, "it is not carried out"


def test_a_silent_writer_rests_writes_and_its_late_grant_is_released(
    rig: NodesRig, node: NodeTwin
) -> None:
    put(node, range(2))
    end(node)
    rig.twin.is_stalled = True
    put(node, range(4, 8), ticket=2)
    rig.pump()
    node.tick(SILENCE_LIMIT_S + 1)
    assert end(node).outcomes == [CANCELLED] * 4
    assert node.node.state is NodeState.SILENT and not node.tier.takes_puts
    node.tier.get(3, 1, keys(2), [8, 9])
    assert end(node).outcomes == [OK, OK], "reads go on"
    rig.twin.go_on()
    rig.pump()
    node.tier.maintain()
    assert node.tier.feed.state is NodeState.FOLLOWING and node.tier.takes_puts
    assert not rig.twin.granted and len(heard(rig, Release)) == 1
    assert len([m for m in node.told if isinstance(m, NodeNote)]) == 2, "one line each way"


def test_nothing_is_committed_under_the_grants_of_a_dead_writer(
    rig: NodesRig, node: NodeTwin
) -> None:
    put(node, range(4))
    while not node.writes:
        rig.step()
    running = node.writes.pop()  # a thread writes it now
    dead = rig.kill_writer()
    rig.writer = dead.successor()
    rig.pump()
    for _ in range(3):
        node.tick(1.0)
    assert not heard(rig, Hello), "it joins when its running writes have ended"
    node.writes.append(running)
    assert end(node).outcomes == [CANCELLED] * 4
    node.tick(0.1)
    assert heard(rig, Hello) and not heard(rig, Commit) and not rig.twin.held
    assert put(node, range(4), ticket=2) == [Put.RESTING] * 4, "the engine does not know yet"
    node.tier.maintain()
    put(node, range(4), ticket=3)
    assert end(node).outcomes == [OK] * 4


def test_a_node_hangs_up_when_its_last_write_has_ended(rig: NodesRig, node: NodeTwin) -> None:
    """The writer lives, and would grant the slots of a node that hung up again."""
    put(node, range(4))
    while not node.writes:
        rig.step()
    running = node.writes.pop()  # a thread writes it now
    node.cut()
    for _ in range(3):
        node.tick(1.0)
    assert len(rig.twin.granted) == 4 and len(heard(rig, Hello)) == 1
    node.writes.append(running)
    assert end(node).outcomes == [CANCELLED] * 4
    assert len(rig.twin.granted) == 4
    node.tick()
    assert not rig.twin.granted and len(heard(rig, Hello)) == 2
    node.tier.maintain()
    put(node, range(4), ticket=2)
    assert end(node).outcomes == [OK] * 4


def test_a_later_writer_learns_when_the_last_write_under_a_dead_one_has_ended(
    rig: NodesRig, node: NodeTwin
) -> None:
    def is_held() -> bool:
        try:
            rig.fs.lock(rig.roots[0] / PATH_FOLDER / WRITES).release()
        except InUseError:
            return True
        return False

    put(node, range(4))
    while not node.writes:
        rig.step()
    running = node.writes.pop()  # a thread writes it now
    assert is_held()
    rig.kill_writer()
    rig.pump()
    node.tick(1.0)
    assert is_held(), "the write has not ended"
    node.writes.append(running)
    rig.pump()
    node.tick()
    assert not is_held()


@pytest.mark.parametrize(
    ("why", "outcome", "answer", "no_space", "over_budget"),
    [
        (Why.FULL, BlockOutcome.NO_SPACE, Put.FULL, 2, 0),
        (Why.LATER, CANCELLED, Put.LATER, 0, 0),
        (Why.BUDGET, BlockOutcome.REFUSED, Put.LATER, 0, 2),
        (Why.RESTING, CANCELLED, Put.RESTING, 0, 0),
    ],
)
def test_each_reason_for_no_slot_has_its_outcome(
    rig: NodesRig,
    node: NodeTwin,
    why: Why,
    outcome: BlockOutcome,
    answer: Put,
    no_space: int,
    over_budget: int,
) -> None:
    rig.twin.why = why
    put(node, range(2))
    assert end(node).outcomes == [outcome] * 2
    assert node.tier.wants_again(key(0)) is (why is Why.BUDGET)
    (counters,) = node.tier.links
    assert counters.demote_no_space_blocks == no_space
    assert counters.demote_over_budget_blocks == over_budget
    assert node.tier.room(4) == 0 and put(node, range(2), ticket=2) == [answer] * 2
    is_blocked = why in (Why.FULL, Why.RESTING)
    assert node.tier.is_blocked == is_blocked, "blocks may leave memory unwritten"
    assert counters.demote_openings == (why is Why.RESTING)
    rig.twin.why = None
    rig.clock.advance(REST_S if why is Why.RESTING else 1.0)
    assert not node.tier.is_blocked and node.tier.room(4) == 4, "it is tried again"
    assert put(node, range(2), ticket=3) == [Put.STARTED] * 2
    assert end(node).outcomes == [OK] * 2


def test_a_block_that_another_engine_stored_is_held(rig: NodesRig, node: NodeTwin) -> None:
    other = rig.add()
    other.tier.maintain()
    put(node, range(3))
    put(other, range(2))
    rig.pump()
    outcomes = [ended.outcomes for twin in (node, other) for ended in twin.tier.poll()]
    assert sorted(map(len, outcomes)) == [2, 3]
    flat = [outcome for each in outcomes for outcome in each]
    assert flat.count(OK) == 3 and flat.count(BlockOutcome.HELD) + flat.count(CANCELLED) == 2


@pytest.mark.parametrize(
    ("operation", "code", "is_of_device"),
    [
        ("pwritev", errno.EIO, True),
        ("open", errno.EMFILE, False),
        ("open", errno.ENFILE, False),
        ("pwritev", errno.ENOMEM, False),
    ],
)
def test_a_failed_write_is_released_and_rests_the_tier(
    rig: NodesRig, node: NodeTwin, operation: str, code: int, is_of_device: bool
) -> None:
    """The writer rests the path for all engines only if the device failed."""
    rig.fs.fail(operation, code)
    put(node, range(2))
    assert end(node).outcomes == [BlockOutcome.IO_ERROR] * 2
    (release,) = heard(rig, Release)
    assert isinstance(release, Release) and not rig.twin.granted
    assert release.has_failed is is_of_device
    assert not node.tier.takes_puts and node.tier.write_state().rest_left_s > 0
    assert put(node, range(2), ticket=2) == [Put.RESTING] * 2


def test_a_damaged_block_leaves_the_tier(
    rig: NodesRig, node: NodeTwin, caplog: pytest.LogCaptureFixture
) -> None:
    put(node, range(2))
    end(node)
    node.tier.take_events()
    slot, _ = rig.twin.held[key(1)]
    path = rig.twin.folder / "segments" / "000000.safetensors"
    rig.fs.damage(path, 4096 + slot * BLOCK, b"\xff" * 16)
    node.tier.get(2, 1, keys(2), [8, 9])
    assert end(node).outcomes == [OK, BlockOutcome.CORRUPT]
    assert caplog.text.count(str(path)) == 1, "the log names the file"
    node.tier.maintain()
    assert len(heard(rig, Bad)) == 1 and node.tier.take_lost() == [key(1)]
    assert [node.tier.may_hold(h) for h in keys(2)] == [1, 0]
    (event,) = node.tier.take_events()
    assert event.removed and event.block_hashes == (key(1),)


def test_uses_and_bytes_read_are_reported(rig: NodesRig, node: NodeTwin) -> None:
    put(node, range(3))
    end(node)
    node.tier.touch(keys(3))
    node.tier.note_request(keys(2), keys(2))
    node.tier.get(2, 1, keys(3), [8, 9, 10])
    end(node)
    node.tick(2.0)
    told, settled = (keys(3), False, False), (keys(2), False, True)
    assert rig.twin.uses == [told, settled, told], "a read is a use, too"
    assert rig.twin.read_bytes == 3 * BLOCK and len(heard(rig, Read)) == 1
    assert len(heard(rig, Touch)) == 3


def test_blocks_from_before_a_reset_are_not_committed_after_it(
    rig: NodesRig, node: NodeTwin
) -> None:
    other = rig.add()
    other.tier.reset()
    rig.pump()
    put(node, range(2))  # this engine has not seen the reset
    assert end(node).outcomes == [GONE, GONE]
    assert not rig.twin.held and not rig.twin.granted and len(heard(rig, Grant)) == 1
    assert node.tier.maintain()
    put(node, range(2), ticket=2)
    assert end(node).outcomes == [OK, OK]


def test_blocks_from_between_two_resets_are_not_committed_after_them() -> None:
    """They have no epoch yet, and must not get that of the second reset."""
    rig = NodesRig(is_real=True)
    node = rig.add()
    node.tier.maintain()
    writer = rig.writer
    assert isinstance(writer, CoreWriter)
    writer.is_stalled = True
    node.tier.reset()
    put(node, range(2))
    node.tier.reset()
    rig.pump()
    writer.go_on()  # it sees all of them at once
    rig.pump()
    (namespace,) = rig.core.namespaces.values()
    assert namespace.epoch == 2 and namespace.table.count() == 0
    node.tier.poll()
    node.tier.maintain()
    put(node, range(2), ticket=2)
    assert end(node).outcomes == [OK, OK]


def test_uses_of_more_blocks_than_a_message_holds_keep_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as those that an engine reports when it ends, hottest block first."""
    monkeypatch.setattr(path_node, "MAX_KEYS_PER_MESSAGE", 3)
    rig = NodesRig(is_real=True)
    node = rig.add()
    node.tier.maintain()
    put(node, range(8))
    assert end(node).outcomes == [OK] * 8
    node.tier.touch(keys(8))
    node.tier.maintain()
    rig.pump()
    (namespace,) = rig.core.namespaces.values()
    coldest_first = [namespace.presence.find(key(number)) for number in reversed(range(8))]
    assert namespace.recency.victims(8) == coldest_first


@pytest.mark.parametrize("policy", ["lru", "prefix"])
def test_a_long_request_leaves_from_its_end(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """`prefix` has learnt that prompts of two blocks come back, and those of ten do not. It would
    keep the last two blocks if they came as a request."""
    monkeypatch.setattr(path_node, "MAX_KEYS_PER_MESSAGE", 10)
    capacity = capacity_of(40, 4, BLOCK, policy=policy)
    rig = NodesRig(PathOptions(capacity, policy=policy, segment_bytes=4 * BLOCK), is_real=True)
    node = rig.add(slots=160)
    node.tier.maintain()
    for first in range(1000, 9000, 100):
        for numbers in range(first, first + 2), range(first + 2, first + 12):
            put(node, numbers)
            assert len(end(node).outcomes) == len(numbers)
            node.tier.note_request([key(number) for number in numbers], ())
        node.tier.note_request(keys(first - 500, first - 498), ())
    put(node, range(22))
    assert end(node).outcomes == [OK] * 22
    node.tier.note_request(keys(22), ())
    rig.pump()
    (namespace,) = rig.core.namespaces.values()
    slots = [namespace.presence.find(key(number)) for number in reversed(range(22))]
    assert [slot for slot in namespace.recency.victims(160) if slot in slots] == slots


def test_a_request_is_cut_to_the_longest_chain(
    rig: NodesRig, node: NodeTwin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(path_node, "MAX_CHAIN_HEADS", 3)
    node.engine.tell(Touch(list(keys(5)), is_chain=True))
    rig.pump()
    assert rig.twin.uses == [(keys(3), True, False)]


def test_jobs_of_a_node_that_died_failed_and_its_reset_goes_to_the_next(
    rig: NodesRig, node: NodeTwin
) -> None:
    put(node, range(2))
    end(node)
    put(node, range(4, 6), ticket=2)
    node.tier.get(3, 1, keys(2), [8, 9])
    node.tier.reset()
    node.engine.die()
    failed = [BlockOutcome.IO_ERROR] * 2
    assert [list(ended.outcomes) for ended in node.tier.poll()] == [failed, failed]
    assert node.tier.may_hold(key(0)) == 0 and rig.twin.presence.epoch == 0
    node.tier.maintain()
    rig.pump()
    node.tier.maintain()
    assert rig.twin.presence.epoch == 1 and not node.tier._resets_due


def waits_for_an_opening(rig: NodesRig) -> NodeTwin:
    """A node whose namespace is being opened for longer than the log waits."""
    rig.twin.is_stalled = True
    node = rig.add()
    for _ in range(40):
        node.inbox.append(StillOpening())
        node.tick(1.0)
    return node


def test_a_node_waits_while_the_writer_opens_its_namespace(rig: NodesRig) -> None:
    node = waits_for_an_opening(rig)
    texts = [m.text for m in node.told if isinstance(m, NodeNote)]
    assert len(texts) == 1 and "opens the namespace" in texts[0]
    rig.twin.go_on()
    rig.pump()
    assert node.node.state is NodeState.FOLLOWING and len(heard(rig, Hello)) == 1


def test_a_long_opening_that_fails_is_logged_with_each_reason_once(rig: NodesRig) -> None:
    node = waits_for_an_opening(rig)
    reasons = ["the writer is closing", *(["look at the disk"] * 3)]
    for reason in reasons:
        node.inbox.append(Refused(RefusedWhy.FAILED, reason))
        node.tick(1.0)
        node.inbox.append(StillOpening())
        node.tick(1.0)
    opening, *said = [m.text for m in node.told if isinstance(m, NodeNote)]
    assert "opens the namespace" in opening and said == reasons[:2]


def test_a_node_gives_only_so_many_reasons(rig: NodesRig) -> None:
    node = waits_for_an_opening(rig)
    for number in range(2 * REASONS_MAX):
        node.inbox.append(Refused(RefusedWhy.FAILED, f"reason {number}"))
        node.tick(1.0)
    assert len([m for m in node.told if isinstance(m, NodeNote)]) == REASONS_MAX
