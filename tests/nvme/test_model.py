"""The tier against a dict: a block may be absent, wrong bytes are never served.

Jobs run in any order and may fail; the tier is reset, closed, killed and opened again at any
moment. Each store has its own bytes, so a block from before a reset is a wrong block.
"""

from __future__ import annotations

import errno
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.executors import SteppingExecutor
from support.memory_file_system import MemoryFileSystem
from support.nvme_rig import BLOCK, Rig, config_for, content, key

from kvcascade.tiers.base import BlockHash, BlockOutcome, BlockStatus
from kvcascade.tiers.nvme.nvme_backend import NvmeSpec

KEYS = 24
SLOTS = 16


@dataclass
class Store:
    """A store that has not run, or has run and was not reported."""

    hashes: list[BlockHash]
    statuses: list[BlockStatus]
    spec: NvmeSpec
    version: int
    is_orphan: bool = False


class TierMachine(RuleBasedStateMachine):
    """The manager's calls, in any order that a manager may make them."""

    @initialize(paths=st.integers(1, 2), policy=st.sampled_from(["lru", "arc"]))
    def start(self, paths: int, policy: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        roots = [Path(self.folder.name) / str(i) for i in range(paths)]
        for root in roots:
            root.mkdir()
        self.config = config_for(roots, slots=SLOTS, per_segment=4)
        self.fs = MemoryFileSystem()
        self.executor = SteppingExecutor()
        self.policy = policy
        self.version = 0
        self.versions: dict[BlockHash, int] = {}
        """What each block holds if it is there."""
        self.jobs: list[Store] = []
        self.open()

    def open(self) -> None:
        self.fs.heal()
        self.rig = Rig(self.config, self.executor, self.fs, self.policy)
        self.executor.run_all()

    @rule(numbers=st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=6, unique=True))
    def prepare_store(self, numbers: list[int]) -> None:
        new = [key(i) for i in numbers if self.rig.policy.get(key(i)) is None]
        missing = len(new) - self.rig.backend.get_num_free_blocks()
        if missing > 0:
            evicted = self.rig.policy.evict(missing, set(new))
            if evicted is None:
                return
            for _, status in evicted:
                self.rig.backend.free(status)
        if not new:
            return
        statuses = self.rig.begin_store(new)
        spec = self.rig.backend.get_load_store_spec(new, statuses)
        self.version = (self.version + 1) % 256
        self.jobs.append(Store(new, statuses, spec, self.version))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def run_store(self, data: st.DataObject) -> None:
        job = self.jobs.pop(data.draw(st.integers(0, len(self.jobs) - 1)))
        payloads = [memoryview(content(h, job.version)) for h in job.hashes]
        spec = job.spec
        outcomes = self.rig.tier.store.write(
            spec.hashes, spec.slots.tolist(), payloads, spec.epoch, spec.removals
        )
        for block_hash, status, outcome in zip(job.hashes, job.statuses, outcomes, strict=True):
            if job.is_orphan:
                self.rig.backend.free(status)
            elif outcome is BlockOutcome.OK:
                status.ref_cnt = 0
                self.versions[block_hash] = job.version
            else:
                self.rig.drop(block_hash)

    @rule(number=st.integers(0, KEYS - 1))
    def load(self, number: int) -> None:
        block_hash = key(number)
        result = self.rig.load(block_hash)
        if result is not None and result[0] is BlockOutcome.OK:
            assert block_hash in self.versions
            assert result[1] == content(block_hash, self.versions[block_hash])

    @rule(numbers=st.lists(st.integers(0, KEYS - 1), max_size=4))
    def touch(self, numbers: list[int]) -> None:
        self.rig.policy.touch([key(i) for i in numbers])

    @rule(operation=st.sampled_from(["pwritev", "preadv"]), skip=st.integers(0, 3))
    def fail_soon(self, operation: str, skip: int) -> None:
        self.fs.fail(operation, errno.EIO, skip=skip)

    @rule(number=st.integers(0, KEYS - 1))
    def damage(self, number: int) -> None:
        status = self.rig.policy.get(key(number))
        if status is None or status.ref_cnt < 0:
            return
        segments = self.rig.tier.segments
        segment, index = divmod(status.block_id, segments.layout.slots)
        offset = segments.layout.header_bytes + index * BLOCK + number
        self.fs.damage(segments.path_of(segment), offset, b"\xa5\x5a")

    @rule(numbers=st.sets(st.integers(0, KEYS - 1), max_size=6))
    def somebody_takes_blocks_away(self, numbers: set[int]) -> None:
        index = self.rig.tier.index
        entries = [(key(i), entry) for i in numbers if (entry := index.entry(key(i))) is not None]
        index.take_away(index.epoch, [(h, entry.pack(h)) for h, entry in entries])

    @rule()
    def run_background(self) -> None:
        self.executor.run_all()
        self.rig.tier.directory.refresh()

    @rule()
    def reset(self) -> None:
        self.rig.reset()
        self.versions.clear()
        for job in self.jobs:
            job.is_orphan = True

    @rule(clean=st.booleans())
    def reopen(self, clean: bool) -> None:
        self.executor.run_all() if clean else self.executor.__init__()  # type: ignore[misc]
        self.jobs.clear()
        self.rig.close(clean)
        before = len(self.rig.policy)
        self.open()
        assert clean or len(self.rig.policy) <= before + SLOTS
        self.rig.check_sums()

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "rig"):
            return
        backend, in_flight = self.rig.backend, sum(len(j.hashes) for j in self.jobs if j.is_orphan)
        held = len(self.rig.policy) + in_flight
        assert backend.get_num_free_blocks() + held == backend.available

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.fs.heal()
            self.rig.close(clean=False)
            self.folder.cleanup()


TestTier = TierMachine.TestCase
