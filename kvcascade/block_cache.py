"""The Python API: blocks by key, in a path of their own or beside engines.

    import kvcascade

    with kvcascade.open("/mnt/nvme/kv", namespace="mine", block_bytes=65536) as cache:
        cache.put(keys, arrays)
        found = cache.get(keys)

A cache is a node of its path. If no process is the writer of the path, this one is, on a thread;
otherwise it is a client of the writer. Either way it reads and writes the blocks itself, and
verifies every block that it reads against a checksum bound to the key. A block may be absent; wrong
bytes are never returned.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, overload
from weakref import WeakSet

from .assembly.path_parts import (
    GivenPath,
    PathParts,
    described,
    existing_names,
    make_folders,
    path_parts,
)
from .block_buffers import Bytes, checked_buffers, checked_keys
from .block_moves import BlockMoves, GetMove, PutMove, RunningCalls
from .config.options import At, deadline
from .config.sizes import parse_bytes
from .errors import ClosedError, ConfigError, InUseError, KVCascadeError, os_errors
from .handlers.node.node_keeper import NodeKeeper, at_exit
from .handlers.node.path.path_client import node_thread
from .handlers.node.path_wire import CAN_READ, NodeJoined, NodeNote, NodeSetup, NodeState
from .logs import get_logger
from .tiers.base import BlockOutcome
from .tiers.cpu.huge_pages import has_huge_pages
from .tiers.nvme.disk.filesystem import FileSystem, RealFileSystem
from .tiers.nvme.namespace import NamespaceKey, is_namespace_name
from .tiers.nvme.path.path_messages import PROTOCOL, Hello, NamespaceSpec, PathOptions, Touch
from .tiers.nvme.path.presence_file import map_presence
from .tiers.nvme.path.presence_table import PresenceTable
from .tiers.nvme.path.writer.namespace.namespace_home import check_size, spec_of
from .tiers.nvme.segments.format import MAX_BLOCK_BYTES, PAGE_BYTES

TIMEOUT_S = 30.0
"""Default of the longest wait of one call, in seconds."""
BUFFER_BYTES = 64 << 20
"""Default size of the memory through which blocks pass."""
MAX_NAMES_SHOWN = 8
OWN_FIELD = "kvcascade.open"
"""Field of the namespaces that `open` makes. No engine's namespace has it."""
ENDING = "Python is ending; use a cache only until the main thread ends"

Buffer = TypeVar("Buffer")
_log = get_logger(__name__)


class PutOutcome(Enum):
    """Outcome of one block of a `put`."""

    STORED = "stored"
    """The block is in the cache now, as durable as configured."""
    HELD = "held"
    """The cache held the block already; it was not written again."""
    FULL = "full"
    """There is no room, and none can be made."""
    OVER_BUDGET = "over_budget"
    """The write budget of the day is spent."""
    RESET = "reset"
    """The namespace was reset during the call."""
    FAILED = "failed"
    """The device or the index failed; the log says why."""
    TIMED_OUT = "timed_out"
    """Not stored within the time limit: the path has no writer, makes room too slowly, or its
    device is slow or rests after a failure. The block may still be stored afterwards."""

    @property
    def is_there(self) -> bool:
        """True if the cache holds the block."""
        return self in (PutOutcome.STORED, PutOutcome.HELD)


_OF_BLOCK = {
    BlockOutcome.OK: PutOutcome.STORED,
    BlockOutcome.HELD: PutOutcome.HELD,
    BlockOutcome.NO_SPACE: PutOutcome.FULL,
    BlockOutcome.REFUSED: PutOutcome.OVER_BUDGET,
    BlockOutcome.GONE: PutOutcome.RESET,
    BlockOutcome.IO_ERROR: PutOutcome.FAILED,
    BlockOutcome.CORRUPT: PutOutcome.FAILED,
    BlockOutcome.CANCELLED: PutOutcome.TIMED_OUT,
}


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Properties of one cache, beside those of its path."""

    timeout_s: float = TIMEOUT_S
    """Longest wait of one call, for all it waits for."""
    buffer_bytes: int = BUFFER_BYTES
    """Memory through which blocks pass between files and the caller's buffers."""
    io_threads: int = 3
    """Number of concurrent reads, and of concurrent writes."""
    is_read_only: bool = False
    """True if nothing may be stored. Reads are then no uses for the eviction policy, either."""


