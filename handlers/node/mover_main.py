"""The mover: a process of its own that moves blocks between the arena and one NVMe tier.

    python -m kvcascade.handlers.node.mover_main SOCKET_FD ARENA_FD PARENT_PID

Its threads do not compete with the scheduler for an interpreter lock. The process ends when its
socket is closed, so it never outlives the scheduler's process. Work in flight is lost then, and has
no index entries, as after `kill -9`.

Threads: the main thread reads the socket. Each direction has `THREADS_PER_TRANSFER * io_threads`
threads that copy, hash, commit and send answers. At most `io_threads` of them use the device at a
time.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict

import msgspec

from ...errors import TierIOError
from ...tiers.base import BlockHash, SlotSpec
from ...tiers.cpu.huge_pages import has_huge_pages, map_file
from ...tiers.nvme.attach import attach
from ...tiers.nvme.nvme_backend import NvmeSpec
from ...tiers.nvme.path.frames import FrameReader, WireError, frame
from ...tiers.nvme.segments.store import BlockStore
from .bounce import ArenaBounce
from .child_start import prefault, run_child
from .mover_wire import (
    Answer,
    LoadJob,
    Order,
    Ready,
    RemoveJob,
    RepairJob,
    Setup,
    StoreJob,
    pack_removals,
    to_mover,
    unpack_removals,
)
from .nvme_handlers import ArenaView, NvmeLoadHandler, NvmeStoreHandler
from .nvme_jobs import NvmeJobHandler, QueueOptions
from .path_wire import pack_outcomes, unpack_slots

RECEIVE_BYTES = 256 << 10
MAX_JOBS = 1024
"""Limit of the jobs in flight per direction. The scheduler's side sends far fewer."""
PART_BYTES = 8 << 20
THREADS_PER_TRANSFER = 2
"""Threads for each device transfer. While one transfers a part, the other one finishes the previous
part or prepares the next one."""

_log = logging.getLogger(__name__)


