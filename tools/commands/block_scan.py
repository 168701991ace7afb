"""Verify the payloads of many blocks of a namespace, near the speed of the disk.

The writer listed the blocks a while ago, and the path goes on changing. So a mismatch is looked at
again. If the block is no longer in the presence table, it has CHANGED. Otherwise it is read a
second time. Several threads read runs of adjacent slots and hash them.

Only an error of the device is a finding. Another error, such as too few descriptors, says nothing
about the blocks: the scan ends with it.
"""

from __future__ import annotations

import errno
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum

from ...errors import TierIOError, from_os_error, os_errors
from ...threads import started_pool
from ...tiers.nvme.path.block_reader import payload_checksum
from ...tiers.nvme.path.payload_files import PayloadFiles
from ...tiers.nvme.path.presence_table import PresenceTable

SCAN_THREADS = 4
MAX_RUNS = 2 * SCAN_THREADS
"""Largest number of runs that are being read, or wait for a thread or for the caller."""
DEVICE_ERRNOS = frozenset(
    {errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EREMOTEIO, errno.EBADMSG, errno.EUCLEAN}
)
"""Errors with which a device or its file system refuses damaged bytes."""
READ_BYTES = 8 << 20
"""Bytes per read and thread; at least one block."""


class Throttle:
    """Limits a byte rate by waiting before work is handed out."""

    def __init__(
        self,
        bytes_per_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        """`bytes_per_s` None means no limit. `wait` takes seconds."""
        self._rate = bytes_per_s
        self._clock = clock
        self._wait = wait or threading.Event().wait
        self._free_at_s = clock()

    def take(self, count: int) -> None:
        """Wait until `count` more bytes may be moved."""
        if self._rate is None:
            return
        now = self._clock()
        if self._free_at_s > now:
            self._wait(self._free_at_s - now)
        self._free_at_s = max(self._free_at_s, now) + count / self._rate


@dataclass(frozen=True, slots=True)
class NamedBlock:
    """A block as the index named it."""

    key: bytes
    slot: int
    checksum: int
    used_s: int = 0
    """Wall-clock time of the last use, in seconds since 1970."""


class BlockFinding(StrEnum):
    """Result of verifying one block."""

    OK = "ok"
    CORRUPT = "corrupt"
    """The payload does not match its checksum."""
    UNREADABLE = "unreadable"
    """The device cannot read the payload."""
    NO_SEGMENT = "no_segment"
    """The segment file of the block is missing or damaged."""
    ENTRY = "entry"
    """The entry in the index names a slot that does not exist."""
    CHANGED = "changed"
    """The block was removed or replaced meanwhile."""


DAMAGED = frozenset(BlockFinding) - {BlockFinding.OK, BlockFinding.CHANGED}


OnValid = Callable[[NamedBlock, memoryview], None]
Findings = list[tuple[NamedBlock, BlockFinding]]


@dataclass(frozen=True, slots=True)
class ScanSource:
    """Files of a namespace, and the way to its presence table."""

    files: PayloadFiles
    map_table: Callable[[], PresenceTable | None]
    """Maps the presence table of the last writer, which may have replaced that of another one. None
    while a writer builds it. Raises a `KVCascadeError`."""

    def has_still(self, block: NamedBlock) -> bool:
        """Return True if the presence table names the block as it was named.

        Raises a `KVCascadeError` if it cannot be read.
        """
        table = self.map_table()
        if table is None or not table.is_same(block.key, block.slot):
            return False
        return table.checksum_of(block.slot) == block.checksum


def scan_blocks(
    source: ScanSource,
    blocks: Sequence[NamedBlock],
    throttle: Throttle | None = None,
    on_valid: OnValid | None = None,
) -> Iterator[Findings]:
    """Read and verify blocks in the order of their slots; each item is one run.

    `on_valid` receives every valid payload, on one of the threads. It must not keep the payload.
    Runs that have not begun are cancelled when the iterator is closed. Raises a `KVCascadeError`
    if a block cannot be read for another reason than damage, or no thread can be started.
    """
    size = source.files.layout.block_bytes
    local = threading.local()

    def work(run: Sequence[NamedBlock]) -> Findings:
        if not hasattr(local, "buffer"):
            with os_errors("taking memory for a read"):
                local.buffer = memoryview(mmap.mmap(-1, max(READ_BYTES, size)))
        views = [local.buffer[i * size : (i + 1) * size] for i in range(len(run))]
        return _verify_run(source, run, views, on_valid)

    throttle = throttle or Throttle(None)
    under_way: deque[Future[Findings]] = deque()
    with started_pool(SCAN_THREADS, "kvcascade-scan") as pool:
        try:
            for run in _runs(source, blocks):
                throttle.take(len(run) * size)
                under_way.append(pool.submit(work, run))
                if len(under_way) >= MAX_RUNS:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()


def _runs(source: ScanSource, blocks: Sequence[NamedBlock]) -> Iterator[Sequence[NamedBlock]]:
    """Yield adjacent slots of one segment that fit a buffer."""
    layout = source.files.layout
    ordered = sorted(blocks, key=lambda each: each.slot)
    most = max(1, READ_BYTES // layout.block_bytes)
    for begin, end in layout.runs([each.slot for each in ordered]):
        for first in range(begin, end, most):
            yield ordered[first : min(first + most, end)]


def _verify_run(
    source: ScanSource,
    run: Sequence[NamedBlock],
    views: Sequence[memoryview],
    on_valid: OnValid | None,
) -> Findings:
    try:
        source.files.read_run(run[0].slot, views)
    except OSError as error:
        if len(run) == 1 or isinstance(error, FileNotFoundError):
            return [(each, _of_error(source, each, error)) for each in run]
        return [  # find out which block it is
            found
            for each, view in zip(run, views, strict=True)
            for found in _verify_run(source, [each], [view], on_valid)
        ]
    found: Findings = []
    for each, view in zip(run, views, strict=True):
        finding = BlockFinding.OK
        if payload_checksum(each.key, view) != each.checksum:
            finding = _look_again(source, each, view)
        if finding is BlockFinding.OK and on_valid is not None:
            on_valid(each, view)
        found.append((each, finding))
    return found


def _look_again(source: ScanSource, block: NamedBlock, view: memoryview) -> BlockFinding:
    """Read a block that did not match once more, if it is still there."""
    if not source.has_still(block):
        return BlockFinding.CHANGED
    source.files.forget_slot(block.slot)  # the segment may be another file of the same name
    try:
        source.files.read_run(block.slot, [view])
    except OSError as error:
        return _of_error(source, block, error)
    if payload_checksum(block.key, view) == block.checksum:
        return BlockFinding.OK
    return BlockFinding.CORRUPT if source.has_still(block) else BlockFinding.CHANGED


def _of_error(source: ScanSource, block: NamedBlock, error: OSError) -> BlockFinding:
    if not source.has_still(block):
        return BlockFinding.CHANGED
    if error.errno == errno.ENOENT:
        if not source.files.has_folder(block.slot // source.files.layout.slots):
            folder = source.files.path_of(block.slot).parent
            raise TierIOError(errno.ENOENT, f"{folder} is not there; mount its disk")
        return BlockFinding.NO_SEGMENT
    if error.errno in DEVICE_ERRNOS:
        return BlockFinding.UNREADABLE
    raise from_os_error(error, f"reading {source.files.path_of(block.slot)}") from error
