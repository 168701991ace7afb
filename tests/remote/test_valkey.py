"""The engine for Valkey and Redis, against real servers."""

from __future__ import annotations

import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from types import SimpleNamespace

import pytest
from contract.remote_contract import (
    LIMIT_S,
    PAYLOAD_BYTES,
    RemoteContract,
    an_object,
    buffers,
    is_same,
    names,
)
from support.certificates import loopback_certificate
from support.clock import ManualClock
from support.remote_servers import (
    HOST,
    PATIENT,
    ServerProcess,
    free_port,
    peer,
    redis_command,
    redis_server,
    valkey_server,
)
from support.waiting import wait_until

from kvcascade.config.options import At
from kvcascade.config.remote import parse_remote
from kvcascade.tiers.remote.base import (
    HEADER_BYTES,
    Listing,
    RemoteEngine,
    RemoteEntry,
    RemoteOutcome,
)
from kvcascade.tiers.remote.engines import resp
from kvcascade.tiers.remote.engines.resp import SEPARATE_BYTES, Address, Login, RespConnection
from kvcascade.tiers.remote.engines.valkey import TAIL_BYTES, ValkeyEngine, hash_slot
from kvcascade.tiers.remote.remote_options import open_remote_engine

OK, ABSENT, EXISTS = RemoteOutcome.OK, RemoteOutcome.ABSENT, RemoteOutcome.EXISTS
TIMED_OUT, IO_ERROR = RemoteOutcome.TIMED_OUT, RemoteOutcome.IO_ERROR
PAGES_MAX = 100
SLACK_S = 6.0
"""Time by which a loaded machine may exceed a limit."""


def login(timeout_s: float = 60.0, tls: ssl.SSLContext | None = None, **words: str) -> Login:
    password = words.get("password")
    return Login(
        timeout_s,
        timeout_s,
        tls,
        words.get("username"),
        None if password is None else lambda: password,
    )


def engine_at(port: int, how: Login | None = None, ttl_s: float | None = None) -> ValkeyEngine:
    return ValkeyEngine(Address(HOST, port), how or login(), ttl_s)


@pytest.fixture
def engine(redis: ServerProcess) -> Iterator[ValkeyEngine]:
    made = engine_at(redis.port)
    yield made
    made.close()


@pytest.fixture
def own_redis() -> Iterator[ServerProcess]:
    """A server that the test may kill and stop."""
    server = redis_server()
    yield server
    server.go_on()
    server.kill()


class TestRedis(RemoteContract):
    @pytest.fixture
    def server(self, redis: ServerProcess) -> ServerProcess:
        return redis

    @pytest.fixture
    def engine(self, server: ServerProcess) -> Iterator[RemoteEngine]:
        self.port = server.port
        made = engine_at(server.port)
        yield made
        made.close()

    def spoil(self, engine: RemoteEngine, name: str, data: bytes) -> None:
        front, body = data[: HEADER_BYTES + TAIL_BYTES], data[HEADER_BYTES + TAIL_BYTES :]
        redis_command(self.port, "SET", f"{{{name}}}:h", front.decode("latin-1"))
        if body:
            redis_command(self.port, "SET", f"{{{name}}}", body.decode("latin-1"))


class TestValkey(TestRedis):
    @pytest.fixture
    def server(self, valkey: ServerProcess) -> ServerProcess:
        return valkey


@pytest.mark.parametrize("suffix", ["", ":h"])
def test_half_a_pair_is_absent_and_is_replaced(
    redis: ServerProcess, engine: ValkeyEngine, suffix: str
) -> None:
    (name,) = names(1)
    engine.put([name], [an_object(1)], LIMIT_S)
    redis_command(redis.port, "DEL", f"{{{name}}}{suffix}")
    assert engine.exist_many([name], LIMIT_S) == [ABSENT]
    assert engine.get_into([name], buffers(1), LIMIT_S) == [ABSENT]
    assert engine.put([name], [an_object(2)], LIMIT_S) == [OK]
    (buffer,) = buffers(1)
    assert engine.get_into([name], [buffer], LIMIT_S) == [OK]
    assert is_same(buffer, an_object(2)), "both halves are those of the second"


@pytest.fixture(params=["redis", "valkey"])
def server(request: pytest.FixtureRequest) -> ServerProcess:
    """An empty server of either kind."""
    found: ServerProcess = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("ttl_s", [None, 100.0])
