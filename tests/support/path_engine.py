"""An engine on a real path: an arena in memory that a node process or a node thread moves."""

from __future__ import annotations

import math
import mmap
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Any

from support.keys import key
from support.writer_twin import LABEL, namespace_spec

from kvcascade.handlers.node.path.path_client import node_process, node_thread
from kvcascade.handlers.node.path.path_node import STILL_OPENING
from kvcascade.handlers.node.path_wire import CAN_READ, NodeNote, NodeSetup, NodeState
from kvcascade.manager.below.node_feed import NodeFeed
from kvcascade.manager.below.node_tier import NodeTier
from kvcascade.manager.below.port import Ended, Put, TierFacts
from kvcascade.tiers.base import BlockHash, BlockOutcome
from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.path.path_messages import PROTOCOL, Hello, NamespaceSpec, PathOptions
from kvcascade.tiers.nvme.path.presence_file import map_presence

STALL_S = 30.0
WAIT_S = 120.0
"""Time after which a test fails: far more than the slowest machine needs."""


class PathEngine:
    """One engine: arena, node, tier."""

    def __init__(
        self,
        paths: Sequence[Path],
        options: PathOptions,
        *,
        block_bytes: int = 4096,
        arena_slots: int = 64,
        capacity: int = 16,
        name: str = "engine",
        is_thread: bool = False,
        is_direct: bool = True,
        io_threads: int = 2,
        stall_s: float = STALL_S,
        label: str = LABEL,
        spec: NamespaceSpec | None = None,
        patience_s: float = math.inf,
    ) -> None:
        """`label` names the namespace; `patience_s` is that of `NodeSetup`."""
        self.block_bytes = block_bytes
        self._fd = os.memfd_create(name)
        os.ftruncate(self._fd, arena_slots * block_bytes)
        self.arena = memoryview(mmap.mmap(self._fd, arena_slots * block_bytes))
        fs = RealFileSystem(is_direct)
        namespace = spec or namespace_spec(block_bytes, label)
        hello = Hello(PROTOCOL, name, tuple(map(str, paths)), namespace, options, wants_events=True)
        setup = NodeSetup(hello, 0, arena_slots, io_threads, is_direct, patience_s=patience_s)
        self.refusals: list[str] = []
        """Reasons why the node has no writer."""
        self.executor = ThreadPoolExecutor(1, "kvcascade-map")

        facts = TierFacts("nvme", "NVME", block_bytes, capacity)
        feed = NodeFeed(
            facts,
            lambda folder, slots: map_presence(fs, Path(folder), slots),
            self.executor,
            monotonic,
        )

        def hear(message: Any) -> None:
            is_note = isinstance(message, NodeNote) and message.text != STILL_OPENING
            if is_note and message.state not in CAN_READ:
                self.refusals.append(message.text)
            feed.take(message)

        if is_thread:
            self.keeper = node_thread(setup, self.arena, fs, hear, is_batched=True)
        else:
            self.keeper = node_process(setup, lambda: os.dup(self._fd), hear)
        self.tier = NodeTier(self.keeper, feed, facts, monotonic, stall_s=stall_s)
        self._ticket = 0

    def open(self) -> PathEngine:
        """Start the node, and wait until it has joined."""
        self.keeper.start()
        self.until(lambda: self.tier.takes_puts)
        return self

    def until(self, is_true: Callable[[], bool], limit_s: float = WAIT_S) -> None:
        """Go on like an idle engine until something holds."""
        end_s = monotonic() + limit_s

        def look() -> bool:
            self.tier.poll()
            self.tier.maintain()
            return is_true()

        while not look():
            assert monotonic() < end_s, f"not within {limit_s} s; the node is {self.state}"
            self.keeper.wait(lambda: False, 0.01)

    @property
    def state(self) -> NodeState:
        """Last note of the node."""
        return self.tier.feed.state

    def view(self, slot: int) -> memoryview:
        """The bytes of an arena slot."""
        return self.arena[slot * self.block_bytes : (slot + 1) * self.block_bytes]

    def content(self, number: int) -> bytes:
        """The one right content of a block."""
        pattern = key(number)[:32] + b"kv"
        return (pattern * (self.block_bytes // len(pattern) + 1))[: self.block_bytes]

    def put(self, numbers: Sequence[int]) -> Sequence[BlockOutcome]:
        """Write blocks from the first slots, and wait; outcomes of those that were started."""
        return self._end(self._ticket).outcomes if Put.STARTED in self.begin_put(numbers) else []

    def begin_put(self, numbers: Sequence[int], first_slot: int = 0) -> Sequence[Put]:
        """Begin to write blocks from the slots from this one on."""
        slots = range(first_slot, first_slot + len(numbers))
        for slot, number in zip(slots, numbers, strict=True):
            self.view(slot)[:] = self.content(number)
        self._ticket += 1
        return self.tier.put(self._ticket, [key(n) for n in numbers], slots)

    def store(self, numbers: Sequence[int], limit_s: float = WAIT_S) -> None:
        """Write blocks until all are stored; like an engine, offer again what was put off.

        A slow machine may need longer for a segment than a grant waits for it.
        """
        end_s, left = monotonic() + limit_s, list(numbers)
        while left:
            assert monotonic() < end_s, f"{left} are not stored within {limit_s} s"
            self.until(lambda: self.tier.takes_puts and self.tier.room(1) > 0)
            assert set(self.put(left)) <= {BlockOutcome.OK, BlockOutcome.CANCELLED}
            held = self.holds(left)
            left = [number for number in left if number not in held]

    def get(self, numbers: Sequence[int]) -> Sequence[BlockOutcome]:
        """Read blocks, and wait; what is OK is compared."""
        self._ticket += 1
        for slot in range(len(numbers)):
            self.view(slot)[:] = b"\xee" * self.block_bytes
        self.tier.get(self._ticket, 1, [key(n) for n in numbers], range(len(numbers)))
        outcomes = self._end(self._ticket).outcomes
        for slot, (number, outcome) in enumerate(zip(numbers, outcomes, strict=True)):
            if outcome is BlockOutcome.OK:
                assert self.view(slot) == self.content(number), "wrong bytes"
        return outcomes

    def holds(self, numbers: Sequence[int]) -> list[int]:
        """Those of the blocks that a lookup finds."""
        return [n for n in numbers if self.tier.may_hold(BlockHash(key(n)))]

    def _end(self, ticket: int) -> Ended:
        found: list[Ended] = []

        def look() -> bool:
            found.extend(ended for ended in self.tier.poll() if ended.ticket == ticket)
            return bool(found)

        assert self.keeper.wait(look, WAIT_S)
        return found[0]

    def kill(self) -> None:
        """Kill the node's process."""
        assert self.keeper.pid
        os.kill(self.keeper.pid, signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Send a signal to the node's process; return after SIGSTOP when it has stopped."""
        assert self.keeper.pid
        os.kill(self.keeper.pid, number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self.keeper.pid, os.WSTOPPED | os.WNOWAIT)

    def close(self) -> None:
        """Close the tier as an engine does."""
        self.tier.shutdown(monotonic() + 5.0)
        self.keeper.close()
        self.executor.shutdown()
        os.close(self._fd)
