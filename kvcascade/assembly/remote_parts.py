"""Open a remote tier: its node, and its port."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

from ..config.remote import RemoteTierOptions
from ..handlers.node.node_keeper import NodeKeeper
from ..handlers.node.path_client import Loop
from ..handlers.node.remote_client import remote_process, remote_thread
from ..handlers.node.remote_loop import RemoteLoop
from ..handlers.node.remote_wire import RemoteSetup
from ..manager.below.port import TierFacts
from ..manager.below.remote_tier import MEDIUM, UNBOUNDED_BLOCKS, RemoteTier, RemoteTierParts
from ..tiers.cpu.header import HEADER_BYTES
from ..tiers.remote.objects import ObjectFormat
from ..tiers.remote.remote_options import check_openable, open_remote_engine, store_options
from ..tiers.remote.remote_probe import problem_of
from .node_parts import EngineFacts, SlotMemory

NAME = "remote"


@dataclass(frozen=True, slots=True)
class OpenRemote:
    """A remote tier and its node."""

    port: RemoteTier
    node: NodeKeeper

    def close(self) -> None:
        """End the node; idempotent."""
        self.node.close()


def open_remote_tier(options: RemoteTierOptions, engine: EngineFacts) -> OpenRemote:
    """Start the node of a tier. Nothing is asked of the server, which may be down.

    Raises one of our errors if the options cannot be used on this machine.
    """
    check_openable(options, os.environ)
    memory = engine.memory
    facts = TierFacts(NAME, MEDIUM, memory.slot_bytes, UNBOUNDED_BLOCKS)
    parts = RemoteTierParts(facts, store_options(options), engine.stall_s, engine.with_events)
    nodes: list[NodeKeeper] = []

    def client_of(on_note: Callable[[Any], None]) -> NodeKeeper:
        nodes.append(_node(options, engine.key.fingerprint, memory, on_note))
        return nodes[0]

    opened = OpenRemote(RemoteTier(client_of, parts, monotonic), nodes[0])
    try:
        opened.node.start()
    except BaseException:
        opened.close()
        raise
    return opened


def _node(
    options: RemoteTierOptions,
    fingerprint: str,
    memory: SlotMemory,
    on_note: Callable[[Any], None],
) -> NodeKeeper:
    if memory.duplicate is None:
        return remote_thread(lambda end: _loop(end, options, fingerprint, memory), on_note)
    given = json.dumps(options.as_given()).encode()
    setup = RemoteSetup(
        options.key, given, fingerprint, memory.slot_bytes, HEADER_BYTES, memory.slots
    )
    return remote_process(setup, memory.duplicate, on_note)


def _loop(
    end: socket.socket, options: RemoteTierOptions, fingerprint: str, memory: SlotMemory
) -> Loop:
    engine, seal = open_remote_engine(options, os.environ)
    objects = ObjectFormat(fingerprint, memory.slot_bytes, seal)
    problem = partial(problem_of, engine, options)
    return RemoteLoop(end, engine, objects, store_options(options), memory.view, problem)
