"""Checks of the LMDB file's header, because LMDB trusts it; and LMDB's errors as ours."""

from __future__ import annotations

import errno
import struct
from pathlib import Path

import lmdb

from ....errors import CorruptionError, KVCascadeError, NoSpaceError, TierIOError, from_os_error
from ..disk.filesystem import RealFileSystem
from ..namespace import INDEX_FILE

MAX_FILE_BYTES = 1 << 62
MAX_MISSING_BYTES = 64 << 20
"""Most bytes that may be missing at the end: LMDB need not have written its last pages. A larger
gap means that the file was cut."""
_HEAD_BYTES = 128 << 10
_PAGE_SIZES = (4096, 8192, 16384, 32768, 65536)
_META_MAGIC = 0xBEEFC0DE
_META_VERSION = 1
_META_HEAD = struct.Struct("<II")
_META_TAIL = struct.Struct("<QQ")
_META_PAGES = 2
_META_HEAD_OFFSET = 16
_META_PAGE_SIZE_OFFSET = 40
_META_TAIL_OFFSET = 136
MAX_ERRNO = 4096


def check_file(path: Path, map_bytes: int) -> None:
    """Check the header of the LMDB file, and extend a file that is slightly too short.

    Unused pages beyond `map_bytes` are cut off. Raises `CorruptionError` or `OSError`.
    """
    file = RealFileSystem().open(path / INDEX_FILE)  # LMDB would follow a link, and write to it
    try:
        size = file.size()
        head = bytearray(min(size, _HEAD_BYTES))
        if head:
            file.preadv([memoryview(head)], 0)
        needed = _bytes_needed(head)
        if needed is None or size > MAX_FILE_BYTES or needed > MAX_FILE_BYTES:
            raise CorruptionError(damaged(path, "it is no LMDB file"))
        if needed > size + MAX_MISSING_BYTES:
            raise CorruptionError(damaged(path, "it is cut short"))
        longest = max(needed, map_bytes)
        if not needed <= size <= longest:
            file.truncate(min(max(size, needed), longest))
    finally:
        file.close()


def _bytes_needed(head: bytearray) -> int | None:
    """Return the bytes up to the last page that the newer meta page names; None if neither is
    valid."""
    if len(head) < _META_TAIL_OFFSET + _META_TAIL.size:
        return None
    page_bytes = int.from_bytes(head[_META_PAGE_SIZE_OFFSET : _META_PAGE_SIZE_OFFSET + 4], "little")
    if page_bytes not in _PAGE_SIZES:
        return None
    newest: tuple[int, int] | None = None
    for page in range(_META_PAGES):
        start = page * page_bytes
        if len(head) < start + _META_TAIL_OFFSET + _META_TAIL.size:
            return None
        magic, version = _META_HEAD.unpack_from(head, start + _META_HEAD_OFFSET)
        if (magic, version) != (_META_MAGIC, _META_VERSION):
            return None
        last_page, number = _META_TAIL.unpack_from(head, start + _META_TAIL_OFFSET)
        if newest is None or number > newest[0]:
            newest = (number, last_page)
    assert newest is not None
    return int(newest[1] + 1) * page_bytes


def damaged(path: Path, why: str) -> str:
    """Return the error message for a damaged index."""
    return (
        f"the index in {path} is damaged ({why}); remove the directory {path.parent} to start empty"
    )


def is_lack_of_room(error: lmdb.Error) -> bool:
    """Return True if the index or its disk is full."""
    return isinstance(error, lmdb.MapFullError) or _code(error) in (errno.ENOSPC, errno.EDQUOT)


def from_lmdb(error: lmdb.Error, path: Path) -> KVCascadeError:
    """Map an LMDB error to a `KVCascadeError`."""
    if is_lack_of_room(error):
        return NoSpaceError(f"no space for the index in {path} ({error}); free some")
    if _code(error) in (errno.EMFILE, errno.ENFILE):
        return from_os_error(OSError(_code(error), str(error)), f"opening the index in {path}")
    if 0 < _code(error) < MAX_ERRNO:  # an errno of the operating system
        return TierIOError(_code(error), f"{error} at the index in {path}; check the device")
    return CorruptionError(damaged(path, str(error)))


def _code(error: lmdb.Error) -> int:
    """Return the error number; 0 for errors that py-lmdb raises itself."""
    return int(getattr(error, "code", 0))
