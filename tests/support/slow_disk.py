"""A disk that reads at a given rate at most, under a real engine: an engine's spec with a wrapper.

    "spec_name": "SlowDiskSpec", "spec_module_path": "support.slow_disk"

The rate is in the environment variable that `READ_RATE` names, in bytes per second. The tier needs
`"movers": "threads"`, since another process has the real disk.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcascade.assembly import node_parts
from kvcascade.spec import CascadeOffloadingSpec
from kvcascade.tiers.nvme.disk.filesystem import File, RealFileSystem

READ_RATE = "KVCASCADE_TEST_READ_BYTES_PER_S"


class SlowFile(File):
    """Reads one call at a time, at the rate of the disk; the rest as the file below."""

    def __init__(self, file: File, disk: threading.Lock, bytes_per_s: float) -> None:
        self._file = file
        self._disk = disk
        self._bytes_per_s = bytes_per_s
        self._pause = threading.Event()

    def preadv(self, buffers: Sequence[memoryview], offset: int) -> int:
        with self._disk:
            moved = self._file.preadv(buffers, offset)
            self._pause.wait(moved / self._bytes_per_s)
        return moved

    def pwritev(self, buffers: Sequence[memoryview], offset: int) -> int:
        return self._file.pwritev(buffers, offset)

    def preallocate(self, size: int) -> None:
        self._file.preallocate(size)

    def truncate(self, size: int) -> None:
        self._file.truncate(size)

    def sync(self) -> None:
        self._file.sync()

    def size(self) -> int:
        return self._file.size()

    def map(self, length: int, *, writable: bool) -> memoryview:
        return self._file.map(length, writable=writable)

    def close(self) -> None:
        self._file.close()


class SlowFileSystem(RealFileSystem):
    """The machine's own, with slow reads."""

    def __init__(self, direct: bool = True) -> None:
        super().__init__(direct)
        self._disk = threading.Lock()
        self._bytes_per_s = float(os.environ[READ_RATE])

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> File:
        file = super().open(path, create=create, direct=direct)
        return SlowFile(file, self._disk, self._bytes_per_s)


class SlowDiskSpec(CascadeOffloadingSpec):
    """The cascade over a slow disk."""

    def get_manager(self) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(node_parts, "RealFileSystem", SlowFileSystem)
            return super().get_manager()
