"""Files of a namespace as a node uses them, and the threads that move blocks.

`NodeIO` opens the presence table and the segments after each `Welcome`. Its subclass `IOThreads`
moves the parts of jobs between them and the arena. While a part uses the files of an earlier
`Welcome`, these stay open.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from ....errors import TierIOError
from ....logs import get_logger
from ....threads import run_on_each, started_pool
from ....tiers.base import BlockHash, SlotArray
from ....tiers.nvme.disk.filesystem import FileLock, FileSystem
from ....tiers.nvme.disk.transfers import DIRECT, TransferLimit, Transfers
from ....tiers.nvme.namespace import NamespaceKey
from ....tiers.nvme.path.block_reader import BlockReader, BlocksRead
from ....tiers.nvme.path.block_writer import BlocksWritten, BlockWriter
from ....tiers.nvme.path.former_writes import hold_writes
from ....tiers.nvme.path.path_messages import NamespaceSpec, Welcome
from ....tiers.nvme.path.payload_files import PayloadFiles
from ....tiers.nvme.path.presence_file import map_presence
from ....tiers.nvme.path.writer.namespace.namespace_home import SEGMENTS
from ....tiers.nvme.segments.format import SegmentLayout
from ..bounce import ArenaBounce, PieceBounce, ThreadBuffers
from .path_jobs import PART_BYTES

THREADS_PER_TRANSFER = 2
"""Threads for each device transfer. While one transfers a part, the other one finishes the previous
part or prepares the next one."""

Result = TypeVar("Result")
Post = Callable[[Callable[[], None]], None]
"""Function that has a callback called by the node's own thread. Any thread may call it."""

_log = get_logger(__name__)


class NodeIO:
    """Presence table and segments of one namespace. The node's own thread opens them."""

    reader: BlockReader
    writer: BlockWriter

    def __init__(
        self,
        fs: FileSystem,
        roots: Sequence[Path],
        namespace: NamespaceSpec,
        transfers: int,
    ) -> None:
        """`roots` are the paths of the tier. At most `transfers` threads per direction use the
        device at once."""
        self._fs = fs
        self._roots = tuple(roots)
        self._block_bytes = namespace.block_bytes
        self._fingerprint = NamespaceKey("", json.loads(namespace.fields)).fingerprint
        self._transfers = DIRECT
        self._limits = [TransferLimit(transfers) for _ in range(2)]
        self._files: PayloadFiles | None = None
        self._writes: FileLock | None = None
        """Lock for the time of the writes under one writer; see `former_writes`."""

    def open(self, welcome: Welcome) -> str:
        """See `BlockIO`."""
        folders = [root / welcome.folder for root in self._roots]
        table = map_presence(self._fs, folders[0], welcome.slots)
        layout = SegmentLayout(self._block_bytes, welcome.segment_slots, self._fingerprint)
        segments = [folder / SEGMENTS for folder in folders]
        files = PayloadFiles(self._fs, segments, layout, transfers=self._transfers)
        is_durable = welcome.options.durability == "power"  # at least what this node asks for
        self._files = files
        self._writes = self._writes or hold_writes(self._fs, self._roots[0])
        self.reader = BlockReader(table, files, self._limits[0])
        self.writer = BlockWriter(files, is_durable=is_durable, at_device=self._limits[1])
        return str(folders[0])

    def release_writes(self) -> None:
        """See `BlockIO`."""
        writes, self._writes = self._writes, None
        if writes is not None:
            writes.release()

    def forget_segments(self, numbers: Sequence[int]) -> None:
        """See `BlockIO`."""
        if self._files is not None:
            self._files.forget(numbers)


