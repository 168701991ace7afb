"""Checks of the LMDB file's header, because LMDB trusts it; and LMDB's errors as ours."""

from __future__ import annotations

import errno
import mmap
import struct
from contextlib import closing
from dataclasses import dataclass
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
_META = struct.Struct("<16xII16x96sQQ")
"""Magic, version, records of two trees, last page in use and transaction."""
_PAGE_SIZE_OFFSET = 40
META_PAGES = 2
MAX_ERRNO = 4096


class TornIndexError(CorruptionError):
    """A page of an index is not as LMDB left it, and may never have reached the disk."""


@dataclass(frozen=True, slots=True)
class MetaPage:
    """The newer one of the pages that name the trees."""

    page_bytes: int
    trees: bytes
    """Records of the tree of free pages and of the main tree."""
    last_page: int
    """Number of the last page in use."""
    transaction: int


def check_file(path: Path, map_bytes: int) -> None:
    """Check the header of the LMDB file, and extend a file that is slightly too short.

    Unused pages beyond `map_bytes` are cut off. Raises `CorruptionError` or `OSError`.
    """
    # LMDB would follow a link, and write to it.
    with closing(RealFileSystem().open(path / INDEX_FILE)) as file:
        size = file.size()
        head = bytearray(min(size, _HEAD_BYTES))
        if head:
            file.preadv([memoryview(head)], 0)
        meta = newest_meta(head)
        needed = 0 if meta is None else (meta.last_page + 1) * meta.page_bytes
        if meta is None or size > MAX_FILE_BYTES or needed > MAX_FILE_BYTES:
            raise CorruptionError(damaged(path, "it is no LMDB file"))
        if needed > size + MAX_MISSING_BYTES:
            raise CorruptionError(damaged(path, "it is cut short"))
        longest = max(needed, map_bytes)
        if not needed <= size <= longest:
            file.truncate(min(max(size, needed), longest))


def newest_meta(data: bytearray | mmap.mmap) -> MetaPage | None:
    """Return the newer meta page of a file, or of its beginning; None if one is invalid."""
    page_bytes = int.from_bytes(data[_PAGE_SIZE_OFFSET : _PAGE_SIZE_OFFSET + 4], "little")
    if page_bytes not in _PAGE_SIZES or len(data) < page_bytes + _META.size:
        return None
    found: list[MetaPage] = []
    for page in range(META_PAGES):
        magic, version, *fields = _META.unpack_from(data, page * page_bytes)
        if (magic, version) != (_META_MAGIC, _META_VERSION):
            return None
        found.append(MetaPage(page_bytes, *fields))
    return max(found, key=lambda meta: meta.transaction)


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
    if _code(error) in (errno.EMFILE, errno.ENFILE, errno.EFBIG):  # limits of the process
        return from_os_error(OSError(_code(error), str(error)), f"opening the index in {path}")
    if _code(error) == errno.ENODEV:
        why = f"the file system of {path} maps no files into memory, as FUSE without a page cache"
        return TierIOError(errno.ENODEV, f"{why}; mount it with one, or use another path")
    if 0 < _code(error) < MAX_ERRNO:  # an errno of the operating system
        return TierIOError(_code(error), f"{error} at the index in {path}; check the device")
    return CorruptionError(damaged(path, str(error)))


def _code(error: lmdb.Error) -> int:
    """Return the error number; 0 for errors that py-lmdb raises itself."""
    return int(getattr(error, "code", 0))
