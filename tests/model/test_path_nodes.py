"""Random interleavings of nodes and a writer that dies, stalls and resets, against an oracle.

Every message, transfer and connection is an event; a random number decides which one is next. The
oracle is the content of a block: its key and the number of resets that its engine knew of. No read
may bring another key or an older number. With two paths, an engine reads and writes them through a
chain, and offers again what it has read.

One scenario with the real writer is run again and again: it is killed, stalled or cut off before
each of its messages in turn.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from support.keys import key
from support.memory_backend import MemoryBackend
from support.node_rig import (
    ARENA_SLOTS,
    BLOCK,
    PER_SEGMENT,
    CoreWriter,
    NodesRig,
    NodeTwin,
)

from kvcascade.handlers.node.path_wire import NodeState
from kvcascade.manager.below.chain import BelowChain, ChainedTier
from kvcascade.manager.below.port import Below, Ended, Put
from kvcascade.tiers.base import BlockHash, BlockOutcome
from kvcascade.tiers.nvme.path.path_messages import (
    Bad,
    Commit,
    CommitDone,
    Epoch,
    Grant,
    Granted,
    Hello,
    Read,
    Release,
    Removed,
    Reset,
    Stored,
    TierFigures,
    Touch,
    Welcome,
)
from kvcascade.tiers.nvme.segments.format import segment_name

SEEDS = range(40)
STEPS = 800
"""Events of a run, for each path."""
KEYS = 24
HEADER_BYTES = 4096
"""Bytes of a segment before its first slot."""


def content(number: int, generation: int) -> bytes:
    """The bytes of a block that was made after so many resets."""
    pattern = b"%06d/%06d;" % (number, generation)
    return (pattern * (BLOCK // len(pattern) + 1))[:BLOCK]


@dataclass
class Engine:
    """One engine: what it asked for, and what it knows."""

    twins: Sequence[NodeTwin]
    """Nodes of the engine, one for each path."""
    port: Below
    rng: random.Random
    generation: int = 0
    tickets: int = 0
    free: list[int] = field(default_factory=lambda: list(range(ARENA_SLOTS)))
    jobs: dict[int, tuple[bool, list[int], list[int], int]] = field(default_factory=dict)
    """Whether a job reads, its blocks, its slots, and the generation at its start."""
    counts: dict[BlockOutcome, int] = field(default_factory=dict)
    stored: set[int] = field(default_factory=set)
    """Blocks of this generation that the writer acknowledged."""

    @property
    def arena(self) -> MemoryBackend:
        """The slots of the first tier."""
        return self.twins[0].arena

    def put(self, numbers: Sequence[int]) -> None:
        """Offer blocks of this engine's generation."""
        slots = [self.free.pop() for _ in numbers]
        for number, slot in zip(numbers, slots, strict=True):
            self.arena.view(slot)[:] = content(number, self.generation)
        self._offer(numbers, slots)

    def _offer(self, numbers: Sequence[int], slots: list[int]) -> None:
        self.tickets += 1
        answers = self.port.put(self.tickets, [key(n) for n in numbers], slots)
        started = [at for at, answer in enumerate(answers) if answer is Put.STARTED]
        self.free += [slot for at, slot in enumerate(slots) if at not in started]
        if started:
            chosen = [numbers[at] for at in started], [slots[at] for at in started]
            self.jobs[self.tickets] = (False, *chosen, self.generation)

    def get(self, numbers: Sequence[int]) -> None:
        """Ask one tier for blocks: with several tiers, the one that may hold the first of them."""
        tier = self.port.may_hold(key(numbers[0])) or 1
        if len(self.twins) > 1:
            numbers = [n for n in numbers if self.port.may_hold(key(n))]
        slots = [self.free.pop() for _ in numbers]
        self.tickets += 1
        self.jobs[self.tickets] = (True, list(numbers), slots, self.generation)
        self.port.get(self.tickets, tier, [key(n) for n in numbers], slots)

    def look(self, resets: int) -> None:
        """Take in what ended, and what others did."""
        if self.port.maintain():
            self.generation = resets
            self.stored.clear()
        for ended in self.port.poll():
            self._check(ended)
        self.port.take_lost()

    def _check(self, ended: Ended) -> None:
        is_get, numbers, slots, generation = self.jobs.pop(ended.ticket)
        assert ended.is_get == is_get and len(ended.outcomes) == len(numbers)
        found_ok: list[tuple[int, int]] = []
        for number, slot, outcome in zip(numbers, slots, ended.outcomes, strict=True):
            self.counts[outcome] = self.counts.get(outcome, 0) + 1
            if outcome is BlockOutcome.OK and not is_get and generation == self.generation:
                self.stored.add(number)
            if is_get and outcome is BlockOutcome.OK:
                found = bytes(self.arena.view(slot)[:14]).decode().rstrip(";").split("/")
                assert int(found[0]) == number, "another block"
                assert int(found[1]) >= generation, "a block from before a reset"
                assert self.arena.view(slot) == content(number, int(found[1]))
                found_ok.append((number, slot))
        is_current = generation == self.generation and len(self.twins) > 1
        again = dict(found_ok) if is_current and self.rng.random() < 0.5 else {}
        self.free += [slot for slot in slots if slot not in again.values()]
        if again:
            self._offer(list(again), list(again.values()))


