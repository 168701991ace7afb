"""Messages to the writer that wait for a namespace which is being opened. The writer's thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ......errors import FINAL_ERRORS, InUseError, KVCascadeError
from ......logs import get_logger
from ...path_messages import Ask, FromNode, Hello, Refused, RefusedWhy, StillOpening
from ..namespace.waiting_grants import Reply
from .writer_questions import refusal, told

OPENING_LIMIT_S = 600.0
"""Longest time in seconds that a message waits."""
MAX_HELD_PER_CLIENT = 16
"""Most messages of one client that wait."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Held:
    client: int
    message: FromNode
    namespace: str
    until_s: float


class HeldMessages:
    """Messages that wait, oldest first. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: list[_Held] = []

    def add(self, client: int, message: FromNode, namespace: str) -> list[Reply]:
        """Let a message wait. Return its answer instead if too many of the client's do."""
        held = _Held(client, message, namespace, self._clock() + OPENING_LIMIT_S)
        if sum(each.client == client for each in self._held) >= MAX_HELD_PER_CLIENT:
            error = InUseError("too many messages wait; ask again later")
            return _give_up(held, error, RefusedWhy.OPENING)
        self._held.append(held)
        return []

    def take(
        self, ended: Mapping[str, KVCascadeError | None]
    ) -> tuple[list[tuple[int, FromNode]], list[Reply]]:
        """Return the messages to handle now, and the answers to those that wait in vain.

        `ended` has the namespaces that are open now, and the errors of those that cannot be opened.
        """
        ready: list[tuple[int, FromNode]] = []
        replies: list[Reply] = []
        now_s, held = self._clock(), self._held
        self._held = []
        for each in held:
            error = ended.get(each.namespace)
            if error is not None:
                replies += _give_up(each, error, why_refused(error))
            elif each.namespace in ended:
                ready.append((each.client, each.message))
            elif now_s < each.until_s:
                self._held.append(each)
            else:
                text = f"{each.namespace} is still being opened; look at the disk of the tier"
                replies += _give_up(each, InUseError(text), RefusedWhy.OPENING)
        return ready, replies

    def signs_of_life(self) -> list[Reply]:
        """Return a message for each client that waits."""
        return [(client, StillOpening()) for client in sorted({each.client for each in self._held})]

    def forget(self, client: int) -> None:
        """Drop the messages of a client that is gone."""
        self._held = [each for each in self._held if each.client != client]


def why_refused(error: KVCascadeError) -> RefusedWhy:
    """Return why a namespace cannot be opened: only the user can mend it, or time may."""
    return RefusedWhy.NAMESPACE if isinstance(error, FINAL_ERRORS) else RefusedWhy.FAILED


def log_refusal(hello: Hello, why: RefusedWhy, text: str) -> None:
    """Log a refusal. One that is repeated every second is the node's to log, once."""
    is_repeated = why is RefusedWhy.FAILED or hello.epoch is not None
    level = logging.DEBUG if is_repeated else logging.WARNING
    _log.log(level, "%s is refused: %s", hello.name, text)


def _give_up(held: _Held, error: KVCascadeError, why: RefusedWhy) -> list[Reply]:
    if isinstance(held.message, Ask):
        return [(held.client, told(held.message.request, refusal(error)))]
    if isinstance(held.message, Hello):
        log_refusal(held.message, why, str(error))
    return [(held.client, Refused(why, str(error)))]
