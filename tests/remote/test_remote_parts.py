"""Search of a chain, rates, the memory of answers, and peers that do not keep the protocol."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import count
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clock import ManualClock
from support.keys import key, keys
from support.remote_rig import RemoteRig
from support.remote_servers import HOST, peer
from support.remote_twin import RemoteTwin
from support.waiting import WAIT_LIMIT_S, wait_until

from kvcascade.config.options import At
from kvcascade.config.remote import WriteWhen, parse_remote
from kvcascade.tiers.base import RESET_TICKS_PER_S
from kvcascade.tiers.remote import presence
from kvcascade.tiers.remote.base import (
    Cause,
    PrivateBuffer,
    RemoteOutcome,
)
from kvcascade.tiers.remote.engines import resp, valkey
from kvcascade.tiers.remote.engines.resp import (
    Address,
    Login,
    RespBrokenError,
    RespConnection,
    RespError,
)
from kvcascade.tiers.remote.engines.valkey import Nodes, ValkeyEngine, hash_slot
from kvcascade.tiers.remote.engines.valkey_questions import CLUSTER_SLOTS, slots_of
from kvcascade.tiers.remote.lane import TokenBucket
from kvcascade.tiers.remote.presence import ChainSearch, Presence, PresenceMemory
from kvcascade.tiers.remote.remote_counters import Verb
from kvcascade.tiers.remote.remote_options import open_remote_engine
from kvcascade.tiers.remote.shared_generation import (
    GENERATION_FRESH_S,
    IN_USE_S,
    REFRESH_S,
    SharedGeneration,
)
from kvcascade.tiers.remote.uploads import Offer, OfferRule


@given(st.integers(1, 3000), st.integers(0, 3000))
def test_a_search_finds_the_end_in_few_requests(length: int, held: int) -> None:
    held = min(held, length)
    search, asked = ChainSearch(length), 0
    while probes := search.probes():
        assert all(0 <= block < length for block in probes) and len(probes) <= presence.WAYS
        asked += len(probes)
        search.learn({block: block < held for block in probes})
    assert search.held == held
    assert asked <= 1 + 4 * presence.WAYS


@given(st.lists(st.booleans(), min_size=1, max_size=200))
def test_a_chain_with_holes_ends_the_search_too(there: list[bool]) -> None:
    search, rounds = ChainSearch(len(there)), 0
    while probes := search.probes():
        search.learn({block: there[block] for block in probes})
        rounds += 1
    assert search.held == 0 if not there[0] else there[search.held - 1]
    assert rounds <= 8


def test_a_bucket_lets_through_its_rate() -> None:
    clock = ManualClock()
    bucket = TokenBucket(1000.0, clock)
    moved = 0
    for _ in range(1000):
        while bucket.take(300):
            moved += 300
        clock.advance(0.01)
    assert 10_000 <= moved <= 11_600
    assert all(TokenBucket(None, clock).take(1 << 40) for _ in range(3))


def test_answers_count_for_their_time_and_their_number_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ManualClock()
    memory = PresenceMemory(clock)
    memory.note(0, [key(1)], [key(2)])
    assert [memory.of(k) for k in keys(1, 4)] == [
        Presence.HELD,
        Presence.ABSENT,
        Presence.UNKNOWN,
    ]
    clock.advance(6.0)
    assert [memory.of(k) for k in keys(1, 3)] == [Presence.HELD, Presence.UNKNOWN]
    clock.advance(30.0)
    assert memory.of(key(1)) is Presence.UNKNOWN
    monkeypatch.setattr(presence, "MAX_REMEMBERED", 10)
    memory.note(0, keys(100), ())
    assert sum(memory.of(k) is Presence.HELD for k in keys(100)) == 10
    memory.clear()
    memory.note(0, keys(3), ())
    assert memory.of(key(0)) is Presence.UNKNOWN, "an answer from before is not kept"


def test_what_was_written_is_not_pushed_out_by_answers_about_other_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(presence, "MAX_REMEMBERED", 10)
    clock = ManualClock()
    memory = PresenceMemory(clock)
    rule = OfferRule(WriteWhen.THROUGH, 1 << 20, 4096, memory, 600.0, clock)
    assert rule.answer(key(0), is_open=True) is Offer.QUEUED
    rule.end([key(0)], [key(0)], 0)
    memory.note(0, [key(0)], ())
    clock.advance(60.0)
    for start in range(100, 200, 5):
        memory.note(0, (), keys(start, start + 5))
    assert memory.last(key(0)) is Presence.UNKNOWN
    assert rule.answer(key(0), is_open=True) is Offer.HELD
    clock.advance(600.0)
    assert rule.may_want(key(0)), "it is renewed"
    rule.end([key(0)], [key(0)], 0)
    memory.note(0, (), [key(0)])
    assert rule.may_want(key(0)), "the server said that it is gone"
    rule.end([key(0)], [key(0)], 0)
    memory.note(0, [key(0)], ())
    memory.clear()
    assert rule.may_want(key(0)), "the blocks of before a reset are gone"


def test_an_answer_that_is_renewed_is_the_last_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "MAX_REMEMBERED", 10)
    memory = PresenceMemory(ManualClock())
    memory.note(0, keys(10), ())
    memory.note(0, [key(0)], ())
    memory.note(0, keys(20, 25), ())
    assert memory.of(key(0)) is Presence.HELD and memory.of(key(1)) is Presence.UNKNOWN


def test_hash_slots_are_those_of_the_cluster_specification() -> None:
    assert hash_slot("123456789") == 0x31C3
    assert hash_slot("foo") == 12182


def test_a_prompt_that_nobody_had_costs_one_request_whenever_it_comes() -> None:
    """The generation is read in the background while prompts come."""
    twin = RemoteTwin(asks_in_one_trip=False)
    rig = RemoteRig(twin)
    asked = rig.store.counters.verbs
    for prompt in range(10):
        for _ in range(12):  # a node looks after its store many times a second
            rig.clock.advance(0.5)
            rig.store.poll()
        twin.calls.clear()
        assert rig.look(keys(1000 * prompt, 1000 * prompt + 100)) == [RemoteOutcome.ABSENT] * 100
        assert asked[Verb.LOOKUP].requests == prompt + 1
        assert prompt == 0 or twin.calls.total() == 1, "no read of the generation"


def test_without_prompts_the_generation_is_read_no_more() -> None:
    rig = RemoteRig(RemoteTwin(asks_in_one_trip=False))
    reads = rig.store.counters.verbs[Verb.GENERATION]
    assert rig.look(keys(1)) == [RemoteOutcome.ABSENT]
    for _ in range(1000):
        rig.clock.advance(0.5)
        rig.store.poll()
    assert 10 < (calls := reads.calls) <= 1 + IN_USE_S / REFRESH_S
    assert rig.look(keys(1, 2)) == [RemoteOutcome.ABSENT] and reads.calls == calls + 1
    assert reads.requests == rig.twin.calls["counter"] == 2 * reads.calls


class CountedLock:
    """A lock that counts the threads that came to it, those that wait included."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.came: list[int] = []

    def __enter__(self) -> None:
        self.came.append(threading.get_ident())
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def test_threads_that_wait_for_the_generation_share_its_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a stopped server would cost each of them a time-out, one after the other."""
    twin, begun, goes_on = RemoteTwin(), threading.Event(), threading.Event()

    def stall(method: str) -> None:
        begun.set()
        goes_on.wait(WAIT_LIMIT_S)

    twin.before, twin.fails["counter"] = stall, RemoteOutcome.TIMED_OUT
    generation = SharedGeneration(
        twin, "space/generation", "space/resets", ManualClock(), lambda: 1.0
    )
    monkeypatch.setattr(generation, "_lock", lock := CountedLock())
    with ThreadPoolExecutor(5) as threads:
        first = threads.submit(generation.current, 1.0)
        assert begun.wait(WAIT_LIMIT_S)
        others = [threads.submit(generation.current, 1.0) for _ in range(4)]
        wait_until(lambda: len(lock.came) == 5)
        goes_on.set()
        outcomes = {f.result(WAIT_LIMIT_S).outcome for f in (first, *others)}
    assert outcomes == {RemoteOutcome.TIMED_OUT} and twin.calls["counter"] == 1
    twin.fails.clear()
    assert generation.current(1.0).outcome is RemoteOutcome.OK, "and it is asked anew"


def test_the_age_of_the_generation_counts_from_the_question() -> None:
    """The answer may be slow, and another host may reset right after it was given."""
    twin, clock = RemoteTwin(), ManualClock()
    twin.before = lambda method: clock.advance(GENERATION_FRESH_S / 4)
    generation = SharedGeneration(twin, "space/generation", "space/resets", clock, lambda: 1.0)
    assert generation.current(10.0).outcome is RemoteOutcome.OK
    asked = twin.calls["counter"]
    clock.advance(GENERATION_FRESH_S * 0.6)
    assert generation.current(10.0).outcome is RemoteOutcome.OK
    assert twin.calls["counter"] > asked


def test_a_reset_while_a_question_ends_is_not_taken_for_done() -> None:
    """Else the scheduler would be told so, and would not repeat it if the node died."""
    generation: SharedGeneration
    looks = count()

    def clock() -> float:
        if next(looks) == 2:  # the answer has come, and is not yet taken in
            generation.reset(7)
        return 1000.0

    twin = RemoteTwin()
    generation = SharedGeneration(twin, "space/generation", "space/resets", clock, lambda: 1.0)
    assert generation.current(1.0).outcome is RemoteOutcome.BUSY
    assert generation.is_reset_pending and generation.value is None and generation.own_mark is None
    assert generation.current(1.0).outcome is RemoteOutcome.OK and generation.own_mark == 7


def test_a_reset_by_a_clock_that_was_ahead_hides_no_later_one() -> None:
    """The later reset is carried out. Its new mark, which is passed on in turn, is no other."""
    twin, wall = RemoteTwin(), [2_000_000_000.0]
    generation = SharedGeneration(twin, "g", "m", ManualClock(), lambda: wall[0])
    generation.reset()
    ahead, wall[0] = generation.current(1.0), wall[0] - 7200.0
    generation.reset(int(wall[0] * RESET_TICKS_PER_S), is_new=False)
    assert (later := generation.current(1.0)).value > ahead.value
    generation.reset(generation.mark, is_new=False)
    assert generation.current(1.0).value == later.value


BAD_REPLIES = (
    b"",
    b"\r\n",
    b"$5\r\nhello\r\n",
    b"*2\r\n$-1\r\n$7\r\nabc\r\n\r\n",
    b"*2\r\n:1\r\n:2\r\n",
    b"*2\r\n$99999999999999\r\n",
    b":12x\r\n",
    b"x" * 200_000,
    b"*2\r\n$320\r\n" + bytes(320) + b"garbage instead of an end",
    b"-MOVED\r\n" * 3,
    b"-MOVED 1 nowhere:0\r\n" * 3,
    b"-MOVED 1 6379\r\n" * 3,
    b"-MOVED 1 :\r\n" * 3,
    b"-MOVED 1 127.0.0.1:99999\r\n" * 3,
    b"-MOVED 1 127.0.0.1:" + b"9" * 5000 + b"\r\n",
    b"-MOVED 1 " + b"n" * 100 + b":1\r\n",
    b"-MOVED 1 no\0where:1\r\n",
    b"+OK\r\n$20\r\n99999999999999999999\r\n",
    b"+OK\r\n$5000\r\n" + b"9" * 5000 + b"\r\n",
    b"+OK\r\n:9223372036854775808\r\n",
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
)


@pytest.mark.parametrize("reply", BAD_REPLIES, ids=range(len(BAD_REPLIES)))
def test_a_peer_that_breaks_the_protocol_is_an_outcome(reply: bytes) -> None:
    def serve(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(reply)

    bad = {*RemoteOutcome} - {RemoteOutcome.OK, RemoteOutcome.EXISTS}
    with peer(serve) as engine:
        assert engine.get_into(["a"], [PrivateBuffer(4096)], WAIT_LIMIT_S)[0] in bad
        assert engine.exist_many(["a", "b"], WAIT_LIMIT_S)[0] in bad
        assert engine.counter("a", 1, WAIT_LIMIT_S).outcome in bad
        assert engine.advance("a", 1, WAIT_LIMIT_S).outcome in bad


MAPS = (
    b"*1\r\n*3\r\n:-9000000000000000\r\n:16383\r\n*2\r\n$1\r\nh\r\n:1\r\n",
    b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$1\r\nh\r\n*0\r\n",
    b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$1\r\nh\r\n:99999\r\n",
    b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$-1\r\n:1\r\n",
    b"*1\r\n*3\r\n$1\r\na\r\n:16383\r\n*2\r\n$1\r\nh\r\n:1\r\n",
    b"*1\r\n*3\r\n:0\r\n:16383\r\n:1\r\n",
    b":1\r\n",
)


@pytest.mark.parametrize("reply", MAPS, ids=range(len(MAPS)))
def test_a_map_of_a_cluster_that_is_none_is_not_taken_in(reply: bytes) -> None:
    """Each key is moved to the same server."""

    def serve(connection: socket.socket) -> None:
        port = connection.getsockname()[1]
        while got := connection.recv(65536):
            is_map = b"CLUSTER" in got
            connection.sendall(reply if is_map else b"-MOVED 1 %s:%d\r\n" % (HOST.encode(), port))

    with peer(serve) as engine:
        for _ in range(2):
            assert engine.exist_many(["a"], WAIT_LIMIT_S) == [RemoteOutcome.BUSY]
            listed = {batch.outcome for batch in engine.list_objects("", WAIT_LIMIT_S)}
            assert RemoteOutcome.OK not in listed


def test_a_node_of_a_cluster_without_the_key_tells_its_settings() -> None:
    memory = b"maxmemory:0\r\nmaxmemory_policy:noeviction\r\n"

    def serve(connection: socket.socket) -> None:
        while got := connection.recv(65536):
            settings = b"$%d\r\n%b\r\n" % (len(memory), memory)
            connection.sendall(settings if b"INFO" in got else b"-MOVED 1 127.0.0.1:1\r\n")

    with peer(serve) as engine:
        assert engine.explain(2.0) is Cause.KEEPS_ALL


def test_a_counter_that_was_not_raised_is_no_value() -> None:
    def serve(connection: socket.socket) -> None:
        for reply in (b"$-1\r\n", b":-5\r\n", b":-4\r\n"):
            connection.recv(65536)
            connection.sendall(reply)

    with peer(serve) as engine:
        assert engine.advance("a", 1, WAIT_LIMIT_S).outcome is RemoteOutcome.CORRUPT


class TestAddresses:
    """A name with more than one address."""

    @pytest.fixture(autouse=True)
    def _resolver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The name "many" has these addresses; all but that of this host are dead."""
        self.clock, self.hosts = ManualClock(), [f"192.0.2.{i}" for i in range(1, 6)]
        resolve, connect = socket.getaddrinfo, socket.socket.connect

        def resolved(host: str, *asked: Any, **words: Any) -> list[Any]:
            found = self.hosts if host == "many" else [host]
            return [place for each in found for place in resolve(each, *asked, **words)]

        def connected(one: socket.socket, address: tuple[str, int]) -> None:
            if address[0] != HOST:
                self.clock.advance(one.gettimeout() or math.inf)
                raise TimeoutError
            connect(one, address)

        monkeypatch.setattr(socket, "getaddrinfo", resolved)
        monkeypatch.setattr(socket.socket, "connect", connected)
        monkeypatch.setattr(resp, "time", SimpleNamespace(monotonic=self.clock))

    def test_dead_ones_cost_one_limit_together(self) -> None:
        for login, limit_s in ((Login(1.0, 9.0), 9.0), (Login(9.0, 9.0), 1.0)):
            begun_s = self.clock.now_s
            with pytest.raises(TimeoutError):
                RespConnection(Address("many", 1), login, begun_s + limit_s)
            assert self.clock.now_s - begun_s == pytest.approx(1.0)

    def test_one_behind_dead_ones_is_found(self) -> None:
        self.hosts.append(HOST)
        with socket.create_server((HOST, 0)) as server:
            port = server.getsockname()[1]
            RespConnection(Address("many", port), Login(1.0, 9.0), self.clock.now_s + 9.0).close()
        assert self.clock.now_s < 1001.0


