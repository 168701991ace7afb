"""Policies side by side on request traces: the tables of docs/policies.md.

    python -m kvcascade.tools.dev.policy_study OUT TRACE...

A trace is a file that `kvcascade replay` reads, or a part of one: `FILE:FIRST:STOP`, in requests.
The folder OUT gets `NAME.json` for each trace, and `policies.md` with all tables.

The study has one tier and no time. A request hits all blocks up to the first missing one, and the
missing blocks are then stored in one of two ways. `late`: all blocks are stored, and then the tier
shrinks to its size, so the policy may also evict the new blocks. `early`: room is made first, and
the request's own blocks stay, as in a tier without spare slots.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ...tiers.base import BlockHash, BlockStatus
from ...tiers.policies import ORDERS, create
from ..replay.simulation import hashes_of
from ..replay.traces import Trace, read_trace

SHARES = (0.01, 0.05, 0.1, 0.3)
"""Sizes of the tier, as shares of the distinct blocks."""
OPTIMUM = "optimum"
WAYS = ("early", "late")
SIZED_BY_NATURE = frozenset({"arc", "fifo", "lirs", "s3fifo", "sieve", "slru"})
"""Policies that depend on their own capacity or on the order of arrival. `late` would give them
additional slots that they count, so they are studied with `early` only."""


@dataclass(frozen=True, slots=True)
class PolicyCell:
    """Result of one policy at one size."""

    policy: str
    way: str
    share: float
    blocks: int
    hit_ratio: float
    """Share of the input tokens that were hits."""
    us_per_block: float


@dataclass(frozen=True, slots=True)
class StudyWorkload:
    """A trace with hashes in place of block ids."""

    name: str
    chains: list[list[BlockHash]]
    tokens: list[int]
    arrived_s: list[float]
    block_tokens: float

    @classmethod
    def of(cls, trace: Trace, name: str, group: int = 1) -> StudyWorkload:
        """Return a trace with a well-distributed hash per block id, like real hashes.

        `group` blocks of the trace become one; blocks that fill no group are left out.
        """
        known: dict[BlockHash, BlockHash] = {}
        chains = []
        for request in trace.requests:
            hashes = hashes_of(request.ids[group - 1 :: group])
            chains.append([known.setdefault(each, each) for each in hashes])
        tokens = [request.input_tokens for request in trace.requests]
        arrived_s = [request.arrived_s - trace.requests[0].arrived_s for request in trace.requests]
        return cls(name, chains, tokens, arrived_s, trace.block_tokens * group)

    @property
    def distinct(self) -> int:
        """Return the number of distinct blocks."""
        return len(set().union(*self.chains))

    @property
    def references(self) -> int:
        """Return the number of blocks that requests reference."""
        return sum(map(len, self.chains))

    def hit_tokens(self, request: int, blocks: int) -> float:
        """Return the number of tokens in the first `blocks` blocks of a request."""
        return min(blocks * self.block_tokens, self.tokens[request])


class KeyTier:
    """A tier of keys without bytes: a policy of the package, and its free slots."""

    def __init__(self, name: str, capacity: int, spare: int = 0) -> None:
        """`spare` slots may be used by a request until its end."""
        self.policy = create(name, capacity + spare)
        self._capacity, self._slots = capacity, capacity + spare
        self._free = [BlockStatus(0, slot) for slot in range(capacity + spare)]

    def has(self, block_hash: BlockHash) -> bool:
        """Return True if the tier holds the block."""
        return self.policy.get(block_hash) is not None

    def prefix(self, chain: Sequence[BlockHash]) -> int:
        """Return the number of blocks before the first missing one."""
        for depth, block_hash in enumerate(chain):
            if self.policy.get(block_hash) is None:
                return depth
        return len(chain)

    def use(self, chain: Sequence[BlockHash]) -> None:
        """Store the missing blocks of a prompt, as far as they fit, and touch the others."""
        policy, kept = self.policy, chain[: self._slots]
        new = [h for h in kept if policy.get(h) is None]
        old = [h for h in kept if policy.get(h) is not None]
        policy.expect(new)
        self._make_room(len(new) - len(self._free), set(kept))
        if new:
            policy.insert_many(new, [self._free.pop() for _ in new])
        if policy.wants_chains:
            policy.note_chain(chain)
        else:
            policy.settle(new)
            policy.touch(old)
        self._make_room(len(policy) - self._capacity, set())

    def _make_room(self, n: int, kept: set[BlockHash]) -> None:
        if n > 0:
            evicted = self.policy.evict(n, kept)
            assert evicted is not None, "nothing is pinned"
            self._free += [status for _, status in evicted]


def study(work: StudyWorkload, name: str, way: str, capacity: int) -> float:
    """Return the share of the input tokens that a tier of `capacity` blocks would have cached."""
    spare = max(map(len, work.chains)) if way == "late" else 0
    tier = KeyTier(name, capacity, spare)
    hits = 0.0
    for request, chain in enumerate(work.chains):
        hits += work.hit_tokens(request, tier.prefix(chain))
        tier.use(chain)
    return hits / sum(work.tokens)


def optimum(work: StudyWorkload, capacity: int) -> float:
    """Return the share for an optimal policy that knows the future (Belady).

    It evicts the block whose next use is last. A use of a block is also a use of all blocks before
    it in the prompt, so heads stay without a special rule; among equals the deepest is evicted. New
    blocks may be evicted at once.
    """
    uses: dict[BlockHash, list[int]] = {}
    for request in range(len(work.chains) - 1, -1, -1):
        for block_hash in work.chains[request]:
            uses.setdefault(block_hash, []).append(request)
    never, hits = len(work.chains), 0.0
    next_use: dict[BlockHash, int] = {}
    furthest: list[tuple[int, int, BlockHash]] = []
    for request, chain in enumerate(work.chains):
        depth = 0
        while depth < len(chain) and chain[depth] in next_use:
            depth += 1
        hits += work.hit_tokens(request, depth)
        for depth, block_hash in enumerate(chain):
            uses[block_hash].pop()
            at = uses[block_hash][-1] if uses[block_hash] else never
            next_use[block_hash] = at
            heapq.heappush(furthest, (-at, -depth, block_hash))
        while len(next_use) > capacity:
            at, _, block_hash = heapq.heappop(furthest)
            if next_use.get(block_hash) == -at:
                del next_use[block_hash]
    return hits / sum(work.tokens)


def cells(work: StudyWorkload, policies: Sequence[str]) -> list[PolicyCell]:
    """Return the results of every policy at every size."""
    found: list[PolicyCell] = []
    distinct, references = work.distinct, work.references
    for name in policies:
        ways = WAYS[:1] if name in SIZED_BY_NATURE else WAYS
        for way in WAYS[1:] if name == OPTIMUM else ways:
            for share in SHARES:
                blocks = max(1, round(share * distinct))
                start_s = time.process_time()
                is_optimum = name == OPTIMUM
                ratio = optimum(work, blocks) if is_optimum else study(work, name, way, blocks)
                cost_us = (time.process_time() - start_s) / references * 1e6
                found.append(
                    PolicyCell(name, way, share, blocks, round(ratio, 6), round(cost_us, 2))
                )
                print(work.name, *asdict(found[-1]).values(), file=sys.stderr, flush=True)
    return found


def table(name: str, found: Sequence[PolicyCell]) -> str:
    """Return hit ratios as a Markdown table, with the best policy of each column in bold."""
    rows = dict.fromkeys((cell.way, cell.policy) for cell in found)
    ratio = {(c.way, c.policy, c.share): c.hit_ratio for c in found}
    lines = [f"| {name} | " + " | ".join(f"{s:.0%}" for s in SHARES) + " |", "|---|" + "---|" * 4]
    for way, policy in sorted(rows):
        best = [
            max(ratio[w, p, share] for w, p in rows if w == way and p != OPTIMUM)
            for share in SHARES
        ]
        shown = [
            f"**{at:.4f}**" if at == top and policy != OPTIMUM else f"{at:.4f}"
            for at, top in zip((ratio[way, policy, s] for s in SHARES), best, strict=True)
        ]
        lines.append(f"| {policy} ({way}) | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def load_workload(text: str, block_tokens: float = 0) -> StudyWorkload:
    """Read `FILE` or `FILE:FIRST:STOP`. Raises as `read_trace` does.

    Blocks are merged as long as they have no more than `block_tokens` tokens.
    """
    path, *part = text.split(":")
    first, stop = (int(part[0]), int(part[1])) if part else (0, None)
    trace = read_trace(Path(path), stop)
    name = Path(path).stem + (f"_{first}_{stop}" if part else "")
    part_of = Trace(trace.name, trace.block_tokens, trace.requests[first:])
    return StudyWorkload.of(part_of, name, max(1, int(block_tokens // trace.block_tokens)))


def main(argv: Sequence[str] | None = None) -> int:
    """Study every trace; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("traces", nargs="+", metavar="TRACE")
    parser.add_argument("--policies", default=",".join([*sorted(ORDERS), OPTIMUM]))
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    tables = []
    for text in options.traces:
        work = load_workload(text)
        found = cells(work, options.policies.split(","))
        document = {"trace": work.name, "cells": [asdict(cell) for cell in found]}
        (options.out / f"{work.name}.json").write_text(json.dumps(document, indent=1) + "\n")
        tables.append(table(work.name, found))
    (options.out / "policies.md").write_text("\n".join(tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())
