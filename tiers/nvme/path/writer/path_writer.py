"""`PathWriter`: the only one that changes a path. It serves the nodes of all engines.

Its only input and output are files. Messages come in by `receive`, and `step` returns what is to be
sent. The owner holds the lock of the path while this object lives.

    writer = PathWriter(means, roots, options, clock, executor)
    writer.connect(1)
    writer.receive(1, Hello(...))
    for client, message in writer.step(): ...

One thread. Segment files are made and deleted in the executor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from .....errors import KVCascadeError, os_errors
from .....logs import get_logger
from ..path_messages import (
    PROTOCOL,
    Ask,
    Bad,
    Commit,
    CommitDone,
    Committed,
    Epoch,
    FromNode,
    FromWriter,
    Grant,
    Granted,
    Hello,
    PathOptions,
    Read,
    Refused,
    RefusedWhy,
    Release,
    Removed,
    Reset,
    Retire,
    SegmentsRemoved,
    Stored,
    TierFigures,
    Told,
    Touch,
    Welcome,
    Why,
)
from ..presence_table import presence_bytes
from .namespace_home import make_home
from .namespace_start import StartMeans, open_namespace_writer
from .namespace_writer import NamespaceWriter, Reply, Settled, is_within_limits, slots_of
from .path_budget import WriteBudget
from .path_capacity import PathCapacity
from .path_options import (
    POWER,
    PathRecord,
    check_options,
    check_paths,
    differences,
    is_stronger,
    load_record,
    save_record,
)
from .path_space import PathSpace

GRANT_WAIT_S = 1.0
"""Longest time in seconds that a grant waits for room that is being made."""
FIGURES_EVERY_S = 1.0
"""Interval of the figures that nodes get, in seconds."""

_log = get_logger(__name__)


@dataclass(slots=True)
class Client:
    """One connection."""

    number: int
    name: str = "?"
    """Name of the node in logs."""
    namespace: NamespaceWriter | None = None
    wants_events: bool = False
    figures: TierFigures | None = None
    """Figures that it was sent last."""


class PathWriter:
    """Writer of all namespaces of a path."""

    def __init__(
        self,
        means: StartMeans,
        roots: Sequence[Path],
        options: PathOptions,
        clock: Callable[[], float],
        executor: Executor,
    ) -> None:
        """Begin to write the path; `options` are in force from now on, and are recorded.

        `clock` returns monotonic seconds. Raises a `KVCascadeError`, such as `ConfigError` if the
        tier has other paths.
        """
        check_options(options)
        self.roots = tuple(roots)
        self.wants_close = False
        """True once a newer version asked the writer to close."""
        self._means = means
        self._clock = clock
        self._clients: dict[int, Client] = {}
        self._out: list[Reply] = []
        self._figures_at_s = clock()
        paths = tuple(map(str, roots))
        record = load_record(means.fs, self.roots[0])
        if record is not None:
            check_paths(record.paths, paths)
        self._record = PathRecord(paths, options, {} if record is None else record.min_shares)
        if record is None or record.options != options:
            save_record(means.fs, self.roots[0], self._record)
        self.space = PathSpace(PathCapacity(means.fs, roots, options, clock), executor, clock)
        self._budget = WriteBudget(options.write_budget_bytes, clock)
        self._handlers: dict[type, Callable[[Client, FromNode], None]] = {
            Hello: self._hello,
            Grant: self._grant,
            Commit: self._commit,
            Release: self._release,
            Bad: self._bad,
            Touch: self._touch,
            Read: self._read,
            Reset: self._reset,
            Ask: self._ask,
            Retire: self._retire,
        }

    @property
    def options(self) -> PathOptions:
        """Options in force."""
        return self._record.options

    @property
    def namespaces(self) -> dict[str, NamespaceWriter]:
        """Open namespaces by the names of their directories."""
        return self.space.namespaces

    # -- clients -------------------------------------------------------------------------------

    def connect(self, client: int) -> None:
        """Take a new connection; numbers are never used twice."""
        self._clients[client] = Client(client)

    def disconnect(self, client: int) -> None:
        """Forget a connection that ended. Its grants are free at once."""
        gone = self._clients.pop(client, None)
        if gone is not None and gone.namespace is not None:
            namespace = gone.namespace
            self._settle(namespace)  # what it committed before it ended counts
            namespace.leave(client)

    def receive(self, client: int, message: FromNode) -> None:
        """Take a message of a connection; `step` has the answer."""
        sender = self._clients.get(client)
        if sender is not None:
            self._handlers[type(message)](sender, message)

    def step(self) -> list[Reply]:
        """Do what the messages since the last call ask for; return messages and their clients."""
        self.space.poll()
        for namespace in list(self.namespaces.values()):
            if namespace.resets_owed:
                self._pay_resets(namespace)
            if namespace.waiting or namespace.has_work:
                self._serve(namespace)
        self._take_segments()
        self._send_figures()
        out, self._out = self._out, []
        return out

    @property
    def wait_s(self) -> float:
        """Longest time until the next `step`, in seconds."""
        is_waiting = any(n.waiting or n.resets_owed for n in self.namespaces.values())
        return 0.005 if is_waiting or self.space.has_jobs else FIGURES_EVERY_S

    def close(self, *, is_clean: bool = True) -> list[Reply]:
        """Settle what was received, and close all namespaces. Return the last messages.

        Without `is_clean` everything is left as a kill would leave it.
        """
        for namespace in list(self.namespaces.values()):
            if is_clean:
                self._settle(namespace)
                self._close_namespace(namespace)
            else:
                namespace.abandon()
                self.space.forget(namespace.home.name)
        out, self._out = self._out, []
        return out

    # -- messages ------------------------------------------------------------------------------

    def _hello(self, client: Client, message: FromNode) -> None:
        assert isinstance(message, Hello)
        client.name = message.name
        if message.protocol != PROTOCOL:
            text = f"the writer of the path speaks protocol {PROTOCOL}, not {message.protocol}; "
            self._refuse(client, RefusedWhy.PROTOCOL, text + "run one version of kvcascade")
            return
        if self.wants_close:
            self._refuse(client, RefusedWhy.CLOSING, "the writer of the path is closing; try again")
            return
        why = RefusedWhy.PATHS
        try:
            check_paths(self._record.paths, message.paths)
            why = RefusedWhy.NAMESPACE
            namespace = self._open(message)
        except KVCascadeError as error:
            self._refuse(client, why, str(error))
            return
        client.namespace, client.wants_events = namespace, message.wants_events
        namespace.clients.add(client.number)
        notes = differences(message.options, self.options)
        if notes:
            _log.warning("%s: %s", message.name, notes[0])
        home = namespace.home
        self._send(
            client.number,
            Welcome(
                PROTOCOL,
                client.number,
                namespace.epoch,
                home.name,
                home.layout.slots,
                presence_bytes(home.slots),
                home.slots,
                self.options,
                notes,
            ),
        )

    def _grant(self, client: Client, message: FromNode) -> None:
        assert isinstance(message, Grant)
        if client.namespace is None or not is_within_limits(message.keys):
            self._send(
                client.number,
                Granted(message.request, 0, b"\xfe\xff\xff\xff" * len(message.keys), Why.FULL),
            )
            return
        client.namespace.recency.expect(message.keys)
        until_s = self._clock() + GRANT_WAIT_S
        client.namespace.waiting.append((client.number, message, until_s))

    def _commit(self, client: Client, message: FromNode) -> None:
        assert isinstance(message, Commit)
        if client.namespace is None or not is_within_limits(message.keys):
            outcomes = bytes([Committed.STALE]) * len(message.keys)
            self._send(client.number, CommitDone(message.request, outcomes))
            return
        client.namespace.add_commit(client.number, message)

    def _release(self, client: Client, message: FromNode) -> None:
        assert isinstance(message, Release)
        if client.namespace is None:
            return
        self._settle(client.namespace)
        own = client.namespace.release(client.number, slots_of(message.slots))
        if message.has_failed and own:
            for path in {self._path_of(client.namespace, slot) for slot in own}:
                _log.warning(
                    "path %s takes no writes for a while: a write failed", self.roots[path]
                )
                self.space.capacity.rest(path)

    def _bad(self, client: Client, message: FromNode) -> None:
        assert isinstance(message, Bad)
        if client.namespace is not None:
            client.namespace.add_bad(message)

    def _touch(self, client: Client, message: FromNode) -> None:
        assert isinstance(message, Touch)
        if client.namespace is not None:
            client.namespace.touch(message)

    def _read(self, client: Client, message: FromNode) -> None:
        assert isinstance(message, Read)
        if client.namespace is not None:
            client.namespace.add_read(message.read_bytes)

    def _reset(self, client: Client, message: FromNode) -> None:
        assert isinstance(message, Reset)
        namespace = client.namespace
        if namespace is None:
            return
        self._settle(namespace)
        namespace.resets_owed.append((client.number, message.request))
        self._pay_resets(namespace)

    def _ask(self, client: Client, message: FromNode) -> None:
        assert isinstance(message, Ask)
        self._send(client.number, Told(message.request, b"{}"))

    def _retire(self, client: Client, message: FromNode) -> None:
        assert isinstance(message, Retire)
        if message.protocol > PROTOCOL:
            self.wants_close = True
            return
        text = f"the writer of the path has protocol {PROTOCOL}, which is not older"
        self._refuse(client, RefusedWhy.PROTOCOL, text)

    # -- work ----------------------------------------------------------------------------------

    def _open(self, message: Hello) -> NamespaceWriter:
        """Return the namespace that a node asks for, opened if it is not yet."""
        if is_stronger(message.options, self.options):
            self._strengthen()
        options = self.options
        home = make_home(
            self._means.fs,
            self.roots,
            message.namespace,
            options.capacity_bytes,
            options.segment_bytes,
        )
        namespace = self.namespaces.get(home.name)
        if namespace is not None:
            home.close()
        else:
            namespace = open_namespace_writer(
                self._means, home, options.policy, is_durable=options.durability == POWER
            )
            self.space.add(namespace)
        namespace.home.note_use(self._means.fs)
        self._keep_share(namespace, message.namespace.min_share_bytes)
        return namespace

    def _keep_share(self, namespace: NamespaceWriter, asked_bytes: int) -> None:
        """Record what other namespaces may not take from this one."""
        name, shares = namespace.home.name, self._record.min_shares
        if shares.get(name, 0) != asked_bytes:
            shares[name] = asked_bytes
            save_record(self._means.fs, self.roots[0], self._record)
        namespace.min_share_bytes = asked_bytes

    def _strengthen(self) -> None:
        """Make every commit durable from now on, because a node asks for that."""
        options = msgspec.structs.replace(self.options, durability=POWER)
        self._record.options = options
        self.space.capacity.options = options
        for namespace in self.namespaces.values():
            self._settle(namespace)
            namespace.replace_table(partial(self._means.table_of, is_durable=True))
        save_record(self._means.fs, self.roots[0], self._record)

    def _serve(self, namespace: NamespaceWriter) -> None:
        """Find room for the waiting grants, commit, and answer."""
        capacity = self.space.capacity
        need = namespace.demand() if namespace.waiting else 0
        allowed = self._budget.allowed(self.namespaces.values(), namespace.home.block_bytes)
        room = self.space.room_for(namespace, min(need, allowed)) if need else None
        self._settle(namespace, room.evictions if room is not None else 0)
        awake = capacity.awake
        why = Why.FULL
        if not awake:
            why = Why.RESTING
        elif allowed < need:
            why = Why.BUDGET
        elif room is not None and (room.is_coming or room.evictions):
            why = Why.LATER
        may_wait = why is Why.LATER
        self._out += namespace.serve(awake, allowed, why, may_wait, self._clock())

    def _settle(self, namespace: NamespaceWriter, evictions: int = 0) -> None:
        if namespace.has_work or evictions:
            result = namespace.settle(evictions)
            self._tell(namespace, result)  # first: an engine that got its answer knows the rest
            self._out += result.replies

    def _tell(self, namespace: NamespaceWriter, result: Settled) -> None:
        """Send events of stored and removed blocks."""
        for number in namespace.clients if result.stored or result.removed else ():
            if result.removed:
                self._send(number, Removed(result.removed))
            if result.stored and self._clients[number].wants_events:
                self._send(number, Stored(result.stored))

    def _pay_resets(self, namespace: NamespaceWriter) -> None:
        """Reset a namespace, and answer everybody who asked for it once it is durable."""
        if not namespace.reset():
            return
        owed = dict(namespace.resets_owed)
        for client, request in namespace.resets_owed:
            self._send(client, Epoch(namespace.epoch, request))
        for number in namespace.clients.difference(owed):
            self._send(number, Epoch(namespace.epoch))
        namespace.resets_owed.clear()

    def _take_segments(self) -> None:
        """Go on with the segment that is taken, and begin with one if too much is stored."""
        self.space.shrink()
        emptied = self.space.empty_taken()
        if emptied is None:
            return
        taken, removed, is_empty = emptied
        namespace = self.namespaces[taken.name]
        self._tell(namespace, Settled(removed=removed))
        for number in namespace.clients if is_empty else ():
            self._send(number, SegmentsRemoved([taken.number]))

    def _send_figures(self) -> None:
        now_s = self._clock()
        if now_s < self._figures_at_s:
            return
        self._figures_at_s = now_s + FIGURES_EVERY_S
        left = self._budget.left_bytes(self.namespaces.values())
        for namespace in self.namespaces.values():
            day = namespace.table.day_totals()
            figures = TierFigures(
                namespace.space.used,
                namespace.home.slots,
                namespace.evicted_blocks,
                left,
                (int(day.is_whole_day), day.written, day.read),
            )
            for number in namespace.clients:
                client = self._clients[number]
                if client.figures != figures:
                    client.figures = figures
                    self._send(number, figures)

    def _close_namespace(self, namespace: NamespaceWriter) -> None:
        name = namespace.home.name
        try:
            with os_errors(f"closing {name}"):
                namespace.close()
        except KVCascadeError as error:
            _log.warning("%s was not closed cleanly: %s", name, error)
        self.space.forget(name)

    def _path_of(self, namespace: NamespaceWriter, slot: int) -> int:
        return slot // namespace.space.slots_per_segment % len(self.roots)

    def _refuse(self, client: Client, why: RefusedWhy, text: str) -> None:
        _log.warning("%s is refused: %s", client.name, text)
        self._send(client.number, Refused(why, text))

    def _send(self, client: int, message: FromWriter) -> None:
        self._out.append((client, message))
