"""Many hosts without and with a remote tier: hit ratios, bytes and costs, for docs/sizing.md.

    python -m kvcascade.tools.dev.remote_study OUT TRACE...

A trace is a file that `kvcascade replay` reads, or a part of one: `FILE:FIRST:STOP`, in requests.
The folder OUT gets `NAME.json` and `NAME.md` for each trace.

Each request goes to one host, which has a CPU and an NVMe tier of its own. The hosts share nothing,
a bucket whose objects expire by age, or a Valkey server with LRU. Classes of the product decide
what is written and what is asked for. Nothing takes time and nothing fails: the next request finds
what this one has stored. Prices are assumptions, and each is an option.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, partial
from itertools import product
from pathlib import Path

from ...config.remote import WriteWhen
from ...config.sizes import MAX_BYTES, parse_bytes
from ...tiers.base import BlockHash
from ...tiers.remote.engines.object_store import RENEW_AFTER_S
from ...tiers.remote.presence import ABSENT, HELD, ChainSearch, Presence, PresenceMemory
from ...tiers.remote.shared_generation import GENERATION_FRESH_S, IN_USE_S, REFRESH_S
from ...tiers.remote.uploads import Offer, OfferRule
from ..commands.kv_bytes import kv_shape
from .policy_study import KeyTier, StudyWorkload, load_workload

TIERS: Sequence[str] = ("cpu", "nvme", "remote")
ROUTINGS = ("session", "random")
SHARED_BY = 0.01
"""A session is named by its first block that at most this share of all requests has."""
SERVERS = (
    ("none", WriteWhen.OFF),
    *product(("bucket", "valkey"), (WriteWhen.SECOND_TOUCH, WriteWhen.THROUGH)),
)
COUNTERS = 2
"""Requests of one read of the generation: its counter, and that of the last reset."""
MONTH_S = 30 * 86400.0
HEAD = (
    "hosts", "routing", "server", "CPU %", "NVMe %", "remote %", "all %", "GB up",
    "GB down", "1,000 requests", "requests $", "storage $", "egress $", "saves $",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setup:
    """Sizes and prices in dollars. Each field but the first is an option of the command."""

    bytes_per_token: int
    cpu_bytes: int = 64 << 30
    nvme_bytes: int = 1 << 40
    valkey_bytes: int = 1 << 40
    object_tokens: int = 256
    """Tokens of an object, which is an offloaded block of the product."""
    study_tokens: int = 512
    """Small blocks of a trace are merged up to so many tokens: the study counts fewer blocks."""
    bucket_hours: float = 24.0
    """Age at which objects of the bucket expire."""
    put_usd: float = 0.005
    """For 1,000 writes to the bucket, or lists of it."""
    get_usd: float = 0.0004
    """For 1,000 reads of the bucket, or questions to it."""
    bucket_usd: float = 0.023
    """For 1 GB in the bucket and a month."""
    valkey_usd: float = 5.0
    """For 1 GB of the server's memory and a month."""
    egress_usd: float = 0.02
    """For 1 GB from the server to a host."""
    gpu_usd: float = 3.0
    """For an hour of an engine's GPUs."""
    prefill_tokens_per_s: float = 9000.0


@dataclass(frozen=True, slots=True)
class StudyCell:
    """Result of one number of hosts, one routing, one server and one rule of writing."""

    hosts: int
    routing: str
    server: str
    writes: str
    cpu_hits: float
    """Share of the input tokens that were hits in the tier, as the next two."""
    nvme_hits: float
    remote_hits: float
    up_bytes: int = 0
    down_bytes: int = 0
    requests: int = 0
    requests_usd: float = 0.0
    storage_usd: float = 0.0
    egress_usd: float = 0.0
    saved_usd: float = 0.0
    """Price of computing what is a hit with this server and no hit without one."""

    @property
    def hits(self) -> float:
        """Return the share of the input tokens that were hits in any tier."""
        return self.cpu_hits + self.nvme_hits + self.remote_hits


