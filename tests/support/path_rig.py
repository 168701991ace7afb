"""A path in memory with its writer: nodes that speak its messages, crashes, and loss of power."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from support.clock import ManualClock
from support.executors import InlineExecutor, SteppingExecutor
from support.memory_block_table import MemoryBlockDisk, MemoryBlockTable
from support.memory_file_system import MemoryFileSystem

from kvcascade.tiers.nvme.disk.filesystem import FileSystem
from kvcascade.tiers.nvme.path.block_table import BlockTable
from kvcascade.tiers.nvme.path.path_messages import (
    PROTOCOL,
    Commit,
    CommitDone,
    Committed,
    FromNode,
    FromWriter,
    Grant,
    Granted,
    Hello,
    NamespaceSpec,
    PathOptions,
    Refused,
    Welcome,
)
from kvcascade.tiers.nvme.path.writer.namespace.namespace_start import StartMeans
from kvcascade.tiers.nvme.path.writer.path_plan import capacity_of
from kvcascade.tiers.nvme.path.writer.path_writer import PathWriter

ROOT = Path("/path")
BLOCK_BYTES = 4096
Message = TypeVar("Message")


def key_of(number: int) -> bytes:
    """Key of 36 bytes, as vLLM's are."""
    return number.to_bytes(4, "big") * 8 + b"\0\0\0\0"


def int32(slots: Sequence[int]) -> bytes:
    """Slots as they are sent."""
    return np.array(slots, dtype="<i4").tobytes()


def uint64(checksums: Sequence[int]) -> bytes:
    """Checksums as they are sent."""
    return np.array(checksums, dtype="<u8").tobytes()


def slots_in(message: Granted) -> list[int]:
    """Slots of an answer."""
    return list(map(int, np.frombuffer(message.slots, dtype="<i4")))


class PathRig:
    """The disks of a path, and the writer over them; `start` again for a successor."""

    def __init__(
        self,
        segments: int = 4,
        slots_per_segment: int = 8,
        roots: Sequence[Path] = (ROOT,),
        executor: Executor | None = None,
        real: FileSystem | None = None,
        **options: object,
    ) -> None:
        """`real`: files are kept there instead of in memory; block tables are in memory."""
        self.fs = MemoryFileSystem()
        self.files = self.fs if real is None else real
        self.roots = tuple(roots)
        for root in self.roots:
            self.files.make_dir(root)
        self.clock = ManualClock()
        self.wall = ManualClock(1_700_000_000.0)
        self.fs.notes = iter(self.wall, None)
        self.executor = InlineExecutor() if executor is None else executor
        self.disks: dict[Path, MemoryBlockDisk] = {}
        self.boot = b"boot 1"
        paths = len(self.roots)
        policy = str(options.get("policy", "lru"))
        capacity = capacity_of(segments, slots_per_segment, BLOCK_BYTES, paths, policy)
        self.options = PathOptions(
            **{  # type: ignore[arg-type]
                "capacity_bytes": capacity,
                "segment_bytes": slots_per_segment * BLOCK_BYTES,
                **options,
            }
        )
        self.inboxes: dict[int, deque[FromWriter]] = {}
        self.numbers = count(1)
        self.asked: dict[tuple[int, int], list[int]] = {}
        """Keys by client and request of its `Grant`."""
        self.start()

    def start(self, options: PathOptions | None = None) -> None:
        """Begin to write the path."""
        self.options = options or self.options
        means = StartMeans(self.files, self.wall, self._open_table, self.boot)
        self.writer = PathWriter(means, self.roots, self.options, self.clock, self.executor)

    def kill(self) -> None:
        """The writer ends without a word; what it wrote stays."""
        self.writer.close(is_clean=False)
        self.inboxes.clear()

    def lose_power(self, rng: random.Random) -> None:
        """Lose any part of the writes that are not durable."""
        self.kill()
        self.boot = b"boot %d" % rng.getrandbits(60)
        self.fs.lose_power(rng)
        for disk in self.disks.values():
            disk.lose_power(rng)

    def close(self) -> None:
        """The writer closes cleanly."""
        self._deliver(self.writer.close())
        self.inboxes.clear()

    def send(self, client: int, message: FromNode) -> None:
        """Let a node send a message."""
        self.writer.receive(client, message)

    def step(self, times: int = 1, seconds: float = 0.0) -> None:
        """Let the writer work, and time go by."""
        for _ in range(times):
            self.clock.advance(seconds)
            self.wall.advance(seconds)
            self._deliver(self.writer.step())

    def take(self, client: int, kind: type[Message]) -> list[Message]:
        """Messages of a kind that a node got; the others stay."""
        inbox = self.inboxes[client]
        found: list[Any] = [message for message in inbox if isinstance(message, kind)]
        rest = [message for message in inbox if not isinstance(message, kind)]
        inbox.clear()
        inbox.extend(rest)
        return found

    def _deliver(self, messages: Sequence[tuple[int, FromWriter]]) -> None:
        for client, message in messages:
            self.inboxes[client].append(message)

    def _open_table(
        self,
        folder: Path,
        map_bytes: int,
        identity: bytes,
        *,
        is_durable: bool,
        is_same_boot: bool,
        wall_clock: Callable[[], float],
    ) -> BlockTable:
        disk = self.disks.setdefault(folder, MemoryBlockDisk())
        return MemoryBlockTable(disk, identity, is_durable=is_durable, wall_clock=wall_clock)


