"""Namespaces that are being opened on an I/O thread, one after the other.

After a loss of power an opening scans the block table, which takes minutes for a large tier. The
writer serves all open namespaces meanwhile. Everything but the opening itself runs on the writer's
thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace

from ......errors import ClosedError, KVCascadeError, TierIOError
from ......logs import get_logger
from ...path_messages import NamespaceSpec
from .namespace_home import NamespaceHome
from .namespace_start import StartMeans, open_namespace_writer
from .namespace_writer import NamespaceWriter

ROOM_LIMIT_S = 5.0
"""Longest time that a new namespace waits until another segment leaves for its tables."""

_log = get_logger(__name__)

Opened = NamespaceWriter | KVCascadeError
"""Result of an opening."""


class BeingOpenedError(Exception):
    """A message needs a namespace that is being opened; it is handled again afterwards."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@dataclass(frozen=True, slots=True)
class NamespaceToOpen:
    """A namespace to open, and how it is opened."""

    name: str
    is_durable: bool
    spec: NamespaceSpec | None = None
    """Namespace of a node, which is made if it does not exist; None: it exists."""
    sizes: Sequence[int] = ()
    """Bytes of the tables that are made, in each path."""
    bytes_by_path: Sequence[int] = ()
    """Bytes that a new namespace takes in each path before it counts as open."""
    is_for_room: bool = False
    """True if no client needs it: its segments are to be taken."""
    begun_s: float = 0.0
    own_bytes: Sequence[int] = ()
    """Bytes of our files in each path when the opening starts, with `bytes_by_path`."""
    can_have_room: dict[int, bool] = field(default_factory=dict)
    """Paths whose disk had too little room: whether all that may leave it is enough."""


class NamespaceOpenings:
    """Openings that are under way or wait for their turn."""

    def __init__(
        self,
        means: StartMeans,
        executor: Executor,
        home_of: Callable[[NamespaceToOpen], NamespaceHome],
        room_for: Callable[[NamespaceToOpen], tuple[Sequence[int], int | None]],
        clock: Callable[[], float],
    ) -> None:
        """`home_of` opens the directories of a namespace on an I/O thread, and raises a
        `KVCascadeError`. `room_for` returns what `NamespaceToOpen.own_bytes` is now, and the number
        of a path in which a new namespace lacks room that segments have; None if there is no such
        path."""
        self._means = means
        self._home_of = home_of
        self._room_for = room_for
        self._clock = clock
        self.lacking: int | None = None
        """Number of the path in which a new namespace waits for room; None if none does."""
        self._room_at_s = -math.inf
        """Time at which others made room last."""
        self._executor = executor
        self.waiting: dict[str, NamespaceToOpen] = {}
        """Openings in order, by the names of the namespaces."""
        self._running: tuple[str, Future[Opened]] | None = None
        """Name of the namespace that is being opened now."""

    @property
    def is_room_coming(self) -> bool:
        """True while a namespace is being opened whose segments are to be taken."""
        return any(each.is_for_room for each in self.waiting.values())

    def begin(self, opening: NamespaceToOpen) -> None:
        """Open a namespace, unless that is under way."""
        known = self.waiting.setdefault(opening.name, replace(opening, begun_s=self._clock()))
        if opening.is_for_room and not known.is_for_room:
            self.waiting[opening.name] = replace(known, is_for_room=True)
        self._go_on()

    def note_room(self) -> None:
        """Note that others made room: a namespace that lacks more of it goes on waiting."""
        self._room_at_s = self._clock()

    def take(self) -> tuple[NamespaceToOpen, Opened] | None:
        """Return an opening that has ended; None if there is none.

        The next one begins with the next call, when the namespace that was opened is counted.
        """
        self._go_on()
        if self._running is None or not self._running[1].done():
            return None
        name, ended = self._running
        opening, found, self._running = self.waiting.pop(name), ended.result(), None
        if opening.is_for_room:
            self.note_room()
        return opening, found

    def bytes_in(self, path: int) -> int:
        """Return the bytes of new namespaces in a path."""
        return sum(each.bytes_by_path[path] for each in self.waiting.values() if each.bytes_by_path)

    def close(self) -> None:
        """Give up all openings. One that runs is closed again as a kill would, once it ends."""
        running, self._running = self._running, None
        self.waiting.clear()
        if running is not None and not running[1].cancel():
            running[1].add_done_callback(_abandon)

    def _go_on(self) -> None:
        if self._running is not None:
            return
        self.lacking = None
        for waiting in self.waiting.values():
            own_bytes, path = self._room_for(waiting)
            opening = replace(waiting, own_bytes=own_bytes)
            waits_since_s = max(opening.begun_s, self._room_at_s)
            if path is not None and self._clock() - waits_since_s < ROOM_LIMIT_S:
                self.lacking = path
                continue
            try:
                running = self._executor.submit(self._open, opening)
            except RuntimeError:  # the executor is shutting down
                running = Future()
                running.set_result(ClosedError("the writer of the path is closing; try again"))
            self._running = opening.name, running
            return

    def _open(self, opening: NamespaceToOpen) -> Opened:
        """Open a namespace. Runs on an I/O thread."""
        try:
            home = self._home_of(opening)
            return open_namespace_writer(self._means, home, is_durable=opening.is_durable)
        except KVCascadeError as error:
            return error
        except Exception as error:  # such as too little memory: it ends no other namespace
            _log.exception("%s could not be opened, in a way it should not", opening.name)
            reason = f"{type(error).__name__} {error}".strip()
            return TierIOError(None, f"{opening.name} could not be opened ({reason}); see the log")


def _abandon(ended: Future[Opened]) -> None:
    if ended.exception() is None:
        found = ended.result()
        if isinstance(found, NamespaceWriter):
            found.abandon()
