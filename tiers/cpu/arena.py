"""The CPU arena: one shared-memory file of slots, mapped by the scheduler and every worker.

    | header 4096 | slot 0 | slot 1 | ...        slot: | rank 0 | rank 1 | ... | pad to 4096 |

Guarantees:

- All processes of an engine see the same memory, or `open` raises. The scheduler opens last. It
  checks that every rank has mapped this very file, so it cannot map a second, empty one.
- Two engines with one engine_id never share an arena: a rank that a live process holds cannot be
  claimed.
- The file loses its name as soon as the scheduler and all ranks have mapped it. A `kill -9` after
  that leaves no file. Before that, `close` removes the file. After a `kill -9`, the next `open` in
  the directory removes it (`sweep`).
- A kept arena (`ArenaGeometry.kept`) gets a lasting name instead. The next engine of the same
  geometry takes it over, with the blocks that its slot table records.

Not guaranteed: any order between processes. The manager decides which process writes a slot, and
when. A slot has one writer at a time. Readers start only after the manager knows that it is
complete.

`open` may take seconds, as it reserves memory; no other call blocks. Any thread may use the arrays
and views. Call `close` after the last transfer. Views that outlive `close` stay valid, and keep the
mapping and the locks until they are dropped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import numpy.typing as npt

from ...errors import ClosedError, ConfigError, InUseError, os_errors
from . import header as layout
from .arena_file import (
    JOIN_TIMEOUT_S,
    ArenaFile,
    ArenaRequest,
    Clock,
    Probe,
    Wait,
    arena_path,
    check_dir,
    give_up_name,
    open_file,
    polls,
    sweep,
)
from .arena_limits import probe_machine
from .header import HEADER_BYTES, SCHEDULER_RECORD, ArenaGeometry, RankRecord, RecordState
from .huge_pages import map_file
from .locks import held_by_other, try_flock, try_lock
from .prefault import PIECE_BYTES, Span, prefault
from .slot_table import SlotTable

ByteArray = npt.NDArray[np.uint8]

DEFAULT_ARENA_DIR = "/dev/shm"
_NO_DIGEST = bytes(layout.DIGEST_BYTES)


@dataclass(frozen=True, slots=True)
class ArenaRole:
    """Role of the opening process in its engine: one worker rank, or the scheduler."""

    rank: int | None
    """Rank of the worker, from 0; None for the scheduler."""
    may_make: bool = True
    """True if the process may create the arena. False for a scheduler that starts after its
    workers: it only joins their arena."""

    @classmethod
    def worker(cls, rank: int) -> ArenaRole:
        """Return the role of the worker process of this rank."""
        return cls(rank)

    @classmethod
    def scheduler(cls, *, expect_workers: bool = True) -> ArenaRole:
        """Return the role of the scheduler.

        With `expect_workers=False` (drivers, tools) it may start first or run without workers.
        """
        return cls(None, may_make=not expect_workers)

    @property
    def record(self) -> int:
        """Index of the role's record in the header."""
        return SCHEDULER_RECORD if self.rank is None else self.rank