class World:
    """Two engines on one path or several, and what a random number makes of them."""

    def __init__(self, seed: int, paths: int = 1) -> None:
        self.rng = random.Random(seed)
        self.rigs = [NodesRig() for _ in range(paths)]
        for rig in self.rigs:
            rig.clock = self.rigs[0].clock
        self.engines = [self._engine() for _ in range(2)]
        self.tools = [rig.add() for rig in self.rigs] if paths > 1 else []
        """Nodes of others that use one path only."""
        for rig in self.rigs:
            rig.rng = self.rng
        self.resets = self.lone_resets = 0
        self.killed = 0
        self.dead = [rig.twin for rig in self.rigs]
        """The writer of each path that died last."""
        for engine in self.engines:
            engine.look(0)

    def _engine(self) -> Engine:
        twins = [self.rigs[0].add()]
        twins += [rig.add(arena=twins[0].arena) for rig in self.rigs[1:]]
        if len(twins) == 1:
            return Engine(twins, twins[0].tier, self.rng)
        tiers = [ChainedTier(twin.tier, None) for twin in twins]
        return Engine(twins, BelowChain(tiers, ARENA_SLOTS, self.rigs[0].clock), self.rng)

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
            self._reset(engine)
        elif what < 0.322:
            self._disturb()
        elif what < 0.4:
            self.rigs[0].clock.advance(rng.choice((0.01, 0.2, 3.0)))
            for twin in engine.twins:
                twin.node.tick()
        elif what < 0.6:
            engine.look(self.resets)
        else:
            rng.choice(self.rigs).step()

    def _reset(self, engine: Engine) -> None:
        """An engine resets all its tiers, or somebody else one path."""
        if self.tools and self.rng.random() < 0.3:
            self.lone_resets += 1
            self.rng.choice(self.tools).tier.reset()
            return
        engine.generation = self.resets
        engine.port.reset()

    @property
    def _is_resetting(self) -> bool:
        """One reset at a time, so that the oracle knows which generation comes of it; and each
        engine has seen the last one."""
        nodes = [node for rig in self.rigs for node in rig.nodes]
        is_due = any(node.tier._resets_due for node in nodes)
        is_due |= any(rig.writer is None or rig.twin.is_stalled for rig in self.rigs[1:])
        is_due |= any(is_open(engine.port) for engine in self.engines)
        return is_due or any(engine.generation != self.resets for engine in self.engines)

    def _disturb(self) -> None:
        """The writer dies, stops, goes on, or deletes a segment; or a connection is cut."""
        at = self.rng.randrange(len(self.rigs))
        what, rig = self.rng.random(), self.rigs[at]
        if rig.writer is None:
            rig.writer = self.dead[at].successor()
            rig.twin.is_opening = self.rng.random() < 0.25
        elif rig.twin.is_opening:
            rig.twin.has_opened()
        elif rig.twin.is_stalled and what < 0.7:
            rig.twin.go_on()
        elif what < 0.3:
            self.killed += 1
            self.dead[at] = rig.kill_writer()
        elif what < 0.5:
            rig.twin.is_stalled = True
        elif what < 0.8:
            self.rng.choice(self.engines).twins[at].cut()
        elif not rig.twin.is_stalled:
            rig.twin.replace_segment(self.rng.randrange(4))

    def settle(self) -> None:
        """A writer that works, until everything has ended."""
        for rig, dead in zip(self.rigs, self.dead, strict=True):
            if rig.writer is None:
                rig.writer = dead.successor()
            rig.twin.has_opened()
        for _ in range(100):
            self.rigs[0].clock.advance(1.0)
            for rig in self.rigs:
                rig.twin.go_on()
                for node in rig.nodes:
                    node.node.tick()
                rig.pump()
            for tool in self.tools:
                tool.tier.maintain()
            for engine in self.engines:
                engine.look(self.resets)


