"""A remote tier below a manager: questions, deadlines, second uses, and a node that dies."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.clock import ManualClock
from support.keys import key, keys
from support.remote_rig import PAYLOAD_BYTES, THROUGH
from support.remote_tier_rig import RemoteTierRig, is_asking
from support.remote_twin import RemoteTwin

from kvcascade.config.remote import WriteWhen
from kvcascade.handlers.node.node_keeper import JOBS_AT_MOST
from kvcascade.handlers.node.path_wire import NodeReady
from kvcascade.handlers.node.remote.remote_node import LIFE_LIMIT_S
from kvcascade.handlers.node.remote.remote_wire import AskJob, RemoteNote
from kvcascade.manager.below.port import Put
from kvcascade.tiers.base import BlockHash, BlockOutcome
from kvcascade.tiers.breaker import FAILURES_TO_OPEN, REST_S
from kvcascade.tiers.remote.base import RemoteOutcome
from kvcascade.tiers.remote.presence import ABSENT_S, HELD_S

OK, GONE, REFUSED = BlockOutcome.OK, BlockOutcome.GONE, BlockOutcome.REFUSED


@pytest.fixture
def rig() -> RemoteTierRig:
    """A tier whose node has asked the server for the last reset."""
    rig = RemoteTierRig()
    rig.pump()
    return rig


def put(rig: RemoteTierRig, ticket: int, n: int) -> list[Put]:
    for slot, block_hash in enumerate(keys(n)):
        rig.arena.view(slot)[:] = (block_hash * 512)[: len(rig.arena.view(slot))]
    return list(rig.tier.put(ticket, keys(n), range(n)))


def stored(rig: RemoteTierRig, n: int) -> None:
    """Blocks that another host has stored."""
    other = RemoteTierRig(rig.twin, rig.clock)
    other.pump()
    put(other, 1, n)
    other.pump()


def answered(rig: RemoteTierRig, n: int, after_s: float, first: int = 0) -> None:
    """Blocks that are there, up to number `n`, and whose lookup took so long."""
    stored(rig, n)
    assert all(is_asking(rig.tier, h, "request") for h in keys(first, n))
    rig.tier.maintain()
    rig.node.work()
    rig.calls.step()
    rig.clock.advance(after_s)
    rig.client.poll()
    rig.node.work()
    rig.pump()
    assert all(rig.tier.may_hold(h) for h in keys(n))


def test_the_next_poll_takes_in_an_answer_that_somebody_waits_for(rig: RemoteTierRig) -> None:
    assert is_asking(rig.tier, key(0), "request")
    rig.tier.maintain()
    while rig.step():
        pass
    rig.node.work()
    rig.tier.maintain()
    assert is_asking(rig.tier, key(0), "request"), "upkeep has listened in this millisecond"
    rig.tier.poll()
    assert not is_asking(rig.tier, key(0), "request")


def probed(rig: RemoteTierRig, block_hash: BlockHash) -> None:
    """A block that is asked for though its request does not wait, nor the next one."""
    assert not is_asking(rig.tier, block_hash, "request")
    assert not is_asking(rig.tier, block_hash, "another request with this prefix")
    assert not is_asking(rig.tier, key(99), "one with another prefix, which is not asked for")
    rig.tier.maintain()
    rig.pump()


class TestQuestions:
    def test_an_unknown_block_is_asked_for_at_the_end_of_the_step(self, rig: RemoteTierRig) -> None:
        stored(rig, 3)
        tier = rig.tier
        assert [tier.may_hold(h) for h in keys(4)] == [0] * 4
        assert [is_asking(tier, h, "request") for h in keys(4)] == [True] * 4
        assert rig.twin.calls["exist_many"] == 0
        tier.maintain()
        rig.pump()
        assert rig.twin.calls["exist_many"] == 1, "one batch"
        assert [is_asking(tier, h, "request") for h in keys(4)] == [False] * 4
        assert [tier.may_hold(h) for h in keys(4)] == [1, 1, 1, 0]

    def test_chains_of_two_requests_are_searched_each_by_itself(self) -> None:
        rig = RemoteTierRig(RemoteTwin(asks_in_one_trip=False))
        rig.pump()
        stored(rig, 8)
        for number in range(10):
            is_asking(rig.tier, key(100 + number), "nobody had this")
            is_asking(rig.tier, key(number), "a known prefix")
        rig.tier.maintain()
        rig.pump()
        assert [rig.tier.may_hold(h) for h in keys(10)] == [1] * 8 + [0] * 2
        assert not any(rig.tier.may_hold(key(100 + n)) for n in range(10))

    @pytest.mark.parametrize("in_one_trip", [True, False])
    def test_blocks_that_are_looked_up_again_in_a_step_are_found(self, in_one_trip: bool) -> None:
        """vLLM does so if a later KV group makes the prefix shorter."""
        rig = RemoteTierRig(RemoteTwin(asks_in_one_trip=in_one_trip))
        rig.pump()
        stored(rig, 8)
        for block_hash in [*keys(10), *keys(6)]:
            assert is_asking(rig.tier, block_hash, "request")
        rig.tier.maintain()
        rig.pump()
        assert [rig.tier.may_hold(h) for h in keys(10)] == [1] * 8 + [0] * 2

    def test_a_block_of_several_requests_is_sent_once(
        self, rig: RemoteTierRig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sent: list[AskJob] = []
        monkeypatch.setattr(rig.node, "order", sent.append)
        for owner, asked in {"first": keys(2), "second": keys(3)}.items():
            assert all(is_asking(rig.tier, each, owner) for each in asked)
        rig.tier.maintain()
        assert [job.requests for job in sent] == [[keys(2), [key(2)]]]

    def test_what_is_not_answered_by_the_deadline_is_absent(self, rig: RemoteTierRig) -> None:
        assert is_asking(rig.tier, key(0), "request")
        rig.tier.maintain()
        rig.clock.advance(1.9)
        assert is_asking(rig.tier, key(0), "request")
        rig.clock.advance(0.2)
        assert not is_asking(rig.tier, key(0), "request") and not rig.tier.may_hold(key(0))
        assert not is_asking(rig.tier, key(0), "request"), "nor is it asked for again at once"
        rig.pump()
        assert not is_asking(rig.tier, key(0), "request")

    def test_after_a_deadline_without_an_answer_nothing_is_asked_for_a_while(
        self, rig: RemoteTierRig
    ) -> None:
        """The node says that its server rests at about the same time, perhaps a little later."""
        tier, limit_s = rig.tier, rig.options.deadline_s
        assert is_asking(tier, key(1), "first")
        tier.maintain()
        rig.clock.advance(limit_s)
        assert not is_asking(tier, key(1), "first") and not is_asking(tier, key(2), "second")
        calls = rig.twin.calls["exist_many"]
        rig.clock.advance(limit_s)
        probed(rig, key(2))
        assert rig.twin.calls["exist_many"] == calls + 1

    def test_no_request_waits_for_a_probe(self, rig: RemoteTierRig) -> None:
        """A server that has stopped costs one deadline, however often it is tried."""
        tier = rig.tier
        rig.twin.fails["exist_many"] = RemoteOutcome.TIMED_OUT
        assert is_asking(tier, key(0), "first")
        tier.maintain()
        rig.pump()
        for number in range(1, 4):
            rig.clock.advance(REST_S + 1.0)
            rig.pump()
            calls = rig.twin.calls["exist_many"]
            probed(rig, key(number))
            assert rig.twin.calls["exist_many"] == calls + 1
        del rig.twin.fails["exist_many"]
        rig.clock.advance(REST_S + 1.0)
        rig.pump()
        probed(rig, key(5))
        assert not tier.rests(1) and is_asking(tier, key(6), "the next one")

    def test_a_read_that_timed_out_leaves_what_is_there_unknown(self, rig: RemoteTierRig) -> None:
        """The next question is the server's own to answer, and no request waits for it."""
        answered(rig, 3, after_s=0.1)
        rig.twin.fails["get_into"] = RemoteOutcome.TIMED_OUT
        rig.tier.get(1, 1, keys(2), range(2))
        rig.pump()
        assert rig.tier.rests(1) and not any(rig.tier.may_hold(h) for h in keys(3))
        calls = rig.twin.calls["exist_many"]
        probed(rig, key(2))
        assert rig.twin.calls["exist_many"] == calls + 1
        assert rig.tier.may_hold(key(2)) and not rig.tier.rests(1)

    def test_a_server_that_failed_reads_answers_the_next_question_itself(
        self, rig: RemoteTierRig
    ) -> None:
        """An answer from before the failure says nothing about the server of now."""
        answered(rig, 3, after_s=0.1)
        rig.twin.fails |= dict.fromkeys(("get_into", "exist_many"), RemoteOutcome.IO_ERROR)
        for ticket in range(FAILURES_TO_OPEN):
            rig.tier.get(ticket, 1, keys(1), [0])
            rig.pump()
        rig.tier.poll()
        rig.clock.advance(REST_S + 0.1)
        assert rig.tier.rests(1) and not any(rig.tier.may_hold(h) for h in keys(3))
        calls = rig.twin.calls["exist_many"]
        probed(rig, key(2))
        assert rig.twin.calls["exist_many"] == calls + 1
        assert rig.tier.rests(1) and not rig.tier.may_hold(key(2))

    def test_nothing_is_asked_twice_while_the_answer_is_fresh(self, rig: RemoteTierRig) -> None:
        def looked() -> list[bool]:
            found = [is_asking(rig.tier, h, "request") for h in keys(4)]
            rig.tier.maintain()
            rig.pump()
            return found

        stored(rig, 3)
        assert looked() == [True] * 4
        calls = rig.twin.calls["exist_many"]
        rig.clock.advance(ABSENT_S - 0.1)
        assert looked() == [False] * 4 and rig.twin.calls["exist_many"] == calls
        rig.clock.advance(0.2)
        assert looked() == [False] * 3 + [True]
        rig.clock.advance(HELD_S)
        assert looked() == [True] * 4 and rig.twin.calls["exist_many"] == calls + 2

    def test_the_next_turn_of_a_conversation_costs_one_request(self) -> None:
        rig = RemoteTierRig(RemoteTwin(asks_in_one_trip=False))
        rig.pump()
        answered(rig, 40, after_s=0.1)
        rig.twin.asked.clear()
        assert [is_asking(rig.tier, h, "request") for h in keys(60)] == [False] * 40 + [True] * 20
        rig.tier.maintain()
        rig.pump()
        assert [rig.tier.may_hold(h) for h in keys(60)] == [1] * 40 + [0] * 20
        assert len(rig.twin.asked) == 1

    def test_a_read_has_what_its_lookup_left_of_the_deadline(self, rig: RemoteTierRig) -> None:
        answered(rig, 2, after_s=1.5)
        rig.tier.get(1, 1, keys(2), range(2))
        rig.clock.advance(0.4)
        rig.node.work()
        assert not rig.answers
        rig.clock.advance(0.2)
        rig.pump()
        (ended,) = rig.tier.poll()
        assert list(ended.outcomes) == [BlockOutcome.REFUSED] * 2

    def test_the_next_read_of_a_block_has_a_whole_deadline(self, rig: RemoteTierRig) -> None:
        answered(rig, 2, after_s=1.5)
        for ticket in (1, 2):
            rig.tier.get(ticket, 1, keys(2), range(2))
            rig.clock.advance(0.6)
            rig.pump()
        ends = {ended.ticket: set(ended.outcomes) for ended in rig.tier.poll()}
        assert ends == {1: {BlockOutcome.REFUSED}, 2: {OK}}

    def test_a_slow_answer_to_a_request_that_left_spoils_no_later_read(
        self, rig: RemoteTierRig
    ) -> None:
        """Nor that of blocks in the same job that were just answered for."""
        answered(rig, 1, after_s=1.95)
        rig.clock.advance(20.0)
        answered(rig, 5, after_s=0.1, first=1)
        rig.tier.get(1, 1, keys(5), range(5))
        rig.clock.advance(0.15)
        rig.pump()
        (ended,) = rig.tier.poll()
        assert set(ended.outcomes) == {OK} and not rig.tier.rests(1)

    @pytest.mark.parametrize(("turn_s", "outcome"), [(1.9, BlockOutcome.REFUSED), (2.0, OK)])
    def test_what_a_lookup_left_counts_for_one_deadline(
        self, rig: RemoteTierRig, turn_s: float, outcome: BlockOutcome
    ) -> None:
        """A request may wait that long for its turn to read, and no server is asked meanwhile."""
        answered(rig, 1, after_s=1.5)
        rig.clock.advance(turn_s)
        rig.tier.get(1, 1, keys(1), range(1))
        rig.clock.advance(0.6)
        rig.pump()
        (ended,) = rig.tier.poll()
        assert list(ended.outcomes) == [outcome]

    def test_a_block_that_was_found_long_ago_is_read(self, rig: RemoteTierRig) -> None:
        """Its request may have waited for its turn longer than an answer counts."""
        answered(rig, 1, after_s=0.0)
        rig.clock.advance(31.0)
        assert not rig.tier.may_hold(key(0))
        rig.tier.get(1, 1, keys(1), range(1))
        rig.pump()
        (ended,) = rig.tier.poll()
        assert list(ended.outcomes) == [BlockOutcome.OK]

    def test_nothing_is_read_for_a_lookup_that_took_the_whole_deadline(
        self, rig: RemoteTierRig
    ) -> None:
        answered(rig, 2, after_s=2.0)
        calls = dict(rig.twin.calls)
        rig.tier.get(1, 1, keys(2), range(2))
        rig.pump()
        (ended,) = rig.tier.poll()
        assert list(ended.outcomes) == [BlockOutcome.CANCELLED] * 2 and rig.twin.calls == calls

    def test_a_server_that_fails_is_left_alone(self, rig: RemoteTierRig) -> None:
        rig.twin.fails["exist_many"] = RemoteOutcome.TIMED_OUT
        assert is_asking(rig.tier, key(0), "request")
        rig.tier.maintain()
        rig.pump()
        assert not is_asking(rig.tier, key(0), "request")
        assert not is_asking(rig.tier, key(1), "request"), "it rests"
        calls = rig.twin.calls["exist_many"]
        del rig.twin.fails["exist_many"]
        rig.clock.advance(6.0)
        rig.pump()
        probed(rig, key(1))
        assert rig.twin.calls["exist_many"] == calls + 1

    def test_without_a_node_blocks_are_absent(self, rig: RemoteTierRig) -> None:
        rig.client.is_up = False
        assert is_asking(rig.tier, key(0), "request")
        rig.tier.maintain()
        assert not is_asking(rig.tier, key(0), "request") and not rig.tier.may_hold(key(0))

    def test_other_media_are_not_asked(self, rig: RemoteTierRig) -> None:
        assert not is_asking(rig.tier, key(0), "request", frozenset({"CPU"}))
        assert is_asking(rig.tier, key(0), "request", frozenset({"CPU", "REMOTE"}))