class IOThreads(NodeIO):
    """The `BlockIO` of a node: one pool of threads per direction."""

    def __init__(
        self,
        fs: FileSystem,
        roots: Sequence[Path],
        namespace: NamespaceSpec,
        io_threads: int,
        arena: memoryview,
        post: Post,
        *,
        has_bounce: bool,
    ) -> None:
        """`arena` holds the slots, one block each. With `has_bounce`, all bytes pass through
        buffers in huge pages, of `PART_BYTES` per thread. See `NodeIO` for the rest. Raises
        `TierIOError` for want of threads."""
        super().__init__(fs, roots, namespace, io_threads)
        self._arena = arena
        self._post = post
        self._bounce: ArenaBounce | None = None
        self._buffers: ThreadBuffers | None = None
        if has_bounce and self._block_bytes > PART_BYTES:
            self._buffers = pieces = PieceBounce(PART_BYTES)
            self._transfers = Transfers(pieces.read, pieces.write)
        elif has_bounce:
            self._buffers = self._bounce = ArenaBounce(arena, self._block_bytes)
        self._threads = io_threads * THREADS_PER_TRANSFER
        self._stores = started_pool(self._threads, "kvcascade-store")
        try:
            self._loads = started_pool(self._threads, "kvcascade-load")
        except TierIOError:
            self._stores.shutdown()
            raise
        self._cancels = 0
        """Number of calls of `cancel_writes`."""

    def warm_up(self) -> None:
        """Make the buffers of all threads, so that the first block is as fast as later ones."""
        if self._buffers is not None:
            for executor in (self._stores, self._loads):
                run_on_each(executor, self._threads, partial(self._buffers.room, PART_BYTES))

    def write(
        self,
        keys: Sequence[BlockHash],
        slots: Sequence[int],
        arena_slots: SlotArray,
        on_end: Callable[[BlocksWritten | None], None],
    ) -> None:
        """See `BlockIO`."""
        work = partial(self._write, self._cancels, self.writer, keys, slots, arena_slots)
        self._stores.submit(self._run, work, on_end)

    def read(
        self,
        keys: Sequence[BlockHash],
        arena_slots: SlotArray,
        on_end: Callable[[BlocksRead | None], None],
    ) -> None:
        """See `BlockIO`."""
        work = partial(self._read, self.reader, keys, arena_slots)
        self._loads.submit(self._run, work, on_end)

    def cancel_writes(self) -> None:
        """See `BlockIO`. Each of them ends when a thread takes it."""
        self._cancels += 1

    def close(self) -> None:
        """Stop the threads, without waiting for work in flight."""
        for executor in (self._stores, self._loads):
            executor.shutdown(wait=False, cancel_futures=True)

    def wait(self) -> None:
        """Wait for work in flight, after `close`. No file is open then."""
        for executor in (self._stores, self._loads):
            executor.shutdown(wait=True)
        if self._files is not None:
            self._files.close()
            self._files = None
            del self.reader, self.writer

    # -- on I/O threads ------------------------------------------------------------------------

    def _run(self, work: Callable[[], Result], on_end: Callable[[Result | None], None]) -> None:
        result: Result | None = None
        try:
            result = work()
        except Exception:
            _log.exception("a transfer failed in a way it should not")
        self._post(partial(on_end, result))

    def _write(
        self,
        cancels: int,
        writer: BlockWriter,
        keys: Sequence[BlockHash],
        slots: Sequence[int],
        arena_slots: SlotArray,
    ) -> BlocksWritten | None:
        if cancels != self._cancels:
            return None
        bounce = self._bounce
        views = self._views(arena_slots) if bounce is None else bounce.take(arena_slots)
        return writer.write(keys, slots, views)

    def _read(
        self, reader: BlockReader, keys: Sequence[BlockHash], arena_slots: SlotArray
    ) -> BlocksRead:
        bounce = self._bounce
        if bounce is None:
            return reader.read(keys, self._views(arena_slots))
        return reader.read(keys, bounce.blocks(len(keys)), partial(bounce.give, arena_slots))

    def _views(self, slots: SlotArray) -> list[memoryview]:
        size = self._block_bytes
        return [self._arena[slot * size : (slot + 1) * size] for slot in slots.tolist()]
