"""A scheduler process and two worker processes over the real assembly, to be killed at any moment.

No model and no engine: the scheduler obeys the manager as vLLM's does, workers fill device blocks
with a pattern made from the key (and from how often the engine was reset: its "weights" changed,
and a new engine begins with those of the disk again), and compare every block they load. Processes
are forked from a server that has imported everything, so a cycle costs a fraction of a second.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import psutil

from kvcascade.assembly.build import Cascade, Geometry, open_cascade, open_worker
from kvcascade.config.schema import CascadeConfig, parse
from kvcascade.handlers.device.copier import GpuBlocks
from kvcascade.manager.request import Request
from kvcascade.tiers.base import BlockHash, BlockOutcome, LoadStoreSpec
from kvcascade.tiers.nvme.disk.filesystem import FileLock, RealFileSystem
from kvcascade.tiers.nvme.namespace import NamespaceKey
from kvcascade.tiers.nvme.path.block_reader import BlockReader
from kvcascade.tiers.nvme.path.lmdb_block_table import open_block_table
from kvcascade.tiers.nvme.path.path_lock import try_lead
from kvcascade.tiers.nvme.path.path_messages import (
    PROTOCOL,
    Hello,
    NamespaceSpec,
    PathOptions,
    Refused,
    Welcome,
)
from kvcascade.tiers.nvme.path.payload_files import PayloadFiles
from kvcascade.tiers.nvme.path.presence_file import boot_id
from kvcascade.tiers.nvme.path.writer.namespace.namespace_home import SEGMENTS
from kvcascade.tiers.nvme.path.writer.namespace.namespace_start import StartMeans
from kvcascade.tiers.nvme.path.writer.namespace.namespace_writer import NamespaceWriter
from kvcascade.tiers.nvme.path.writer.path_plan import capacity_of
from kvcascade.tiers.nvme.path.writer.path_writer import PathWriter
from kvcascade.tiers.policies import known_names

from .executors import InlineExecutor
from .waiting import wait_until

PAGES = (1024, 3072)
"""Bytes of a block in each of a worker's tensors."""
WORLD = 2
GEOMETRY = Geometry(rank_bytes=sum(PAGES), world_size=WORLD, blocks_per_chunk=1)
SLOT_BYTES = WORLD * sum(PAGES)
ARENA_SLOTS = 48
SLOTS_PER_SEGMENT = 16
TEXTS, CHUNKS = 24, 12
LOOK_S = 0.0005
GONE_LIMIT_S = 60.0
READ_AT_ONCE = 64
DISK_VERSION = 0
"""Of the weights that every engine begins with."""


def key_of(text: int, chunk: int) -> BlockHash:
    """A block hash as vLLM makes them."""
    return BlockHash(hashlib.sha256(f"{text}:{chunk}".encode()).digest() + b"\0\0\0\0")


def page(key: bytes, version: int, rank: int, tensor: int) -> bytes:
    """The one right content of a page."""
    name = key + bytes([rank, tensor]) + version.to_bytes(4, "little")
    return hashlib.shake_128(name).digest(PAGES[tensor])


def row(key: bytes, version: int) -> bytes:
    """The one right content of a whole slot."""
    parts = ((rank, tensor) for rank in range(WORLD) for tensor in range(len(PAGES)))
    return b"".join(page(key, version, rank, tensor) for rank, tensor in parts)


