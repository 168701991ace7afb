"""An NVMe tier in a temporary directory, driven as the manager and the handlers drive it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path

from kvcascade.tiers.base import BlockHash, BlockOutcome, BlockStatus, CachePolicy
from kvcascade.tiers.nvme.disk.filesystem import FileSystem
from kvcascade.tiers.nvme.namespace import NamespaceKey
from kvcascade.tiers.nvme.nvme_backend import NvmeBackend, NvmeSpec
from kvcascade.tiers.nvme.opening import open_nvme_tier
from kvcascade.tiers.nvme.tier import NvmeTier, NvmeTierConfig
from kvcascade.tiers.nvme.writer.capacity import capacity_for
from kvcascade.tiers.policies import order_class
from kvcascade.tiers.policies.ordered import OrderedPolicy

from .clock import ManualClock
from .executors import InlineExecutor
from .keys import key, keys

BLOCK = 4096
SLOT_BYTES = BLOCK + 128
FEW = 4


def content(block_hash: BlockHash, version: int = 0) -> bytes:
    """The one right content of a block."""
    seed = b"kv" + block_hash + bytes([version])
    return (seed * (BLOCK // len(seed) + 1))[:BLOCK]


def config_for(paths: Sequence[Path], slots: int = 64, per_segment: int = 8) -> NvmeTierConfig:
    """A tier that has room for at least `slots` blocks."""
    segments = -(-slots // per_segment)
    capacity = capacity_for(segments, per_segment, BLOCK, len(paths))
    return NvmeTierConfig(
        paths=tuple(paths),
        capacity_bytes=capacity + len(paths) * BLOCK,
        block_bytes=BLOCK,
        key=NamespaceKey("some/model", {"model": "some/model", "dtype": "float16"}),
        slots_per_segment=per_segment,
    )


class Rig:
    """A tier with its policy. Every step is the manager's: evict, allocate, write, land."""

    def __init__(
        self,
        config: NvmeTierConfig,
        executor: Executor | None = None,
        fs: FileSystem | None = None,
        policy: str = "lru",
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.config = config
        self.clock = clock or ManualClock()
        self.tier: NvmeTier = open_nvme_tier(
            config, InlineExecutor() if executor is None else executor, fs, self.clock
        )
        order = order_class(policy)(self.tier.backend.capacity, self.tier.arrays)
        if self.tier.recovered:
            order.reconcile(self.tier.live_slots())
        self.policy: CachePolicy = OrderedPolicy(self.tier.directory, order)

    @property
    def backend(self) -> NvmeBackend:
        """The tier's slots."""
        return self.tier.backend

    def begin_store(self, hashes: Sequence[BlockHash]) -> list[BlockStatus]:
        """Make room, allocate and insert."""
        missing = len(hashes) - self.backend.get_num_free_blocks()
        if missing > 0:
            evicted = self.policy.evict(missing, set(hashes))
            if evicted is None:  # what is evictable may have to be found out first
                self.backend.get_num_free_blocks()
                evicted = self.policy.evict(missing, set(hashes))
            assert evicted is not None
            for _, status in evicted:
                self.backend.free(status)
        statuses = self.backend.allocate_blocks(hashes)
        self.policy.insert_many(hashes, statuses)
        return statuses

    def store(self, hashes: Sequence[BlockHash], version: int = 0) -> list[BlockOutcome]:
        """Store blocks; those that fail leave again."""
        new = [h for h in hashes if self.policy.get(h) is None]
        statuses = self.begin_store(new)
        spec = self.backend.get_load_store_spec(new, statuses)
        payloads = [memoryview(content(h, version)) for h in new]
        outcomes = self.tier.store.write(
            spec.hashes, spec.slots.tolist(), payloads, spec.epoch, spec.removals
        )
        for block_hash, status, outcome in zip(new, statuses, outcomes, strict=True):
            if outcome is BlockOutcome.OK:
                status.ref_cnt = 0
            else:
                self.drop(block_hash)
        return outcomes

    def store_bit_by_bit(self, hashes: Sequence[BlockHash]) -> list[BlockOutcome]:
        """Store a few blocks at a time, so that a tier which is not full can grow."""
        outcomes: list[BlockOutcome] = []
        for start in range(0, len(hashes), FEW):
            outcomes += self.store(hashes[start : start + FEW])
        return outcomes

    def drop(self, block_hash: BlockHash) -> None:
        """What the manager does with a block that failed or is damaged."""
        status = self.policy.remove(block_hash)
        if status is not None:
            self.backend.free(status)

    def load(self, block_hash: BlockHash) -> tuple[BlockOutcome, bytes] | None:
        """Read a block; None if it is a miss. Damaged ones leave."""
        status = self.policy.get(block_hash)
        if status is None or status.ref_cnt < 0:
            return None
        return self.read_pinned(self.pin(block_hash))

    def pin(self, block_hash: BlockHash) -> NvmeSpec:
        """Find a block that is here, as a promotion does; `read_pinned` comes next."""
        status = self.policy.get(block_hash)
        assert status is not None
        status.ref_cnt += 1
        return self.backend.get_load_store_spec([block_hash], [status])

    def read_pinned(self, spec: NvmeSpec) -> tuple[BlockOutcome, bytes]:
        """Read what was pinned."""
        buffer = bytearray(BLOCK)
        slots = spec.slots.tolist()
        (outcome,) = self.tier.store.read(spec.hashes, slots, [memoryview(buffer)], spec.values)
        self.tier.table.at(slots[0]).ref_cnt -= 1
        if outcome in (BlockOutcome.CORRUPT, BlockOutcome.GONE):
            self.drop(spec.hashes[0])
        return outcome, bytes(buffer)

    def check(self, block_hash: BlockHash) -> bool:
        """True if the block is there and right; a wrong one fails the test."""
        result = self.load(block_hash)
        if result is None or result[0] is not BlockOutcome.OK:
            return False
        assert result[1] == content(block_hash), "wrong bytes were served"
        return True

    def maintain(self) -> bool:
        """The end of a step; True if another process reset the tier, and all is forgotten here."""
        is_reset = self.backend.maintain(self.policy)
        if is_reset:
            self.reset()
        return is_reset

    def reset(self) -> list[BlockStatus]:
        """Forget everything; the busy slots are the caller's to free."""
        self.policy.clear()
        return self.backend.reset()

    def close(self, clean: bool = True) -> None:
        """Close the tier."""
        self.tier.close(clean)

    def reopened(self, clean: bool = True, **changes: object) -> Rig:
        """Close and open again, with changes to the configuration."""
        self.close(clean)
        return Rig(replace(self.config, **changes))  # type: ignore[arg-type]

    def check_sums(self) -> None:
        """With nothing under way, free slots and blocks add up to what there is."""
        free = self.backend.get_num_free_blocks()
        assert free + len(self.policy) == self.backend.available


def filled(config: NvmeTierConfig, blocks: int) -> Path:
    """A closed tier with blocks `key(0)` to `key(blocks - 1)`; returns its directory."""
    rig = Rig(config)
    rig.store(keys(blocks))
    rig.close()
    return rig.tier.namespace.folders[0]


__all__ = ["BLOCK", "Rig", "config_for", "content", "filled", "key"]
