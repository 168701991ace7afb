"""Disks that log every write and flush, and their contents after a loss of power.

    with LoggedDisks(folder, "ext4", 2) as disks:
        ...                        # use disks.folders
        disks.mark("this far")
    for loss in disks.losses(rng, 10):
        with loss.mounted() as folders: ...

A disk is a loop device on a file of a FUSE file system (`logging_fuse`). After a loss of power it
has all writes before its last flush, and any part of the later ones. Root, loop devices and FUSE
are needed; the test is skipped without.
"""

from __future__ import annotations

import ctypes.util
import gc
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Self

import pytest

from .children import environment
from .logging_fuse import FLUSH, MARK, MARK_FILE, RECORD, WRITE
from .waiting import wait_until

SIZE_BYTES = 640 << 20
PAGE = 4096
COMMAND_LIMIT_S = 120
_MAKE = {"ext4": "-F", "xfs": "-f", "btrfs": "-f"}
_SAME_UUID = {"xfs": ",nouuid"}


class Torn(Enum):
    """Part of the writes after the last flush that a disk has."""

    ALL = "all"
    NONE = "none"
    SOME = "some"
    PAGES = "pages"

    def pick(self, rng: random.Random, write: Write) -> Iterator[Write]:
        """The parts of a write that are there."""
        if self is Torn.ALL or (self is Torn.SOME and rng.random() < 0.5):
            yield write
        elif self is Torn.PAGES:
            for begin in range(0, len(write.data), PAGE):
                if rng.random() < 0.5:
                    yield Write(write.at + begin, write.data[begin : begin + PAGE])


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes that reached a disk."""

    at: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss of power."""

    images: list[Path]
    """The contents of each disk."""
    marks_before: int
    """Number of marks before it."""
    what: str
    """Its place in the log, for messages."""
    options: str

    @contextmanager
    def mounted(self) -> Iterator[list[Path]]:
        """Give the folders of the disks, which the next start of the machine has mounted."""
        with ExitStack() as stack:
            yield [
                stack.enter_context(_mounted(each, each.parent, self.options))
                for each in self.images
            ]


class LoggedDisks:
    """Disks in use. All writes are in the log once the context has ended."""

    def __init__(self, folder: Path, file_system: str, count: int) -> None:
        """`folder` gets the images; it needs room for two of each disk, and for the log."""
        self._folder = folder
        self._images = [folder / f"disk{number}" for number in range(count)]
        self._options = "loop" + _SAME_UUID.get(file_system, "")
        self._log = folder / "log"
        self._stack = ExitStack()
        self._fuse = folder / "fuse"
        self.folders: list[Path] = []
        """The mounted file systems, one for each disk."""
        tool = shutil.which(f"mkfs.{file_system}", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        if os.geteuid() != 0 or not os.path.exists("/dev/loop-control"):
            pytest.skip("no loop devices, which need root")
        if tool is None or not ctypes.util.find_library("fuse3"):
            pytest.skip(f"mkfs.{file_system} or libfuse3 is not installed")
        for image in self._images:
            with image.open("wb") as file:
                file.truncate(SIZE_BYTES)
            _run(tool, "-q", _MAKE[file_system], str(image))
            _copy(image, _before(image))

    def __enter__(self) -> Self:
        self._fuse.mkdir()
        module = (sys.executable, "-m", "support.logging_fuse")
        process = subprocess.Popen(
            [*module, self._fuse, self._log, *self._images], env=environment()
        )
        self._stack.callback(process.wait, COMMAND_LIMIT_S)
        self._stack.callback(_run, "umount", "--lazy", str(self._fuse))
        try:
            wait_until(lambda: os.path.ismount(self._fuse) or process.poll() is not None)
            for image in self._images:
                disk = _mounted(self._fuse / image.name, self._folder, self._options)
                self.folders.append(self._stack.enter_context(disk))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)

    def mark(self, text: str) -> None:
        """Put a mark behind all that was written and flushed so far. It has at most a page."""
        data = text.encode()
        assert len(data) <= PAGE
        with (self._fuse / MARK_FILE).open("r+b", buffering=0) as file:
            file.write(data)

    def marks(self) -> list[str]:
        """All marks."""
        return [data.decode() for kind, _, _, data in self._events() if kind == MARK]

    def losses(self, rng: random.Random, count: int) -> Iterator[Loss]:
        """Lose power at `count` places of the log, in order."""
        total = sum(1 for _ in self._events())
        places = sorted(rng.sample(range(total), count))
        pending: list[list[Write]] = [[] for _ in self._images]
        marks = 0
        for place, (kind, disk, at, data) in enumerate(self._events()):
            if kind == WRITE:
                pending[disk].append(Write(at, data))
            elif kind == FLUSH:
                _apply(_before(self._images[disk]), pending[disk])
                pending[disk].clear()
            else:
                marks += 1
            if place in places:
                torn = rng.choice(list(Torn))
                left = [image.with_suffix(f".{place}") for image in self._images]
                for image, lost, writes in zip(self._images, left, pending, strict=True):
                    _copy(_before(image), lost)  # a new file: a loop device may outlive its mount
                    _apply(lost, [part for write in writes for part in torn.pick(rng, write)])
                what = f"{place} of {total}, {torn.value} of {list(map(len, pending))} writes"
                yield Loss(left, marks, what, self._options)
                for lost in left:
                    lost.unlink()

    def _events(self) -> Iterator[tuple[bytes, int, int, bytes]]:
        with self._log.open("rb") as log:
            while head := log.read(RECORD.size):
                kind, disk, at, length = RECORD.unpack(head)
                yield kind, disk, at, log.read(length)


@contextmanager
def _mounted(image: Path, where: Path, options: str) -> Iterator[Path]:
    """Mount a disk; its folder has the same name each time."""
    folder = where / f"{image.stem}.mounted"
    folder.mkdir(exist_ok=True)
    _run("mount", "-o", options, str(image), str(folder))
    try:
        yield folder
        gc.collect()  # mapped files of what was closed keep the file system in use
        _run("umount", str(folder))
    except BaseException:
        _run("umount", "--lazy", str(folder))
        raise


def _before(image: Path) -> Path:
    """The file with all writes before the last flush."""
    return image.with_suffix(".flushed")


def _copy(source: Path, target: Path) -> None:
    _run("cp", "--sparse=always", str(source), str(target))


def _apply(image: Path, writes: list[Write]) -> None:
    with image.open("r+b", buffering=0) as file:
        for write in writes:
            os.pwrite(file.fileno(), write.data, write.at)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=COMMAND_LIMIT_S)
