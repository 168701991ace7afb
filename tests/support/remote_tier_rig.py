"""Remote tiers over one twin of a server, without processes and sockets.

Messages and calls wait in queues until the rig is pumped.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from kvcascade.handlers.node.node_keeper import JOBS_AT_MOST, LISTEN_INTERVAL_S, WAIT_SLICE_S
from kvcascade.handlers.node.remote.remote_node import RemoteNode
from kvcascade.handlers.node.remote.remote_wire import (
    RemoteSetup,
    from_remote_node,
    to_remote_node,
)
from kvcascade.manager.below.port import ASKING, Below
from kvcascade.manager.below.remote_feed import RemoteFeed
from kvcascade.manager.below.remote_tier import RemoteTier, remote_facts
from kvcascade.tiers.base import RESET_TICKS_PER_S, BlockHash
from kvcascade.tiers.remote.remote_store import StoreOptions

from .clock import ManualClock
from .executors import SteppingExecutor
from .memory_backend import MemoryBackend
from .remote_rig import PAYLOAD_BYTES, THROUGH, WALL_S, RemoteRig
from .remote_twin import RemoteTwin

ARENA_SLOTS = 64
MAX_PUMPS = 10_000


def is_asking(
    tier: Below, block_hash: BlockHash, owner: object, media: frozenset[str] | None = None
) -> bool:
    """Return whether an owner has to ask again for a block."""
    return tier.may_hold(block_hash, media, owner) == ASKING


class RemoteTierRig:
    """One engine: its tier, and the node of it. Several may share a server and a clock."""

    def __init__(
        self,
        twin: RemoteTwin | None = None,
        clock: ManualClock | None = None,
        options: StoreOptions = THROUGH,
        slots: int = ARENA_SLOTS,
        ranks: int = 1,
    ) -> None:
        """`ranks`: number of parts of a slot that hold the same bytes."""
        self.twin = RemoteTwin() if twin is None else twin
        self.clock = ManualClock() if clock is None else clock
        sizes = PAYLOAD_BYTES * ranks, PAYLOAD_BYTES, ranks
        self.setup = RemoteSetup("tiers[1]", b"{}", "model-1", *sizes, 0, slots)
        self.arena = MemoryBackend(self.setup.slot_bytes, slots, medium="CPU")
        self.options = options
        self.answers: deque[bytes] = deque()
        self.start_node()
        facts = remote_facts("remote", PAYLOAD_BYTES)
        feed = RemoteFeed(self._new_mark(), self.clock)
        self.client = PumpedNode(self, feed.take)
        self.tier = RemoteTier(
            self.client,
            feed,
            facts,
            options,
            self.clock,
            stall_s=10.0,
            new_mark=self._new_mark,
        )

    def _new_mark(self) -> int:
        """The time; no two hosts reset in the same microsecond."""
        return int((WALL_S + self.clock.now_s) * RESET_TICKS_PER_S) + next(self.twin.ticks)

    def start_node(self) -> None:
        """A new node; what an earlier one had is lost."""
        self.answers.clear()
        self.calls = SteppingExecutor()
        host = RemoteRig(self.twin, self.calls, self.options, clock=self.clock)
        memory = memoryview(self.arena.data)
        self.node = RemoteNode(host.store, memory, self.setup, self._tell, self.clock)
        host.store.read_generation()

    def _tell(self, message: msgspec.Struct) -> None:
        self.answers.append(msgspec.msgpack.encode(message))

    def step(self) -> bool:
        """One call of the server; False if none waits."""
        self.node.work()
        return self.calls.step()

    def pump(self) -> None:
        """Let the node do all that it can, and the tier take it in."""
        for _ in range(MAX_PUMPS):
            if not self.step():
                break
        self.node.work()
        self.client.poll()


class PumpedNode:
    """The `NodeClient` of a rig."""

    def __init__(self, rig: RemoteTierRig, take: Callable[[Any], None]) -> None:
        self._rig = rig
        self._take = take
        self._ticket = 0
        self._jobs: dict[int, Callable[[Any], None]] = {}
        self._polled_s = -math.inf
        self.is_up = True

    def submit(self, make_job: Callable[[int], Any], on_end: Callable[[Any], None]) -> bool:
        if not self.is_up or len(self._jobs) >= JOBS_AT_MOST:
            return False
        self._ticket += 1
        self._jobs[self._ticket] = on_end
        message = msgspec.msgpack.encode(make_job(self._ticket))
        self._rig.node.order(to_remote_node.decode(message))
        return True

    def tell(self, message: Any) -> None:
        raise AssertionError("a remote node gets no notes")

    def flush(self) -> None:
        """Orders reach the node at once."""

    def poll(self) -> None:
        self._polled_s = self._rig.clock.now_s
        answers = self._rig.answers
        while answers:
            message = from_remote_node.decode(answers.popleft())
            ticket = getattr(message, "ticket", None)
            if ticket is None:
                self._take(message)
            else:
                self._jobs.pop(ticket)(message)

    def listen(self) -> None:
        self._rig.node.work()
        if self._rig.clock.now_s - self._polled_s >= LISTEN_INTERVAL_S:
            self.poll()

    def wait_for_news(self, limit_s: float) -> None:
        is_moving = True
        while is_moving and not self._rig.answers:
            is_moving = self._rig.step()
            self._rig.node.work()
        if not self._rig.answers:  # nothing happens any more
            self._rig.clock.advance(min(limit_s, WAIT_SLICE_S))

    def die(self) -> None:
        """The node's process dies, and another one is there at once."""
        lost, self._jobs = self._jobs, {}
        self._rig.start_node()
        for on_end in lost.values():
            on_end(None)
        self._take(None)

    def replace(self) -> None:
        """See `NodeClient`."""
        self.die()

    def kill(self) -> bool:
        return not self._jobs
