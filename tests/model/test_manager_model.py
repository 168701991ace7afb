"""The cascading manager against a dict: a block may be absent, wrong bytes are never served.

Everything is driven as the scheduler and a worker drive it, on memory backends whose transfers
run when the machine says so, in any order, and fail on command.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule
from support.cascade import Cascade, block_bytes, key

from kvcascade.config.schema import OnReset, WriteMode
from kvcascade.manager.base import LookupState
from kvcascade.manager.core import ManagerOptions
from kvcascade.manager.request import Request
from kvcascade.tiers.base import BlockHash, BlockOutcome

KEYS = st.integers(0, 40)
PREFIXES = st.tuples(st.integers(0, 30), st.integers(1, 9)).map(
    lambda p: [key(i) for i in range(p[0], p[0] + p[1])]
)
FATES = st.sampled_from(list(BlockOutcome))


@dataclasses.dataclass
class StoreJob:
    hashes: list[BlockHash]
    slots: list[int]
    epoch: int
    is_outdated: bool = False
    """Another engine reset a tier since."""


@dataclasses.dataclass
class LoadJob:
    hashes: list[BlockHash]
    slots: list[int]
    epoch: int


class ManagerMachine(RuleBasedStateMachine):
    capacities: tuple[int, ...] = (8, 20)
    options = ManagerOptions()

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.cascade = Cascade(self.capacities, self.options)
        self.manager = self.cascade.manager
        self.epoch = 0
        self.stores: list[StoreJob] = []
        """Worker jobs under way; a job from before a reset never outlives the reset rule."""
        self.loads: list[LoadJob] = []
        self.ever_stored: dict[BlockHash, int] = {}
        self.requests_made: list[Request] = []

    @rule(target=requests)
    def new_request(self) -> Request:
        self.requests_made.append(Request())
        return self.requests_made[-1]

    @rule(request=requests, hashes=PREFIXES, loads=st.booleans())
    def look_up_and_load(self, request: Request, hashes: list[BlockHash], loads: bool) -> None:
        hits: list[BlockHash] = []
        is_waiting = False
        for block_hash in hashes:
            state = self.manager.lookups.lookup_block(block_hash, request)
            if state is LookupState.MISS:
                break
            if state is LookupState.HIT:
                assert self.ever_stored.get(block_hash) == self.epoch, "a hit of nothing stored"
                hits.append(block_hash)
            else:
                is_waiting = True
        if hits and not is_waiting and loads:
            spec = self.manager.prepare_load(hits, request)
            self.loads.append(LoadJob(hits, spec.slots.tolist(), self.epoch))

    @rule(hashes=PREFIXES, fates=st.lists(FATES, min_size=1, max_size=4))
    def serve(self, hashes: list[BlockHash], fates: list[BlockOutcome]) -> None:
        """A whole request: ask until nothing is pending, load, compute the rest, store it."""
        request = Request()
        hits: int | None = None
        for _ in range(8):
            hits = self.manager.lookup(hashes, request)
            if hits is not None:
                break
            self.manager.end_step()
            for handler in self.cascade.handlers:
                handler.fate = lambda source, target: fates[(source * 3 + target) % len(fates)]
                handler.wait(set(handler.queued))
                handler.fate = lambda source, target: BlockOutcome.OK
            self.manager.end_step()
        if hits:
            spec = self.manager.prepare_load(hashes[:hits], request)
            for block_hash, slot in zip(hashes, spec.slots.tolist(), strict=False):
                assert self.cascade.read_top(slot) == block_bytes(block_hash), "wrong bytes"
            self.manager.complete_load(set(hashes[:hits]))
        self.store(hashes, request)
        while self.stores:
            self.worker_ends_store(0, True)
        self.manager.finish_request(request)
        self.manager.end_step()

    @rule(hashes=PREFIXES, request=requests)
    def store(self, hashes: list[BlockHash], request: Request) -> None:
        output = self.manager.prepare_store(hashes, request)
        if output is None:
            return
        stored = output.block_hashes_to_store
        assert stored == [h for h in hashes if h in set(stored)], "order of the offer is kept"
        slots = output.store_spec.slots.tolist()
        assert len(slots) == len(stored)
        if stored:
            self.stores.append(StoreJob(stored, slots, self.epoch))

    @precondition(lambda self: self.stores)
    @rule(which=st.integers(0, 99), success=st.sampled_from([True, True, True, False]))
    def worker_ends_store(self, which: int, success: bool) -> None:
        job = self.stores.pop(which % len(self.stores))
        for block_hash, slot in zip(job.hashes, job.slots, strict=True):
            self.cascade.write_top(slot, block_bytes(block_hash))
        if job.epoch != self.epoch:
            return  # the engine reports nothing from before a reset
        if success and not job.is_outdated:
            self.ever_stored.update(dict.fromkeys(job.hashes, self.epoch))
        self.manager.complete_store(set(job.hashes), success)

    @precondition(lambda self: self.loads)
    @rule(which=st.integers(0, 99))
    def worker_ends_load(self, which: int) -> None:
        job = self.loads.pop(which % len(self.loads))
        if job.epoch != self.epoch:
            return
        for block_hash, slot in zip(job.hashes, job.slots, strict=True):
            assert self.cascade.read_top(slot) == block_bytes(block_hash), "wrong bytes"
        self.manager.complete_load(set(job.hashes))

    @rule()
    def end_step(self) -> None:
        self.manager.end_step()

    @rule()
    def background(self) -> None:
        self.manager.maintain()

    @rule(seconds=st.sampled_from([0.1, 3.0, 30.0]))
    def time_goes_by(self, seconds: float) -> None:
        self.cascade.now_s += seconds

    @rule(handler=st.integers(0, 7))
    def transfer(self, handler: int) -> None:
        self.cascade.handler(handler).step()

    @rule(handler=st.integers(0, 7), fates=st.lists(FATES, min_size=1, max_size=5))
    def transfer_fails(self, handler: int, fates: list[BlockOutcome]) -> None:
        chosen = self.cascade.handler(handler)
        chosen.fate = lambda source, target: fates[(source + target) % len(fates)]
        chosen.step()
        chosen.fate = lambda source, target: BlockOutcome.OK

    @rule(handler=st.integers(0, 7), accepts=st.booleans())
    def handler_refuses(self, handler: int, accepts: bool) -> None:
        self.cascade.handler(handler).accepts = accepts

    @rule(request=requests)
    def finish(self, request: Request) -> None:
        self.manager.finish_request(request)

    @rule(hashes=PREFIXES)
    def touch(self, hashes: list[BlockHash]) -> None:
        self.cascade.policies[0].touch(hashes)

    @rule()
    def events(self) -> None:
        self.cascade.apply_events()

    @rule(is_flushed=st.booleans())
    def reset(self, is_flushed: bool) -> None:
        self.cascade.apply_events()
        self.manager.reset_cache()
        self.cascade.forget_events()
        self.epoch += 1
        if is_flushed:
            self.stores.clear()
            self.loads.clear()
            self.manager.on_reset_flushed()
        else:
            # The engine flushes old jobs before any step that could submit new ones.
            for job in self.stores:
                for slot in job.slots:
                    self.cascade.write_top(slot, b"late" * 16)
            self.stores.clear()
            self.loads.clear()

    @precondition(lambda self: len(self.capacities) > 1)
    @rule(which=st.integers(0, 7))
    def reset_by_another(self, which: int) -> None:
        """Of any lower tier; the engine knows nothing and goes on reporting."""
        self.cascade.apply_events()
        index = 1 + which % (len(self.capacities) - 1)
        self.cascade.backends[index].is_overtaken = True
        self.manager.end_step()
        emptied = [self.cascade.backends[i].medium for i in (0, index)]
        self.cascade.apply_events(but_for=emptied)  # a tier between or below names its blocks
        if index == len(self.capacities) - 1:  # else it may still be further down
            self.ever_stored.clear()
        for job in self.stores:
            job.is_outdated = True

    @invariant()
    def slots_add_up(self) -> None:
        self.cascade.check_slots()

    def teardown(self) -> None:
        for job in self.stores:
            if job.epoch == self.epoch:
                self.manager.complete_store(set(job.hashes), success=False)
        for load in self.loads:
            self.manager.complete_load(set(load.hashes))
        for handler in self.cascade.handlers:
            handler.accepts = True
        for request in self.requests_made:
            self.manager.finish_request(request)
        self.cascade.now_s += 100.0
        for _ in range(6):  # two hops and their completions at most
            self.manager.end_step()
            self.cascade.run_transfers()
        self.manager.shutdown()
        self.cascade.apply_events()
        self.cascade.check_settled()


class ThreeTierMachine(ManagerMachine):
    capacities = (6, 10, 30)


class WriteBackMachine(ManagerMachine):
    options = ManagerOptions(write_mode=WriteMode.BACK, dirty_age_s=2.0)


class WriteThroughMachine(ManagerMachine):
    options = ManagerOptions(write_mode=WriteMode.THROUGH)


class CpuOnlyMachine(ManagerMachine):
    capacities = (8,)


class SmallBelowMachine(ManagerMachine):
    """What is evicted below is dirty again above."""

    capacities = (20, 6)
    options = ManagerOptions(write_mode=WriteMode.BACK, dirty_age_s=2.0)


class KeepMachine(ManagerMachine):
    """A reset forgets what the workers are at, and nothing else."""

    options = ManagerOptions(on_reset=OnReset.KEEP)

    @rule(is_flushed=st.booleans())
    def reset(self, is_flushed: bool) -> None:
        self.manager.reset_cache()
        for job in self.stores:
            for slot in job.slots:
                self.cascade.write_top(slot, b"late" * 16)
        for load in self.loads:
            for block_hash, slot in zip(load.hashes, load.slots, strict=True):
                assert self.cascade.read_top(slot) == block_bytes(block_hash), "wrong bytes"
        self.stores.clear()
        self.loads.clear()
        if is_flushed:
            self.manager.on_reset_flushed()


@pytest.mark.parametrize(
    "machine",
    [
        ManagerMachine,
        ThreeTierMachine,
        WriteBackMachine,
        WriteThroughMachine,
        CpuOnlyMachine,
        SmallBelowMachine,
        KeepMachine,
    ],
)
def test_manager_against_a_dict(machine: type[ManagerMachine]) -> None:
    case = machine.TestCase
    case.settings = settings(stateful_step_count=60, deadline=None)
    case("runTest").runTest()


def test_keep_on_reset_is_the_same_machine_without_forgetting() -> None:
    cascade = Cascade((8, 20), ManagerOptions(on_reset=OnReset.KEEP))
    hashes = [key(i) for i in range(4)]
    cascade.store(hashes)
    cascade.manager.reset_cache()
    assert cascade.manager.lookup(hashes) == 4
