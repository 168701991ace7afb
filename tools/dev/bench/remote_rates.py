"""Rates of a remote tier beside bare clients of the same server.

    python -m kvcascade.tools.dev.bench.remote_rates --out FOLDER

All contenders of a case use the same server, sizes and number of threads, and take turns. Figures
are medians: the rate, and the processor time of this process, which other work on the machine
changes less. "ours" reads into memory that stands for the arena, with every block verified before
it is copied there, and writes with checksums and headers. "bare" moves the same payload without
either: `obstore` alone, or a RESP client of a few lines with `sendmsg` and `recv_into`.

Servers: redis-server or valkey-server on the PATH (or --valkey-binary), moto for S3, and a folder.
What is missing is left out, and a line says so.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ....tiers.base import BlockHash
from ....tiers.remote.base import RemoteEngine, RemoteOutcome
from ....tiers.remote.object_store import ObjectStoreEngine, open_object_store
from ....tiers.remote.objects import ObjectFormat, parts_of
from ....tiers.remote.remote_store import RemoteEnded, RemoteStore, StoreOptions
from ....tiers.remote.resp import Address, Login
from ....tiers.remote.valkey import ValkeyEngine
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

TIMEOUT_S = 30.0
SIZES = {"512 KiB": 512 << 10, "2 MiB": 2 << 20}
CHAIN, CHAIN_HELD = 1000, 613
PIPELINE = 4
POLL_S = 0.05
OURS, BARE, LIBRARY = "ours", "bare", "valkey-py"
Contender = Callable[[], None]
Figure = tuple[float, float]
"""Rate, and processor time."""


@dataclass
class RateRow:
    """One case: the figures of each contender, and the goals."""

    case: str
    unit: str
    samples: dict[str, list[float]] = field(default_factory=dict)
    cpu_us: dict[str, list[float]] = field(default_factory=dict)
    """Processor time per MiB of payload, in microseconds."""
    goals: Mapping[str, float] = field(default_factory=dict)
    """Least ratio of ours to another contender."""

    def figures(self) -> dict[str, Any]:
        """Return medians and ratios, for JSON."""
        found = {name: median(values) for name, values in self.samples.items()}
        ratios = {
            name: median(o / b for o, b in zip(self.samples[OURS], values, strict=True))
            for name, values in self.samples.items()
            if name != OURS and OURS in self.samples
        }
        shown: dict[str, Any] = {"case": self.case, "unit": self.unit, "median": found}
        cpu = {name: median(values) for name, values in self.cpu_us.items()}
        return shown | {"ratio": ratios, "goal": dict(self.goals), "cpu_us_per_mib": cpu}


class RatedBlocks:
    """Payloads, keys, and memory that stands for the arena."""

    def __init__(self, size: int, total_bytes: int) -> None:
        self.size = size
        self.count = max(8, total_bytes // size)
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

    def rate(self, work: Contender) -> Figure:
        """Return the GB/s of moving all blocks, and the processor time in us per MiB."""
        begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
        work()
        took_s, took_cpu_s = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
        n_bytes = self.count * self.size
        return n_bytes / took_s / 1e9, took_cpu_s * 1e6 / (n_bytes / (1 << 20))

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
        link = self.store._link
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


def take_turns(
    contenders: Mapping[str, Callable[[], Figure]], row: RateRow, repeats: int
) -> RateRow:
    """Run each contender `repeats` times; the first of them changes."""
    names = [*contenders]
    for repeat in range(repeats):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            rate, cpu_us = contenders[name]()
            row.samples.setdefault(name, []).append(rate)
            row.cpu_us.setdefault(name, []).append(cpu_us)
    return row


def valkey_rows(port: int, total_bytes: int, repeats: int, threads: int) -> Iterator[RateRow]:
    """Measure reads and writes of a Valkey or Redis server."""
    for label, size in SIZES.items():
        blocks = RatedBlocks(size, total_bytes)
        engine = ValkeyEngine(Address(HOST, port), Login(TIMEOUT_S, TIMEOUT_S))
        ours = Ours(engine, size, threads)
        pool = ThreadPoolExecutor(threads)
        with ExitStack() as stack:
            stack.callback(pool.shutdown)
            stack.callback(ours.close)
            bare = [BareResp(port) for _ in range(threads)]
            for one in bare:
                stack.callback(one.close)
            yield from _valkey_cases(label, blocks, ours, bare, pool, port, repeats)


def _valkey_cases(
    label: str,
    blocks: RatedBlocks,
    ours: Ours,
    bare: Sequence[BareResp],
    pool: ThreadPoolExecutor,
    port: int,
    repeats: int,
) -> Iterator[RateRow]:
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

    def ours_write() -> Figure:
        blocks.keys = new_keys(count)
        _flush(port, ours)
        return blocks.rate(lambda: ours.write(blocks.keys, sources))

    def other_write(work: Callable[[range], None]) -> Figure:
        _flush(port, ours)
        return blocks.rate(lambda: in_parts(pool, count, PIPELINE, work))

    def ours_read() -> Figure:
        rate = blocks.rate(lambda: ours.read(blocks.keys, targets))
        blocks.check()
        return rate

    def other_read(work: Callable[[range], None]) -> Figure:
        return blocks.rate(lambda: in_parts(pool, count, PIPELINE, work))

    writes = {OURS: ours_write, BARE: lambda: other_write(bare_write)}
    reads = {OURS: ours_read, BARE: lambda: other_read(bare_read)}
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

        writes[LIBRARY] = lambda: other_write(library_write)
        reads[LIBRARY] = lambda: other_read(library_read)
    yield take_turns(writes, RateRow(f"Valkey write {label}", "GB/s", goals={BARE: 0.85}), repeats)
    _flush(port, ours)
    blocks.keys = new_keys(count)
    ours.write(blocks.keys, sources)
    in_parts(pool, count, PIPELINE, bare_write)
    goals = {BARE: 0.80, LIBRARY: 1.3}
    yield take_turns(reads, RateRow(f"Valkey read {label}", "GB/s", goals=goals), repeats)


def _flush(port: int, ours: Ours) -> None:
    """Empty the server, but for the generation of our store."""
    with socket.create_connection((HOST, port), TIMEOUT_S) as connection:
        connection.sendall(b"*1\r\n$8\r\nFLUSHALL\r\n")
        connection.recv(64)
    ours.keep_generation()


def object_rows(
    where: str,
    opened: Callable[[], ObjectStoreEngine],
    total_bytes: int,
    repeats: int,
    threads: int,
) -> Iterator[RateRow]:
    """Measure reads and writes of a bucket or folder."""
    obstore: Any = import_module("obstore")
    for label, size in SIZES.items():
        blocks = RatedBlocks(size, total_bytes)
        engine = opened()
        ours, pool = Ours(engine, size, threads), ThreadPoolExecutor(threads)
        sources, targets, store = blocks.sources(), blocks.targets(), engine._store
        names = [f"bare/{uuid.uuid4().hex}" for _ in range(blocks.count)]

        def ours_write(blocks: RatedBlocks = blocks, ours: Ours = ours) -> Figure:
            blocks.keys = new_keys(blocks.count)
            return blocks.rate(lambda: ours.write(blocks.keys, blocks.sources()))

        def put(
            part: range,
            names: list[str] = names,
            sources: list[memoryview] = sources,
            store: Any = store,
        ) -> None:
            for i in part:
                how = {"mode": "create", "use_multipart": False}
                obstore.put(store, names[i], sources[i], **how)

        def bare_write(
            blocks: RatedBlocks = blocks, names: list[str] = names, pool: ThreadPoolExecutor = pool
        ) -> Figure:
            names[:] = [f"bare/{uuid.uuid4().hex}" for _ in names]
            return blocks.rate(lambda: in_parts(pool, blocks.count, 1, put))

        def ours_read(
            blocks: RatedBlocks = blocks, ours: Ours = ours, targets: list[memoryview] = targets
        ) -> Figure:
            rate = blocks.rate(lambda: ours.read(blocks.keys, targets))
            blocks.check()
            return rate

        def get(part: range, names: list[str] = names, store: Any = store) -> None:
            for i in part:
                memoryview(obstore.get(store, names[i]).bytes())

        def bare_read(blocks: RatedBlocks = blocks, pool: ThreadPoolExecutor = pool) -> Figure:
            return blocks.rate(lambda: in_parts(pool, blocks.count, 1, get))

        row = RateRow(f"{where} write {label}", "GB/s", goals={BARE: 0.85})
        yield take_turns({OURS: ours_write, BARE: bare_write}, row, repeats)
        least = 0.80 if size < 2 << 20 else 0.70
        row = RateRow(f"{where} read {label}", "GB/s", goals={BARE: least})
        yield take_turns({OURS: ours_read, BARE: bare_read}, row, repeats)
        ours.close()
        pool.shutdown()


def lookup_rows(where: str, opened: Callable[[], RemoteEngine], repeats: int) -> Iterator[RateRow]:
    """Measure lookups of a chain of which a part is there, and of a cold prompt."""
    size = 4096
    ours = Ours(opened(), size, 4)
    keys = new_keys(CHAIN)
    payload = memoryview(bytes(size))
    ours.write(keys[:CHAIN_HELD], [payload] * CHAIN_HELD)
    took = RateRow(f"{where} lookup, {CHAIN_HELD} of {CHAIN} there", "ms")
    cold = RateRow(f"{where} lookup, cold prompt", "ms")
    asked = RateRow(f"{where} requests, {CHAIN_HELD} of {CHAIN} there", "requests")
    asked_cold = RateRow(f"{where} requests, cold prompt", "requests")

    def requests() -> int:
        return sum(verb.requests for verb in ours.store.counters.verbs.values())

    for _ in range(repeats):
        ours.store._link.memory.clear()
        for time_row, request_row, chain, held in (
            (took, asked, keys, CHAIN_HELD),
            (cold, asked_cold, new_keys(CHAIN), 0),
        ):
            before, begun_s = requests(), time.perf_counter()
            assert ours.look(chain) == held
            time_row.samples.setdefault(OURS, []).append(1e3 * (time.perf_counter() - begun_s))
            request_row.samples.setdefault(OURS, []).append(requests() - before)
    ours.close()
    yield from (took, asked, cold, asked_cold)


def of_valkey(options: argparse.Namespace) -> Iterator[RateRow]:
    """Measure a Valkey or Redis server, started here."""
    binary = options.valkey_binary or valkey_binary()
    if not binary:
        print("left out: Valkey, since no valkey-server or redis-server is on the PATH")
        return
    port = free_port()
    at = Address(HOST, port), Login(TIMEOUT_S, TIMEOUT_S)
    with listening(valkey_command(binary, port), port):
        yield from valkey_rows(port, options.total_mib << 20, options.repeats, 2)
        yield from lookup_rows("Valkey", lambda: ValkeyEngine(*at), options.repeats)


def of_folder(options: argparse.Namespace) -> Iterator[RateRow]:
    """Measure a folder, through the page cache."""
    if find_spec("obstore") is None:
        print("left out: the folder, since obstore is not installed")
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        url = Path(folder).as_uri()
        here = partial(open_object_store, url, TIMEOUT_S, TIMEOUT_S)
        yield from object_rows("folder", here, options.total_mib << 20, options.repeats, 4)


def of_s3(options: argparse.Namespace) -> Iterator[RateRow]:
    """Measure moto, started here, with a quarter of the payload: it is slow."""
    if find_spec("obstore") is None or find_spec("moto") is None:
        print("left out: S3, since obstore or moto is not installed")
        return
    with s3_server() as endpoint:
        secrets = {"access_key_id": "none", "secret_access_key": "none"}
        where = f"s3://{BUCKET}/p", TIMEOUT_S, TIMEOUT_S, endpoint, REGION, secrets
        bucket = partial(open_object_store, *where)
        total_bytes = options.total_mib << 18
        yield from object_rows("S3 (moto)", bucket, total_bytes, options.repeats, 8)
        yield from lookup_rows("S3 (moto)", bucket, options.repeats)


PARTS = {"valkey": of_valkey, "folder": of_folder, "s3": of_s3}


def shown(row: RateRow) -> str:
    """Return a line of the table."""
    figures = row.figures()
    found = ", ".join(f"{name} {value:.3g}" for name, value in figures["median"].items())
    ratios = "; ".join(
        f"{value:.2f} x {name}" + (f" (goal {row.goals[name]:.2f})" if name in row.goals else "")
        for name, value in figures["ratio"].items()
    )
    cpu = ", ".join(f"{name} {value:.0f}" for name, value in figures["cpu_us_per_mib"].items())
    return f"| {row.case} | {found} {row.unit} | {ratios} | {cpu} |"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write `remote-rates.json`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the JSON file")
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure")
    parser.add_argument("--valkey-binary", help="path of the server, if it is not on the PATH")
    parser.add_argument("--only", action="append", choices=[*PARTS], help="repeatable")
    parser.add_argument("--total-mib", type=int, default=256, help="payload of one repetition")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(argv)
    rows: list[RateRow] = []
    print("| case | median | ours | CPU us per MiB |\n|---|---|---|---|")
    for name in options.only or PARTS:
        for row in PARTS[name](options):
            rows.append(row)
            print(shown(row), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "remote-rates.json"
    described = {"cpus": os.cpu_count(), "rows": [row.figures() for row in rows]}
    path.write_text(json.dumps(described, indent=1) + "\n")


if __name__ == "__main__":
    main()