class MoverServer:
    """Executes orders and sends the answers. Any thread may call `send`, which takes frames."""

    def __init__(
        self,
        store: BlockStore,
        arena: memoryview,
        executors: tuple[ThreadPoolExecutor, ThreadPoolExecutor],
        send: Callable[[bytes], None],
        bounce: ArenaBounce | None = None,
    ) -> None:
        """`arena` holds the slots, one block each. The first executor runs stores and index work,
        the second one loads. With `bounce`, all bytes pass through its buffers in huge pages."""
        self._store = store
        self._send = send
        self._executors = executors
        down, up = self._options("_down"), self._options("_up")
        view = arena_view(arena, store.block_bytes)
        self._bounce = bounce
        self._down = NvmeStoreHandler(store, view, executors[0], down, bounce=bounce)
        self._up = NvmeLoadHandler(store, view, executors[1], up, bounce=bounce)
        self._lock = threading.Lock()
        self._counted = asdict(store.counters)
        self._reported_bytes = store.reported_bytes

    def warm_up(self, threads: int) -> None:
        """Make the threads of each executor and their buffers. The first block is then as fast as
        later ones."""
        if self._bounce is not None:
            part_blocks = max(1, PART_BYTES // self._store.block_bytes)
            wait(
                executor.submit(self._bounce.blocks, part_blocks)
                for executor in self._executors
                for _ in range(threads)
            )

    def carry_out(self, order: Order) -> None:
        """Begin an order. Its answer is sent when it is done.

        Raises `TierIOError` if this process can no longer change the index. A new process can.
        """
        if self._store.has_lost_index:
            raise TierIOError(errno.EIO, "the index could not be written; opening it anew")
        match order:
            case StoreJob():
                self._begin_store(order)
            case LoadJob():
                self._begin_load(order)
            case RemoveJob():
                removals = unpack_removals(order.removals)
                self._begin(order.ticket, lambda: self._store.remove(removals, order.epoch))
            case RepairJob():
                self._begin(order.ticket, lambda: self._store.repair_records(set(order.slots)))

    def _options(self, handler: str) -> QueueOptions:
        return QueueOptions(
            MAX_JOBS,
            part_bytes=PART_BYTES,
            on_finished=lambda: self._answer_jobs(getattr(self, handler)),
        )

    def _begin_store(self, job: StoreJob) -> None:
        hashes = tuple(map(BlockHash, job.hashes))
        removals = unpack_removals(job.removals)
        blocks = NvmeSpec(hashes, unpack_slots(job.slots), job.epoch, removals=removals)
        spec = (SlotSpec(unpack_slots(job.arena_slots)), blocks)
        if not self._down.transfer_async(job.ticket, spec):
            raise WireError("more stores than agreed")

    def _begin_load(self, job: LoadJob) -> None:
        hashes = tuple(map(BlockHash, job.hashes))
        blocks = NvmeSpec(hashes, unpack_slots(job.slots), 0, values=job.values)
        spec = (blocks, SlotSpec(unpack_slots(job.arena_slots)))
        if not self._up.transfer_async(job.ticket, spec):
            raise WireError("more loads than agreed")

    def _begin(self, ticket: int, work: Callable[[], object]) -> None:
        self._executors[0].submit(self._do, ticket, work)

    def _do(self, ticket: int, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception:
            _log.exception("work on the index failed in a way it should not")
        self._answer(ticket, b"", 0.0)

    def _answer_jobs(self, handler: NvmeJobHandler) -> None:
        with self._lock:
            finished = handler.get_finished()
        for result in finished:
            self._answer(result.job_id, pack_outcomes(result.outcomes), result.time_s)

    def _answer(self, ticket: int, outcomes: bytes, time_s: float) -> None:
        with self._lock:
            reported = self._store.reported_bytes  # first: must not exceed the counters
            now, before = asdict(self._store.counters), self._counted
            counts = {name: n - before[name] for name, n in now.items() if n != before[name]}
            answer = Answer(
                ticket,
                outcomes,
                time_s,
                pack_removals(self._store.take_deferred()),
                counts,
                reported - self._reported_bytes,
                tuple(self._store.take_orphans()),
            )
            self._counted, self._reported_bytes = now, reported
            self._send(frame(answer))


def messages(connection: socket.socket) -> Iterator[Setup | Order]:
    """Yield all messages until the other end closes the socket. Raises `WireError`."""
    reader = FrameReader()
    while True:
        try:
            data = connection.recv(RECEIVE_BYTES)
        except ConnectionError:
            return
        if not data:
            return
        for body in reader.feed(data):
            try:
                yield to_mover.decode(body)
            except msgspec.MsgspecError as error:
                raise WireError(str(error)) from None


def serve(connection: socket.socket, arena_fd: int) -> None:
    """Attach to tier and arena, then execute orders until the other end closes the socket."""
    incoming = messages(connection)
    setup = next(incoming, None)
    if setup is None:
        return
    if not isinstance(setup, Setup):
        raise WireError("an order before the setup")
    memory = map_file(arena_fd, setup.arena_offset + setup.arena_slots * setup.slot_bytes)
    arena = memory[setup.arena_offset :]
    store = attach(setup.tier)
    store.limit_transfers(setup.io_threads)
    threads = setup.io_threads * THREADS_PER_TRANSFER
    pools = (ThreadPoolExecutor(threads, "store"), ThreadPoolExecutor(threads, "load"))
    is_bounced = has_huge_pages() and not setup.is_arena_huge
    bounce = ArenaBounce(arena, store.block_bytes) if is_bounced else None
    server = MoverServer(store, arena, pools, connection.sendall, bounce)
    server.warm_up(threads)
    connection.sendall(frame(Ready()))
    if setup.has_prefault:
        threading.Thread(target=prefault, args=(memory,), daemon=True).start()
    for order in incoming:
        if isinstance(order, Setup):
            raise WireError("a second setup")
        server.carry_out(order)


def arena_view(arena: memoryview, slot_bytes: int) -> ArenaView:
    """Return a function from a slot to the bytes of the slot."""
    return lambda slot: arena[slot * slot_bytes : (slot + 1) * slot_bytes]


if __name__ == "__main__":
    os._exit(
        run_child(sys.argv[1:], "kvcascade mover", serve)
    )  # without waiting for work in flight
