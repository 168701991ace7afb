"""A node and the writer of its path in virtual time: the tier below the first of a replay.

`NodeTier`, `PathNode` and `PathWriter` are those of an engine, and so are all messages between
them. The path is in memory, and the time of a transfer comes from a rate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from ...handlers.node.path.path_jobs import BlockIO
from ...handlers.node.path.path_node import PathNode
from ...handlers.node.path_wire import JobDone
from ...manager.below.node_feed import NodeFeed
from ...manager.below.node_tier import NodeTier
from ...manager.below.port import TierFacts
from ...tiers.base import BlockHash, BlockOutcome, SlotArray
from ...tiers.nvme.path.block_reader import BlocksRead
from ...tiers.nvme.path.block_table import BlockTable
from ...tiers.nvme.path.block_writer import BlocksWritten
from ...tiers.nvme.path.path_messages import (
    PROTOCOL,
    FromNode,
    Hello,
    NamespaceSpec,
    PathOptions,
    Welcome,
)
from ...tiers.nvme.path.presence_file import map_presence
from ...tiers.nvme.path.presence_table import PresenceTable
from ...tiers.nvme.path.writer.namespace.namespace_start import StartMeans
from ...tiers.nvme.path.writer.path_plan import capacity_of
from ...tiers.nvme.path.writer.path_writer import FIGURES_EVERY_S, PathWriter
from .memory_path import MemoryBlocks, MemoryFiles
from .tier_options import TierOptions
from .virtual import NEVER_S, InlineExecutor, Rate, VirtualClock

ROOT = Path("/replay")
CLIENT = 1
"""Number of the node's connection to the writer."""
QUIET_STEPS = 2
"""Steps of the writer without a message after which nothing is left to do at this time. A segment
that was made is taken in by the second one."""


@dataclass(frozen=True, slots=True)
class VirtualTierOptions:
    """Properties of a tier in virtual time."""

    tier: TierOptions
    slots: int
    block_bytes: int
    """Size of a block that manager and writer see, in bytes: a multiple of the page size."""
    moved_bytes: int
    """Size of a block that sets the time of a transfer, in bytes."""


@dataclass(slots=True)
class _Batch:
    """Parts of one job that end together."""

    end_s: float
    ends: list[Callable[[], None]]


class TransferLane:
    """One direction of a tier; batches move one after another and take the time of their bytes."""

    def __init__(self, rate: Rate, block_bytes: int, clock: VirtualClock) -> None:
        self._rate = rate
        self._block_bytes = block_bytes
        self._clock = clock
        self._free_s = 0.0
        self._batches: deque[_Batch] = deque()
        self._has_begun = False

    def begin_batch(self) -> None:
        """Let the next part begin a batch, which costs the latency once."""
        self._has_begun = False

    def add(self, blocks: int, on_end: Callable[[], None]) -> None:
        """Move blocks as a part of the current batch; `on_end` is called by `land`."""
        time_s = self._rate.time_s(blocks * self._block_bytes)
        if self._has_begun:
            time_s -= self._rate.latency_s
        else:
            self._batches.append(_Batch(0.0, []))
        self._has_begun = True
        self._free_s = max(self._free_s, self._clock.now_s) + time_s
        self._batches[-1].end_s = self._free_s
        self._batches[-1].ends.append(on_end)

    def land(self) -> bool:
        """Report the batches that have ended. Return True if there are any."""
        has_landed = False
        while self._batches and self._batches[0].end_s <= self._clock.now_s:
            if len(self._batches) == 1:
                self._has_begun = False
            has_landed = True
            for on_end in self._batches.popleft().ends:
                on_end()
        return has_landed

    @property
    def next_end_s(self) -> float:
        """Return the end of the next batch; `inf` if there is none."""
        return self._batches[0].end_s if self._batches else NEVER_S