def test_a_block_costs_little_more_memory_than_its_payload(
    server: ServerProcess, ttl_s: float | None
) -> None:
    engine, payload_bytes = engine_at(server.port, ttl_s=ttl_s), 512 << 10
    engine.put(names(4), [an_object(i, payload_bytes) for i in range(4)], LIMIT_S)
    for name in names(4):
        both = (f"{{{name}}}", f"{{{name}}}:h")
        sizes = [redis_command(server.port, "MEMORY", "USAGE", part) for part in both]
        assert sum(int(size[1:]) for size in sizes) <= 1.03 * payload_bytes
    engine.close()


def first_page(engine: ValkeyEngine) -> tuple[Listing, Iterator[Listing]]:
    """A page that came within a second, and those after it; a slow machine may need longer."""
    for _ in range(PAGES_MAX):
        batches = engine.list_objects("", 1.0)
        first = next(batches)
        if first.outcome is OK:
            return first, batches
    raise AssertionError("no page comes within a second")


class TestLists:
    @pytest.mark.parametrize("lost", ["", ":h"])
    def test_half_a_pair_is_listed_by_its_name(
        self, redis: ServerProcess, engine: ValkeyEngine, lost: str
    ) -> None:
        engine.put(names(2), [an_object(i, 1000) for i in range(2)], LIMIT_S)
        redis_command(redis.port, "DEL", f"{{{names(1)[0]}}}{lost}")
        redis_command(redis.port, "SET", "of-somebody-else", "1")
        redis_command(redis.port, "SET", "{of-somebody-else", "1")
        (batch,) = engine.list_objects("", LIMIT_S)
        measured = engine.measure(batch.entries, LIMIT_S)
        sizes = {e.name: size for e, size in zip(batch.entries, measured, strict=True)}
        left = HEADER_BYTES + TAIL_BYTES if not lost else 1000 - TAIL_BYTES
        assert sizes == {names(2)[0]: left, names(2)[1]: HEADER_BYTES + 1000}
        assert engine.measure([RemoteEntry("space/1/00/00", 1, None)], LIMIT_S) == [ABSENT]

    def test_a_server_that_counts_uses_knows_no_times(self, redis: ServerProcess) -> None:
        engine = engine_at(redis.port)
        engine.put(names(1), [an_object(1, 10)], LIMIT_S)
        redis_command(redis.port, "CONFIG", "SET", "maxmemory-policy", "allkeys-lfu")
        try:
            ((entry,),) = (batch.entries for batch in engine.list_objects("", LIMIT_S))
        finally:
            redis_command(redis.port, "CONFIG", "SET", "maxmemory-policy", "noeviction")
        assert entry.touched_s is None
        engine.close()

    def test_more_than_one_page_and_a_server_that_stops(self, own_redis: ServerProcess) -> None:
        engine = engine_at(own_redis.port)
        made = an_object(1, 10)
        engine.put(names(600), [made] * 600, LIMIT_S)
        first, batches = first_page(engine)
        own_redis.stop()
        assert [batch.outcome for batch in batches] == [TIMED_OUT]
        own_redis.go_on()
        listed = [e.name for batch in engine.list_objects("", LIMIT_S) for e in batch.entries]
        assert len(first.entries) < 600 and sorted(listed) == sorted(names(600))
        engine.close()
        assert [batch.outcome for batch in engine.list_objects("", LIMIT_S)] == [IO_ERROR]


