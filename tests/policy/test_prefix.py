"""The prefix-aware policy: what leaves first, what it learns, and what it never does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pytest
from support.arrays import KeptArrays
from support.cascade import Cascade
from support.cascade import key as key_of
from support.replay import hash_of
from support.traces import LLM, block_chains, reference

from kvcascade.manager.request import Request
from kvcascade.tiers.base import BlockHash, BlockStatus
from kvcascade.tiers.policies import CachePolicy, DictDirectory, create
from kvcascade.tiers.policies.lru import LruOrder
from kvcascade.tiers.policies.parts import runs
from kvcascade.tiers.policies.parts.reuse import Ints
from kvcascade.tiers.policies.parts.runs import ANCIENT, RUNS_MIN
from kvcascade.tiers.policies.prefix import PrefixOrder

OTHERS = ("lru", "arc", "s3fifo", "lirs")


class Tier:
    """One tier that fills on demand; the blocks of the request that runs stay."""

    def __init__(self, policy: CachePolicy, capacity: int) -> None:
        self.policy, self.capacity = policy, capacity
        self.free = [BlockStatus(0, slot) for slot in range(capacity)]
        self.hits = 0

    def use(self, chain: list[BlockHash], known_from: int = 0) -> int:
        """A request; the engine has its first `known_from` blocks itself. Returns its hits."""
        get = self.policy.get
        hits = next((i for i, h in enumerate(chain) if get(h) is None), len(chain))
        self.hits += hits
        chain = chain[: self.capacity]
        new, old = [h for h in chain if get(h) is None], [h for h in chain if get(h) is not None]
        self.policy.expect(new)
        if len(new) > len(self.free):
            evicted = self.policy.evict(len(new) - len(self.free), set(chain))
            assert evicted is not None
            self.free += [status for _, status in evicted]
        self.policy.insert_many(new, [self.free.pop() for _ in new])
        if self.policy.wants_chains:
            self.policy.note_chain(chain[known_from:])
        else:
            self.policy.settle(new)
            self.policy.touch(old)
        return hits


def chain_of(*parts: tuple[int, int]) -> list[BlockHash]:
    """Blocks `0 .. n - 1` of each part, one part after another: equal parts, equal blocks."""
    return [hash_of(part * 1000 + i) for part, n in parts for i in range(n)]


def conversations(rng: random.Random, n: int) -> list[list[BlockHash]]:
    """Requests of a few conversations that go on, branch or end, among many that come once."""
    going: list[list[BlockHash]] = []
    found: list[list[BlockHash]] = []
    for i in range(n):
        if going and rng.random() < 0.6:
            chain = going.pop(rng.randrange(len(going)))
            if rng.random() < 0.1:
                chain = chain[: rng.randint(1, len(chain))]
        else:
            chain = chain_of((rng.randrange(3), rng.randint(1, 6)))
        chain = chain + chain_of((10 + i, rng.randint(1, 5)))
        found.append(chain)
        if rng.random() < 0.8 and len(going) < 12:
            going.append(chain)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_without_chains_it_is_lru(seed: int) -> None:
    rng = random.Random(seed)
    lru, prefix = create("lru", 64), create("prefix", 64)
    for _ in range(400):
        ids = [hash_of(rng.randrange(100)) for _ in range(rng.randint(1, 6))]
        ids = list(dict.fromkeys(ids))
        for policy in (lru, prefix):
            known = [h for h in ids if policy.get(h) is not None]
            new = [h for h in ids if policy.get(h) is None]
            policy.touch(known)
            evicted = policy.evict(max(0, len(policy) + len(new) - 64), set(ids))
            assert evicted is not None
            taken = {status.block_id for _, status in policy.coldest(64)}
            free = islice((slot for slot in range(64) if slot not in taken), len(new))
            policy.insert_many(new, [BlockStatus(0, slot) for slot in free])
        assert [h for h, _ in lru.coldest(64)] == [h for h, _ in prefix.coldest(64)]


@pytest.mark.parametrize("seed", range(6))
def test_no_block_is_without_the_one_before_it(seed: int) -> None:
    rng = random.Random(seed)
    tier = Tier(create("prefix", 60), 60)
    before: dict[BlockHash, BlockHash] = {}
    for chain in conversations(rng, 700):
        before.update(zip(chain[1:], chain, strict=False))
        tier.use(chain)
        for block_hash, _ in tier.policy.coldest(60):
            parent = before.get(block_hash)
            assert parent is None or tier.policy.get(parent) is not None


def test_a_chain_leaves_from_its_end() -> None:
    tier = Tier(create("prefix", 32), 32)
    chain = chain_of((1, 10))
    tier.use(chain)
    tier.use(chain[:4] + chain_of((2, 3)))
    cold = [block_hash for block_hash, _ in tier.policy.coldest(32)]
    assert cold == [*reversed(chain[4:]), *reversed(chain_of((2, 3))), *reversed(chain[:4])]


def test_what_only_comes_once_does_not_drive_out_what_goes_on() -> None:
    """Three conversations are asked every 40 requests; between, nothing comes twice: LRU hits none.

    The first ones go by before it is known that they come back, so what follows is counted.
    """
    hits = {}
    for name in ("lru", "prefix"):
        tier, ends = Tier(create(name, 150), 150), [4, 4, 4]
        for i in range(1600):
            if i == 800:
                tier.hits = 0
            if i % 40 < 3:
                ends[i % 40] = ends[i % 40] % 20 + 1
                tier.use(chain_of((1 + i % 40, 20), (100 + i // 400 * 3 + i % 40, ends[i % 40])))
            else:
                tier.use(chain_of((1000 + i, 10)))
        hits[name] = tier.hits
    assert hits["lru"] == 0
    assert hits["prefix"] > 600  # of 1200 and a few


def test_a_chain_may_begin_in_the_middle() -> None:
    """What the engine had itself is not told of, and still does not leave before what follows."""
    tier = Tier(create("prefix", 40), 40)
    chain = chain_of((1, 12))
    tier.use(chain)
    tier.use(chain + chain_of((2, 4)), known_from=6)
    for i in range(3):
        tier.use(chain_of((10 + i, 7)))
    cold = [block_hash for block_hash, _ in tier.policy.coldest(40)]
    assert [h for h in cold if h in chain] == chain[::-1]
    assert tier.use(chain + chain_of((2, 4), (3, 2)), known_from=6) == 16


def drive_out(tier: Tier) -> None:
    """All blocks leave."""
    evicted = tier.policy.evict(len(tier.policy), ())
    assert evicted is not None
    tier.free += [status for _, status in evicted]


def runs_of(tier: Tier, order: PrefixOrder, chain: list[BlockHash]) -> list[int]:
    """Places of the runs along a chain that is here, first block first."""
    found = [tier.policy.get(block_hash) for block_hash in chain]
    return [int(order._runs.run_of[status.block_id]) for status in found if status is not None]


def test_what_left_is_known_when_it_comes_back() -> None:
    """Uses count on, and the other way that a request takes is seen, though all had to come in."""
    order = PrefixOrder(40)
    tier = Tier(CachePolicy(DictDirectory(40), order), 40)
    chain = chain_of((1, 18))
    tier.use(chain)
    for uses in (1, 2, 3):
        drive_out(tier)
        chain = chain + chain_of((1 + uses, 2))
        assert tier.use(chain) == 0
        assert {order._records.uses.of[place] for place in runs_of(tier, order, chain)} == {uses}
    drive_out(tier)
    other = chain[:9] + chain_of((8, 5))
    assert tier.use(other) == 0
    places = runs_of(tier, order, other)
    assert [order._is_shared(place) for place in places] == [True] * 9 + [False] * 5


def test_what_left_before_its_request_ended_is_still_known() -> None:
    order = PrefixOrder(40)
    policy = CachePolicy(DictDirectory(40), order)
    tier, chain = Tier(policy, 40), chain_of((1, 10))
    tier.use(chain)
    drive_out(tier)
    policy.insert_many(chain, [tier.free.pop() for _ in chain])
    drive_out(tier)
    tier.use(chain + chain_of((2, 2)))
    assert {order._records.uses.of[place] for place in runs_of(tier, order, chain)} == {1}


def test_a_run_outlives_its_record() -> None:
    """Blocks that nobody used while all records were needed again leave first, and still can."""
    order = PrefixOrder(64)
    tier = Tier(CachePolicy(DictDirectory(64), order), 64)
    old = chain_of((1, 3), (2, 3))
    tier.use(old)
    for _ in range(RUNS_MIN):
        order._runs.add(1)
    tier.use(chain_of((3, 4)))
    cold = [block_hash for block_hash, _ in tier.policy.coldest(64)]
    assert set(cold[:6]) == set(old) and len(cold) == 10
    everything = tier.policy.evict(10, ())
    assert everything is not None and order._runs.live.of[ANCIENT] == 0


def test_values_survive_what_stands_in_the_arrays() -> None:
    arrays = KeptArrays()
    PrefixOrder(16, arrays)
    arrays.damage(random.Random(3))
    assert not list(PrefixOrder(16, arrays)._runs.slots(PrefixOrder(16)._rank()))


class Listening(LruOrder):
    """An order that notes what it is told of requests."""

    wants_chains = True
    told: ClassVar[list[tuple[int, int]]] = []

    def chain(self, slots: Sequence[int], blocks: int) -> None:
        self.told.append((len(slots), blocks))


def test_the_manager_tells_the_first_tier_of_a_request_once() -> None:
    Listening.told.clear()
    cascade = Cascade([16, 32], policy=f"{__name__}:Listening", is_immediate=True)
    request = Request()
    chain = [key_of(i) for i in range(6)]
    output = cascade.manager.prepare_store(chain, request)
    assert output is not None
    cascade.manager.complete_store(chain)
    cascade.manager.finish_request(request)
    cascade.manager.finish_request(request)
    assert Listening.told == [(6, 6)]


def hits_on(trace: str, requests: int, share: float, names: Sequence[str]) -> dict[str, int]:
    """Hits of some policies in a tier that holds a share of the distinct blocks."""
    chains = [[hash_of(i) for i in ids] for ids in block_chains(trace, requests)]
    capacity = round(share * len(set().union(*chains)))
    hits = {}
    for name in names:
        tier = Tier(create(name, capacity), capacity)
        for chain in chains:
            tier.use(chain)
        hits[name] = tier.hits
    return hits


def test_on_real_requests_it_is_better_than_the_others() -> None:
    """A bounded piece; a tier that holds little of it, where the choice matters."""
    hits = hits_on("mooncake_conversation", 1500, 0.01, (*OTHERS, "prefix"))
    assert hits["prefix"] >= max(hits[name] for name in OTHERS), hits


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("share", [0.01, 0.05, 0.1])
@pytest.mark.parametrize("trace", LLM)
def test_on_whole_traces_it_is_not_worse_than_lru(trace: str, share: float) -> None:
    """In one cell nearly all is found, and it is a tie."""
    hits = hits_on(trace, reference(trace)["requests"], share, ("lru", "prefix"))
    assert hits["prefix"] >= 0.9999 * hits["lru"], hits


def test_after_a_crash_the_order_by_last_use_is_left() -> None:
    rng = random.Random(1)
    order = PrefixOrder(60)
    tier = Tier(CachePolicy(DictDirectory(60), order), 60)
    for chain in conversations(rng, 300):
        tier.use(chain)
    by_last_use = order._runs.log.to_array().tolist()
    order.reconcile(np.array(sorted(by_last_use)))
    assert [status.block_id for _, status in tier.policy.coldest(60)] == by_last_use


@pytest.mark.parametrize("seed", range(3))
def test_a_run_looked_at_in_pieces_is_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[list[int]]] = []
    for piece in (3, 4096):
        monkeypatch.setattr(runs, "PIECE", piece)
        rng, order = random.Random(seed), PrefixOrder(60)
        tier, cold = Tier(CachePolicy(DictDirectory(60), order), 60), []
        for number, chain in enumerate(conversations(rng, 300)):
            tier.use(chain)
            if number == 150:
                order.reconcile(np.array(sorted(order._runs.log.to_array().tolist())))
            for window in (None, 20):
                pairs = tier.policy.coldest(60, window=window)
                cold.append([status.block_id for _, status in pairs])
        found.append(cold)
    assert found[0] == found[1]


def test_a_search_does_not_pay_for_the_whole_of_a_long_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a crash all slots are one run: the few that leave cost the same in any tier."""
    order = PrefixOrder(100_000)
    order.reconcile(np.arange(100_000))
    looked_at: list[int] = []
    log_at = order._runs.log.at

    def counted(positions: Ints) -> tuple[runs.Slots, npt.NDArray[np.bool_]]:
        looked_at.append(len(positions))
        return log_at(positions)

    monkeypatch.setattr(order._runs.log, "at", counted)
    for number in range(500):
        victims = order.victims(64, lambda slot: True)
        assert victims == list(range(64 * number, 64 * number + 64))
        order.evicted(victims, victims)
    assert max(looked_at) <= runs.PIECE
    assert sum(looked_at) <= 2 * runs.PIECE * 500
