"""Open an NVMe tier: its node, which moves the blocks, and its port.

A node is a process. With `"movers": "threads"`, or for memory that no process can share, it is a
thread of this process. It joins the writer of the path, or becomes the writer.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from ..config.machine import Machine
from ..config.schema import Movers, NvmeTierOptions
from ..errors import ConfigError
from ..handlers.node.node_keeper import NodeKeeper
from ..handlers.node.path.path_client import node_process, node_thread
from ..handlers.node.path_wire import NodeSetup, NodeState
from ..logs import get_logger
from ..manager.admission import AdmissionFunction
from ..manager.below.node_feed import NodeFeed
from ..manager.below.node_tier import NodeTier
from ..manager.below.port import TierFacts
from ..threads import started_pool
from ..tiers.cpu.arena import Arena
from ..tiers.cpu.header import HEADER_BYTES
from ..tiers.nvme.disk.filesystem import RealFileSystem
from ..tiers.nvme.namespace import NamespaceKey
from ..tiers.nvme.path.path_messages import PROTOCOL, Hello, PathOptions, chain_of
from ..tiers.nvme.path.presence_file import map_presence
from ..tiers.nvme.path.presence_table import PresenceTable
from ..tiers.nvme.path.writer.namespace.namespace_home import spec_of
from ..tiers.nvme.path.writer.path_plan import plan_namespace
from ..tiers.policies import order_class
from .named import admission_rule
from .path_parts import make_folders, path_options

JOIN_LIMIT_S = 10.0
"""Longest time that the start of an engine waits for a tier. Then the tier is absent until its
node has joined the path."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SlotMemory:
    """Memory of the engine whose slots the nodes read and write."""

    slot_bytes: int
    slots: int
    view: memoryview
    """All slots, one block each."""
    is_huge: bool = False
    """True if it lies in huge pages."""
    duplicate: Callable[[], int] | None = None
    """Function that returns a new descriptor of its file. None: only a thread can use it."""

    @classmethod
    def of(cls, arena: Arena) -> SlotMemory:
        """Return the memory of an arena."""
        size, view = arena.geometry, arena.slots.data.cast("B")
        return cls(size.slot_bytes, size.slots, view, arena.is_huge, arena.duplicate)


@dataclass(frozen=True, slots=True)
class Replicas:
    """Parts of a slot that hold the same bytes, because the engine replicates its KV."""

    ranks: int
    rank_bytes: int
    facts: Mapping[str, str]
    """Facts of the fingerprint in place of those that depend on the number of ranks."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Properties of the engine that its nodes need."""

    key: NamespaceKey
    memory: SlotMemory
    has_prefault: bool
    """True if a node is to map every page of the memory at its start."""
    with_events: bool
    stall_s: float
    """Time limit for stalled reads in seconds."""
    replicas: Replicas | None = None
    """Bytes that all ranks share; None if the engine does not say that they are the same."""
    has_metrics: bool = True
    """True if the engine exports the metrics of its tiers."""


@dataclass(frozen=True, slots=True)
class OpenTier:
    """A tier behind a node."""

    port: NodeTier
    node: NodeKeeper
    mapper: ThreadPoolExecutor
    """Maps the presence table."""
    admission: AdmissionFunction | None

    def close(self) -> None:
        """End the node, which closes a path that it writes; idempotent."""
        self.node.close()
        self.mapper.shutdown()

    def note_chain(self, keys: Sequence[bytes], fresh: int, tokens: int) -> None:
        """Have the writer log the order of a prompt's blocks: a `Write` of `ChainNotes`."""
        self.node.tell(chain_of(keys, fresh, tokens))

    @property
    def folder(self) -> Path | None:
        """First directory of the namespace; None while the node has not joined."""
        return self.port.feed.folder

    @property
    def epoch(self) -> int | None:
        """Number of resets by any engine; None while it is unknown."""
        return self.port.feed.epoch

    def start_facts(self) -> dict[str, object]:
        """Return facts for the log line of the start; none while the node has not joined."""
        folder = self.folder
        if folder is None:
            return {}
        fingerprint = folder.name.rpartition("-")[2]
        role = self.port.feed.state.value
        return {"namespace": str(folder), "fingerprint": fingerprint, "role": role}


def open_node_tier(name: str, options: NvmeTierOptions, engine: EngineFacts) -> OpenTier:
    """Start the node of a tier and wait until it has joined, at most `JOIN_LIMIT_S`.

    Raises one of our errors if the path refuses the engine's configuration.
    """
    make_folders(options.path, f"{options.key}.path")
    asked = path_options(options, Machine())
    block_bytes = engine.memory.slot_bytes
    plan = plan_namespace(asked, block_bytes, len(options.path))
    mapper = started_pool(1, "kvcascade-map")
    facts = TierFacts(name, "NVME", block_bytes, plan.slots)
    feed = NodeFeed(facts, _map_presence, mapper, monotonic, with_events=engine.with_events)
    node = _node(options, asked, engine, feed.take)
    port = NodeTier(
        node,
        feed,
        facts,
        monotonic,
        stall_s=engine.stall_s,
        wants_chains=order_class(options.policy).wants_chains,
        paths=len(options.path),
    )
    opened = OpenTier(port, node, mapper, admission_rule(options.admission))
    try:
        _join(opened, name)
    except BaseException:
        opened.close()
        raise
    return opened


def _join(tier: OpenTier, name: str) -> None:
    """Start the node, and wait until its tier can be used or is off. Raises one of our errors."""
    port, feed = tier.port, tier.port.feed

    def is_known() -> bool:
        port.maintain()
        return feed.can_write or feed.state is NodeState.OFF

    tier.node.start()
    if not tier.node.wait(is_known, JOIN_LIMIT_S):
        _log.warning("tier %s: its node has not joined the path yet; it goes on trying", name)
    if feed.misconfigured:
        raise ConfigError(feed.misconfigured)


def _node(
    options: NvmeTierOptions,
    asked: PathOptions,
    engine: EngineFacts,
    on_note: Callable[[Any], None],
) -> NodeKeeper:
    memory = engine.memory
    hello = Hello(
        PROTOCOL,
        f"{socket.gethostname()}:{os.getpid()}",
        tuple(map(str, options.path)),
        spec_of(engine.key, memory.slot_bytes, options.min_share.of(0) if options.min_share else 0),
        asked,
        engine.with_events,
        has_metrics=engine.has_metrics,
    )
    setup = NodeSetup(
        hello,
        HEADER_BYTES,
        memory.slots,
        options.io_threads,
        options.direct_io,
        engine.has_prefault,
        memory.is_huge,
    )
    if options.movers is Movers.PROCESS and memory.duplicate is not None:
        return node_process(setup, memory.duplicate, on_note)
    fs = RealFileSystem(setup.is_direct)
    return node_thread(setup, memory.view, fs, on_note, is_batched=True)


def _map_presence(folder: str, slots: int) -> PresenceTable:
    return map_presence(RealFileSystem(), Path(folder), slots)
