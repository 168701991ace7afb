"""Copies of a namespace's arrays below `state/`: use of blocks, eviction orders, prompts.

The writer changes the arrays in memory that is shared with their files, so a copy is up to date.
Any process may make one, whether a writer runs or not. Every array is optional and may be damaged
or stale. The results are for display, and for choosing blocks to export or drop first.
"""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...tiers.nvme.path.writer.namespace.recency import MAX_SESSION_DIGITS, SESSION
from ...tiers.nvme.segments.arrays import HEADER, HEADER_BYTES, MAGIC, MAX_ARRAY_BYTES, kind_name
from ...tiers.nvme.segments.chains import CHAINS
from ...tiers.policies import ORDERS
from ...tiers.policies.parts.usage import LAST_USE, TIMES_USED, WRITTEN_AT
from .path_files import open_read_only
from .prompt_chains import Chains

KINDS = ("<i8", "<i4", "<u8", "<u4", "<u2", "|u1")
"""Element types of arrays that are shown."""
_Head = tuple[np.dtype[Any], int, int]
"""Element type, length and session of an array."""


@dataclass(frozen=True, slots=True)
class SlotUse:
    """Use of every slot; each array has one element per slot, 0 where nothing is known."""

    written_at: npt.NDArray[np.int64]
    """Time of writing, in seconds since 1970."""
    last_use: npt.NDArray[np.int64]
    """Time of the last use, in seconds since 1970."""
    times: npt.NDArray[np.int64]
    """Number of uses since the block was written."""


@dataclass(frozen=True, slots=True)
class SavedPolicy:
    """State that an eviction policy left."""

    name: str
    arrays: int
    bytes: int
    held: int
    """Number of slots in the policy's lists."""
    session: int
    """Number of the opening that used the state last."""


class SavedState:
    """Arrays of one namespace. Its methods raise nothing."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the `state` directory of the namespace."""
        self._folder = folder

    def sessions(self) -> int | None:
        """Return how often a writer has opened the namespace; None if unknown."""
        digits = b""
        with suppress(OSError):
            with closing(open_read_only(self._folder / SESSION)) as file:
                data = bytearray(MAX_SESSION_DIGITS)
                digits = bytes(data[: file.preadv([memoryview(data)], 0)])
        return int(digits) if digits.isdigit() else None

    def use(self, slots: int) -> SlotUse:
        """Return the use of the slots `0 .. slots - 1`."""
        return SlotUse(*(self._padded(name, slots) for name in (WRITTEN_AT, LAST_USE, TIMES_USED)))

    def chains(self) -> Chains:
        """Return which block follows which, as far as engines recorded it."""
        array = _array_in(self._path(CHAINS))
        return Chains([] if array is None else [array])

    def policies(self) -> list[SavedPolicy]:
        """Return every policy that left arrays, the one that was used last first."""
        found = filter(None, map(self._policy, ORDERS))  # arrays are named after their policy
        return sorted(found, key=lambda policy: -policy.session)

    def _policy(self, name: str) -> SavedPolicy | None:
        paths = sorted(self._folder.glob(f"{name}_*.arr"))
        heads = [head for path in paths if (head := _head_of(path)) is not None]
        if not heads:
            return None
        stamps = (_array_in(path) for path in paths if path.stem.endswith("stamp"))
        held = sum(int(np.count_nonzero(stamp)) for stamp in stamps if stamp is not None)
        size = sum(HEADER_BYTES + length * kind.itemsize for kind, length, _ in heads)
        return SavedPolicy(name, len(heads), size, held, max(session for *_, session in heads))

    def _padded(self, name: str, slots: int) -> npt.NDArray[np.int64]:
        found = _array_in(self._path(name))
        padded = np.zeros(slots, dtype=np.int64)
        if found is not None:
            padded[: len(found)] = found[:slots]
        return padded

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.arr"


def _head_of(path: Path) -> _Head | None:
    """Return the head of an array; None if the file is none."""
    with suppress(OSError):
        with closing(open_read_only(path)) as file:
            data = bytearray(HEADER_BYTES)
            got = file.preadv([memoryview(data)], 0)
            return _parse_head(bytes(data[:got]), file.size())
    return None


def _parse_head(data: bytes, file_bytes: int) -> _Head | None:
    """Return element type, length and session of an array file; None if it is no such file."""
    if len(data) != HEADER_BYTES:
        return None
    magic, stored_kind, length, session, _ = HEADER.unpack(data)
    kinds = {kind_name(np.dtype(kind)): np.dtype(kind) for kind in KINDS}
    kind = kinds.get(stored_kind)
    if magic != MAGIC or kind is None or file_bytes > MAX_ARRAY_BYTES:
        return None
    return (kind, length, session) if file_bytes == HEADER_BYTES + length * kind.itemsize else None


def _array_in(path: Path) -> npt.NDArray[Any] | None:
    """Return a copy of the elements; None if the file is no array."""
    head = _head_of(path)
    if head is None:
        return None
    with suppress(OSError):
        return np.fromfile(path, dtype=head[0], count=head[1], offset=HEADER_BYTES)
    return None
