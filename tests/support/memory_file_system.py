"""`MemoryFileSystem`: files in memory that fail on command; the twin of the real one in tests.

It knows what was synced, so a loss of power can be played: `lose_power` drops or tears whatever
was written since. Mapped memory that changed without a sync keeps or loses its changes as one.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from kvcascade.errors import InUseError
from kvcascade.tiers.nvme.disk.filesystem import File, FileLock, FileSystem, lock_message

SECTOR_BYTES = 512
STALL_LIMIT_S = 30.0


@dataclass(slots=True, eq=False)
class _Node:
    """One file: its bytes now, the bytes that are safe, and the writes in between."""

    data: bytearray
    durable: bytes = b""
    unsynced: list[tuple[int, bytes]] = field(default_factory=list)
    maps: int = 0
    spoiled: list[range] = field(default_factory=list)
    touched_at: float = 0

    def pass_over(self, offset: int, length: int) -> None:
        """Fail if the device can no longer read or write any of these bytes."""
        for bad in self.spoiled:
            if offset < bad.stop and offset + length > bad.start:
                raise OSError(errno.EIO, os.strerror(errno.EIO))


@dataclass(slots=True)
class _Fault:
    """What happens to the next `times` calls of an operation, after `skip` good ones."""

    number: int
    skip: int
    times: int


class MemoryFileSystem(FileSystem):
    """All files in dictionaries. Operations are named like the methods, such as `"pwritev"`."""

    def __init__(self, size_bytes: int = 1 << 40) -> None:
        self.size_bytes = size_bytes
        self.gate: threading.Event | None = None
        """While set to an event that is clear, every transfer waits for it."""
        self.short_transfers = False
        """Every transfer moves about half of what it was asked to."""
        self.calls: Counter[str] = Counter()
        self._nodes: dict[Path, _Node] = {}
        self._folders: set[Path] = set()
        self.holders: dict[_Node, int] = {}
        """File to the number of holders of its lock, -1 for one who is alone."""
        self.notes: Iterator[float] = count(1)
        """Times of change of the files that are touched from now on."""
        self._faults: dict[str, list[_Fault]] = {}
        self._lock = threading.RLock()

    # -- commands for tests --------------------------------------------------------------------

    def fail(self, operation: str, number: int, *, skip: int = 0, times: int = 1) -> None:
        """Let `times` calls of an operation fail with an errno, after `skip` good ones."""
        self._faults.setdefault(operation, []).append(_Fault(number, skip, times))

    def heal(self) -> None:
        """Forget every failure that has not happened, and what was spoiled."""
        self._faults.clear()
        for node in self._nodes.values():
            node.spoiled.clear()

    def lose_power(self, rng: random.Random) -> None:
        """Keep what was synced; of each later write keep all, a part, or nothing."""
        for node in self._nodes.values():
            if node.maps and rng.random() < 0.5:
                survived = bytearray(node.data)
            else:
                survived = bytearray(node.durable.ljust(len(node.data), b"\0"))
            for offset, written in node.unsynced:
                sectors = -(-len(written) // SECTOR_BYTES)
                keep = rng.choice((0, sectors, rng.randint(0, sectors))) * SECTOR_BYTES
                part = written[:keep]
                survived[offset : offset + len(part)] = part
            node.data[:] = survived
            node.durable, node.unsynced = bytes(survived), []
        self.drop_locks()

    def drop_locks(self) -> None:
        """Release all locks, as the kernel does when their processes end."""
        self.holders.clear()

    def damage(self, path: Path, offset: int, data: bytes) -> None:
        """Overwrite bytes behind everybody's back."""
        node = self._nodes[path]
        node.data[offset : offset + len(data)] = data
        node.durable = bytes(node.data)

    def spoil(self, path: Path, offset: int, length: int) -> None:
        """From now on the device can neither read nor write these bytes."""
        self._nodes[path].spoiled.append(range(offset, offset + length))

    # -- the file system -----------------------------------------------------------------------

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> File:
        self.enter("open")
        with self._lock:
            if create:
                if path in self._nodes:
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
                self._nodes[path] = _Node(bytearray())
            if path not in self._nodes:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            return MemoryFile(self, self._nodes[path])

    def make_dir(self, path: Path) -> None:
        self.enter("make_dir")
        self._folders.add(path)

    def check_dir(self, path: Path) -> None:
        if not self.exists(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    def list_dir(self, path: Path) -> list[str]:
        self.enter("list_dir")
        names = self._folders | set(self._nodes)
        return sorted(name.name for name in names if name.parent == path)

    def exists(self, path: Path) -> bool:
        if path in self._nodes or path in self._folders:
            return True
        inside, names = f"{path}{os.sep}", [*self._nodes, *self._folders]
        return any(str(name).startswith(inside) for name in names) or path.is_dir()

    def is_same(self, path: Path, other: Path) -> bool:
        return path == other and self.exists(path)

    def unlink(self, path: Path) -> None:
        self.enter("unlink")
        if self._nodes.pop(path, None) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    def remove_tree(self, path: Path) -> None:
        self.enter("remove_tree")
        self._folders = {name for name in self._folders if not name.is_relative_to(path)}
        for name in [name for name in self._nodes if name.is_relative_to(path)]:
            del self._nodes[name]

    def rename(self, source: Path, target: Path) -> None:
        self.enter("rename")
        if not self.exists(source):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(source))
        self._folders = {_moved(name, source, target) for name in self._folders}
        self._nodes.pop(target, None)
        self._nodes = {_moved(name, source, target): each for name, each in self._nodes.items()}

    def sync_dir(self, path: Path) -> None:
        self.enter("sync_dir")

    def sync_all(self, path: Path) -> None:
        self.enter("sync_all")
        for name, node in self._nodes.items():
            if name.is_relative_to(path):
                MemoryFile(self, node).sync()

    def free_bytes(self, path: Path) -> int:
        self.enter("free_bytes")
        return self.size_bytes - sum(len(node.data) for node in self._nodes.values())

    def used_bytes(self, path: Path) -> int:
        inside = (name for name in self._nodes if name.is_relative_to(path))
        return sum(len(self._nodes[name].data) for name in inside)

    def modified_at(self, path: Path) -> float:
        return float(self._nodes[path].touched_at) if path in self._nodes else 0.0

    def touch(self, path: Path) -> None:
        self.enter("touch")
        if path not in self._nodes:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        self._nodes[path].touched_at = next(self.notes)

    def lock(self, path: Path, *, shared: bool = False, wait_s: float = 0.0) -> FileLock:
        self.enter("lock")
        with self._lock:
            if path not in self._nodes:
                self._nodes[path] = _Node(bytearray(), touched_at=next(self.notes))
            node = self._nodes[path]
            holders = self.holders.get(node, 0)
            if holders < 0 or (holders and not shared):
                raise InUseError(lock_message(path))
            self.holders[node] = holders + 1 if shared else -1
        return _MemoryLock(self, path, node)

    # -- for the files -------------------------------------------------------------------------

    def enter(self, operation: str) -> None:
        """Count a call, and fail it if that was ordered."""
        with self._lock:
            self.calls[operation] += 1
            for fault in self._faults.get(operation, ()):
                if fault.skip > 0:
                    fault.skip -= 1
                elif fault.times > 0:
                    fault.times -= 1
                    raise OSError(fault.number, os.strerror(fault.number))

    def leads_to(self, path: Path, node: object) -> bool:
        """Whether this is the file of that name."""
        return node is not None and self._nodes.get(path) is node

    def pass_gate(self) -> None:
        """Wait while the device stalls."""
        if self.gate is not None and not self.gate.wait(STALL_LIMIT_S):
            raise OSError(errno.ETIMEDOUT, "the test kept the gate shut")

    def limit(self, wanted: int) -> int:
        """How much of a transfer gets through."""
        return (wanted + 1) // 2 if self.short_transfers else wanted

    def reserve(self, more: int) -> None:
        """Take disk space, or fail with ENOSPC."""
        if more > self.free_bytes(Path("/")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _moved(name: Path, source: Path, target: Path) -> Path:
    """The name of a file once `source` is called `target`."""
    return target / name.relative_to(source) if name.is_relative_to(source) else name


class _MemoryLock(FileLock):
    def __init__(self, fs: MemoryFileSystem, path: Path, node: _Node) -> None:
        self._fs = fs
        self._locked = fs.holders
        self._path = path
        self._node: _Node | None = node

    def is_in_place(self) -> bool:
        """Whether the name still leads to the locked file, in the state that it was locked in."""
        is_held = self._node is not None and self._locked.get(self._node, 0) != 0
        return is_held and self._fs.leads_to(self._path, self._node)

    def release(self) -> None:
        node, self._node = self._node, None
        if node is not None:
            self._locked[node] = max(0, self._locked.get(node, 0) - 1)


class MemoryFile(File):
    """A handle on a file in memory."""

    def __init__(self, fs: MemoryFileSystem, node: _Node) -> None:
        self._fs = fs
        self._node = node

    def preadv(self, buffers: Sequence[memoryview], offset: int) -> int:
        self._fs.enter("preadv")
        self._fs.pass_gate()
        wanted = sum(len(buffer) for buffer in buffers)
        self._node.pass_over(offset, wanted)
        data = bytes(self._node.data[offset : offset + self._fs.limit(wanted)])
        done = 0
        for buffer in buffers:
            part = data[done : done + len(buffer)]
            buffer[: len(part)] = part
            done += len(part)
        return done

    def pwritev(self, buffers: Sequence[memoryview], offset: int) -> int:
        self._fs.enter("pwritev")
        self._fs.pass_gate()
        joined = b"".join(buffers)
        data = joined[: self._fs.limit(len(joined))]
        node = self._node
        node.pass_over(offset, len(data))
        if offset + len(data) > len(node.data):
            self._resize(offset + len(data))
        node.data[offset : offset + len(data)] = data
        node.unsynced.append((offset, data))
        return len(data)

    def preallocate(self, size: int) -> None:
        self._fs.enter("preallocate")
        if size > len(self._node.data):
            self._resize(size)

    def truncate(self, size: int) -> None:
        self._fs.enter("truncate")
        self._resize(size)

    def sync(self) -> None:
        self._fs.enter("sync")
        self._node.durable = bytes(self._node.data)
        self._node.unsynced.clear()

    def size(self) -> int:
        return len(self._node.data)

    def map(self, length: int, *, writable: bool) -> memoryview:
        self._fs.enter("map")
        if length > len(self._node.data):
            raise OSError(errno.EINVAL, "a mapping beyond the end")
        self._node.maps += int(writable)
        view = memoryview(self._node.data)[:length]
        return view if writable else view.toreadonly()

    def close(self) -> None:
        return

    def _resize(self, size: int) -> None:
        data = self._node.data
        if size > len(data):
            self._fs.reserve(size - len(data))
            data.extend(bytes(size - len(data)))
        else:
            del data[size:]
