"""Start the node of a remote tier as a process or on a thread, and the scheduler's side of it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import msgspec

from ..node_child import Connection, launch
from ..node_keeper import KeeperOptions, NodeKeeper
from ..path_client import Loop, ThreadChild, client_of
from .remote_wire import RemoteSetup, ResetNoted, from_remote_node

REMOTE_MODULE = "kvcascade.handlers.node.remote.remote_main"
_OPTIONS = KeeperOptions(remedy="without its remote tier the engine starts")


def remote_process(
    setup: RemoteSetup, duplicate_arena: Callable[[], int], on_note: Callable[[Any], None]
) -> NodeKeeper:
    """Return a client whose node is a process; see `path_client.node_process`."""
    engine = _Engine(on_note)

    def start() -> Connection:
        begun = msgspec.structs.replace(setup, was_reset=engine.was_reset)
        return launch(begun, duplicate_arena(), REMOTE_MODULE)

    return client_of(start, from_remote_node.decode, engine.note, _OPTIONS)


def remote_thread(
    loop_over: Callable[[socket.socket, bool], Loop], on_note: Callable[[Any], None]
) -> NodeKeeper:
    """Return a client whose node is a thread of this process, which runs the loop.

    `loop_over` also gets whether the engine was reset since its start.
    """
    engine = _Engine(on_note)

    def start() -> Connection:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        return Connection(ThreadChild(loop_over(theirs, engine.was_reset)), ours)

    return client_of(start, from_remote_node.decode, engine.note, _OPTIONS)


class _Engine:
    """State of an engine that each of its nodes has to know."""

    def __init__(self, on_note: Callable[[Any], None]) -> None:
        self.was_reset = False
        self._on_note = on_note

    def note(self, message: Any) -> None:
        """Take in a note of the node, and pass it on."""
        self.was_reset = self.was_reset or isinstance(message, ResetNoted)
        self._on_note(message)
