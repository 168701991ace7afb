"""The remote store over real servers that are stopped, killed, throttled and tampered with."""

from __future__ import annotations

import random
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic
from typing import Any

import pytest
from support.bad_link import BadLink
from support.clock import ManualClock
from support.keys import key, keys
from support.network import other_host
from support.project import ROOT
from support.remote_rig import PAYLOAD_BYTES, THROUGH, UNTOUCHED, RemoteRig, check, content
from support.remote_servers import HOST, S3Server, ServerProcess, redis_server, valkey_server
from support.remote_twin import RemoteTwin
from support.waiting import wait_until

from kvcascade.tiers.base import BlockHash
from kvcascade.tiers.breaker import REST_S
from kvcascade.tiers.remote.base import (
    HEADER_BYTES,
    PrivateBuffer,
    RemoteEngine,
    RemoteObject,
    RemoteOutcome,
)
from kvcascade.tiers.remote.engines.resp import Address, Login
from kvcascade.tiers.remote.engines.valkey import ValkeyEngine
from kvcascade.tiers.remote.objects import SECRET_BYTES, GcmSeal, MacSeal
from kvcascade.tiers.remote.presence import Presence
from kvcascade.tiers.remote.remote_counters import Verb
from kvcascade.tiers.remote.remote_store import RemoteEnded
from kvcascade.tools.dev.other_host import OtherHost

OK, ABSENT = RemoteOutcome.OK, RemoteOutcome.ABSENT
TIMED_OUT, RESTING = RemoteOutcome.TIMED_OUT, RemoteOutcome.RESTING
POLL_S, ARRIVAL_POLL_S = 0.002, 0.0002
TIMEOUT_S = 1.0
PATIENCE_S = 60.0
"""Far more than the slowest server needs for an answer."""
STALL_S = 0.2
KILLS_MAX = READS_MAX = 30
SECRET = bytes(range(SECRET_BYTES))
KINDS = ("redis", "valkey", "s3")
BUCKET = "blocks-in-test"


class RealClock(ManualClock):
    """Real time, which a test may move ahead."""

    def __init__(self) -> None:
        super().__init__(0.0)

    def __call__(self) -> float:
        return monotonic() + self.now_s


class Host(RemoteRig):
    """A host with threads of its own; a slow machine has time for each call."""

    def __init__(self, engine: RemoteEngine, **changes: object) -> None:
        self.threads = ThreadPoolExecutor(THROUGH.threads)
        given: dict[str, Any] = {"clock": RealClock(), "deadline_s": PATIENCE_S, **changes}
        super().__init__(engine, self.threads, **given)
        self.engine = engine

    def ended(self, ticket: int, kind: Verb) -> list[RemoteOutcome]:
        return self.all_ended({ticket})[ticket]

    def all_ended(self, tickets: set[int]) -> dict[int, list[RemoteOutcome]]:
        """The outcomes of these calls, which must be all that end."""
        found: list[RemoteEnded] = []

        def have_ended() -> bool:
            found.extend(self.store.poll())
            return {ended.ticket for ended in found} >= tickets

        wait_until(have_ended, pause_s=POLL_S)
        assert len(found) == len(tickets)
        return {ended.ticket: list(ended.outcomes) for ended in found}

    def close(self) -> None:
        assert self.store.close(10.0), "every call ends within its timeout"
        self.threads.shutdown()


Open = Callable[..., Host]


def prepare(server: ServerProcess, blocks: int, payload_bytes: int = PAYLOAD_BYTES) -> None:
    """Write blocks as a host that waits as long as the server needs."""
    host = Host(engine_at(server, PATIENCE_S), payload_bytes=payload_bytes)
    assert host.write(keys(blocks)) == [OK] * blocks
    host.close()


def valkey_at(server: ServerProcess, timeout_s: float = TIMEOUT_S) -> ValkeyEngine:
    login = Login(timeout_s, timeout_s)
    return ValkeyEngine(Address(server.host, server.port), login)


