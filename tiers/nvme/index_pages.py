"""The pages of an LMDB file, checked by hand before LMDB sees them.

LMDB trusts its file: a page of zeros, which is what a loss of power leaves where nothing was
synced, or a wild number in a page header ends the process (an assertion, a bus error) instead of
raising. So every page that LMDB would follow is looked at first: its number, its kind, the bounds
of its nodes, each page in use once, and none of them on the list of free pages.

A large index that was closed cleanly is checked at its heads only, because opening must not cost
time in proportion to the tier: that close synced everything. What remains is trust in the owner of
the files, which `check_file` and the modes of the directory establish.
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

from ...errors import CorruptionError
from .index_file import DATA_NAME, damaged

ALWAYS_CHECKED_BYTES = 16 << 20
"""Up to this size the whole file is checked even after a clean close: some tens of milliseconds."""
MAX_KEY_BYTES = 511
MAX_DEPTH = 32

_PAGE_HEAD = struct.Struct("<QHHHH")
_HEAD_BYTES = _PAGE_HEAD.size
_NODE_BYTES = 8
_DB = struct.Struct("<IHHQQQQQ")
_META_DBS_OFFSET = 40
_META_TAIL_OFFSET = 136
_META_TAIL = struct.Struct("<QQ")
_BRANCH, _LEAF, _OVERFLOW = 1, 2, 4
_IS_BIG, _IS_TREE = 1, 2
_NO_PAGE = (1 << 64) - 1
_META_PAGES = 2

Shorts = npt.NDArray[np.uint16]


class _Damage(Exception):
    """What is wrong with the file."""


@dataclass(frozen=True, slots=True)
class _Tree:
    """The record of a tree: where it begins and what it says of itself."""

    flags: int
    depth: int
    branches: int
    leaves: int
    overflows: int
    entries: int
    root: int

    @classmethod
    def parse(cls, data: bytes) -> _Tree:
        """48 bytes of a meta page or of a node of the main tree."""
        return cls(*_DB.unpack(data)[1:])


@dataclass(frozen=True, slots=True)
class _Node:
    """A node of a leaf."""

    flags: int
    key: bytes
    data: bytes


def check_pages(path: Path) -> None:
    """Raise `CorruptionError` if LMDB could not walk the file in `path`, or `OSError`.

    Nobody may be writing to it. `check_file` must have passed.
    """
    if not os.path.lexists(path / DATA_NAME):
        return
    descriptor = os.open(path / DATA_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        if size:
            with mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) as data:
                _Walk(data, size).run()
    except _Damage as damage:
        raise CorruptionError(damaged(path, str(damage))) from None
    finally:
        os.close(descriptor)


class _Walk:
    """One look at a file."""

    def __init__(self, data: mmap.mmap, size: int) -> None:
        self._data = data
        self._size = size
        self._page_bytes = int.from_bytes(data[_META_DBS_OFFSET : _META_DBS_OFFSET + 4], "little")
        metas = [page * self._page_bytes for page in range(_META_PAGES)]
        start = max(metas, key=lambda at: _META_TAIL.unpack_from(data, at + _META_TAIL_OFFSET)[1])
        self._last_page = _META_TAIL.unpack_from(data, start + _META_TAIL_OFFSET)[0]
        at = start + _META_DBS_OFFSET
        self._free = _Tree.parse(data[at : at + _DB.size])
        self._main = _Tree.parse(data[at + _DB.size : at + 2 * _DB.size])
        self._in_use = bytearray(min(self._last_page + 1, size // self._page_bytes))

    def run(self) -> None:
        """Every tree; of a large file that was closed cleanly the small ones only."""
        trees: dict[bytes, _Tree] = {}
        for node in self._nodes(self._main):
            if node.flags & ~_IS_BIG != _IS_TREE or len(node.data) != _DB.size:
                raise _Damage("its list of tables is damaged")
            trees[node.key] = _Tree.parse(node.data)
        meta = trees.pop(b"meta", None)
        is_clean = meta is not None
        for node in self._nodes(meta) if meta is not None else ():
            is_clean &= not node.key.startswith(b"live")
        if is_clean and self._size > ALWAYS_CHECKED_BYTES:
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
            for number in listed.tolist():
                self._take(number)

    def _take(self, number: int) -> None:
        if not _META_PAGES <= number < len(self._in_use) or self._in_use[number]:
            raise _Damage(f"page {number} is used twice or is not there")
        self._in_use[number] = 1

    def _page(self, number: int, kind: int) -> int:
        """Where a page begins, once its head was found right."""
        self._take(number)
        start = number * self._page_bytes
        stated, _, flags, _, _ = _PAGE_HEAD.unpack_from(self._data, start)
        if (stated, flags) != (number, kind):
            raise _Damage(f"page {number} is not what it should be")
        return start

    def _leaves(self, tree: _Tree) -> Iterator[tuple[int, Shorts]]:
        """Every leaf: where it begins, and its nodes' offsets; all counts must agree at the end."""
        if tree.root == _NO_PAGE:
            if (tree.depth, tree.entries) != (0, 0):
                raise _Damage("a table has no root")
            return
        if not 1 <= tree.depth <= MAX_DEPTH:
            raise _Damage("a table has an impossible depth")
        branches, leaves, entries = 0, 0, 0
        waiting = [(tree.root, 1)]
        while waiting:  # each page once: bounded by `_take`
            number, level = waiting.pop()
            is_leaf = level == tree.depth
            start = self._page(number, _LEAF if is_leaf else _BRANCH)
            offsets = self._offsets(number, start, is_leaf)
            if is_leaf:
                leaves, entries = leaves + 1, entries + len(offsets)
                yield start, offsets
            else:
                branches += 1
                waiting += ((child, level + 1) for child in self._children(start, offsets))
        if (branches, leaves, entries) != (tree.branches, tree.leaves, tree.entries):
            raise _Damage("the counts of a table are wrong")

    def _offsets(self, number: int, start: int, is_leaf: bool) -> Shorts:
        """Offsets of a page's nodes, once they were found to fill it exactly."""
        _, _, _, lower, upper = _PAGE_HEAD.unpack_from(self._data, start)
        count = (lower - _HEAD_BYTES) // 2
        if count < 1 or lower % 2 or upper % 2 or not lower <= upper <= self._page_bytes:
            raise _Damage(f"the head of page {number} is wrong")
        shorts = np.frombuffer(self._data[start : start + self._page_bytes], np.uint16)
        offsets = shorts[_HEAD_BYTES // 2 : _HEAD_BYTES // 2 + count].astype(np.int64)
        is_inside = (offsets >= upper) & (offsets <= self._page_bytes - _NODE_BYTES)
        if not is_inside.all() or (offsets % 2).any():
            raise _Damage(f"a node of page {number} lies outside of it")
        at = offsets // 2
        key_bytes = shorts[at + 3].astype(np.int64)
        sizes = _NODE_BYTES + key_bytes
        if is_leaf:
            stated = shorts[at].astype(np.int64) | shorts[at + 1].astype(np.int64) << 16
            sizes += np.where(shorts[at + 2] & _IS_BIG, 8, stated)
        order = np.argsort(offsets)
        ends = offsets[order] + (sizes[order] + 1 & ~1)
        is_whole = ends[-1] == self._page_bytes and (ends[:-1] == offsets[order][1:]).all()
        if not is_whole or offsets[order][0] != upper or (key_bytes > MAX_KEY_BYTES).any():
            raise _Damage(f"the nodes of page {number} do not fit together")
        return offsets.astype(np.uint16)

    def _children(self, start: int, offsets: Shorts) -> list[int]:
        heads = (struct.unpack_from("<HHH", self._data, start + at) for at in offsets.tolist())
        return [low | middle << 16 | high << 32 for low, middle, high in heads]

    def _nodes(self, tree: _Tree) -> Iterator[_Node]:
        """Every node of the leaves, its data too."""
        for start, offsets in self._leaves(tree):
            for at in offsets.tolist():
                yield self._node(start + at)

    def _node(self, at: int) -> _Node:
        low, high, flags, key_bytes = struct.unpack_from("<HHHH", self._data, at)
        key_end = at + _NODE_BYTES + key_bytes
        key = bytes(self._data[at + _NODE_BYTES : key_end])
        size = low | high << 16
        if not flags & _IS_BIG:
            return _Node(flags, key, bytes(self._data[key_end : key_end + size]))
        (number,) = struct.unpack_from("<Q", self._data, key_end)
        start = self._page(number, _OVERFLOW)
        (pages,) = struct.unpack_from("<I", self._data, start + _HEAD_BYTES - 4)
        if pages != (_HEAD_BYTES - 1 + size) // self._page_bytes + 1:
            raise _Damage(f"page {number} has a wrong length")
        for more in range(number + 1, number + pages):
            self._take(more)
        begin = start + _HEAD_BYTES
        return _Node(flags, key, bytes(self._data[begin : begin + size]))
