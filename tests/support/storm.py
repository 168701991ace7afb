"""Many requests at once after a restart, in virtual time: the real manager, tiers without bytes.

A scheduler asks for its waiting requests in order, at every step, and loads the first ones whose
blocks are there. The device takes some at a time, and computes one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvcascade.manager.cascading import CascadingOffloadingManager
from kvcascade.manager.core import ManagerOptions
from kvcascade.manager.first_tier import Tier
from kvcascade.manager.promotion.standstill import Standstill
from kvcascade.manager.request import Request
from kvcascade.tiers.base import BlockHash
from kvcascade.tiers.nvme.path.path_messages import (
    MAX_KEYS_PER_MESSAGE,
    PROTOCOL,
    Commit,
    Grant,
    Granted,
    Hello,
    NamespaceSpec,
)
from kvcascade.tiers.policies import create
from kvcascade.tools.replay.tier_options import TierOptions
from kvcascade.tools.replay.virtual import Rate, SlotBackend, VirtualClock
from kvcascade.tools.replay.virtual_node import (
    ROOT,
    VirtualPath,
    VirtualTierOptions,
    open_virtual_tier,
)

GB = 10**9
STEP_S = 0.01
"""Longest time between two steps of the scheduler."""
MAX_STEPS = 1_000_000


@dataclass(frozen=True, slots=True)
class Machine:
    """Sizes and speeds; the defaults are those of a large server."""

    block_bytes: int = 8 << 20
    tokens_per_block: float = 64.0
    cpu_bytes: int = 32 << 30
    disk_bytes_per_s: float = 10 * GB
    device_bytes_per_s: float = 50 * GB
    prefill_tokens_per_s: float = 10_000.0
    device_blocks: int = 1 << 20
    decode_s: float = 0.0
    """How long a request keeps its place on the device after it was loaded or computed."""
    budget_slots: int | None = None
    holders_come_first: bool = True
    """False: as in vLLM up to 0.30, a request that does not fit hides those that were loaded."""


class Stage(Enum):
    """Where a request is."""

    WAITING = "waiting"
    LOADING = "loading"
    LOADED = "loaded"
    """Its blocks are on the device, and it waits to be scheduled."""
    COMPUTING = "computing"
    DECODING = "decoding"
    DONE = "done"


@dataclass(eq=False, slots=True)
class Asker:
    """One request."""

    arrives_s: float
    hashes: list[BlockHash]
    below: int
    """So many of its blocks, from the first, are in the tier below."""
    request: Request = field(default_factory=Request)
    stage: Stage = Stage.WAITING
    due_s: float = 0.0
    """When the stage ends by itself."""
    hits: int = 0
    loaded_s: float | None = None
    """When everything that it loads was on the device."""
    served_s: float | None = None
    """When it was computed as well."""


class Storm:
    """An engine that starts with an empty first tier."""

    def __init__(self, machine: Machine, askers: Sequence[Asker]) -> None:
        self.machine = machine
        self.clock = VirtualClock()
        self.askers = sorted(askers, key=lambda asker: asker.arrives_s)
        size = machine.block_bytes
        top = SlotBackend(size, machine.cpu_bytes // size, "CPU")
        distinct = {h for asker in askers for h in asker.hashes[: asker.below]}
        rate = Rate(machine.disk_bytes_per_s)
        slots = len(distinct) + 4096
        tier = TierOptions("nvme", slots * size, "lru", rate, rate)
        options = VirtualTierOptions(tier, slots, size, size)
        port, self._node = open_virtual_tier(options, self.clock)
        _fill(self._node.path, sorted(distinct))
        self.manager = CascadingOffloadingManager(
            Tier("cpu", top, create("lru", top.capacity)),
            port,
            ManagerOptions(
                promotion_budget_slots=machine.budget_slots,
                prefill_tokens_per_s=machine.prefill_tokens_per_s,
                tokens_per_block=machine.tokens_per_block,
                with_events=False,
            ),
            clock=self.clock,
        )
        self._standstill = Standstill()
        self._computed_s = self._link_free_s = 0.0

    def run(self) -> None:
        """Until every request is over."""
        for _ in range(MAX_STEPS):
            self.step()
            if all(asker.stage is Stage.DONE for asker in self.askers):
                return
            self._let_time_pass()
        raise AssertionError("a request never ends")

    def step(self) -> None:
        """One step of the scheduler."""
        for asker in self.askers:
            if asker.due_s <= self.clock.now_s:
                self._go_on(asker)
        waiting = [a for a in self.askers if a.arrives_s <= self.clock.now_s]
        if self.machine.holders_come_first:
            waiting.sort(key=lambda asker: asker.stage is not Stage.LOADED)
        for asker in waiting:
            if asker.stage is Stage.LOADED:
                self._compute(asker)
            elif asker.stage is Stage.WAITING and not self._has_room(asker):
                break  # nobody behind it is looked at
        self.manager.end_step()
        self._standstill.end_step()

    @property
    def computed_blocks(self) -> int:
        """Blocks that were computed although they lay below."""
        return sum(max(0, asker.below - asker.hits) for asker in self.askers)

    def _has_room(self, asker: Asker) -> bool:
        """Ask for a request, and start it; False if the device has no room for it."""
        if not self.machine.holders_come_first and self._standstill.must_defer():
            return True
        hits = self.manager.lookup(asker.hashes, asker.request)
        if hits is None:
            return True
        on_device = (Stage.LOADING, Stage.LOADED, Stage.COMPUTING, Stage.DECODING)
        taken = sum(len(other.hashes) for other in self.askers if other.stage in on_device)
        if taken + len(asker.hashes) > self.machine.device_blocks:
            return False
        self._standstill.note_progress()
        asker.hits = hits
        if hits:
            self.manager.prepare_load(asker.hashes[:hits], asker.request)
            size = hits * self.machine.block_bytes
            start_s = max(self._link_free_s, self.clock.now_s)
            self._link_free_s = start_s + size / self.machine.device_bytes_per_s
            asker.stage, asker.due_s = Stage.LOADING, self._link_free_s
        else:
            self._compute(asker)
        return True

    def _go_on(self, asker: Asker) -> None:
        """The stage that it is in has ended."""
        if asker.stage is Stage.LOADING:
            self.manager.complete_load(asker.hashes[: asker.hits])
            asker.stage, asker.loaded_s = Stage.LOADED, asker.due_s
        elif asker.stage is Stage.COMPUTING:
            output = self.manager.prepare_store(asker.hashes, asker.request)
            if output is not None:
                self.manager.complete_store(output.block_hashes_to_store)
            asker.stage, asker.served_s = Stage.DECODING, asker.due_s
            asker.due_s += self.machine.decode_s
        elif asker.stage is Stage.DECODING:
            self._standstill.note_progress()
            self.manager.finish_request(asker.request)
            asker.stage = Stage.DONE

    def _compute(self, asker: Asker) -> None:
        """Prompts are computed in turn; with nothing to compute a request decodes at once."""
        tokens = (len(asker.hashes) - asker.hits) * self.machine.tokens_per_block
        asker.stage, asker.due_s = Stage.COMPUTING, self.clock.now_s
        if tokens:
            self._computed_s = max(self._computed_s, self.clock.now_s)
            self._computed_s += tokens / self.machine.prefill_tokens_per_s
            asker.due_s = self._computed_s

    def _let_time_pass(self) -> None:
        now_s = self.clock.now_s
        active = (Stage.LOADING, Stage.COMPUTING, Stage.DECODING)
        events = [self._node.path.next_end_s, now_s + STEP_S]
        events += [asker.due_s for asker in self.askers if asker.stage in active]
        self.clock.now_s = max(now_s + 1e-6, min(events))


def _fill(path: VirtualPath, keys: Sequence[BlockHash]) -> None:
    """Let another engine have stored these blocks."""
    client, writer = 2, path.writer
    (namespace,) = writer.namespaces.values()
    home = namespace.home
    about = home.description
    spec = NamespaceSpec(about["label"], b"{}", b"{}", home.block_bytes)
    writer.connect(client)
    writer.receive(client, Hello(PROTOCOL, "before", (str(ROOT),), spec, writer.path.options))
    for start in range(0, len(keys), MAX_KEYS_PER_MESSAGE):
        some: list[bytes] = list(keys[start : start + MAX_KEYS_PER_MESSAGE])
        writer.receive(client, Grant(start, some))
        answers = [m for _ in range(4) for _, m in writer.step() if isinstance(m, Granted)]
        (granted,) = answers
        checksums = bytes(8 * len(some))
        writer.receive(client, Commit(start, granted.epoch, some, granted.slots, checksums))
        writer.step()
    writer.disconnect(client)
    path.work()


_numbers = itertools.count(1)


def prompt(blocks: int) -> list[BlockHash]:
    """Hashes of a prompt that nobody else has."""
    number = next(_numbers)
    return [BlockHash(number.to_bytes(8) + i.to_bytes(8)) for i in range(blocks)]