class BucketServer(S3Server):
    """An S3 server that begins with an empty bucket each time."""

    def start(self) -> None:
        super().start()
        self.make_bucket(BUCKET)


def server_of(kind: str, on: OtherHost | None = None) -> ServerProcess:
    """Start a server, here or on another host."""
    host, within = (HOST, ()) if on is None else (on.address, on.within)
    if kind == "s3":
        pytest.importorskip("obstore")
        return BucketServer(host=host, within=within)
    start = {"redis": redis_server, "valkey": valkey_server}[kind]
    return start("--protected-mode", "no", host=host, within=within)


def engine_at(server: ServerProcess, timeout_s: float = TIMEOUT_S) -> RemoteEngine:
    if not isinstance(server, BucketServer):
        return valkey_at(server, timeout_s)
    from remote.test_object_store import bucket_at

    return bucket_at(server.endpoint, BUCKET, timeout_s)


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """A server that the test may do anything to."""
    made = server_of(request.param)
    yield made
    made.go_on()
    made.kill()


@pytest.fixture
def opened() -> Iterator[Callable[[RemoteEngine], Host]]:
    hosts: list[Host] = []

    def start(engine: RemoteEngine, **changes: object) -> Host:
        hosts.append(Host(engine, **changes))
        return hosts[-1]

    yield start
    for host in hosts:
        host.close()


def test_two_hosts_share_blocks_through_redis(redis: ServerProcess, opened: Open) -> None:
    first, second = (opened(valkey_at(redis, PATIENCE_S)) for _ in range(2))
    assert first.write(keys(40)) == [OK] * 40
    assert second.look(keys(50)) == [OK] * 40 + [ABSENT] * 10
    assert second.read(keys(40)) == [OK] * 40
    second.store.reset()
    wait_until(lambda: not second.store.state().is_reset_pending)
    assert second.read(keys(40)) == [ABSENT] * 40


