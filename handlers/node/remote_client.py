"""Start the node of a remote tier as a process or on a thread, and the scheduler's side of it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from .node_child import Connection, launch
from .node_keeper import KeeperOptions, NodeKeeper
from .path_client import Loop, ThreadChild, client_of
from .remote_wire import RemoteSetup, from_remote_node

REMOTE_MODULE = "kvcascade.handlers.node.remote_main"
_OPTIONS = KeeperOptions(remedy="without its remote tier the engine starts")


def remote_process(
    setup: RemoteSetup, duplicate_arena: Callable[[], int], on_note: Callable[[Any], None]
) -> NodeKeeper:
    """Return a client whose node is a process; see `path_client.node_process`."""

    def start() -> Connection:
        return launch(setup, duplicate_arena(), REMOTE_MODULE)

    return client_of(start, from_remote_node.decode, on_note, _OPTIONS)


def remote_thread(
    loop_over: Callable[[socket.socket], Loop], on_note: Callable[[Any], None]
) -> NodeKeeper:
    """Return a client whose node is a thread of this process, which runs the loop."""

    def start() -> Connection:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        return Connection(ThreadChild(loop_over(theirs)), ours)

    return client_of(start, from_remote_node.decode, on_note, _OPTIONS)
