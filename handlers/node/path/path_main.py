"""The node: a process of its own that moves the blocks of one engine and talks to the writer.

    python -m kvcascade.handlers.node.path.path_main SOCKET_FD ARENA_FD PARENT_PID

The process ends when its socket is closed, so it never outlives the scheduler's process. If it is
the writer of the path, it closes the path cleanly first.

Threads: the main thread runs `NodeLoop`. Each direction has `THREADS_PER_TRANSFER * io_threads`
threads that copy, hash and transfer. The writer of the path has a thread of its own.
"""

from __future__ import annotations

import os
import socket
import sys
from functools import partial

from ....threads import start_thread
from ....tiers.cpu.huge_pages import map_file
from ....tiers.nvme.disk.filesystem import RealFileSystem
from ..child_start import prefault, receive_setup, run_child
from ..path_wire import NodeSetup, to_node
from .path_loop import NodeLoop


def serve(connection: socket.socket, arena_fd: int) -> None:
    """Attach to the arena and run the node until the scheduler closes the socket."""
    setup = receive_setup(connection, to_node.decode, NodeSetup)
    if setup is None:
        return
    slot_bytes = setup.hello.namespace.block_bytes
    memory = map_file(arena_fd, setup.arena_offset + setup.arena_slots * slot_bytes)
    if setup.has_prefault:
        start_thread(partial(prefault, memory), "kvcascade-prefault")
    fs = RealFileSystem(setup.is_direct)
    arena = memory[setup.arena_offset :]
    NodeLoop(connection, setup, arena, fs).run()


if __name__ == "__main__":
    os._exit(run_child(sys.argv[1:], "kvcascade node", serve))  # without waiting for work in flight
