"""Reads over a link that is slower than what is asked for: no fault of the server."""

from __future__ import annotations

import socket

import pytest
from support.keys import keys
from support.remote_rig import RemoteRig
from support.remote_servers import HOST
from support.remote_twin import RemoteTwin

from kvcascade.tiers.breaker import REST_S
from kvcascade.tiers.remote.base import RemoteOutcome, outcome_of_call
from kvcascade.tiers.remote.engines.resp import Address, Login
from kvcascade.tiers.remote.engines.valkey import ValkeyEngine
from kvcascade.tiers.remote.remote_counters import Verb

OK, ABSENT = RemoteOutcome.OK, RemoteOutcome.ABSENT
BUSY, TIMED_OUT = RemoteOutcome.BUSY, RemoteOutcome.TIMED_OUT
DROPPED, RESTING = RemoteOutcome.DROPPED, RemoteOutcome.RESTING
CALL_S = 0.15
"""Time of one call, of four blocks."""


def reader(deadline_s: float = 2.0) -> RemoteRig:
    """A host whose server has a hundred blocks."""
    rig = RemoteRig(RemoteTwin(names_per_call=4))
    rig.write(keys(100))
    return rig.host(deadline_s=deadline_s)


def openings(rig: RemoteRig) -> int:
    return rig.store.state().openings[Verb.READ]


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([OK, BUSY], OK),
        ([BUSY, ABSENT], BUSY),
        ([BUSY, TIMED_OUT], TIMED_OUT),
        ([OK, BUSY, TIMED_OUT], TIMED_OUT),
        ([ABSENT, ABSENT], ABSENT),
    ],
)
def test_a_server_that_is_busy_after_a_payload_did_not_fail(
    outcomes: list[RemoteOutcome], expected: RemoteOutcome
) -> None:
    assert outcome_of_call(outcomes) is expected


def test_no_call_begins_that_would_be_cut_off() -> None:
    rig, ends_s = reader(), []
    begun_s = rig.clock()

    def move(method: str) -> None:
        if method == "get_into":
            rig.clock.advance(CALL_S)
            ends_s.append(rig.clock() - begun_s)

    rig.twin.before = move
    outcomes = rig.read(keys(100))
    assert set(outcomes) == {OK, DROPPED} and not openings(rig)
    assert 2.0 - 3 * CALL_S < ends_s[-1] < 2.0, "the link is used until then"
    assert outcomes.count(OK) == 4 * len(ends_s), "all that moved is of use"


@pytest.mark.parametrize("outcome", [BUSY, TIMED_OUT])
def test_a_read_with_little_time_says_nothing_about_the_server(outcome: RemoteOutcome) -> None:
    rig = reader()
    rig.twin.fails["get_into"] = outcome
    for ticket in range(1, 9):
        rig.store.get(ticket, keys(4), rig.slots(4), limit_s=0.4)
        assert rig.ended(ticket, Verb.READ) == [outcome] * 4
    assert not openings(rig)


def test_a_read_with_little_time_ends_no_rest() -> None:
    rig = reader()
    rig.twin.fails["get_into"] = TIMED_OUT
    breaker = rig.store._reading.breaker
    breaker.started()  # a read with little time, when another one times out
    assert rig.read(keys(4)) == [TIMED_OUT] * 4 and breaker.is_resting
    rig.store._reading._note_end(DROPPED, 0.1)
    assert breaker.is_resting
    rig.clock.advance(REST_S)
    assert not breaker.is_open, "the next one is the probe"


def test_reads_begin_again_after_one_slow_call() -> None:
    rig = reader()

    def move(method: str) -> None:
        if method == "get_into":
            rig.clock.advance(0.3)

    rig.twin.before = move
    assert rig.read(keys(4)) == [OK] * 4
    rig.twin.before = lambda method: None
    found: list[RemoteOutcome] = []
    for ticket in range(11, 15):
        rig.store.get(ticket, keys(4), rig.slots(4), limit_s=0.45)
        found += rig.ended(ticket, Verb.READ)
    assert found[0] is DROPPED and found[-1] is OK


def test_a_server_that_lets_nothing_through_in_time_rests() -> None:
    rig = reader()
    rig.twin.fails["get_into"] = BUSY
    assert rig.read(keys(16)) == [BUSY] * 12 + [RESTING] * 4
    assert openings(rig) == 1


def test_a_node_that_cannot_be_reached_has_failed_however_short_the_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its time-out is shorter than the time after which a silent node has failed."""

    def nobody(address: object, timeout_s: float) -> socket.socket:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", nobody)
    engine = ValkeyEngine(Address(HOST, 1), Login(connect_timeout_s=0.5, stall_s=10.0))
    assert engine.exist_many(["a"], 10.0) == [TIMED_OUT]
    engine.close()
