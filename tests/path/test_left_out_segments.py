"""Segments that cannot be opened together with their namespace: they are left out for a while."""

from __future__ import annotations

import errno
import json
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from support.executors import SteppingExecutor
from support.memory_file_system import MemoryFileSystem
from support.path_rig import BLOCK_BYTES, ROOT, PathRig, RigNode, key_of, slots_in

from kvcascade.tiers.nvme.disk.filesystem import File
from kvcascade.tiers.nvme.path.path_messages import Ask, Committed, Release, Told, Touch
from kvcascade.tiers.nvme.path.writer.namespace.slot_space import SlotSpace
from kvcascade.tiers.nvme.path.writer.path_capacity import RETRY_AFTER_S
from kvcascade.tiers.nvme.segments.format import segment_number
from kvcascade.tiers.nvme.segments.segment_files import SegmentFiles

ROOTS = (Path("/one"), Path("/two"))
OK = Committed.OK
PER_SEGMENT = 8


def none(path: Path) -> bool:
    """No file is bad."""
    return False


def every(path: Path) -> bool:
    """All files are bad."""
    return True


def second(path: Path) -> bool:
    """Those in the second path are bad."""
    return ROOTS[1] in path.parents


def even(path: Path) -> bool:
    """Those with an even number are bad."""
    return (segment_number(path.name) or 0) % 2 == 0


class BadDisk(MemoryFileSystem):
    """Some segments can be neither opened nor deleted, whatever their contents."""

    def __init__(self) -> None:
        super().__init__()
        self.is_bad: Callable[[Path], bool] = none
        self.keeps_bad = False
        """True if bad segments cannot be deleted."""
        self.opened: list[Path] = []
        """Segments that were opened, or that it was tried with."""

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> File:
        if path.suffix == ".safetensors":
            self.opened.append(path)
            self._check(path)
        return super().open(path, create=create, direct=direct)

    def list_dir(self, path: Path) -> list[str]:
        self.check_dir(path)
        return super().list_dir(path)

    def unlink(self, path: Path) -> None:
        if self.keeps_bad and path.suffix == ".safetensors":
            self._check(path)
        super().unlink(path)

    def _check(self, path: Path) -> None:
        if self.is_bad(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))


class Rig:
    """A full tier of four segments of eight blocks, whose next writer finds some of them bad."""

    def __init__(
        self,
        is_bad: Callable[[Path], bool] = every,
        roots: tuple[Path, ...] = (ROOT,),
        executor: SteppingExecutor | None = None,
    ) -> None:
        self.fs = BadDisk()
        self.path = PathRig(4, roots=roots, real=self.fs, executor=executor)
        self.node = RigNode(self.path)
        for first in range(0, 32, 4):
            self.node.ask(range(first, first + 4))
            while not (answers := self.node.grants()):
                self.run(0.01)
            (answer,) = answers
            self.node.commit(range(first, first + 4), slots_in(answer), answer.epoch)
            self.run(1.0)
        self.path.close()
        self.fs.is_bad = is_bad
        self.begin()

    def begin(self, **options: object) -> None:
        """Begin another writer, with other options."""
        self.path.start(msgspec.structs.replace(self.path.options, **options))
        self.node = RigNode(self.path)

    def run(self, seconds: float, times: int = 1) -> None:
        """Let time go by, and the I/O threads work."""
        for _ in range(times):
            self.path.step(seconds=seconds / times)
            if isinstance(self.path.executor, SteppingExecutor):
                self.path.executor.run_all()
                self.path.step()

    def wait(self) -> None:
        """Wait until the segments have been tried again, and taken in."""
        self.run(RETRY_AFTER_S + 4, times=20)

    @property
    def folder(self) -> str:
        """Name of the namespace's directory."""
        assert self.node.welcome is not None
        return self.node.welcome.folder

    @property
    def space(self) -> SlotSpace:
        """Slots of the namespace."""
        return self.path.writer.namespaces[self.folder].space

    def file(self, number: int) -> Path:
        """Path of a segment."""
        return self.path.writer.namespaces[self.folder].home.segments.path_of(number)

    def held(self) -> list[int]:
        """Blocks of the first 32 that the tier has."""
        return self.node.held(range(32))


