"""The node of a remote tier, as a process of its own.

    python -m kvcascade.handlers.node.remote.remote_main SOCKET_FD ARENA_FD PARENT_PID

The process ends when its socket is closed, so it never outlives the scheduler's process. It reads
the secrets that the options name itself; no message holds one. The files that it makes in a folder
are for its user alone.

Threads: the main thread runs `RemoteLoop`, the threads of the store call the server.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from functools import partial

from ....config.options import At
from ....config.remote import parse_remote
from ....tiers.cpu.huge_pages import map_file
from ....tiers.remote.objects import ObjectFormat
from ....tiers.remote.remote_options import open_remote_engine, store_options
from ....tiers.remote.remote_probe import finding_of
from ..child_start import receive_setup, run_child
from .remote_loop import RemoteLoop
from .remote_wire import RemoteSetup, to_remote_node


def serve(connection: socket.socket, arena_fd: int) -> None:
    """Attach to the arena and run the node until the scheduler closes the socket."""
    setup = receive_setup(connection, to_remote_node.decode, RemoteSetup)
    if setup is None:
        return
    memory = map_file(arena_fd, setup.arena_offset + setup.arena_slots * setup.slot_bytes)
    options = parse_remote(At(setup.key), json.loads(setup.options))
    engine, seal = open_remote_engine(options, os.environ)
    if setup.memory:
        engine.resume(setup.memory)
    objects = ObjectFormat(setup.fingerprint, setup.payload_bytes, seal)
    arena = memory[setup.arena_offset :]
    look = partial(finding_of, engine, options)
    limits, name = store_options(options), f"{options.key}.url"
    RemoteLoop(connection, setup, engine, objects, limits, arena, look, name).run()


if __name__ == "__main__":
    os.umask(0o077)  # `obstore` gives its files and folders the modes that the umask leaves
    os._exit(run_child(sys.argv[1:], "kvcascade remote", serve))  # without waiting for calls
