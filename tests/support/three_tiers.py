"""A cascade of memory and two NVMe tiers in real folders; every transfer runs at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from kvcascade.handlers.node.nvme_handlers import NvmeLoadHandler, NvmeStoreHandler
from kvcascade.handlers.node.nvme_pair import NvmePairHandler
from kvcascade.manager.cascading import ManagerOptions, build_cascade
from kvcascade.manager.flow import Link
from kvcascade.manager.level import Tier
from kvcascade.tiers.base import BlockHash, SlotSpec
from kvcascade.tiers.nvme.tier import NvmeTierConfig
from kvcascade.tiers.policies import create

from .clock import ManualClock
from .executors import InlineExecutor
from .inside import demoters
from .memory_backend import MemoryBackend
from .nvme_rig import BLOCK, Rig, config_for, content, key

TOP_SLOTS = 8
MIDDLE_SLOTS = 64
LAST_SLOTS = 256
FEW = 4


def middle_config(path: Path, slots: int = MIDDLE_SLOTS) -> NvmeTierConfig:
    """Of the tier in between; no segment is made before it is needed."""
    folder = path / "middle"
    folder.mkdir(exist_ok=True)
    return replace(config_for([folder], slots=slots), ready_bytes=1)


class ThreeTiers:
    """An engine with three tiers, the worker played by `store`."""

    def __init__(self, path: Path, options: ManagerOptions | None = None) -> None:
        (path / "last").mkdir(exist_ok=True)
        self.clock = ManualClock()
        self.middle = Rig(middle_config(path), clock=self.clock)
        self.last = Rig(config_for([path / "last"], slots=LAST_SLOTS), clock=self.clock)
        self.top = MemoryBackend(BLOCK, TOP_SLOTS, medium="CPU")
        self.top_policy = create("lru", TOP_SLOTS)
        run, above, below = InlineExecutor(), self.middle.tier.store, self.last.tier.store
        links = [
            Link(
                NvmeStoreHandler(above, self.top.view, run),
                NvmeLoadHandler(above, self.top.view, run),
            ),
            Link(NvmePairHandler(above, below, run), NvmeLoadHandler(below, self.top.view, run)),
        ]
        tiers = [
            Tier("cpu", self.top, self.top_policy),
            Tier("nvme0", self.middle.backend, self.middle.policy),
            Tier("nvme1", self.last.backend, self.last.policy),
        ]
        self.manager = build_cascade(tiers, links, options, self.clock, self.clock.advance)

    @property
    def written(self) -> list[int]:
        """Blocks written per link so far, top first."""
        return [link.demoted_blocks for link in self.manager.counters.links]

    def step(self, times: int = 1, seconds: float = 0.0) -> None:
        """So many steps of the engine, this far apart."""
        for _ in range(times):
            self.clock.advance(seconds)
            self.manager.end_step()

    def offer(self, hashes: Sequence[BlockHash]) -> None:
        """Blocks that a worker finished; all of them are taken within a few steps."""
        output = self.manager.prepare_store(hashes)
        for _ in range(FEW):
            if output is None:
                self.step()
                output = self.manager.prepare_store(hashes)
        assert output is not None and len(output.block_hashes_to_store) == len(hashes)
        spec = output.store_spec
        assert isinstance(spec, SlotSpec)
        for block_hash, slot in zip(output.block_hashes_to_store, spec.slots.tolist(), strict=True):
            self.top.view(slot)[:] = content(block_hash)
        self.manager.complete_store(output.block_hashes_to_store)

    def store(self, start: int, stop: int, seconds: float = 0.0) -> None:
        """Offer blocks by number, a few in each step."""
        for first in range(start, stop, FEW):
            self.offer([key(i) for i in range(first, min(first + FEW, stop))])
            self.step(2, seconds)

    def on_disk(self, start: int, stop: int) -> int:
        """How many of these blocks either disk has; a wrong one fails the test."""
        hashes = [key(i) for i in range(start, stop)]
        return sum(self.middle.check(h) or self.last.check(h) for h in hashes)

    def dirty(self) -> int:
        """Blocks of the middle tier that are not known to be below."""
        return self.manager.tier_states()[1].dirty_blocks

    def write_middle_down(self) -> None:
        """Have the last tier hold all that is in the middle."""
        while self.dirty():
            demoters(self.manager)[1].demote_coldest(MIDDLE_SLOTS)
            self.step()

    def close(self) -> None:
        """Shut down."""
        assert self.manager.shutdown()
        self.middle.close()
        self.last.close()


@contextmanager
def three_tiers(path: Path, options: ManagerOptions | None = None) -> Iterator[ThreeTiers]:
    """Open, and closed at the end."""
    engine = ThreeTiers(path, options)
    yield engine
    engine.close()