class Bucket:
    """Objects that expire by age."""

    renew_after_s = RENEW_AFTER_S

    def __init__(self, keep_s: float, objects: int) -> None:
        """`objects`: number of objects for each block of the study."""
        self.asked = self.listed = self.up = self.down = 0
        """Questions in objects; lists for the generation; blocks that were sent and read."""
        self.kept_s = 0.0
        """Seconds until the objects expire, summed over blocks."""
        self._keep_s, self._objects = keep_s, objects
        self._written_s: dict[BlockHash, float] = {}

    def has(self, key: BlockHash, now_s: float) -> bool:
        """Return True if the block is there."""
        written_s = self._written_s.get(key)
        return written_s is not None and now_s < written_s + self._keep_s

    def ask(self, length: int, held: int) -> None:
        """Search a chain of blocks of which the first `held` are there."""
        self.asked += _probes(length * self._objects, held * self._objects)

    def read(self, keys: Sequence[BlockHash]) -> None:
        """Read blocks that are there."""
        self.down += len(keys)

    def write(self, known: dict[BlockHash, bool], now_s: float) -> None:
        """Write blocks, or renew those that the host knows to be there."""
        for key, is_known in known.items():
            age_s = now_s - self._written_s.get(key, now_s) if self.has(key, now_s) else None
            self.asked += self._objects if is_known else 0
            if is_known and age_s is not None and age_s < RENEW_AFTER_S:
                continue
            self.up += 1  # sent also if the bucket refuses, since another host was faster
            if is_known or age_s is None:
                self.kept_s += self._keep_s if age_s is None else age_s
                self._written_s[key] = now_s


class Valkey:
    """A server of limited memory, which evicts by its own reads and writes."""

    renew_after_s = 0.0

    def __init__(self, capacity: int) -> None:
        self.asked = self.listed = self.up = self.down = 0
        self._tier = KeyTier("lru", capacity)

    def has(self, key: BlockHash, now_s: float) -> bool:
        """Return True if the block is there."""
        return self._tier.has(key)

    def ask(self, length: int, held: int) -> None:
        """Ask for a whole chain in one call."""
        self.asked += 1

    def read(self, keys: Sequence[BlockHash]) -> None:
        """Read blocks that are there."""
        self.down += len(keys)
        self._tier.use(keys)

    def write(self, known: dict[BlockHash, bool], now_s: float) -> None:
        """Write blocks. Those that are there are used, and are not sent."""
        self.up += sum(not self._tier.has(key) for key in known)
        self._tier.use([*known])


@cache
def _probes(length: int, held: int) -> int:
    search, asked = ChainSearch(length), 0
    while probes := search.probes():
        search.learn({at: at < held for at in probes})
        asked += len(probes)
    return asked