class VirtualIO(BlockIO):
    """Moves no bytes. A read finds the blocks that the tier holds when it ends."""

    def __init__(
        self, files: MemoryFiles, options: VirtualTierOptions, clock: VirtualClock
    ) -> None:
        self._files = files
        self.reads = TransferLane(options.tier.read, options.moved_bytes, clock)
        self.writes = TransferLane(options.tier.write, options.moved_bytes, clock)
        self._presence: PresenceTable | None = None

    def open(self, welcome: Welcome) -> str:
        folder = ROOT / welcome.folder
        self._presence = map_presence(self._files, folder, welcome.slots)
        return str(folder)

    def release_writes(self) -> None:
        """Do nothing: no process shares the path."""

    def forget_segments(self, numbers: Sequence[int]) -> None:
        """Do nothing: no segment is open."""

    def write(
        self,
        keys: Sequence[BlockHash],
        slots: Sequence[int],
        arena_slots: SlotArray,
        on_end: Callable[[BlocksWritten | None], None],
    ) -> None:
        n = len(keys)
        self.writes.add(n, lambda: on_end(BlocksWritten(list(range(n)), [0] * n, [])))

    def read(
        self,
        keys: Sequence[BlockHash],
        arena_slots: SlotArray,
        on_end: Callable[[BlocksRead | None], None],
    ) -> None:
        self.reads.add(len(keys), lambda: on_end(BlocksRead([self._found(key) for key in keys])))

    def cancel_writes(self) -> None:
        """Do nothing: the writer of a replay is never lost."""

    def begin_batches(self) -> None:
        """Let the next part of each direction begin a batch."""
        self.reads.begin_batch()
        self.writes.begin_batch()

    def land(self) -> bool:
        """Report what has ended. Return True if there is anything."""
        has_read, has_written = self.reads.land(), self.writes.land()
        return has_read or has_written

    def _found(self, key: BlockHash) -> BlockOutcome:
        assert self._presence is not None, "the node has joined"
        return BlockOutcome.GONE if self._presence.find(key) < 0 else BlockOutcome.OK


class VirtualPath:
    """The writer of a path in memory, and the means of the one node that it serves."""

    def __init__(
        self,
        options: VirtualTierOptions,
        clock: VirtualClock,
        to_scheduler: Callable[[msgspec.Struct], None],
    ) -> None:
        """`to_scheduler` gets the messages of the node."""
        self.files = MemoryFiles()
        self.files.make_dir(ROOT)
        self.io = VirtualIO(self.files, options, clock)
        self._to_scheduler = to_scheduler
        self._clock = clock
        self._has_mail = False
        """True if the writer got a message since its last step."""
        size, budget_bytes = options.block_bytes, options.tier.write_budget_bytes
        budget = None if budget_bytes is None else budget_bytes // options.moved_bytes * size
        asked = PathOptions(
            capacity_of(1, options.slots, size, policy=options.tier.policy),
            policy=options.tier.policy,
            write_budget_bytes=budget,
            segment_bytes=options.slots * size,  # all room is there from the first block on
        )
        means = StartMeans(self.files, clock, _open_table, b"")
        self.writer = PathWriter(means, [ROOT], asked, clock, InlineExecutor())
        namespace = NamespaceSpec("replay", b"{}", b"{}", size)
        hello = Hello(PROTOCOL, "replay", (str(ROOT),), namespace, asked)
        self.node = PathNode(hello, self, self.io, clock)
        self.node.start()
        self.work()

    @property
    def next_end_s(self) -> float:
        """Time at which there is something to do; `inf` if nothing is in flight."""
        now_s, wait_s = self._clock.now_s, self.writer.wait_s
        if self._has_mail:
            return now_s
        ends_s = self.io.reads.next_end_s, self.io.writes.next_end_s
        return min(*ends_s, now_s + wait_s if wait_s < FIGURES_EVERY_S else NEVER_S)

    def work(self) -> None:
        """Do all that can be done at this time."""
        quiet = 0
        while quiet < QUIET_STEPS:
            self._has_mail = False
            has_landed = self.io.land()
            messages = self.writer.step()
            for _, message in messages:
                self.io.begin_batches()
                self.node.received(message)
            quiet = 0 if has_landed or messages else quiet + 1
        self.node.tick()

    # -- the means of the node -----------------------------------------------------------------

    def join(self) -> None:
        """See `NodeMeans`."""
        self.writer.connect(CLIENT)
        self.node.linked(is_leader=True)

    def send(self, message: FromNode) -> None:
        """See `NodeMeans`."""
        self._has_mail = True
        self.writer.receive(CLIENT, message)

    def hang_up(self) -> None:
        """See `NodeMeans`."""
        raise AssertionError("the writer of a replay serves its node")

    def tell(self, message: msgspec.Struct) -> None:
        """See `NodeMeans`."""
        self._to_scheduler(message)


