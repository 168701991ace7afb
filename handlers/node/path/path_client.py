"""Start a node as a process or on a thread, and the scheduler's side of it.

`NodeKeeper` keeps the node: it sends jobs, receives answers, restarts a dead process, and knows by
`waitpid` when a process writes no more. A node on a thread runs the same loop over a socket pair.
"""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from time import monotonic
from typing import Any

import msgspec

from ....errors import os_errors
from ....logs import get_logger
from ....threads import start_thread
from ....tiers.nvme.disk.filesystem import FileSystem
from ....tiers.nvme.path.path_messages import Epoch
from ..node_child import Connection, launch
from ..node_keeper import NodeKeeper
from ..path_wire import NodeJoined, NodeSetup
from .path_loop import NodeLoop

FAULTS = frozenset({-signal.SIGBUS, -signal.SIGABRT, -signal.SIGSEGV})
"""Exit statuses of a process that a damaged index may have ended."""
NODE_MODULE = "kvcascade.handlers.node.path.path_main"

_log = get_logger(__name__)


def node_process(
    setup: NodeSetup,
    duplicate_arena: Callable[[], int],
    on_note: Callable[[Any], None],
) -> NodeKeeper:
    """Return a client whose node is a process; it sends in batches. `NodeKeeper.start` starts it.

    `duplicate_arena` returns a new descriptor of the arena for each process. `on_note` gets what
    the node says beside answers, and None when it died; any thread may call it.
    """

    next_node = _NextNode(setup, on_note)
    last: Connection | None = None

    def start() -> Connection:
        nonlocal last
        if last is not None:
            next_node.note_status(last.child.poll())
        last = launch(next_node.setup, duplicate_arena(), NODE_MODULE)
        return last

    return NodeKeeper(start, next_node.note, is_batched=True)


def node_thread(
    setup: NodeSetup,
    arena: memoryview,
    fs: FileSystem,
    on_note: Callable[[Any], None],
    *,
    is_batched: bool = False,
    clock: Callable[[], float] = monotonic,
) -> NodeKeeper:
    """Return a client whose node is a thread of this process; `arena` holds the slots."""

    next_node = _NextNode(setup, on_note)

    def start() -> Connection:
        with ExitStack() as if_failed, os_errors("starting the thread that moves blocks"):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            ours.setblocking(False)
            if_failed.callback(ours.close)
            if_failed.callback(theirs.close)
            loop = NodeLoop(theirs, next_node.setup, arena, fs)
            if_failed.callback(loop.close, waits_for_io=True)
            child = ThreadChild(partial(loop.run, waits_for_io=True))
            if_failed.pop_all()
        return Connection(child, ours)

    return NodeKeeper(start, next_node.note, is_batched=is_batched, clock=clock)


class _NextNode:
    """The node that is started next: its setup has the epoch of the engine's blocks.

    Without the epoch the writer takes the engine for one that starts. Such an engine begins empty
    after a reset.
    """

    def __init__(self, setup: NodeSetup, on_note: Callable[[Any], None]) -> None:
        self.setup = setup
        self._on_note = on_note

    def note(self, message: Any) -> None:
        """Take in a note of the node, and pass it on."""
        if isinstance(message, NodeJoined | Epoch):
            hello = msgspec.structs.replace(self.setup.hello, epoch=message.epoch)
            self.setup = msgspec.structs.replace(self.setup, hello=hello)
        self._on_note(message)

    def note_status(self, status: int | None) -> None:
        """Take in the exit status of the last node, which has died.

        A page of an index that the disk cannot deliver, or that is invalid, ends the process by one
        of `FAULTS`. Another node would trust the same index and end, too.
        """
        if status in FAULTS and self.setup.trusts_boot:
            _log.warning(
                "the next process checks every index without a clean mark first: a damaged one "
                "may have ended the last process"
            )
            self.setup = msgspec.structs.replace(self.setup, trusts_boot=False)


class ThreadChild:
    """The `Child` of a node on a thread. It ends when its socket is closed.

    Its transfers run on other threads, which end before it. A dead thread writes to no arena.
    """

    pid = 0

    def __init__(self, run: Callable[[], None]) -> None:
        """Start the thread. `run` returns only when no other thread uses the arena any more.

        Raises `TierIOError` for want of threads.
        """
        self._thread = start_thread(run, "kvcascade-node")

    def poll(self) -> int | None:
        """Return 0 once the thread has ended, else None."""
        return None if self._thread.is_alive() else 0

    def kill(self) -> None:
        """Do nothing: a thread cannot be killed. It ends when its socket is closed."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the thread has ended. Raises `subprocess.TimeoutExpired`."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("node", timeout or 0.0)
        return 0
