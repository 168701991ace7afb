"""Rates of the disk alone, measured with direct vectored calls of the same number of bytes.

Files are preallocated, like segments. A call moves an extent of `CALL_BYTES`, with one buffer per
block in huge pages. Each number of threads in `THREADS` is measured.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import perf_counter

from ....handlers.node.bounce import huge_pages
from ....threads import started_pool
from .bench_results import BenchError

CALL_BYTES = 16 << 20
BUFFERS_PER_CALL = 1024
THREADS = (1, 2, 4)
"""Numbers of threads to measure. The limit is the best median over all repetitions, because the
best single sample would include noise."""


class RawDisk:
    """Preallocated files, one per folder, written and read directly."""

    def __init__(
        self,
        folders: Sequence[Path],
        block_bytes: int,
        total_bytes: int,
        *,
        is_overwritten: bool = False,
    ) -> None:
        """With `is_overwritten`, files are written once before a write is timed."""
        self._is_overwritten = is_overwritten
        self._paths = [folder / "raw.bin" for folder in folders]
        self._block_bytes = block_bytes
        per_call = max(1, min(CALL_BYTES // block_bytes, BUFFERS_PER_CALL))
        blocks = max(1, total_bytes // block_bytes)
        self._calls = [
            (start, min(per_call, blocks - start)) for start in range(0, blocks, per_call)
        ]
        self._total = blocks * block_bytes
        self._view = huge_pages(self._total)
        filler = os.urandom(1 << 20)
        for at in range(0, self._total, len(filler)):
            self._view[at : at + len(filler)] = filler[: self._total - at]

    def rates(self, threads: int) -> tuple[float, float]:
        """Return (write, read) rates in bytes per second; each call uses new files."""
        files = [self._make(path) for path in self._paths]
        try:
            with started_pool(threads, "kvcascade-raw") as executor:
                put = partial(self._move, os.pwritev, files)
                if self._is_overwritten:
                    self._run(executor, put)
                write = self._run(executor, put)
                drop_page_cache(self._paths)
                read = self._run(executor, partial(self._move, os.preadv, files))
        finally:
            for file in files:
                os.close(file)
            for path in self._paths:
                path.unlink()
        return write, read

    def close(self) -> None:
        """Release the memory."""
        self._view.release()

    def _make(self, path: Path) -> int:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)
        os.posix_fallocate(file, 0, self._total)
        os.close(file)
        try:
            return os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            message = f"{path.parent} takes no direct I/O ({error}); give a folder on another disk"
            raise BenchError(message) from None

    def _run(self, executor: ThreadPoolExecutor, move: partial[None]) -> float:
        began = perf_counter()
        for _ in executor.map(move, range(len(self._calls))):
            pass
        return self._total / (perf_counter() - began)

    def _move(self, call: object, files: Sequence[int], number: int) -> None:
        start, count = self._calls[number]
        size = self._block_bytes
        buffers = [self._view[i * size : (i + 1) * size] for i in range(start, start + count)]
        moved = call(files[number % len(files)], buffers, start * size)  # type: ignore[operator]
        for buffer in buffers:
            buffer.release()
        if moved != count * size:
            raise BenchError(f"the disk moved {moved} of {count * size} bytes in one call")


def drop_page_cache(paths: Sequence[Path]) -> None:
    """Drop files, or all files below a folder, from the page cache."""
    for path in paths:
        below = path.rglob("*") if os.path.isdir(path) else [path]
        for file in below:
            if os.path.isfile(file):
                _forget(file)


def _forget(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
