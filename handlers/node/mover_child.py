"""Starting and ending the process of `mover_main`.

By `subprocess`, never by fork: the scheduler's process has threads and perhaps CUDA, and may be a
daemon that `multiprocessing` allows no children.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Protocol

from ...errors import os_errors
from .mover_wire import Setup, frame

MODULE = "kvcascade.handlers.node.mover_main"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""A mover does no arithmetic: numpy need not start threads for it."""
SEND_LIMIT_S = 5.0
"""For the setup, which fits into any socket's buffer."""


class Child(Protocol):
    """A process that may be told to go."""

    @property
    def pid(self) -> int:
        """Its number."""
        ...

    def poll(self) -> int | None:
        """Its exit status once it is gone, and has been waited for; never blocks."""
        ...

    def kill(self) -> None:
        """Have it killed; no effect if it is gone."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it is gone. Raises `subprocess.TimeoutExpired`."""
        ...


@dataclass(frozen=True, slots=True)
class Connection:
    """A running mover and the way to talk to it."""

    child: Child
    socket: socket.socket
    """Does not block."""

    def has_died(self) -> bool:
        """True once the process is gone for certain: it writes nothing any more."""
        return self.child.poll() is not None

    def kill(self) -> None:
        """End it, whatever it is doing; a process that waits for its disk goes when that ends."""
        with suppress(ProcessLookupError):
            self.child.kill()

    def has_ended_within(self, limit_s: float) -> bool:
        """Wait for its end."""
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(limit_s)
        return self.has_died()


def launch(setup: Setup, arena_fd: int) -> Connection:
    """Start a mover and send it its setup. Closes `arena_fd`. Raises `TierIOError`.

    The process is killed when the thread that calls this ends.
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
            child = subprocess.Popen(
                command(theirs.fileno(), arena_fd),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment(),
                pass_fds=(theirs.fileno(), arena_fd),
            )
            if_failed.pop_all()
    return Connection(child, ours)


def command(socket_fd: int, arena_fd: int) -> list[str]:
    """What is run."""
    numbers = map(str, (socket_fd, arena_fd, os.getpid()))
    return [sys.executable, "-P", "-m", MODULE, *numbers]


def environment() -> dict[str, str]:
    """Ours, and the places where this process finds its modules."""
    found = [os.path.abspath(path) for path in sys.path]
    return {**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(found)}