class VirtualNode:
    """The scheduler's side of a node in virtual time."""

    def __init__(
        self, options: VirtualTierOptions, on_note: Callable[[Any], None], clock: VirtualClock
    ) -> None:
        """Join the path. `on_note` gets what the node says beside answers."""
        self._clock = clock
        self._on_note = on_note
        self._tickets = count(1)
        self._ends: dict[int, Callable[[Any], None]] = {}
        self._mail: deque[tuple[Callable[[Any], None], Any]] = deque()
        """Messages of the node until the next `poll` or `listen`, each with who gets it."""
        self.path = VirtualPath(options, clock, self._told)

    def submit(self, make_job: Callable[[int], Any], on_end: Callable[[Any], None]) -> bool:
        """See `NodeClient`."""
        ticket = next(self._tickets)
        self._ends[ticket] = on_end
        self.path.io.begin_batches()
        self.path.node.order(make_job(ticket))
        return True

    def tell(self, message: Any) -> None:
        """See `NodeClient`."""
        self.path.node.order(message)

    def flush(self) -> None:
        """See `NodeClient`: everything is sent at once."""

    def poll(self) -> None:
        """See `NodeClient`."""
        self.path.work()
        self._deliver()

    def listen(self) -> None:
        """See `NodeClient`. With jobs in flight, the next `poll` does the work."""
        if not self._ends:
            self.path.work()
        self._deliver()

    def wait_for_news(self, limit_s: float) -> None:
        """Let the time go by until there is something to do."""
        now_s = self._clock.now_s
        self._clock.now_s = min(max(now_s, self.path.next_end_s), now_s + limit_s)

    def replace(self) -> None:
        """Do nothing: no transfer hangs."""

    def kill(self) -> bool:
        """See `NodeClient`."""
        return not self._ends

    def _told(self, message: msgspec.Struct) -> None:
        take = self._ends.pop(message.ticket) if isinstance(message, JobDone) else self._on_note
        self._mail.append((take, message))

    def _deliver(self) -> None:
        while self._mail:
            take, message = self._mail.popleft()
            take(message)


def open_virtual_tier(
    options: VirtualTierOptions, clock: VirtualClock
) -> tuple[NodeTier, VirtualNode]:
    """Return a tier in virtual time, and its node."""
    name = options.tier.name
    facts = TierFacts(name, name, options.block_bytes, options.slots)

    def map_table(folder: str, slots: int) -> PresenceTable:
        return map_presence(node.path.files, Path(folder), slots)

    feed = NodeFeed(facts, map_table, InlineExecutor(), clock, with_events=False)
    node = VirtualNode(options, feed.take, clock)
    tier = NodeTier(node, feed, facts, clock, stall_s=NEVER_S)
    tier.maintain()
    return tier, node


def _open_table(
    folder: Path,
    map_bytes: int,
    identity: bytes,
    *,
    is_durable: bool,
    is_same_boot: bool,
    wall_clock: Callable[[], float],
) -> BlockTable:
    return MemoryBlocks(wall_clock)
