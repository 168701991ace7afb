"""Start and end a process that moves blocks.

The process is started by `subprocess`, never by fork: the scheduler's process has threads and
perhaps CUDA. It may also be a daemon, to which `multiprocessing` allows no children.
"""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Protocol

import msgspec

from ...errors import os_errors
from ...threads import cannot_start
from ...tiers.nvme.path.frames import frame

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Environment that keeps numpy from starting threads. A node does no arithmetic."""
SEND_LIMIT_S = 5.0
"""Time limit for sending the setup. It fits into the buffer of any socket."""
MINUTE_S = 60.0
DAY_S = 24 * 3600.0
STARTS_PER_MINUTE = 3
STARTS_PER_DAY = 200
MAX_PAUSE_S = 1800.0
"""Longest pause after a start that brought nothing. After `STARTS_PER_MINUTE` starts without an
answered job, the pause doubles with each further one."""
LONG_LIFE_S = 300.0
"""Life after which the end of a process makes no pause longer. It may have waited for a server."""


class Child(Protocol):
    """The part of `subprocess.Popen` that a connection uses."""

    @property
    def pid(self) -> int:
        """Number of the process."""
        ...

    def poll(self) -> int | None:
        """Return the exit status once the process is dead and reaped, else None. Never blocks."""
        ...

    def kill(self) -> None:
        """Kill the process. No effect if it is dead."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process is dead. Raises `subprocess.TimeoutExpired`."""
        ...


@dataclass(frozen=True, slots=True)
class Connection:
    """A running node and the socket to it."""

    child: Child
    socket: socket.socket
    """Non-blocking socket to the node."""

    def has_died(self) -> bool:
        """Return True once the process is dead and reaped. It writes nothing any more."""
        return self.child.poll() is not None

    def kill(self) -> None:
        """Kill the process. If it waits for its disk, it dies when that wait ends."""
        with suppress(ProcessLookupError):
            self.child.kill()

    def has_ended_within(self, limit_s: float) -> bool:
        """Wait for the death of the process. Return True if it is dead."""
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(limit_s)
        return self.has_died()


def launch(setup: msgspec.Struct, arena_fd: int, module: str) -> Connection:
    """Start a node and send its setup. Closes `arena_fd`. Raises `TierIOError`.

    `module` is the program of the process.

    The kernel kills the process when the calling thread ends.
    """
    with ExitStack() as stack, os_errors("starting the process that moves blocks"):
        stack.callback(os.close, arena_fd)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        stack.callback(theirs.close)
        with ExitStack() as if_failed:
            if_failed.callback(ours.close)
            ours.settimeout(SEND_LIMIT_S)
            ours.sendall(frame(setup))
            ours.setblocking(False)
            socket_fd = _above_standard(theirs.fileno(), stack)
            memory_fd = _above_standard(arena_fd, stack)
            try:
                child = subprocess.Popen(
                    command(socket_fd, memory_fd, module),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=environment(),
                    pass_fds=(socket_fd, memory_fd),
                )
            except BlockingIOError as error:  # EAGAIN: a limit of processes
                raise cannot_start("process", error) from error
            if_failed.pop_all()
    return Connection(child, ours)


def _above_standard(fd: int, stack: ExitStack) -> int:
    """Return a duplicate of a descriptor that is none of 0 to 2; `stack` closes it.

    If this process began without standard descriptors, the given one may be such a number. The
    node gets others in their place.
    """
    found = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    stack.callback(os.close, found)
    return found


def command(socket_fd: int, arena_fd: int, module: str) -> list[str]:
    """Return the command line of the node."""
    numbers = map(str, (socket_fd, arena_fd, os.getpid()))
    return [sys.executable, "-P", "-m", module, *numbers]


def environment() -> dict[str, str]:
    """Return this process's environment, with its module search path as PYTHONPATH."""
    found: list[str] = []
    for path in sys.path:
        with suppress(FileNotFoundError):  # relative to a working directory that was deleted
            found.append(os.path.abspath(path))
    return {**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(found)}


class StartLimits:
    """When a process that died may be started again. Used under the lock of its `NodeKeeper`."""

    def __init__(self) -> None:
        self._starts_s: deque[float] = deque(maxlen=STARTS_PER_DAY)
        self.fruitless = 0
        """Number of starts since a process last answered a job; its owner sets it to 0."""
        self.starts = 0
        """Number of processes that were started."""

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until a process may be started."""
        starts_s = self._starts_s
        next_s = starts_s[-1] + self._pause_s if starts_s else now_s
        for most, span_s in ((STARTS_PER_MINUTE, MINUTE_S), (STARTS_PER_DAY, DAY_S)):
            if len(starts_s) >= most:
                next_s = max(next_s, starts_s[-most] + span_s)
        return max(0.0, next_s - now_s)

    def note_start(self, now_s: float) -> None:
        """Count a start."""
        self._starts_s.append(now_s)
        self.fruitless += 1
        self.starts += 1

    def note_end(self, now_s: float, *, was_interrupted: bool) -> None:
        """Do not count the last start if its process lived for `LONG_LIFE_S`, or if it had answered
        a job and an interrupt ended it."""
        if not self._starts_s:
            return
        if now_s - self._starts_s[-1] >= LONG_LIFE_S:
            self._starts_s.pop()
            self.fruitless = max(0, self.fruitless - 1)
        elif was_interrupted and not self.fruitless:
            self._starts_s.pop()

    @property
    def _pause_s(self) -> float:
        """Shortest time from the last start to the next one."""
        too_many = self.fruitless - STARTS_PER_MINUTE
        return min(MAX_PAUSE_S, 2.0**too_many) if too_many > 0 else 0.0
