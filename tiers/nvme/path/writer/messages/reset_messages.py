"""Resets of one namespace, and what the writer does with messages that ask for them. One thread."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from .....base import new_reset_mark
from ...path_messages import (
    MAX_KEYS_PER_MESSAGE,
    MAX_RESET_EVENTS,
    Epoch,
    FromWriter,
    Removed,
    Reset,
)

if TYPE_CHECKING:
    from ..namespace.namespace_writer import NamespaceWriter
    from .block_messages import Client

MAX_RESET_MARKS = 64
"""Number of marks of resets that are remembered."""


class WaitingResets:
    """Resets that the block table could not take yet; false if there are none."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, Reset]] = []
        """Clients, and their messages; each has a mark."""
        self.retry_at_s = -math.inf
        """Time of the next attempt, after the table refused one."""
        self._begun: deque[int] = deque(maxlen=MAX_RESET_MARKS)
        """Marks of resets that were begun, oldest first. A successor of this writer knows none: it
        carries a mark out again."""

    def __len__(self) -> int:
        return len(self.waiting)

    def was_begun(self, mark: int) -> bool:
        """Return True if a reset with this mark waits, or was carried out."""
        return mark in self._begun

    def add(self, client: int, message: Reset) -> None:
        """Let a reset with a mark wait."""
        self._begun.append(message.mark)
        self.waiting.append((client, message))

    def take(self) -> list[tuple[int, Reset]]:
        """Return all, because they were carried out; none waits any more."""
        waiting, self.waiting = self.waiting, []
        return waiting

    def leave(self, client: int) -> None:
        """Forget the resets of a client."""
        self.waiting = [each for each in self.waiting if each[0] != client]


class ResetMessages:
    """The handler of `Reset`."""

    def __init__(
        self,
        clients: Mapping[int, Client],
        clock: Callable[[], float],
        commit_batch: Callable[[NamespaceWriter], object],
        send: Callable[[int, FromWriter], None],
    ) -> None:
        """`clock` returns monotonic seconds. `commit_batch` commits a namespace's batch. `send`
        takes the number of a client."""
        self._clients = clients
        self._clock = clock
        self._commit_batch = commit_batch
        self._send = send

    def receive(self, client: Client, message: Reset) -> None:
        """Begin a reset, unless the namespace had one with this mark."""
        namespace = client.namespace
        if namespace is None:
            return
        message = msgspec.structs.replace(message, mark=message.mark or new_reset_mark())
        was_begun = namespace.resets.was_begun(message.mark)
        if was_begun and not namespace.is_resetting:
            self._send(client.number, Epoch(namespace.epoch, message.request))
            return
        self._commit_batch(namespace)
        namespace.resets.add(client.number, message)
        self.proceed(namespace, is_asked=not was_begun)

    def proceed(self, namespace: NamespaceWriter, *, is_asked: bool = False) -> None:
        """Reset a namespace, and answer everybody who asked for it once it is durable.

        See `NamespaceWriter.reset`.
        """
        if not namespace.is_resetting:
            waiting = namespace.resets.waiting
            own = {client for client, each in waiting if not each.is_passed_on}
            self._name_blocks(namespace, namespace.clients - own)
        if not namespace.reset(self._clock(), is_asked=is_asked):
            return
        done = namespace.resets.take()
        for client, each in done:
            self._send(client, Epoch(namespace.epoch, each.request))
        marks = [each.mark for _, each in done]
        for number in namespace.clients - {client for client, _ in done}:
            self._send(number, Epoch(namespace.epoch, marks=marks))

    def _name_blocks(self, namespace: NamespaceWriter, others: set[int]) -> None:
        """Name the blocks that a reset removes to those of the nodes that publish events."""
        wanting = [number for number in others if self._clients[number].wants_events]
        last, left = b"", MAX_RESET_EVENTS
        while wanting and left > 0:
            keys = namespace.keys_after(last, min(left, MAX_KEYS_PER_MESSAGE))
            if not keys:
                return
            for number in wanting:
                self._send(number, Removed(keys))
            last, left = keys[-1], left - len(keys)
