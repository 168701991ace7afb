"""Checks of the pages of an LMDB file, before LMDB reads them.

LMDB trusts its file. A page of zeros, as a loss of power leaves without sync, or a wild number in a
page header ends the process. It fails with an assertion or a bus error instead of raising. So every
page that LMDB would follow is checked first: its number, its kind and the bounds of its nodes. Each
page must be in use once, and must not be on the list of free pages.

Opening must not cost time in proportion to the tier, so a large index that was closed cleanly is
checked in its small tables only. The clean mark beside it proves that all of it was synced
(`clean_close`). Beyond that the owner of the files is trusted, which `check_file` and the modes of
the directory establish.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ....errors import CorruptionError
from ..namespace import INDEX_FILE
from .clean_close import read_mark
from .index_file import META_PAGES, TornIndexError, damaged, newest_meta

READ_BYTES = 1 << 20
ALWAYS_CHECKED_BYTES = 16 << 20
"""Largest file that is checked completely even after a clean close; it takes some tens of
milliseconds."""
MAX_KEY_BYTES = 511
_META_TABLE = b"meta"
"""Name of the small table that is always checked."""
MAX_DEPTH = 32

_HEAD_BYTES = 16
_OVERFLOW_HEAD = struct.Struct("<Q2xHI")
"""Number, kind and pages. LMDB leaves the two bytes between as the last use of the page did."""
_NODE_BYTES = 8
_DB = struct.Struct("<IHHQQQQQ")
_BRANCH, _LEAF, _OVERFLOW = 1, 2, 4
_IS_BIG, _IS_TREE = 1, 2
_NO_PAGE = (1 << 64) - 1

_BATCH_PAGES = 512
"""Pages checked together, in the order of the file, which is many times as fast as one by one."""

Longs = npt.NDArray[np.int64]


class _Damage(Exception):
    """Raised with the description of the damage."""


@dataclass(frozen=True, slots=True)
class _Tree:
    """The record of a tree: its root and its own counts."""

    flags: int
    depth: int
    branches: int
    leaves: int
    overflows: int
    entries: int
    root: int

    @classmethod
    def parse(cls, data: bytes) -> _Tree:
        """Parse the 48 bytes of a tree record, from a meta page or a node of the main tree."""
        return cls(*_DB.unpack(data)[1:])


@dataclass(frozen=True, slots=True)
class _Node:
    """A node of a leaf page."""

    flags: int
    key: bytes
    data: bytes


def check_pages(path: Path, *, is_trusted: bool) -> None:
    """Raise `CorruptionError` if LMDB could not walk the file in `path`, or `OSError`.

    No process may be writing to the file. `check_file` must have passed. With `is_trusted` the file
    is checked as one with a clean mark. Without either the error is a `TornIndexError`.
    """
    descriptor = os.open(path / INDEX_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        walk = _Walk(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ), size)
        is_trusted = is_trusted or walk.transaction == read_mark(path)
        if not is_trusted or size <= ALWAYS_CHECKED_BYTES:
            _read_all(descriptor)
        walk.run(is_trusted)
    except _Damage as damage:
        kind = CorruptionError if is_trusted else TornIndexError
        raise kind(damaged(path, str(damage))) from None
    finally:
        os.close(descriptor)


def _read_all(descriptor: int) -> None:
    """Read a file into the page cache. Raises `OSError` for a page that the disk cannot deliver.

    Touching such a page in mapped memory would end the process.
    """
    buffer, offset = bytearray(READ_BYTES), 0
    while moved := os.preadv(descriptor, [buffer], offset):
        offset += moved


class _Walk:
    """One check of a file."""

    def __init__(self, data: mmap.mmap, size: int) -> None:
        self._data = data
        self._size = size
        meta = newest_meta(data)
        if meta is None:
            raise _Damage("it is no LMDB file")
        self._page_bytes, self.transaction = meta.page_bytes, meta.transaction
        self._free = _Tree.parse(meta.trees[: _DB.size])
        self._main = _Tree.parse(meta.trees[_DB.size :])
        pages = size // self._page_bytes
        shorts = np.frombuffer(data, "<u2", pages * self._page_bytes // 2)
        self._pages = shorts.reshape(pages, self._page_bytes // 2)
        self._in_use = np.zeros(min(meta.last_page + 1, pages), dtype=np.bool_)

    def run(self, is_trusted: bool) -> None:
        """Check every tree; if `is_trusted`, only the small ones of a large file."""
        trees: dict[bytes, _Tree] = {}
        for node in self._nodes(self._main):
            if node.flags & ~_IS_BIG != _IS_TREE or len(node.data) != _DB.size:
                raise _Damage("its list of tables is damaged")
            trees[node.key] = _Tree.parse(node.data)
        meta = trees.pop(_META_TABLE, None)
        for _ in self._nodes(meta) if meta is not None else ():
            pass
        if is_trusted and self._size > ALWAYS_CHECKED_BYTES:
            return
        for tree in trees.values():
            for _ in self._leaves(tree):
                pass
        self._check_free_list()

    def _check_free_list(self) -> None:
        for node in self._nodes(self._free):
            if len(node.key) != 8 or len(node.data) < 8 or len(node.data) % 8:
                raise _Damage("its list of free pages is damaged")
            numbers = np.frombuffer(node.data, dtype="<u8")
            listed = numbers[1 : 1 + int(numbers[0])] if numbers[0] < len(numbers) else numbers[:0]
            is_sorted = bool((listed[1:] < listed[:-1]).all())
            if len(listed) != numbers[0] or not is_sorted:
                raise _Damage("its list of free pages is damaged")
            self._take(listed[::-1].astype(np.int64))

    def _take(self, numbers: Longs) -> None:
        """Mark these pages, in ascending order, as used; raise if one is used already."""
        is_wrong = (numbers < META_PAGES) | (numbers >= len(self._in_use))
        is_wrong[1:] |= numbers[1:] == numbers[:-1]
        if not is_wrong.any():
            is_wrong = self._in_use[numbers]
        self._all_right(~is_wrong, numbers, "is used twice or is not there")
        self._in_use[numbers] = True

    def _all_right(self, is_right: npt.NDArray[np.bool_], numbers: Longs, wrong: str) -> None:
        """Raise an error that names the first page for which `is_right` is False."""
        if not is_right.all():
            raise _Damage(f"page {numbers[np.argmin(is_right)]} {wrong}")

    def _leaves(self, tree: _Tree) -> Iterator[Longs]:
        """Yield where in the file the nodes of each leaf begin; the counts must agree at the
        end."""
        if tree.root == _NO_PAGE:
            if (tree.depth, tree.entries) != (0, 0):
                raise _Damage("a table has no root")
            return
        if not 1 <= tree.depth <= MAX_DEPTH:
            raise _Damage("a table has an impossible depth")
        branches, entries = 0, 0
        level = np.array([tree.root], dtype=np.uint64).astype(np.int64)
        for _ in range(tree.depth - 1):
            branches += len(level)
            level = np.sort(
                np.concatenate(list(map(self._children, self._nodes_on(level, _BRANCH))))
            )
            if len(level) > len(self._in_use):
                raise _Damage("a table has more pages than the file")
        for nodes in self._nodes_on(level, _LEAF):
            entries += len(nodes)
            yield nodes
        if (branches, len(level), entries) != (tree.branches, tree.leaves, tree.entries):
            raise _Damage("the counts of a table are wrong")

    def _nodes_on(self, numbers: Longs, kind: int) -> Iterator[Longs]:
        """Yield where in the file the nodes of these pages begin, some pages at a time."""
        for start in range(0, len(numbers), _BATCH_PAGES):
            batch = numbers[start : start + _BATCH_PAGES]
            self._take(batch)
            yield self._nodes_of(batch, kind)

    def _nodes_of(self, numbers: Longs, kind: int) -> Longs:
        """Return where the nodes of these pages begin, after checking that they fill the pages
        exactly."""
        pages = self._pages[numbers]
        stated = np.ascontiguousarray(pages[:, :4]).view("<i8")[:, 0]
        is_right = (stated == numbers) & (pages[:, 5] == kind)
        self._all_right(is_right, numbers, "is not what it should be")
        lower, upper = pages[:, 6].astype(np.int64), pages[:, 7].astype(np.int64)
        counts = (lower - _HEAD_BYTES) // 2
        is_right = (counts >= 1) & (lower % 2 == 0) & (upper % 2 == 0) & (lower <= upper)
        self._all_right(is_right & (upper <= self._page_bytes), numbers, "has a wrong head")

        ends = np.cumsum(counts)
        row = np.repeat(np.arange(len(numbers)), counts)
        place = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        offset = pages[row, _HEAD_BYTES // 2 + place].astype(np.int64)
        is_right = (offset >= upper[row]) & (offset <= self._page_bytes - _NODE_BYTES)
        self._all_right(is_right & (offset % 2 == 0), numbers[row], "has a node outside of it")

        begin = np.sort(row * self._page_bytes + offset)
        head = pages.reshape(-1)[begin[:, np.newaxis] // 2 + np.arange(4)].astype(np.int64)
        size = _NODE_BYTES + head[:, 3]
        if kind == _LEAF:
            size += np.where(head[:, 2] & _IS_BIG, 8, head[:, 0] | head[:, 1] << 16)
        next_begin = np.append(begin[1:], 0)
        next_begin[ends - 1] = (np.arange(len(numbers)) + 1) * self._page_bytes
        is_right = (begin + (size + 1 & ~1) == next_begin) & (head[:, 3] <= MAX_KEY_BYTES)
        is_right[ends - counts] &= begin[ends - counts] % self._page_bytes == upper
        self._all_right(is_right, numbers[row], "has nodes that do not fit together")
        nodes: Longs = begin + (numbers - np.arange(len(numbers)))[row] * self._page_bytes
        return nodes

    def _children(self, nodes: Longs) -> Longs:
        """Return the pages that the nodes of branch pages point to."""
        head = self._pages.reshape(-1)[nodes[:, np.newaxis] // 2 + np.arange(3)].astype(np.int64)
        children: Longs = head[:, 0] | head[:, 1] << 16 | head[:, 2] << 32
        return children

    def _nodes(self, tree: _Tree) -> Iterator[_Node]:
        """Yield every node of the leaves with its data."""
        for nodes in self._leaves(tree):
            yield from map(self._node, nodes.tolist())

    def _node(self, at: int) -> _Node:
        low, high, flags, key_bytes = struct.unpack_from("<HHHH", self._data, at)
        key_end = at + _NODE_BYTES + key_bytes
        key = bytes(self._data[at + _NODE_BYTES : key_end])
        size = low | high << 16
        if not flags & _IS_BIG:
            return _Node(flags, key, bytes(self._data[key_end : key_end + size]))
        (number,) = struct.unpack_from("<Q", self._data, key_end)
        pages = (_HEAD_BYTES - 1 + size) // self._page_bytes + 1
        if number + pages > len(self._in_use):
            raise _Damage(f"page {number} is not there")
        self._take(np.arange(number, number + pages))
        begin = number * self._page_bytes + _HEAD_BYTES
        head = _OVERFLOW_HEAD.unpack_from(self._data, begin - _HEAD_BYTES)
        if head != (number, _OVERFLOW, pages):
            raise _Damage(f"page {number} is not what it should be")
        return _Node(flags, key, bytes(self._data[begin : begin + size]))