def test_the_lines_of_the_page_open_a_store(redis: ServerProcess) -> None:
    page = (ROOT / "docs" / "remote.md").read_text()
    (lines,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(lines.replace("127.0.0.1:6379", f"{redis.host}:{redis.port}"), names)
    store = names["store"]
    found: list[RemoteEnded] = []
    block = memoryview(bytes(512 << 10))
    store.put(1, [key(1)], [block])

    def has_ended() -> bool:
        found.extend(store.poll())
        return bool(found)

    wait_until(has_ended)
    assert list(found[0].outcomes) == [OK]
    assert store.close(10.0)
    names["threads"].shutdown()


def test_two_hosts_share_blocks_through_s3(s3: S3Server, opened: Open) -> None:
    pytest.importorskip("obstore")
    from remote.test_object_store import bucket_at

    s3.make_bucket(bucket := uuid.uuid4().hex)
    first, second = (opened(bucket_at(s3.endpoint, bucket), deadline_s=20.0) for _ in range(2))
    assert first.write(keys(20)) == [OK] * 20
    assert second.look([*keys(20), *keys(100, 180)]) == [OK] * 20 + [ABSENT] * 80
    assert second.read(keys(20)) == [OK] * 20
    asked = second.store.counters.verbs
    assert sum(v.requests for v in asked.values()) <= 31 + 20
    second.store.reset()
    wait_until(lambda: not second.store.state().is_reset_pending)
    assert second.read(keys(20)) == [ABSENT] * 20


def test_a_stopped_server_costs_one_deadline_and_is_used_again(
    server: ServerProcess, opened: Open
) -> None:
    host = opened(engine_at(server, PATIENCE_S), deadline_s=PATIENCE_S)
    assert host.write(keys(8)) == [OK] * 8
    server.stop()
    host.store.ask(host.ticket(), keys(100, 104))
    host.store.send()
    wait_until(lambda: host.store._asking.breaker._under_way > 0)
    assert not host.store.poll(), "the deadline is not over"
    host.clock.advance(PATIENCE_S)
    (ended,) = host.store.poll()
    assert list(ended.outcomes) == [TIMED_OUT] * 4
    for start in range(200, 300, 4):
        host.store.ask(host.ticket(), keys(start, start + 4))
        host.store.send()
        (ended,) = host.store.poll()
        assert list(ended.outcomes) == [RESTING] * 4, "nobody waits any more"
    server.go_on()

    def is_used() -> bool:
        host.clock.advance(REST_S + 0.1)
        return host.look(keys(300, 304)) == [ABSENT] * 4 and host.read(keys(8)) == [OK] * 8

    wait_until(is_used)


def test_a_killed_server_costs_misses(server: ServerProcess, opened: Open) -> None:
    host = opened(engine_at(server, PATIENCE_S), deadline_s=PATIENCE_S)
    assert host.write(keys(8)) == [OK] * 8
    server.kill()
    for start in range(0, 400, 100):
        assert not {OK, TIMED_OUT} & {*host.look(keys(start + 100, start + 104))}
    assert OK not in host.read(keys(8))
    assert OK not in host.write(keys(50, 60))
    server.start()
    host.clock.advance(31.0)  # beyond rests and what is remembered
    assert host.look(keys(8)) == [ABSENT] * 8, "it came back empty"
    host.clock.advance(REST_S + 0.1)
    assert host.write(keys(8)) == [OK] * 8 and host.read(keys(8)) == [OK] * 8


def has_arrived(reads: Iterable[tuple[Sequence[BlockHash], list[memoryview]]]) -> bool:
    """Whether a byte of these reads has come."""
    return any(slot[0] != UNTOUCHED for _, slots in reads for slot in slots)


def test_a_server_that_is_killed_while_it_sends_serves_no_wrong_byte(
    server: ServerProcess, opened: Open
) -> None:
    """Redis sends the blocks of a read one after the other, and S3 several at a time."""
    host = opened(engine_at(server, PATIENCE_S), deadline_s=PATIENCE_S, payload_bytes=2 << 20)
    everything, draw = keys(8), random.Random(5)
    cut_reads = 0
    for number in range(KILLS_MAX):
        if number >= 3 and cut_reads:
            break
        # A write that waited may have reached the new server.
        assert set(host.write(everything)) <= {OK, RemoteOutcome.EXISTS}
        assert host.read(everything) == [OK] * 8
        writing = host.begin_write(keys(100 * (number + 1), 100 * (number + 1) + 4))
        reads: dict[int, tuple[Sequence[BlockHash], list[memoryview]]] = {}
        for _ in range(6):
            wanted, slots = draw.sample(everything, 4), host.slots(4)
            reads[ticket := host.ticket()] = (wanted, slots)
            host.store.get(ticket, wanted, slots)
        wait_until(partial(has_arrived, reads.values()), pause_s=ARRIVAL_POLL_S)
        server.kill()
        server.start()
        for ticket, outcomes in host.all_ended({writing, *reads}).items():
            if ticket in reads:
                check(*reads[ticket], outcomes)
                cut_reads += OK in outcomes and set(outcomes) != {OK}
        host.clock.advance(31.0)  # beyond rests and what is remembered
    assert cut_reads > 0, "or no read was interrupted"


def is_cut_at_the_deadline(server: ServerProcess) -> bool:
    """Read for half a second; whether some blocks came and the server counts as one that works.

    Not so if the machine rested meanwhile.
    """
    host = Host(engine_at(server, 5.0), deadline_s=0.5, payload_bytes=256 << 10)
    slots, ticket = host.slots(64), host.ticket()
    host.store.get(ticket, keys(64), slots)
    outcomes = host.ended(ticket, Verb.READ)
    check(keys(64), slots, outcomes)
    has_failed = any(host.store.state().openings.values())
    before = [bytes(slot) for slot in slots]
    host.close()
    assert [bytes(slot) for slot in slots] == before, "nothing came after the end"
    return {OK, RemoteOutcome.DROPPED} <= {*outcomes} and not has_failed


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_link_ends_at_the_deadline(kind: str) -> None:
    """100 Mbit: 64 blocks of 256 KiB would take more than a second."""
    with other_host() as other:
        server = server_of(kind, other)
        try:
            prepare(server, 64, 256 << 10)
            other.limit("100mbit")
            assert any(is_cut_at_the_deadline(server) for _ in range(READS_MAX))
        finally:
            server.kill()


@pytest.mark.parametrize("kind", KINDS)
def test_a_link_that_is_cut_costs_one_deadline(kind: str) -> None:
    with other_host() as other:
        server = server_of(kind, other)
        try:
            prepare(server, 4)
            host = Host(engine_at(server), deadline_s=TIMEOUT_S)

            def is_back() -> bool:
                host.clock.advance(REST_S + 0.1)
                return host.read(keys(4)) == [OK] * 4

            other.cut()
            begun_s = monotonic()
            assert host.read(keys(4)) == [TIMED_OUT] * 4
            assert monotonic() - begun_s < PATIENCE_S, "the kernel waits for minutes"
            other.mend()
            # The kernel reports carriers once a second, so the first packets may still be lost.
            wait_until(is_back)
            host.close()
        finally:
            server.kill()


class Tampering:
    """Damages objects in a twin, as bit rot, a bug or another tenant would."""

    def __init__(self, seed: int, strangers: Sequence[bytes]) -> None:
        self.draw = random.Random(seed)
        self.strangers = strangers
        self.damaged = 0

    def __call__(self, data: bytes) -> bytes:
        found = self._damaged(data)
        self.damaged += found != data
        return found

    def _damaged(self, data: bytes) -> bytes:
        how = self.draw.randrange(6)
        if how == 0:  # a flipped bit
            at = self.draw.randrange(len(data))
            return data[:at] + bytes([data[at] ^ (1 << self.draw.randrange(8))]) + data[at + 1 :]
        if how == 1:  # truncated, and as long as before
            at = self.draw.randrange(len(data))
            return data[:at] + bytes(len(data) - at)
        if how == 2:  # truncated
            return data[: self.draw.randrange(len(data))]
        if how == 3:  # another block, another model, an older generation
            return self.draw.choice(self.strangers)
        if how == 4:  # header of one, payload of another
            return data[:HEADER_BYTES] + self.draw.choice(self.strangers)[HEADER_BYTES:]
        return data


@pytest.mark.parametrize("seed", range(4))
def test_of_ten_thousand_damaged_objects_none_is_served(seed: int) -> None:
    """2,500 for each seed, a quarter with a MAC, and a quarter encrypted."""
    seal = (None, None, MacSeal(SECRET), GcmSeal(SECRET))[seed]
    twin = RemoteTwin(names_per_call=8)
    other_model = RemoteRig(twin, fingerprint="model-2", seal=seal)
    other_model.write(keys(20))
    rig = RemoteRig(twin, seal=seal)
    rig.write(keys(20))
    rig.store.reset()
    rig.write(keys(20))
    twin.damage = Tampering(seed, [*twin.held.values()])
    draw = random.Random(seed)
    served = 0
    while twin.damage.damaged < 2500:
        wanted = [key(draw.randrange(20)) for _ in range(8)]
        served += rig.read(wanted).count(OK)  # compares every byte
        missing = [k for k in keys(20) if rig.known(k) is not Presence.HELD]
        if missing:
            rig.begin_write(missing)
            rig.store.poll()
    assert served > 200


def strangers_of(engine: RemoteEngine, victim: Host) -> Iterator[tuple[BlockHash, RemoteObject]]:
    """Objects of another model, of an older generation, and of other blocks, for these blocks."""
    other_model = Host(engine, fingerprint="model-2")
    assert other_model.write(keys(8)) == [OK] * 8
    older = victim.names(keys(8, 16))
    victim.store.reset()
    wait_until(lambda: not victim.store.state().is_reset_pending)
    assert victim.write(keys(24)) == [OK] * 24
    names = [*other_model.names(keys(8)), *older, *victim.names(keys(23, 15, -1))]
    for block, name in zip(keys(24), names, strict=True):
        buffer = PrivateBuffer(PAYLOAD_BYTES)
        assert engine.get_into([name], [buffer], PATIENCE_S) == [OK]
        yield block, RemoteObject(bytes(buffer.header), memoryview(bytes(buffer.payload)))
    other_model.threads.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_objects_under_wrong_names_are_served_to_nobody(kind: str, opened: Open) -> None:
    server = server_of(kind)
    try:
        engine = engine_at(server, PATIENCE_S)
        victim = opened(engine)
        assert victim.write(keys(24)) == [OK] * 24
        wrong = dict(strangers_of(engine, victim))
        assert engine.remove(victim.names(wrong), PATIENCE_S) == [OK] * 24
        assert engine.put(victim.names(wrong), [*wrong.values()], PATIENCE_S) == [OK] * 24
        assert victim.read([*wrong]) == [RemoteOutcome.CORRUPT] * 24
        assert engine.exist_many(victim.names(wrong), PATIENCE_S) == [ABSENT] * 24, "removed"
    finally:
        server.kill()


@pytest.mark.parametrize(("kind", "blocks"), [("redis", 1500), ("valkey", 1500), ("s3", 150)])
def test_nothing_that_a_bad_link_damages_is_served(kind: str, blocks: int, opened: Open) -> None:
    """Answers of a real server are changed, cut off, or stop in mid-body and go on later.

    One reader ends its reads before their calls end: what comes later reaches no destination.
    """
    server, draw = server_of(kind), random.Random(kind)
    counted: Counter[RemoteOutcome] = Counter()
    ended: list[tuple[memoryview, bytes]] = []
    # Chance decides which answers the link stops or cuts, and where a slow machine stops.
    wanted_times = {OK: blocks // 4, RemoteOutcome.CORRUPT: blocks // 20}
    wanted_times |= {TIMED_OUT: 0, RemoteOutcome.IO_ERROR: 0}
    try:
        clean = opened(engine_at(server, PATIENCE_S), payload_bytes=8192)
        with BadLink(server.port, 7, 2 * STALL_S) as link:
            own_port, server.port = server.port, link.port
            readers = (
                opened(engine_at(server, STALL_S), payload_bytes=8192),
                opened(engine_at(server, PATIENCE_S), payload_bytes=8192, deadline_s=STALL_S),
            )
            server.port = own_port
            assert clean.write(keys(20)) == [OK] * 20
            while counted.total() < blocks or any(
                counted[outcome] <= times for outcome, times in wanted_times.items()
            ):
                assert counted.total() < 10 * blocks, counted
                wanted, host = draw.sample(keys(20), 8), draw.choice(readers)
                outcomes = host.read(wanted)  # compares every byte
                ended += ((slot, bytes(slot)) for slot in host.read_into)
                counted.update(outcome for outcome in outcomes if outcome is not RESTING)
                pairs = zip(wanted, outcomes, strict=True)
                lost = [k for k, outcome in pairs if outcome in (RemoteOutcome.CORRUPT, ABSENT)]
                for each in (clean, *readers):
                    each.clock.advance(31.0)  # beyond rests and what is remembered
                if lost:
                    assert set(clean.write(lost)) <= {OK, RemoteOutcome.EXISTS}
        assert all(slot == at_its_end for slot, at_its_end in ended)
    finally:
        server.kill()


def test_what_the_rig_compares_is_not_what_it_begins_with() -> None:
    assert set(content(key(1))) != {UNTOUCHED} and len(content(key(1))) == PAYLOAD_BYTES
    assert HOST == "127.0.0.1"
