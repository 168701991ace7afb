"""Random interleavings of nodes and a writer that dies, stalls and resets, against an oracle.

Every message, transfer and connection is an event; a random number decides which one is next. The
oracle is the content of a block: its key and the number of resets that its engine knew of. No read
may bring another key or an older number.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from support.keys import key
from support.node_rig import BLOCK, NodesRig, NodeTwin

from kvcascade.handlers.node.path_wire import NodeState
from kvcascade.manager.below.port import Ended, Put
from kvcascade.tiers.base import BlockHash, BlockOutcome

SEEDS = range(40)
STEPS = 800
KEYS = 24


def content(number: int, generation: int) -> bytes:
    """The bytes of a block that was made after so many resets."""
    pattern = b"%06d/%06d;" % (number, generation)
    return (pattern * (BLOCK // len(pattern) + 1))[:BLOCK]


@dataclass
class Engine:
    """One engine: what it asked for, and what it knows."""

    twin: NodeTwin
    generation: int = 0
    tickets: int = 0
    free: list[int] = field(default_factory=lambda: list(range(64)))
    jobs: dict[int, tuple[bool, list[int], list[int], int]] = field(default_factory=dict)
    """Whether a job reads, its blocks, its slots, and the generation at its start."""
    counts: dict[BlockOutcome, int] = field(default_factory=dict)

    def put(self, numbers: Sequence[int]) -> None:
        """Offer blocks of this engine's generation."""
        slots = [self.free.pop() for _ in numbers]
        for number, slot in zip(numbers, slots, strict=True):
            self.twin.arena.view(slot)[:] = content(number, self.generation)
        self.tickets += 1
        answers = self.twin.tier.put(self.tickets, [key(n) for n in numbers], slots)
        started = [at for at, answer in enumerate(answers) if answer is Put.STARTED]
        self.free += [slot for at, slot in enumerate(slots) if at not in started]
        if started:
            chosen = [numbers[at] for at in started], [slots[at] for at in started]
            self.jobs[self.tickets] = (False, *chosen, self.generation)

    def get(self, numbers: Sequence[int]) -> None:
        """Ask for blocks."""
        slots = [self.free.pop() for _ in numbers]
        self.tickets += 1
        self.jobs[self.tickets] = (True, list(numbers), slots, self.generation)
        self.twin.tier.get(self.tickets, 1, [key(n) for n in numbers], slots)

    def look(self, resets: int) -> None:
        """Take in what ended, and what others did."""
        if self.twin.tier.maintain():
            self.generation = resets
        for ended in self.twin.tier.poll():
            self._check(ended)

    def _check(self, ended: Ended) -> None:
        is_get, numbers, slots, generation = self.jobs.pop(ended.ticket)
        assert ended.is_get == is_get and len(ended.outcomes) == len(numbers)
        self.free += slots
        for number, slot, outcome in zip(numbers, slots, ended.outcomes, strict=True):
            self.counts[outcome] = self.counts.get(outcome, 0) + 1
            if is_get and outcome is BlockOutcome.OK:
                found = bytes(self.twin.arena.view(slot)[:14]).decode().rstrip(";").split("/")
                assert int(found[0]) == number, "another block"
                assert int(found[1]) >= generation, "a block from before a reset"
                assert self.twin.arena.view(slot) == content(number, int(found[1]))


class World:
    """Two engines on one path, and what a random number makes of them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.rig = NodesRig()
        self.engines = [Engine(self.rig.add()) for _ in range(2)]
        self.rig.rng = self.rng
        self.resets = 0
        self.killed = 0
        self.dead = self.rig.twin
        """The writer that died last."""
        for engine in self.engines:
            engine.look(0)

    def step(self) -> None:
        """One event."""
        engine, rng = self.rng.choice(self.engines), self.rng
        numbers = rng.sample(range(KEYS), rng.randint(1, 6))
        what = rng.random()
        if what < 0.15 and len(engine.free) > 8:
            engine.put(numbers)
        elif what < 0.3 and len(engine.free) > 8:
            engine.get(numbers)
        elif what < 0.31 and not self._is_resetting:
            self.resets += 1
            engine.generation = self.resets
            engine.twin.tier.reset()
        elif what < 0.322:
            self._disturb()
        elif what < 0.4:
            self.rig.clock.advance(rng.choice((0.01, 0.2, 3.0)))
            engine.twin.node.tick()
        elif what < 0.6:
            engine.look(self.resets)
        else:
            self.rig.step()

    @property
    def _is_resetting(self) -> bool:
        """One reset at a time, so that the oracle knows which generation comes of it; and each
        engine has seen the last one."""
        is_due = any(engine.twin.tier._resets_due for engine in self.engines)
        return is_due or any(engine.generation != self.resets for engine in self.engines)

    def _disturb(self) -> None:
        """The writer dies, stops, goes on, or deletes a segment; or a connection is cut."""
        what, rig = self.rng.random(), self.rig
        if rig.writer is None:
            rig.writer = self.dead.successor()
            rig.twin.is_opening = self.rng.random() < 0.5
        elif rig.twin.is_opening:
            rig.twin.has_opened()
        elif what < 0.3:
            self.killed += 1
            self.dead = rig.kill_writer()
        elif what < 0.5:
            rig.twin.is_stalled = True
        elif what < 0.6:
            rig.twin.go_on()
        elif what < 0.8:
            self.rng.choice(self.engines).twin.cut()
        elif not rig.twin.is_stalled:
            rig.twin.replace_segment(self.rng.randrange(4))

    def settle(self) -> None:
        """A writer that works, until everything has ended."""
        if self.rig.writer is None:
            self.rig.writer = self.dead.successor()
        self.rig.twin.has_opened()
        for _ in range(100):
            self.rig.twin.go_on()
            self.rig.clock.advance(1.0)
            for engine in self.engines:
                engine.twin.node.tick()
            self.rig.pump()
            for engine in self.engines:
                engine.look(self.resets)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_block_is_wrong_or_older_than_a_reset_and_every_job_ends(seed: int) -> None:
    world = World(seed)
    for _ in range(STEPS):
        world.step()
    world.settle()
    for engine in world.engines:
        assert engine.jobs == {} and engine.twin.tier.writes.coming == set()
        assert engine.twin.node.state is NodeState.FOLLOWING and engine.twin.node.is_idle
        assert engine.generation == world.resets
    assert not world.rig.twin.granted, "every grant ended"
    engine = world.engines[seed % 2]
    new = range(KEYS, KEYS + 4)
    engine.put(new)
    world.settle()
    assert [n for n in new if engine.twin.tier.may_hold(BlockHash(key(n)))] == [*new]
    engine.get(new)
    world.settle()
    assert engine.counts[BlockOutcome.OK] >= 4


def test_the_model_comes_to_every_place() -> None:
    """Over the seeds, each event and each kind of outcome happens."""
    seen: dict[BlockOutcome, int] = {}
    killed = resets = 0
    for seed in SEEDS:
        world = World(seed)
        for _ in range(STEPS):
            world.step()
        world.settle()
        killed, resets = killed + world.killed, resets + world.resets
        for engine in world.engines:
            for outcome, n in engine.counts.items():
                seen[outcome] = seen.get(outcome, 0) + n
    assert killed > 10 and resets > 10
    wanted = (BlockOutcome.OK, BlockOutcome.GONE, BlockOutcome.HELD, BlockOutcome.CANCELLED)
    assert all(seen.get(outcome, 0) > 5 for outcome in wanted), seen
