"""Nodes of one path in one process, without threads and sockets: messages and work wait in queues
until the rig is pumped, in an order that a test may choose."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from kvcascade.handlers.node.node_keeper import JOBS_AT_MOST, WAIT_SLICE_S
from kvcascade.handlers.node.path.path_io import NodeIO
from kvcascade.handlers.node.path.path_node import PathNode
from kvcascade.handlers.node.path_wire import NodeSetup, from_node_process, to_node
from kvcascade.manager.below.node_feed import NodeFeed
from kvcascade.manager.below.node_tier import NodeTier
from kvcascade.manager.below.port import TierFacts
from kvcascade.manager.below.single_tier import STALLED_S
from kvcascade.tiers.base import BlockHash, SlotArray
from kvcascade.tiers.nvme.disk.filesystem import FileSystem
from kvcascade.tiers.nvme.path.block_reader import BlocksRead
from kvcascade.tiers.nvme.path.block_table import BlockTable
from kvcascade.tiers.nvme.path.block_writer import BlocksWritten
from kvcascade.tiers.nvme.path.path_messages import (
    PROTOCOL,
    FromNode,
    FromWriter,
    Hello,
    PathOptions,
    Welcome,
    from_node,
    from_writer,
)
from kvcascade.tiers.nvme.path.presence_file import map_presence
from kvcascade.tiers.nvme.path.writer.namespace.namespace_start import StartMeans
from kvcascade.tiers.nvme.path.writer.path_plan import capacity_of
from kvcascade.tiers.nvme.path.writer.path_writer import PathWriter
from kvcascade.tiers.policies import order_class

from .clock import ManualClock
from .executors import InlineExecutor
from .memory_backend import MemoryBackend
from .memory_block_table import MemoryBlockDisk, MemoryBlockTable
from .memory_file_system import MemoryFileSystem
from .writer_twin import WriterTwin, namespace_spec

BLOCK = 4096
SLOTS = 16
PER_SEGMENT = 4
ARENA_SLOTS = 64
MAX_PUMPS = 100_000
OPTIONS = PathOptions(
    capacity_bytes=capacity_of(SLOTS // PER_SEGMENT, PER_SEGMENT, BLOCK),
    segment_bytes=PER_SEGMENT * BLOCK,
)


class NodesRig:
    """A file system in memory, a writer twin, and nodes."""

    writer: WriterTwin | CoreWriter | None

    def __init__(
        self,
        options: PathOptions = OPTIONS,
        *,
        is_real: bool = False,
        fs: FileSystem | None = None,
        clock: ManualClock | None = None,
        roots: Sequence[Path] = (Path("/tier"),),
    ) -> None:
        """`is_real`: the writer is a `PathWriter`; else it is a twin, on files in memory."""
        self.files: FileSystem = fs or MemoryFileSystem()
        self.fs = self.files if isinstance(self.files, MemoryFileSystem) else MemoryFileSystem()
        """The files, if they are in memory."""
        self.clock = clock or ManualClock()
        self.roots = tuple(roots)
        if is_real:
            self.writer = CoreWriter(self.files, self.roots, options, self.clock)
        else:
            self.writer = WriterTwin(self.fs, self.roots[0], SLOTS, PER_SEGMENT, BLOCK, options)
        self.options = options
        self.nodes: list[NodeTwin] = []
        self.before_message: Callable[[FromNode | FromWriter], None] = lambda message: None
        """Called before a message reaches its other end."""
        self.rng: random.Random | None = None
        """Chooses which queue goes on; without it they take turns."""

    def add(self, **given: Any) -> NodeTwin:
        """A new engine's node; what is `given` goes to it."""
        node = NodeTwin(self, len(self.nodes), **given)
        self.nodes.append(node)
        node.node.start()
        self.pump()
        return node

    @property
    def core(self) -> PathWriter:
        """The writer, which is real."""
        assert isinstance(self.writer, CoreWriter)
        return self.writer.core

    @property
    def twin(self) -> WriterTwin:
        """The writer, which is a twin."""
        assert isinstance(self.writer, WriterTwin)
        return self.writer

    def kill_writer(self) -> WriterTwin:
        """The writer dies; what it has not sent is lost. The nodes see that when they are
        pumped."""
        writer, self.writer = self.twin, None
        for node in self.nodes:
            node.cut()
        return writer

    def pump(self) -> None:
        """Go on until nothing is left to do."""
        for _ in range(MAX_PUMPS):
            if not self.step():
                return
        raise AssertionError("it goes on for ever")

    def step(self) -> bool:
        """Carry out one waiting action; False if there is none."""
        actions = [action for node in self.nodes for action in node.actions()]
        writer = self.writer
        if isinstance(writer, CoreWriter):
            actions += writer.actions()
        if writer is not None and writer.outbox and not writer.is_stalled:
            actions.append(self._deliver)
        if not actions:
            return False
        (actions[0] if self.rng is None else self.rng.choice(actions))()
        return True

    def _deliver(self) -> None:
        assert self.writer is not None
        client, message = self.writer.outbox.popleft()
        self.before_message(message)
        for node in self.nodes:
            if node.client == client and not node.is_cut:
                node.inbox.append(from_writer.decode(msgspec.msgpack.encode(message)))