class BlockCache:
    """An open namespace of a path. `kvcascade.open` makes one.

    Any thread may call any method. `put` and `get` of several threads run one after the other, and
    each of them moves its blocks on several threads. `exists` waits for nobody.

    Only the process that opened a cache can use it. A fork has neither the node nor its arena.
    """

    def __init__(
        self,
        fs: FileSystem,
        roots: Sequence[Path],
        namespace: NamespaceSpec,
        path_options: PathOptions,
        options: CacheOptions,
    ) -> None:
        """Join the path, or become its writer. `path_options` count only for the writer.

        Raises `ConfigError` if the path refuses it, and `InUseError` or `TierIOError` if it cannot
        be joined in time.
        """
        self.block_bytes = namespace.block_bytes
        """Size of every block in bytes."""
        self._options = options
        self._fs = fs
        self._root = roots[0]
        with os_errors("allocating the memory through which blocks pass (buffer_size)"):
            try:
                self._moves = BlockMoves(self.block_bytes, options.buffer_bytes)
            except OverflowError:  # it is larger than any address
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from None
        self._state = NodeState.JOINING
        self._said = ""
        """Last sentence of the node."""
        self._joined: NodeJoined | None = None
        self._mapped: tuple[NodeJoined, PresenceTable] | None = None
        self._calls = RunningCalls()
        self._is_closed = False
        """True if no call may begin."""
        self._has_left = False
        """True once the node is being closed. Calls that still run are of no use then."""
        self._pid = os.getpid()
        """Process that opened the cache."""
        hello = Hello(
            PROTOCOL,
            f"python on {socket.gethostname()}, process {os.getpid()}",
            tuple(map(str, roots)),
            namespace,
            path_options,
            is_reader=options.is_read_only,
            has_metrics=False,
        )
        setup = NodeSetup(
            hello,
            0,
            self._moves.slots,
            options.io_threads,
            is_arena_huge=has_huge_pages(),
            patience_s=options.timeout_s / 2,
            wants_changes=False,
        )
        self._client: NodeKeeper = node_thread(setup, self._moves.memory, fs, self._note)
        _open_caches.add(self)
        try:
            self._join()
        except BaseException:
            self.close()
            raise

    # -- use -----------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of the namespace, as `kvcascade inspect` prints it."""
        assert self._joined is not None, "a cache that could not join was never returned"
        return Path(self._joined.folder).name

    @property
    def is_read_only(self) -> bool:
        """True for an engine's namespace: `put` is refused."""
        return self._options.is_read_only

    def exists(self, keys: Iterable[bytes]) -> list[bool]:
        """Return for each key whether the cache holds its block now.

        The answer comes from memory, without I/O. It is a hint: the block may be evicted before a
        `get`. Raises `ConfigError` for a key that is none, and `ClosedError`.
        """
        named = checked_keys(keys)
        self._check_open()
        return self._found(named)

    def put(self, keys: Iterable[bytes], buffers: Sequence[object]) -> list[PutOutcome]:
        """Store blocks, in prefix order if they are parts of a sequence; return their outcomes.

        A key is 1 to 64 bytes. A buffer holds `block_bytes` contiguous bytes: a numpy array, a
        torch tensor on the CPU, or any object with the buffer protocol. Of equal keys the first is
        stored. Waits at most `timeout_s`. Raises `ConfigError` for wrong arguments or a read-only
        cache, `InUseError` if the path refuses this process now, and `ClosedError`.
        """
        named = checked_keys(keys)
        views = checked_buffers(buffers, len(named), self.block_bytes)
        self._check_open()
        if self._options.is_read_only:
            raise ConfigError(f"{self.name} is open to read only; an engine stores its blocks")
        first = {key: at for at, key in reversed(list(enumerate(named)))}
        with self._calling():
            table = self._table()
            epoch = None if table is None else table.epoch
            limit_s = self._options.timeout_s
            move = PutMove(named, sorted(first.values()), limit_s, views, epoch)
            self._moves.run(move, self._client, self._check_use)
        outcomes = [_OF_BLOCK[move.outcomes[first[key]]] for key in named]
        for at, key in enumerate(named):
            if first[key] != at and outcomes[at] is PutOutcome.STORED:
                outcomes[at] = PutOutcome.HELD
        return outcomes

    @overload
    def get(self, keys: Iterable[bytes]) -> list[Bytes | None]: ...

    @overload
    def get(self, keys: Iterable[bytes], buffers: Sequence[Buffer]) -> list[Buffer | None]: ...

    def get(self, keys: Iterable[bytes], buffers: Sequence[Any] | None = None) -> list[Any]:
        """Read blocks; return for each its bytes, or None if it is absent.

        Without `buffers` a block is a new numpy array of `block_bytes` bytes. With them it is the
        buffer of the same position, which was filled; buffers of absent blocks are not changed. A
        block that is damaged, cannot be read, or does not arrive within `timeout_s` is absent.
        Raises `ConfigError` for wrong arguments, `InUseError` as `put`, and `ClosedError`.
        """
        named = checked_keys(keys)
        views: Sequence[Bytes] | None = None
        if buffers is not None:
            views = checked_buffers(buffers, len(named), self.block_bytes, is_target=True)
        with self._calling():
            there = [at for at, is_there in enumerate(self._found(named)) if is_there]
            move = GetMove(named, there, self._options.timeout_s, views)
            self._moves.run(move, self._client, self._check_use)
            read = move.read
            self._touch([named[at] for at in sorted(read)], is_settle=True)  # they are counted
        if buffers is None:
            return [read.get(at) for at in range(len(named))]
        return [buffer if at in read else None for at, buffer in enumerate(buffers)]

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note a use of blocks without reading them, so that they are evicted later.

        Raises `ConfigError` for a key that is none, and `ClosedError`.
        """
        named = checked_keys(keys)
        self._check_open()
        self._touch(named)

    def close(self) -> None:
        """Leave the path; as its writer, close it cleanly. Idempotent.

        No call begins any more. Those of other threads that have begun end first, or run out of
        their time. If they end, no file of the path stays open. In a forked process nothing happens
        to the cache of its parent.
        """
        self._is_closed = True
        if os.getpid() != self._pid:
            return
        is_idle = False
        try:
            is_idle = self._calls.wait(self._options.timeout_s)
        finally:
            self._has_left = True
            if self._client.close() and is_idle:
                self._moves.give_back()  # else the caller's reference would keep it
                self._mapped = None

    def __enter__(self) -> BlockCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- the node ------------------------------------------------------------------------------

    def _note(self, message: object) -> None:
        """Take a note of the node, in any thread that calls a method of the client."""
        match message:
            case NodeJoined():
                self._joined, self._state = message, message.state
            case NodeNote():
                self._state, self._said = message.state, message.text
                if message.text:
                    _log.warning("%s: %s", self._root, message.text)
            case None:
                self._state = NodeState.JOINING
            case _:
                """It is ready, or the namespace was reset."""

    def _join(self) -> None:
        self._client.start("each cache needs memory and threads for it")
        limit_s = self._options.timeout_s
        self._client.wait(lambda: self._state is not NodeState.JOINING, limit_s)
        if self._state is NodeState.OFF:
            raise ConfigError(self._said)
        if self._state is NodeState.JOINING:
            raise InUseError(
                self._said
                or f"{self._root} could not be joined within {limit_s:g} s: a process "
                "that holds its lock does not answer, or the disk is slow; try again"
            )
        if self._table() is None:
            raise InUseError(f"{self._root} changed while it was being joined; open it again")

    def _calling(self) -> AbstractContextManager[None]:
        """Return the context of a call that `close` waits for. Entering it raises `ClosedError`."""
        self._check_open()  # first, because a fork may have copied a lock that is held
        return self._calls.one(self._check_open)

    def _found(self, keys: list[bytes]) -> list[bool]:
        self._client.poll()
        table = self._table()
        if table is None or self._state not in CAN_READ:
            return [False] * len(keys)
        return [slot >= 0 for slot in table.find_many(keys).tolist()]

    def _touch(self, keys: list[bytes], *, is_settle: bool = False) -> None:
        if keys and not self._options.is_read_only:
            self._client.tell(Touch(keys, is_settle=is_settle))

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                f"the cache of {self._root} was opened before a fork; open it again in this process"
            )
        if self._is_closed:
            is_ending = _is_ending.is_set()
            raise ClosedError(ENDING if is_ending else "the cache is closed; open it again")

    def _check_use(self) -> None:
        """Raise an error if a call that has begun cannot go on."""
        if self._has_left:
            raise ClosedError("the cache was closed during the call; open it again")
        if self._state is NodeState.OFF:
            raise InUseError(self._said or f"{self._root} refuses this process; open it again")

    def _table(self) -> PresenceTable | None:
        """Return the presence table that belongs to the last connection to a writer."""
        joined, mapped = self._joined, self._mapped
        if joined is None:
            return None
        if mapped is not None and mapped[0] is joined:
            return mapped[1]
        try:
            table = map_presence(self._fs, Path(joined.folder), joined.slots)
        except KVCascadeError as error:
            _log.warning("%s: its blocks are not found: %s", self._root, error)
            return None
        self._mapped = joined, table
        return table


_open_caches: WeakSet[BlockCache] = WeakSet()
_is_ending = threading.Event()


def _close_all() -> None:
    """Close the caches that are left when Python ends."""
    _is_ending.set()
    for cache in list(_open_caches):
        cache.close()


at_exit(_close_all)


def open(
    path: GivenPath,
    *,
    namespace: str,
    block_bytes: int | None = None,
    capacity: int | str | None = None,
    policy: str | None = None,
    durability: str | None = None,
    write_budget: int | str | None = None,
    min_free: int | str | None = None,
    segment_size: int | str | None = None,
    io_threads: int = 3,
    direct_io: bool | str = "auto",
    buffer_size: int | str = BUFFER_BYTES,
    timeout_s: float = TIMEOUT_S,
) -> BlockCache:
    """Open blocks in a path, in or beside engines; the path is created if it does not exist.

    `path`: a folder, or a list with one folder for each device. `namespace`: a name of your own,
    made when it is opened for the first time; or the name of an engine's namespace as `kvcascade
    inspect` prints it, with 12 digits at its end. An engine's namespace is read only. If its
    engines were reset, the log has a line: blocks may come from weights that were updated in place.

    `block_bytes`: size of every block, a multiple of 4096. It is needed to make a namespace.

    `capacity` to `segment_size` are options of the path, with the names, values and defaults of an
    NVMe tier in the configuration. They are recorded with the path and shared by all its
    namespaces. Options that are not given stay as they are. They apply only if this
    process is the writer. Otherwise the writer's options apply, and the log has a line about it.

    `io_threads`, `direct_io`: as for an NVMe tier. `buffer_size`: memory through which blocks pass.
    `timeout_s`: longest wait of this call and of each later one, in seconds.

    Raises `ConfigError` for wrong arguments, or if the path refuses this process. Raises
    `FormatError` for a namespace of another version. If the path cannot be opened, it raises
    `InUseError`, `CorruptionError`, `NoSpaceError` or `TierIOError`.
    """
    if _is_ending.is_set():
        raise ClosedError(ENDING)
    of_path = {
        "capacity": capacity,
        "policy": policy,
        "durability": durability,
        "write_budget": write_budget,
        "min_free": min_free,
        "segment_size": segment_size,
    }
    given = {name: value for name, value in of_path.items() if value is not None}
    at = At("open")
    fs = RealFileSystem(direct_io is not False)
    parts = path_parts(
        fs, path, {**given, "io_threads": io_threads, "direct_io": direct_io}, "open"
    )
    spec = _namespace(fs, parts, at, namespace, block_bytes)
    try:
        buffer_bytes = parse_bytes(buffer_size).count
    except ValueError as error:
        raise at.below("buffer_size").wrong(buffer_size, str(error)) from None
    options = CacheOptions(
        deadline(at.below("timeout_s"), timeout_s),
        buffer_bytes,
        parts.tier.io_threads,
        is_read_only=OWN_FIELD not in json.loads(spec.fields),
    )
    make_folders(parts.roots)
    return BlockCache(fs, parts.roots, spec, parts.options, options)


def _namespace(
    fs: FileSystem, parts: PathParts, at: At, name: object, block_bytes: int | None
) -> NamespaceSpec:
    """Return the namespace with this name; a new one if it is a name of the caller's own."""
    if not isinstance(name, str) or not name.strip():
        raise at.below("namespace").wrong(name, "is no name; give some text")
    if block_bytes is not None and (type(block_bytes) is not int or block_bytes <= 0):
        problem = f"is no size; give a multiple of {PAGE_BYTES} above 0"
        raise at.below("block_bytes").wrong(block_bytes, problem)
    is_named = is_namespace_name(name)
    key = NamespaceKey(name, {OWN_FIELD: name})
    found = described(fs, parts, name if is_named else key.directory_name, block_bytes)
    if found is not None:
        return found
    if is_named:
        names = existing_names(fs, parts.roots[0])
        shown = ", ".join(names[:MAX_NAMES_SHOWN]) or "none"
        raise ConfigError(f"namespace: {name} is not in {parts.roots[0]}; there are {shown}")
    if block_bytes is None:
        missing = f"give the size of a block to make {name!r}, or the name of an existing namespace"
        raise at.below("block_bytes").missing(missing)
    if block_bytes % PAGE_BYTES:
        problem = f"is no multiple of {PAGE_BYTES}; round it up"
        raise at.below("block_bytes").wrong(block_bytes, problem)
    if block_bytes > MAX_BLOCK_BYTES:
        problem = f"is more than a block may have ({MAX_BLOCK_BYTES}); lower it"
        raise at.below("block_bytes").wrong(block_bytes, problem)
    check_size(key)
    return spec_of(key, block_bytes)