class TestWrites:
    def test_by_default_a_block_is_written_at_its_second_use(self) -> None:
        rig = RemoteTierRig(options=replace(THROUGH, when=WriteWhen.SECOND_TOUCH))
        rig.pump()
        assert put(rig, 1, 2) == [Put.UNWANTED] * 2
        assert rig.tier.wants_again(key(0))
        assert put(rig, 2, 2) == [Put.STARTED] * 2
        assert not rig.tier.wants_again(key(0)), "it is on its way"
        rig.pump()
        assert not rig.tier.wants_again(key(0)) and rig.tier.may_hold(key(0)) == 1

    @pytest.mark.parametrize("failing", ["exist_many", "get_into"])
    def test_a_server_that_timed_out_is_not_sent_the_same_blocks_again(self, failing: str) -> None:
        rig = RemoteTierRig(options=replace(THROUGH, renew_after_s=3600.0))
        rig.pump()
        put(rig, 1, 2)
        rig.pump()
        rig.twin.fails[failing] = RemoteOutcome.TIMED_OUT
        if failing == "exist_many":
            assert is_asking(rig.tier, key(9), "request")
            rig.tier.maintain()
        else:
            rig.tier.get(2, 1, keys(1), range(1))
        rig.pump()
        assert rig.tier.rests(1) and not rig.tier.may_hold(key(1)), "its answers are forgotten"
        assert not rig.tier.wants_again(key(0)) and not rig.tier.wants_again(key(1))
        rig.clock.advance(3601.0)
        assert rig.tier.wants_again(key(1))

    def test_it_takes_all_while_nothing_leaves_a_block_out(self) -> None:
        rig = RemoteTierRig(options=replace(THROUGH, queue_bytes=2 * PAYLOAD_BYTES))
        assert not rig.tier.takes_all, "the server was not asked yet"
        rig.pump()
        assert rig.tier.takes_all
        assert put(rig, 1, 3) == [Put.STARTED] * 2 + [Put.UNWANTED]
        assert not rig.tier.takes_all, "the queue is full"
        rig.pump()
        assert rig.tier.takes_all
        for when in (WriteWhen.SECOND_TOUCH, WriteWhen.OFF):
            other = RemoteTierRig(options=replace(THROUGH, when=when))
            other.pump()
            assert not other.tier.takes_all

    def test_many_writes_leave_room_for_questions_and_reads(self) -> None:
        """Else blocks that are there count as absent while the uploads last."""
        rig, held = RemoteTierRig(), 4
        rig.pump()
        answered(rig, held, 0.0)
        for at in range(held, held + JOBS_AT_MOST):
            rig.tier.put(at, [keys(at + 1)[at]], [at % 32])
        assert is_asking(rig.tier, key(99), "request")
        rig.tier.maintain()
        assert is_asking(rig.tier, key(99), "request"), "it was asked for"
        rig.tier.get(1000, 1, keys(held), range(32, 32 + held))
        rig.pump()
        (read,) = [ended for ended in rig.tier.poll() if ended.is_get]
        assert list(read.outcomes) == [OK] * held

    def test_an_engine_that_only_reads_wants_nothing(self) -> None:
        rig = RemoteTierRig(options=replace(THROUGH, when=WriteWhen.OFF))
        rig.pump()
        assert not rig.tier.wants_again(key(0)) and put(rig, 1, 2) == [Put.UNWANTED] * 2
        assert not rig.twin.calls["put"]

    def test_what_failed_may_leave_the_first_tier(self, rig: RemoteTierRig) -> None:
        rig.twin.fails["put"] = RemoteOutcome.NO_SPACE
        assert put(rig, 1, 2) == [Put.STARTED] * 2
        rig.pump()
        (ended,) = rig.tier.poll()
        assert list(ended.outcomes) == [REFUSED] * 2
        assert rig.tier.links[0].demote_no_space_blocks == 2 and not rig.tier.may_hold(key(0))

    def test_before_the_server_was_asked_nothing_is_written(self) -> None:
        rig = RemoteTierRig()
        assert put(rig, 1, 2) == [Put.UNWANTED] * 2
        assert rig.tier.state()[0].remote == RemoteNote(
            None, rig.tier.feed.totals().verbs, {"resting": 2}
        )