class _Connection(RespConnection):
    """A connection to a node that tells nobody about its cluster."""

    def __init__(self) -> None:
        self.is_closed = False
        self.opened_s = 0.0

    def send(self, *commands: object) -> None:
        """Nothing is sent."""

    def reply(self) -> Any:
        raise RespError(b"NOPERM")

    def close(self) -> None:
        self.is_closed = True


def test_a_password_is_read_for_each_connection() -> None:
    """A password that is rotated is used from the next connection on."""
    said: list[bytes] = []
    has_hung_up = threading.Event()

    def serve(connection: socket.socket) -> None:
        said.append(connection.recv(65536))
        connection.sendall(b"+OK\r\n")
        connection.recv(65536)
        connection.sendall(b":2\r\n")
        connection.close()
        has_hung_up.set()

    passwords = iter(["old", "new"])
    how = Login(WAIT_LIMIT_S, WAIT_LIMIT_S, password=lambda: next(passwords))
    with peer(serve, how) as engine:
        for _ in range(2):
            assert engine.exist_many(["a"], WAIT_LIMIT_S) == [RemoteOutcome.OK]
            # Else the second call may use the first connection.
            assert has_hung_up.wait(WAIT_LIMIT_S)
            has_hung_up.clear()
    assert [b"old" in said[0], b"new" in said[1]] == [True, True]