def is_open(port: Below) -> bool:
    """True while a reset has not reached every tier, as far as a chain knows."""
    return isinstance(port, BelowChain) and port._resets.are_open


@pytest.mark.parametrize("paths", [1, 2])
@pytest.mark.parametrize("seed", SEEDS)
def test_no_block_is_wrong_or_older_than_a_reset_and_every_job_ends(seed: int, paths: int) -> None:
    world = World(seed, paths)
    for _ in range(STEPS * paths):
        world.step()
    world.settle()
    for engine in world.engines:
        assert engine.jobs == {} and len(engine.free) == ARENA_SLOTS
        for twin in engine.twins:
            assert twin.tier.writes.coming == set()
            assert twin.node.state is NodeState.FOLLOWING and not twin.engine.jobs
        assert engine.generation == world.resets and not is_open(engine.port)
    for rig in world.rigs:
        assert not rig.twin.granted, "every grant ended"
    engine = world.engines[seed % 2]
    new = range(KEYS, KEYS + 4)
    engine.put(new)
    world.settle()
    for twin in engine.twins:
        assert [n for n in new if twin.tier.may_hold(BlockHash(key(n)))] == [*new]
    engine.get(new)
    world.settle()
    assert engine.counts[BlockOutcome.OK] >= 4


@pytest.mark.parametrize("paths", [1, 2])
def test_the_model_comes_to_every_place(paths: int) -> None:
    """Over the seeds, each event and each kind of outcome happens."""
    seen: dict[BlockOutcome, int] = {}
    killed = resets = lone_resets = 0
    for seed in SEEDS:
        world = World(seed, paths)
        for _ in range(STEPS * paths):
            world.step()
        world.settle()
        lone_resets += world.lone_resets
        killed, resets = killed + world.killed, resets + world.resets
        for engine in world.engines:
            for outcome, n in engine.counts.items():
                seen[outcome] = seen.get(outcome, 0) + n
    assert killed > 10 and resets > 10 and (lone_resets > 5) is (paths > 1)
    wanted = (BlockOutcome.OK, BlockOutcome.GONE, BlockOutcome.HELD, BlockOutcome.CANCELLED)
    assert all(seen.get(outcome, 0) > 0 for outcome in wanted), seen


