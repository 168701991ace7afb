"""Copies of a namespace's mapped arrays: recency, use, and the wanted epoch.

Only this module knows where policies store their arrays. Every array is optional and may be stale.
The results are for display, and for choosing which blocks to export or drop first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...policies import ORDERS
from ...policies.usage import LAST_USE, TIMES_USED, WRITTEN_AT
from ..disk.filesystem import open_read_only
from ..segments.arrays import HEADER_BYTES, parse_header
from ..segments.chains import CHAINS, Chains
from ..writer.owners import MAX_PROCESSES


@dataclass(frozen=True, slots=True)
class Usage:
    """Use of every slot; each array has one element per slot."""

    written_at: npt.NDArray[np.int64]
    """Time of writing in seconds of the wall clock; 0 if unknown."""
    last_use: npt.NDArray[np.int64]
    """Time of the last use in seconds of the wall clock; 0 if unknown."""
    times: npt.NDArray[np.int64]
    """Number of uses since the block was written."""


@dataclass(frozen=True, slots=True)
class PolicyState:
    """State that an eviction policy left on disk."""

    name: str
    arrays: int
    bytes: int
    held: int
    """Number of slots in the policy's lists."""
    session: int
    """Session that used the state last."""


class StateReader:
    """The arrays below `state/` of a namespace directory."""

    def __init__(self, home: Path) -> None:
        self._folder = home / "state"

    def epoch(self) -> int | None:
        """Return the wanted epoch; None if no array holds one."""
        found = [int(array[:MAX_PROCESSES].sum()) for array in self._arrays("epoch") if len(array)]
        return max(found) if found else None

    def was_reset(self) -> bool:
        """Return True if engines were reset since the first of them started; see FORMAT.md,
        "Epochs"."""
        arrays = [array for array in self._arrays("epoch") if len(array) > MAX_PROCESSES]
        return any(array[:MAX_PROCESSES].sum() != array[MAX_PROCESSES] for array in arrays)

    def capacity(self) -> int | None:
        """Slots that the last owner planned with; None if no array says."""
        paths = [*self._files("*_stamp"), *self._files(LAST_USE)]
        return max((head[1] for path in paths if (head := _head(path))), default=None)

    def capacity_of(self, state: int) -> int | None:
        """Slots that the process with a state number plans, or planned, with."""
        for name in (LAST_USE, "*_stamp"):
            heads = map(_head, (self._folder / str(state)).glob(f"{name}.arr"))
            found = [head[1] for head in heads if head is not None]
            if found:
                return max(found)
        return None

    def policy_of(self, state: int) -> str | None:
        """The policy that the process with a state number used last; None if it is not known."""
        latest: list[tuple[int, str]] = []
        for name in ORDERS:  # arrays are named after their policy
            heads = map(_head, (self._folder / str(state)).glob(f"{name}_*.arr"))
            latest += [(head[2], name) for head in heads if head is not None]
        return max(latest)[1] if latest else None

    def usage(self, slots: int) -> Usage:
        """Use of slots `0 .. slots - 1`; zeros where nothing is known."""
        return Usage(
            self._merged(WRITTEN_AT, slots),
            self._merged(LAST_USE, slots),
            self._merged(TIMES_USED, slots),
        )

    def recency(self, slots: int) -> npt.NDArray[np.int64]:
        """A number per slot that grows with the time of the last use; 0: not known."""
        return self._merged("*_stamp", slots)

    def chains(self) -> Chains:
        """Which block comes after which, as far as engines noted it."""
        return Chains(self._arrays(CHAINS))

    def policies(self) -> list[PolicyState]:
        """Every policy that left arrays, the one used last first."""
        found: list[PolicyState] = []
        for name in ORDERS:  # arrays are named after their policy
            paths = list(self._files(f"{name}_*"))
            if not paths:
                continue
            heads = [head for path in paths if (head := _head(path)) is not None]
            stamps = [a for p in self._files(f"{name}_*stamp") if (a := _read(p)) is not None]
            held = sum(int(np.count_nonzero(stamp)) for stamp in stamps)
            size = sum(path.stat().st_size for path in paths)
            session = max((session for _, _, session in heads), default=0)
            found.append(PolicyState(name, len(paths), size, held, session))
        return sorted(found, key=lambda state: -state.session)

    def _merged(self, name: str, slots: int) -> npt.NDArray[np.int64]:
        merged = np.zeros(slots, dtype=np.int64)
        for array in self._arrays(name):
            part = array.astype(np.int64)[:slots]
            np.maximum(merged[: len(part)], part, out=merged[: len(part)])
        return merged

    def _arrays(self, name: str) -> Iterator[npt.NDArray[Any]]:
        for path in self._files(name):
            array = _read(path)
            if array is not None:
                yield array

    def _files(self, pattern: str) -> Iterator[Path]:
        for place in (f"{pattern}.arr", f"*/{pattern}.arr"):
            yield from sorted(self._folder.glob(place))


def _head(path: Path) -> tuple[np.dtype[Any], int, int] | None:
    """Element type, length and session; None if it is no array of ours."""
    try:
        file = open_read_only(path)
    except OSError:
        return None
    try:
        data = bytearray(HEADER_BYTES)
        got = file.preadv([memoryview(data)], 0)
        return parse_header(bytes(data[:got]), file.size())
    except OSError:
        return None
    finally:
        file.close()


def _read(path: Path) -> npt.NDArray[Any] | None:
    """A copy of the elements; None if it is no array of ours."""
    head = _head(path)
    if head is None:
        return None
    kind, length, _ = head
    try:
        return np.fromfile(path, dtype=kind, count=length, offset=HEADER_BYTES)
    except OSError:
        return None