def test_connections_are_not_used_after_a_long_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something between the hosts may have dropped them without a word."""
    connections = 0

    def serve(connection: socket.socket) -> None:
        nonlocal connections
        connections += 1
        while connection.recv(65536):
            connection.sendall(b":2\r\n")

    with peer(serve) as engine:
        for limit_s, expected in (60.0, 1), (60.0, 1), (-1.0, 2):
            monkeypatch.setattr("kvcascade.tiers.remote.engines.valkey.IDLE_LIMIT_S", limit_s)
            assert engine.exist_many(["a"], WAIT_LIMIT_S) == [RemoteOutcome.OK]
            assert connections == expected


def test_a_server_that_became_a_replica_is_left() -> None:
    """The name of the primary may lead to another server by then."""
    connections = 0

    def serve(connection: socket.socket) -> None:
        nonlocal connections
        connections += 1
        connection.recv(65536)
        connection.sendall(b"-READONLY You can't write against a read only replica.\r\n")
        connection.recv(65536)

    with peer(serve) as engine:
        for expected in 1, 2:
            assert engine.remove(["a"], WAIT_LIMIT_S) == [RemoteOutcome.DENIED]
            assert connections == expected


@pytest.mark.parametrize("first", ["remove", "counter"])
def test_no_connection_to_a_server_that_became_a_replica_is_used_again(first: str) -> None:
    """One probe finds that out for all of them: those that rest, and those that are in use."""
    accepted: list[socket.socket] = []

    def answer(connection: socket.socket, said: bytes) -> None:
        while connection.recv(65536):
            connection.sendall(said)

    def serve(connection: socket.socket) -> None:
        said = b"-READONLY You can't write.\r\n" if len(accepted) < 4 else b":2\r\n"
        accepted.append(opened.enter_context(connection.dup()))
        thread = threading.Thread(target=answer, args=(accepted[-1], said), daemon=True)
        thread.start()
        opened.callback(thread.join, 10.0)

    with ExitStack() as opened, peer(serve) as engine:
        nodes, address = engine._nodes, engine._nodes.first
        rest, other, in_use, probe = (nodes.borrow(address, monotonic() + 5.0) for _ in range(4))
        for connection in (rest, other, probe):
            nodes.give_back(address, connection)
        if first == "remove":
            assert engine.remove(["a"], WAIT_LIMIT_S) == [RemoteOutcome.DENIED]
        else:
            assert engine.counter("a", 1, WAIT_LIMIT_S).outcome is RemoteOutcome.DENIED
        nodes.give_back(address, in_use)
        for _ in range(2):
            assert engine.remove(["a"], WAIT_LIMIT_S) == [RemoteOutcome.OK]
        assert len(accepted) == 5, "later connections are kept"


def test_a_user_without_the_right_to_write_keeps_all_connections() -> None:
    accepted: list[socket.socket] = []

    def serve(connection: socket.socket) -> None:
        accepted.append(connection)
        while connection.recv(65536):
            connection.sendall(b"-NOPERM User kv has no permissions\r\n")

    with peer(serve) as engine:
        for _ in range(3):
            assert engine.remove(["a"], WAIT_LIMIT_S) == [RemoteOutcome.DENIED]
        assert len(accepted) == 1


def test_nodes_that_left_a_cluster_are_forgotten() -> None:
    nodes = Nodes(Address("seed", 1), Login(1.0, 1.0))
    for number in range(100):
        nodes.note_move(_Connection(), Address("seed", 1), 7, Address(f"node-{number}", 1))
        nodes.give_back(Address(f"node-{number}", 1), _Connection())
    assert len(nodes._known) == 2 and len(nodes._idle) == 1


def test_a_node_that_left_its_cluster_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on, and knows no other node. First that is one with slots, then the seed."""
    outside: set[str] = set()
    owner: list[Address] = []

    def node(name: str, *, has_slots: bool) -> Callable[[socket.socket], None]:
        def serve(connection: socket.socket) -> None:
            while got := connection.recv(65536):
                place = HOST.encode(), owner[0].port
                if name in outside:
                    connection.sendall(b"-CLUSTERDOWN Hash slot not served\r\n")
                elif has_slots:
                    connection.sendall(b":2\r\n")
                elif b"CLUSTER" in got:
                    pair = b"*2\r\n$9\r\n%s\r\n:%d\r\n" % place
                    connection.sendall(b"*1\r\n*3\r\n:0\r\n:16383\r\n" + pair)
                else:
                    connection.sendall(b"-MOVED 1 %s:%d\r\n" % place)

        return serve

    def ask() -> RemoteOutcome:
        (answer,) = engine.exist_many(["a"], WAIT_LIMIT_S)
        return answer

    with (
        peer(node("former", has_slots=True)) as former,
        peer(node("other", has_slots=True)) as other,
        peer(node("seed", has_slots=False)) as engine,
    ):
        nodes, other_place = engine._nodes, other._nodes.first
        owner.append(former._nodes.first)
        assert ask() is RemoteOutcome.OK
        outside.add("former")
        owner[0] = other_place
        assert [ask(), ask()] == [RemoteOutcome.BUSY, RemoteOutcome.OK], "the seed knows"

        outside.add("seed")
        nodes.note_failure(other_place)  # a moment without a network
        assert [ask(), ask()] == [RemoteOutcome.BUSY, RemoteOutcome.OK], "the other node is known"
        outside.add("other")
        assert ask() is RemoteOutcome.BUSY
        assert nodes.first == other_place, "while all are down, the next turn takes its time"
        monkeypatch.setattr("kvcascade.tiers.remote.engines.valkey.TURN_S", 0.0)
        assert ask() is RemoteOutcome.BUSY and nodes.first != other_place