class Scenario:
    """Two engines and the real writer, which fails once, before one of its messages."""

    def __init__(self, at: int, fault: str) -> None:
        """`fault` comes before message number `at`: the writer is killed or stalled, or all are cut
        off from it."""
        self.kinds: list[type] = []
        """Kinds of all messages, in order."""
        self._at, self._fault = at, fault
        self.places = 0
        """Number of messages before which it may fail."""
        self._resets = 0
        self.rig = NodesRig(is_real=True)
        self.rig.rng = random.Random(0)
        self.rig.before_message = self._before
        self.engines: list[Engine] = []

    def run(self) -> None:
        """Every kind of message; what was acknowledged is there after each part."""
        for _ in range(2):
            twin = self.rig.add()
            self.engines.append(Engine([twin], twin.tier, random.Random(0)))
        self._settle()
        one, two = self.engines
        one.put(range(6))
        two.put(range(4, 9))
        self._settle()
        one.get(range(9))
        two.get(range(3))
        one.port.touch([BlockHash(key(n)) for n in range(6)])
        one.put([9, 10])
        self._settle()
        two.get([self._damage(one), *sorted(one.stored | two.stored)])
        self._settle()
        two.put([12])
        self._reset(one)
        two.get(range(5))
        self._settle()
        two.put(range(6))
        one.put(range(8, 12))
        self._settle()
        for first in range(100, 120, 10):  # more than the tier holds
            one.put(range(first, first + 5))
            two.put(range(first + 5, first + 10))
            self._settle(may_evict=True)
        for engine in self.engines:
            assert engine.jobs == {} and len(engine.free) == ARENA_SLOTS
            assert engine.generation == self._resets
            engine.stored.clear()
        self.places, self._at = len(self.kinds), -1
        one.put(range(200, 216))
        self._settle()
        assert len(one.stored) == 16, "no slot is lost"
        two.get(range(200, 216))
        self._settle()

    def _before(self, message: object) -> None:
        self.kinds.append(type(message))
        if len(self.kinds) != self._at + 1:
            return
        writer = self._writer
        if self._fault == "stalled":
            writer.is_stalled = True
            return
        if self._fault == "killed":
            self.rig.writer = None
            self.dead = writer
        for node in self.rig.nodes:
            node.cut()

    @property
    def _writer(self) -> CoreWriter:
        assert isinstance(self.rig.writer, CoreWriter)
        return self.rig.writer

    def _settle(self, *, may_evict: bool = False) -> None:
        """Transfers end without the writer; then it goes on, or another one comes."""
        self._pass(3)
        if self.rig.writer is None:
            self.rig.writer = self.dead.successor()
        self._writer.go_on()
        self._pass(3)
        for number in set() if may_evict else self.engines[0].stored | self.engines[1].stored:
            for engine in self.engines:
                assert engine.port.may_hold(BlockHash(key(number))), f"block {number} is lost"

    def _pass(self, times: int) -> None:
        for _ in range(times):
            self.rig.clock.advance(5.5)
            for twin in self.rig.nodes:
                twin.node.tick()
            self.rig.pump()
            for engine in self.engines:
                engine.look(self._resets)

    def _reset(self, engine: Engine) -> None:
        self._resets += 1
        engine.generation = self._resets
        for each in self.engines:
            each.stored.clear()
        engine.port.reset()

    def _damage(self, engine: Engine) -> int:
        """Change a byte of a stored block, and return its number."""
        (namespace,) = self._writer.core.namespaces.values()
        number = min(engine.stored)
        slot = namespace.presence.find(key(number))
        segment, place = divmod(slot, PER_SEGMENT)
        path = namespace.home.folders[0] / "segments" / segment_name(segment)
        self.rig.fs.damage(path, HEADER_BYTES + place * BLOCK, b"\xff")
        for each in self.engines:
            each.stored.discard(number)
        return number


@pytest.mark.parametrize("fault", ["killed", "stalled", "cut off"])
def test_a_writer_fails_before_every_message_and_nothing_is_wrong_or_lost(fault: str) -> None:
    plain = Scenario(-1, fault)
    plain.run()
    wanted = {Hello, Grant, Commit, Release, Bad, Touch, Read, Reset}
    wanted |= {Welcome, Granted, CommitDone, Epoch, Stored, Removed, TierFigures}
    assert wanted <= set(plain.kinds)
    failed: list[type] = []
    for at in range(plain.places):
        scenario = Scenario(at, fault)
        scenario.run()
        failed += scenario.kinds[at : at + 1]
    assert wanted <= set(failed), "it failed before each kind"