class CoreWriter:
    """The real `PathWriter` over block tables in memory, with the face of a `WriterTwin`."""

    def __init__(
        self,
        fs: FileSystem,
        roots: Sequence[Path],
        options: PathOptions,
        clock: ManualClock,
        disks: dict[Path, MemoryBlockDisk] | None = None,
    ) -> None:
        """`disks`: block tables that a writer before this one left."""
        self.is_stalled = False
        """Nothing is handled, as in a stopped process."""
        self.outbox: deque[tuple[int, FromWriter]] = deque()
        self._given = fs, roots, options
        self._clock = clock
        self._disks = {} if disks is None else disks
        self._numbers = count(1)
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_due = False
        for root in roots:
            fs.make_dir(root)
        means = StartMeans(fs, ManualClock(1_700_000_000.0), self._open_table, b"boot")
        self.core = PathWriter(means, roots, options, clock, InlineExecutor())

    def connect(self) -> int:
        """A client comes."""
        client = next(self._numbers)
        self._handle(partial(self.core.connect, client))
        return client

    def cut_off(self, client: int) -> None:
        """A client does not read, or sends nonsense."""
        self._handle(partial(self._cut_off, client))

    def disconnect(self, client: int) -> None:
        """A client's socket was closed."""
        self._handle(partial(self.core.disconnect, client))

    def receive(self, client: int, message: FromNode) -> None:
        """Take a message."""
        self._handle(partial(self.core.receive, client, message))

    def go_on(self) -> None:
        """Handle what came while it was stalled."""
        self.is_stalled = False
        while self._waiting:
            self._handle(self._waiting.popleft())

    def successor(self) -> CoreWriter:
        """The next writer of the path, after this one was killed."""
        self.core.close(is_clean=False)
        return CoreWriter(*self._given, self._clock, self._disks)

    def actions(self) -> list[Callable[[], None]]:
        """Actions that the node may take next."""
        return [self._step] if self._is_due and not self.is_stalled else []

    def _handle(self, event: Callable[[], None]) -> None:
        if self.is_stalled:
            self._waiting.append(event)
            return
        event()
        self._is_due = True

    def _cut_off(self, client: int) -> None:
        may_write = any(each.number == client and each.namespace for each in self.core.clients)
        (self.core.cut_off if may_write else self.core.disconnect)(client)

    def _step(self) -> None:
        self._is_due = False
        self._clock.advance(0.01)
        self.outbox += self.core.step()
        self._is_due = any(namespace.grants for namespace in self.core.namespaces.values())

    def _open_table(self, folder: Path, map_bytes: int, identity: bytes, **rest: Any) -> BlockTable:
        disk = self._disks.setdefault(folder, MemoryBlockDisk())
        return MemoryBlockTable(disk, identity, is_durable=rest["is_durable"])