class RigNode:
    """A node without bytes: it asks for slots and commits at once."""

    def __init__(
        self,
        rig: PathRig,
        label: str = "model",
        options: PathOptions | None = None,
        *,
        protocol: int = PROTOCOL,
        paths: Sequence[str] | None = None,
        min_share_bytes: int = 0,
        wants_events: bool = False,
        fields: object = None,
        epoch: int | None = None,
        is_reader: bool = False,
        has_metrics: bool = True,
        may_wait: bool = False,
    ) -> None:
        """Come, and join; with `may_wait` the namespace need not be open yet."""
        self.rig = rig
        self.client = next(rig.numbers)
        self.requests = count(1)
        rig.inboxes[self.client] = deque()
        rig.writer.connect(self.client)
        data = json.dumps({"model": label} if fields is None else fields).encode()
        self.spec = spec = NamespaceSpec(label, data, b"{}", BLOCK_BYTES, min_share_bytes)
        given = tuple(map(str, rig.roots)) if paths is None else tuple(paths)
        asked, name = options or rig.options, f"node {self.client}"
        hello = Hello(
            protocol, name, given, spec, asked, wants_events, epoch, is_reader, has_metrics
        )
        self.refused: list[Refused] = []
        self.welcome: Welcome | None = None
        rig.send(self.client, hello)
        rig.step()
        executor = rig.executor
        while not self.has_answer() and not may_wait and isinstance(executor, SteppingExecutor):
            assert executor.step(), "nobody opens the namespace"
            rig.step()

    def has_answer(self) -> bool:
        """Return True once the writer has welcomed or refused this node."""
        self.refused += self.rig.take(self.client, Refused)
        for welcome in self.rig.take(self.client, Welcome):
            self.welcome = welcome
        return self.welcome is not None or bool(self.refused)

    def ask(self, keys: Sequence[int]) -> int:
        """Ask for slots."""
        request = next(self.requests)
        self.rig.asked[self.client, request] = list(keys)
        self.rig.send(self.client, Grant(request, [key_of(key) for key in keys]))
        return request

    def commit(self, keys: Sequence[int], slots: Sequence[int], epoch: int) -> int:
        """Commit blocks whose checksum is a number of their own."""
        request = next(self.requests)
        named = [key_of(key) for key in keys]
        sums = uint64([checksum(key) for key in keys])
        self.rig.send(self.client, Commit(request, epoch, named, int32(slots), sums))
        return request

    def grants(self) -> list[Granted]:
        """Answers to `ask`."""
        return self.rig.take(self.client, Granted)

    def outcomes(self) -> list[list[Committed]]:
        """Answers to `commit`."""
        return [[Committed(c) for c in m.outcomes] for m in self.rig.take(self.client, CommitDone)]

    def store(self, keys: Sequence[int], steps: int = 8) -> list[Committed]:
        """Store blocks; only those that got a slot are in the answer."""
        self.ask(keys)
        granted: list[Granted] = []
        for _ in range(steps):
            self.rig.step(seconds=0.01)
            granted = self.grants()
            if granted:
                break
        (answer,) = granted
        got = [(key, slot) for key, slot in zip(keys, slots_in(answer), strict=True) if slot >= 0]
        if not got:
            return []
        self.commit([key for key, _ in got], [slot for _, slot in got], answer.epoch)
        self.rig.step()
        (outcomes,) = self.outcomes()
        return outcomes

    def held(self, keys: Sequence[int]) -> list[int]:
        """Those of the keys that the presence table has."""
        assert self.welcome is not None
        presence = self.rig.writer.namespaces[self.welcome.folder].presence
        return [key for key in keys if presence.find(key_of(key)) >= 0]


def checksum(key: int) -> int:
    """The checksum of a block in these tests."""
    return (key * 0x9E3779B97F4A7C15 + 1) % (1 << 64)
