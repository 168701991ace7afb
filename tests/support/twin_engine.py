"""`TwinEngine`: a manager over one or two twins of the port below."""

from __future__ import annotations

from kvcascade.config.schema import WriteMode
from kvcascade.manager.base import LookupState
from kvcascade.manager.below.chain import BelowChain, ChainedTier
from kvcascade.manager.below.port import Below
from kvcascade.manager.cascading import CascadingOffloadingManager
from kvcascade.manager.core import ManagerOptions
from kvcascade.manager.first_tier import Tier
from kvcascade.manager.request import Request
from kvcascade.tiers.base import BlockHash
from kvcascade.tiers.policies import create

from .below_twin import BelowTwin
from .cascade import BLOCK_SIZE, block_bytes
from .clock import ManualClock
from .memory_backend import MemoryBackend

DEADLINE_S = 3.0


class TwinEngine:
    """A manager over a small first tier and the twin, or over a chain of two twins."""

    def __init__(
        self,
        slots: int = 4,
        below: int = 32,
        lower: int = 0,
        mode: WriteMode = WriteMode.DEMOTE,
    ) -> None:
        """`lower`: slots of a second tier below; 0: there is none."""
        self.clock = ManualClock()
        self.top = MemoryBackend(BLOCK_SIZE, slots, medium="CPU")
        self.twin = BelowTwin(self.top.view, below, BLOCK_SIZE)
        self.lower = BelowTwin(self.top.view, lower, BLOCK_SIZE)
        self.twin.pass_time = self.lower.pass_time = self.clock.advance
        chained = [ChainedTier(twin, None) for twin in (self.twin, self.lower)]
        self.below: Below = BelowChain(chained, slots, self.clock) if lower else self.twin
        self.policy = create("lru", slots)
        self.manager = CascadingOffloadingManager(
            Tier("cpu", self.top, self.policy),
            self.below,
            ManagerOptions(promotion_deadline_s=DEADLINE_S, shutdown_flush_s=1.0, write_mode=mode),
            self.clock,
            self.clock.advance,
        )

    def offer(self, hashes: list[BlockHash]) -> list[BlockHash] | None:
        """A worker stores blocks; returns those that were taken, None if they are put off."""
        output = self.manager.prepare_store(hashes)
        if output is None:
            return None
        taken = output.block_hashes_to_store
        for block_hash, slot in zip(taken, output.store_spec.slots.tolist(), strict=True):
            self.top.view(slot)[:] = block_bytes(block_hash)
        self.manager.complete_store(set(taken))
        return taken

    def step(self) -> None:
        """Let every transfer end, and end a step."""
        self.twin.run()
        self.lower.run()
        self.manager.end_step()

    def below_only(self, hashes: list[BlockHash]) -> None:
        """Blocks that the twin holds and the first tier does not."""
        assert self.offer(hashes) == hashes
        assert self.manager.flush_dirty(self.clock() + 1.0)
        evicted = self.policy.evict(len(hashes), ())
        assert evicted is not None
        for _, status in evicted:
            self.top.free(status)

    def ask(self, request: Request, hashes: list[BlockHash]) -> list[LookupState]:
        """Look blocks up."""
        return [self.manager.lookups.lookup_block(block_hash, request) for block_hash in hashes]

    def loads(self, request: Request, hashes: list[BlockHash]) -> None:
        """Blocks that are hits have the right bytes."""
        spec = self.manager.prepare_load(hashes, request)
        for block_hash, slot in zip(hashes, spec.slots.tolist(), strict=True):
            assert bytes(self.top.view(slot)) == block_bytes(block_hash), "wrong bytes"
        self.manager.complete_load(hashes)