@dataclass(frozen=True)
class Setup:
    """Where an engine keeps its blocks, and how many."""

    path: Path
    shared: Path
    nvme_slots: int
    engine_id: str = "crash"
    durability: str = "process"

    @property
    def capacity_bytes(self) -> int:
        """Room for `nvme_slots` blocks."""
        segments = -(-self.nvme_slots // SLOTS_PER_SEGMENT)
        return capacity_of(segments, SLOTS_PER_SEGMENT, SLOT_BYTES) + 4096

    @property
    def path_options(self) -> PathOptions:
        """Options of the path as the engines give them."""
        segment_bytes = SLOTS_PER_SEGMENT * SLOT_BYTES
        return PathOptions(self.capacity_bytes, segment_bytes=segment_bytes)

    def settings(self) -> CascadeConfig:
        """The configuration of every process of the engine."""
        cpu = {
            "type": "cpu",
            "capacity": ARENA_SLOTS * SLOT_BYTES + 4096,
            "arena_dir": str(self.shared),
            "prefault": False,
        }
        nvme = {
            "type": "nvme",
            "path": str(self.path),
            "capacity": self.capacity_bytes,
            "segment_size": SLOTS_PER_SEGMENT * SLOT_BYTES,
            "min_free": 0,
            "durability": self.durability,
        }
        extra = {"tiers": [cpu, nvme], "write_mode": "back", "dirty_age_s": 0.01}
        return parse(extra, known_names())


# ---- the worker process ----------------------------------------------------------------------


def worker_main(setup: Setup, rank: int, scheduler: Connection) -> None:
    """Copy as told until the scheduler is gone; answers the keys whose bytes were wrong."""
    import torch

    torch.set_num_threads(1)
    tensors = [torch.zeros((ARENA_SLOTS, size), dtype=torch.int8) for size in PAGES]
    groups = [list(enumerate(PAGES))]
    side = open_worker(setup.settings(), GEOMETRY, setup.engine_id, rank, tensors, groups)
    views = [tensor.numpy() for tensor in tensors]
    try:
        scheduler.send("ready")
        while True:
            job_id, is_store, version, keys, slots = scheduler.recv()
            blocks = GpuBlocks.of(range(len(keys)), [len(keys)], [0])
            _fill(views, keys, version if is_store else None, rank)
            submit = side.copier.submit_store if is_store else side.copier.submit_load
            assert submit(job_id, blocks, np.asarray(slots, dtype=np.int32))
            side.copier.wait({job_id})
            side.copier.get_finished()
            scheduler.send([] if is_store else _wrong(views, keys, version, rank))
    except (EOFError, OSError):  # the scheduler is gone
        pass
    finally:
        side.close()


def _fill(views: Sequence[Any], keys: Sequence[bytes], version: int | None, rank: int) -> None:
    for block, key in enumerate(keys):
        for tensor, view in enumerate(views):
            noise = b"\x55" * PAGES[tensor]
            data = noise if version is None else page(key, version, rank, tensor)
            view[block] = np.frombuffer(data, dtype=np.int8)


def _wrong(views: Sequence[Any], keys: Sequence[bytes], version: int, rank: int) -> list[bytes]:
    return [
        key
        for block, key in enumerate(keys)
        if any(
            view[block].tobytes() != page(key, version, rank, tensor)
            for tensor, view in enumerate(views)
        )
    ]


# ---- the scheduler process -------------------------------------------------------------------


class Scheduler:
    """Serves random requests for ever, and reports what it did."""

    def __init__(self, cascade: Cascade, workers: Sequence[Connection], report: Connection) -> None:
        self._manager = cascade.manager
        self._workers = workers
        self._report = report
        self._version = DISK_VERSION
        self._jobs = 0

    def serve(self, rng: random.Random) -> None:
        """One request: load what is there, store the rest."""
        text = rng.randrange(TEXTS)
        keys = [key_of(text, i) for i in range(rng.randint(1, CHUNKS))]
        request = Request()
        hits = self._await_hits(keys, request)
        if hits:
            spec = self._manager.prepare_load(keys[:hits], request)
            self._run(False, keys[:hits], spec)
            self._manager.complete_load(keys[:hits])
        output = self._manager.prepare_store(keys[hits:], request)
        if output is not None and output.block_hashes_to_store:
            self._run(True, output.block_hashes_to_store, output.store_spec)
            self._manager.complete_store(output.block_hashes_to_store)
        self._manager.finish_request(request)
        self._manager.end_step()
        self._tell_events(loaded=hits)

    def reset(self) -> None:
        """The weights change; nothing from before may be met again."""
        self._report.send(("resetting",))
        self._manager.reset_cache()
        self._manager.on_reset_flushed()
        self._version += 1

    def _await_hits(self, keys: Sequence[BlockHash], request: Request) -> int:
        answers: list[int] = []

        def has_ended() -> bool:
            hits = self._manager.lookup(keys, request)
            if hits is None:
                self._manager.end_step()
            else:
                answers.append(hits)
            return hits is not None

        wait_until(has_ended, pause_s=LOOK_S)
        return answers[0]

    def _run(self, is_store: bool, keys: Sequence[BlockHash], spec: LoadStoreSpec) -> None:
        self._jobs += 1
        for worker in self._workers:
            worker.send((self._jobs, is_store, self._version, list(keys), spec.slots.tolist()))
        for worker in self._workers:
            wrong = worker.recv()
            if wrong:
                self._report.send(("wrong", wrong))

    def _tell_events(self, loaded: int) -> None:
        events = self._manager.take_events()
        below = [(list(e.block_hashes), e.removed) for e in events if e.medium == "NVME"]
        self._report.send(("served", loaded, below))


def scheduler_main(
    setup: Setup,
    workers: Sequence[Connection],
    report: Connection,
    seed: int,
) -> None:
    """Serve until a worker is gone, then shut down cleanly."""
    for worker in workers:
        worker.recv()
    key = NamespaceKey("crash", {"weights": "files:crash", "vllm": "none"})
    cascade = open_cascade(
        setup.settings(),
        GEOMETRY,
        setup.engine_id,
        key,
        steps_until_flushed=3,
        with_events=True,
    )
    report.send(("open", cascade.manager.tier_states()[1].blocks))
    scheduler = Scheduler(cascade, workers, report)
    rng = random.Random(seed)
    try:
        while True:
            scheduler.serve(rng)
            if rng.random() < 0.01:
                scheduler.reset()
    except (EOFError, OSError):  # a worker is gone, or the test
        cascade.close()


# ---- the test's side -------------------------------------------------------------------------


@dataclass
class Known:
    """What the test knows of a tier from the reports of the engines before."""

    was_reset: bool = False
    """The engine that runs, or the last one, was reset: what it stored later is for it alone."""
    stored: set[bytes] = field(default_factory=set)
    """Acknowledged on NVMe, not reported as evicted, and right for the next engine."""
    loaded_blocks: int = 0
    wrong: list[bytes] = field(default_factory=list)
    is_open: bool = False

    def take(self, message: tuple[Any, ...]) -> None:
        """One report."""
        kind = message[0]
        if kind == "open":
            self.is_open = True
        elif kind == "wrong":
            self.wrong += message[1]
        elif kind == "resetting":
            self.was_reset = True
            self.stored.clear()
        elif kind == "served":
            self.loaded_blocks += message[1]
            for keys, is_removed in message[2]:
                if is_removed:
                    self.stored.difference_update(keys)
                elif not self.was_reset:
                    self.stored.update(keys)


@cache
def _server() -> ForkServerContext:
    """A server of processes that have imported everything; it finds us by PYTHONPATH only."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.crash_rig", "torch"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


class Engine:
    """The processes of one engine; nothing of it is left after `finish`."""

    def __init__(self, setup: Setup, known: Known, seed: int) -> None:
        known.is_open = known.was_reset = False
        self._known = known
        context = _server()
        pairs = [context.Pipe() for _ in range(WORLD)]
        self._report, told = context.Pipe(duplex=False)
        self.workers: list[BaseProcess] = [
            context.Process(target=worker_main, args=(setup, rank, theirs))
            for rank, (_, theirs) in enumerate(pairs)
        ]
        ours = [mine for mine, _ in pairs]
        arguments = (setup, ours, told, seed)
        self.scheduler: BaseProcess = context.Process(target=scheduler_main, args=arguments)
        for process in self.processes:
            process.start()
        for pair in pairs:
            for end in pair:
                end.close()
        told.close()
        self._helpers: set[psutil.Process] = set()

    @property
    def processes(self) -> list[BaseProcess]:
        """All of them, workers first."""
        return [*self.workers, self.scheduler]

    def listen(self, messages: int) -> None:
        """Take in so many reports."""
        for _ in range(messages):
            self._known.take(self._report.recv())
            if self._known.is_open and not self._helpers:
                self._helpers.update(psutil.Process(self.scheduler.pid).children())

    def listen_for(self, seconds: float) -> None:
        """Take in one report more if it comes within this time."""
        if self._report.poll(seconds):
            self.listen(1)

    def listen_to_the_end(self) -> None:
        """Take in every report until the scheduler is gone."""
        try:
            while wait([self._report], GONE_LIMIT_S):
                self.listen(1)
            raise AssertionError("the scheduler is stuck")
        except EOFError:
            pass

    def finish(self) -> None:
        """Take in what is left until every process is gone: killed, or closed without an error."""
        self.listen_to_the_end()
        for process in self.processes:
            process.join(GONE_LIMIT_S)
            assert process.exitcode is not None, "a process is stuck"
            assert process.exitcode in (0, -signal.SIGKILL), "it failed while it closed"
        self._report.close()

    def assert_nobody_left(self) -> None:
        """What the scheduler itself had started is gone, too."""
        assert not psutil.wait_procs(self._helpers, timeout=GONE_LIMIT_S)[1], "a process is left"


def read_all(setup: Setup, *, close_clean: bool) -> set[bytes]:
    """Open the tier as the next engine does, and read every block of it; the keys that it holds.

    Asserts that each one is right for the weights on disk, and that no two share a slot.
    """
    fs = RealFileSystem()
    locks: list[FileLock] = []

    def is_free() -> bool:
        """The kernel may still be ending the node of the killed engine."""
        locks.extend(filter(None, [try_lead(fs, setup.path)]))
        return bool(locks)

    wait_until(is_free)
    (lock,) = locks
    means = StartMeans(fs, time.time, open_block_table, boot_id())
    writer = PathWriter(means, [setup.path], setup.path_options, monotonic, InlineExecutor())
    try:
        namespace = _open_alone(setup, writer)
        keys = list(_keys_of(namespace))
        slots = [namespace.presence.find(key) for key in keys]
        assert len(set(slots)) == len(keys) == namespace.space.used and min(slots, default=0) >= 0
        folders = [folder / SEGMENTS for folder in namespace.home.folders]
        files = PayloadFiles(fs, folders, namespace.home.layout)
        reader = BlockReader(namespace.presence, files, nullcontext())
        for start in range(0, len(keys), READ_AT_ONCE):
            part = [BlockHash(key) for key in keys[start : start + READ_AT_ONCE]]
            buffers = [bytearray(SLOT_BYTES) for _ in part]
            done = reader.read(part, [memoryview(buffer) for buffer in buffers])
            assert set(done.outcomes) == {BlockOutcome.OK}, "what is listed is there"
            for key, buffer in zip(part, buffers, strict=True):
                assert bytes(buffer) == row(key, DISK_VERSION), "wrong bytes"
        files.close()
        return set(keys)
    finally:
        writer.close(is_clean=close_clean)
        lock.release()


def _keys_of(namespace: NamespaceWriter) -> Iterator[bytes]:
    last = b""
    while batch := namespace.keys_after(last, READ_AT_ONCE):
        yield from batch
        last = batch[-1]


def _open_alone(setup: Setup, writer: PathWriter) -> NamespaceWriter:
    """Say hello to the writer as an engine that starts."""
    (description,) = setup.path.glob("*/namespace.json")
    document = json.loads(description.read_text())
    spec = NamespaceSpec(
        document["label"], json.dumps(document["fields"]).encode(), b"{}", SLOT_BYTES
    )
    writer.connect(1)
    paths = (str(setup.path),)
    writer.receive(1, Hello(PROTOCOL, "look", paths, spec, setup.path_options))
    welcomes: list[Welcome] = []
    while not welcomes:
        replies = [message for _, message in writer.step()]
        assert not any(isinstance(message, Refused) for message in replies), replies
        welcomes = [message for message in replies if isinstance(message, Welcome)]
    return writer.namespaces[welcomes[0].folder]