class NodeTwin:
    """A `PathNode` with its means, and the client and tier of its engine."""

    def __init__(
        self,
        rig: NodesRig,
        number: int,
        *,
        arena: MemoryBackend | None = None,
        arena_slots: int = ARENA_SLOTS,
        slots: int = SLOTS,
        stall_s: float = STALLED_S,
    ) -> None:
        """`arena`: slots that the engine has already. `slots`: those of the tier. For `stall_s` see
        `NodeTier`."""
        self.rig = rig
        self.arena = arena or MemoryBackend(BLOCK, arena_slots, medium="CPU")
        self.inbox: deque[Any] = deque()
        """Messages of the writer."""
        self.outbox: deque[FromNode] = deque()
        """Messages to the writer."""
        self.orders: deque[Any] = deque()
        self.answers: deque[Any] = deque()
        self.work: deque[Callable[[], None]] = deque()
        self.writes: list[Callable[[], None]] = []
        self.client: int | None = None
        self.is_joining = self.has_lost = False
        self.is_cut = False
        """The writer ended the connection, or died, and this end is open."""
        self.can_join = True
        self.told: list[Any] = []
        self._cancels: dict[Callable[[], None], Callable[[], None]] = {}
        self.is_device_stalled = False
        """While true, no transfer ends."""
        self.io = NodeIO(rig.files, rig.roots, namespace_spec(BLOCK), 1)
        paths = tuple(map(str, rig.roots))
        hello = Hello(PROTOCOL, f"node {number}", paths, namespace_spec(BLOCK), rig.options, True)
        self.node = PathNode(hello, self, self, rig.clock)
        facts = TierFacts("nvme", "NVME", BLOCK, slots)
        feed = NodeFeed(
            facts,
            lambda folder, slots: map_presence(rig.files, Path(folder), slots),
            InlineExecutor(),
            rig.clock,
        )
        self.engine = PumpedClient(self, feed.take)
        self.tier = NodeTier(
            self.engine,
            feed,
            facts,
            rig.clock,
            stall_s=stall_s,
            wants_chains=order_class(rig.options.policy).wants_chains,
            paths=len(rig.roots),
        )

    # -- the means of the node -------------------------------------------------------------------

    def join(self) -> None:
        self.is_joining = True

    def send(self, message: FromNode) -> None:
        self.outbox.append(message)

    def hang_up(self) -> None:
        while self.outbox:  # what was sent before is still received
            self._send()
        self._unlink()

    def tell(self, message: msgspec.Struct) -> None:
        self.told.append(message)
        self.answers.append(message)

    def open(self, welcome: Welcome) -> str:
        return self.io.open(welcome)

    def release_writes(self) -> None:
        self.io.release_writes()

    def forget_segments(self, numbers: Sequence[int]) -> None:
        self.io.forget_segments(numbers)

    def write(
        self,
        keys: Sequence[BlockHash],
        slots: Sequence[int],
        arena_slots: SlotArray,
        on_end: Callable[[BlocksWritten | None], None],
    ) -> None:
        writer = self.io.writer

        def run() -> None:
            self.writes.remove(run)
            views = [self.arena.view(slot) for slot in arena_slots.tolist()]
            on_end(writer.write(keys, slots, views))

        self.writes.append(run)
        self._cancels[run] = lambda: on_end(None)

    def read(
        self,
        keys: Sequence[BlockHash],
        arena_slots: SlotArray,
        on_end: Callable[[BlocksRead | None], None],
    ) -> None:
        reader = self.io.reader
        views = [self.arena.view(slot) for slot in arena_slots.tolist()]
        self.work.append(lambda: on_end(reader.read(keys, views)))

    def cancel_writes(self) -> None:
        waiting, self.writes = self.writes, []
        for run in waiting:
            self.work.append(self._cancels[run])

    # -- the rig ---------------------------------------------------------------------------------

    def actions(self) -> list[Callable[[], None]]:
        """Events that may happen next."""
        found: list[Callable[[], None]] = []
        if self.is_joining and self.can_join:
            found.append(self._join)
        if self.orders:
            found.append(self._order)
        if self.outbox:
            found.append(self._send)
        if self.inbox:
            found.append(lambda: self.node.received(self.inbox.popleft()))
        elif self.has_lost:
            found.append(self._lose)
        if self.is_device_stalled:
            return found
        found += self.writes
        if self.work:
            found.append(lambda: self.work.popleft()())
        return found

    def tick(self, seconds: float = 0.0) -> None:
        """Time goes by for every node."""
        self.rig.clock.advance(seconds)
        for node in self.rig.nodes:
            node.node.tick()
        self.rig.pump()

    def cut(self) -> None:
        """The writer ends the connection, or has died. This end stays open until `hang_up`."""
        if self.client is None:
            return
        if not self.is_cut:
            self.is_cut = self.has_lost = True
            self.outbox.clear()
            if self.rig.writer is not None:
                self.rig.writer.cut_off(self.client)
        if self.rig.writer is None:
            self.client = None

    def _join(self) -> None:
        self.is_joining = False
        if self.rig.writer is None:
            self.node.not_linked("there is no writer")
            return
        self.outbox.clear()  # a new socket has nothing of the former one
        self.inbox.clear()
        self.has_lost = self.is_cut = False
        self.client = self.rig.writer.connect()
        self.node.linked(is_leader=False)

    def _order(self) -> None:
        order = to_node.decode(self.orders.popleft())
        assert not isinstance(order, NodeSetup)
        self.node.order(order)

    def _send(self) -> None:
        message = self.outbox.popleft()
        self.rig.before_message(message)
        if self.client is not None and self.rig.writer is not None and not self.is_cut:
            self.rig.writer.receive(self.client, from_node.decode(msgspec.msgpack.encode(message)))

    def _unlink(self) -> None:
        if self.client is not None and self.rig.writer is not None:
            self.rig.writer.disconnect(self.client)
        self.client = None
        self.outbox.clear()

    def _lose(self) -> None:
        self.has_lost = False
        self.node.lost()


