"""`BlockMessages`: what the writer does with messages about the blocks of the sender's namespace.

A client without a namespace gets the answer of a tier that stores nothing. One thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ......logs import get_logger
from ...block_table import MAX_COMMIT_BLOCKS
from ...path_messages import (
    MAX_CHAIN_HEADS,
    MAX_KEYS_PER_MESSAGE,
    NO_SLOT,
    Bad,
    Chain,
    Commit,
    CommitDone,
    Committed,
    FromWriter,
    Grant,
    Granted,
    KeysListed,
    ListKeys,
    Read,
    Release,
    TierFigures,
    Touch,
    Why,
    pack_slots,
    unpack_slots,
)
from ..namespace.commit_batch import CommitBatch
from ..namespace.namespace_writer import NamespaceWriter, is_within_limits
from ..path_namespaces import PathNamespaces

GRANT_WAIT_S = 1.0
"""Longest time in seconds that a grant waits for room that is being made."""
USES = (Grant, Read, Touch)
"""Messages that a node sends because its engine has requests."""

_log = get_logger(__name__)


@dataclass(slots=True)
class Client:
    """One connection."""

    number: int
    name: str = "?"
    """Name of the node in logs."""
    namespace: NamespaceWriter | None = None
    wants_events: bool = False
    is_reader: bool = False
    """True if it stores nothing, and is no engine."""
    has_metrics: bool = True
    """True if it exports metrics."""
    is_tool: bool = False
    """True if it has asked a question of a tool."""
    figures: TierFigures | None = None
    """Last figures that were sent to this client."""
    first_use_s: float = math.inf
    """Time of its first message of `USES`."""

    def report_order(self) -> tuple[float, int]:
        """Return the place among the clients that may report the tier; the smallest one reports.

        An engine without requests exports nothing, so one that has used the tier goes first. Later
        uses change no order, because the last values of an idle reporter stay in sums.
        """
        return self.first_use_s, self.number


Handle = Callable[[Client, Any], None]
"""Function that takes a message of a client."""


class BlockMessages:
    """Handlers of grants, commits, uses and lists of blocks, by the type of the message."""

    def __init__(
        self,
        path: PathNamespaces,
        clock: Callable[[], float],
        commit_batch: Callable[[NamespaceWriter], object],
        send: Callable[[int, FromWriter], None],
    ) -> None:
        """`clock` returns monotonic seconds. `commit_batch` commits a namespace's batch. `send`
        takes the number of a client and a message."""
        self._path = path
        self._clock = clock
        self._commit_batch = commit_batch
        self._send = send
        self.handlers: dict[type, Handle] = {
            Grant: self._grant,
            Commit: self._commit,
            Release: self._release,
            Bad: self._bad,
            Touch: self._touch,
            Read: self._read,
            ListKeys: self._list,
            Chain: self._chain,
        }

    def _grant(self, client: Client, message: Grant) -> None:
        namespace = client.namespace
        if namespace is not None and is_within_limits(message.keys):
            until_s = self._clock() + GRANT_WAIT_S
            if namespace.add_grant(client.number, message, until_s):
                return
        none = pack_slots([NO_SLOT] * len(message.keys))
        self._send(client.number, Granted(message.request, 0, none, Why.LATER))

    def _commit(self, client: Client, message: Commit) -> None:
        if client.namespace is None or not is_within_limits(message.keys):
            outcomes = bytes([Committed.STALE]) * len(message.keys)
            self._send(client.number, CommitDone(message.request, outcomes))
            return
        self._batch_for(client.namespace, message).add(client.number, message)

    def _release(self, client: Client, message: Release) -> None:
        if client.namespace is None:
            return
        namespace, space = client.namespace, self._path.space
        own = namespace.space.release(client.number, unpack_slots(message.slots).tolist())
        if not message.has_failed:
            return
        for path in {
            number % len(self._path.roots)
            for number in {slot // namespace.space.slots_per_segment for slot in own}
            if not space.take_if_lost(namespace, number)
        }:
            _log.warning(
                "path %s takes no writes for a while: a write failed", self._path.roots[path]
            )
            space.capacity.rest(path)

    def _bad(self, client: Client, message: Bad) -> None:
        if client.namespace is not None and is_within_limits(message.keys):
            self._batch_for(client.namespace, message).add_bad(message)

    def _batch_for(self, namespace: NamespaceWriter, message: Commit | Bad) -> CommitBatch:
        """Return a batch with room for a message. The index has no room for a larger one."""
        if namespace.batch.blocks + len(message.keys) > MAX_COMMIT_BLOCKS:
            self._commit_batch(namespace)
        return namespace.batch

    def _touch(self, client: Client, message: Touch) -> None:
        if client.is_reader:  # its reads are no uses
            return
        most = MAX_CHAIN_HEADS if message.is_chain else MAX_KEYS_PER_MESSAGE
        if client.namespace is not None and is_within_limits(message.keys, most):
            client.namespace.touch(message)

    def _read(self, client: Client, message: Read) -> None:
        if client.namespace is not None:
            client.namespace.add_read(message.read_bytes)

    def _list(self, client: Client, message: ListKeys) -> None:
        namespace = client.namespace
        keys = [] if namespace is None else namespace.keys_after(message.after, message.limit)
        self._send(client.number, KeysListed(message.after, keys))

    def _chain(self, client: Client, message: Chain) -> None:
        if client.namespace is not None:
            client.namespace.prompts.note(message)
