"""Two hosts whose managers share a remote tier, under random use and random faults.

Blocks may be absent. Wrong bytes are never loaded, no block from before a host's own reset comes
back to it, from whatever host, and no request waits for ever.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.clock import ManualClock
from support.keys import keys
from support.remote_rig import PAYLOAD_BYTES
from support.remote_tier_rig import RemoteTierRig
from support.remote_twin import RemoteTwin

from kvcascade.config.remote import WriteWhen
from kvcascade.config.schema import WriteMode
from kvcascade.manager.cascading import CascadingOffloadingManager
from kvcascade.manager.core import ManagerOptions
from kvcascade.manager.first_tier import Tier
from kvcascade.manager.request import Request
from kvcascade.tiers.base import BlockHash
from kvcascade.tiers.policies import create
from kvcascade.tiers.remote.base import FAILURES
from kvcascade.tiers.remote.remote_store import StoreOptions

METHODS = ("exist_many", "get_into", "put", "remove", "counter", "advance")
SLOTS, BLOCKS, PROMPT_BLOCKS = 12, 30, 8
MAX_STEPS = 60
"""Steps of 0.2 s after which a request must have its answer: deadlines of question and reads."""


class Host:
    """A manager over a small first tier and a remote tier."""

    def __init__(self, world: World, when: WriteWhen, slots: int = SLOTS) -> None:
        self._world = world
        options = StoreOptions(when=when, queue_bytes=6 * PAYLOAD_BYTES)
        self.rig = RemoteTierRig(world.twin, world.clock, options, slots)
        self.manager = CascadingOffloadingManager(
            Tier("cpu", self.rig.arena, create("lru", slots)),
            self.rig.tier,
            ManagerOptions(write_mode=WriteMode.THROUGH, promotion_deadline_s=3.0),
            world.clock,
            world.clock.advance,
        )
        self.floor = 0
        """Time of the last reset of this host, in numbers of stores."""
        self.loaded = 0
        self.from_server = 0

    def serve(self, prompt: Sequence[BlockHash]) -> None:
        """A whole request: ask until nothing is pending, load, compute the rest, store it."""
        request = Request()
        hits: int | None = None
        for _ in range(MAX_STEPS):
            hits = self.manager.lookup(prompt, request)
            if hits is not None:
                break
            self.manager.end_step()
            self._world.go_on()
            self.manager.end_step()
        assert hits is not None, "it waits for ever"
        if hits:
            slots = self.manager.prepare_load(prompt[:hits], request).slots.tolist()
            for block_hash, slot in zip(prompt, slots, strict=False):
                self._check(block_hash, slot)
            self.from_server += len(request.sources)
            self.manager.complete_load(set(prompt[:hits]))
        self.store(prompt, request)
        self.manager.finish_request(request)
        self.manager.end_step()

    def _check(self, block_hash: BlockHash, slot: int) -> None:
        data = bytes(self.rig.arena.view(slot))
        stored = int.from_bytes(data[:8], "little")
        assert data == content(block_hash, stored), "wrong bytes"
        assert stored > self.floor, "a block from before the reset came back"
        self.loaded += 1

    def store(self, prompt: Sequence[BlockHash], request: Request) -> None:
        output = self.manager.prepare_store(prompt, request)
        if output is None:
            return
        stored = output.block_hashes_to_store
        for block_hash, slot in zip(stored, output.store_spec.slots.tolist(), strict=True):
            self.rig.arena.view(slot)[:] = content(block_hash, next(self._world.stores))
        self.manager.complete_store(set(stored), True, request)

    def reset(self) -> None:
        self.manager.reset_cache()
        self.manager.on_reset_flushed()
        self.floor = next(self._world.stores)


def content(block_hash: BlockHash, stored: int) -> bytes:
    """The right content of a block that was computed as number `stored` of all."""
    tag = stored.to_bytes(8, "little")
    return (tag + block_hash * (PAYLOAD_BYTES // len(block_hash) + 1))[:PAYLOAD_BYTES]


class World:
    """Two hosts at one server; the test draws what happens."""

    def __init__(self, draw: random.Random, asks_in_one_trip: bool) -> None:
        self.draw = draw
        self.twin = RemoteTwin(asks_in_one_trip=asks_in_one_trip, names_per_call=3)
        self.clock = ManualClock()
        self.stores = iter(range(1, 1 << 30))
        whens = [WriteWhen.THROUGH, draw.choice([WriteWhen.SECOND_TOUCH, WriteWhen.OFF])]
        self.hosts = [Host(self, when) for when in whens]
        self.all = keys(BLOCKS)

    def go_on(self) -> None:
        """Some calls of the server end, and time goes by."""
        for host in self.hosts:
            for _ in range(self.draw.randrange(4)):
                host.rig.node.work()
                if len(host.rig.calls):
                    host.rig.calls.step(self.draw.randrange(len(host.rig.calls)))
        self.clock.advance(0.2)

    def step(self) -> None:
        """Do one random thing."""
        host = self.draw.choice(self.hosts)
        actions: list[Callable[[], None]] = [
            *[lambda: host.serve(self._prompt())] * 6,
            *(self.go_on, self._wait, self._fail, self._mend, self._mend, self._damage),
            host.manager.maintain,
        ]
        rare = [host.rig.client.die, host.reset]
        actions += [self.draw.choice(rare)] * (self.draw.random() < 0.3)
        self.draw.choice(actions)()

    def _prompt(self) -> list[BlockHash]:
        """One of a few chains, or its begin."""
        start = self.draw.choice([0, 0, 0, 8, 16])
        return self.all[start : start + self.draw.randrange(1, PROMPT_BLOCKS + 1)]

    def _wait(self) -> None:
        self.clock.advance(self.draw.choice([0.5, 3.0, 6.0, 40.0]))

    def _fail(self) -> None:
        self.twin.fails[self.draw.choice(METHODS)] = self.draw.choice(sorted(FAILURES))
        self.twin.writes_late = self.draw.random() < 0.2

    def _mend(self) -> None:
        self.twin.fails.clear()
        self.twin.writes_late, self.twin.damage = False, None

    def _damage(self) -> None:
        others = [*self.twin.held.values()]
        self.twin.damage = lambda data: self.draw.choice(
            [data, data[:-1], bytes([data[0] ^ 1]) + data[1:], *others]
        )
        self.twin.write_late(b"\xbd" * 9999)

    def lose_counters(self) -> None:
        """The server forgets resets: it has restarted, or has evicted one or both counters."""
        for name in [*self.twin.counters]:
            if self.draw.random() < 0.7:
                del self.twin.counters[name]


def run(seed: int, asks_in_one_trip: bool, *, loses_counters: bool = False) -> World:
    world = World(random.Random(seed), asks_in_one_trip)
    for _ in range(80):
        world.step()
        if loses_counters and world.draw.random() < 0.1:
            world.draw.choice([world.lose_counters, *(host.reset for host in world.hosts)])()
    return world


@pytest.mark.parametrize("asks_in_one_trip", [True, False])
@given(st.integers(0, 2**32))
@example(65)  # a node that dies while another host resets
@example(773)  # both hosts reset while the server fails
@example(7776)  # a host that stored blocks before it heard of the other one's reset
@settings(max_examples=40)
def test_nothing_wrong_is_ever_loaded(asks_in_one_trip: bool, seed: int) -> None:
    run(seed, asks_in_one_trip)


@pytest.mark.parametrize("asks_in_one_trip", [True, False])
@given(st.integers(0, 2**32))
@example(1192)  # the host that asks first has missed the reset
@settings(max_examples=40)
def test_a_server_that_loses_its_counters_brings_nothing_wrong_back(
    asks_in_one_trip: bool, seed: int
) -> None:
    run(seed, asks_in_one_trip, loses_counters=True)


def test_the_model_reads_from_the_server_at_all() -> None:
    worlds = [run(seed, True) for seed in range(20)]
    assert sum(host.from_server for world in worlds for host in world.hosts) > 100


@pytest.mark.parametrize("ends_at_s", [[9.0, 9.0], [0.2, 9.0], [1.4, 9.0], [1.4, 1.8]])
def test_a_request_waits_for_one_deadline_at_most(ends_at_s: list[float]) -> None:
    """The server answers the lookup at the first time and the read at the second one, or not."""
    world = World(random.Random(0), asks_in_one_trip=True)
    writer, reader = world.hosts
    for host in world.hosts:
        host.rig.pump()
    writer.serve(world.all[:PROMPT_BLOCKS])
    writer.rig.pump()
    request, began_s, hits = Request(), world.clock.now_s, None
    left = deque(ends_at_s)
    for _ in range(MAX_STEPS):
        hits = reader.manager.lookup(world.all[:2], request)
        if hits is not None:
            break
        reader.manager.end_step()
        reader.rig.node.work()
        world.clock.advance(0.1)
        waited_s = world.clock.now_s - began_s
        if left and waited_s >= left[0]:
            left.popleft()
            while reader.rig.calls.step():
                pass
        reader.rig.node.work()
    deadline_s, step_s = StoreOptions().deadline_s, 0.1
    assert world.clock.now_s - began_s < deadline_s + 3 * step_s
    assert hits == (0 if left else 2)


def test_heads_are_written_before_tails() -> None:
    """The queue of the server has room for 6 blocks of the prompt, the first tier for all."""
    world = World(random.Random(0), asks_in_one_trip=True)
    writer = Host(world, WriteWhen.THROUGH, slots=64)
    writer.rig.pump()
    writer.serve(world.all[:PROMPT_BLOCKS])
    writer.rig.pump()
    written = [name.rsplit("/", 1)[-1] for name in world.twin.held]
    assert written == [block_hash.hex() for block_hash in world.all[:6]]
