"""Growth: no more segments than are wanted, and each path by itself."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.clock import ManualClock
from support.executors import SteppingExecutor
from support.keys import key, keys
from support.nvme_rig import Rig, config_for

from kvcascade.tiers.base import BlockOutcome
from kvcascade.tiers.nvme.disk.filesystem import FileLock, RealFileSystem
from kvcascade.tiers.nvme.tier import NvmeTierConfig
from kvcascade.tiers.nvme.writer.capacity import BUDGET_LOCK
from kvcascade.tiers.nvme.writer.growth import RETRY_AFTER_S

PER_SEGMENT = 8
SEGMENTS = 8


class _NotedLock(FileLock):
    """Says when it is released."""

    def __init__(self, lock: FileLock, on_release: Callable[[], object]) -> None:
        self._lock = lock
        self._on_release = on_release

    def release(self) -> None:
        self._on_release()
        self._lock.release()

    def is_in_place(self) -> bool:
        return self._lock.is_in_place()


class _BusyFileSystem(RealFileSystem):
    """Somebody calls `ask` in every moment in which the room for a segment is given up."""

    def __init__(self) -> None:
        super().__init__()
        self.ask: Callable[[], object] = int

    def lock(
        self, path: Path, *, shared: bool = False, wait_s: float = 0.0, is_noted: bool = True
    ) -> FileLock:
        lock = super().lock(path, shared=shared, wait_s=wait_s, is_noted=is_noted)
        return _NotedLock(lock, lambda: self.ask()) if path.name == BUDGET_LOCK else lock


class _BadPath(RealFileSystem):
    """One of the paths has no room, or its device is gone."""

    def __init__(self, *, is_gone: bool) -> None:
        super().__init__()
        self.bad: Path | None = None
        self._is_gone = is_gone

    def _is_bad(self, path: Path) -> bool:
        return self.bad is not None and path.is_relative_to(self.bad)

    def free_bytes(self, path: Path) -> int:
        return 0 if self._is_bad(path) else super().free_bytes(path)

    def list_dir(self, path: Path) -> list[str]:
        if self._is_gone and self._is_bad(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().list_dir(path)


def small_start(paths: list[Path]) -> NvmeTierConfig:
    """One segment per path at the start."""
    for path in paths:
        path.mkdir(exist_ok=True)
    config = config_for(paths, slots=SEGMENTS * PER_SEGMENT, per_segment=PER_SEGMENT)
    return replace(config, ready_bytes=1, min_free_bytes=1)


def test_who_asks_while_a_segment_is_made_gets_no_second_one(tmp_path: Path) -> None:
    """It is there already then, but its slots cannot be told yet."""
    fs, executor = _BusyFileSystem(), SteppingExecutor()
    rig = Rig(small_start([tmp_path]), executor, fs)
    executor.run_all()
    for i in range(PER_SEGMENT - 2):
        rig.store([key(i)])
    asked: list[int] = []
    fs.ask = lambda: asked.append(rig.backend.get_num_free_blocks())
    executor.run_all()
    assert asked == [2], "less than half of a segment: it asks for another one"
    assert rig.tier.segments.numbers == [0, 1]
    fs.ask = int
    rig.check_sums()
    rig.close()


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("is_gone", [False, True])
def test_a_path_that_cannot_grow_leaves_the_others_alone(
    tmp_path: Path, bad: int, is_gone: bool
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    fs = _BadPath(is_gone=is_gone)
    clock = ManualClock()
    rig = Rig(small_start(paths), fs=fs, clock=clock)
    assert rig.tier.segments.numbers == [0, 1]
    fs.bad = paths[bad]
    good = {number for number in range(SEGMENTS) if number % 2 != bad}
    for i in range(SEGMENTS):
        clock.advance(RETRY_AFTER_S)
        stored = rig.store(keys(PER_SEGMENT * i, PER_SEGMENT * (i + 1)))
        assert set(stored) == {BlockOutcome.OK}
    assert set(rig.tier.segments.numbers) == good | {bad}
    fs.bad = None
    for i in range(SEGMENTS, 2 * SEGMENTS):
        clock.advance(RETRY_AFTER_S)
        rig.store(keys(PER_SEGMENT * i, PER_SEGMENT * (i + 1)))
    assert len(rig.tier.segments.numbers) == SEGMENTS, "it grows again when it can"
    rig.check_sums()
    rig.close()
