"""A remote store under random use and random faults, against what may be true.

Blocks may be absent, wrong bytes are never served, nothing is written to a destination whose read
has ended, every call ends exactly once, and no block from before a reset comes back. A reset loads
other weights: its host and the others never exchange blocks.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.executors import SteppingExecutor
from support.keys import keys
from support.remote_rig import UNTOUCHED, RemoteRig, check, content
from support.remote_twin import RemoteTwin

from kvcascade.tiers.base import BlockHash
from kvcascade.tiers.remote.base import FAILURES, RemoteOutcome
from kvcascade.tiers.remote.objects import parts_of
from kvcascade.tiers.remote.remote_counters import Verb

OK = RemoteOutcome.OK
BLOCKS = keys(12)
METHODS = ("exist_many", "get_into", "put", "remove", "counter", "advance")
DEADLINE_S, QUEUE_S = 2.0, 10.0


class Run:
    """Two hosts at one server; the test draws what happens."""

    def __init__(self, draw: random.Random, asks_in_one_trip: bool) -> None:
        self.draw = draw
        self.twin = RemoteTwin(asks_in_one_trip=asks_in_one_trip, names_per_call=3)
        self.queues = [SteppingExecutor(), SteppingExecutor()]
        first = RemoteRig(self.twin, self.queues[0], queue_s=QUEUE_S, deadline_s=DEADLINE_S)
        self.hosts = [first, first.host(executor=self.queues[1])]
        self.open: dict[tuple[int, int, Verb], int] = {}
        """Host, ticket and kind of every call that has not ended, and its number of blocks."""
        self.reads: dict[tuple[int, int], tuple[list[BlockHash], list[memoryview], bytes]] = {}
        """Blocks, destinations, and the weights of the host when the read began."""
        self.over: list[tuple[list[memoryview], list[bytes]]] = []
        """Destinations of reads that have ended, and what they held then."""
        self.served = 0

    def step(self) -> None:
        """Do one random thing."""
        actions: list[Callable[[int], None]] = [
            *(self.ask, self.get, self.put, self.poll, self.run, self.run, self.poll),
            *(self.wait, self.fail, self.mend, self.mend, self.damage),
        ]
        actions += [self.reset] * (self.draw.random() < 0.2)
        self.draw.choice(actions)(self.draw.randrange(2))

    def some(self) -> list[BlockHash]:
        return BLOCKS[: self.draw.randrange(1, len(BLOCKS) + 1)]

    def ask(self, host: int) -> None:
        rig, wanted = self.hosts[host], self.some()
        ticket = rig.ticket()
        rig.store.ask(ticket, wanted)
        self.open[host, ticket, Verb.LOOKUP] = len(wanted)
        if self.draw.random() < 0.7:
            rig.store.send()

    def get(self, host: int) -> None:
        rig, wanted = self.hosts[host], self.some()
        ticket, slots = rig.ticket(), rig.slots(len(wanted))
        self.open[host, ticket, Verb.READ] = len(wanted)
        self.reads[host, ticket] = (wanted, slots, rig.weights)
        rig.store.get(ticket, wanted, slots)

    def put(self, host: int) -> None:
        wanted = self.some()
        self.open[host, self.hosts[host].begin_write(wanted), Verb.WRITE] = len(wanted)

    def poll(self, host: int) -> None:
        for ended in self.hosts[host].store.poll():
            blocks = self.open.pop((host, ended.ticket, ended.kind))  # once, and only ours
            assert len(ended.outcomes) == blocks
            if ended.kind is Verb.READ:
                wanted, slots, weights = self.reads.pop((host, ended.ticket))
                check(wanted, slots, ended.outcomes, weights)
                self.served += list(ended.outcomes).count(OK)
                self.over.append((slots, [bytes(slot) for slot in slots]))

    def run(self, host: int) -> None:
        queue = self.queues[host]
        for _ in range(self.draw.randrange(1, 4)):
            if len(queue):
                queue.step(self.draw.randrange(len(queue)))

    def wait(self, host: int) -> None:
        self.hosts[host].clock.advance(self.draw.choice([0.01, 0.5, 1.0, 3.0, 6.0, 40.0]))

    def fail(self, host: int) -> None:
        method = self.draw.choice(METHODS)
        self.twin.fails[method] = self.draw.choice(sorted(FAILURES))
        self.twin.writes_late = self.draw.random() < 0.2

    def mend(self, host: int) -> None:
        self.twin.fails.clear()
        self.twin.writes_late, self.twin.damage = False, None

    def damage(self, host: int) -> None:
        others = [*self.twin.held.values()]
        self.twin.damage = lambda data: self.draw.choice(
            [data, data[:-1], bytes([data[0] ^ 1]) + data[1:], *others]
        )
        self.twin.write_late(b"\xbd" * 9999)

    def reset(self, host: int) -> None:
        self.hosts[host].update()

    def finish(self) -> None:
        """Let everything end, and look at what is left."""
        self.mend(0)
        for _ in range(4):
            for host, queue in enumerate(self.queues):
                self.hosts[host].store.send()
                queue.run_all()
                self.poll(host)
            self.hosts[0].clock.advance(QUEUE_S + DEADLINE_S + 40.0)
        self.twin.write_late(b"\xbd" * 9999)
        assert not self.open, "every call has ended"
        for slots, then in self.over:
            assert [bytes(slot) for slot in slots] == then, "a byte came after the end"
        for rig in self.hosts:
            state = rig.store.state()
            assert not state.is_reset_pending and not state.resting
        self.check_generations()

    def check_generations(self) -> None:
        """Every host that asks learns the newest counter, and no object is of a later one.

        A host whose last question failed knows none until it asks again.
        """
        for host, queue in enumerate(self.queues):
            self.ask(host)
            self.hosts[host].store.send()
            queue.run_all()
            self.poll(host)
        newest = self.twin.counters[self.hosts[0].objects.counter_name]
        for rig in self.hosts:
            known = rig.store.state().generation
            assert known is not None and parts_of(known) == (newest, bool(rig.weights))
        numbers = (int(name.split("/")[1], 16) for name in self.twin.held)
        assert max((parts_of(number)[0] for number in numbers), default=0) <= newest


@pytest.mark.parametrize("asks_in_one_trip", [True, False])
@given(st.integers(0, 2**32))
@settings(max_examples=60)
def test_nothing_wrong_is_ever_served(asks_in_one_trip: bool, seed: int) -> None:
    run = Run(random.Random(seed), asks_in_one_trip)
    for _ in range(120):
        run.step()
    run.finish()


def test_the_model_serves_blocks_at_all() -> None:
    served = 0
    for seed in range(20):
        run = Run(random.Random(seed), asks_in_one_trip=True)
        for _ in range(120):
            run.step()
        run.finish()
        served += run.served
    assert served > 100
    assert UNTOUCHED not in content(BLOCKS[1])