class _Telling(_Connection):
    """A connection to a node that tells this of its cluster."""

    def __init__(self, told: object) -> None:
        super().__init__()
        self._told = told

    def reply(self) -> Any:
        return self._told


@pytest.mark.parametrize("begins", [(16382, 16383), (16383, 16382)])
def test_ranges_of_slots_that_overlap_are_no_map(begins: tuple[int, int]) -> None:
    """A map of all ranges that end at the last slot would fill in 134 million slots."""
    told = [[begin, CLUSTER_SLOTS - 1, [b"h", 1]] for begin in begins]
    assert len(slots_of(_Telling(told[:1]), Address(HOST, 1))) == CLUSTER_SLOTS - begins[0]
    with pytest.raises(RespBrokenError):
        slots_of(_Telling(told), Address(HOST, 1))


def test_a_node_without_a_host_is_on_the_host_that_named_it() -> None:
    """`cluster-preferred-endpoint-type unknown-endpoint`, in redirections and in the map."""
    asked: list[bytes] = []

    def second(connection: socket.socket) -> None:
        while got := connection.recv(65536):
            asked.append(got)
            connection.sendall(b":2\r\n")

    with peer(second) as there:
        port = there._nodes.first.port
        cluster = b"*1\r\n*3\r\n:0\r\n:16383\r\n*3\r\n$-1\r\n:%d\r\n$1\r\na\r\n" % port

        def first(connection: socket.socket) -> None:
            while got := connection.recv(65536):
                moved = b"-MOVED 15495 :%d\r\n" % port
                connection.sendall(cluster if b"CLUSTER" in got else moved)

        with peer(first) as engine:
            assert engine.exist_many(["a"], WAIT_LIMIT_S) == [RemoteOutcome.OK] and len(asked) == 1
            assert {*engine._nodes._slots.values()} == {Address(HOST, port)}
            assert engine.exist_many(["b"], WAIT_LIMIT_S) == [RemoteOutcome.OK] and len(asked) == 2


