"""Write blocks into slots that the writer of the path granted.

Only payload is written here. The blocks exist for readers once the writer has committed them. With
`power` durability the segments are synced before this returns, so a commit names durable bytes.

Threads: any number may call `write` at once, for different slots.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from ....errors import PROCESS_ERRNOS, from_os_error
from ....logs import get_logger
from ...base import BlockHash
from .block_reader import payload_checksum
from .payload_files import PayloadFiles

_NO_SPACE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class BlocksWritten:
    """Result of one `write`."""

    written: list[int]
    """Positions of the blocks that were written."""
    checksums: list[int]
    """Checksum of each written block, in the order of `written`."""
    failed: list[int]
    """Positions of the blocks that could not be written."""
    is_full: bool = False
    """True if a write failed for want of space."""
    is_device_failure: bool = False
    """True if a write failed, and neither for want of space nor for want of this process."""


class BlockWriter:
    """Writes the payload of blocks of one namespace."""

    def __init__(
        self, files: PayloadFiles, *, is_durable: bool, at_device: AbstractContextManager[None]
    ) -> None:
        """With `is_durable`, written segments are synced. `at_device` is held during device
        transfers; it limits how many threads transfer at once."""
        self._files = files
        self._is_durable = is_durable
        self._at_device = at_device
        self._has_warned = False

    def write(
        self, keys: Sequence[BlockHash], slots: Sequence[int], buffers: Sequence[memoryview]
    ) -> BlocksWritten:
        """Write blocks into their slots from buffers of one block each."""
        order = sorted(range(len(keys)), key=slots.__getitem__)
        ascending = [slots[i] for i in order]
        checksums = [payload_checksum(keys[i], buffers[i]) for i in order]
        written: list[int] = []
        failed: list[int] = []
        errors: set[int] = set()
        with self._at_device:
            for begin, end in self._files.layout.runs(ascending):
                run = range(begin, end)
                error = self._write_run(ascending[begin], [buffers[order[at]] for at in run])
                if error is None:
                    written.extend(run)
                else:
                    failed.extend(run)
                    errors.add(error)
        return BlocksWritten(
            [order[at] for at in written],
            [checksums[at] for at in written],
            [order[at] for at in failed],
            is_full=not errors.isdisjoint(_NO_SPACE_ERRNOS),
            is_device_failure=bool(errors - _NO_SPACE_ERRNOS - PROCESS_ERRNOS),
        )

    def _write_run(self, first_slot: int, buffers: Sequence[memoryview]) -> int | None:
        """Return None, or the errno of the failure."""
        try:
            self._files.write_run(first_slot, buffers)
            if self._is_durable:
                self._files.sync(first_slot)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                _log.warning("%s", from_os_error(error, "writing blocks"))
            return error.errno or errno.EIO
        return None