def numbers_of(blocks: list[int]) -> set[int]:
    """Segments in which these of the first 32 blocks were stored in a single path."""
    return {block // PER_SEGMENT for block in blocks}


def test_segments_that_could_not_be_opened_are_used_again_and_keep_their_blocks() -> None:
    rig = Rig()
    assert rig.space.left_out == {0, 1, 2, 3} and not rig.space.segments
    assert rig.node.store(range(100, 104)) == [], "no slot can be granted"
    assert rig.held() == [*range(32)], "an eviction would free nothing"
    rig.fs.is_bad = none
    rig.wait()
    assert rig.space.segments == {0, 1, 2, 3} and not rig.space.left_out
    assert rig.held() == [*range(32)]
    assert rig.node.store(range(100, 104)) == [OK] * 4
    assert rig.held() == [*range(4, 32)], "the coldest blocks made room"


def test_they_are_tried_every_half_minute_while_they_stay_bad(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig()
    caplog.clear()
    rig.fs.opened.clear()
    rig.run(RETRY_AFTER_S - 2, times=20)
    assert not rig.fs.opened
    rig.run(10 * RETRY_AFTER_S, times=400)
    assert 9 * 4 <= len(rig.fs.opened) <= 10 * 4
    assert rig.space.left_out == {0, 1, 2, 3} and not caplog.text, "the log has it once"


def test_only_blocks_whose_slots_can_be_granted_are_evicted() -> None:
    rig = Rig(even)
    assert rig.space.segments == {1, 3}
    before = rig.held()
    for first in range(100, 108, 4):
        assert rig.node.store(range(first, first + 4)) == [OK] * 4
    assert len(before) - len(rig.held()) == 8
    lost = set(range(32)) - set(rig.held())
    assert numbers_of(sorted(lost)) <= {1, 3}
    assert rig.node.store(range(200, 232)) == [OK] * 16, "no more than the two segments have"
    assert numbers_of(rig.held()) == {0, 2} and len(rig.held()) == 16
    rig.fs.is_bad = none
    rig.wait()
    assert rig.node.store(range(300, 316)) == [OK] * 16
    assert rig.held() == [], "the coldest ones went at last"


def test_the_other_path_takes_the_writes_until_one_comes_back() -> None:
    rig = Rig(second, ROOTS)
    assert {number % 2 for number in rig.space.segments} == {0}
    assert rig.node.store(range(100, 104)) == [OK] * 4
    rig.fs.is_bad = none
    rig.wait()
    assert {number % 2 for number in rig.space.segments} == {0, 1}
    assert rig.space.used == 32 and len(rig.held()) == 28


def test_slots_whose_blocks_left_meanwhile_are_free_when_their_segment_comes_back() -> None:
    rig = Rig()
    assert rig.path.writer.namespaces[rig.folder].reset(0.0)
    assert rig.space.evictable == rig.space.free([0]) == 0
    rig.fs.is_bad = none
    rig.wait()
    assert rig.space.free([0]) == 32
    assert rig.node.store(range(100, 132)) == [OK] * 32


def test_one_whose_file_was_deleted_meanwhile_is_made_anew() -> None:
    rig = Rig()
    rig.fs.is_bad = none
    rig.fs.unlink(rig.file(1))
    rig.wait()
    assert rig.space.segments == {0, 1, 2, 3}
    for number in (0, 2, 3):
        rig.space.set_aside(number)
    rig.node.ask(range(100, 104))
    rig.run(0.01, times=3)
    (answer,) = rig.node.grants()
    slots = slots_in(answer)
    assert {slot // PER_SEGMENT for slot in slots} == {1}
    rig.path.send(rig.node.client, Release(answer.slots, has_failed=True))
    rig.run(5.0, times=20)
    assert not rig.fs.exists(rig.file(1)) and 1 not in numbers_of(rig.held())
    assert rig.node.store(range(100, 104), steps=50) == [OK] * 4
    assert rig.fs.exists(rig.file(1)), "made anew"


def test_those_of_a_disk_that_is_not_mounted_stay_left_out() -> None:
    rig = Rig(roots=ROOTS)
    assert rig.space.left_out == {0, 1, 2, 3}
    rig.fs.is_bad = none
    rig.fs.rename(ROOTS[1] / rig.folder, Path("/away"))
    rig.wait()
    assert rig.space.left_out == {1, 3} and rig.space.segments == {0, 2}
    rig.fs.rename(Path("/away"), ROOTS[1] / rig.folder)
    rig.wait()
    assert not rig.space.left_out and rig.held() == [*range(32)]


def test_a_directory_that_was_replaced_is_not_touched() -> None:
    rig = Rig()
    rig.fs.is_bad = none
    rig.fs.rename(ROOT / rig.folder / "lock", Path("/lock"))
    rig.fs.opened.clear()
    rig.wait()
    assert not rig.fs.opened and rig.space.left_out == {0, 1, 2, 3}
    rig.path.writer.forget_gone()
    assert not rig.path.writer.namespaces


def rig_with_an_attempt() -> tuple[Rig, SteppingExecutor]:
    """A rig whose segments are about to be tried again, on the executor."""
    executor = SteppingExecutor()
    rig = Rig(executor=executor)
    rig.path.step(seconds=1.0)
    rig.path.step(seconds=RETRY_AFTER_S)
    assert len(executor) == 1
    return rig, executor


def test_a_namespace_is_not_forgotten_while_its_segments_are_being_opened() -> None:
    rig, executor = rig_with_an_attempt()
    rig.path.step(2, seconds=RETRY_AFTER_S)
    assert len(executor) == 1, "one attempt at a time"
    rig.fs.opened.clear()
    rig.fs.rename(ROOT / rig.folder / "lock", Path("/lock"))
    rig.path.writer.forget_gone()
    assert rig.folder in rig.path.writer.namespaces
    executor.run_all()
    rig.path.step(seconds=1.0)
    rig.path.writer.forget_gone()
    assert not rig.fs.opened and not rig.path.writer.namespaces


def test_a_writer_that_closes_opens_them_no_more() -> None:
    rig, executor = rig_with_an_attempt()
    rig.fs.is_bad = none
    rig.fs.opened.clear()
    rig.path.close()
    executor.run_all()
    assert not rig.fs.opened
    rig.begin()
    assert rig.space.segments == {0, 1, 2, 3} and rig.held() == [*range(32)]


def test_an_attempt_that_lacks_memory_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.fs.is_bad = none
    left, mend = [MemoryError()], SegmentFiles.mend

    def lacking(files: SegmentFiles, number: int) -> None:
        if left:
            raise left.pop()
        mend(files, number)

    monkeypatch.setattr(SegmentFiles, "mend", lacking)
    rig.wait()
    assert not left and rig.space.left_out == {0, 1, 2, 3}
    rig.wait()
    assert rig.space.segments == {0, 1, 2, 3}


def test_an_attempt_that_cannot_begin_while_the_process_ends_is_no_error() -> None:
    rig = Rig(executor=SteppingExecutor())
    rig.path.executor.is_shut_down = True  # type: ignore[attr-defined]
    rig.path.step(2, seconds=RETRY_AFTER_S)
    assert rig.space.left_out == {0, 1, 2, 3}


class TestLimits:
    """Room, while segments are left out."""

    def less(self, rig: Rig, segments: int) -> int:
        """Lower the capacity by so many segments; return the new one."""
        space = rig.path.writer.path.space
        size = space.files.file_bytes(rig.folder)
        goal = space.own_bytes(0) - segments * size
        options = space.capacity.options
        space.capacity.options = msgspec.structs.replace(options, capacity_bytes=goal)
        return goal

    def test_no_file_is_made_in_place_of_one_that_is_left_out(self) -> None:
        rig = Rig()
        before = rig.fs.used_bytes(ROOT)
        rig.node.store(range(100, 104))
        rig.run(20.0, times=20)
        assert rig.fs.used_bytes(ROOT) == before <= rig.path.options.capacity_bytes

    def test_a_tool_may_take_them(self) -> None:
        rig = Rig()
        rig.path.writer.connect(99)
        rig.path.inboxes[99] = deque()
        body = json.dumps({"name": rig.folder, "segments": [1, 3, 7]}).encode()
        rig.path.send(99, Ask(1, "take", body))
        rig.run(1.0, times=20)
        (told,) = rig.path.take(99, Told)
        assert json.loads(told.body) == {"taken": [1, 3], "blocks": 16}
        assert rig.space.left_out == {0, 2} and numbers_of(rig.held()) == {0, 2}

    def test_a_model_is_as_cold_as_the_blocks_that_it_may_evict(self) -> None:
        """It takes a segment of another model, rather than its own blocks that are warmer."""
        fs = BadDisk()
        rig = PathRig(120, real=fs)
        share = 10 * 9 * BLOCK_BYTES
        own, other = RigNode(rig, "own", min_share_bytes=share), RigNode(rig, "other")
        keys = range(80)
        for first in keys[::8]:
            own.store(range(first, first + 8), steps=50)
        rig.step(seconds=1000.0)
        for first in range(1000, 1400, 8):
            other.store(range(first, first + 8), steps=200)
            rig.step(2, seconds=1.0)
        rig.step(seconds=1000.0)
        assert own.held(keys) == [*keys]
        fs.is_bad = even
        rig.close()
        rig.start()
        own = RigNode(rig, "own", min_share_bytes=share)
        fs.is_bad = none
        other = RigNode(rig, "other")
        assert own.welcome is not None and other.welcome is not None
        space = rig.writer.namespaces[own.welcome.folder].space
        before = len(rig.writer.namespaces[other.welcome.folder].space.segments)
        warm = [key for key in keys if key // 8 not in space.left_out]
        rig.send(own.client, Touch([key_of(key) for key in warm]))
        assert own.store(range(200, 208), steps=50) == [OK] * 8
        assert own.held(keys) == [*keys]
        assert len(rig.writer.namespaces[other.welcome.folder].space.segments) < before

    def test_a_smaller_capacity_takes_those_in_use_first(self) -> None:
        rig = Rig(even)
        goal = self.less(rig, 2)
        rig.run(20.0, times=20)
        assert not rig.space.segments and rig.space.left_out == {0, 2}
        assert rig.path.writer.path.space.own_bytes(0) <= goal
        assert numbers_of(rig.held()) == {0, 2}

    def test_a_smaller_capacity_takes_them_if_there_is_no_other(self) -> None:
        rig = Rig()
        goal = self.less(rig, 2)
        rig.run(20.0, times=20)
        assert rig.space.left_out == {2, 3} and numbers_of(rig.held()) == {2, 3}
        assert rig.path.writer.path.space.own_bytes(0) <= goal
        rig.fs.is_bad = none
        rig.wait()
        assert rig.space.segments == {2, 3} and rig.held() == [*range(16, 32)]

    def test_one_that_cannot_be_deleted_stays_left_out_and_one_only_loses_blocks(self) -> None:
        rig = Rig()
        rig.fs.keeps_bad = True
        goal = self.less(rig, 1)
        rig.run(3 * RETRY_AFTER_S, times=200)
        assert rig.space.left_out == {0, 1, 2, 3} and rig.held() == [*range(8, 32)]
        rig.fs.is_bad = none
        rig.run(2 * RETRY_AFTER_S, times=200)
        assert rig.path.writer.path.space.own_bytes(0) <= goal
        assert rig.space.segments == {1, 2, 3}

    def test_one_that_was_opened_while_it_is_taken_is_not_used(self) -> None:
        rig = Rig(executor=SteppingExecutor())
        rig.path.step(seconds=1.0)
        rig.path.step(seconds=RETRY_AFTER_S)
        rig.fs.is_bad = none
        assert rig.path.writer.path.space.take(rig.folder, 2)
        executor = rig.path.executor
        assert isinstance(executor, SteppingExecutor) and executor.step(), "it was opened"
        rig.path.step(seconds=1.0)
        rig.path.step(seconds=1.0)
        assert rig.space.left_out == {0, 1, 2, 3}
        rig.run(10.0, times=10)
        assert rig.space.segments == {0, 1, 3} and not rig.fs.exists(rig.file(2))


def test_a_stop_does_not_wait_until_all_were_tried() -> None:
    """Each attempt may take as long as a device that fails."""
    rig = Rig(executor=SteppingExecutor())

    def stop_at_the_second(path: Path) -> bool:
        if len(rig.fs.opened) == 2:
            rig.path.kill()
        return True

    rig.fs.is_bad = stop_at_the_second
    rig.fs.opened.clear()
    rig.path.step(20, seconds=RETRY_AFTER_S / 10)
    rig.path.executor.run_all()  # type: ignore[attr-defined]
    assert len(rig.fs.opened) == 2