class TestNode:
    def test_jobs_of_a_node_that_dies_have_failed(self, rig: RemoteTierRig) -> None:
        put(rig, 1, 2)
        rig.tier.get(2, 1, [key(5)], [9])
        rig.client.die()
        ends = {ended.ticket: list(ended.outcomes) for ended in rig.tier.poll()}
        assert ends == {1: [REFUSED] * 2, 2: [BlockOutcome.IO_ERROR]}

    def test_openings_of_the_breaker_of_reads_are_counted(self, rig: RemoteTierRig) -> None:
        for ticket in range(FAILURES_TO_OPEN):
            rig.tier.get(ticket, 1, [key(5)], [9])
            rig.client.die()
            rig.tier.poll()
        assert rig.tier.rests(1) and rig.tier.links[0].promote_openings == 1

    def test_without_a_node_the_tier_is_blocked_and_all_verbs_rest(
        self, rig: RemoteTierRig
    ) -> None:
        """After five kills in a row no process was there for a minute, and no metric said so."""

        def figures() -> tuple[bool, set[bool]]:
            (state,) = rig.tier.state()
            assert state.remote is not None and state.remote.verbs
            return state.is_blocked, {totals.is_resting for totals in state.remote.verbs.values()}

        assert figures() == (False, {False})
        rig.client.die()
        assert figures() == (True, {True})
        rig.pump()
        assert figures() == (False, {False}), "the next node has said something"

    def test_totals_of_dead_nodes_count(self, rig: RemoteTierRig) -> None:
        put(rig, 1, 2)
        rig.pump()
        rig.clock.advance(2.0)
        rig.pump()
        before = rig.tier.feed.totals().verbs["write"].payload_bytes
        rig.client.die()
        rig.pump()
        assert before > 0
        assert rig.tier.feed.totals().verbs["write"].payload_bytes == before

    def test_a_reset_is_repeated_by_the_next_node(self, rig: RemoteTierRig) -> None:
        put(rig, 1, 2)
        rig.pump()
        rig.twin.fails["advance"] = RemoteOutcome.IO_ERROR
        rig.tier.reset()
        rig.pump()
        rig.client.die()
        del rig.twin.fails["advance"]
        rig.tier.maintain()
        rig.pump()
        other = RemoteTierRig(rig.twin, rig.clock)
        other.pump()
        assert is_asking(other.tier, key(0), "request")
        other.tier.maintain()
        other.pump()
        assert not other.tier.may_hold(key(0))

    def test_the_next_node_is_told_what_there_was(self, rig: RemoteTierRig) -> None:
        feed = rig.tier.feed
        for memory in (b"seen", b""):
            rig.twin.memory = lambda known=memory: known  # type: ignore[method-assign,misc]
            rig.clock.advance(2.0)
            rig.pump()
            rig.client.die()
            assert feed.node_memory == b"seen"
        assert not feed.has_reset
        rig.tier.pass_on(77)
        rig.pump()
        assert not feed.has_reset, "the reset is another host's"
        rig.tier.reset()
        assert feed.has_reset, "before the node has heard of it"

    def test_a_node_whose_reset_waits_shows_life(self, rig: RemoteTierRig) -> None:
        """It would be ended once a minute."""
        rig.tier.reset()
        told: list[object] = []
        rig.node._tell = told.append
        for _ in range(60):
            rig.node.work()
            rig.clock.advance(1.0)
        assert told.count(NodeReady()) == 5
        rig.clock.advance(LIFE_LIMIT_S)
        rig.node.work()
        assert told.count(NodeReady()) == 5, "the call may never return"
        rig.pump()
        told.clear()
        rig.clock.advance(60.0)
        rig.node.work()
        assert NodeReady() not in told


