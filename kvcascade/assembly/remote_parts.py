"""Open a remote tier: its node, and its port."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from time import monotonic

import msgspec

from ..config.remote import RemoteTierOptions
from ..errors import ConfigError
from ..handlers.node.node_child import Connection, launch
from ..handlers.node.node_keeper import NodeKeeper
from ..handlers.node.remote.remote_wire import RemoteSetup, from_remote_node
from ..manager.admission import AdmissionFunction
from ..manager.below.remote_feed import RemoteFeed
from ..manager.below.remote_tier import RemoteTier, remote_facts
from ..tiers.base import new_reset_mark
from ..tiers.cpu.header import HEADER_BYTES
from ..tiers.nvme.namespace import NamespaceKey
from ..tiers.remote.remote_options import check_openable, store_options
from .node_parts import EngineFacts, SlotMemory

REMOTE_MODULE = "kvcascade.handlers.node.remote.remote_main"


@dataclass(frozen=True, slots=True)
class OpenRemote:
    """A remote tier and its node."""

    port: RemoteTier
    node: NodeKeeper
    options: RemoteTierOptions

    @property
    def admission(self) -> AdmissionFunction | None:
        """None: the tier decides itself which blocks it takes."""
        return None

    @property
    def epoch(self) -> int | None:
        """None, because other hosts reset the tier, too."""
        return None

    def start_facts(self) -> dict[str, object]:
        """Return facts for the log line of the start."""
        return {"url": self.options.url, "writes": str(self.options.writes)}

    def close(self) -> None:
        """End the node; idempotent."""
        self.node.close()


def remote_setup(options: RemoteTierOptions, engine: EngineFacts) -> RemoteSetup:
    """Return the first message to a node of an engine. Raises `ConfigError`.

    With `share_tp` an object holds one rank's part of a slot. Its fingerprint leaves out how many
    ranks there are.
    """
    key, memory, replicas = engine.key, engine.memory, engine.replicas
    payload_bytes, copies = memory.slot_bytes, 1
    if options.share_tp:
        if replicas is None:
            raise ConfigError(
                f"{options.key}.share_tp: this vLLM does not say that all ranks hold the same KV, "
                "as with MLA and tensor parallelism alone; leave it out."
            )
        key = NamespaceKey(key.label, {**key.fields, **replicas.facts})
        payload_bytes, copies = replicas.rank_bytes, replicas.ranks
    return RemoteSetup(
        options.key,
        json.dumps(options.as_given()).encode(),
        key.fingerprint,
        memory.slot_bytes,
        payload_bytes,
        copies,
        HEADER_BYTES,
        memory.slots,
    )


def open_remote_tier(name: str, options: RemoteTierOptions, engine: EngineFacts) -> OpenRemote:
    """Start the node of a tier. Nothing is asked of the server, which may be down.

    Raises one of our errors if the options cannot be used on this machine.
    """
    check_openable(options, os.environ)
    setup = remote_setup(options, engine)
    memory = engine.memory
    facts = remote_facts(name, memory.slot_bytes)
    feed = RemoteFeed(new_reset_mark(), monotonic)
    node = _node(setup, memory, feed)
    port = RemoteTier(
        node,
        feed,
        facts,
        store_options(options),
        monotonic,
        stall_s=engine.stall_s,
        with_events=engine.with_events,
    )
    opened = OpenRemote(port, node, options)
    try:
        opened.node.start("without its remote tier the engine starts")
    except BaseException:
        opened.close()
        raise
    return opened


def _node(setup: RemoteSetup, memory: SlotMemory, feed: RemoteFeed) -> NodeKeeper:
    duplicate = memory.duplicate
    assert duplicate is not None, "an arena is a file"

    def start() -> Connection:
        known = msgspec.structs.replace(setup, was_reset=feed.has_reset, memory=feed.node_memory)
        return launch(known, duplicate(), REMOTE_MODULE)

    return NodeKeeper(start, feed.take, decode=from_remote_node.decode)
