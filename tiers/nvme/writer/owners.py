"""Ownership in a namespace: one file of byte locks, `owners`.

Every process that has the namespace open locks one byte for its *state number* `k`; its policy's
arrays lie in `state/<k>/`. It also locks a byte for each segment that it may write. If a process
dies, the kernel releases all of its locks at once, and no other process is affected. A segment that
nobody holds is an *orphan*: all can read its blocks, and any process may take it. The byte of a
segment names the state number that had it last, so that a restarted process finds its own segments.

Commands that run beside engines lock one more byte, which marks them as *guests*. They compute no
blocks, so they prove nothing about the weights of engines.

The gate is locked while a process opens the namespace, so openings happen one after the other.

Threads: one thread at a time uses the methods (first the opening one, then an I/O thread).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ....errors import InUseError
from ..disk.byte_locks import ByteLocks

MAX_PROCESSES = 64
"""Largest number of processes that have one namespace open at a time."""
GATE_WAIT_S = 60.0
"""Longest wait for other processes to open the namespace; millions of blocks take seconds."""
GATE_PAUSE_S = 0.01

_GATE = 0
_FIRST_STATE = 64
_FIRST_BELOW_SHARE = 128
_FIRST_GUEST = 192
_FIRST_SEGMENT = 256


def last_owner(locks: ByteLocks, segment: int) -> int:
    """Return the state number that owned a segment last; -1 if unknown."""
    return locks.read(_FIRST_SEGMENT + segment, 1)[0] - 1


def noted_segments(notes: bytes, state: int) -> set[int]:
    """Return the segments that a state number owned last, from the bytes of the file."""
    return {number for number, note in enumerate(notes[_FIRST_SEGMENT:]) if note == state + 1}


def open_states(locks: ByteLocks) -> list[int]:
    """Return the state numbers of the other processes that have the namespace open."""
    return [k for k in range(MAX_PROCESSES) if locks.others_hold(_FIRST_STATE + k)]


class Owners:
    """This process's share of a namespace."""

    def __init__(
        self, locks: ByteLocks, where: str, pause: Callable[[float], object] = time.sleep
    ) -> None:
        """`where` names the namespace in messages."""
        self.state = -1
        """State number; -1 before `enter`."""
        self.is_alone = False
        """True if no other process had the namespace open when this one entered."""
        self.has_engines = False
        """True if one of those other processes was an engine."""
        self.segments: set[int] = set()
        """Numbers of the segments that this process owns."""
        self._locks = locks
        self._where = where
        self._pause = pause

    def enter(self, *, is_guest: bool = False, leaves_state: bool = True) -> None:
        """Pass the gate and take the lowest free state number. Raises `InUseError`.

        A process that leaves no state takes the highest one, so that engines find theirs free.
        """
        for _ in range(round(GATE_WAIT_S / GATE_PAUSE_S)):
            if self._locks.try_lock(_GATE):
                break
            self._pause(GATE_PAUSE_S)
        else:
            raise InUseError(
                f"another process has been opening {self._where} for {GATE_WAIT_S:g} s; if it "
                "hangs, stop it"
            )
        others = open_states(self._locks)
        self.is_alone = not others
        self.has_engines = not all(self._locks.others_hold(_FIRST_GUEST + k) for k in others)
        numbers = range(MAX_PROCESSES) if leaves_state else reversed(range(MAX_PROCESSES))
        self.state = next((k for k in numbers if self._locks.try_lock(_FIRST_STATE + k)), -1)
        if self.state < 0:
            raise InUseError(
                f"{MAX_PROCESSES} processes have {self._where} open, which is all that may; stop "
                "one or choose another path or label"
            )
        if is_guest:
            self._locks.try_lock(_FIRST_GUEST + self.state)

    def leave_gate(self) -> None:
        """Let other processes open the namespace."""
        self._locks.unlock(_GATE)

    def processes(self) -> int:
        """Return how many processes have the namespace open, including this one."""
        return 1 + len(open_states(self._locks))

    # -- segments ------------------------------------------------------------------------------

    def last_owned(self, total: int) -> list[int]:
        """Return the segments below `total` that this state number owned last, ascending."""
        notes = self._locks.read(_FIRST_SEGMENT, total)
        return [number for number, note in enumerate(notes) if note == self.state + 1]

    def try_own(self, number: int) -> bool:
        """Take a segment. Return False if another process owns it."""
        if not self._locks.try_lock(_FIRST_SEGMENT + number):
            return False
        self._locks.write(_FIRST_SEGMENT + number, bytes([self.state + 1]))
        self.segments.add(number)
        return True

    def disown(self, number: int) -> None:
        """Release a segment: it becomes an orphan, without a last owner."""
        self.segments.discard(number)
        self._locks.write(_FIRST_SEGMENT + number, b"\0")
        self._locks.unlock(_FIRST_SEGMENT + number)

    def is_taken(self, number: int) -> bool:
        """Return True if another process owns the segment."""
        return self._locks.others_hold(_FIRST_SEGMENT + number)

    # -- fairness ------------------------------------------------------------------------------

    def announce_below_share(self, is_below_share: bool) -> None:
        """Tell the other processes whether this one has less than its share of the segments."""
        byte = _FIRST_BELOW_SHARE + self.state
        if is_below_share:
            self._locks.try_lock(byte)
        else:
            self._locks.unlock(byte)

    def is_other_below_share(self) -> bool:
        """Return True if another process has less than its share."""
        return self._locks.others_hold(_FIRST_BELOW_SHARE, MAX_PROCESSES)

    def close(self) -> None:
        """Release everything; idempotent."""
        self.segments.clear()
        self._locks.close()