class Host:
    """The tiers of one host, and what it knows of the server."""

    def __init__(
        self, cpu: int, nvme: int, server: Bucket | Valkey | None, when: WriteWhen
    ) -> None:
        """`cpu` and `nvme`: capacities in blocks."""
        self.cpu, self.nvme, self._server = KeyTier("lru", cpu), KeyTier("lru", nvme), server
        self._now_s = 0.0
        self._used_s, self._read_s = 0.0, -math.inf
        clock = partial(getattr, self, "_now_s")
        self._memory = PresenceMemory(clock)
        renew_after_s = server.renew_after_s if server else 0.0
        self._rule = OfferRule(when, MAX_BYTES, 1, self._memory, renew_after_s, clock)

    def serve(self, chain: Sequence[BlockHash], now_s: float) -> list[str]:
        """Store a prompt. Return the tiers that had its blocks, up to the first missing one."""
        self._now_s = now_s
        tiers = ["cpu" if self.cpu.has(h) else "nvme" if self.nvme.has(h) else "" for h in chain]
        held = iter(
            ["remote"] * self._found([h for h, t in zip(chain, tiers, strict=True) if not t])
        )
        tiers = [tier or next(held, "") for tier in tiers]
        tiers = tiers[: tiers.index("")] if "" in tiers else tiers
        if self._server is not None:
            read = [h for h, t in zip(chain, tiers, strict=False) if t == "remote"]
            self._server.read(read)
            if read:
                self._use_generation(self._server)
        self.cpu.use(chain)
        self.nvme.use(chain)
        if self._server is not None:
            self._offer(self._server, chain)
        return tiers

    def _found(self, keys: Sequence[BlockHash]) -> int:
        """Return how many of the blocks that no tier here has are found on the server."""
        server, memory, now_s = self._server, self._memory, self._now_s
        if server is None or not keys:
            return 0
        held = next((n for n, key in enumerate(keys) if not server.has(key, now_s)), len(keys))
        known = self._known(keys)
        if known is None:
            server.ask(len(keys), held)
            self._use_generation(server)
            memory.note(memory.epoch, keys[:held], keys[held:])
        return held if known is None else min(known, held)

    def _known(self, keys: Sequence[BlockHash]) -> int | None:
        """Return how many blocks of a chain are held, or None if that must be asked for."""
        presences = (self._memory.of(key) for key in keys)
        held = next((n for n, p in enumerate(presences) if p is not HELD), len(keys))
        return held if held == len(keys) or self._memory.of(keys[held]) is ABSENT else None

    def _offer(self, server: Bucket | Valkey, chain: Sequence[BlockHash]) -> None:
        wanted = [key for key in chain if self._rule.answer(key, True) is Offer.QUEUED]
        if wanted:
            is_held = Presence.HELD
            self._use_generation(server)
            server.write({h: self._memory.last(h) is is_held for h in wanted}, self._now_s)
            self._rule.end(wanted, wanted, self._memory.epoch)

    def _use_generation(self, server: Bucket | Valkey) -> None:
        """Count the reads of the generation since its last use: see `SharedGeneration`."""
        now_s, reads = self._now_s, 0
        if self._read_s >= 0:
            reads = int((min(now_s, self._used_s + IN_USE_S) - self._read_s) // REFRESH_S)
            self._read_s += reads * REFRESH_S
        if now_s - self._read_s >= GENERATION_FRESH_S:
            reads += 1
            self._read_s = now_s
        server.listed += COUNTERS * reads
        self._used_s = now_s


def routes(work: StudyWorkload, routing: str, hosts: int) -> list[int]:
    """Return the host of each request: any one, or the one of its session."""
    rng = random.Random(hosts)
    if routing == "random":
        return [rng.randrange(hosts) for _ in work.chains]
    uses = Counter(key for chain in work.chains for key in chain)
    limit = max(1, SHARED_BY * len(work.chains))
    host: dict[BlockHash, int] = {}
    found = []
    for chain in work.chains:
        session = next((key for key in chain if uses[key] <= limit), BlockHash(b""))
        found.append(host.setdefault(session, rng.randrange(hosts)))
    return found


def run(
    work: StudyWorkload, setup: Setup, hosts: int, routing: str, server: str, when: WriteWhen
) -> StudyCell:
    """Send the requests of a trace to the hosts, and count."""
    block_bytes = round(work.block_tokens * setup.bytes_per_token)
    objects = max(1, round(work.block_tokens / setup.object_tokens))
    shared: Bucket | Valkey | None = None
    if server == "bucket":
        shared = Bucket(setup.bucket_hours * 3600, objects)
    elif server == "valkey":
        shared = Valkey(max(1, min(setup.valkey_bytes // block_bytes, work.distinct)))
    route = routes(work, routing, hosts)
    seen: dict[int, set[BlockHash]] = {}
    for host, chain in zip(route, work.chains, strict=True):
        seen.setdefault(host, set()).update(chain)

    def new_host(distinct: int) -> Host:  # no tier has slots that its host never fills
        cpu, nvme = (
            max(1, min(size_bytes // block_bytes, distinct))
            for size_bytes in (setup.cpu_bytes, setup.nvme_bytes)
        )
        return Host(cpu, nvme, shared, when)

    fleet = {host: new_host(len(keys)) for host, keys in seen.items()}
    hits = dict.fromkeys(TIERS, 0.0)
    for request, chain in enumerate(work.chains):
        tiers = fleet[route[request]].serve(chain, work.arrived_s[request])
        for depth, tier in enumerate(tiers):
            hits[tier] += work.hit_tokens(request, depth + 1) - work.hit_tokens(request, depth)
    on_cpu, on_nvme, remote = (hits[tier] / sum(work.tokens) for tier in TIERS)
    cell = StudyCell(hosts, routing, server, when.value, on_cpu, on_nvme, remote)
    months = work.arrived_s[-1] / MONTH_S
    return cell if shared is None else _bill(cell, shared, setup, block_bytes, objects, months)


def _bill(
    cell: StudyCell,
    shared: Bucket | Valkey,
    setup: Setup,
    block_bytes: int,
    objects: int,
    months: float,
) -> StudyCell:
    """Add what the server did, and what it costs."""
    up, down, gb = shared.up * objects, shared.down * objects, block_bytes / 1e9
    cell = replace(
        cell,
        up_bytes=shared.up * block_bytes,
        down_bytes=shared.down * block_bytes,
        requests=shared.asked + shared.listed + up + down,
        egress_usd=shared.down * gb * setup.egress_usd,
    )
    if isinstance(shared, Valkey):
        return replace(cell, storage_usd=setup.valkey_bytes / 1e9 * setup.valkey_usd * months)
    return replace(
        cell,
        requests_usd=((shared.asked + down) * setup.get_usd + (shared.listed + up) * setup.put_usd)
        / 1000,
        storage_usd=shared.kept_s / MONTH_S * gb * setup.bucket_usd,
    )


def cells(work: StudyWorkload, setup: Setup, hosts: Sequence[int]) -> list[StudyCell]:
    """Return the results of every server for every number of hosts and every routing."""
    prefill_usd = setup.gpu_usd / 3600 / setup.prefill_tokens_per_s
    found: list[StudyCell] = []
    for number, routing in product(hosts, ROUTINGS):
        alone = run(work, setup, number, routing, *SERVERS[0])
        found.append(alone)
        for server, when in SERVERS[1:]:
            cell = run(work, setup, number, routing, server, when)
            gained = (cell.hits - alone.hits) * sum(work.tokens)
            found.append(replace(cell, saved_usd=gained * prefill_usd))
            print(work.name, *asdict(found[-1]).values(), file=sys.stderr, flush=True)
    return found


def table(found: Sequence[StudyCell]) -> str:
    """Return the results as a Markdown table."""
    lines = [f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
    for cell in found:
        shares = (cell.cpu_hits, cell.nvme_hits, cell.remote_hits, cell.hits)
        sent = (cell.up_bytes / 1e9, cell.down_bytes / 1e9, cell.requests / 1e3)
        costs = (cell.requests_usd, cell.storage_usd, cell.egress_usd, cell.saved_usd)
        is_alone = cell.server == "none"
        server = "none" if is_alone else f"{cell.server}, `{cell.writes}`"
        row = [f"{cell.hosts}", cell.routing, server]
        row += [f"{share:.1%}".rstrip("%") for share in shares]
        row += ["" if is_alone else f"{value:,.0f}" for value in sent]
        row += ["" if is_alone else f"{value:,.2f}" for value in costs]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Study every trace; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("traces", nargs="+", metavar="TRACE")
    parser.add_argument("--hosts", default="10,100")
    parser.add_argument("--model", default="llama-3.1-8b")
    numbers = fields(Setup)[1:]
    for each in numbers:
        parse = _bytes if each.name.endswith("_bytes") else type(each.default)
        name = each.name.removesuffix("_bytes").replace("_", "-")
        parser.add_argument(f"--{name}", dest=each.name, type=parse, default=each.default)
    given = parser.parse_args(argv)
    setup = Setup(
        kv_shape(given.model).bytes_per_token, **{n.name: getattr(given, n.name) for n in numbers}
    )
    given.out.mkdir(parents=True, exist_ok=True)
    for text in given.traces:
        work = load_workload(text, setup.study_tokens)
        found = cells(work, setup, [*map(int, given.hosts.split(","))])
        document = {"trace": work.name, "setup": asdict(setup), "cells": [*map(asdict, found)]}
        (given.out / f"{work.name}.json").write_text(json.dumps(document, indent=1) + "\n")
        (given.out / f"{work.name}.md").write_text(table(found))
        print(f"{work.name}\n\n{table(found)}")
    return 0


def _bytes(text: str) -> int:
    return parse_bytes(text).count


if __name__ == "__main__":
    sys.exit(main())
