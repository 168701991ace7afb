"""What the tests on a GPU share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

SHARED = "/dev/shm"
MIB = 1 << 20
SPARE_BYTES = 32 * MIB


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder in shared memory that nobody else uses: files on a disk may not be pinned for long
    (Linux refuses it for file systems that write back), and an arena never lies there."""
    with TemporaryDirectory(dir=SHARED) as folder:
        yield Path(folder)


@pytest.fixture
def want_shared() -> Callable[[int], None]:
    """Skips a test, and says what to do, unless so many bytes of shared memory are free."""

    def want(size: int) -> None:
        free = psutil.disk_usage(SHARED).free
        if free < size + SPARE_BYTES:
            pytest.skip(
                f"needs {size // MIB} MiB of {SHARED}, {free // MIB} are free; give a container "
                "--shm-size=2g, or remount it with that size"
            )

    return want
