"""Reads and lookups of a remote tier at a distance.

A bucket answers from memory, but late, as one in the same region does or one in another. Ours makes
as many calls at a time as its `CallLimit` finds useful. A Valkey or Redis server is near, and
reached through a port that delays. Ours sends small blocks in larger numbers.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Generator, Sequence
from contextlib import closing
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from typing import Any

from ....tiers.base import BlockHash
from ....tiers.remote.engines.object_store import KIND, ObjectStoreEngine, open_object_store
from ....tiers.remote.lane import FEWEST_CALLS
from ...commands.bench.bench_results import KIB, LIMIT, MIB, OURS, Quantity, size_label
from ...commands.bench.bench_tier import new_keys
from ..remote_server import BUCKET, HOST, REGION, listening
from ..server import free_port
from .measurement import Case, Figures, Measurement, MeasurementSetup
from .remote_rates import (
    CHAIN,
    CHAIN_BLOCK_BYTES,
    CHAIN_HELD,
    SIZES,
    TIMEOUT_S,
    Contenders,
    Ours,
    RatedBlocks,
    in_parts,
    quantities,
    running,
    valkey_cases,
    valkey_port,
)

DISTANCES_S = (0.005, 0.03)
VALKEY_DISTANCES_S, VALKEY_SIZES = (0.0005, 0.002), (64 * KIB, 512 * KIB)
TOTAL_BYTES = 128 * MIB
CHAINS = (1, 16)
"""Numbers of requests whose blocks are looked up in one step."""
POLL_S = 0.001
LOOKUPS = tuple(Quantity(f"{n} of {CHAIN} blocks", "ms") for n in CHAINS)


def _read_cases(
    opened: ObjectStoreEngine, label: str, size: int, calls: int
) -> Generator[Case, None, None]:
    """Yield reads with at most `calls` at a time."""
    blocks = RatedBlocks(size, TOTAL_BYTES)
    obstore: Any = import_module("obstore")
    names = [f"bare/{uuid.uuid4().hex}" for _ in blocks.keys]

    def get(part: range) -> None:
        for i in part:
            memoryview(obstore.get(opened._store, names[i]).bytes())

    def bare() -> Figures:
        return blocks.figures(lambda: in_parts(pool, blocks.count, 1, get))

    with running(opened, size, calls) as (ours, pool):
        blocks.write(ours)
        for name, source in zip(names, blocks.sources(), strict=True):
            obstore.put(opened._store, name, source, use_multipart=False)
        contenders: Contenders = {OURS: partial(blocks.read, ours), LIMIT: bare}
        yield Case(f"{label}, read {size_label(size)}, {calls} at a time", contenders)


def _look(ours: Ours, chains: Sequence[Sequence[BlockHash]]) -> float:
    """Look chains up in one step; return the milliseconds until all have their answer."""
    ours.store._core.memory.clear()
    begun_s, left = time.perf_counter(), len(chains)
    for ticket, chain in enumerate(chains):
        ours.store.ask(ticket, chain)
    ours.store.send()
    while left:
        left -= len(ours.store.poll())
        time.sleep(POLL_S)
    return 1e3 * (time.perf_counter() - begun_s)


def _lookup_cases(opened: ObjectStoreEngine, label: str) -> Generator[Case, None, None]:
    chains = [new_keys(CHAIN) for _ in range(max(CHAINS))]
    with closing(Ours(opened, CHAIN_BLOCK_BYTES, FEWEST_CALLS)) as ours:
        for chain in chains:
            ours.write(chain[:CHAIN_HELD], [memoryview(bytes(CHAIN_BLOCK_BYTES))] * CHAIN_HELD)

        def look() -> Figures:
            return {
                each.name: _look(ours, chains[:n]) for n, each in zip(CHAINS, LOOKUPS, strict=True)
            }

        yield Case(f"{label}, lookups", {OURS: look}, LOOKUPS)


def of_valkey(setup: MeasurementSetup) -> Generator[Case, None, None]:
    """Yield writes and reads of a Valkey or Redis server at each distance."""
    with valkey_port(setup) as near:
        for distance_s in VALKEY_DISTANCES_S if near is not None else ():
            port = free_port()
            command = [sys.executable, "-m", "kvcascade.tools.dev.distant_port"]
            with listening([*command, str(port), str(near), str(distance_s)], port):
                where = f"Valkey, {1e3 * distance_s:g} ms"
                yield from valkey_cases(where, port, TOTAL_BYTES, 2, VALKEY_SIZES)


def of_bucket(setup: MeasurementSetup) -> Generator[Case, None, None]:
    """Yield reads and lookups of a bucket at each distance."""
    if find_spec("obstore") is None:
        setup.note("left out: the bucket, since obstore is not installed")
        return
    secrets = {"access_key_id": "none", "secret_access_key": "none"}
    for distance_s in DISTANCES_S:
        port = free_port()
        module = "kvcascade.tools.dev.distant_s3"
        with listening([sys.executable, "-m", module, str(port), str(distance_s)], port):
            where = f"s3://{BUCKET}/p", TIMEOUT_S, TIMEOUT_S, f"http://{HOST}:{port}", REGION
            opened = partial(open_object_store, *where, secrets)
            label = f"{1e3 * distance_s:g} ms"
            for size, calls in product(SIZES, (FEWEST_CALLS, KIND.reads_at_a_time)):
                yield from _read_cases(opened(), label, size, calls)
            yield from _lookup_cases(opened(), label)


def cases(setup: MeasurementSetup) -> Generator[Case, None, None]:
    """Yield the cases of both servers."""
    yield from of_valkey(setup)
    yield from of_bucket(setup)


MEASUREMENT = Measurement(
    "remote_distance",
    "Remote tier: a server at a distance",
    "Answers come late by the time named. Ours makes at most the named number of reads of a bucket "
    "at a time, and the limit, obstore without checks, just that number. The limit for Valkey is a "
    "RESP client without checks that asks for 4 blocks at a time.",
    quantities({}),
    cases,
)
