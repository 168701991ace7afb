"""What the tests on a GPU share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

SHARED = "/dev/shm"
MIB = 1 << 20
SPARE_BYTES = 32 * MIB
LIMIT_S = float(os.environ.get("KVCASCADE_GPU_TESTS_S", "180"))
"""No test begins later. With the benchmark, which has a limit of its own, these tests take about 8
minutes at most."""


@cache
def began_s() -> float:
    """When the first of these tests began; others may have run before."""
    return time.monotonic()


LATE = ("gpu/test_device_cuda.py::test_moves_the_pages", "gpu/test_bench.py")
"""Tests that come last, in this order. They are long, and the time may be up before they end: what
keeps the order of copies, and who pins, is checked nowhere else."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort, so that a slow machine leaves out the late tests."""
    items.sort(key=lambda item: [late in item.nodeid for late in reversed(LATE)])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that would begin too late, and say so."""
    if -began_s() + time.monotonic() >= LIMIT_S:
        pytest.skip(
            f"the GPU tests have taken {LIMIT_S:g} s; run this one alone, or set "
            "KVCASCADE_GPU_TESTS_S to more seconds"
        )


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