class Arena:
    """The mapped arena. `Arena.open` creates it."""

    def __init__(self, file: ArenaFile, role: ArenaRole) -> None:
        """Map a ready file and take over its descriptor."""
        self.geometry = file.header.geometry
        self.role = role
        self.path = file.path
        self.is_huge = file.header.is_huge
        self._fd = file.fd
        self._may_unlink = file.is_made  # set later as well, once this process holds its role
        with os_errors(f"mapping the CPU arena {file.path}"):
            self._map: memoryview | None = map_file(file.fd, file.size_bytes)

    @classmethod
    def open(
        cls,
        geometry: ArenaGeometry,
        engine_id: str,
        role: ArenaRole,
        *,
        arena_dir: str = DEFAULT_ARENA_DIR,
        clock: Clock = time.monotonic,
        wait: Wait = time.sleep,
        probe: Probe = probe_machine,
    ) -> Arena:
        """Create or join the arena of `engine_id`, and claim this process's role in it.

        Removes the leftover arenas of dead processes in `arena_dir` first. `clock`, `wait` and
        `probe` default to those of the machine; tests pass their own.

        Raises `ConfigError` (too large, bad directory or rank), `NoSpaceError`, `FormatError` (the
        file has another geometry), `InUseError` (a live process holds the role, or workers are
        missing), `TierIOError`.
        """
        if role.rank is not None and not 0 <= role.rank < geometry.world_size:
            raise ConfigError(
                f"rank {role.rank} of a world of {geometry.world_size} workers; "
                f"the arena is for one host, where ranks are 0 to world_size - 1"
            )
        check_dir(arena_dir)
        sweep(arena_dir)
        path = arena_path(arena_dir, engine_id)
        file = open_file(ArenaRequest(geometry, path, role.may_make, clock, wait, probe))
        try:
            arena = cls(file, role)
        except BaseException:
            if file.is_made:
                give_up_name(path, file.fd, geometry.kept)
            os.close(file.fd)
            raise
        try:
            arena._claim()
            if not role.may_make:
                arena._await_ranks(clock, wait)
            arena._drop_name_if_complete()
        except BaseException:
            arena.close()
            raise
        return arena

    @property
    def slots(self) -> ByteArray:
        """All slots: uint8 array over the shared memory, shape `(slots, slot_bytes)`."""
        flat = np.frombuffer(self._mapped(), np.uint8, self.geometry.data_bytes, HEADER_BYTES)
        return flat.reshape(self.geometry.slots, self.geometry.slot_bytes)

    def slot_table(self) -> SlotTable:
        """Return the slot table of a kept arena, over the shared memory."""
        assert self.geometry.kept, "only a kept arena has a table"
        start = HEADER_BYTES + self.geometry.data_bytes
        return SlotTable(np.frombuffer(self._mapped(), np.uint8, self.geometry.table_bytes, start))

    def duplicate(self) -> int:
        """Return a descriptor of the same memory for a helper process, which has no role.

        The descriptor holds the shared lock, so the arena counts as in use while the helper lives.
        Slot 0 begins at `HEADER_BYTES`. The caller closes the descriptor. Raises `TierIOError`.
        """
        self._mapped()  # the descriptor of a closed arena may be another file
        with os_errors(f"opening the CPU arena {self.path} once more"):
            fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
        try_flock(fd, exclusive=False)
        return fd

    def publish_layout(self, digest: bytes) -> None:
        """Publish the 16-byte digest of this rank's KV tensor layout for the scheduler.

        Only a worker may call this.
        """
        assert self.role.rank is not None, "only a worker has a layout"
        assert len(digest) == layout.DIGEST_BYTES
        self._write_record(RecordState.PUBLISHED, digest)

    def layout_digests(self) -> list[bytes | None]:
        """Return the layout digest of each rank, by rank; None for a rank that published none."""
        records = [
            layout.read_record(self._mapped(), rank) for rank in range(self.geometry.world_size)
        ]
        return [
            record.digest if record.state is RecordState.PUBLISHED else None for record in records
        ]

    def missing_ranks(self) -> list[int]:
        """Return the ranks that no live process holds, except the rank of this process."""
        self._mapped()
        return [
            rank
            for rank in range(self.geometry.world_size)
            if rank != self.role.rank and not held_by_other(self._fd, layout.record_offset(rank))
        ]

    def prefault(self) -> None:
        """Fault in the pages that this process will touch, in parallel. Never changes a byte.

        A worker faults in its own part of every slot and never touches the other parts. Page tables
        are per process, so each process must do this for itself. All ranks run at the same time,
        which spreads the zeroing of the memory over them.

        The scheduler moves whole slots, so it faults in everything. It may omit the call: its I/O
        threads then fault pages in one by one, inside system calls. GPU registration faults in
        every page, so the call is not needed there either. Raises `NoSpaceError`, `TierIOError`.
        """
        prefault(self._pieces())

    def close(self) -> None:
        """Unmap the arena, release the role, and remove the name if it still leads to this file.

        Idempotent.
        """
        if self._map is None:
            return
        if self._may_unlink:
            give_up_name(self.path, self._fd, self.geometry.kept)
        self._map = None  # the last view unmaps
        os.close(self._fd)

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _mapped(self) -> memoryview:
        """Return the mapped file. Raises `ClosedError`."""
        if self._map is None:
            raise ClosedError("the CPU arena is closed; open it again")
        return self._map

    def _claim(self) -> None:
        """Lock this process's role. Raises `InUseError` if a live process holds it."""
        if not try_lock(self._fd, layout.record_offset(self.role.record)):
            holder = layout.read_record(self._mapped(), self.role.record).pid
            who = "scheduler" if self.role.rank is None else f"rank {self.role.rank}"
            raise InUseError(
                f"{self.path}: the {who} is already there (process {holder}); two engines share "
                f"one engine_id: stop the other one, or leave kv_transfer_config.engine_id unset"
            )
        self._may_unlink = True
        self._write_record(RecordState.MAPPED, _NO_DIGEST)

    def _write_record(self, state: RecordState, digest: bytes) -> None:
        record = RankRecord(os.getpid(), state, digest)
        layout.write_record(self._mapped(), self.role.record, record)

    def _await_ranks(self, clock: Clock, wait: Wait) -> None:
        """Wait until live processes hold all ranks. Raises `InUseError` after the time limit."""
        missing: list[int] = []
        for _ in polls(clock, wait, JOIN_TIMEOUT_S):
            missing = self.missing_ranks()
            if not missing:
                return
        raise InUseError(
            f"{self.path}: workers of rank {missing} have not mapped it within "
            f"{JOIN_TIMEOUT_S:.0f} s; all must run on this host, share one arena_dir, and live; "
            "read the workers' log"
        )

    def _drop_name_if_complete(self) -> None:
        """Remove the name if the scheduler and all ranks have mapped the file.

        Each process calls this after its claim, so the last one to join removes the name.
        """
        scheduler = layout.record_offset(SCHEDULER_RECORD)
        if self.role.rank is not None and not held_by_other(self._fd, scheduler):
            return
        if not self.missing_ranks():
            give_up_name(self.path, self._fd, self.geometry.kept)

    def _pieces(self) -> Iterator[list[Span]]:
        """Yield the memory to fault in, in pieces of about `PIECE_BYTES`."""
        geometry = self.geometry
        base = int(self.slots.ctypes.data)
        if self.role.rank is None or geometry.world_size == 1:
            for start in range(0, geometry.data_bytes, PIECE_BYTES):
                yield [(base + start, min(PIECE_BYTES, geometry.data_bytes - start))]
            return
        base += self.role.rank * geometry.rank_bytes
        slots_per_piece = max(1, PIECE_BYTES // geometry.rank_bytes)
        for first in range(0, geometry.slots, slots_per_piece):
            last = min(first + slots_per_piece, geometry.slots)
            yield [
                (base + slot * geometry.slot_bytes, geometry.rank_bytes)
                for slot in range(first, last)
            ]
