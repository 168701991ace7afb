"""Arrays in mapped files: per-slot data of the policy that survives restarts.

The writer's thread changes them by plain memory writes, without system calls. `kill -9` loses
nothing. After a loss of power the contents may be old; no block depends on them.
"""

from __future__ import annotations

import re
import struct
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ....errors import NoSpaceError, os_errors
from ....logs import get_logger
from ..disk.filesystem import File, FileSystem
from ..disk.transfers import write_all

HEADER_BYTES = 64
MAX_ARRAY_BYTES = 1 << 40
HEADER = struct.Struct("<8s8sQQQ24x")
MAGIC = b"KVCARR1\0"
_NAME = re.compile(r"[a-z0-9_]{1,48}")
assert HEADER.size == HEADER_BYTES

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _OpenArray:
    """An open array file and its mapping."""

    file: File
    view: memoryview
    kind: np.dtype[Any]
    length: int

    def write_header(self, session: int, checksum: int) -> None:
        header = HEADER.pack(MAGIC, kind_name(self.kind), self.length, session, checksum)
        self.file.pwritev([memoryview(header)], 0)


class MappedArrays:
    """An `ArraySource` over the files of one directory.

    `session` numbers the openings of the tier. An array that was not in use in the previous session
    is stale. Without a session, arrays are not sealed.

    If the disk has no room for a file, the array lives in memory and is lost at the end.
    """

    def __init__(self, fs: FileSystem, folder: Path, session: int | None) -> None:
        self._fs = fs
        self._folder = folder
        self._session = session
        self._open: list[_OpenArray] = []
        self._requested: set[str] = set()
        self.was_replaced = False
        """True once an array was missing, damaged, stale, or of another type or length than
        requested."""
        self.was_unused = False
        """True once an array was missing, damaged, or not in use in the previous session."""

    def __call__(self, name: str, length: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
        """Return the array as it was left; zeros where it is new. Raises a `KVCascadeError`.

        If the length changed, the common part is kept and `was_replaced` is set.
        """
        assert _NAME.fullmatch(name), "array names are short and plain"
        kind = np.dtype(dtype)
        self._requested.add(name)
        path = self._folder / f"{name}.arr"
        size = HEADER_BYTES + length * kind.itemsize
        with os_errors(f"mapping {path}"):
            old = self._load(path, kind, length)
            self.was_unused |= old is None
            try:
                with os_errors(f"making {path}"):
                    if old is None or len(old) != length:
                        self.was_replaced = True
                        self._rewrite(path, kind, length, old)
                    file = self._open_whole(path, size)
            except NoSpaceError as error:
                self.was_replaced = True
                _log.warning("%s will not survive a restart: %s", path.name, error)
                return np.zeros(length, dtype=kind)
            view = file.map(size, writable=True)
            self._open.append(_OpenArray(file, view, kind, length))
            if self._session is not None:
                self._open[-1].write_header(self._session, checksum=0)
        return np.frombuffer(view, dtype=kind, count=length, offset=HEADER_BYTES)

    def remove_others(self, kept: str) -> None:
        """Delete the arrays of the directory that were not requested, but for `kept`.

        A failure is ignored: the next opening tries again.
        """
        with suppress(OSError):
            for path in map(self._folder.joinpath, self._fs.list_dir(self._folder)):
                if path.suffix == ".arr" and path.stem not in {*self._requested, kept}:
                    self._fs.unlink(path)

    def sync(self) -> None:
        """Seal all arrays with their checksums and make them durable. Raises a `KVCascadeError`.

        The arrays must not change afterwards.
        """
        with os_errors(f"writing {self._folder}"):
            for one in self._open:
                if self._session is not None:
                    one.write_header(self._session, _checksum(one.view))
                one.file.sync()

    def close(self) -> None:
        """Close the files; an array stays mapped as long as it is referenced."""
        for one in self._open:
            one.file.close()
        self._open.clear()

    def _load(self, path: Path, kind: np.dtype[Any], length: int) -> npt.NDArray[Any] | None:
        """Return the stored array, whatever its length; None if missing or damaged."""
        if not self._fs.exists(path):
            return None
        with closing(self._fs.open(path)) as file:
            size = file.size()
            head = bytearray(HEADER_BYTES)
            if HEADER_BYTES <= size <= MAX_ARRAY_BYTES:
                file.preadv([memoryview(head)], 0)
            magic, stored_kind, stored_length, session, checksum = HEADER.unpack(head)
            expected_size = HEADER_BYTES + stored_length * kind.itemsize
            if magic != MAGIC or stored_kind != kind_name(kind) or size != expected_size:
                _log.warning("%s is damaged; recency starts anew from the index", path)
                return None
            if not stored_length:
                return None
            view = file.map(expected_size, writable=False)
            self.was_unused |= session + 1 != self._session
            if session + 1 != self._session or checksum != _checksum(view):
                self.was_replaced = True
            return np.frombuffer(view, dtype=kind, count=stored_length, offset=HEADER_BYTES)

    def _open_whole(self, path: Path, size: int) -> File:
        """Open a file, and allocate what a sparse copy lacks. Raises `OSError`."""
        file = self._fs.open(path)
        try:
            file.preallocate(size)
        except BaseException:
            file.close()
            raise
        return file

    def _rewrite(
        self, path: Path, kind: np.dtype[Any], length: int, old: npt.NDArray[Any] | None
    ) -> None:
        temporary = path.with_suffix(".new")
        if self._fs.exists(temporary):
            self._fs.unlink(temporary)
        size = HEADER_BYTES + length * kind.itemsize
        file = self._fs.open(temporary, create=True)
        try:
            file.preallocate(size)
            header = HEADER.pack(MAGIC, kind_name(kind), length, self._session or 0, 0)
            file.pwritev([memoryview(header)], 0)
            if old is not None:
                write_all(file, [memoryview(old[:length].tobytes())], HEADER_BYTES)
            file.sync()
        except BaseException:
            with suppress(OSError):
                self._fs.unlink(temporary)
            raise
        finally:
            file.close()
        self._fs.rename(temporary, path)


def _checksum(view: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(view[HEADER_BYTES:])


def kind_name(kind: np.dtype[Any]) -> bytes:
    """Return the element type as a header has it."""
    return kind.str.encode().ljust(8, b"\0")
