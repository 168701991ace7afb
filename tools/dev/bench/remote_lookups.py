"""Cost of lookups for the scheduler's thread, with and without a remote tier.

    python -m kvcascade.tools.dev.bench.remote_lookups

Two engines without a model have a CPU tier and an NVMe tier; one of them has a remote tier, too.
They make the same lookups of 1,000 blocks in turns, and each lookup is timed. Before the last rows
the server is stopped (SIGSTOP). Ratios are those of the medians over all rounds. The first rows are
lookups in the remote tier alone.

It starts redis-server or valkey-server from the PATH, or from --valkey-binary.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median, quantiles

from ....assembly.build import Cascade, Geometry, open_cascade
from ....assembly.remote_parts import OpenRemote
from ....config.schema import parse
from ....manager.below.port import ASKING
from ....manager.below.remote_tier import RemoteTier
from ....manager.request import Request
from ....tiers.base import BlockHash
from ....tiers.nvme.namespace import NamespaceKey
from ....tiers.policies import known_names
from ...commands.bench.bench_tier import new_keys
from ..remote_server import HOST, listening, valkey_binary, valkey_command
from ..server import free_port

BLOCK_BYTES = 4096
BLOCKS = 1000
CPU_BYTES, NVME_BYTES = 32 << 20, 256 << 20
DEADLINE_S = 2.0
LIMIT_S, PAUSE_S = 30.0, 0.005
LOOKUP_GOAL_US, RATIO_GOAL = 1.5, 1.5
NEW, ASKED_AGAIN = "blocks of which nothing is known", "the same, known to be absent"
HIT, STOPPED = "blocks in the CPU tier", "nothing is known, the server is stopped"

Keys = Sequence[BlockHash]
_requests = count()


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait for a condition, `LIMIT_S` at most."""
    ends_s = time.monotonic() + LIMIT_S
    while not holds():
        if time.monotonic() > ends_s:
            raise SystemExit("the machine is too slow, or something does not answer")
        time.sleep(PAUSE_S)


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


def look(cascade: Cascade, keys: Keys) -> tuple[int, list[int]]:
    """Look blocks up for a new request, and end it.

    Return the processor time of all lookups, and the time of each, in ns.
    """
    manager, request = cascade.manager, Request(f"bench-{next(_requests)}")
    lookup, clock, took_ns = manager.lookups.lookup_block, time.perf_counter_ns, list[int]()
    cpu_ns = time.thread_time_ns()
    for key in keys:
        begun_ns = clock()
        lookup(key, request)
        took_ns.append(clock() - begun_ns)
    cpu_ns = time.thread_time_ns() - cpu_ns
    manager.end_step()
    manager.finish_request(request)
    return cpu_ns, took_ns


def store(cascade: Cascade, keys: Keys) -> None:
    """Bring blocks into the CPU tier."""
    request = Request("stores")
    output = cascade.manager.prepare_store(keys, request)
    assert output is not None, "there is room"
    cascade.manager.complete_store(set(output.block_hashes_to_store), True, request)
    cascade.manager.finish_request(request)
    cascade.manager.end_step()


@dataclass(slots=True)
class Times:
    """Times of lookups in one of the engines."""

    cpu_us: list[float]
    """Processor time of one, by round."""
    p99_us: list[float]

    def add(self, cpu_ns: int, took_ns: Sequence[int]) -> None:
        """Add the lookups of a round."""
        self.cpu_us.append(cpu_ns / len(took_ns) / 1e3)
        self.p99_us.append(quantiles(took_ns, n=100)[-1] / 1e3)


def answered(cascade: Cascade, key: BlockHash) -> None:
    """Wait until a block that was asked for is known."""
    remote = remote_of(cascade)

    def is_known() -> bool:
        cascade.manager.end_step()
        with cascade.manager.lock:
            return remote.may_hold(key, None, "bench") != ASKING

    wait_until(is_known)


def in_turns(
    label: str, engines: Sequence[Cascade], keys_of: Callable[[], Keys], rounds: int
) -> str:
    """Time lookups in both engines, and return a line of the table."""
    times = [Times([], []) for _ in engines]
    for number in range(rounds):
        keys = keys_of()
        order = [0, 1] if number % 2 else [1, 0]
        for at in order:
            times[at].add(*look(engines[at], keys))
    p99_us = [median(each.p99_us) for each in times]
    cpu_us = [median(each.cpu_us) for each in times]
    ratio = p99_us[1] / p99_us[0]
    return (
        f"| {label} | {cpu_us[0]:.2f} / {cpu_us[1]:.2f} | {p99_us[0]:.2f} / {p99_us[1]:.2f} | "
        f"{ratio:.2f} (goal {RATIO_GOAL}) |"
    )


def of_the_tier(cascade: Cascade, rounds: int) -> Iterator[str]:
    """Time lookups in the remote tier alone."""
    remote, took_us = remote_of(cascade), dict[str, list[float]]()

    def timed(label: str, keys: Keys) -> None:
        with cascade.manager.lock:
            begun_s = time.perf_counter()
            for key in keys:
                remote.may_hold(key, None, "bench")
            spent_us = 1e6 * (time.perf_counter() - begun_s) / len(keys)
        took_us.setdefault(label, []).append(spent_us)

    for _ in range(rounds):
        keys = new_keys(BLOCKS)
        timed("unknown, asked for", keys)
        timed("unknown, being asked for", keys)
        answered(cascade, keys[-1])
        timed("known to be absent", keys)
        held = new_keys(BLOCKS)
        remote._memory.note(remote._memory.epoch, held, ())
        timed("known to be there", held)
    for label, found_us in took_us.items():
        yield f"| {label} | {median(found_us):.2f} (goal {LOOKUP_GOAL_US}) |"


def measured(folder: Path, binary: str, rounds: int) -> Iterator[str]:
    """Yield the lines of both tables."""
    port = free_port()
    with listening(valkey_command(binary, port), port) as running:
        engines = [opened(folder / "without", None), opened(folder / "with", port)]
        remote = remote_of(engines[1])
        try:

            def is_ready() -> bool:
                engines[1].manager.end_step()
                return remote.feed.mark is not None

            wait_until(is_ready)
            yield "| lookup in the remote tier | µs |\n|---|---|"
            yield from of_the_tier(engines[1], rounds)
            yield (
                "\n| lookups | CPU µs, without / with | p99 µs, without / with | ratio of p99 |\n"
                "|---|---|---|---|"
            )
            keys = new_keys(BLOCKS)
            for engine in engines:
                store(engine, keys)
            yield in_turns(HIT, engines, lambda: keys, rounds)
            yield in_turns(NEW, engines, partial(new_keys, BLOCKS), rounds)

            def absent_keys() -> Keys:
                keys = new_keys(BLOCKS)
                look(engines[1], keys)
                answered(engines[1], keys[-1])
                return keys

            yield in_turns(ASKED_AGAIN, engines, absent_keys, rounds)
            running.send_signal(signal.SIGSTOP)
            yield in_turns(STOPPED, engines, partial(new_keys, BLOCKS), rounds)
        finally:
            running.send_signal(signal.SIGCONT)
            for engine in engines:
                engine.close()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print two tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--valkey-binary", help="path of the server, if it is not on the PATH")
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args(argv)
    binary = options.valkey_binary or valkey_binary()
    if not binary:
        raise SystemExit("there is no valkey-server or redis-server on the PATH")
    with tempfile.TemporaryDirectory() as folder:
        for line in measured(Path(folder), binary, options.rounds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