def test_a_full_server_refuses_and_goes_on_reading() -> None:
    server = redis_server("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    try:
        engine = engine_at(server.port)
        ended = engine.put(names(40), [an_object(i) for i in range(40)], LIMIT_S)
        assert set(ended) == {OK, RemoteOutcome.NO_SPACE}
        taken = buffers(40)
        read = engine.get_into(names(40), taken, LIMIT_S)
        assert [o is OK for o in read] == [o is OK for o in ended]
        assert all(is_same(b, an_object(i)) for i, b in enumerate(taken) if read[i] is OK)
        engine.close()
    finally:
        server.kill()


@pytest.mark.parametrize("start", [redis_server, valkey_server])
def test_the_server_evicts_by_itself(start: Callable[..., ServerProcess]) -> None:
    server = start("--maxmemory", "5mb", "--maxmemory-policy", "allkeys-lru")
    try:
        engine = engine_at(server.port)
        for i in range(60):
            assert engine.put([names(60)[i]], [an_object(i)], LIMIT_S) == [OK]
        taken = buffers(60)
        read = engine.get_into(names(60), taken, LIMIT_S)
        assert set(read) == {OK, ABSENT}, "half a pair is absent too"
        assert all(is_same(b, an_object(i)) for i, b in enumerate(taken) if read[i] is OK)
        engine.close()
    finally:
        server.kill()


def test_blocks_live_as_long_as_they_are_told_to(server: ServerProcess) -> None:
    engine = engine_at(server.port, ttl_s=100.0)
    engine.put(names(1), [an_object(1)], LIMIT_S)
    for name in (f"{{{names(1)[0]}}}", f"{{{names(1)[0]}}}:h"):
        assert 0 < int(redis_command(server.port, "TTL", name)[1:]) <= 100
        redis_command(server.port, "EXPIRE", name, "50")
    assert engine.put(names(2), [an_object(1), an_object(2)], LIMIT_S) == [EXISTS, OK]
    for name in (f"{{{names(1)[0]}}}", f"{{{names(1)[0]}}}:h"):
        assert 50 < int(redis_command(server.port, "TTL", name)[1:]) <= 100, "it is in use"
    engine.close()


@pytest.mark.parametrize(
    ("ttl_s", "replies"),
    [
        (None, b"-NOPERM x\r\n:1\r\n:0\r\n"),
        (9.0, b":1\r\n-NOPERM x\r\n:1\r\n" + b":1\r\n" * 3 + b":0\r\n" + b":1\r\n" * 2),
    ],
)
def test_an_error_is_that_of_one_block(ttl_s: float | None, replies: bytes) -> None:
    """Rights change between two commands, and another host writes the last block."""

    def serve(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b":0\r\n" * (3 if ttl_s is None else 6))
        connection.recv(65536)
        connection.sendall(replies)

    with peer(serve, ttl_s=ttl_s) as engine:
        ended = engine.put(names(3), [an_object(i, 4096) for i in range(3)], LIMIT_S)
        assert ended == [RemoteOutcome.DENIED, OK, EXISTS]


def test_a_block_in_use_is_touched(own_redis: ServerProcess) -> None:
    """The server's LRU counts seconds, too coarse for a test of what it evicts."""

    def touches() -> int:
        found = re.search(
            rb"cmdstat_touch:calls=(\d+)", redis_command(own_redis.port, "INFO", "all")
        )
        return int(found[1]) if found else 0

    engine = engine_at(own_redis.port)
    engine.put(names(2), [an_object(1), an_object(2)], LIMIT_S)
    before = touches()
    assert engine.exist_many(names(2), LIMIT_S) == [OK] * 2
    assert touches() == before, "a question is no use"
    assert engine.put(names(2), [an_object(1), an_object(2)], LIMIT_S) == [EXISTS] * 2
    assert touches() == before + 2
    engine.close()


class TestFaults:
    def test_a_stopped_server_costs_the_limit_and_no_more(self, own_redis: ServerProcess) -> None:
        patient, engine = engine_at(own_redis.port), engine_at(own_redis.port, login(1.0))
        assert patient.put(names(2), [an_object(1), an_object(2)], LIMIT_S) == [OK, OK]
        own_redis.stop()
        calls: tuple[Callable[[], list[RemoteOutcome]], ...] = (
            lambda: engine.exist_many(names(2), LIMIT_S),
            lambda: engine.get_into(names(2), buffers(2), LIMIT_S),
            lambda: engine.put(names(2, 5), [an_object(3)] * 2, LIMIT_S),
            lambda: engine.remove(names(2, 7), LIMIT_S),
        )
        for call in calls:
            begun_s = monotonic()
            assert call() == [TIMED_OUT] * 2
            assert monotonic() - begun_s < 1.0 + SLACK_S
        own_redis.go_on()
        taken = buffers(2)
        wait_until(lambda: engine.get_into(names(2), taken, LIMIT_S) == [OK, OK])
        assert is_same(taken[1], an_object(2))
        for each in (patient, engine):
            each.close()

    def test_a_killed_server_is_an_outcome_and_a_new_one_is_used(
        self, own_redis: ServerProcess
    ) -> None:
        engine = engine_at(own_redis.port)
        engine.put(names(1), [an_object(1)], LIMIT_S)
        own_redis.kill()
        assert engine.get_into(names(1), buffers(1), LIMIT_S) == [IO_ERROR]
        assert engine.put(names(1), [an_object(1)], LIMIT_S) == [IO_ERROR]
        assert engine.counter("space/generation", 1, LIMIT_S).outcome is IO_ERROR
        own_redis.start()
        assert engine.get_into(names(1), buffers(1), LIMIT_S) == [ABSENT], "it came back empty"
        engine.close()

    def test_connections_that_the_server_closed_are_not_used(
        self, own_redis: ServerProcess
    ) -> None:
        engine = engine_at(own_redis.port)
        engine.put(names(1), [an_object(1)], LIMIT_S)
        redis_command(own_redis.port, "CLIENT", "KILL", "TYPE", "normal")
        assert engine.exist_many(names(1), LIMIT_S) == [OK]
        engine.close()

    def test_many_threads_at_a_time(self, redis: ServerProcess, engine: ValkeyEngine) -> None:
        wrong: list[object] = []

        def use(start: int) -> None:
            mine = names(20, start)
            made = [an_object(start + i) for i in range(20)]
            taken = buffers(20)
            ended = engine.put(mine, made, LIMIT_S), engine.get_into(mine, taken, LIMIT_S)
            same = [is_same(b, o) for b, o in zip(taken, made, strict=True)]
            if ended != ([OK] * 20, [OK] * 20) or not all(same):
                wrong.append(ended)

        threads = [threading.Thread(target=use, args=(100 * i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
        assert not wrong and not any(thread.is_alive() for thread in threads)


@pytest.fixture(scope="module")
def guarded() -> Iterator[ServerProcess]:
    server = redis_server("--requirepass", "open-sesame")
    _asked(server.port, "open-sesame", *"ACL SETUSER kv on >pw-kv ~* +@all".split())
    yield server
    server.kill()


class TestLogin:
    def test_a_password_and_a_user(self, guarded: ServerProcess) -> None:
        for how in (
            login(password="open-sesame"),
            login(username="kv", password="pw-kv"),
        ):
            engine = engine_at(guarded.port, how)
            assert engine.exist_many(names(1), LIMIT_S) == [ABSENT]
            engine.close()

    def test_a_password_of_any_bytes(self, guarded: ServerProcess, tmp_path: Path) -> None:
        (tmp_path / "word").write_bytes(b"pw-\xff\n")
        _asked(guarded.port, "open-sesame", *"ACL SETUSER bytes on ~* +@all".split(), ">pw-\xff")
        given = {"username": "bytes", "password_file": str(tmp_path / "word")}
        url = {"url": f"redis://{HOST}:{guarded.port}"}
        engine, _ = open_remote_engine(parse_remote(At("tier"), PATIENT | url | given), {})
        assert engine.exist_many(names(1), LIMIT_S) == [ABSENT]
        engine.close()

    def test_wrong_ones_are_denied_and_shown_nowhere(self, guarded: ServerProcess) -> None:
        for how in (login(), login(password="pw-wrong"), login(username="kv", password="pw-wrong")):
            engine = engine_at(guarded.port, how)
            assert engine.exist_many(names(2), LIMIT_S) == [RemoteOutcome.DENIED] * 2
            assert engine.put(names(1), [an_object(1)], LIMIT_S) == [RemoteOutcome.DENIED]
            assert engine.counter("a", 1, LIMIT_S).outcome is RemoteOutcome.DENIED
            assert "pw-wrong" not in repr(how) + repr(engine) + repr(vars(engine))
            engine.close()

    def test_a_user_who_may_only_read_is_denied_writes(self, guarded: ServerProcess) -> None:
        admin = engine_at(guarded.port, login(password="open-sesame"))
        admin.put(names(1), [an_object(1)], LIMIT_S)
        assert admin.counter("space/generation", 7, LIMIT_S).value == 7
        with_rights = "~* +mget +exists +get +ping"
        words = ("ACL", "SETUSER", "reader", "on", ">pw", *with_rights.split())
        _asked(guarded.port, "open-sesame", *words)
        engine = engine_at(guarded.port, login(username="reader", password="pw"))
        assert engine.get_into(names(1), buffers(1), LIMIT_S) == [OK]
        assert engine.put(names(1, 9), [an_object(1)], LIMIT_S) == [RemoteOutcome.DENIED]
        assert engine.remove(names(1), LIMIT_S) == [RemoteOutcome.DENIED]
        assert engine.counter("space/generation", 8, LIMIT_S).value == 7
        assert engine.counter("other/generation", None, LIMIT_S).outcome is ABSENT
        assert engine.counter("other/generation", 8, LIMIT_S).outcome is RemoteOutcome.DENIED
        admin.close()
        engine.close()


def test_a_replica_is_read(own_redis: ServerProcess) -> None:
    engine = engine_at(own_redis.port)
    engine.put(names(1), [an_object(1)], LIMIT_S)
    assert engine.counter("space/generation", 7, LIMIT_S).value == 7
    # The primary does not exist, so the replica keeps what it has.
    redis_command(own_redis.port, "REPLICAOF", HOST, str(free_port()))
    (buffer,) = buffers(1)
    assert engine.counter("space/generation", 8, LIMIT_S).value == 7
    assert engine.get_into(names(1), [buffer], LIMIT_S) == [OK] and is_same(buffer, an_object(1))
    assert engine.counter("other/generation", 8, LIMIT_S).outcome is RemoteOutcome.DENIED
    assert engine.put(names(1, 9), [an_object(1)], LIMIT_S) == [RemoteOutcome.DENIED]
    engine.close()


def _asked(port: int, password: str, *words: str) -> None:
    with socket.create_connection((HOST, port), 10.0) as connection:
        for some in (("AUTH", password), words):
            parts = [f"*{len(some)}\r\n", *(f"${len(w)}\r\n{w}\r\n" for w in some)]
            connection.sendall("".join(parts).encode("latin-1"))
            assert connection.recv(4096) == b"+OK\r\n"


def test_tls_carries_everything_and_checks_the_server(tmp_path: Path) -> None:
    files = loopback_certificate(tmp_path)
    server = redis_server(
        *("--tls-port", str(port := free_port())),
        *("--tls-cert-file", str(files.certificate), "--tls-key-file", str(files.key)),
        *("--tls-ca-cert-file", str(files.certificate), "--tls-auth-clients", "no"),
        port=port,
    )
    try:
        trusting = ssl.create_default_context(cafile=str(files.certificate))
        engine = engine_at(server.port, login(tls=trusting))
        made = an_object(1, 1 << 20)
        (buffer,) = buffers(1, 1 << 20)
        assert engine.put(names(1), [made], LIMIT_S) == [OK]
        assert engine.get_into(names(1), [buffer], LIMIT_S) == [OK] and is_same(buffer, made)
        engine.close()
        stranger = engine_at(server.port, login(tls=ssl.create_default_context()))
        assert stranger.exist_many(names(1), LIMIT_S) == [IO_ERROR]
        stranger.close()
    finally:
        server.kill()


class SlowTls(ssl.SSLSocket):
    """A connection that is made already, and sends a piece in `piece_s`."""

    clock: ManualClock
    limits_s: list[float]
    piece_s = 0.4

    def settimeout(self, value: float | None) -> None:
        assert value is not None
        self.limits_s.append(value)

    def sendall(self, data: object, flags: int = 0) -> None:
        self.clock.advance(self.piece_s)


class SlowContext(ssl.SSLContext):
    """Wraps each socket in a `SlowTls`."""

    clock: ManualClock

    def wrap_socket(self, sock: socket.socket, *_: object, **__: object) -> ssl.SSLSocket:
        sock.close()
        self.made = SlowTls.__new__(SlowTls)
        self.made.clock, self.made.limits_s = self.clock, []
        return self.made


def test_tls_sends_no_longer_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """`sendall` gives each piece the whole limit."""
    clock = ManualClock()
    monkeypatch.setattr(resp, "time", SimpleNamespace(monotonic=clock))
    context = SlowContext(ssl.PROTOCOL_TLS_CLIENT)
    context.clock = clock
    with socket.create_server((HOST, 0)) as listener:
        address = Address(HOST, listener.getsockname()[1])
        connection = RespConnection(address, login(tls=context), clock() + 1.0)
    connection.begin(clock() + 1.0)
    with pytest.raises(TimeoutError):
        connection.send_raw([b"piece"] * 8)
    assert context.made.limits_s == pytest.approx([1.0, 0.6, 0.2])


@pytest.fixture(scope="module", params=[redis_server, valkey_server], ids=["redis", "valkey"])
def nodes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[ServerProcess]]:
    """Two nodes, each with half of the slots."""
    servers: list[ServerProcess] = []
    for _ in range(2):
        folder = tmp_path_factory.mktemp("node")
        options = ("--cluster-enabled", "yes", "--dir", str(folder))
        servers.append(request.param(*options, "--cluster-port", str(free_port())))
    first, second = servers
    bus = second.option("--cluster-port")
    redis_command(first.port, "CLUSTER", "ADDSLOTSRANGE", "0", "8191")
    redis_command(second.port, "CLUSTER", "ADDSLOTSRANGE", "8192", "16383")
    redis_command(first.port, "CLUSTER", "MEET", HOST, str(second.port), bus)

    def is_up() -> bool:
        states = [redis_command(s.port, "CLUSTER", "INFO") for s in servers]
        return all(b"cluster_state:ok" in s and b"nodes:2" in s for s in states)

    wait_until(is_up)
    yield servers
    for server in servers:
        server.kill()


class TestCluster:
    def test_keys_go_to_their_node_after_one_redirection(self, nodes: list[ServerProcess]) -> None:
        for server in nodes:
            redis_command(server.port, "FLUSHALL")
        engine = engine_at(nodes[0].port)
        made = [an_object(i) for i in range(24)]
        assert {hash_slot(n) >= 8192 for n in names(24)} == {False, True}
        assert engine.put(names(24), made, LIMIT_S) == [OK] * 24
        assert engine.put(names(24), made, LIMIT_S) == [EXISTS] * 24
        assert engine.exist_many(names(26), LIMIT_S) == [OK] * 24 + [ABSENT] * 2
        taken = buffers(24)
        assert engine.get_into(names(24), taken, LIMIT_S) == [OK] * 24
        assert all(is_same(b, o) for b, o in zip(taken, made, strict=True))
        sizes = [int(redis_command(s.port, "DBSIZE")[1:]) for s in nodes]
        assert sum(sizes) == 48 and all(sizes)
        moved = redis_command(nodes[0].port, "INFO", "errorstats")
        found = re.search(rb"errorstat_MOVED:count=(\d+)", moved)
        assert found and int(found[1]) <= 24, "only the first call was redirected"
        for name in ("a/generation", "b/generation", "c/generation"):
            assert engine.counter(name, 7, LIMIT_S).value == 7
            assert engine.advance(name, 3, LIMIT_S).value == 8
        assert engine.remove(names(24), LIMIT_S) == [OK] * 24
        engine.close()

    def test_nodes_that_do_not_say_their_host(self, nodes: list[ServerProcess]) -> None:
        words = ("CONFIG", "SET", "cluster-preferred-endpoint-type")
        for server in nodes:
            redis_command(server.port, "FLUSHALL")
            assert redis_command(server.port, *words, "unknown-endpoint") == b"+OK\r\n"
        engine = engine_at(nodes[0].port)
        made = [an_object(i, 10) for i in range(12)]
        try:
            assert engine.put(names(12), made, LIMIT_S) == [OK] * 12
            assert engine.exist_many(names(12), LIMIT_S) == [OK] * 12
            assert {engine.counter(f"{i}/generation", 7, LIMIT_S).value for i in range(6)} == {7}
            listed = [e.name for batch in engine.list_objects("", LIMIT_S) for e in batch.entries]
            assert sorted(listed) == sorted(names(12))
        finally:
            for server in nodes:
                redis_command(server.port, *words, "ip")
        engine.close()

    def test_a_list_goes_over_all_nodes(self, nodes: list[ServerProcess]) -> None:
        for server in nodes:
            redis_command(server.port, "FLUSHALL")
        engine = engine_at(nodes[1].port)
        engine.put(names(12), [an_object(i, 10) for i in range(12)], LIMIT_S)
        listed = [e.name for batch in engine.list_objects("", LIMIT_S) for e in batch.entries]
        assert sorted(listed) == sorted(names(12))
        nodes[0].stop()
        try:
            assert [*engine.list_objects("", 1.0)][-1].outcome is TIMED_OUT
        finally:
            nodes[0].go_on()
        engine.close()

    def test_a_dead_node_fails_its_own_keys(self, nodes: list[ServerProcess]) -> None:
        patient, engine = engine_at(nodes[0].port), engine_at(nodes[0].port, login(1.0))
        patient.put(names(12), [an_object(i) for i in range(12)], LIMIT_S)
        nodes[1].stop()
        try:
            here = [n for n in names(12) if hash_slot(n) < 8192]
            there = [n for n in names(12) if hash_slot(n) >= 8192]
            assert patient.exist_many(here, LIMIT_S) == [OK] * len(here)
            assert engine.exist_many(there, LIMIT_S) == [TIMED_OUT] * len(there)
        finally:
            nodes[1].go_on()
        wait_until(lambda: engine.exist_many(names(12), LIMIT_S) == [OK] * 12)
        for each in (patient, engine):
            each.close()


def test_payload_bytes_of_the_contract_are_sent_from_where_they_lie() -> None:
    """Otherwise the contract would test only the path of small values."""
    assert PAYLOAD_BYTES > SEPARATE_BYTES
