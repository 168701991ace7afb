"""`PathWriter`: the only object that changes a path. It serves the nodes of all engines.

It does no input and output but that of files. `receive` takes messages, and `step` returns the
messages to be sent. The owner holds the lock of the path while this object lives.

    writer = PathWriter(means, roots, options, clock, executor)
    writer.connect(1)
    writer.receive(1, Hello(...))
    for client, message in writer.step(): ...

One thread uses it. The executor makes and deletes segment files, and opens namespaces. Messages
that need a namespace wait until it is open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path

from .....errors import ConfigError, CorruptionError, KVCascadeError
from .....logs import get_logger
from ...segments.format import MAX_SLOTS
from ..former_writes import FormerWrites
from ..path_messages import (
    PROTOCOL,
    Ask,
    Epoch,
    FromNode,
    FromWriter,
    Hello,
    PathOptions,
    Refused,
    RefusedWhy,
    Removed,
    Reset,
    Retire,
    SegmentsRemoved,
    Stored,
    TierFigures,
    Welcome,
    Why,
)
from .messages.block_messages import USES, BlockMessages, Client, Handle
from .messages.held_messages import HeldMessages, log_refusal, why_refused
from .messages.reset_messages import ResetMessages
from .messages.writer_questions import WriterQuestions
from .namespace.namespace_home import NOTE_USE_EVERY_S
from .namespace.namespace_openings import BeingOpenedError
from .namespace.namespace_start import StartMeans
from .namespace.namespace_writer import BatchResult, NamespaceWriter
from .namespace.waiting_grants import Reply
from .path_namespaces import PathNamespaces
from .path_options import check_paths, is_stronger

BUSY_WAIT_S = 0.005
"""Time until the next step, in seconds, while something is under way."""
FIGURES_EVERY_S = 1.0
"""Interval of the figures that nodes get, in seconds."""

_log = get_logger(__name__)


class PathWriter:
    """Writer of all namespaces of a path."""

    def __init__(
        self,
        means: StartMeans,
        roots: Sequence[Path],
        options: PathOptions | None,
        clock: Callable[[], float],
        executor: Executor,
    ) -> None:
        """Begin to write the path; `options` are in force from now on, and are recorded.

        Without options, those that are recorded stay in force, and `roots` may be other names of
        the recorded paths.

        `clock` returns monotonic seconds. Raises a `KVCascadeError`, such as `ConfigError` if the
        tier has other paths.
        """
        self.path = PathNamespaces(means, roots, options, clock, executor)
        self.namespaces = self.path.space.namespaces
        """Open namespaces by the names of their directories."""
        self.wants_close = False
        """True once a newer version, or a tool, asked the writer to close."""
        self._clock = clock
        self._former = FormerWrites(means.fs, roots[0], clock)
        self._clients: dict[int, Client] = {}
        self._held = HeldMessages(clock)
        self._out: list[Reply] = []
        self._upkeep_at_s = self._note_use_at_s = clock()
        self._questions = WriterQuestions(self, clock)
        self._resets = ResetMessages(self._clients, clock, self._commit_batch, self._send)
        self._handlers: dict[type, Handle] = {
            Hello: self._hello,
            Reset: self._resets.receive,
            Ask: self._ask,
            Retire: self._retire,
            **BlockMessages(self.path, clock, self._commit_batch, self._send).handlers,
        }

    @property
    def clients(self) -> list[Client]:
        """All connections."""
        return list(self._clients.values())

    # -- clients -------------------------------------------------------------------------------

    def connect(self, client: int) -> None:
        """Take a new connection; numbers are never used twice."""
        self._clients[client] = Client(client)

    def cut_off(self, client: int) -> None:
        """Note that a client in a namespace hears nothing any more.

        Its process may write still, so its grants stay until `disconnect`.
        """
        deaf = self._clients[client]
        assert deaf.namespace is not None
        _log.warning(
            "%s does not read what the writer of the path sends, or sends nonsense; its slots stay "
            "granted until it joins again or its process ends",
            deaf.name,
        )
        deaf.wants_events = deaf.has_metrics = False
        deaf.namespace.forget_requests(client)
        self._held.forget(client)
        self._questions.forget(client)

    def disconnect(self, client: int) -> None:
        """Forget a connection that the other end closed. Its grants are free at once."""
        gone = self._clients.get(client)
        if gone is not None and gone.namespace is not None:
            self._commit_batch(gone.namespace)  # what it committed before it ended counts
            gone.namespace.leave(client)
            gone.namespace.home.note_use(self.path.fs)
        self._clients.pop(client, None)
        self._held.forget(client)
        self._questions.forget(client)

    def receive(self, client: int, message: FromNode) -> None:
        """Take a message of a connection; `step` has the answer."""
        sender = self._clients.get(client)
        if sender is None:
            return
        if isinstance(message, USES):
            sender.first_use_s = min(sender.first_use_s, self._clock())
        try:
            self._handlers[type(message)](sender, message)
        except BeingOpenedError as opening:
            self._out += self._held.add(client, message, opening.name)

    def step(self) -> list[Reply]:
        """Do what the messages since the last call ask for; return messages and their clients.

        Raises `CorruptionError` if an index failed in a way that only opening it again can repair.
        The caller then closes the writer without `is_clean`, and lets another process lead.
        """
        self.path.space.files.poll()
        ready, replies = self._held.take(self.path.take_opened())
        self._out += replies
        for client, message in ready:
            self.receive(client, message)
        for namespace in list(self.namespaces.values()):
            if namespace.resets or namespace.is_resetting:
                self._resets.proceed(namespace)
            if namespace.grants or namespace.batch:
                self._serve(namespace)
            if namespace.table.is_unusable:
                raise CorruptionError(
                    f"the index of {namespace.home.folders[0]} takes no more changes; the next "
                    "writer opens it again, and names the remedy if it is damaged"
                )
        self._take_segments()
        self._out += self._questions.poll()
        self._upkeep()
        out, self._out = self._out, []
        return out

    @property
    def wait_s(self) -> float:
        """Longest time until the next `step`, in seconds. Resets that wait are tried seldom."""
        is_waiting = any(namespace.grants for namespace in self.namespaces.values())
        is_busy = is_waiting or self.path.space.has_jobs or self._questions.is_busy
        return BUSY_WAIT_S if is_busy else FIGURES_EVERY_S

    def close(self, *, is_clean: bool = True) -> list[Reply]:
        """Commit what was received, and close all namespaces. Return the last messages.

        Without `is_clean` everything is left as a kill would leave it.
        """
        for namespace in self.namespaces.values() if is_clean else ():
            self._commit_batch(namespace)
        self.path.close(is_clean=is_clean)
        out, self._out = self._out, []
        return out

    def forget_gone(self) -> None:
        """Forget namespaces that another program removed. Their clients have to come back."""
        used = [gone for gone in self.path.forget_gone() if gone.clients]
        if used:
            self._former.wait_for(frozenset(gone.home.name for gone in used))
        for number in [number for gone in used for number in gone.clients]:
            self._clients[number].namespace = None  # nothing of it is committed any more
            self.disconnect(number)

    def drop_blocks(
        self, namespace: NamespaceWriter, wanted: Mapping[bytes, tuple[int, int]]
    ) -> list[bytes] | None:
        """Remove the blocks whose slot and checksum are these. Return their keys; None if the
        index cannot be written."""
        self._commit_batch(namespace)
        entries = namespace.table.get_many(list(wanted))
        slots = [
            entry.slot
            for entry, pair in zip(entries, wanted.values(), strict=True)
            if entry is not None and (entry.slot, entry.checksum) == pair
        ]
        removed = namespace.remove_slots(slots) if slots else []
        if removed:
            self._tell(namespace, BatchResult(removed=removed))
        return removed

    # -- messages ------------------------------------------------------------------------------

    def _hello(self, client: Client, message: Hello) -> None:
        if client.namespace is not None:
            return  # a node says it once
        client.name = message.name
        if message.protocol != PROTOCOL:
            text = f"the writer of the path speaks protocol {PROTOCOL}, not {message.protocol}; "
            self._refuse(
                client, message, RefusedWhy.PROTOCOL, text + "run one version of kvcascade"
            )
            return
        if self.wants_close:
            self._refuse(
                client, message, RefusedWhy.CLOSING, "the writer of the path is closing; try again"
            )
            return
        try:
            check_paths(self.path.record.paths, message.paths)
        except ConfigError as error:
            self._refuse(client, message, RefusedWhy.PATHS, str(error))
            return
        try:
            if is_stronger(message.options, self.path.options):
                for each in self.namespaces.values():
                    self._commit_batch(each)
                self.path.strengthen()
            namespace = self.path.open_for(message)
            is_alone = not self._engines_of(namespace)
            is_engine = not message.is_reader
            if is_engine and self.path.begin(namespace, message.epoch, is_alone=is_alone):
                self._out += [(reader, Epoch(namespace.epoch)) for reader in namespace.clients]
        except KVCascadeError as error:
            self._refuse(client, message, why_refused(error), str(error))
            return
        except RecursionError:
            text = "the namespace's fields have too many lists in lists"
            self._refuse(client, message, RefusedWhy.NAMESPACE, text)
            return
        client.namespace, client.wants_events = namespace, message.wants_events
        client.is_reader, client.has_metrics = message.is_reader, message.has_metrics
        self._upkeep_at_s = self._clock()  # the figures follow the `Welcome`
        namespace.clients.add(client.number)
        self._welcome(client, namespace, self.path.notes_for(message, namespace))

    def _engines_of(self, namespace: NamespaceWriter) -> list[int]:
        """Return the clients of a namespace that are no mere readers."""
        return [number for number in namespace.clients if not self._clients[number].is_reader]

    def _welcome(self, client: Client, namespace: NamespaceWriter, notes: list[str]) -> None:
        home = namespace.home
        self._send(
            client.number,
            Welcome(
                PROTOCOL,
                namespace.epoch,
                home.name,
                home.layout.slots,
                home.slots,
                self.path.options,
                notes,
            ),
        )
        self._send_figures()

    def _ask(self, client: Client, message: Ask) -> None:
        client.is_tool = True
        answer = self._questions.ask(client.number, message)
        if answer is not None:
            self._send(client.number, answer)

    def _retire(self, client: Client, message: Retire) -> None:
        if message.protocol > PROTOCOL:
            self.wants_close = True
            return
        text = (
            f"the writer of the path speaks protocol {PROTOCOL}; update the kvcascade of this "
            f"process, which speaks {message.protocol}"
        )
        # An older writer has closed meanwhile, if the protocol is equal: the node joins this one.
        is_equal = message.protocol == PROTOCOL
        why = RefusedWhy.CLOSING if is_equal else RefusedWhy.PROTOCOL
        self._send(client.number, Refused(why, text))

    # -- work ----------------------------------------------------------------------------------

    def _serve(self, namespace: NamespaceWriter) -> None:
        """Find room for the waiting grants, commit, and answer."""
        if self._former.may_run(namespace.home.name):
            self._commit_batch(namespace)
            held, now_s = namespace.held_among, self._clock()
            self._out += namespace.grants.serve(held, [], MAX_SLOTS, Why.LATER, now_s)
            return
        space = self.path.space
        need = namespace.grants.demand
        left = self.path.budget_left_bytes()
        allowed = MAX_SLOTS if left is None else left // namespace.home.block_bytes
        evictions, why = 0, Why.FULL
        if need:
            evictions, why = space.room_for(namespace, min(need, allowed))
        if self._commit_batch(namespace, evictions) and evictions:
            space.rest_evictions(namespace)
            why = Why.RESTING
        awake = space.capacity.awake
        held, now_s = namespace.held_among, self._clock()
        self._out += namespace.grants.serve(held, awake, allowed, why, now_s)

    def _commit_batch(self, namespace: NamespaceWriter, evictions: int = 0) -> bool:
        """Commit what was gathered, with evictions. Return True if the index refused that."""
        if not (namespace.batch or evictions):
            return False
        result = namespace.commit_batch(evictions)
        self._tell(namespace, result)  # first: an engine that got its answer knows the rest
        self._out += result.replies
        return result.is_refused

    def _tell(self, namespace: NamespaceWriter, result: BatchResult) -> None:
        """Send events of stored and removed blocks."""
        for number in namespace.clients if result.stored or result.removed else ():
            if result.removed:
                self._send(number, Removed(result.removed))
            if result.stored and self._clients[number].wants_events:
                self._send(number, Stored(result.stored))

    def _take_segments(self) -> None:
        """Go on with the segment that is taken, and begin with one if too much is stored."""
        space = self.path.space
        space.shrink()
        emptied = space.empty_taken()
        if emptied is not None:
            taken, removed = emptied
            self._tell(self.namespaces[taken.name], BatchResult(removed=removed))
        deleted, space.deleted = space.deleted, []
        for gone in deleted:  # before a file of the same name has blocks, which are granted later
            for number in self.namespaces[gone.name].clients:
                self._send(number, SegmentsRemoved([gone.number]))

    def _upkeep(self) -> None:
        """Do what is due about once a second."""
        now_s = self._clock()
        if now_s < self._upkeep_at_s:
            return
        self._upkeep_at_s = now_s + FIGURES_EVERY_S
        if now_s >= self._note_use_at_s:
            self._note_use_at_s = now_s + NOTE_USE_EVERY_S
            for namespace in self.namespaces.values():
                if namespace.clients:
                    namespace.home.note_use(self.path.fs)
                namespace.write_totals()
        self._former.look()
        self._out += self._held.signs_of_life()
        if not self.path.space.is_taking:
            self.path.space.files.mend()
        has_tool = any(client.is_tool for client in self._clients.values())
        if not has_tool:  # which may have more questions about one
            self.path.remove_empty()
        self.path.unused.close_next(now_s, may_close=not has_tool)
        self._send_figures()

    def _send_figures(self) -> None:
        left = self.path.budget_left_bytes()
        reporters = [self._reporter_of(each) for each in self.namespaces.values()]
        path_reporter = min(filter(None, reporters), key=Client.report_order, default=None)
        for namespace, reporter in zip(self.namespaces.values(), reporters, strict=True):
            day = namespace.day_totals()
            for number in sorted(namespace.clients):
                client = self._clients[number]
                figures = TierFigures(
                    namespace.space.used,
                    namespace.home.slots_within(self.path.space.capacity.share_bytes),
                    namespace.evicted_blocks,
                    left,
                    (int(day.is_whole_day), day.written, day.read),
                    client is reporter,
                    client is path_reporter,
                )
                if client.figures != figures:
                    client.figures = figures
                    self._send(number, figures)

    def _reporter_of(self, namespace: NamespaceWriter) -> Client | None:
        """Return the client that reports the metrics of a namespace; None if none exports any."""
        clients = (self._clients[number] for number in namespace.clients)
        exporters = (client for client in clients if client.has_metrics)
        return min(exporters, key=Client.report_order, default=None)

    def _refuse(self, client: Client, hello: Hello, why: RefusedWhy, text: str) -> None:
        log_refusal(hello, why, text)
        self._send(client.number, Refused(why, text))

    def _send(self, client: int, message: FromWriter) -> None:
        self._out.append((client, message))