def test_without_tls_no_redirection_leaves_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the password would cross the network in plain text."""

    def serve(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"-MOVED 1 192.0.2.1:6379\r\n")

    options = parse_remote(At("tier"), {"url": f"valkey://{HOST}:1"})
    (engine, _) = open_remote_engine(options, {})
    assert isinstance(engine, ValkeyEngine)
    engine.close()
    hosts: set[str] = set()
    connect = socket.socket.connect

    def watched(self: socket.socket, address: tuple[str, int]) -> None:
        hosts.add(address[0])
        connect(self, (HOST, address[1]))

    monkeypatch.setattr(socket.socket, "connect", watched)
    with peer(serve, engine._nodes._login) as one:
        assert one.exist_many(["a"], WAIT_LIMIT_S) == [RemoteOutcome.IO_ERROR]
    assert hosts == {HOST}


def test_a_peer_that_trickles_costs_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time, and the whole never does. Time goes on when the engine looks."""
    clock, has_looked, look_s, limit_s = ManualClock(), threading.Semaphore(0), 60.0, 2400.0

    def look() -> float:
        clock.advance(look_s)
        has_looked.release()
        return clock()

    def serve(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"*2\r\n$320\r\n")
        while has_looked.acquire(timeout=WAIT_LIMIT_S):
            try:
                connection.sendall(b"x")
            except OSError:
                return

    for module in (resp, valkey):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=look))
    with peer(serve, Login(limit_s, limit_s)) as engine:
        begun_s = clock()
        assert engine.get_into(["a"], [PrivateBuffer(4096)], limit_s) == [RemoteOutcome.BUSY]
        assert limit_s <= clock() - begun_s <= limit_s + 4 * look_s
        assert not engine._nodes._left_s, "the node did not fail"
        has_looked.release(1000)


def test_a_peer_that_stops_in_mid_body_and_goes_on_reaches_no_buffer() -> None:
    """The late-write test of the engine that fills the given memory itself."""
    goes_on, has_sent = threading.Event(), threading.Event()
    header = b"*2\r\n$320\r\n" + b"\xbd" * 320 + b"\r\n"

    def serve(connection: socket.socket) -> None:
        connection.recv(65536)
        with suppress(OSError):  # the engine closed the connection
            connection.sendall(header + b"$262016\r\n" + b"\xbd" * 100_000)
            assert goes_on.wait(WAIT_LIMIT_S)
            connection.sendall(b"\xbd" * 162_016 + b"\r\n")
        has_sent.set()

    with peer(serve, Login(WAIT_LIMIT_S, stall_s=0.3)) as engine:
        buffer = PrivateBuffer(262_144)
        assert engine.get_into(["a"], [buffer], WAIT_LIMIT_S) == [RemoteOutcome.TIMED_OUT]
        before = bytes(buffer.payload)
        goes_on.set()
        assert has_sent.wait(WAIT_LIMIT_S)
        assert bytes(buffer.payload) == before and before[150_000:] != b"\xbd" * 112_144