class PumpedClient:
    """The `NodeClient` of an engine: a node in the same rig."""

    def __init__(self, twin: NodeTwin, take: Callable[[Any], None]) -> None:
        self._twin = twin
        self._take = take
        self._ticket = 0
        self.jobs: dict[int, Callable[[Any], None]] = {}
        self.is_up = True
        self.is_eager = False
        """If true, everything that is waiting happens before each answer is looked for."""

    def submit(self, make_job: Callable[[int], Any], on_end: Callable[[Any], None]) -> bool:
        if not self.is_up or len(self.jobs) >= JOBS_AT_MOST:
            return False
        self._ticket += 1
        self.jobs[self._ticket] = on_end
        self._twin.orders.append(msgspec.msgpack.encode(make_job(self._ticket)))
        return True

    def tell(self, message: Any) -> None:
        self._twin.orders.append(msgspec.msgpack.encode(message))

    def poll(self) -> None:
        if self.is_eager:
            self._twin.tick()
        answers = self._twin.answers
        while answers:
            message = from_node_process.decode(msgspec.msgpack.encode(answers.popleft()))
            ticket = getattr(message, "ticket", None)
            if ticket is None:
                self._take(message)
            else:
                self.jobs.pop(ticket)(message)

    def flush(self) -> None:
        """Everything is sent already."""

    def listen(self) -> None:
        self.poll()

    def wait_for_news(self, limit_s: float) -> None:
        while not self._twin.answers:
            if not self._twin.rig.step():  # nothing happens any more
                self._twin.rig.clock.advance(min(limit_s, WAIT_SLICE_S))
                return

    def die(self) -> None:
        """The node's process dies, and another one is there at once."""
        lost, self.jobs = self.jobs, {}
        self._twin.orders.clear()
        self._twin.answers.clear()
        for on_end in lost.values():
            on_end(None)
        self._take(None)

    def replace(self) -> None:
        """See `NodeClient`."""
        self.die()

    def kill(self) -> bool:
        return not self.jobs