class TestResets:
    def test_a_reset_by_another_host_is_seen_and_has_its_mark(self, rig: RemoteTierRig) -> None:
        other = RemoteTierRig(rig.twin, rig.clock)
        other.tier.reset(77)
        other.pump()
        rig.clock.advance(6.0)
        is_asking(rig.tier, key(0), "request")
        rig.tier.maintain()
        rig.pump()
        assert rig.tier.maintain()
        assert list(rig.tier.take_marks()) == [77] and list(rig.tier.take_marks()) == []

    def test_a_block_that_is_stored_anew_is_written_beside_its_older_write(
        self, rig: RemoteTierRig
    ) -> None:
        assert put(rig, 1, 1) == [Put.STARTED]
        rig.node.work()
        rig.tier.reset()
        assert put(rig, 2, 1) == [Put.STARTED]
        rig.pump()
        ends = {ended.ticket: list(ended.outcomes) for ended in rig.tier.poll()}
        assert ends == {1: [REFUSED], 2: [OK]} and rig.tier.may_hold(key(0)) == 1
        rig.tier.get(3, 1, keys(1), [5])
        rig.pump()
        assert [list(ended.outcomes) for ended in rig.tier.poll()] == [[OK]]

    def test_a_mark_is_carried_out_once(self, rig: RemoteTierRig) -> None:
        rig.tier.reset(77)
        rig.pump()
        generation = dict(rig.twin.counters)
        other = RemoteTierRig(rig.twin, rig.clock)
        other.tier.pass_on(77)
        other.pump()
        assert rig.twin.counters == generation
        other.tier.pass_on(78)
        other.pump()
        assert rig.twin.counters != generation

    def test_who_passes_a_mark_on_sees_a_later_reset(self, rig: RemoteTierRig) -> None:
        """Blocks of between the two are older than the last reset."""
        other = RemoteTierRig(rig.twin, rig.clock)
        other.tier.reset(99)
        other.pump()
        rig.tier.pass_on(77)
        rig.pump()
        assert rig.tier.maintain()
        assert list(rig.tier.take_marks()) == [99]

    @pytest.mark.parametrize("method", ["counter", "advance"])
    @pytest.mark.parametrize("outcome", [RemoteOutcome.CORRUPT, RemoteOutcome.ABSENT])
    def test_counters_that_are_no_numbers_are_asked_for_every_few_seconds(
        self, rig: RemoteTierRig, method: str, outcome: RemoteOutcome
    ) -> None:
        """As when another program has written under their names."""
        rig.pump()
        rig.twin.fails[method] = outcome
        rig.tier.reset()
        rig.twin.calls.clear()
        for step in range(1200):  # a minute
            rig.clock.advance(0.05)
            rig.tier.may_hold(key(step), None, step)
            rig.tier.maintain()
            rig.pump()
        assert 60 / REST_S / 2 <= rig.twin.calls[method] <= 2 * 60 / REST_S
        rig.twin.fails.clear()
        rig.clock.advance(REST_S)
        rig.pump()
        rig.tier.maintain()
        assert rig.tier.feed.mark is not None

    def test_of_two_resets_at_once_both_hosts_forget_what_is_between_them(
        self, rig: RemoteTierRig
    ) -> None:
        other = RemoteTierRig(rig.twin, rig.clock)
        for each in (rig, other):
            each.pump()
        rig.twin.fails["advance"] = RemoteOutcome.IO_ERROR
        rig.tier.reset()
        rig.pump()
        assert put(rig, 1, 1) == [Put.STARTED]  # after this host's reset, before the other's
        rig.clock.advance(1.0)
        other.tier.reset()
        rig.twin.fails.clear()
        rig.clock.advance(60.0)
        other.pump()
        rig.pump()
        assert rig.tier.maintain(), "its blocks may be older than the other's reset"
        rig.clock.advance(6.0)
        is_asking(other.tier, key(0), "request")
        other.tier.maintain()
        other.pump()
        assert not other.tier.may_hold(key(0)) and not rig.twin.held

    @pytest.mark.parametrize(("age_s", "is_kept"), [(30.0, False), (90.0, True)])
    def test_blocks_of_before_the_first_answer_outlive_old_resets_only(
        self, age_s: float, is_kept: bool
    ) -> None:
        """Clocks of hosts differ, so a reset shortly before the engine's start counts."""
        twin, clock = RemoteTwin(), ManualClock()
        first = RemoteTierRig(twin, clock)
        first.tier.reset()
        first.pump()
        clock.advance(age_s)
        twin.fails["counter"] = RemoteOutcome.IO_ERROR
        late = RemoteTierRig(twin, clock)
        late.pump()
        is_asking(late.tier, key(0), "request")
        twin.fails.clear()
        clock.advance(60.0)
        is_asking(late.tier, key(1), "request")
        late.tier.maintain()
        late.pump()
        assert late.tier.maintain() is not is_kept

    def test_a_server_that_lost_everything_was_not_reset(self, rig: RemoteTierRig) -> None:
        rig.tier.reset(77)
        rig.pump()
        rig.twin.held.clear()
        rig.twin.counters.clear()
        rig.clock.advance(6.0)
        is_asking(rig.tier, key(0), "request")
        rig.tier.maintain()
        rig.pump()
        assert not rig.tier.maintain()
        assert put(rig, 1, 1) == [Put.STARTED]
        rig.pump()
        assert rig.tier.may_hold(key(0)) == 1
